"""Token roles (answer or reasoning): the votes and their majority. Pure functions of tensors, text and character spans.

Three votes say "answer": *position* (inside the final section's answer marker), *entropy* (smoothed reference entropy at most
this response's own quantile) and *verifier* (overlaps the string the verifier read as the answer). None of them looks at
correctness or at another response. A token is an answer token iff at least two agree. Roles are computed once per rollout
batch and stay frozen over all updates on it.

Two rules draw at random as many answer tokens as the majority gives a response: controls for what the place of the roles
adds to their number. *random_span* keeps them contiguous, as answers are; *random_tokens* scatters them.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from akl_dist.verify.answer_places import CodeAnswer, TokenSpans, position_place, token_votes, verifier_place

RANDOM_RULES = ("random_span", "random_tokens")
RULES = ("majority", "position", "entropy", "verifier", *RANDOM_RULES)
SIGNALS = ("position", "entropy", "verifier")
TIE = 1e-9  # relative: values this close to the quantile count as equal to it, whatever order they were summed in

Span = tuple[int, int]


@dataclass(frozen=True)
class Votes:
    """Bool [B, T] each, False wherever the mask is 0."""

    position: Tensor
    entropy: Tensor
    verifier: Tensor


def token_roles(
    *,
    entropies: Tensor,
    mask: Tensor,
    position_mask: Tensor,
    verifier_span_mask: Tensor,
    eos_mask: Tensor,
    rule: str = "majority",
    entropy_quantile: float = 0.5,
    entropy_window: int = 9,
    seeds: Sequence[int] | None = None,
) -> Tensor:
    """Answer tokens, bool [B, T]; False where ``mask`` is 0. Each row depends on that row alone.

    Args:
        entropies: float [B, T], nats; anything (NaN too) where mask is 0.
        mask: [B, T] bool or 0/1: tokens sampled by the policy.
        position_mask: bool [B, T]: tokens inside the answer marker (see :func:`position_votes`).
        verifier_span_mask: bool [B, T]: tokens overlapping the verifier's span (see :func:`verifier_votes`).
        eos_mask: bool [B, T]: end tokens. Their position vote is that of the token just before them, so an end token
            counts only when it is adjacent to the marker's close.
        rule: ``majority`` (at least two votes), one vote alone (``position``, ``entropy``, ``verifier``), or as many tokens as
            the majority, anywhere: contiguous among the sampled tokens (``random_span``) or not (``random_tokens``).
        entropy_quantile, entropy_window: see :func:`entropy_votes`.
        seeds: one per row, for the two rules that draw at random (see :func:`response_seed`); the others do not read it.

    Raises:
        ValueError: unknown rule, a rule that draws without one seed per row, shapes that differ, an entropy that is not finite
            where mask is 1.
    """
    votes = role_votes(
        entropies=entropies,
        mask=mask,
        position_mask=position_mask,
        verifier_span_mask=verifier_span_mask,
        eos_mask=eos_mask,
        entropy_quantile=entropy_quantile,
        entropy_window=entropy_window,
    )
    return roles_of(votes, mask, rule=rule, seeds=seeds)


def roles_of(votes: Votes, mask: Tensor, *, rule: str = "majority", seeds: Sequence[int] | None = None) -> Tensor:
    """:func:`token_roles` from the votes; same arguments and errors."""
    if rule not in RULES:
        raise ValueError(f"roles.rule: got {rule!r}; expected one of {', '.join(RULES)}.")
    majority = votes.position & votes.entropy | votes.position & votes.verifier | votes.entropy & votes.verifier
    if rule in RANDOM_RULES:
        if seeds is None or len(seeds) != len(mask):
            got = "none" if seeds is None else len(seeds)
            raise ValueError(f"seeds of roles.rule {rule!r}: got {got}; expected one for each of the {len(mask)} responses.")
        return _at_random(majority, mask.bool(), seeds, contiguous=rule == "random_span")
    if rule == "majority":
        return majority
    return {"position": votes.position, "entropy": votes.entropy, "verifier": votes.verifier}[rule]


def response_seed(run_seed: int, prompt_id: str, sample_index: int) -> int:
    """Seed of a response's random roles, in [0, 2**64): the same wherever and in whatever company it is labelled."""
    key = json.dumps(["roles", run_seed, prompt_id, sample_index], separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(key.encode("ascii")).digest()[:8], "big")


def _at_random(like: Tensor, valid: Tensor, seeds: Sequence[int], *, contiguous: bool) -> Tensor:
    """In each row as many of the ``valid`` tokens as ``like`` has there, drawn uniformly: a run of them, or any of them."""
    out = torch.zeros_like(valid)
    for row, seed in enumerate(seeds):
        tokens, count = valid[row].nonzero()[:, 0].tolist(), int(like[row].sum())
        generator = random.Random(seed)
        start = generator.randint(0, len(tokens) - count)
        out[row, tokens[start:start + count] if contiguous else generator.sample(tokens, count)] = True
    return out


