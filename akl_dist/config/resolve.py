"""What ``auto`` means in a configuration, once all of it is known. Stdlib only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from akl_dist.config.mixture import verifiers
from akl_dist.config.schema import Config, CorrectionConfig, DataConfig, KLConfig, ObjectiveConfig, VerifyConfig
from akl_dist.config.typed import FrozenDict

AUTO = "auto"


def carries_rollout_ratio(objective: ObjectiveConfig) -> bool:
    """Whether the policy loss itself holds pi/mu: anchor ``rollout`` with any loss that has a ratio (all but an unweighted
    ``reinforce``)."""
    unweighted = objective.policy_loss == "reinforce" and objective.policy_loss_params.get("max_weight") is None
    return objective.anchor == "rollout" and not unweighted


def kl_roles(kl: KLConfig) -> dict[str, str]:
    """Roles whose KL term has a beta above 0 by ``objective.kl.strength``, with the keys that set that beta (in words)."""
    reasoning, answer = "objective.kl.beta_reasoning", "objective.kl.beta_answer"
    if kl.strength == "matched":  # both roles take a mean of the two, weighted by shares of tokens
        acting = {"reasoning": f"{reasoning} or {answer}", "answer": f"{reasoning} or {answer}"}
        return acting if kl.beta_reasoning > 0 or kl.beta_answer > 0 else {}
    if kl.strength == "equal":
        return {"reasoning": answer, "answer": answer} if kl.beta_answer > 0 else {}
    own = {"reasoning": (kl.beta_reasoning, reasoning), "answer": (kl.beta_answer, answer)}
    return {role: key for role, (beta, key) in own.items() if beta > 0}


def kl_max_weight(kl: KLConfig) -> float | None:
    """Truncation of the KL term's importance weights; None: untruncated. ``auto``: 2 for weights of one token, 5 for cumulative
    ones, products of many ratios that 2 would cut nearly everywhere."""
    if kl.max_weight != AUTO:
        return kl.max_weight  # type: ignore[return-value]  # validation lets no other text pass
    return 5.0 if kl.state_weight == "cumulative" else 2.0


def resolved_objective(config: Config) -> ObjectiveConfig:
    """The objective as the learner gets it: KL weights truncated by :func:`kl_max_weight`; rollout correction ``auto`` is
    token-level truncated importance sampling with C = 2 where engine and learner compute in different dtypes and the policy loss
    does not hold the ratio pi/mu; else none."""
    objective = config.objective
    objective = dataclasses.replace(objective, kl=dataclasses.replace(objective.kl, max_weight=kl_max_weight(objective.kl)))
    if objective.correction.kind != AUTO:
        return objective
    differ = config.model.dtype != config.rollout.dtype and not carries_rollout_ratio(objective)
    correction = CorrectionConfig("tis", level="token", low=None, high=2.0) if differ else CorrectionConfig("none")
    return dataclasses.replace(objective, correction=correction)


HTTP_PAUSE_S, HTTP_LONGEST_PAUSE_S = 0.25, 4.0


def http_pauses(retries: int) -> tuple[float, ...]:
    """Seconds to wait before each further try of an HTTP reward: doubling, bounded."""
    return tuple(min(HTTP_PAUSE_S * 2**number, HTTP_LONGEST_PAUSE_S) for number in range(retries))


def term_kind(name: str, term: Mapping[str, Any]) -> str:
    """Kind of one of verify.terms: what it says, else custom or http by the key it brings, else its own name (``format``)."""
    if "kind" in term:
        return str(term["kind"])
    return "custom" if "custom" in term else "http" if "http_url" in term else name


def kinds_of(config: Config) -> set[str]:
    """Every kind of verifier that the configuration names, those of verify.terms included: what graders have to start."""
    terms = config.verify.terms.items()
    return set(verifiers(config)) | {term_kind(name, term) for name, term in terms if isinstance(term, Mapping)}


PYTHON_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs a Python program and returns what it prints, or the last line of its error.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program; it must print what it finds."}},
            "required": ["code"],
        },
    },
}
"""How the python tool is declared to a chat template that knows tools (``rollout.tools.call=hermes``)."""


def resolved_data(config: Config) -> DataConfig:
    """The data group as prompts are made from: with the python tool declared to the chat template where calls follow the
    template's own format and ``data.template_kwargs`` declares no tools itself."""
    data, tools = config.data, config.rollout.tools
    if tools.environment != "python" or tools.call != "hermes" or "tools" in data.template_kwargs:
        return data
    return dataclasses.replace(data, template_kwargs=FrozenDict({**data.template_kwargs, "tools": [PYTHON_TOOL]}))


def with_implied_kind(config: Config) -> Config:
    """The configuration with ``verify.kind`` custom or http where that key has its default and one of ``verify.custom`` and
    ``verify.http_url`` is set."""
    verify = config.verify
    implied = [kind for kind, value in (("custom", verify.custom), ("http", verify.http_url)) if value is not None]
    if verify.kind != VerifyConfig().kind or len(implied) != 1:
        return config
    return dataclasses.replace(config, verify=dataclasses.replace(verify, kind=implied[0]))
