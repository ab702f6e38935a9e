"""KL regularisers. forward = KL(ref || pi), reverse = KL(pi || ref), symmetric = half of each.

Three families, under separate names because they are not interchangeable:

* `kl_loss`: surrogates on sampled tokens whose *expected gradient* is that of the named divergence; their value is
  not the divergence. Forward is w k3 and reverse w k2 with w = pi/mu constant (arXiv 2505.17508, arXiv 2510.01555).
* `kl_value_k1|k2|k3`: detached value estimates of the reverse KL, for metrics (k1 as a loss has expected gradient 0).
* `full_kl`: exact over the vocabulary, value and gradient; `full_kl_loss` weights it by state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from akl_dist.objective._checks import require, require_name, require_shape
from akl_dist.objective.masking import as_bool, at_least_float32, select
from akl_dist.objective.ratios import LOG_RATIO_BOUND, bounded_log_ratio, masked_log_ratio, segment_cumsum

DIRECTIONS = ("forward", "reverse", "symmetric")
STATE_WEIGHTS = ("token", "cumulative", "none")


class StateWeights(NamedTuple):
    """Importance weights of the tokens (detached, 1 where masked) and where `max_weight` cut them (bool)."""

    weight: Tensor
    truncated: Tensor


def combine_directions(direction: str, forward: Tensor, reverse: Tensor) -> Tensor:
    """The named direction out of a forward and a reverse divergence (or gradient) of one shape."""
    require_name("KL direction", direction, DIRECTIONS)
    if direction == "forward":
        return forward
    if direction == "reverse":
        return reverse
    return 0.5 * forward + 0.5 * reverse


def state_weights(
    *,
    logp: Tensor,
    behaviour_logp: Tensor,
    mask: Tensor,
    state_weight: str = "token",
    max_weight: float | None = None,
    include_current: bool = True,
    segment_ids: Tensor | None = None,
) -> StateWeights:
    """Weights that turn an average over tokens sampled by mu into one over pi, all detached.

    token: pi/mu of the current token (states stay mu's); cumulative: the product of pi/mu over the unmasked tokens of
    the sequence up to the current one (states become pi's). `include_current=False` leaves the current token's ratio
    out, for divergences that are exact at t because nothing is sampled there: token 1, cumulative the product to t-1.
    none: 1 everywhere. Then sampled surrogates have the gradient of a stated divergence only while pi = mu; it is here
    because much GRPO code does it, and to be compared with.

    Args:
        logp, behaviour_logp, mask: [B, T], one sequence a row, or packed [n]; masked entries may hold NaN.
        max_weight: truncation (None: untruncated). Log-ratios, or their running sums, are first bounded to +-20.
        segment_ids: sequence of each token. Required for packed [n] with `cumulative`; None: each row is a sequence.
    """
    require_name("state_weight", state_weight, STATE_WEIGHTS)
    require(
        max_weight is None or max_weight > 0,
        "max_weight",
        got=max_weight,
        expected="a positive number, or null for untruncated",
        remedy="2 for token weights and 5 for cumulative ones are what the configs' auto means",
    )
    log_ratio = masked_log_ratio(logp.detach(), behaviour_logp, mask)
    if state_weight == "cumulative":
        require(
            log_ratio.dim() > 1 or segment_ids is not None,
            "cumulative state weights of a packed batch",
            got="segment_ids=None",
            expected="the sequence of each token",
            remedy="pass segment_ids: without them the product would run across sequences",
        )
        log_ratio = segment_cumsum(log_ratio, segment_ids, exclusive=not include_current)
    elif state_weight == "none" or not include_current:
        log_ratio = torch.zeros_like(log_ratio)
    dtype = at_least_float32(logp).dtype
    weight = select(log_ratio, mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().to(dtype)
    if max_weight is None:
        return StateWeights(weight, torch.zeros_like(weight, dtype=torch.bool))
    truncated = (weight > max_weight) & as_bool(mask)
    return StateWeights(torch.where(truncated, torch.full_like(weight, max_weight), weight), truncated)


def _k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio**2


def _k3(log_ratio: Tensor) -> Tensor:
    """ref/pi - 1 + log(pi/ref), bounded before the exponential; expm1 keeps small values accurate in float32."""
    bounded = bounded_log_ratio(log_ratio)
    return torch.expm1(-bounded) + bounded


def sampled_surrogates(*, logp: Tensor, ref_logp: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Unweighted (k3, k2) of log pi/ref: what the forward and the reverse loss differentiate. 0 where masked."""
    log_ratio = masked_log_ratio(logp, ref_logp, mask)
    return _k3(log_ratio), _k2(log_ratio)


def kl_loss(
    direction: str,
    *,
    logp: Tensor,
    ref_logp: Tensor,
    behaviour_logp: Tensor,
    mask: Tensor,
    state_weight: str = "token",
    max_weight: float | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """Sampled KL surrogate per token, to be minimised: forward sg(w) k3, reverse sg(w) k2, symmetric half of each.

    With tokens drawn from the behaviour policy its expected gradient is exactly that of the named divergence, at
    states of mu (`token`) or of pi (`cumulative`). Without w (`none`), k3 is the forward KL on-policy and neither off-policy.

    Args:
        direction: "forward", "reverse" or "symmetric".
        logp: log pi of the sampled tokens, [B, T] or packed [n]; the only input with a gradient.
        ref_logp, behaviour_logp: same shape: frozen reference, and the policy that sampled the tokens.
        mask: same shape, non-zero on tokens the policy sampled; the result is 0 elsewhere.
        state_weight, max_weight, segment_ids: see `state_weights`.

    Returns: tensor of the shape of `logp`, no coefficient, not divided by anything.
    """
    forward, reverse = sampled_surrogates(logp=logp, ref_logp=ref_logp, mask=mask)
    weight = state_weights(
        logp=logp,
        behaviour_logp=behaviour_logp,
        mask=mask,
        state_weight=state_weight,
        max_weight=max_weight,
        segment_ids=segment_ids,
    ).weight
    return select(weight * combine_directions(direction, forward, reverse), mask)


def kl_value_k1(*, logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
    """Detached value estimate k1 = log pi/ref per token (0 where masked): unbiased for the reverse KL, signed."""
    return masked_log_ratio(logp.detach(), ref_logp, mask)


def kl_value_k2(*, logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
    """Detached value estimate k2 = (log pi/ref)^2 / 2 per token: biased, never negative."""
    return _k2(masked_log_ratio(logp.detach(), ref_logp, mask))


def kl_value_k3(*, logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
    """Detached value estimate k3 = ref/pi - 1 + log pi/ref per token: unbiased for the reverse KL, never negative."""
    return _k3(masked_log_ratio(logp.detach(), ref_logp, mask))


def finite_logprobs(logprobs: Tensor) -> Tensor:
    """Log-probabilities with -inf (excluded tokens) raised to the lowest finite number, so that 0 * log 0 is 0."""
    return logprobs.clamp(min=torch.finfo(logprobs.dtype).min)


def full_kl(direction: str, *, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Exact divergence over the vocabulary, [..., V] -> [...], in nats; differentiable in `logprobs`.

    With `logprobs = log_softmax(z)` the gradients are, per entry v of z (apply 1/temperature for the raw logits):

        d KL(ref||pi) / d z_v = pi(v) - ref(v)
        d KL(pi||ref) / d z_v = pi(v) (log(pi(v)/ref(v)) - KL(pi||ref))

    Args:
        logprobs: normalised log-probabilities of the policy; -inf for excluded tokens is allowed.
        ref_logprobs: same shape, of the reference, at the same temperature; detached.
    """
    require_name("KL direction", direction, DIRECTIONS)
    require_shape("ref_logprobs", ref_logprobs, logprobs.shape)
    policy = finite_logprobs(at_least_float32(logprobs))
    reference = finite_logprobs(ref_logprobs.detach().to(policy.dtype))
    difference = policy - reference
    if direction == "forward":
        return -(reference.exp() * difference).sum(-1)
    reverse = (policy.exp() * difference).sum(-1)
    if direction == "reverse":
        return reverse
    return combine_directions(direction, -(reference.exp() * difference).sum(-1), reverse)


def full_kl_loss(
    direction: str,
    *,
    kl_forward: Tensor,
    kl_reverse: Tensor,
    logp: Tensor,
    behaviour_logp: Tensor,
    mask: Tensor,
    state_weight: str = "token",
    max_weight: float | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """Exact per-token divergences of the named direction times their state weight; 0 where masked.

    Nothing is sampled at t, so the weight excludes the current token (token: 1; cumulative: product up to t-1).

    Args:
        kl_forward, kl_reverse: exact divergences at the state before each token, [B, T] or [n]; carry the gradient.
        logp, behaviour_logp, mask, state_weight, max_weight, segment_ids: see `state_weights`.
    """
    require_shape("kl_forward", kl_forward, logp.shape)
    require_shape("kl_reverse", kl_reverse, logp.shape)
    weight = state_weights(
        logp=logp,
        behaviour_logp=behaviour_logp,
        mask=mask,
        state_weight=state_weight,
        max_weight=max_weight,
        include_current=False,
        segment_ids=segment_ids,
    ).weight
    divergence = combine_directions(
        direction, select(at_least_float32(kl_forward), mask), select(at_least_float32(kl_reverse), mask)
    )
    return select(weight * divergence, mask)
