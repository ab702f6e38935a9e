"""Divergences over the reference's top-k tokens, the sampled token and one bucket for the rest of the vocabulary.

Merging tokens into one bucket never raises a divergence (data processing inequality), so both directions are lower bounds
of the divergence over the vocabulary, and equal to it when nothing is merged (k = V). With P, Q the masses of the rest
bucket under policy and reference, the gradients in the logits z are, for a token v with a bucket of its own and for a
token of the rest,

    d KL(ref||pi) / d z_v = pi(v) - ref(v)                          | pi(v) (1 - Q/P)
    d KL(pi||ref) / d z_v = pi(v) (log(pi(v)/ref(v)) - KL(pi||ref))  | pi(v) (log(P/Q) - KL(pi||ref))

The masses of the rest are sums over its tokens, never 1 minus the others: that difference is rounding noise where the rest
is nearly empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from akl_dist.objective._checks import require, require_shape
from akl_dist.objective.kl import finite_logprobs
from akl_dist.objective.masking import at_least_float32


class TopkReference(NamedTuple):
    """What is kept of the reference's distribution at n states; nats, at the sampling temperature.

    ids: [n, k] distinct token ids, any integer dtype, and logp: [n, k] their log-probs;
    target_logp: [n] log-prob of the sampled token, which may be among the k;
    rest_logp: [n] log of the mass of all other tokens, -inf where there are none.
    """

    ids: Tensor
    logp: Tensor
    rest_logp: Tensor
    target_logp: Tensor

    def rows(self, start: int, stop: int) -> TopkReference:
        """The states start..stop."""
        return TopkReference(*(field[start:stop] for field in self))


class Buckets(NamedTuple):
    """Log-probs [n, k + 2] of policy and reference: top-k, sampled token, rest. Absent buckets (a sampled token that is
    among the top-k, an empty rest) have probability 0 and log-ratio 0 on both sides."""

    logp: Tensor
    ref_logp: Tensor

    def divergences(self) -> tuple[Tensor, Tensor]:
        """(forward, reverse) [n], differentiable in ``logp``."""
        difference = self.logp - self.ref_logp
        return -(self.ref_logp.exp() * difference).sum(-1), (self.logp.exp() * difference).sum(-1)

    def gradient_norms(self, reverse: Tensor, rest_square: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Squared norms of the forward and reverse gradients over the vocabulary, and their inner product, [n].

        rest_square: sum of the squared shares of the rest's tokens in the policy's rest mass.
        """
        probs = self.logp.exp()
        forward_gradient = probs - self.ref_logp.exp()
        reverse_gradient = probs * (self.logp - self.ref_logp - reverse.unsqueeze(-1))
        tokens = torch.cat([torch.ones_like(probs[:, :-1]), rest_square.unsqueeze(-1)], -1)
        return (
            (tokens * forward_gradient**2).sum(-1),
            (tokens * reverse_gradient**2).sum(-1),
            (tokens * forward_gradient * reverse_gradient).sum(-1),
        )


def own_buckets(targets: Tensor, reference: TopkReference | None) -> tuple[Tensor, Tensor]:
    """Ids [n, k + 1] of the tokens with a bucket of their own, and whether each is present (the last is the sampled
    token, absent where it is among the k). Without a reference: the sampled token alone."""
    target = targets.unsqueeze(-1)
    if reference is None:
        return target, torch.ones_like(target, dtype=torch.bool)
    ids = reference.ids.to(device=targets.device, dtype=targets.dtype)
    among = (ids == target).any(-1, keepdim=True)
    return torch.cat([ids, target], -1), torch.cat([torch.ones_like(ids, dtype=torch.bool), ~among], -1)


