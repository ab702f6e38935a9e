"""LM head, log-probs, entropy and divergences in one autograd function that never holds logits of more than one chunk.

The forward pass keeps a few numbers per token; the backward pass computes a chunk's logits anew, turns them in place into
the gradient d loss / d logits by the formulas below, and multiplies it into the gradients of the hidden states and of the
head. No autograd graph ever sees a [tokens, vocabulary] tensor. With z = logits / temperature, lp = log pi, H the entropy,
R the reverse divergence and g the incoming gradients of one token's outputs,

    d/dz_v = pi_v [ -g_logp - g_entropy (lp_v + H) + g_forward + g_reverse (lp_v - log ref_v - R) ]
             - g_forward ref_v + g_logp 1[v is the sampled token]

and for the rest bucket of the top-k divergences log ref_v - lp_v is the bucket's, and ref_v its mass times the token's
share in the policy's rest (see :mod:`~akl_dist.objective.topk`). Shares are taken relative to the rest's own largest logit,
so they keep their precision where the whole rest has a mass of 1e-30.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from akl_dist.objective._checks import require, require_shape
from akl_dist.objective.logprobs import TokenStatistics
from akl_dist.objective.masking import at_least_float32
from akl_dist.objective.topk import Buckets, TopkReference, check_topk, make_buckets, own_buckets

CLEARED = -1e15
"""Stands in for -inf in place of a logit that is accounted for apart: 0 times it is 0."""
BLOCK_ELEMENTS, BLOCK_ELEMENTS_DEVICE = 1 << 18, 1 << 26
"""Elements of a chunk that are swept together. On a CPU the sweeps over one block then hit the cache and not the memory; on an
accelerator it bounds the scratch memory (256 MiB a buffer)."""


class HeadReference(NamedTuple):
    """The reference as its final hidden states [n, H] and its frozen LM head, weight [V, H] and bias [V] or None.

    Any float dtype; its logits are computed in that dtype, chunk by chunk, at the policy's temperature.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None


def chunked_token_statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    chunk_tokens: int,
    temperature: float,
    reference: TopkReference | HeadReference | None = None,
    with_gradient_norms: bool = False,
) -> TokenStatistics:
    """:func:`~akl_dist.objective.logprobs.token_statistics` of ``hidden @ weight.T + bias``, one chunk of logits at a time.

    Gradients reach ``hidden``, ``weight`` and ``bias`` from logp, entropy and both divergences. ``weight`` and ``bias`` may
    be parameters that are whole during this call and during its backward pass only (ZeRO-3, gathered by the module around).
    Head gradients are summed over chunks in the head's own dtype, as autograd would.

    Args:
        hidden: [n, H] final hidden states of the positions before the targets, in the dtype of ``weight`` [V, H].
        targets: [n] sampled token ids, int64.
        chunk_tokens: most tokens whose logits exist at once.
        temperature: sampling temperature, > 0.
        reference: top-k side data (divergences over buckets), hidden states and head (divergences over the vocabulary),
            or None (no divergences). Never receives a gradient.
        with_gradient_norms: also fill the detached norms.

    Raises:
        ValueError: shapes that do not align.
    """
    require(chunk_tokens > 0, "chunk_tokens", got=chunk_tokens, expected="> 0", remedy="e.g. 1024")
    require(temperature > 0, "temperature", got=temperature, expected="> 0", remedy="greedy has no log-probabilities")
    require_shape("targets", targets, hidden.shape[:1])
    require_shape("head weight", weight, torch.Size((weight.shape[0], hidden.shape[1])))
    if isinstance(reference, TopkReference):
        check_topk(reference, targets, weight.shape[0])
    elif reference is not None:
        require_shape("reference hidden states' rows", reference.hidden[:, 0], targets.shape)
        require_shape("reference head", reference.weight, torch.Size((weight.shape[0], reference.hidden.shape[1])))
    plan = _Plan(chunk_tokens, temperature, reference, with_gradient_norms)
    return TokenStatistics(*_Head.apply(hidden, weight, bias, targets, plan))


class _Plan(NamedTuple):
    chunk_tokens: int
    temperature: float
    reference: TopkReference | HeadReference | None
    with_gradient_norms: bool

    def chunks(self, tokens: int) -> list[tuple[int, int]]:
        return [(start, min(start + self.chunk_tokens, tokens)) for start in range(0, tokens, self.chunk_tokens)]


class _Incoming(NamedTuple):
    """Gradients of the loss in the differentiable outputs, [n] each; None where the loss does not depend on one."""

    logp: Tensor | None
    entropy: Tensor | None
    forward: Tensor | None
    reverse: Tensor | None


