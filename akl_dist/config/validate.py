"""Rules on a composed configuration: all problems are collected and raised once, each with key, value, rule and remedy.

Stdlib only, so that a mistake is answered in a second, before anything is started. What this machine lacks is not a
mistake in the configuration: see cluster.placement.lacks.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from akl_dist.config import models, typed
from akl_dist.config.choices import CHOICES, CODE_RECIPES, GENERATED_RECIPES, POLICY_LOSS_PARAMS, RANGES, RATIO_SPACE
from akl_dist.config.own_loss import own_loss_problems
from akl_dist.config.problems import Problems, Unread, local_data
from akl_dist.config.problems import problem as _problem
from akl_dist.config.schema import Config
from akl_dist.config.validate_data import data_problems, data_unread, data_warnings
from akl_dist.config.validate_objective import objective_problems, objective_warnings, unread_keys
from akl_dist.config.validate_roles import roles_problems, roles_unread
from akl_dist.config.validate_rollout import rollout_problems, rollout_unread, rollout_warnings
from akl_dist.config.validate_verify import judges_code, verify_problems, verify_unread, verify_warnings
from akl_dist.contract.errors import ConfigError, DataError, ModelError, UserError, nearest

FLOAT32_GAP = 1e-3  # nats; engines and learner in float32 agree to about 1e-5
BFLOAT16_MEAN_GAP = 0.05  # nats; the maximum over thousands of bfloat16 tokens is unbounded in practice
_DUMP = re.compile(r"step_(\d+)\.parquet")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=,+-]*")


def validate(config: Config) -> None:
    """Check every rule.

    Raises:
        ConfigError: all problems; members are UserError, ModelError (model.path) or DataError (files of data and rollout).
    """
    problems = [*_choices(config), *_ranges(config)]
    wrong = {problem.subject for problem in problems}
    later = [*_names(config), *_files(config), *_devices(config), *_batch(config), *_lengths(config), *_precision(config),
             *_policy_loss(config), *objective_problems(config), *data_problems(config), *roles_problems(config),
             *rollout_problems(config), *verify_problems(config), *_limits(config), *_unused(config)]
    problems += [problem for problem in later if problem.subject not in wrong]  # a value out of range breaks sums, too
    problems += [problem for problem in _model(config) if problem.subject not in wrong]
    if problems:
        raise ConfigError(problems)


def warnings(config: Config) -> list[str]:
    """Settings that are allowed and probably not meant, one sentence each."""
    found: list[str] = []
    rollout = config.rollout
    if rollout.prompts_per_step % rollout.num_engines:
        found.append(f"rollout.prompts_per_step={rollout.prompts_per_step} does not divide by rollout.num_engines="
                     f"{rollout.num_engines}: some engines idle at the end of every step.")
    if rollout.dtype != config.model.dtype:
        found.append(f"rollout.dtype={rollout.dtype} and model.dtype={config.model.dtype} differ: engine and learner "
                     "log-probs then differ, too.")
    found += objective_warnings(config)
    found += data_warnings(config)
    found += verify_warnings(config)
    found += rollout_warnings(config)
    if (judges_code(config) or config.rollout.tools.environment == "python") and config.verify.allow_unsandboxed:
        found.append("verify.allow_unsandboxed=true: where this machine cannot isolate them, generated programs run with this "
                     "user's rights and network.")
    if config.learner.lr == 0:
        found.append("learner.lr=0: the weights never change.")
    if config.evaluate.num_problems == 0:
        found.append("evaluate.num_problems=0: no evaluation before, during or after training.")
    elif rollout.replay is not None:
        found.append(f"rollout.replay={rollout.replay}: recorded rollouts are trained on, so there is no evaluation "
                     f"(evaluate.num_problems={config.evaluate.num_problems} has no effect) and no weight sync.")
    judged = rollout.prompts_per_step * rollout.group_size / config.verify.num_workers * config.verify.timeout_s
    if config.verify.batch_timeout_s < 0.02 * judged:
        found.append(f"verify.batch_timeout_s={config.verify.batch_timeout_s:g} ends a batch in which 2 % of the judgements "
                     f"time out (each {config.verify.timeout_s:g} s, {config.verify.num_workers} workers).")
    return found


def not_run_yet(config: Config) -> list[str]:
    """Settings that compose, validate and are planned, but that no worker carries out yet; a real run must refuse them."""
    found: list[str] = []
    if config.reference.ranks_per_worker > 1:
        found.append(f"reference.ranks_per_worker={config.reference.ranks_per_worker}: a reference model sharded over several "
                     "devices is laid out and planned, not run yet.")
    trained = {"model.path": config.model.path}
    if config.objective.advantage == "gae" and config.critic.path is not None:
        trained["critic.path"] = config.critic.path
    for key, path in trained.items():
        model = models.sizes(path)
        if model is not None and model.num_experts:
            found.append(f"{key}={path}: a mixture of {model.num_experts} experts is laid out and planned, not trained yet.")
    return found


def _choices(config: Config) -> Problems:
    for key, valid in CHOICES.items():
        value = typed.value_of(config, key)
        if value not in valid:
            close = nearest(str(value), valid) or (valid[0] if len(valid) == 1 else None)
            rule = f"one of {', '.join(valid)}" if len(valid) > 1 else f"{close} (the only one so far)"
            yield _problem(key, value, rule, f"Write {key}={close}." if close else "Choose one of them.")


def _ranges(config: Config) -> Problems:
    for key, low, high, inclusive in RANGES:
        value = typed.value_of(config, key)
        if value is None:
            continue  # typed.build lets null pass only where the schema allows it
        above = value >= low if inclusive else value > low
        if not (above and value <= high and math.isfinite(value)):
            rule = f"{'at least' if inclusive else 'above'} {low:g}" + (f" and at most {high:g}" if high < math.inf else "")
            yield _problem(key, value, f"a number {rule}", f"Give {key} a number {rule}.")
    for index, beta in enumerate(config.learner.adam_betas):
        if not 0 <= beta < 1:
            yield _problem("learner.adam_betas", list(config.learner.adam_betas), "two numbers from 0 to below 1",
                           f"Mend number {index + 1}; [0.9, 0.999] is usual.")


def _names(config: Config) -> Problems:
    if not _NAME.fullmatch(config.experiment):
        yield _problem("experiment", config.experiment, "letters, digits and _ . = , + - (it names a folder)", "Rename it.")
    parts = (config.run_id or "run").split("/")
    if len(parts) > 2 or not all(_NAME.fullmatch(part) for part in parts):
        yield _problem("run_id", config.run_id, "letters, digits and _ . = , + -, one / at most (it names a folder)", "Rename it.")
    for key in ("output_dir", "model.path", "cluster.address"):
        if not typed.value_of(config, key).strip():
            yield _problem(key, typed.value_of(config, key), "a text that is not empty", f"Leave {key} out for its default.")


def _files(config: Config) -> Problems:
    for key in ("data.path", "data.eval_path", "data.anchor_path"):
        yield from local_data(key, typed.value_of(config, key))
    data = config.data
    if data.recipe in ("generic", "verl") and data.path is None and data.name is None and data.eval_path is None:
        yield _problem("data.path", None, f"a file, or data.name, for data.recipe={data.recipe}",
                       "Write data.path=FILE or data.name=HUB_NAME.", DataError)
    if data.path is not None and data.name is not None:
        yield _problem("data.name", data.name, "null beside data.path", "Leave one of the two out.", DataError)
    elif data.recipe in GENERATED_RECIPES and data.name is not None:
        yield _problem("data.name", data.name, f"null with data.recipe={data.recipe}, whose problems are generated: nothing "
                       "reads it", "Leave data.name out, or choose the data set's recipe (data=generic for your own).", DataError)
    if data.recipe in CODE_RECIPES and config.verify.kind == "math":
        yield _problem("verify.kind", config.verify.kind, f"code with data.recipe={data.recipe}, whose golds are tests",
                       "Write verify.kind=code.")
    if config.rollout.replay is not None:
        yield from _replay(config.rollout.replay, config.steps)
    yield from _resume(config.resume)


def _replay(replay: str, steps: int) -> Problems:
    """Enough dumps for the steps; a run that goes on from a checkpoint needs those up to ``steps`` only. What is in the dumps is
    compared by bookkeeping.rollout_dump.check_dumps."""
    folder = Path(replay) / "rollouts" if (Path(replay) / "rollouts").is_dir() else Path(replay)
    numbers = [int(found[1]) for file in folder.glob("step_*.parquet") if (found := _DUMP.fullmatch(file.name))]
    if not numbers:
        yield _problem("rollout.replay", replay, "a run directory with rollout dumps, or its rollouts folder (step_*.parquet)",
                       "Name a run directory that was made with journal.dump_rollouts=true.", DataError)
    elif steps > max(len(numbers), max(numbers)):
        yield _problem("steps", steps, f"at most {len(numbers)}, the dumped steps of rollout.replay={replay}",
                       f"Write steps={len(numbers)}.")


def _resume(resume: str) -> Problems:
    if resume in ("auto", "never"):
        return
    if not Path(resume).is_dir():
        close = nearest(resume, ("auto", "never"))
        yield _problem("resume", resume, "auto, never, or an existing checkpoint folder",
                       f"Write resume={close}." if close else "Check the path.")
    elif not (Path(resume) / "manifest.json").is_file():
        yield UserError("resume", got=f"{resume!r}, a folder without manifest.json", expected="a complete checkpoint folder",
                        remedy="Name a folder such as RUN/checkpoints/step_000012.", stage="config")


def _devices(config: Config) -> Problems:
    cluster = config.cluster
    if cluster.device == "cpu":
        if cluster.devices_per_node:
            yield _problem("cluster.devices_per_node", cluster.devices_per_node, "0 with cluster.device=cpu",
                           "Write cluster.devices_per_node=0, or cluster.device=cuda.")
        for key in ("rollout.tensor_parallel_size", "reference.ranks_per_worker"):
            if typed.value_of(config, key) != 1:
                yield _problem(key, typed.value_of(config, key), "1 with cluster.device=cpu", f"Write {key}=1.")
    elif cluster.devices_per_node < 1:
        yield _problem("cluster.devices_per_node", 0, "at least 1 with cluster.device=cuda", "Write the GPUs of one node.")
    else:
        yield from _gpus(config)
    if cluster.layout == "colocated":
        for key in ("rollout.tensor_parallel_size", "reference.ranks_per_worker"):
            if cluster.device == "cuda" and typed.value_of(config, key) != 1:
                yield _problem(key, typed.value_of(config, key), "1 with cluster.layout=colocated (one bundle per device)",
                               "Write cluster.layout=separate.")
    if cluster.address == "local" and cluster.num_nodes != 1:
        yield _problem("cluster.num_nodes", cluster.num_nodes, "1 with cluster.address=local", "Write cluster.address=auto.")
    if cluster.num_cpus is not None and cluster.address not in ("local", "auto"):
        yield _problem("cluster.num_cpus", cluster.num_cpus, "null with the address of a running cluster", "Leave it out.")


def _gpus(config: Config) -> Problems:
    """GPUs that the roles take against those of the cluster as declared."""
    cluster, rollout, reference = config.cluster, config.rollout, config.reference
    for key in ("rollout.tensor_parallel_size", "reference.ranks_per_worker"):
        if typed.value_of(config, key) > cluster.devices_per_node:
            yield _problem(key, typed.value_of(config, key), f"at most cluster.devices_per_node={cluster.devices_per_node} (one "
                           "engine or reference server stays on one node)", "Use fewer GPUs for one.")
    critics = config.learner.num_ranks if config.objective.advantage == "gae" else 0
    parts = {"engines": 0 if rollout.replay is not None else rollout.num_engines * rollout.tensor_parallel_size,
             "reference": reference.num_workers * reference.ranks_per_worker, "critic": critics,
             "learner": config.learner.num_ranks}
    needed = max(parts.values()) if cluster.layout == "colocated" else sum(parts.values())
    declared = cluster.num_nodes * cluster.devices_per_node
    if needed > declared:
        taken = ", ".join(f"{role} {number}" for role, number in parts.items() if number)
        yield _problem("cluster.num_nodes", cluster.num_nodes, f"at least {math.ceil(needed / cluster.devices_per_node)}: the "
                       f"{cluster.layout} layout takes {needed} GPUs ({taken}), the cluster is declared with {declared}",
                       "Declare more nodes or use fewer devices.")


def _batch(config: Config) -> Problems:
    rollout, learner = config.rollout, config.learner
    prompts, updates = rollout.prompts_per_step, max(learner.updates_per_step, 1)
    if prompts < rollout.num_engines:
        yield _problem("rollout.num_engines", rollout.num_engines, f"at most rollout.prompts_per_step={prompts} (a prompt's "
                       "group stays on one engine)", "Use fewer engines or more prompts.")
    if prompts % updates:
        divisors = [n for n in range(1, prompts + 1) if prompts % n == 0]
        close = min(divisors, key=lambda n: abs(n - updates))
        yield _problem("learner.updates_per_step", updates, f"a divisor of rollout.prompts_per_step={prompts}",
                       f"Write learner.updates_per_step={close}.")
    elif prompts // updates < learner.num_ranks:
        yield _problem("learner.num_ranks", learner.num_ranks, f"at most {prompts // updates}, the prompts of one update "
                       f"({prompts} / {updates})", "Use fewer ranks or updates, or more prompts.")


def _lengths(config: Config) -> Problems:
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    for key in ("learner.max_tokens_per_micro_batch", "reference.max_tokens_per_batch"):
        budget = typed.value_of(config, key)
        if budget < longest:
            yield _problem(key, budget, f"at least {longest}, the longest sequence (data.max_prompt_tokens="
                           f"{config.data.max_prompt_tokens} + rollout.max_response_tokens="
                           f"{config.rollout.max_response_tokens})", f"Write {key}={longest}.")


def _precision(config: Config) -> Problems:
    sync = config.weight_sync
    if "bfloat16" in (config.model.dtype, config.rollout.dtype):
        if sync.max_gap is not None:
            yield _problem("weight_sync.max_gap", sync.max_gap, "null with bfloat16 (single tokens differ by whole nats)",
                           "Write weight_sync.max_gap=null.")
        if not FLOAT32_GAP < sync.mean_gap <= BFLOAT16_MEAN_GAP:
            yield _problem("weight_sync.mean_gap", sync.mean_gap, f"above {FLOAT32_GAP:g} (bfloat16 rounding exceeds it) and at "
                           f"most {BFLOAT16_MEAN_GAP:g} nats", f"Write weight_sync.mean_gap={BFLOAT16_MEAN_GAP:g}.")
    else:
        for key in ("weight_sync.max_gap", "weight_sync.mean_gap"):
            value = typed.value_of(config, key)
            if value is None or value > FLOAT32_GAP:
                yield _problem(key, value, f"at most {FLOAT32_GAP:g} nats with float32", f"Write {key}={FLOAT32_GAP:g}.")
    if config.model.attention == "flash_attention_2" and (config.cluster.device, config.model.dtype) != ("cuda", "bfloat16"):
        yield _problem("model.attention", "flash_attention_2", "sdpa or eager, unless cluster.device=cuda and "
                       "model.dtype=bfloat16", "Write model.attention=sdpa.")


def _policy_loss(config: Config) -> Problems:
    objective = config.objective
    if objective.policy_loss_module is not None:
        yield from own_loss_problems(config)  # its parameters are known when it has been imported
        return
    accepted = POLICY_LOSS_PARAMS.get(objective.policy_loss)
    if accepted is None:
        close = nearest(objective.policy_loss, POLICY_LOSS_PARAMS)
        yield _problem("objective.policy_loss", objective.policy_loss, f"one of {', '.join(POLICY_LOSS_PARAMS)}",
                       f"Write objective.policy_loss={close}." if close else "Choose one of them, or register your own "
                       "(objective.policy_loss_module).")
        return
    for name, value in objective.policy_loss_params.items():
        key = f"objective.policy_loss_params.{name}"
        if name not in accepted:
            close = nearest(name, accepted)
            yield _problem(key, value, f"a parameter of {objective.policy_loss}: {', '.join(accepted)}",
                           f"Write {close}." if close else "Leave it out.")
        elif not accepted[name][0](value):
            yield _problem(key, value, accepted[name][1], f"Give {name} {accepted[name][1]}.")
    if objective.policy_loss_params.get("clip_space") == "ratio":
        for name, (fits, rule) in RATIO_SPACE.items():
            value = objective.policy_loss_params.get(name)
            if value is not None and name in accepted and accepted[name][0](value) and not fits(value):
                yield _problem(f"objective.policy_loss_params.{name}", value, f"{rule} with clip_space=ratio",
                               f"Give {name} {rule}, or leave clip_space out (log).")


def _limits(config: Config) -> Problems:
    verify = config.verify
    if verify.batch_timeout_s <= verify.timeout_s:
        yield _problem("verify.batch_timeout_s", verify.batch_timeout_s, f"above verify.timeout_s={verify.timeout_s:g}: the "
                       "batch must outlast one judgement", "Raise it, or lower verify.timeout_s.")


def _unused(config: Config) -> Problems:
    """Keys that the chosen variant does not read, set to something else than the default: most likely a mistake."""
    cluster = config.cluster
    rules: tuple[Unread, ...] = (
        *unread_keys(config),
        *verify_unread(config),
        *data_unread(config),
        *roles_unread(config),
        *rollout_unread(config),
        ("rollout.gpu_memory_utilization", cluster.device == "cuda", "cluster.device=cuda"),
        ("learner.offload_optimizer", cluster.device == "cuda", "cluster.device=cuda"),
        ("rollout.kv_cache_gib", cluster.device == "cpu", "cluster.device=cpu"),
    )
    for key, read, needed in rules:
        value = typed.value_of(config, key)
        if not read and value != typed.default(key):
            yield _problem(key, value, f"the default unless {needed}: nothing reads it here", f"Leave {key} out, or set {needed}.")


def _model(config: Config) -> Problems:
    model: models.ModelSizes | None = None
    try:
        model = models.sizes(config.model.path)
    except ModelError as error:
        yield error
    if model is not None:
        yield from _model_rules(config, model)
    if config.critic.path is not None and config.objective.advantage == "gae":
        yield from _critic_model(config, config.critic.path, model)


def _model_rules(config: Config, model: models.ModelSizes) -> Problems:
    tensor_parallel = config.rollout.tensor_parallel_size
    if model.num_heads % tensor_parallel:
        yield _problem("rollout.tensor_parallel_size", tensor_parallel, f"a divisor of the model's {model.num_heads} heads",
                       "Use a power of two that divides it.")
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if longest > model.context:
        yield _problem("rollout.max_response_tokens", config.rollout.max_response_tokens, "data.max_prompt_tokens + "
                       f"rollout.max_response_tokens at most {model.context}, the context of {config.model.path}",
                       f"Lower one of the two ({longest} now).")


def _critic_model(config: Config, path: str, policy: models.ModelSizes | None) -> Problems:
    """The value model reads the policy's token ids, so it has to share the vocabulary and hold the longest sequence."""
    key, remedy = "critic.path", "Name a model of the policy's family, or leave critic.path out (the policy's own backbone)."
    if not path.strip():
        yield _problem(key, path, "a text that is not empty, or null", remedy)
        return
    try:
        critic = models.sizes(path)
    except ModelError as error:
        yield ModelError(key, got=error.got, expected=error.expected, remedy=error.remedy, stage=error.stage)
        return
    if critic is None:
        return
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if policy is not None and critic.vocabulary != policy.vocabulary:
        yield _problem(key, path, f"a model with the {policy.vocabulary:,} token ids of model.path={config.model.path} (this one "
                       f"has {critic.vocabulary:,})", remedy, ModelError)
    elif longest > critic.context:
        yield _problem(key, path, f"a context of at least {longest} tokens, data.max_prompt_tokens + rollout.max_response_tokens "
                       f"(this one has {critic.context})", "Lower one of the two, or name another model.", ModelError)
