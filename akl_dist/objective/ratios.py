"""Log-ratios: bounded before the exponential, and running sums over the tokens of each sequence.

Layouts: padded [B, T] (one sequence a row) or packed [n] (sequences one after another, told apart by `segment_ids`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from akl_dist.objective._checks import require, require_shape
from akl_dist.objective.masking import as_bool, at_least_float32, select

LOG_RATIO_BOUND = 20.0
"""Largest |log-ratio| (nats) that is exponentiated: e^20 is about 4.9e8, far outside every trust region."""


def bounded_log_ratio(x: Tensor, bound: float = LOG_RATIO_BOUND) -> Tensor:
    """Clamp a log-ratio to [-bound, bound] in value only: the gradient with respect to `x` stays 1 everywhere.

    Equals `x + stop_gradient(clamp(x) - x)`, written so that the value is the clamped value without rounding.
    A hard clamp would also remove the corrective gradient of tokens that drifted furthest.

    Args:
        x: log-ratios in nats, any shape; must be finite (select masked positions first, see `masked_log_ratio`).
        bound: positive bound in nats.
    """
    require(bound > 0, "bounded_log_ratio bound", got=bound, expected="a positive number", remedy="use the default 20")
    x = at_least_float32(x)
    return x.detach().clamp(-bound, bound) + (x - x.detach())


def masked_log_ratio(logp: Tensor, other_logp: Tensor, mask: Tensor) -> Tensor:
    """`logp - stop_gradient(other_logp)` where `mask`, exactly 0 elsewhere; same shape, nats, not yet bounded."""
    require_shape("other log-probabilities", other_logp, logp.shape)
    require_shape("mask", mask, logp.shape)
    logp = at_least_float32(logp)
    return select(logp, mask) - select(other_logp.detach().to(logp.dtype), mask)


def clamped_tokens(logp: Tensor, other_logp: Tensor, mask: Tensor, bound: float = LOG_RATIO_BOUND) -> Tensor:
    """True at unmasked tokens whose |log-ratio| exceeds `bound` (bool, same shape); its share is a metric."""
    return (masked_log_ratio(logp.detach(), other_logp, mask).abs() > bound) & as_bool(mask)


def loss_log_ratio(name: str, *, logp: Tensor, anchor_logp: Tensor, mask: Tensor) -> Tensor:
    """The log-ratio that the named policy loss exponentiates, before its bound of +-20: detached, 0 where masked.

    S_t, the running sum over unmasked tokens (`ctpo`), S_t / t (`ctpo_geomean`), the sequence's mean (`gspo`), else the token's
    own; a loss of one's own counts as one of the token.

    Args:
        logp, anchor_logp, mask: one shape; [B, T], one sequence a row, for the three losses of a sequence, else also [n].
    """
    log_ratio = masked_log_ratio(logp.detach(), anchor_logp, mask)
    keep = as_bool(mask)
    if name == "gspo":
        mean = log_ratio.double().sum(-1, keepdim=True) / keep.sum(-1, keepdim=True).clamp(min=1)
        return select(mean.expand(log_ratio.shape), keep)
    if name in ("ctpo", "ctpo_geomean"):
        total = segment_cumsum(log_ratio)
        return select(total if name == "ctpo" else total / keep.cumsum(-1).clamp(min=1), keep)
    return log_ratio


def segment_cumsum(x: Tensor, segment_ids: Tensor | None = None, *, exclusive: bool = False) -> Tensor:
    """Running sum along the last dimension that restarts at each new segment; returned in float64.

    The sum runs over the whole row and the total before the segment is taken off again. That is done in float64:
    in float32 a long packed row would leave the rounding error of its grand total in every later segment.

    Args:
        x: finite values, [n] or [..., T].
        segment_ids: same shape, integers; a segment is a run of equal ids. None: every row is one segment.
        exclusive: sum the elements strictly before the current one.
    """
    values = x.double()
    total = values.cumsum(-1)
    before = total - values
    if segment_ids is None:
        return before if exclusive else total
    require_shape("segment_ids", segment_ids, x.shape)
    start = torch.ones_like(segment_ids, dtype=torch.bool)
    start[..., 1:] = segment_ids[..., 1:] != segment_ids[..., :-1]
    position = torch.arange(x.shape[-1], device=x.device).expand(x.shape)
    start_index = torch.where(start, position, torch.zeros_like(position)).cummax(-1).values
    offset = before.gather(-1, start_index)
    return (before if exclusive else total) - offset
