"""What each key may hold: closed lists, number ranges, and the parameters of each policy loss. Data only, stdlib only.

The tables of objective names repeat what ``akl_dist.objective`` registers, so that validation needs no torch; a test
compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

DIRECTIONS = ("forward", "reverse", "symmetric")
DTYPES = ("float32", "bfloat16")
CODE_RECIPES = ("mbpp", "mbpp_sanitized", "humaneval")  # golds are tests: verify.kind=code
GENERATED_RECIPES = ("tiny", "multi_solution", "continual", "tiny_tir")  # problems are made up on the spot

CHOICES: dict[str, tuple[str, ...]] = {
    "cluster.device": ("cpu", "cuda"),
    "cluster.layout": ("colocated", "separate"),
    "model.dtype": DTYPES,
    "model.attention": ("sdpa", "eager", "flash_attention_2"),
    "data.recipe": ("tiny", "multi_solution", "continual", "tiny_tir", "gsm8k", "math", "gsm8k_math", "math500", "aime24",
                    "aime25", "dapo_math", "deepscaler", "mbpp", "mbpp_sanitized", "humaneval", "verl", "generic", "mixture"),
    "data.overlong": ("drop", "error"),
    "data.invalid_gold": ("error", "drop"),
    "data.contaminated": ("keep", "drop", "error"),
    "rollout.dtype": DTYPES,
    "rollout.tools.call": ("fenced", "hermes"),
    "rollout.tools.role": ("tool", "user"),
    "rollout.tools.interpreter": ("stateless", "persistent"),
    "rollout.tools.void_turns": ("keep", "mask_turn", "mask_response"),
    "verify.kind": ("math", "code", "custom", "http", "environment"),
    "verify.signature": ("akl", "verl", "openrlhf"),
    "roles.rule": ("majority", "position", "entropy", "verifier", "random_span", "random_tokens"),
    "roles.position": ("marker", "tail"),
    "roles.code_answer": ("signature_and_return", "program"),
    "roles.entropy_source": ("reference", "policy_forward", "rollout_topk"),
    "objective.anchor": ("old", "rollout"),
    "objective.aggregation": ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"),
    "objective.kl.direction_reasoning": DIRECTIONS,
    "objective.kl.direction_answer": DIRECTIONS,
    "objective.advantage": ("grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae"),
    "objective.kl.estimator": ("sampled", "topk", "full"),
    "objective.kl.state_weight": ("token", "cumulative", "none"),
    "objective.kl.placement": ("loss", "reward"),
    "objective.kl.strength": ("roles", "equal", "matched"),
    "objective.kl.kl_denominator": ("tokens", "role"),
    "objective.cokl.estimator": ("paper", "group", "reference_buffer"),
    "objective.cokl.prompts": ("same", "anchor_dataset"),
    "objective.correction.kind": ("auto", "none", "tis", "icepop", "mis"),
    "objective.correction.level": ("token", "sequence"),
}

# (key, lowest, highest, whether the lowest itself is allowed); every number is also finite.
RANGES: tuple[tuple[str, float, float, bool], ...] = (
    ("seed", 0, 2**63 - 1, True),
    ("steps", 1, math.inf, True),
    ("cluster.num_nodes", 1, math.inf, True),
    ("cluster.devices_per_node", 0, math.inf, True),
    ("cluster.cpus_per_actor", 0, math.inf, False),
    ("cluster.num_cpus", 1, math.inf, True),
    ("cluster.object_store_mib", 80, math.inf, True),  # Ray's own minimum is 75 MiB
    ("cluster.start_timeout_s", 0, math.inf, False),
    ("data.max_prompt_tokens", 1, math.inf, True),
    ("data.limit", 1, math.inf, True),
    ("rollout.num_engines", 1, math.inf, True),
    ("rollout.tensor_parallel_size", 1, math.inf, True),
    ("rollout.prompts_per_step", 1, math.inf, True),
    ("rollout.group_size", 1, math.inf, True),
    ("rollout.temperature", 0.01, math.inf, True),  # vLLM raises smaller ones to this, or samples greedily
    ("rollout.max_response_tokens", 1, math.inf, True),
    ("rollout.kv_cache_gib", 0, math.inf, False),
    ("rollout.gpu_memory_utilization", 0, 1, False),
    ("rollout.max_num_seqs", 1, math.inf, True),
    ("rollout.num_threads", 1, 1024, True),
    ("rollout.max_staleness", 0, math.inf, True),
    ("rollout.dynamic_sampling_rounds", 0, math.inf, True),
    ("rollout.tools.max_turns", 1, math.inf, True),
    ("rollout.tools.max_turn_tokens", 1, math.inf, True),
    ("rollout.tools.max_observation_tokens", 1, math.inf, True),
    ("rollout.tools.num_workers", 1, math.inf, True),
    ("rollout.tools.timeout_s", 0, math.inf, False),
    ("rollout.tools.program_s", 0, math.inf, False),
    ("rollout.timeout_s", 0, math.inf, False),
    ("verify.http_timeout_s", 0, math.inf, False),
    ("verify.http_retries", 0, 10, True),
    ("verify.right_at", -math.inf, math.inf, True),
    ("verify.num_workers", 1, math.inf, True),
    ("verify.timeout_s", 0, math.inf, False),
    ("verify.tasks_per_worker", 1, math.inf, True),
    ("verify.max_faulty_fraction", 0, 1, True),
    ("verify.batch_timeout_s", 0, math.inf, False),
    ("verify.queue_groups", 1, math.inf, True),
    ("roles.entropy_quantile", 0, 1, True),
    ("roles.entropy_window", 1, math.inf, True),
    ("reference.num_workers", 1, math.inf, True),
    ("reference.ranks_per_worker", 1, math.inf, True),
    ("reference.max_tokens_per_batch", 1, math.inf, True),
    ("reference.num_threads", 1, 1024, True),
    ("reference.timeout_s", 0, math.inf, False),
    ("objective.aggregation_norm", 1, math.inf, True),
    ("objective.gamma", 0, 1, False),
    ("objective.gae_lambda", 0, 1, True),
    ("objective.overlong_buffer_tokens", 0, math.inf, True),
    ("objective.overlong_penalty", 0, math.inf, True),
    ("objective.entropy_coef", 0, math.inf, True),
    ("objective.kl.beta_reasoning", 0, math.inf, True),
    ("objective.kl.beta_answer", 0, math.inf, True),
    ("objective.kl.topk", 1, math.inf, True),
    ("objective.kl.adaptive_target", 0, math.inf, False),
    ("objective.kl.adaptive_horizon", 1, math.inf, True),
    ("objective.cokl.beta", 0, math.inf, True),
    ("objective.cokl.reference_samples", 1, math.inf, True),
    ("objective.cokl.clip", 0, 1, False),
    ("objective.cokl.min_ess_fraction", 0, 1, True),
    ("objective.correction.low", 0, math.inf, True),
    ("objective.correction.high", 0, math.inf, False),
    ("learner.num_ranks", 1, math.inf, True),
    ("learner.lr", 0, math.inf, True),
    ("learner.warmup_steps", 0, math.inf, True),
    ("learner.weight_decay", 0, math.inf, True),
    ("learner.max_grad_norm", 0, math.inf, False),
    ("learner.updates_per_step", 1, math.inf, True),
    ("learner.max_tokens_per_micro_batch", 1, math.inf, True),
    ("learner.logprob_chunk_tokens", 1, math.inf, True),
    ("learner.param_persistence_threshold", 0, math.inf, True),
    ("learner.num_threads", 1, 1024, True),
    ("learner.timeout_s", 0, math.inf, False),
    ("critic.lr", 0, math.inf, True),
    ("critic.clip", 0, math.inf, False),
    ("critic.warmup_steps", 0, math.inf, True),
    ("critic.max_grad_norm", 0, math.inf, False),
    ("weight_sync.bucket_mib", 0, math.inf, False),
    ("weight_sync.probe_sequences", 1, math.inf, True),
    ("weight_sync.max_gap", 0, math.inf, False),
    ("weight_sync.mean_gap", 0, math.inf, False),
    ("weight_sync.timeout_s", 0, math.inf, False),
    ("checkpoint.every", 0, math.inf, True),
    ("checkpoint.keep", 1, math.inf, True),
    ("evaluate.every", 0, math.inf, True),
    ("evaluate.samples", 1, math.inf, True),
    ("evaluate.num_problems", 0, math.inf, True),
    ("evaluate.seed", 0, 2**63 - 1, True),
)


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


# Parameter -> (test of a value, the rule in words).
Rule = tuple[Callable[[Any], bool], str]

_FROM_ZERO_TO_ONE: Rule = (lambda v: _number(v) and 0 <= v <= 1, "a number from 0 to 1")
_NOT_NEGATIVE: Rule = (lambda v: _number(v) and v >= 0, "a number of at least 0")
_POSITIVE: Rule = (lambda v: _number(v) and v > 0, "a number above 0")
_POSITIVE_OR_NULL: Rule = (lambda v: v is None or (_number(v) and v > 0), "a number above 0, or null")
_ABOVE_ONE_OR_NULL: Rule = (lambda v: v is None or (_number(v) and v > 1), "a number above 1, or null")
_PREFIX_LOSS: dict[str, Rule] = {
    "clip_low": _NOT_NEGATIVE,
    "clip_high": _NOT_NEGATIVE,
    "dual_clip": _POSITIVE_OR_NULL,
    "power": (lambda v: _number(v) and -2 <= v <= 2, "a number from -2 to 2"),
    "clip_space": (lambda v: v in ("log", "ratio"), "log or ratio"),
}
_DIVERGENCE_MASK: dict[str, Rule] = {"delta_low": _NOT_NEGATIVE, "delta_high": _NOT_NEGATIVE, "max_ratio": _POSITIVE}

POLICY_LOSS_PARAMS: dict[str, dict[str, Rule]] = {
    "ppo": {"clip_low": _FROM_ZERO_TO_ONE, "clip_high": _NOT_NEGATIVE, "dual_clip": _ABOVE_ONE_OR_NULL},
    "gspo": {"clip_low": _FROM_ZERO_TO_ONE, "clip_high": _NOT_NEGATIVE},
    "cispo": {
        "clip_low": (lambda v: v is None or (_number(v) and 0 <= v <= 1), "a number from 0 to 1, or null"),
        "clip_high": _NOT_NEGATIVE,
    },
    "ctpo": _PREFIX_LOSS,
    "ctpo_geomean": _PREFIX_LOSS,
    "spo": {"epsilon": _POSITIVE},
    "drpo": {"delta": _POSITIVE},
    "dppo_tv": _DIVERGENCE_MASK,
    "dppo_kl": _DIVERGENCE_MASK,
    "reinforce": {"max_weight": _POSITIVE_OR_NULL},
}

# What clip_space=ratio asks of these parameters beyond their own rules: they are ratios then, not nats.
RATIO_SPACE: dict[str, Rule] = {"clip_low": _FROM_ZERO_TO_ONE, "dual_clip": _ABOVE_ONE_OR_NULL}

# Losses whose trust region is a distance to the policy that sampled, in probabilities: anchor old is another algorithm.
# SPO's is a ratio, so it is measured against either anchor.
ROLLOUT_ANCHORED: tuple[str, ...] = ("drpo", "dppo_tv", "dppo_kl")
