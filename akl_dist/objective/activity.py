"""How strongly each loss term acts: gradient norms in the logits, summed so that ranks can add them.

A term that depends on the logits of a state only through the sampled token's log-probability has the gradient
c (onehot(y) - pi), c = d loss / d logp, with squared norm c^2 * score_norm2. Exact divergences have their own norms
(`logprobs.TokenStatistics`). All norms are with respect to the temperature-scaled logits; ratios do not depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from akl_dist.objective._checks import require_shape
from akl_dist.objective.kl import combine_directions, sampled_surrogates
from akl_dist.objective.masking import as_bool, select
from akl_dist.objective.ratios import LOG_RATIO_BOUND, bounded_log_ratio, masked_log_ratio


class RoleSums(NamedTuple):
    """A sum over reasoning tokens and one over answer tokens: 0-d float64 tensors, additive over batches and ranks."""

    reasoning: Tensor
    answer: Tensor


class ActivitySums(NamedTuple):
    """Sums of squared logit-gradient norms of the KL term and of the policy term, per role."""

    kl: RoleSums
    policy: RoleSums


class DirectionSums(NamedTuple):
    """Sums of squared norms of the forward and reverse KL gradients and of their inner product, per role."""

    forward: RoleSums
    reverse: RoleSums
    dot: RoleSums


class PolicyStatistics(NamedTuple):
    """Additive 0-d sums over unmasked tokens (`ratio_max` combines by maximum); divide by `tokens` for shares."""

    tokens: Tensor
    clipped: Tensor
    clamped: Tensor
    ratio_sum: Tensor
    ratio_max: Tensor


def token_gradient(loss: Callable[[Tensor], Tensor], logp: Tensor) -> Tensor:
    """d sum(loss(logp)) / d logp, detached, shape of `logp`: cheap, since the model is not part of the graph.

    Example: `token_gradient(lambda x: policy_loss("ppo", logp=x, ...), logp)`.
    """
    with torch.enable_grad():
        leaf = logp.detach().clone().requires_grad_(True)
        (gradient,) = torch.autograd.grad(loss(leaf).sum(), leaf)
    return gradient


def policy_statistics(*, log_ratio: Tensor, advantages: Tensor, mask: Tensor, gradient: Tensor) -> PolicyStatistics:
    """Ratio, clip and clamp sums of a policy loss; all per-token inputs of one shape, [B, T] or [n].

    A token counts as clipped if its advantage is not 0 but its policy gradient is: the loss's trust region removed it
    (either side of PPO's window, dual clip, hard masks). Clamped: |log-ratio| above the numerical bound of 20.

    Args:
        log_ratio: the loss's own, from `ratios.loss_log_ratio`.
        gradient: d policy loss / d logp from `token_gradient`.
    """
    require_shape("advantages", advantages, log_ratio.shape)
    require_shape("gradient", gradient, log_ratio.shape)
    keep = as_bool(mask)
    log_ratio = select(log_ratio.detach(), keep)
    ratio = select(bounded_log_ratio(log_ratio).exp(), keep)
    clipped = (gradient == 0) & (advantages != 0) & keep
    return PolicyStatistics(
        tokens=keep.sum(),
        clipped=clipped.sum(),
        clamped=((log_ratio.abs() > LOG_RATIO_BOUND) & keep).sum(),
        ratio_sum=ratio.double().sum(),
        ratio_max=ratio.max() if ratio.numel() else ratio.new_zeros(()),
    )


@torch.no_grad()
def trust_region_weights(*, gradient: Tensor, logp: Tensor, anchor_logp: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """w in d loss / d logp = -A r w, r = pi/anchor: what a trust region leaves of the unconstrained gradient.

    1 without a trust region, below 1 moving away from the anchor, negative beyond the region, above 1 moving back; see
    `proximity_losses` for SPO and DRPO. All inputs of one shape, [B, T] or [n].

    Args:
        gradient: d policy loss / d logp from `token_gradient`, without a rollout correction.

    Returns: float64, same shape; 1 where masked and where A = 0, since nothing is left to weigh.
    """
    require_shape("advantages", advantages, logp.shape)
    require_shape("gradient", gradient, logp.shape)
    counted = as_bool(mask) & (advantages != 0)
    ratio = bounded_log_ratio(masked_log_ratio(logp, anchor_logp, counted).double()).exp()
    plain = -select(advantages, counted).double() * ratio
    weight = select(gradient, counted).double() / torch.where(counted, plain, torch.ones_like(plain))
    return torch.where(counted, weight, torch.ones_like(weight))


def role_sums(values: Tensor, *, answer_mask: Tensor, mask: Tensor) -> RoleSums:
    """Sum per-token values by role over unmasked tokens; masked entries may hold NaN."""
    require_shape("answer_mask", answer_mask, values.shape)
    require_shape("mask", mask, values.shape)
    keep, answer = as_bool(mask), as_bool(answer_mask)
    values = values.detach().double()
    return RoleSums(select(values, keep & ~answer).sum(), select(values, keep & answer).sum())


def sampled_norm2(gradient: Tensor, score_norm2: Tensor) -> Tensor:
    """Squared logit-gradient norm per token of a term with `gradient` = d term / d logp (policy loss or sampled KL)."""
    return gradient.detach() ** 2 * score_norm2.detach()


def full_kl_norm2(
    direction: str, *, forward_norm2: Tensor, reverse_norm2: Tensor, forward_reverse_dot: Tensor, coefficient: Tensor
) -> Tensor:
    """Squared logit-gradient norm per token of `coefficient` (beta times state weight) times an exact divergence."""
    if direction == "symmetric":
        norm2 = 0.25 * (forward_norm2 + reverse_norm2 + 2 * forward_reverse_dot)
    else:
        norm2 = combine_directions(direction, forward_norm2, reverse_norm2)
    return coefficient.detach() ** 2 * norm2


def kl_activity(*, kl_norm2: Tensor, policy_norm2: Tensor, answer_mask: Tensor, mask: Tensor) -> ActivitySums:
    """Sums behind `objective/kl_activity_reasoning|answer`: squared norms of both terms by role.

    Args:
        kl_norm2: per token, from `sampled_norm2` (gradient of the whole KL loss, betas included) or `full_kl_norm2`.
        policy_norm2: per token, from `sampled_norm2` with the policy loss's gradient.
    """
    return ActivitySums(
        kl=role_sums(kl_norm2, answer_mask=answer_mask, mask=mask),
        policy=role_sums(policy_norm2, answer_mask=answer_mask, mask=mask),
    )


def activity_ratio(kl: Tensor | float, policy: Tensor | float) -> float | None:
    """RMS of the KL gradient over the policy gradient from (globally added) sums; None without a policy gradient."""
    return math.sqrt(float(kl) / float(policy)) if float(policy) > 0 else None


def sampled_direction_products(
    *, logp: Tensor, ref_logp: Tensor, score_norm2: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(forward_norm2, reverse_norm2, dot) per token of the unweighted sampled surrogates, for `direction_cosine`."""
    forward = token_gradient(lambda x: sampled_surrogates(logp=x, ref_logp=ref_logp, mask=mask)[0], logp)
    reverse = token_gradient(lambda x: sampled_surrogates(logp=x, ref_logp=ref_logp, mask=mask)[1], logp)
    norm2 = score_norm2.detach()
    return forward**2 * norm2, reverse**2 * norm2, forward * reverse * norm2


def direction_sums(
    *, forward_norm2: Tensor, reverse_norm2: Tensor, forward_reverse_dot: Tensor, answer_mask: Tensor, mask: Tensor
) -> DirectionSums:
    """Sums behind `objective/kl_direction_cosine_reasoning|answer`, per role."""
    return DirectionSums(
        forward=role_sums(forward_norm2, answer_mask=answer_mask, mask=mask),
        reverse=role_sums(reverse_norm2, answer_mask=answer_mask, mask=mask),
        dot=role_sums(forward_reverse_dot, answer_mask=answer_mask, mask=mask),
    )


def direction_cosine(forward: Tensor | float, reverse: Tensor | float, dot: Tensor | float) -> float | None:
    """Cosine between the forward and reverse KL gradients from added sums; None where either is zero (pi = ref)."""
    scale = math.sqrt(float(forward)) * math.sqrt(float(reverse))
    return float(dot) / scale if scale > 0 else None
