"""What ``auto`` means in a configuration, once all of it is known. Stdlib only."""

from __future__ import annotations

import dataclasses

from akl_dist.config.schema import Config, CorrectionConfig, ObjectiveConfig


def carries_rollout_ratio(objective: ObjectiveConfig) -> bool:
    """Whether the policy loss itself holds pi/mu: anchor ``rollout`` with any loss that has a ratio (all but an unweighted
    ``reinforce``)."""
    unweighted = objective.policy_loss == "reinforce" and objective.policy_loss_params.get("max_weight") is None
    return objective.anchor == "rollout" and not unweighted


def resolved_objective(config: Config) -> ObjectiveConfig:
    """The objective as the learner gets it: rollout correction ``auto`` is token-level truncated importance sampling with
    C = 2 where engine and learner compute in different dtypes and the policy loss does not hold the ratio pi/mu; else none."""
    objective = config.objective
    if objective.correction.kind != "auto":
        return objective
    differ = config.model.dtype != config.rollout.dtype and not carries_rollout_ratio(objective)
    correction = CorrectionConfig("tis", level="token", low=None, high=2.0) if differ else CorrectionConfig("none")
    return dataclasses.replace(objective, correction=correction)
