"""What ``auto`` means in a configuration, once all of it is known. Stdlib only."""

from __future__ import annotations

import dataclasses

from akl_dist.config.schema import Config, CorrectionConfig, KLConfig, ObjectiveConfig

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
