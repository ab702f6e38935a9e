"""Policy losses whose ratio is the prefix's: CTPO and its geometric-mean variant (arXiv 2605.07331).

    S_t = sum over s <= t of m_s log(pi/anchor)_s;  rho_t = exp(sg(S_t) + logp_t - sg(logp_t))

The prefix product is a constant: only the current token's score is differentiated, so the Jacobian of the loss in logp is
diagonal. With a terminal reward rho weighs the *states* as pi would visit them and leaves the value of the continuation
that of the sampling policy; its variance grows with t, which is why the window widens with t.
"""

from __future__ import annotations

import torch
from torch import Tensor

from akl_dist.objective._checks import require, require_name, require_rows
from akl_dist.objective.policy_losses import clipped_surrogate, current_token_ratio, register_policy_loss
from akl_dist.objective.ratios import LOG_RATIO_BOUND, segment_cumsum

CLIP_SPACES = ("log", "ratio")


def _prefix_loss(
    log_ratio: Tensor,
    count: Tensor,
    *,
    logp: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    power: float,
    clip_space: str,
) -> Tensor:
    """The clipped surrogate at rho = exp(log_ratio); `count` is t, the running number of unmasked tokens (at least 1)."""
    require_name("clip_space", clip_space, CLIP_SPACES)
    ratio = current_token_ratio(log_ratio, logp)
    for name, bound in (("clip_low", clip_low), ("clip_high", clip_high)):
        require(bound >= 0, name, got=bound, expected="a number of at least 0", remedy="the window holds ratio 1")
    if clip_space == "ratio":
        require(clip_low <= 1, "clip_low", got=clip_low, expected="at most 1 with clip_space ratio", remedy="0.2 is usual")
        above_one = dual_clip is None or dual_clip > 1
        require(above_one, "dual_clip", got=dual_clip, expected="above 1 with clip_space ratio, or null", remedy="3 is usual")
        return clipped_surrogate(ratio, advantages, low=1 - clip_low, high=1 + clip_high, ceiling=dual_clip)
    positive = dual_clip is None or dual_clip > 0
    require(positive, "dual_clip", got=dual_clip, expected="above 0 with clip_space log, or null", remedy="0.05 is usual")
    scale = count.to(logp.dtype) ** power

    def bound_at(width: float) -> Tensor:
        return (width * scale).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()

    ceiling = None if dual_clip is None else bound_at(dual_clip)
    return clipped_surrogate(ratio, advantages, low=bound_at(-clip_low), high=bound_at(clip_high), ceiling=ceiling)


def _prefix(name: str, logp: Tensor, anchor_logp: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """S_t in float64 (constant) and t, both [B, T]; the terms are not clamped, only the exponent is."""
    require_rows(name, logp)
    return segment_cumsum((logp - anchor_logp).detach()), torch.cumsum(mask, -1).clamp(min=1)


@register_policy_loss("ctpo")
def ctpo(
    *,
    logp: Tensor,
    anchor_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 0.025,
    clip_high: float = 0.05,
    dual_clip: float | None = None,
    power: float = 0.5,
    clip_space: str = "log",
) -> Tensor:
    """max(-A rho, -A exp(clip(S_t, -clip_low t^power, clip_high t^power))); [B, T] only, one sequence a row.

    Args:
        clip_low, clip_high: half-widths of the window at t = 1, in units of `clip_space`.
        dual_clip: for A < 0 the loss is at most -A exp(dual_clip t^power) (`ratio`: -A dual_clip). None (default) is the
            paper's formula; the authors' code has 0.05, which removes every corrective gradient above the window.
        power: growth of the window with t, the running count of unmasked tokens (0: the same window everywhere).
        clip_space: "log", or "ratio" for PPO's window [1 - clip_low, 1 + clip_high], where `power` has no effect.
    """
    total, count = _prefix("ctpo", logp, anchor_logp, mask)
    return _prefix_loss(
        total,
        count,
        logp=logp,
        advantages=advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        power=power,
        clip_space=clip_space,
    )


@register_policy_loss("ctpo_geomean")
def ctpo_geomean(
    *,
    logp: Tensor,
    anchor_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 0.025,
    clip_high: float = 0.05,
    dual_clip: float | None = None,
    power: float = -0.5,
    clip_space: str = "log",
) -> Tensor:
    """`ctpo` with S_t / t in place of S_t: the geometric mean of the prefix's ratios, whose window narrows with t."""
    total, count = _prefix("ctpo_geomean", logp, anchor_logp, mask)
    return _prefix_loss(
        total / count,
        count,
        logp=logp,
        advantages=advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        power=power,
        clip_space=clip_space,
    )
