"""The text that ``dry_run=true`` prints: objective, roles and devices, batch arithmetic, what this machine lacks. Stdlib only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from akl_dist.cluster.placement import ROLES, Layout
from akl_dist.config import models
from akl_dist.config.mixture import mixture_sources, shares, verifiers
from akl_dist.config.resolve import kl_roles, resolved_objective
from akl_dist.config.schema import Config, KLConfig, RolesConfig

UNITS = {"rollout": "engine", "verify": "grader", "reference": "process", "critic": "ZeRO-3 rank",
         "learner": "ZeRO-3 rank"}


def plan_text(config: Config, plan: Layout, *, lacking: Sequence[str] = (), notes: Sequence[str] = ()) -> str:
    """The plan of a run, as text.

    Args:
        plan: ``placement.layout(config)``.
        lacking: what this machine does not have (cluster, accelerators, hub files), one sentence each.
        notes: warnings about the configuration, one sentence each.
    """
    blocks = [
        f"plan of {config.experiment}: {config.steps} steps",
        table(["what", "value"], _model_rows(config)),
        f"layout {config.cluster.layout} on {config.cluster.device}, cluster {config.cluster.address}: "
        f"{_count(len(plan.bundles), 'bundle')}, {_number(plan.demand['CPU'])} CPUs, {_number(plan.demand['GPU'])} GPUs",
        table(["role", "processes", "bundles", "CPUs each", "GPUs each", "threads each"], _role_rows(plan)),
        "busy threads by phase: " + "; ".join(f"{phase} {threads}" for phase, threads in plan.phase_threads().items()),
        "one step",
        table(["what", "value"], batch_rows(config)),
    ]
    if notes:
        blocks.append("\n".join(["notes", *(f"  - {note}" for note in notes)]))
    blocks.append("\n".join(["this machine lacks", *(f"  - {item}" for item in lacking)]) if lacking else
                  "this machine lacks nothing that was checked")
    return "\n\n".join(blocks)


def _model_rows(config: Config) -> list[tuple[str, str]]:
    sizes = models.sizes(config.model.path)
    size = "sizes unknown here" if sizes is None else (
        f"{_large(sizes.num_parameters)} parameters, {sizes.num_layers} layers, vocabulary {sizes.vocabulary:,}")
    return [
        ("model", f"{config.model.path} ({size}), {config.model.dtype}, engines {config.rollout.dtype}"),
        ("data", _data(config)),
        ("verifier", _verifier(config)),
        *_objective_rows(config),
        ("token roles", _roles(config)),
    ]


def _data(config: Config) -> str:
    data = config.data
    if data.mixture:
        return ", ".join(f"{name} {float(share):.0%}" for name, share in shares(mixture_sources(data.mixture)).items())
    return data.recipe + (f" from {data.path or data.name}" if data.path or data.name else "")


def _verifier(config: Config) -> str:
    verify, tools = config.verify, config.rollout.tools
    own = verify.custom or verify.http_url
    what = ", ".join(sorted(verifiers(config))) + (f" ({own})" if own else "")
    terms = "".join(f" + {term['weight']:g} {name}" for name, term in verify.terms.items())
    with_tools = f"; conversations with {tools.environment}, at most {tools.max_turns} answers" if tools.environment else ""
    return what + terms + with_tools


def _roles(config: Config) -> str:
    """The rule, and what differs from the default way of voting."""
    roles, default = config.roles, RolesConfig()
    names = [name for name in ("position", "entropy_source") if getattr(roles, name) != getattr(default, name)]
    others = {name: getattr(roles, name) for name in names}
    if "code" in verifiers(config):
        others["code_answer"] = roles.code_answer
    return roles.rule + (f" ({', '.join(f'{name} {value}' for name, value in others.items())})" if others else "")


def _objective_rows(config: Config) -> list[tuple[str, str]]:
    """What the learner minimises, ``auto`` resolved and terms of zero weight left out."""
    objective, cokl = resolved_objective(config), config.objective.cokl
    params = ", ".join(f"{name}={_value(value)}" for name, value in objective.policy_loss_params.items()) or "default parameters"
    norm = f"({objective.aggregation_norm})" if objective.aggregation == "seq_mean_token_sum_norm" else ""
    correction = objective.correction
    bounds = (f", at least {correction.low:g}" if correction.low is not None else "") + f", at most {correction.high:g}"
    auto = " (auto)" if config.objective.correction.kind == "auto" else ""
    rows = [
        ("policy loss", f"{objective.policy_loss}({params}), anchor {objective.anchor}, {objective.aggregation}{norm}"),
        ("advantage", _advantage(config)),
        ("rollout correction", f"none{auto}" if correction.kind == "none" else
         f"{correction.kind} of the {correction.level} ratio{bounds}{auto}"),
        *_kl_rows(objective.kl),
    ]
    if cokl.beta > 0:
        paper = cokl.estimator == "paper"
        window = f"clip {cokl.clip:g}" if paper else f"ESS at least {cokl.min_ess_fraction:g} n"
        drawn = "" if cokl.estimator == "group" else f", {cokl.reference_samples} reference responses a prompt"
        scaled = ", log-probs a token" if cokl.length_normalize else ""
        rows.append(("CoKL", f"beta {cokl.beta:g}, {cokl.estimator}{drawn}, {window}{scaled}, prompts {cokl.prompts}"))
    if objective.entropy_coef > 0:
        rows.append(("entropy bonus", f"{objective.entropy_coef:g}"))
    if objective.overlong_buffer_tokens > 0:
        last = f"the last {objective.overlong_buffer_tokens:,} of {config.rollout.max_response_tokens:,} tokens"
        rows.append(("overlong penalty", f"up to {objective.overlong_penalty:g} over {last}"))
    return rows


def _advantage(config: Config) -> str:
    objective, critic = config.objective, config.critic
    if objective.advantage == "gae":
        warm_up = f", {critic.warmup_steps} steps of its own first" if critic.warmup_steps else ""
        return (f"gae (gamma {objective.gamma:g}, lambda {objective.gae_lambda:g}{', whitened' if critic.whiten else ''}), critic "
                f"{critic.path or config.model.path}, lr {critic.lr:g}{warm_up}")
    if objective.advantage in ("grpo", "rloo"):
        return f"{objective.advantage}, {'' if objective.normalize_std else 'not '}divided by the group's standard deviation"
    return objective.advantage


def _kl_rows(kl: KLConfig) -> list[tuple[str, str]]:
    """The betas that are used: ``objective.kl.strength`` may make them one."""
    reasoning, answer = f"{kl.beta_reasoning:g}", f"{kl.beta_answer:g}"
    by_role = {
        "roles": (reasoning, answer),
        "equal": (f"{answer} (strength equal)",) * 2,
        "matched": (f"f * {answer} + (1 - f) * {reasoning} (strength matched, f = share of answer tokens)",) * 2,
    }[kl.strength]
    if not kl_roles(kl):
        return [("KL to the reference", "none")]
    estimator = [f"topk({kl.topk})" if kl.estimator == "topk" else kl.estimator]
    if kl.placement == "reward":
        estimator.append("in the reward")
    else:
        weighted = kl.state_weight == "cumulative" or (kl.state_weight == "token" and kl.estimator == "sampled")
        bound = "" if not weighted else ", unbounded" if kl.max_weight is None else f" up to {kl.max_weight:g}"
        estimator.append(f"state weight {kl.state_weight}{bound}")
    if kl.kl_denominator != "tokens":
        estimator.append(f"over the tokens of its {kl.kl_denominator}")
    rows = [
        ("KL on reasoning tokens", f"{kl.direction_reasoning}, beta {by_role[0]}"),
        ("KL on answer tokens", f"{kl.direction_answer}, beta {by_role[1]}"),
        ("KL estimator", ", ".join(estimator)),
    ]
    if kl.adaptive_target is not None:
        rows.append(("adaptive betas", f"towards {kl.adaptive_target:g} nats a token, horizon {kl.adaptive_horizon} steps"))
    return rows


def _role_rows(plan: Layout) -> list[tuple[str, ...]]:
    rows = []
    for role in ROLES:
        actors = plan.of(role)
        if not actors:
            rows += [] if role == "critic" else [(role, "none", "", "", "", "")]
            continue
        rows.append((
            role, _count(len(actors), UNITS[role], "processes" if UNITS[role] == "process" else ""),
            _numbers(sorted({actor.bundle for actor in actors})), _spread(actor.num_cpus for actor in actors),
            _spread(actor.num_gpus for actor in actors), _spread(actor.num_threads for actor in actors),
        ))
    return rows


def batch_rows(config: Config) -> list[tuple[str, str]]:
    """The arithmetic of one step, from prompts to micro-batches; token counts are upper bounds."""
    rollout, learner = config.rollout, config.learner
    samples = rollout.prompts_per_step * rollout.group_size
    longest = config.data.max_prompt_tokens + rollout.max_response_tokens
    updates = learner.updates_per_step
    per_update = samples // updates
    return [
        ("samples", f"{rollout.prompts_per_step} prompts x group of {rollout.group_size} = {samples:,}"),
        ("tokens, at most", f"{samples:,} x ({config.data.max_prompt_tokens} prompt + {rollout.max_response_tokens} response) = "
                            f"{samples * longest:,}"),
        *_further_draws(rollout.dynamic_sampling_rounds, rollout.prompts_per_step),
        ("samples per engine", f"{samples / max(rollout.num_engines, 1):g}, at most {rollout.max_num_seqs} at a time"),
        ("optimizer updates", f"{updates} of {per_update:,} samples ({rollout.prompts_per_step // updates} prompts)"),
        ("samples per rank and update", f"{per_update / learner.num_ranks:g} on {learner.num_ranks} ranks"),
        ("micro-batch budget", f"{learner.max_tokens_per_micro_batch:,} tokens: at least "
                               f"{learner.max_tokens_per_micro_batch // longest} of the longest sequences"),
        ("tokens of the whole run, at most", f"{config.steps * samples * longest:,}"),
    ]


def _further_draws(rounds: int, prompts: int) -> list[tuple[str, str]]:
    return [("further draws, at most", f"{rounds} of up to {prompts} prompts each, for groups without spread")] if rounds else []


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns under a header and a rule, two spaces apart, indented by two."""
    lines = [tuple(head), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    written = ["  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([written[0], "  " + "  ".join("-" * width for width in widths), *written[1:]])


def _count(number: int, unit: str, plural: str = "") -> str:
    return f"{number} {unit if number == 1 else plural or unit + 's'}"


def _numbers(values: Sequence[int]) -> str:
    """``0-7`` for a run of numbers, else ``0, 2, 5``; long lists are cut."""
    if len(values) > 1 and values == list(range(values[0], values[-1] + 1)):
        return f"{values[0]}-{values[-1]}"
    return ", ".join(str(value) for value in values[:8]) + (", ..." if len(values) > 8 else "")


def _spread(values: Iterable[float]) -> str:
    distinct = sorted(set(values))
    return f"{distinct[0]:g}" if len(distinct) == 1 else f"{distinct[0]:g} to {distinct[-1]:g}"


def _value(value: object) -> str:
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _number(value: float) -> str:
    return f"{value:g}"


def _large(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"
