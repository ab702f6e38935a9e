"""The whole configuration as frozen dataclasses: the only home of defaults. Imports nothing but the standard library.

Keys are read as ``group.key`` on the command line (``learner.lr=1e-6``). Lengths are tokens, times are seconds, sizes name
their unit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ClusterConfig:
    address: str = "auto"  # auto (RAY_ADDRESS, else own running cluster, else local) | local | an address
    device: str = "cpu"  # cpu | cuda: what engines, reference and learner run on
    layout: str = "colocated"  # colocated | separate: whether roles share bundles or own their devices
    num_nodes: int = 1
    devices_per_node: int = 0  # accelerators per node; 0 on CPU
    cpus_per_actor: float = 1.0  # CPU share of one bundle
    num_cpus: int | None = None  # CPUs of a local cluster; null = the machine's
    object_store_mib: int = 512  # shared memory of a local cluster
    start_timeout_s: float = 240.0  # until every actor has answered once


@dataclass(frozen=True)
class ModelConfig:
    path: str = "tiny"  # "tiny" or "tiny_tir" (embedded), a local folder, or a hub name
    dtype: str = "float32"  # float32 | bfloat16: learner and reference weights
    attention: str = "sdpa"  # sdpa | eager | flash_attention_2


@dataclass(frozen=True)
class ColumnsConfig:
    prompt: str | None = None  # null = the recipe's own column
    answer: str | None = None
    id: str | None = None


@dataclass(frozen=True)
class DataConfig:
    recipe: str = "tiny"  # one of choices.CHOICES: gsm8k | math | dapo_math | mbpp | verl (its Parquet layout) | generic | ...
    name: str | None = None  # hub data set, instead of the recipe's own
    path: str | None = None  # local JSONL or Parquet file, instead of the hub
    split: str = "train"
    eval_path: str | None = None
    eval_split: str = "test"
    anchor_path: str | None = None  # prompts of objective.cokl.prompts=anchor_dataset, of the same recipe
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    system_prompt: str | None = None
    prompt_suffix: str | None = None  # null = the recipe's own instruction after each problem
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # for the chat template, e.g. {enable_thinking: false}
    mixture: dict[str, Any] = field(default_factory=dict)  # several sources: {gsm8k: {weight: 2}, mbpp: {verifier: code}}
    max_prompt_tokens: int = 64
    overlong: str = "drop"  # drop (counted and reported) | error
    invalid_gold: str = "error"  # error | drop (counted and listed by id): golds that the verifier cannot judge
    contaminated: str = "keep"  # keep (counted and listed) | drop | error: training prompts that are evaluated on
    limit: int | None = None  # use only the first N training rows


@dataclass(frozen=True)
class ToolsConfig:
    """Conversations with an environment; ``max_response_tokens`` bounds all of a response, what the environment writes included."""

    environment: str | None = None  # null = one turn | python (a tool in the sandbox) | module:Class of one's own
    params: dict[str, Any] = field(default_factory=dict)  # keyword arguments of that class
    max_turns: int = 5  # answers of the environment in one response; the turn after the last one is final
    max_turn_tokens: int | None = None  # sampled in one turn; null = what is left of max_response_tokens
    max_observation_tokens: int = 256  # of one answer of the environment; the middle of a longer one is cut out
    call: str = "fenced"  # how the python tool is called: fenced (a code block that ends the turn) | hermes (<tool_call> JSON)
    role: str = "tool"  # role of the environment's messages in the chat template: tool | user
    interpreter: str = "stateless"  # stateless (a fresh process a call) | persistent (one a response)
    void_turns: str = "keep"  # keep | mask_turn | mask_response: turns with neither a call nor a final answer
    num_workers: int = 1  # environment processes of each engine
    timeout_s: float = 10.0  # of one step of an environment
    program_s: float = 5.0  # wall clock of one program of the python tool


@dataclass(frozen=True)
class RolloutConfig:
    num_engines: int = 1
    tensor_parallel_size: int = 1
    prompts_per_step: int = 8
    group_size: int = 4
    temperature: float = 1.0
    max_response_tokens: int = 64
    dtype: str = "float32"  # weights and activations of the engines
    kv_cache_gib: float = 1.0  # CPU only
    gpu_memory_utilization: float = 0.4  # CUDA only
    max_num_seqs: int = 256
    enforce_eager: bool = True
    num_threads: int = 1
    max_staleness: int = 0  # policy versions between sampling and the first update on the sample
    dynamic_sampling_rounds: int = 0  # further draws that replace groups of zero spread (DAPO); 0 = keep them
    replay: str | None = None  # folder of rollout dumps to train from, without engines
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    timeout_s: float = 600.0


@dataclass(frozen=True)
class VerifyConfig:
    kind: str = "math"  # math | code (golds are tests; programs run in the sandbox) | custom | http | environment (its own score)
    custom: str | None = None  # module:function of kind custom, run in the graders
    signature: str = "akl"  # how it is called: akl (keywords; see docs) | verl (compute_score) | openrlhf (reward_func)
    http_url: str | None = None  # endpoint of kind http
    http_timeout_s: float = 10.0  # of one request
    http_retries: int = 2  # further tries after a failure to connect, a time-out, 429 or 5xx
    http_token_env: str | None = None  # environment variable with a bearer token
    right_at: float = 1.0  # a number from custom, http or environment counts as right from here on
    terms: dict[str, Any] = field(default_factory=dict)  # more rewards beside kind's: {brief: {custom: "m:f", weight: 0.1}}
    num_workers: int = 1  # killable grader processes
    timeout_s: float = 5.0  # wall clock of one judgement; of code: of the programs of one judgement together
    allow_unsandboxed: bool = False  # run programs (code, the python tool) where nothing isolates them
    tasks_per_worker: int = 2000  # a grader process is recycled after this many
    max_faulty_fraction: float = 0.2  # share of timeout, error and invalid_gold that stops the run
    batch_timeout_s: float = 300.0
    queue_groups: int = 256  # finished groups that may wait for a grader before sampling waits for them


@dataclass(frozen=True)
class RolesConfig:
    rule: str = "majority"  # majority | position | entropy | verifier | random_span | random_tokens
    position: str = "marker"  # marker (what encloses the answer) | tail (the last tenth of the final section)
    code_answer: str = "signature_and_return"  # of a program: signature_and_return | program (only after a think section)
    entropy_source: str = "reference"  # reference | policy_forward (one more pass of the learner) | rollout_topk (the engine's)
    entropy_quantile: float = 0.5
    entropy_window: int = 9


@dataclass(frozen=True)
class ReferenceConfig:
    num_workers: int = 1
    ranks_per_worker: int = 1  # devices that hold one copy of the model together; 1 = the whole model on one device
    max_tokens_per_batch: int = 1024
    num_threads: int = 1
    timeout_s: float = 600.0


@dataclass(frozen=True)
class KLConfig:
    beta_reasoning: float = 1e-3
    beta_answer: float = 4e-2
    direction_reasoning: str = "forward"  # forward = KL(ref||pi) | reverse = KL(pi||ref) | symmetric
    direction_answer: str = "reverse"
    estimator: str = "topk"  # sampled | topk | full (exact over the vocabulary)
    topk: int = 20  # reference's most probable tokens that estimator topk looks at
    state_weight: str = "token"  # token | cumulative | none (unweighted: what GRPO code in the wild does)
    max_weight: float | str | None = "auto"  # truncation of the importance weight; auto = 2, or 5 if cumulative; null = none
    placement: str = "loss"  # loss | reward (k1 return-to-go in the advantages: on-policy the exact full-sequence reverse KL)
    kl_denominator: str = "tokens"  # tokens (shared with the policy loss) | role (tokens of the same role)
    strength: str = "roles"  # roles (each its own beta) | equal (both beta_answer) | matched (both
    # f * beta_answer + (1 - f) * beta_reasoning, f = the update's share of answer tokens: the total strength of AKL)
    adaptive_target: float | None = None  # nats a token that an adaptive coefficient of both betas aims at; null = constant
    adaptive_horizon: int = 100  # steps in which that coefficient may change by a factor of about e^0.2


@dataclass(frozen=True)
class CoKLConfig:
    beta: float = 0.0  # 0 = no term
    estimator: str = "group"  # paper | group | reference_buffer
    reference_samples: int = 4  # responses per prompt drawn once from the reference (paper, reference_buffer)
    clip: float = 0.2  # window of the paper's sequence-level ratio
    min_ess_fraction: float = 0.5  # weights are tempered until their effective sample size is max(2, this share of n)
    length_normalize: bool = False  # changes the target: log-probabilities per token instead of per sequence
    prompts: str = "same"  # same | anchor_dataset (prompts of data.anchor_path or of the continual recipe's old task)


@dataclass(frozen=True)
class CorrectionConfig:
    kind: str = "auto"  # auto | none | tis | icepop | mis; auto = token tis at 2 where engine and learner dtypes differ
    level: str = "token"  # token | sequence: what the ratio old/mu is taken over
    low: float | None = None  # smallest ratio that counts (icepop, mis)
    high: float = 2.0  # truncation (tis) or largest ratio that counts (icepop, mis)


@dataclass(frozen=True)
class ObjectiveConfig:
    policy_loss: str = "ppo"
    policy_loss_params: dict[str, Any] = field(default_factory=dict)  # e.g. {clip_low: 0.2, clip_high: 0.2}
    policy_loss_module: str | None = None  # importable module of one's own that registers policy_loss
    anchor: str = "old"  # old | rollout
    aggregation: str = "token_mean"  # token_mean | seq_mean_token_mean | seq_mean_token_sum_norm
    aggregation_norm: int = 8192  # constant of seq_mean_token_sum_norm
    advantage: str = "grpo"  # grpo | rloo | reinforce_pp | reinforce_pp_baseline | gae (with a critic)
    normalize_std: bool = True  # grpo and rloo: divide by the group's standard deviation
    gamma: float = 1.0  # discount a token (gae)
    gae_lambda: float = 1.0
    overlong_buffer_tokens: int = 0  # last tokens of the length limit in which the reward falls by up to overlong_penalty; 0 = off
    overlong_penalty: float = 1.0
    entropy_coef: float = 0.0
    kl: KLConfig = field(default_factory=KLConfig)
    cokl: CoKLConfig = field(default_factory=CoKLConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)


@dataclass(frozen=True)
class LearnerConfig:
    num_ranks: int = 2
    lr: float = 1e-6
    warmup_steps: int = 0  # optimizer steps of linear warm-up
    weight_decay: float = 0.0
    adam_betas: tuple[float, float] = (0.9, 0.999)
    max_grad_norm: float = 1.0
    updates_per_step: int = 1
    max_tokens_per_micro_batch: int = 1024  # attention over a packed row grows with its square where there is no flash kernel
    logprob_chunk_tokens: int = 1024  # rows of [chunk, vocabulary] logits alive at once
    gradient_checkpointing: bool = False
    offload_optimizer: bool = False
    param_persistence_threshold: int = 0  # ZeRO-3: smaller parameters stay whole on every rank
    num_threads: int = 1
    timeout_s: float = 900.0


@dataclass(frozen=True)
class CriticConfig:
    """The value model of objective.advantage=gae; batches, ranks, threads and limits are the learner's."""

    path: str | None = None  # backbone; null = model.path
    lr: float = 1e-5
    clip: float | None = 0.2  # window of the value loss around the old values; null = unclipped
    warmup_steps: int = 0  # loop steps in which the critic alone trains
    max_grad_norm: float = 1.0
    whiten: bool = True  # advantages to mean 0 and variance 1 over the step's tokens


