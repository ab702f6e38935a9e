"""Advantages of sequence rewards: GRPO (arXiv 2402.03300, eq. 10), Dr.GRPO (arXiv 2503.20783), RLOO (arXiv 2402.14740),
REINFORCE++ (arXiv 2501.03262). Those of a critic are in `gae`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from akl_dist.objective._checks import require, require_name, require_shape
from akl_dist.objective.masking import as_bool

SPREAD_FLOOR = 1e-6
"""Reward spread (max - min of a group) that counts as none, before the rounding allowance of the rewards' dtype.

The usual eps added to the std (1e-6) suppresses such a spread anyhow; with the floor the result is exactly 0.
"""


class _Groups(NamedTuple):
    rewards: Tensor  # [N] float64, 0 where invalid
    valid: Tensor  # [N] bool
    inverse: Tensor  # [N] int64, group number of each sample
    count: Tensor  # [G] float64, valid members
    flat: Tensor  # [G] bool, no spread or fewer than two valid members


def _groups(rewards: Tensor, group_index: Tensor, valid: Tensor | None) -> _Groups:
    require(rewards.dim() == 1, "rewards", got=f"shape {tuple(rewards.shape)}", expected="[N]", remedy="one per sample")
    require_shape("group_index", group_index, rewards.shape)
    usable = torch.ones_like(rewards, dtype=torch.bool) if valid is None else as_bool(valid)
    require_shape("valid", usable, rewards.shape)
    values = torch.where(usable, rewards.detach().double(), torch.zeros((), dtype=torch.float64, device=rewards.device))
    require(
        bool(values.isfinite().all()),
        "rewards",
        got="a non-finite reward of a valid sample",
        expected="finite rewards",
        remedy="mark samples without a verdict with valid=False: a failed reward is not a zero reward",
    )
    unique, inverse = group_index.unique(return_inverse=True)
    size = unique.numel()

    def extreme(fill: float, how: str) -> Tensor:
        start = torch.full((size,), fill, dtype=torch.float64, device=values.device)
        return start.scatter_reduce(0, inverse[usable], values[usable], reduce=how)

    low, high = extreme(float("inf"), "amin"), extreme(float("-inf"), "amax")
    count = values.new_zeros(size).index_add(0, inverse, usable.double())
    rounding = torch.finfo(rewards.dtype).eps if rewards.dtype.is_floating_point else 0.0
    floor = SPREAD_FLOOR + 4 * rounding * torch.maximum(low.abs(), high.abs())
    flat = (count < 2) | ~(high - low > floor)
    return _Groups(values, usable, inverse, count, flat)


def zero_spread_groups(rewards: Tensor, group_index: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """True for each sample whose group carries no signal: fewer than two valid members, or no spread. Bool [N].

    To filter groups pass the raw outcome, not the shaped reward: a length term spreads groups nobody solved.
    """
    groups = _groups(rewards, group_index, valid)
    return groups.flat[groups.inverse]


def group_advantages(
    rewards: Tensor,
    group_index: Tensor,
    *,
    valid: Tensor | None = None,
    normalize_std: bool,
    std: str = "sample",
    leave_one_out: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """Reward minus its group's mean, optionally over the group's standard deviation. Detached [N], rewards' dtype.

    Mean and deviation are taken in two passes in float64: one-pass float32 gives equal rewards advantages of
    thousands. A group whose spread is at most `SPREAD_FLOOR` plus four roundings of its largest reward, or with
    fewer than two valid members, has advantage exactly 0.

    Args:
        rewards: [N]; integers are computed as float32. Entries with valid=False may hold NaN.
        group_index: [N] integers; samples of one prompt share one. Any order, any values.
        valid: [N]; samples without a verdict are False: outside the statistics, advantage 0.
        normalize_std: divide by (std + eps). GRPO and CTPO yes; Dr.GRPO, DPPO, DRPO no.
        std: "sample" (n - 1) or "population" (n).
        leave_one_out: baseline is the mean of the *other* valid members (RLOO), i.e. a factor n / (n - 1).
        eps: added to the standard deviation.

    Raises: `ValueError` on a valid non-finite reward, an unknown `std`, or shapes that differ.
    """
    require_name("std", std, ("sample", "population"))
    groups = _groups(rewards, group_index, valid)
    size = groups.count.numel()
    count = groups.count.clamp(min=1)
    total = groups.rewards.new_zeros(size).index_add(0, groups.inverse, groups.rewards)
    keep = groups.valid & ~groups.flat[groups.inverse]
    zero = torch.zeros((), dtype=torch.float64, device=rewards.device)
    centred = torch.where(keep, groups.rewards - (total / count)[groups.inverse], zero)
    advantages = centred
    if leave_one_out:
        advantages = advantages * (count / (count - 1).clamp(min=1))[groups.inverse]
    if normalize_std:
        # Scaled by the largest deviation before squaring, so that neither huge nor tiny rewards leave float64's range.
        largest = groups.rewards.new_zeros(size).scatter_reduce(0, groups.inverse, centred.abs(), reduce="amax")
        scale = torch.where(largest > 0, largest, torch.ones_like(largest))
        squares = groups.rewards.new_zeros(size).index_add(0, groups.inverse, (centred / scale[groups.inverse]) ** 2)
        degrees = (count - 1).clamp(min=1) if std == "sample" else count
        deviation = scale * (squares / degrees).sqrt() + eps
        advantages = torch.where(keep, advantages / deviation[groups.inverse], zero)
    return advantages.to(rewards.dtype if rewards.dtype.is_floating_point else torch.float32)


def batch_whitened_advantages(
    rewards: Tensor,
    lengths: Tensor,
    *,
    group_index: Tensor | None = None,
    valid: Tensor | None = None,
    eps: float = 1e-8,
) -> Tensor:
    """REINFORCE++: (reward - mean) / sqrt(variance + eps) over all tokens of the batch. Detached [N], rewards' dtype.

    With a terminal reward and no discount every token of a response has that reward ahead of it, so a response counts
    as many times as it has tokens; the variance is the unbiased one of tokens. Float64, two passes.

    Args:
        rewards: [N]; entries with valid=False may hold NaN.
        lengths: [N] unmasked tokens of each response. Responses with none are outside the statistics, advantage 0.
        group_index: [N]; given, the mean of the response's group is subtracted first (the baseline variant), and a
            response without another valid one in its group has no baseline: outside the statistics, advantage 0.
        valid: [N]; samples without a verdict are False: outside the statistics, advantage 0.
        eps: added to the variance.

    A batch whose (centred) rewards have no spread has advantage exactly 0. A *group* without spread does not in the
    baseline variant: its centred reward 0 is compared with the batch's, as in the published algorithm.
    Raises: `ValueError` on a valid non-finite reward, negative lengths, or shapes that differ.
    """
    require_shape("lengths", lengths, rewards.shape)
    require(bool((lengths >= 0).all()), "lengths", got="a negative one", expected="tokens >= 0", remedy="count the mask")
    usable = lengths > 0 if valid is None else as_bool(valid) & (lengths > 0)
    batch = torch.zeros(rewards.shape, dtype=torch.long, device=rewards.device)
    if group_index is not None:
        groups = _groups(rewards, group_index, usable)
        usable = groups.valid & (groups.count >= 2)[groups.inverse]
        rewards_used = group_advantages(rewards.double(), group_index, valid=usable, normalize_std=False)
    else:
        rewards_used = rewards.double()
    whole = _groups(rewards_used, batch, usable)
    weight = torch.where(usable, lengths.double(), torch.zeros((), dtype=torch.float64, device=rewards.device))
    total = weight.sum()
    dtype = rewards.dtype if rewards.dtype.is_floating_point else torch.float32
    if not bool(usable.any()) or bool(whole.flat.all()):
        return torch.zeros(rewards.shape, dtype=dtype, device=rewards.device)
    centred = torch.where(usable, whole.rewards - (weight * whole.rewards).sum() / total, torch.zeros_like(whole.rewards))
    variance = (weight * centred**2).sum() / (total - 1)
    return (centred / (variance + eps).sqrt()).to(dtype)