def make_buckets(own_logp: Tensor, present: Tensor, rest_logp: Tensor, reference: TopkReference) -> Buckets:
    """Both sides' buckets from the policy's log-probs of the own buckets [n, k + 1] and of the rest [n] (-inf: empty)."""
    fields = (reference.logp, reference.target_logp.unsqueeze(-1), reference.rest_logp.unsqueeze(-1))
    ref = torch.cat([field.detach().to(device=own_logp.device, dtype=own_logp.dtype) for field in fields], -1)
    keep = torch.cat([present, ~torch.isneginf(rest_logp).unsqueeze(-1)], -1)
    absent = torch.full((), torch.finfo(own_logp.dtype).min, dtype=own_logp.dtype, device=own_logp.device)
    policy = torch.cat([own_logp, rest_logp.unsqueeze(-1)], -1)
    return Buckets(torch.where(keep, finite_logprobs(policy), absent), torch.where(keep, finite_logprobs(ref), absent))


def topk_buckets(logprobs: Tensor, targets: Tensor, reference: TopkReference) -> tuple[Buckets, Tensor]:
    """Buckets out of whole log-probs [n, V] (differentiable), and the ``rest_square`` of :meth:`Buckets.gradient_norms`."""
    check_topk(reference, targets, logprobs.shape[-1])
    ids, present = own_buckets(targets, reference)
    merged = torch.ones_like(logprobs, dtype=torch.bool).scatter(-1, ids, value=False)
    some = merged.any(-1)
    # -inf and a logsumexp over nothing but -inf have no gradient: empty rows go in as zeros and are replaced after.
    rest = torch.where(merged | ~some.unsqueeze(-1), logprobs, -torch.inf)
    rest_logp = torch.where(some, torch.logsumexp(rest, -1), -torch.inf)
    shares = torch.where(merged, (logprobs - rest_logp.unsqueeze(-1)).exp(), 0.0).detach()
    return make_buckets(logprobs.gather(-1, ids), present, rest_logp, reference), (shares**2).sum(-1)


@torch.no_grad()
def topk_reference(logits: Tensor, targets: Tensor, *, k: int, temperature: float) -> TopkReference:
    """The reference's side from its logits [n, V]: min(k, V) most probable tokens at each state, with ids in int32.

    Args:
        targets: [n] sampled token ids.
    """
    require(k > 0, "topk", got=k, expected="> 0", remedy="20 is the default")
    require(temperature > 0, "temperature", got=temperature, expected="> 0", remedy="greedy has no log-probabilities")
    scaled = at_least_float32(logits) / temperature
    norm = torch.logsumexp(scaled, -1, keepdim=True)
    values, ids = scaled.topk(min(k, logits.shape[-1]), dim=-1)
    target = targets.unsqueeze(-1)
    target_logp = (scaled.gather(-1, target) - norm).squeeze(-1)
    rest = scaled.scatter(-1, ids, -torch.inf).scatter_(-1, target, -torch.inf)
    return TopkReference(ids.int(), values - norm, torch.logsumexp(rest, -1) - norm.squeeze(-1), target_logp)


def check_topk(reference: TopkReference, targets: Tensor, vocabulary: int) -> None:
    """Raise `ValueError` unless the fields have the shapes of :class:`TopkReference`."""
    require(
        reference.ids.dim() == 2 and 0 < reference.ids.shape[1] <= vocabulary,
        "top-k ids",
        got=f"shape {tuple(reference.ids.shape)}",
        expected=f"[{targets.shape[0]}, k] with 0 < k <= {vocabulary}",
        remedy="make them with topk_reference",
    )
    require_shape("top-k ids' rows", reference.ids[:, 0], targets.shape)
    require_shape("top-k log-probs", reference.logp, reference.ids.shape)
    require_shape("rest log-probs", reference.rest_logp, targets.shape)
    require_shape("target log-probs", reference.target_logp, targets.shape)


def cat_topk(parts: Sequence[TopkReference]) -> TopkReference:
    """Several pieces' states one after another."""
    return TopkReference(*(torch.cat(fields) for fields in zip(*parts, strict=True)))
