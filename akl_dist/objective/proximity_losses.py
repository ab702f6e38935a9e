"""Policy losses that hold pi near the anchor without a clipped ratio: quadratic penalties and divergence masks.

SPO (arXiv 2401.16025, eq. 9), DRPO (arXiv 2606.09821), DPPO with binary total variation or KL (arXiv 2602.04879). In
DRPO and DPPO mu is the policy that sampled, so their anchor is the rollout engine's log-probabilities.

Gradient of both penalties: -A r w with the trust-region weight

    SPO:  w = 1 - sign(A (r - 1)) |r - 1| / epsilon        DRPO: w = 1 - sign(A (r - 1)) |pi - mu| / delta

exactly 0 at the boundary when moving away, negative beyond it (the token is pulled back).
"""

from __future__ import annotations

import torch
from torch import Tensor

from akl_dist.objective._checks import require
from akl_dist.objective.policy_losses import register_policy_loss, weighted_score
from akl_dist.objective.ratios import bounded_log_ratio


def _probability(logp: Tensor) -> Tensor:
    """exp(logp), detached, at most 1 also where rounding left a log-probability above 0."""
    return logp.detach().clamp(max=0).exp()


def _penalised(log_ratio: Tensor, advantages: Tensor, strength: Tensor | float) -> Tensor:
    """-A r + |A| strength (r - 1)^2 / 2; r is differentiable, strength a constant."""
    bounded = bounded_log_ratio(log_ratio)
    return -advantages * bounded.exp() + advantages.abs() * strength * torch.expm1(bounded) ** 2 / 2


@register_policy_loss("spo")
def spo(*, logp: Tensor, anchor_logp: Tensor, advantages: Tensor, mask: Tensor, epsilon: float = 0.2) -> Tensor:
    """-A r + |A| (r - 1)^2 / (2 epsilon); shapes as in `policy_loss`.

    The boundary is a ratio, so the weight of rare tokens is unbounded: 1 - |r - 1| / epsilon is -1e4 for a token that
    went from probability 1e-6 to 2e-3.

    Args:
        epsilon: |r - 1| at which the gradient of a token moving away is 0.
    """
    require(epsilon > 0, "spo epsilon", got=epsilon, expected="a positive number", remedy="0.2 is usual")
    return _penalised(logp - anchor_logp, advantages, 1 / epsilon)


@register_policy_loss("drpo")
def drpo(*, logp: Tensor, anchor_logp: Tensor, advantages: Tensor, mask: Tensor, delta: float = 12.5) -> Tensor:
    """-A r + |A| mu (r - 1)^2 / (2 delta), mu = exp(anchor_logp) constant; shapes as in `policy_loss`.

    Args:
        delta: |pi - mu| at which the gradient of a token moving away is 0. The published 12.5 (default, for parity) is
            never reached, since |pi - mu| <= 1: the weight stays within [0.92, 1.08], which is close to no trust region
            at all. 0.15 puts the boundary where DPPO has it; 0.08 = 1 / 12.5.
    """
    require(delta > 0, "drpo delta", got=delta, expected="a positive number", remedy="12.5 (published), 0.15 or 0.08")
    return _penalised(logp - anchor_logp, advantages, _probability(anchor_logp) / delta)


def _masked_score(
    valid: Tensor, *, logp: Tensor, anchor_logp: Tensor, advantages: Tensor, max_ratio: float, deltas: tuple[float, float]
) -> Tensor:
    """-A sg(min(r, max_ratio)) valid logp."""
    for name, delta in zip(("delta_low", "delta_high"), deltas, strict=True):
        require(delta >= 0, f"dppo {name}", got=delta, expected="a number of at least 0", remedy="0.15 (tv), 0.05 (kl)")
    require(max_ratio > 0, "dppo max_ratio", got=max_ratio, expected="a positive number", remedy="20 is usual")
    ratio = bounded_log_ratio(logp - anchor_logp).detach().exp().clamp(max=max_ratio)
    return weighted_score(torch.where(valid, ratio, torch.zeros_like(ratio)), logp=logp, advantages=advantages)


@register_policy_loss("dppo_tv")
def dppo_tv(
    *,
    logp: Tensor,
    anchor_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    delta_low: float = 0.15,
    delta_high: float = 0.15,
    max_ratio: float = 20.0,
) -> Tensor:
    """-A sg(min(r, max_ratio)) valid logp, valid = [pi - mu <= delta_high] for A > 0, [pi - mu >= -delta_low] otherwise.

    A token that moves back towards mu is always valid; shapes as in `policy_loss`.
    """
    distance = _probability(logp) - _probability(anchor_logp)
    valid = torch.where(advantages > 0, distance <= delta_high, distance >= -delta_low)
    return _masked_score(
        valid,
        logp=logp,
        anchor_logp=anchor_logp,
        advantages=advantages,
        max_ratio=max_ratio,
        deltas=(delta_low, delta_high),
    )


def _binary_kl(logp: Tensor, anchor_logp: Tensor) -> Tensor:
    """KL between the two-outcome distributions (token, rest) of mu and pi: finite also where a probability is 0 or 1."""
    log_pi, log_mu = logp.detach().clamp(max=0), anchor_logp.clamp(max=0)
    rest_pi = (-torch.expm1(log_pi)).clamp(min=torch.finfo(logp.dtype).tiny)
    rest_mu = -torch.expm1(log_mu)
    return log_mu.exp() * (log_mu - log_pi) + torch.special.xlogy(rest_mu, rest_mu) - rest_mu * rest_pi.log()


@register_policy_loss("dppo_kl")
def dppo_kl(
    *,
    logp: Tensor,
    anchor_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    delta_low: float = 0.05,
    delta_high: float = 0.05,
    max_ratio: float = 20.0,
) -> Tensor:
    """-A sg(min(r, max_ratio)) valid logp, valid = [D <= delta or moving back towards mu], D the binary KL(mu || pi).

    `delta_high` holds for A > 0, `delta_low` otherwise; shapes as in `policy_loss`.
    """
    divergence, step = _binary_kl(logp, anchor_logp), logp.detach() - anchor_logp
    valid = torch.where(advantages > 0, (divergence <= delta_high) | (step <= 0), (divergence <= delta_low) | (step >= 0))
    return _masked_score(
        valid,
        logp=logp,
        anchor_logp=anchor_logp,
        advantages=advantages,
        max_ratio=max_ratio,
        deltas=(delta_low, delta_high),
    )
