"""From labelled groups to training groups: rewards to advantages. The driver's share of the objective stage; headers only."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from akl_dist.contract.records import LabelledGroup, TrainingGroup
from akl_dist.objective.advantages import group_advantages


def training_groups(labelled: Sequence[LabelledGroup], *, normalize_std: bool) -> list[TrainingGroup]:
    """Group-relative advantages (objectives.md section 2) for every response that has a verdict.

    A response without a verdict (timeout, error, invalid gold) has no reward: it is excluded from its group's statistics
    and masked from the loss, never treated as reward 0.
    """
    rewards, group_index, valid = [], [], []
    for g, group in enumerate(labelled):
        for verdict in group.judged.verdicts:
            rewards.append(0.0 if verdict.reward is None else verdict.reward)
            valid.append(verdict.reward is not None)
            group_index.append(g)
    advantages = group_advantages(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(group_index),
        valid=torch.tensor(valid), normalize_std=normalize_std,
    ).tolist()
    out, start = [], 0
    for group in labelled:
        size = len(group.judged.verdicts)
        out.append(TrainingGroup(group, tuple(advantages[start:start + size]), tuple(valid[start:start + size])))
        start += size
    return out
