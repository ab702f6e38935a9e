"""CoKL (arXiv 2608.01743): keep the policy close to the reference *among correct responses* only.

With C the correct responses to a prompt, L = KL( ref(.|C) || pi(.|C) ) has the gradient

    sum over y in C of (pi_C(y) - ref_C(y)) grad log pi(y),        p_C(y) = p(y) / p(C)

whose coefficients sum to zero: neither the probability of being correct nor any wrong response is anchored. Estimators
are coefficients c on sampled responses, constants of the step, with `loss = sum c * log pi(y)`; log pi(y) is the sum over
the response's tokens. They depend on the current pi, so they are computed anew before every optimizer step.

* `paper`: -1/|C_ref| on correct draws from the reference, +w_j on correct draws of the policy, w = normalised
  clip(pi/old, 1 +- clip). On-policy (pi = old) its mean over draws is the population gradient times the probability that
  neither set is empty. Off-policy the clip pulls the second part from pi_C towards old_C.
* `group`: u - v on the correct members of one rollout group, u = softmax(log pi - log mu), v = softmax(log ref - log mu):
  exactly the gradient of KL(v || u). Self-normalised weights: bias of order 1/n, growing with the distance to mu.
* `reference_buffer`: the same on correct draws from the reference: v uniform, u = softmax(log pi - log ref). Same order
  of bias; v has no weights to degenerate, so its error is the lowest of the three.

A prompt has no term, zero coefficients, and counts nowhere: for `paper` without a correct reference response or without a
correct response of the policy (one part alone would be replay, or its opposite), for the others with fewer than two
correct members, where u = v.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from akl_dist.objective._checks import require, require_name, require_shape
from akl_dist.objective.masking import as_bool, at_least_float32
from akl_dist.objective.ratios import LOG_RATIO_BOUND

COKL_ESTIMATORS = ("paper", "group", "reference_buffer")
_HALVINGS = 60  # of the interval in which the tempering exponent lies: float64 has 53 bits


class CoklTerms(NamedTuple):
    """Coefficients of the samples and what they rest on, per prompt. All detached; G prompts in ascending order of index.

    coefficients: [N], dtype of seq_logp (float32 at least), 0 outside the estimator's correct members.
    used: [N] bool, members of a term (also where their coefficient is 0).
    prompts: [G] the values of group_index. has_term: [G] bool; the loss is beta times the mean over prompts that have one.
    ess: [G] float64, effective sample size 1 / sum of squares of the policy-side weights (after tempering), 0 without a term.
    largest_weight: [G] float64, the largest of those weights, 0 without a term.
    exponent: [G] float64, tempering exponent, 1 = untempered.
    divergence: [G] float64, KL(v || u) of the (tempered) weights in nats; 0 without a term; None for `paper`.
    duplicates: [G] int64, used members that repeat another of the same origin; None without sequence_ids.
    """

    coefficients: Tensor
    used: Tensor
    prompts: Tensor
    has_term: Tensor
    ess: Tensor
    largest_weight: Tensor
    exponent: Tensor
    divergence: Tensor | None
    duplicates: Tensor | None


class _Groups:
    """Sums, maxima and softmaxes over the members of each prompt, float64."""

    def __init__(self, group_index: Tensor) -> None:
        self.prompts, self.inverse = group_index.unique(return_inverse=True)

    def sum(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.prompts.numel(), dtype=torch.float64).index_add(0, self.inverse, values.double())

    def largest(self, values: Tensor, members: Tensor) -> Tensor:
        """Per prompt over its members; -inf where there is none."""
        start = torch.full((self.prompts.numel(),), float("-inf"), dtype=torch.float64, device=values.device)
        return start.scatter_reduce(0, self.inverse[members], values.double()[members], reduce="amax")

    def spread(self, per_prompt: Tensor) -> Tensor:
        return per_prompt[self.inverse]

    def normalised(self, weights: Tensor) -> Tensor:
        """Weights [N] over their prompt's sum; 0 where the sum is 0."""
        total = self.spread(self.sum(weights))
        return weights / torch.where(total > 0, total, torch.ones_like(total))

    def relative(self, log_weights: Tensor, members: Tensor) -> Tensor:
        """Log-weights below their prompt's largest, at least -LOG_RATIO_BOUND; 0 outside the members.

        Taking off the largest first changes no softmax and keeps differences that a clamp around 0 would erase: the
        log-ratios of long responses are all far from 0.
        """
        shifted = log_weights.double() - self.spread(self.largest(log_weights, members))
        return torch.where(members, shifted.clamp(min=-LOG_RATIO_BOUND), torch.zeros_like(shifted))

    def softmax(self, relative: Tensor, members: Tensor, exponent: Tensor) -> Tensor:
        """softmax(exponent * relative) over the members of each prompt, [N]; 0 elsewhere."""
        raised = (relative * self.spread(exponent)).exp()
        return self.normalised(torch.where(members, raised, torch.zeros_like(raised)))

    def ess(self, weights: Tensor) -> Tensor:
        squares = self.sum(weights**2)
        return torch.where(squares > 0, 1 / squares.clamp(min=torch.finfo(torch.float64).tiny), torch.zeros_like(squares))


