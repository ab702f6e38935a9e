"""Generalized advantage estimation (arXiv 1506.02438, eq. 16) and the critic's clipped loss (PPO, arXiv 1707.06347)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from akl_dist.objective._checks import require, require_shape
from akl_dist.objective.masking import as_bool, at_least_float32, select

WHITENING_EPS = 1e-8
"""Added to a variance before its square root."""


class GeneralizedAdvantages(NamedTuple):
    """advantages, returns: detached, shape and dtype of the values, 0 where masked; returns = advantages + values."""

    advantages: Tensor
    returns: Tensor


@torch.no_grad()
def generalized_advantages(
    *, rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 1.0
) -> GeneralizedAdvantages:
    """A_t = delta_t + gamma lam A_next, delta_t = r_t + gamma V_next - V_t, where "next" is the next *unmasked* token.

    A masked span (tool output) is skipped: it costs no discount and does not cut the bootstrap, so a response gets the
    same advantages as without the span. The value after the last unmasked token is 0, also where the response was
    truncated: its reward is all there is, and what a longer response would have earned is not estimated.

    Args:
        rewards: [B, T] reward of each token; a sequence reward belongs on the last unmasked token (a reward on a masked
            one is dropped).
        values: [B, T] V(s_t) of the state before token t.
        mask: [B, T], non-zero on tokens that the policy sampled. Masked entries of the others may hold NaN.
        gamma: discount per token, in (0, 1].
        lam: 0 = one-step temporal difference, 1 = reward-to-go minus value; in [0, 1].

    Computed in float64. Not whitened: see `advantage_moments`.
    Raises: `ValueError` on shapes that differ, or on gamma or lam out of range.
    """
    require(values.dim() == 2, "values", got=f"shape {tuple(values.shape)}", expected="[B, T]", remedy="pad the batch")
    require_shape("rewards", rewards, values.shape)
    require_shape("mask", mask, values.shape)
    require(0 < gamma <= 1, "gamma", got=gamma, expected="0 < gamma <= 1", remedy="1 is usual for a terminal reward")
    require(0 <= lam <= 1, "lam", got=lam, expected="0 <= lam <= 1", remedy="0.95 or 1 is usual")
    keep = as_bool(mask)
    reward, value = select(rewards, keep).double(), select(values, keep).double()
    advantages = torch.zeros_like(value)
    next_value, next_advantage = value.new_zeros(value.shape[0]), value.new_zeros(value.shape[0])
    for t in reversed(range(value.shape[1])):
        delta = reward[:, t] + gamma * next_value - value[:, t]
        advantages[:, t] = torch.where(keep[:, t], delta + gamma * lam * next_advantage, 0.0)
        next_value = torch.where(keep[:, t], value[:, t], next_value)
        next_advantage = torch.where(keep[:, t], advantages[:, t], next_advantage)
    dtype = at_least_float32(values).dtype
    return GeneralizedAdvantages(advantages.to(dtype), (advantages + value).to(dtype))


def advantage_moments(advantages: Tensor, mask: Tensor) -> Tensor:
    """(count, sum, sum of squares) over unmasked tokens, float64 [3]: moments of parts of a batch add up to the batch's."""
    require_shape("mask", mask, advantages.shape)
    kept = select(advantages.detach(), mask).double()
    return torch.stack([as_bool(mask).sum().double(), kept.sum(), (kept**2).sum()])


def mean_and_deviation(moments: Tensor) -> tuple[float, float]:
    """Mean and deviation to whiten with, a -> (a - mean) / deviation, from the added `advantage_moments` [3].

    The deviation is sqrt(unbiased variance + 1e-8). Fewer than two tokens: (0, 1), which changes nothing.
    """
    require_shape("moments", moments, torch.Size([3]))
    count, total, squares = (float(value) for value in moments.double())
    if count < 2:
        return 0.0, 1.0
    mean = total / count
    variance = max(squares - count * mean * mean, 0.0) / (count - 1)
    return mean, (variance + WHITENING_EPS) ** 0.5


def value_loss(
    *, values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None = None
) -> Tensor:
    """0.5 max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2) per token, 0 where masked; not yet divided by N.

    Where the clipped error is the larger one the token has no gradient: a value that has moved by more than `clip`
    towards its return is not pulled further by this batch.

    Args:
        values: predictions, [B, T] or [n]; the loss is differentiable in them only.
        old_values: predictions at the start of the update, same shape.
        returns: regression targets, same shape.
        mask: same shape; masked entries of the others may hold NaN.
        clip: largest useful distance from the old value, in units of reward; None = plain squared error.
    """
    for name, tensor in (("old_values", old_values), ("returns", returns), ("mask", mask)):
        require_shape(name, tensor, values.shape)
    value = select(at_least_float32(values), mask)
    target = select(returns.detach().to(value.dtype), mask)
    error = (value - target) ** 2
    if clip is None:
        return 0.5 * error
    require(clip > 0, "value clip", got=clip, expected="a positive number, or None", remedy="0.2 is usual")
    old = select(old_values.detach().to(value.dtype), mask)
    clipped = (torch.minimum(torch.maximum(value, old - clip), old + clip) - target) ** 2
    # `where` rather than `maximum`: inside the window both errors are equal, and the whole gradient flows through one.
    return 0.5 * torch.where(error >= clipped, error, clipped)
