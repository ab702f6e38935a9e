"""What the critic trains on: responses with a reward each, and what one micro-batch of them should predict. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from akl_dist.contract.records import RolloutArrays, TrainingGroup
from akl_dist.objective import generalized_advantages, value_loss, weighted_sum
from akl_dist.zero3.planning import SampleKey
from akl_dist.zero3.rows import RowTensors, row_tensors

SUMS = ("value_loss", "clipped")
MOMENTS = ("tokens", "value", "return", "return_squared", "error", "error_squared")


@dataclass(frozen=True)
class ValueSample:
    """One response that has a verdict. ``reward`` is what it earned as a whole, on the last token that the policy wrote. mask bool
    [n]: tokens that train; None where all do."""

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    reward: float
    mask: np.ndarray | None = None


def samples_of(index: int, group: TrainingGroup, rollout: RolloutArrays) -> dict[SampleKey, ValueSample]:
    """The responses of group ``index`` that train."""
    lengths = group.labelled.rollout.response_lengths
    prompt_ids = np.asarray(group.labelled.rollout.prompt.token_ids, np.int64)
    cuts = np.cumsum(lengths)[:-1]
    pieces, turns = np.split(rollout.token_ids, cuts), group.labelled.rollout.turns
    masks = np.split(group.labelled.rollout.trained_mask(), cuts) if turns else [None] * len(lengths)
    rows = zip(pieces, group.advantages, group.trains, masks, strict=True)
    return {(index, s): ValueSample(prompt_ids, piece, float(reward), mask)
            for s, (piece, reward, trains, mask) in enumerate(rows) if trains}


@dataclass(frozen=True)
class ValueBatch(RowTensors):
    """A packed row; mask bool [B, L], rewards float64 [B, L] (on the last token of each response that trains). A dummy has no
    key."""

    keys: tuple[SampleKey, ...]
    mask: torch.Tensor
    rewards: torch.Tensor


def pack(keys: Sequence[SampleKey], samples: Sequence[ValueSample], *, device: torch.device | str = "cpu") -> ValueBatch:
    """One micro-batch from the samples of one row; no samples give the dummy."""
    row = row_tensors([(sample.prompt_ids, sample.response_ids) for sample in samples], device)
    masks = [np.ones(len(s.response_ids), np.bool_) if s.mask is None else s.mask for s in samples]
    mask = row.grid(torch.from_numpy(np.concatenate(masks or [np.zeros(1, np.bool_)])).to(device), False)
    rewards = torch.zeros(row.grid_shape, dtype=torch.float64, device=device)
    for index, (sample, own) in enumerate(zip(samples, masks, strict=True)):
        rewards[index, int(own.nonzero()[0][-1])] = sample.reward
    return ValueBatch(**vars(row), keys=tuple(keys), mask=mask, rewards=rewards)


class Targets(NamedTuple):
    """Of one micro-batch, from the values at the start of the step; all [B, L], 0 past a response's end."""

    values: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor


def targets_of(batch: ValueBatch, values: torch.Tensor, *, gamma: float, lam: float) -> Targets:
    """``values`` flat [n], of the critic before its updates on the batch."""
    grid = batch.grid(values.detach())
    advantages, returns = generalized_advantages(rewards=batch.rewards, values=grid, mask=batch.mask, gamma=gamma, lam=lam)
    return Targets(grid, advantages, returns)


def token_advantages(batch: ValueBatch, targets: Targets, samples: Mapping[SampleKey, ValueSample]) -> dict[SampleKey, np.ndarray]:
    """Advantages of each response of a row, float32 [n] of all its tokens: 0 on those that do not train."""
    grid = targets.advantages.float().cpu().numpy()
    return {key: grid[row, : len(samples[key].response_ids)].copy() for row, key in enumerate(batch.keys)}


def mean_advantage(sample: ValueSample | None, advantages: np.ndarray) -> float:
    """Mean over the tokens of a response that train; 0 for one that does not (None)."""
    if sample is None:
        return 0.0
    return float(advantages.mean(dtype=np.float64, where=True if sample.mask is None else sample.mask))


def target_moments(batch: ValueBatch, targets: Targets) -> torch.Tensor:
    """Sums in the order of ``MOMENTS``, float64: what the value mean and the explained variance are made of."""
    value, target = (grid[batch.mask].double() for grid in (targets.values, targets.returns))
    error = target - value
    count = torch.tensor(float(len(value)), dtype=torch.float64, device=value.device)
    return torch.stack([count, value.sum(), target.sum(), (target**2).sum(), error.sum(), (error**2).sum()])


def micro_batch_loss(
    batch: ValueBatch, values: torch.Tensor, targets: Targets, *, clip: float | None, total_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(this micro-batch's share of the mean value loss of the update's tokens, sums in the order of ``SUMS``)."""
    grid = batch.grid(values)
    per_token = value_loss(values=grid, old_values=targets.values, returns=targets.returns, mask=batch.mask, clip=clip)
    loss = weighted_sum(per_token, batch.mask, torch.full_like(per_token, 1 / total_tokens))
    moved = (grid.detach() - targets.values).abs()[batch.mask]
    outside = (moved > clip).sum() if clip is not None else torch.zeros((), device=grid.device)
    return loss, torch.stack([loss.detach().double(), outside.double()])


def metrics_from_sums(sums: dict[str, float], moments: dict[str, float], *, updates: int) -> dict[str, float]:
    """Flat metrics from globally added sums; what is undefined is absent.

    Explained variance is 1 - Var(return - value) / Var(return) over tokens, with the values before the updates: 0 for a
    constant, 1 for a perfect critic, negative for one that is worse than a constant.
    """
    tokens = moments["tokens"]
    if not tokens or not updates:
        return {}
    out = {"critic/value_loss": sums["value_loss"] / updates, "critic/clip_fraction": sums["clipped"] / tokens,
           "critic/value_mean": moments["value"] / tokens, "critic/return_mean": moments["return"] / tokens}
    variance = moments["return_squared"] / tokens - out["critic/return_mean"] ** 2
    if variance > 1e-12:
        unexplained = moments["error_squared"] / tokens - (moments["error"] / tokens) ** 2
        out["critic/explained_variance"] = 1 - unexplained / variance
    return out
