"""Log-probabilities, entropy and divergences of sampled tokens from whole logits: the definition, by plain autograd.

:mod:`~akl_dist.objective.fused_head` computes the same numbers from hidden states without ever holding all logits.

Everything of one token comes from the same temperature-scaled logits z = logits / temperature. Derivatives with
respect to the raw logits therefore carry a factor 1/temperature, and squared norms a factor 1/temperature^2;
`TokenStatistics` states its norms with respect to z (in ratios of two gradients the factor cancels).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from akl_dist.objective._checks import require, require_shape
from akl_dist.objective.kl import finite_logprobs, full_kl
from akl_dist.objective.masking import at_least_float32
from akl_dist.objective.topk import TopkReference, topk_buckets


class TokenStatistics(NamedTuple):
    """Per-token tensors [n], float32 (float64 for float64 logits); nats. The last four are detached diagnostics.

    score_norm2 = ||onehot(y) - pi||^2, squared norm of d logp / dz;
    forward_norm2 = ||pi - ref||^2, of d KL(ref||pi) / dz;
    reverse_norm2 = ||pi (log pi/ref - KL)||^2, of d KL(pi||ref) / dz;
    forward_reverse_dot = inner product of the last two gradients.
    None: not asked for, or no reference given.
    """

    logp: Tensor
    entropy: Tensor
    kl_forward: Tensor | None = None
    kl_reverse: Tensor | None = None
    score_norm2: Tensor | None = None
    forward_norm2: Tensor | None = None
    reverse_norm2: Tensor | None = None
    forward_reverse_dot: Tensor | None = None


def token_statistics(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    ref_logprobs: Tensor | None = None,
    topk: TopkReference | None = None,
    with_gradient_norms: bool = False,
) -> TokenStatistics:
    """Statistics of the sampled tokens under softmax(logits / temperature).

    Args:
        logits: [n, V] raw logits, any float dtype; row i is the state *before* targets[i] (the logits of the previous
            position). -inf excludes a token from the support.
        targets: [n] sampled token ids in [0, V).
        temperature: sampling temperature, > 0.
        ref_logprobs: [n, V] normalised log-probabilities of the reference at the same temperature; detached, moved to
            the logits' device and dtype. Gives divergences over the vocabulary.
        topk: the reference's top-k tokens instead: gives divergences over its buckets. Neither: no divergences.
        with_gradient_norms: also fill the detached norms.
    """
    require(logits.dim() == 2, "logits", got=f"shape {tuple(logits.shape)}", expected="[n, V]", remedy="flatten first")
    require_shape("targets", targets, logits.shape[:1])
    require(temperature > 0, "temperature", got=temperature, expected="> 0", remedy="greedy has no log-probabilities")
    scaled = at_least_float32(logits)
    if temperature != 1:
        scaled = scaled / temperature
    logprobs = torch.log_softmax(scaled, dim=-1)
    logp = logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    logprobs = finite_logprobs(logprobs)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    if topk is not None:
        require(ref_logprobs is None, "topk", got="ref_logprobs as well", expected="one of the two", remedy="leave one out")
        buckets, rest_square = topk_buckets(logprobs, targets, topk)
        forward, reverse = buckets.divergences()
        if not with_gradient_norms:
            return TokenStatistics(logp, entropy, forward, reverse)
        score_norm2 = _gradient_norms(logprobs, targets, None, None)[0]
        with torch.no_grad():
            norms = buckets.gradient_norms(reverse, rest_square)
        return TokenStatistics(logp, entropy, forward, reverse, score_norm2, *norms)
    forward = reverse = reference = None
    if ref_logprobs is not None:
        require_shape("ref_logprobs", ref_logprobs, logits.shape)
        reference = finite_logprobs(ref_logprobs.detach().to(device=logits.device, dtype=scaled.dtype))
        forward = full_kl("forward", logprobs=logprobs, ref_logprobs=reference)
        reverse = full_kl("reverse", logprobs=logprobs, ref_logprobs=reference)
    if not with_gradient_norms:
        return TokenStatistics(logp, entropy, forward, reverse)
    return TokenStatistics(logp, entropy, forward, reverse, *_gradient_norms(logprobs, targets, reference, reverse))


@torch.no_grad()
def _gradient_norms(
    logprobs: Tensor, targets: Tensor, reference: Tensor | None, reverse: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    index = targets.unsqueeze(-1)
    probs = logprobs.exp()
    # 1 - pi(y) as the sum of the others: for a nearly certain token pi(y) is rounded to 1 and the difference to 0.
    others = probs.scatter(-1, index, 0.0)
    score_norm2 = (others * others).sum(-1) + others.sum(-1) ** 2
    if reference is None or reverse is None:
        return score_norm2, None, None, None
    forward_gradient = probs - reference.exp()
    reverse_gradient = probs * (logprobs - reference - reverse.unsqueeze(-1))
    return (
        score_norm2,
        (forward_gradient * forward_gradient).sum(-1),
        (reverse_gradient * reverse_gradient).sum(-1),
        (forward_gradient * reverse_gradient).sum(-1),
    )
