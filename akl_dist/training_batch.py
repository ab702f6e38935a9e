"""From labelled groups to training groups: rewards to advantages. The driver's share of the objective stage; headers only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from akl_dist.config.schema import ObjectiveConfig
from akl_dist.contract.records import LabelledGroup, TrainingGroup
from akl_dist.objective.advantages import batch_whitened_advantages, group_advantages
from akl_dist.objective.shaping import overlong_penalty


class Rewards(NamedTuple):
    """One entry per response, groups one after another. rewards float64 [N], 0 where there is no verdict; valid bool [N];
    group_index, lengths, trained_lengths (tokens) int64 [N]; penalties float64 [N], what the length penalty has taken, None where
    it is off."""

    rewards: Tensor
    valid: Tensor
    group_index: Tensor
    lengths: Tensor
    trained_lengths: Tensor
    penalties: Tensor | None


def shaped_rewards(labelled: Sequence[LabelledGroup], objective: ObjectiveConfig, *, max_tokens: int) -> Rewards:
    """The verdicts' rewards less the overlong penalty (DAPO, arXiv 2503.14476, eq. 13). Raw verdicts stay as they are.

    ``max_tokens`` is the longest response (rollout.max_response_tokens; a source may have a limit of its own), at which the penalty
    is greatest.

    A response without a verdict (timeout, error, invalid gold) has no reward: it is excluded from every statistic and
    masked from the loss, never treated as reward 0.
    """
    raw = [verdict.reward for group in labelled for verdict in group.judged.verdicts]
    valid = torch.tensor([reward is not None for reward in raw], dtype=torch.bool)
    rewards = torch.tensor([reward or 0.0 for reward in raw], dtype=torch.float64)
    index = torch.tensor([g for g, group in enumerate(labelled) for _ in group.judged.verdicts], dtype=torch.int64)
    lengths = torch.tensor([n for group in labelled for n in group.rollout.response_lengths], dtype=torch.int64)
    trained = torch.tensor([n for group in labelled for n in group.rollout.trained_lengths], dtype=torch.int64)
    penalties = None
    if objective.overlong_buffer_tokens:
        limits = [group.rollout.prompt.max_response_tokens or max_tokens for group in labelled for _ in group.judged.verdicts]
        penalties = overlong_penalty(lengths, max_tokens=limits, buffer_tokens=objective.overlong_buffer_tokens,
                                     penalty=objective.overlong_penalty)
        rewards = torch.where(valid, rewards - penalties, rewards)
    return Rewards(rewards, valid, index, lengths, trained, penalties)


def training_groups(labelled: Sequence[LabelledGroup], objective: ObjectiveConfig, *, max_tokens: int) -> list[TrainingGroup]:
    """Advantages (objectives.md section 2) of every response that has a verdict, by ``objective.advantage``.

    A response none of whose tokens trains (all its turns are left out) counts in its group's statistics and trains nothing.
    """
    batch = shaped_rewards(labelled, objective, max_tokens=max_tokens)
    advantages, valid = _advantages(batch, objective).tolist(), (batch.valid & (batch.trained_lengths > 0)).tolist()
    out, start = [], 0
    for group in labelled:
        size = len(group.judged.verdicts)
        out.append(TrainingGroup(group, tuple(advantages[start:start + size]), tuple(valid[start:start + size])))
        start += size
    return out


def _advantages(batch: Rewards, objective: ObjectiveConfig) -> Tensor:
    """Float64 [N]; with a critic (gae) the rewards themselves, from which it makes advantages. Raises ValueError for a name that
    is not one of objective.advantage."""
    if objective.advantage == "gae":
        return batch.rewards
    if objective.advantage in ("grpo", "rloo"):
        return group_advantages(batch.rewards, batch.group_index, valid=batch.valid, normalize_std=objective.normalize_std,
                                leave_one_out=objective.advantage == "rloo")
    if objective.advantage in ("reinforce_pp", "reinforce_pp_baseline"):
        group_index = batch.group_index if objective.advantage == "reinforce_pp_baseline" else None
        return batch_whitened_advantages(batch.rewards, batch.trained_lengths, group_index=group_index, valid=batch.valid)
    raise ValueError(f"objective.advantage is {objective.advantage!r}, expected grpo, rloo, reinforce_pp, "
                     "reinforce_pp_baseline or gae")


def overlong_metrics(labelled: Sequence[LabelledGroup], objective: ObjectiveConfig, *, max_tokens: int) -> dict[str, float]:
    """``objective/overlong_penalty_mean`` over responses with a verdict, in units of reward; empty where the penalty is off."""
    batch = shaped_rewards(labelled, objective, max_tokens=max_tokens)
    if batch.penalties is None:
        return {}
    taken = batch.penalties[batch.valid]
    return {"objective/overlong_penalty_mean": float(taken.mean()) if len(taken) else 0.0}