def cokl_coefficients(
    estimator: str,
    *,
    seq_logp: Tensor,
    seq_ref_logp: Tensor,
    seq_behaviour_logp: Tensor,
    correct: Tensor,
    group_index: Tensor,
    is_reference: Tensor,
    clip: float = 0.2,
    min_ess_fraction: float = 0.0,
    length_normalize: bool = False,
    lengths: Tensor | None = None,
) -> Tensor:
    """Detached coefficients [N] of `loss = sum c * seq_logp`; arguments as in `cokl_terms`, which also says what they rest on."""
    return cokl_terms(
        estimator,
        seq_logp=seq_logp,
        seq_ref_logp=seq_ref_logp,
        seq_behaviour_logp=seq_behaviour_logp,
        correct=correct,
        group_index=group_index,
        is_reference=is_reference,
        clip=clip,
        min_ess_fraction=min_ess_fraction,
        length_normalize=length_normalize,
        lengths=lengths,
    ).coefficients


@torch.no_grad()
def cokl_terms(
    estimator: str,
    *,
    seq_logp: Tensor,
    seq_ref_logp: Tensor,
    seq_behaviour_logp: Tensor,
    correct: Tensor,
    group_index: Tensor,
    is_reference: Tensor,
    clip: float = 0.2,
    min_ess_fraction: float = 0.0,
    length_normalize: bool = False,
    lengths: Tensor | None = None,
    sequence_ids: Tensor | None = None,
) -> CoklTerms:
    """CoKL coefficients of N responses to G prompts; a prompt without a term (see the module) has zero coefficients.

    Args:
        estimator: one of `COKL_ESTIMATORS`.
        seq_logp: [N] log pi(y) of whole responses, in nats, under the current policy. Detached here.
        seq_ref_logp: [N] under the reference. Not read by `paper`.
        seq_behaviour_logp: [N] of the policy's responses: for `paper` under pi at the start of the step (old), for `group`
            under the policy that sampled them (mu). Not read for reference responses, nor by `reference_buffer`.
        correct: [N]; False also for responses without a verdict. Log-probs of responses not used may hold NaN.
        group_index: [N] integers; responses to one prompt share one.
        is_reference: [N]; True for draws from the reference. `group` uses the others only, `reference_buffer` these only.
        clip: half-width of the window around 1 of `paper`'s sequence ratio.
        min_ess_fraction: f > 0 tempers log-weights by the largest exponent in [0, 1] at which u and v both have an effective
            sample size of at least max(2, f n), n being the members; of two members (where 2 means equal weights, so no
            term) at least f n. The exponent is shared, so the term is still the gradient of a divergence (over the
            exponent) and zero at pi = ref. 0: untempered, the exact estimator. `paper` has nothing to temper: its ratios
            are clipped.
        length_normalize: take log-probs per token instead of per response, in the weights and in the loss (c holds
            1/length). Another target than KL(ref_C || pi_C), on which long responses do not make weights one-hot.
        lengths: [N] response tokens; needed with length_normalize.
        sequence_ids: [N] integers, equal for equal responses; only for `CoklTerms.duplicates`.

    Raises: `ValueError` on an unknown estimator, shapes that differ, a non-finite log-prob of a used response, or a
        number out of range.
    """
    given = {"seq_ref_logp": seq_ref_logp, "seq_behaviour_logp": seq_behaviour_logp, "correct": correct,
             "group_index": group_index, "is_reference": is_reference}  # fmt: skip
    _check(estimator, seq_logp, given, min_ess_fraction)
    scale = _per_token(seq_logp, lengths) if length_normalize else torch.ones_like(seq_logp, dtype=torch.float64)
    groups = _Groups(group_index)
    right, reference = as_bool(correct), as_bool(is_reference)
    if estimator == "paper":
        return _paper(groups, seq_logp, seq_behaviour_logp, right & ~reference, right & reference, scale, clip, sequence_ids)
    members = right & reference if estimator == "reference_buffer" else right & ~reference
    behaviour = seq_ref_logp if estimator == "reference_buffer" else seq_behaviour_logp
    members &= groups.spread(groups.sum(members)) >= 2
    policy = _log_ratio("log pi - log behaviour", seq_logp, behaviour, members, scale)
    target = _log_ratio("log ref - log behaviour", seq_ref_logp, behaviour, members, scale)
    policy, target = groups.relative(policy, members), groups.relative(target, members)
    exponent = _tempering(groups, (policy, target), members, min_ess_fraction)
    u, v = (groups.softmax(relative, members, exponent) for relative in (policy, target))
    divergence = _divergence(groups, v, u, members)
    return _terms(groups, (u - v) * scale, u, members, exponent, divergence, sequence_ids, reference, seq_logp)


