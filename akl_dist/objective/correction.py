"""Rollout correction: what the engine sampled from (mu) against what the trainer computes for the same weights (old).

w = old/mu is a constant that multiplies the policy loss. Truncation (TIS), a two-sided token mask (IcePop), and a sequence
mask (MIS). A sequence weight over thousands of low-precision tokens spreads over several nats and keeps few effective
samples: prefer the token level unless a recipe asks for the other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from akl_dist.objective._checks import require, require_name, require_rows
from akl_dist.objective.masking import as_bool, select
from akl_dist.objective.ratios import LOG_RATIO_BOUND, masked_log_ratio

CORRECTIONS = ("none", "tis", "icepop", "mis")
CORRECTION_LEVELS = ("token", "sequence")


class Correction(NamedTuple):
    """Both of the inputs' shape. weight: detached, 0 where masked. rejected: unmasked tokens whose weight was set to 0."""

    weight: Tensor
    rejected: Tensor


@torch.no_grad()
def rollout_correction(
    kind: str,
    *,
    old_logp: Tensor,
    rollout_logp: Tensor,
    mask: Tensor,
    level: str = "token",
    low: float | None = None,
    high: float = 2.0,
) -> Correction:
    """Weights from w = old/mu, per token or as the product over each sequence (`level`), log-ratio bounded to +-20.

    * none: 1
    * tis: min(w, high)
    * icepop: w if low <= w <= high, else 0
    * mis: w, but 0 for a whole sequence outside [low, high], judged by its product of ratios at level "sequence" and by
      their geometric mean at level "token"

    Args:
        kind: one of `CORRECTIONS`.
        old_logp, rollout_logp: [B, T], one sequence a row (also [n] for token weights without `mis`); masked entries may
            hold NaN.
        mask: same shape, non-zero on tokens that the policy sampled.
        low: smallest ratio that counts, for icepop and mis; None: no lower bound.
        high: truncation of tis, or largest ratio that counts.
    """
    require_name("rollout correction", kind, CORRECTIONS)
    require_name("rollout correction level", level, CORRECTION_LEVELS)
    require(high > 0, "rollout correction high", got=high, expected="a positive number", remedy="2 is usual")
    ordered = low is None or (0 <= low <= high and kind in ("icepop", "mis"))
    require(
        ordered,
        f"rollout correction {kind!r} low",
        got=low,
        expected=f"null, or for icepop and mis a number from 0 to high={high}",
        remedy="tis truncates above only; use icepop to drop small ratios",
    )
    keep = as_bool(mask)
    log_ratio = masked_log_ratio(old_logp, rollout_logp, keep)
    none_rejected = torch.zeros_like(keep)
    if kind == "none":
        return Correction(keep.to(log_ratio.dtype), none_rejected)
    if level == "sequence" or kind == "mis":
        require_rows(f"rollout correction {kind!r} of level {level!r}", log_ratio)
    total = log_ratio.double().sum(-1, keepdim=True)
    if level == "sequence":
        log_ratio = total.to(log_ratio.dtype).expand_as(log_ratio)
    weight = select(_bounded_exp(log_ratio), keep)
    if kind == "tis":
        return Correction(weight.clamp(max=high), none_rejected)
    judged = weight
    if kind == "mis":
        scale = keep.sum(-1, keepdim=True).clamp(min=1) if level == "token" else 1
        judged = _bounded_exp(total / scale).to(weight.dtype).expand_as(weight)
    rejected = keep & ((judged > high) | (judged < (0.0 if low is None else low)))
    return Correction(select(weight, ~rejected), rejected)


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
