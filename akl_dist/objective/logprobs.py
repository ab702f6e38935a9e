"""Log-probabilities, entropy and exact divergences of sampled tokens, chunk by chunk over the LM head.

Everything of one token comes from the same temperature-scaled logits z = logits / temperature. Derivatives with
respect to the raw logits therefore carry a factor 1/temperature, and squared norms a factor 1/temperature^2;
`TokenStatistics` states its norms with respect to z (in ratios of two gradients the factor cancels).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from akl_dist.objective._checks import require, require_shape
from akl_dist.objective.kl import finite_logprobs, full_kl
from akl_dist.objective.masking import at_least_float32


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
    with_gradient_norms: bool = False,
) -> TokenStatistics:
    """Statistics of the sampled tokens under softmax(logits / temperature).

    Args:
        logits: [n, V] raw logits, any float dtype; row i is the state *before* targets[i] (the logits of the previous
            position). -inf excludes a token from the support.
        targets: [n] sampled token ids in [0, V).
        temperature: sampling temperature, > 0.
        ref_logprobs: [n, V] normalised log-probabilities of the reference at the same temperature; detached, moved to
            the logits' device and dtype. None: no divergences.
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


def chunked_token_statistics(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    *,
    chunk_tokens: int,
    temperature: float,
    ref_logprobs: Tensor | None = None,
    with_gradient_norms: bool = False,
    min_chunks: int = 1,
) -> TokenStatistics:
    """`token_statistics(head(hidden), targets)` with at most one chunk of logits alive, forward and backward.

    Each chunk is a checkpointed piece that calls `head` anew in the backward pass, so logits are neither kept nor
    computed for all tokens at once. `head` is called inside the piece: modules whose forward hooks gather sharded
    weights (ZeRO-3) work. There every call is a collective, so all ranks must make the same number of calls.

    Args:
        head: maps [m, H] to logits [m, V]; deterministic (no dropout).
        hidden: [n, H] final hidden states of the positions *before* the targets.
        targets: [n] sampled token ids.
        chunk_tokens: most tokens whose logits exist at once.
        ref_logprobs: [n, V] or None; may live on another device or in half precision, moved chunk by chunk.
        min_chunks: pads the number of calls with empty ones; give the largest count over the ranks with ZeRO-3.
        temperature, with_gradient_norms: see `token_statistics`.
    """
    require(chunk_tokens > 0, "chunk_tokens", got=chunk_tokens, expected="> 0", remedy="e.g. 1024")
    require_shape("targets", targets, hidden.shape[:1])
    if ref_logprobs is not None:
        require_shape("ref_logprobs rows", ref_logprobs[:, 0], hidden.shape[:1])
    count = hidden.shape[0]
    chunks = max(-(-count // chunk_tokens), min_chunks, 1)
    sizes = [max(0, min(chunk_tokens, count - chunk * chunk_tokens)) for chunk in range(chunks)]

    def piece(hidden_chunk: Tensor, target_chunk: Tensor, ref_chunk: Tensor | None) -> TokenStatistics:
        return token_statistics(
            head(hidden_chunk),
            target_chunk,
            temperature=temperature,
            ref_logprobs=ref_chunk,
            with_gradient_norms=with_gradient_norms,
        )

    ref_chunks = [None] * chunks if ref_logprobs is None else ref_logprobs.detach().split(sizes)
    results = [
        checkpoint(piece, *arguments, use_reentrant=False, preserve_rng_state=False)
        for arguments in zip(hidden.split(sizes), targets.split(sizes), ref_chunks, strict=True)
    ]
    optional = [None if field[0] is None else torch.cat(field) for field in zip(*(r[2:] for r in results), strict=True)]
    return TokenStatistics(
        torch.cat([result.logp for result in results]), torch.cat([result.entropy for result in results]), *optional
    )


def num_chunks(tokens: int, chunk_tokens: int) -> int:
    """Head calls that `chunked_token_statistics` makes for `tokens` tokens (at least 1)."""
    return max(-(-tokens // chunk_tokens), 1)