@dataclass(frozen=True)
class WeightSyncConfig:
    bucket_mib: float = 128.0  # the object store holds two at a time
    probe_sequences: int = 8
    max_gap: float | None = 1e-3  # nats, largest allowed; null = no bound on the maximum (bfloat16)
    mean_gap: float = 1e-3  # nats, mean
    timeout_s: float = 600.0


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 0  # steps; 0 = only at the end and on SIGTERM
    keep: int = 2


@dataclass(frozen=True)
class EvaluateConfig:
    every: int = 0  # steps; 0 = before and after training
    samples: int = 4  # k of avg@k
    num_problems: int | None = 256  # null = all there are
    seed: int = 1234  # the same sampling seeds at every evaluation


@dataclass(frozen=True)
class JournalConfig:
    tensorboard: bool = True
    dump_rollouts: bool = True


@dataclass(frozen=True)
class Config:
    experiment: str = "default"
    seed: int = 0
    steps: int = 10
    run_id: str | None = None  # null = a new timestamp with a suffix
    output_dir: str = "outputs"
    resume: str = "auto"  # auto | never | path of a checkpoint
    dry_run: bool = False
    debug: bool = False
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    roles: RolesConfig = field(default_factory=RolesConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    journal: JournalConfig = field(default_factory=JournalConfig)