def role_votes(
    *,
    entropies: Tensor,
    mask: Tensor,
    position_mask: Tensor,
    verifier_span_mask: Tensor,
    eos_mask: Tensor,
    entropy_quantile: float = 0.5,
    entropy_window: int = 9,
) -> Votes:
    """The three votes behind :func:`token_roles`, same arguments."""
    shapes = {tuple(t.shape) for t in (entropies, mask, position_mask, verifier_span_mask, eos_mask)}
    if len(shapes) != 1 or entropies.ndim != 2:
        raise ValueError(f"token roles: got shapes {sorted(shapes)}; expected one common shape [B, T].")
    valid = mask.bool()
    position = position_mask.bool() & valid
    before = torch.zeros_like(position)
    before[:, 1:] = position[:, :-1]
    position = torch.where(eos_mask.bool(), before, position) & valid
    entropy = entropy_votes(entropies, valid, quantile=entropy_quantile, window=entropy_window)
    return Votes(position, entropy, verifier_span_mask.bool() & valid)


def entropy_votes(entropies: Tensor, mask: Tensor, *, quantile: float = 0.5, window: int = 9) -> Tensor:
    """Bool [B, T]: smoothed entropy at most the ``quantile`` of this response's own smoothed values (``<=``).

    The smoothed value at t is the mean over the unmasked tokens at t - window//2 .. t + window//2 of the same response; at the
    borders and beside masked tokens it averages those that are there. Quantiles interpolate linearly. Response-level
    as in Archer (arXiv 2507.15778).
    """
    if window < 1 or window % 2 == 0:
        raise ValueError(f"roles.entropy_window: got {window}; expected an odd number of tokens, 1 or more.")
    if not 0.0 <= quantile <= 1.0:
        raise ValueError(f"roles.entropy_quantile: got {quantile}; expected a share in [0, 1].")
    valid = mask.bool()
    if entropies.numel() == 0:
        return valid.clone()
    values = torch.where(valid, entropies.double(), 0.0)
    if not bool(torch.isfinite(values).all()):
        raise ValueError(
            "entropies: got NaN or infinity on a sampled token; expected finite nats. Look at the reference pass."
        )
    half = window // 2
    sums = torch.nn.functional.pad(values, (half, half)).unfold(1, window, 1).sum(-1)
    counts = torch.nn.functional.pad(valid.double(), (half, half)).unfold(1, window, 1).sum(-1)
    smoothed = sums / counts.clamp(min=1.0)
    threshold = smoothed.masked_fill(~valid, float("nan")).nanquantile(quantile, dim=1, keepdim=True)
    return (smoothed <= threshold + TIE * threshold.abs()) & valid  # a row without tokens has a NaN threshold: no votes


def position_votes(
    text: str, token_spans: Sequence[Span], truncated: bool, *, think_open: bool = False, position: str = "marker",
    code: CodeAnswer | None = None,
) -> list[bool]:
    """One vote per token: it overlaps the place of :func:`akl_dist.verify.answer_places.position_place` (same arguments).

    A token that holds a character on either side of a border overlaps. Tokens without characters never vote. The end token is
    settled in :func:`token_roles`.

    Args:
        token_spans: character range of each token in ``text``, in its order.
    """
    place = position_place(text, truncated=truncated, think_open=think_open, position=position, code=code)
    return token_votes([place], TokenSpans([token_spans])).tolist()


def verifier_votes(
    span: Span | None, token_spans: Sequence[Span], *, text: str = "", think_open: bool = False, code: CodeAnswer | None = None
) -> list[bool]:
    """One vote per token: it overlaps the answer string's character range. No range, no votes. Of ``code`` (which needs the
    ``text``) it is the part that answers."""
    return token_votes([verifier_place(text, span, think_open=think_open, code=code)], TokenSpans([token_spans])).tolist()


def vote_table(votes: Votes, mask: Tensor) -> tuple[int, ...]:
    """Token counts by (position, entropy, verifier) votes, in the order of that binary number: 000, 001, ... 111."""
    return vote_tables(votes, mask, [len(mask)])[0]


def vote_tables(votes: Votes, mask: Tensor, rows: Sequence[int]) -> list[tuple[int, ...]]:
    """:func:`vote_table` of each group of ``rows`` consecutive responses."""
    group = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(list(rows), dtype=torch.int64))[:, None]
    code = 8 * group + 4 * votes.position.long() + 2 * votes.entropy.long() + votes.verifier.long()
    return [tuple(counts) for counts in torch.bincount(code[mask.bool()], minlength=8 * len(rows)).view(-1, 8).tolist()]


def agreement(counts: Sequence[int]) -> dict[str, float]:
    """Share of tokens on which each two signals vote alike, ``"position_entropy"`` and so on, from the 8 counts of
    :func:`vote_table`; empty without tokens."""
    total = sum(counts)
    pairs = {"position_entropy": (4, 2), "position_verifier": (4, 1), "entropy_verifier": (2, 1)}
    return {} if not total else {
        name: sum(n for code, n in enumerate(counts) if bool(code & one) == bool(code & other)) / total
        for name, (one, other) in pairs.items()}


def likelihood_ratios(counts: Sequence[int]) -> Mapping[str, float | None]:
    """P(vote | majority answer) / P(vote | majority reasoning) of each signal, from the 8 counts of :func:`vote_table`.

    None where a side of the ratio is undefined (no answer tokens, no reasoning tokens, or no votes among the latter).
    """
    answer = [code for code in range(8) if code.bit_count() >= 2]
    reasoning = [code for code in range(8) if code.bit_count() < 2]
    ratios: dict[str, float | None] = {}
    for name, bit in zip(SIGNALS, (4, 2, 1), strict=True):
        shares = []
        for side in (answer, reasoning):
            total = sum(counts[code] for code in side)
            shares.append(sum(counts[code] for code in side if code & bit) / total if total else None)
        above, below = shares
        ratios[name] = None if above is None or not below else above / below
    return ratios