class _Workspace:
    """Buffers of one pass: logits of one chunk (of the reference, too, where it has a head) and scratch for a block of rows."""

    def __init__(self, plan: _Plan, tokens: int, like: Tensor) -> None:
        dtype, vocabulary = torch.promote_types(like.dtype, torch.float32), like.shape[0]
        rows = min(plan.chunk_tokens, tokens)
        elements = BLOCK_ELEMENTS if like.device.type == "cpu" else BLOCK_ELEMENTS_DEVICE
        block = min(rows, max(1, elements // vocabulary))
        self.block_rows = block

        def empty(size: int) -> Tensor:
            return torch.empty(size, vocabulary, dtype=dtype, device=like.device)

        self.logits, self.scratch, self.products = empty(rows), empty(block), empty(block)
        self.ref_logits = empty(rows) if isinstance(plan.reference, HeadReference) else None

    def blocks(self, start: int, stop: int) -> list[tuple[int, int, slice]]:
        """(first token, end, rows in the chunk's buffers) of each block of the chunk start..stop."""
        return [(first, min(first + self.block_rows, stop), slice(first - start, min(first + self.block_rows, stop) - start))
                for first in range(start, stop, self.block_rows)]


def _write_logits(out: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> None:
    if weight.dtype == out.dtype:
        if bias is None:
            torch.mm(hidden, weight.t(), out=out)
        else:
            torch.addmm(bias, hidden, weight.t(), out=out)
    else:  # the matrix product in the head's own precision, everything after it in float32
        product = torch.mm(hidden, weight.t()) if bias is None else torch.addmm(bias, hidden, weight.t())
        out.copy_(product)
    if temperature != 1:
        out.div_(temperature)


class _Head(torch.autograd.Function):
    """Outputs are the fields of TokenStatistics, None where not asked for."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, plan: _Plan):
        tokens = hidden.shape[0]
        space = _Workspace(plan, tokens, weight)
        fields: dict[str, Tensor] = {}
        for start, stop in plan.chunks(tokens):
            logits = space.logits[: stop - start]
            _write_logits(logits, hidden[start:stop], weight, bias, plan.temperature)
            _write_reference(space, plan, start, stop)
            for first, end, rows in space.blocks(start, stop):
                block = _forward_block(logits[rows], targets[first:end], plan, space, first, end, rows)
                for name, value in block.items():
                    if name not in fields:
                        fields[name] = value.new_empty(tokens)
                    fields[name][first:end] = value
        if not tokens:
            fields = {name: space.logits.new_empty(0) for name in _field_names(plan)}
        out = tuple(fields.get(name) for name in TokenStatistics._fields)
        # DeepSpeed swaps a parameter's data: what is saved is the parameter itself, whole again when backward starts.
        ctx.save_for_backward(hidden, weight, bias, targets, *(fields[name] for name in _saved_names(plan)))
        ctx.plan = plan
        ctx.mark_non_differentiable(*(value for value in out[4:] if value is not None))
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *incoming: Tensor | None):
        hidden, weight, bias, targets, *saved = ctx.saved_tensors
        plan: _Plan = ctx.plan
        tokens = hidden.shape[0]
        space = _Workspace(plan, tokens, weight)
        kept = dict(zip(_saved_names(plan), saved, strict=True))
        gradients = _Incoming(*(None if g is None else at_least_float32(g) / plan.temperature for g in incoming[:4]))
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for start, stop in plan.chunks(tokens):
            logits = space.logits[: stop - start]
            _write_logits(logits, hidden[start:stop], weight, bias, plan.temperature)
            _write_reference(space, plan, start, stop)
            for first, end, rows in space.blocks(start, stop):
                g = _Incoming(*(None if one is None else one[first:end] for one in gradients))
                numbers = {name: value[first:end] for name, value in kept.items()}
                _backward_block(logits[rows], targets[first:end], plan, space, first, end, rows, g, numbers)
            slope = logits.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(slope, weight, out=grad_hidden[start:stop])
            if grad_weight is not None:
                grad_weight.addmm_(slope.t(), hidden[start:stop])
            if grad_bias is not None:
                grad_bias += logits.sum(0).to(grad_bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None


def _saved_names(plan: _Plan) -> tuple[str, ...]:
    """Numbers per token that the backward pass takes from the forward pass."""
    if plan.reference is None:
        return ("entropy", "normalizer", "rest_normalizer")
    if isinstance(plan.reference, TopkReference):
        return ("entropy", "normalizer", "rest_normalizer", "kl_reverse")
    return ("entropy", "normalizer", "ref_normalizer", "kl_reverse")


def _field_names(plan: _Plan) -> set[str]:
    norms = ("score_norm2", *(TokenStatistics._fields[5:] if plan.reference is not None else ()))
    divergences = ("kl_forward", "kl_reverse") if plan.reference is not None else ()
    return {"logp", *_saved_names(plan), *divergences, *(norms if plan.with_gradient_norms else ())}


def _write_reference(space: _Workspace, plan: _Plan, start: int, stop: int) -> None:
    if isinstance(plan.reference, HeadReference):
        assert space.ref_logits is not None
        hidden, weight, bias = plan.reference
        _write_logits(space.ref_logits[: stop - start], hidden[start:stop], weight, bias, plan.temperature)


# --- forward -----------------------------------------------------------------------------------------------------


def _forward_block(
    z: Tensor, targets: Tensor, plan: _Plan, space: _Workspace, first: int, end: int, rows: slice
) -> dict[str, Tensor]:
    """Fields of the tokens first..end from their scaled logits z [m, V], which are overwritten."""
    reference = plan.reference
    topk = reference.rows(first, end) if isinstance(reference, TopkReference) else None
    ids, present = own_buckets(targets, topk)
    own = z.gather(1, ids)
    z.scatter_(1, ids, CLEARED)
    top = z.amax(1, keepdim=True)
    z.sub_(top)
    shares = torch.exp(z, out=space.scratch[: z.shape[0]])
    total = shares.sum(1)
    top = top.squeeze(1)
    # Log-probs are differences of numbers relative to the largest logit: near 0 they would drown in the rounding of 30.
    counted = torch.where(present, own, -torch.inf)
    highest = torch.maximum(counted.amax(1), top)
    rest_logp = torch.where(top < CLEARED / 2, -torch.inf, (top - highest) + total.log())
    log_total = torch.logsumexp(torch.cat([counted - highest[:, None], rest_logp[:, None]], 1), 1)
    own_logp, rest_logp = (own - highest[:, None]) - log_total[:, None], rest_logp - log_total
    offset = (highest - top) + log_total  # of the normalizer over the rest's largest logit
    own_probs, rest = torch.where(present, own_logp.exp(), 0.0), rest_logp.exp()
    products = space.products[: z.shape[0]]
    # The rest's mean log-prob, from logits relative to the largest: near 0 where the token is nearly certain.
    rest_mean = torch.mul(shares, z, out=products).sum(1) / total - offset
    out = {
        "logp": own_logp[:, -1],
        "entropy": -(own_probs * own_logp).sum(1) - torch.where(rest > 0, rest * rest_mean, 0.0),
        "normalizer": highest + log_total,
        "rest_normalizer": highest + log_total + rest_logp,
    }
    rest_square = total
    if plan.with_gradient_norms:
        rest_square = torch.mul(shares, shares, out=products).sum(1) / total**2
        others = torch.where(ids == targets[:, None], 0.0, own_probs)
        out["score_norm2"] = (others**2).sum(1) + rest**2 * rest_square + (others.sum(1) + rest) ** 2
    if topk is not None:
        buckets = make_buckets(own_logp, present, rest_logp, topk)
        out["kl_forward"], out["kl_reverse"] = buckets.divergences()
        if plan.with_gradient_norms:
            norms = buckets.gradient_norms(out["kl_reverse"], rest_square)
            out |= dict(zip(TokenStatistics._fields[5:], norms, strict=True))
    elif reference is not None:
        assert space.ref_logits is not None
        z.scatter_(1, ids, own - top[:, None])
        shares.mul_(offset.neg().exp()[:, None]).scatter_(1, ids, own_probs)
        z.sub_(offset[:, None])
        out |= _full_divergences(z, shares, space.ref_logits[rows], products, plan.with_gradient_norms)
    return out


def _full_divergences(logp: Tensor, probs: Tensor, r: Tensor, products: Tensor, with_norms: bool) -> dict[str, Tensor]:
    """Divergences over the vocabulary from log-probs, probs and the reference's logits r [m, V]; overwrites logp and r."""
    top = r.amax(1, keepdim=True)
    r.sub_(top)
    log_total = torch.exp(r, out=products).sum(1, keepdim=True).log_()
    r.sub_(log_total)
    difference = logp.sub_(r)
    ref_probs = r.exp_()
    forward = -torch.mul(ref_probs, difference, out=products).sum(1)
    reverse = torch.mul(probs, difference, out=products).sum(1)
    out = {"kl_forward": forward, "kl_reverse": reverse, "ref_normalizer": (top + log_total).squeeze(1)}
    if with_norms:
        negative_forward = ref_probs.sub_(probs)
        reverse_gradient = difference.sub_(reverse[:, None]).mul_(probs)
        out["forward_norm2"] = torch.mul(negative_forward, negative_forward, out=products).sum(1)
        out["reverse_norm2"] = torch.mul(reverse_gradient, reverse_gradient, out=products).sum(1)
        out["forward_reverse_dot"] = -torch.mul(negative_forward, reverse_gradient, out=products).sum(1)
    return out


# --- backward ----------------------------------------------------------------------------------------------------


def _backward_block(
    z: Tensor, targets: Tensor, plan: _Plan, space: _Workspace, first: int, end: int, rows: slice,
    g: _Incoming, saved: dict[str, Tensor],
) -> None:
    """Scaled logits z [m, V] become d loss / d logits, in place. ``g`` already carries the factor 1/temperature."""
    base = torch.zeros_like(saved["normalizer"])
    for gradient, factor in ((g.logp, -1.0), (g.forward, 1.0)):
        base = base if gradient is None else base + factor * gradient
    for gradient, name in ((g.entropy, "entropy"), (g.reverse, "kl_reverse")):
        base = base if gradient is None else base - gradient * saved[name]
    shares = space.scratch[: z.shape[0]]
    if isinstance(plan.reference, HeadReference):
        assert space.ref_logits is not None
        _full_slope(z, space.ref_logits[rows], shares, base, g, saved)
    else:
        topk = plan.reference.rows(first, end) if plan.reference is not None else None
        _bucket_slope(z, targets, topk, shares, base, g, saved)
    if g.logp is not None:
        z.scatter_add_(1, targets[:, None], g.logp[:, None])


def _bucket_slope(
    z: Tensor, targets: Tensor, topk: TopkReference | None, shares: Tensor, base: Tensor, g: _Incoming,
    saved: dict[str, Tensor],
) -> None:
    ids, present = own_buckets(targets, topk)
    normalizer, rest_normalizer = saved["normalizer"], saved["rest_normalizer"]
    own_logp = z.gather(1, ids) - normalizer[:, None]
    rest_logp = rest_normalizer - normalizer
    rest = rest_logp.exp()
    own_factor, rest_factor = base[:, None].expand_as(own_logp), base
    own_pull, rest_pull = torch.zeros_like(own_logp), torch.zeros_like(base)
    if topk is not None:
        buckets: Buckets = make_buckets(own_logp, present, rest_logp, topk)
        ratio = buckets.logp - buckets.ref_logp
        if g.reverse is not None:
            own_factor = own_factor + g.reverse[:, None] * ratio[:, :-1]
            rest_factor = rest_factor + g.reverse * ratio[:, -1]
        if g.forward is not None:
            pull = g.forward[:, None] * buckets.ref_logp.exp()
            own_pull, rest_pull = pull[:, :-1], pull[:, -1]
    if g.entropy is not None:
        own_factor = own_factor - g.entropy[:, None] * own_logp
    own_slope = torch.where(present, own_logp.exp() * own_factor - own_pull, 0.0)
    rest_slope = rest * rest_factor - rest_pull
    z.scatter_(1, ids, CLEARED)
    torch.sub(z, torch.where(torch.isneginf(rest_normalizer), 0.0, rest_normalizer)[:, None], out=shares)
    shares.exp_()
    if g.entropy is None:
        torch.mul(shares, rest_slope[:, None], out=z)
    else:
        lean = g.entropy * rest
        torch.addcmul((rest_slope + lean * normalizer)[:, None], z, lean[:, None], value=-1, out=z).mul_(shares)
    z.scatter_add_(1, ids, own_slope)


def _full_slope(
    z: Tensor, r: Tensor, probs: Tensor, base: Tensor, g: _Incoming, saved: dict[str, Tensor]
) -> None:
    normalizer, ref_normalizer = saved["normalizer"], saved["ref_normalizer"]
    torch.sub(z, normalizer[:, None], out=probs).exp_()
    zero = torch.zeros_like(base)
    g_entropy = zero if g.entropy is None else g.entropy
    g_reverse = zero if g.reverse is None else g.reverse
    constant = base + (g_entropy - g_reverse) * normalizer + g_reverse * ref_normalizer
    torch.addcmul(constant[:, None], z, (g_reverse - g_entropy)[:, None], out=z)
    if g.reverse is not None:
        z.addcmul_(r, g_reverse[:, None], value=-1)
    z.mul_(probs)
    if g.forward is not None:
        r.sub_(ref_normalizer[:, None]).exp_()
        z.addcmul_(r, g.forward[:, None], value=-1)