def _check(estimator: str, seq_logp: Tensor, others: Mapping[str, Tensor], min_ess_fraction: float) -> None:
    require_name("CoKL estimator", estimator, COKL_ESTIMATORS)
    require(seq_logp.dim() == 1, "seq_logp", got=f"shape {tuple(seq_logp.shape)}", expected="[N]", remedy="one per response")
    for name, tensor in others.items():
        require_shape(name, tensor, seq_logp.shape)
    require(0 <= min_ess_fraction <= 1, "min_ess_fraction", got=min_ess_fraction, expected="0 to 1", remedy="0.5 is usual")


def _divergence(groups: _Groups, v: Tensor, u: Tensor, members: Tensor) -> Tensor:
    """[G] KL(v || u); softmax weights of log-ratios within the bound are never 0."""
    tiny = torch.finfo(torch.float64).tiny
    return groups.sum(torch.where(members, v * (v.clamp(min=tiny).log() - u.clamp(min=tiny).log()), torch.zeros_like(v)))


def _paper(
    groups: _Groups, seq_logp: Tensor, seq_old_logp: Tensor, current: Tensor, reference: Tensor, scale: Tensor, clip: float,
    sequence_ids: Tensor | None,
) -> CoklTerms:
    require(0 <= clip < 1, "CoKL clip", got=clip, expected="0 <= clip < 1", remedy="0.2 is usual")
    both = groups.spread((groups.sum(current) > 0) & (groups.sum(reference) > 0))
    current, reference = current & both, reference & both
    _log_ratio("log pi of reference responses", seq_logp, torch.zeros_like(seq_logp), reference, scale)  # finite, too
    log_ratio = _log_ratio("log pi - log old", seq_logp, seq_old_logp, current, scale)
    ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().clamp(1 - clip, 1 + clip)
    weights = groups.normalised(torch.where(current, ratio, torch.zeros_like(ratio)))
    uniform = groups.normalised(reference.double())
    ones = torch.ones_like(groups.sum(current))
    return _terms(groups, (weights - uniform) * scale, weights, current | reference, ones, None, sequence_ids, reference, seq_logp)


def _terms(
    groups: _Groups, coefficients: Tensor, weights: Tensor, used: Tensor, exponent: Tensor, divergence: Tensor | None,
    sequence_ids: Tensor | None, is_reference: Tensor, like: Tensor,
) -> CoklTerms:
    has_term = groups.sum(used) > 0
    return CoklTerms(
        coefficients=coefficients.to(at_least_float32(like).dtype),
        used=used,
        prompts=groups.prompts,
        has_term=has_term,
        ess=groups.ess(weights),
        largest_weight=torch.where(has_term, groups.largest(weights, used), torch.zeros_like(exponent)),
        exponent=exponent,
        divergence=divergence,
        duplicates=None if sequence_ids is None else _duplicates(groups, sequence_ids, used, is_reference),
    )


def _log_ratio(subject: str, logp: Tensor, other: Tensor, members: Tensor, scale: Tensor) -> Tensor:
    """(logp - other) * scale on the members in float64, 0 elsewhere."""
    difference = (logp.double() - other.double()) * scale
    difference = torch.where(members, difference, torch.zeros_like(difference))
    require(
        bool(difference.isfinite().all()),
        subject,
        got="a non-finite log-probability of a correct response",
        expected="finite log-probabilities",
        remedy="mark responses without log-probabilities with correct=False",
    )
    return difference


def _per_token(seq_logp: Tensor, lengths: Tensor | None) -> Tensor:
    if lengths is None:
        raise ValueError("CoKL lengths: got None, expected [N] response tokens; pass lengths with length_normalize=True")
    require_shape("lengths", lengths, seq_logp.shape)
    return 1 / lengths.double().clamp(min=1)


def _tempering(groups: _Groups, log_weights: tuple[Tensor, ...], members: Tensor, fraction: float) -> Tensor:
    """[G] largest exponent in [0, 1] at which every softmax keeps the effective sample size; it falls with the exponent."""
    count = groups.sum(members)
    one = torch.ones_like(count)
    if fraction <= 0:
        return one
    needed = torch.where(count > 2, torch.clamp(fraction * count, min=2.0), fraction * count) * (1 - 1e-12)

    def enough(exponent: Tensor) -> Tensor:
        sizes = [groups.ess(groups.softmax(relative, members, exponent)) for relative in log_weights]
        return torch.stack(sizes).amin(0) >= needed

    low, high = torch.zeros_like(count), one
    untempered = enough(one)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        fine = enough(middle)
        low, high = torch.where(fine, middle, low), torch.where(fine, high, middle)
    return torch.where(untempered, one, low)


def _duplicates(groups: _Groups, sequence_ids: Tensor, used: Tensor, is_reference: Tensor) -> Tensor:
    """[G] used members minus distinct ones, draws of the reference and of the policy told apart."""
    require_shape("sequence_ids", sequence_ids, used.shape)
    rows = torch.stack([groups.inverse, is_reference.long(), sequence_ids.long()], dim=1)[used]
    distinct = torch.bincount(rows.unique(dim=0)[:, 0], minlength=groups.prompts.numel())
    return groups.sum(used).long() - distinct
