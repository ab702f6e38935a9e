"""Where a response's text says its answer is: the character ranges behind the position and the verifier's votes.

Decided from the text and the prompt alone, never from whether the answer is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from akl_dist.verify.code_answer import signature_and_return
from akl_dist.verify.code_extract import blocks
from akl_dist.verify.extract import locate
from akl_dist.verify.segments import final_section, last_line

MAX_TAIL_TOKENS = 32  # of the last line, where no marker is present
TAIL = 10  # roles.position=tail: one token in so many

Span = tuple[int, int]


@dataclass(frozen=True)
class Place:
    """Character ranges whose tokens vote: of them only the last ``at_most``, or the last one in ``one_in`` (rounded up)."""

    spans: tuple[Span, ...] = ()
    at_most: int | None = None
    one_in: int = 1

    @property
    def takes_all(self) -> bool:
        return self.at_most is None and self.one_in == 1

    def kept(self, count: int) -> int:
        """How many of ``count`` tokens in the ranges vote."""
        count = -(-count // self.one_in)
        return count if self.at_most is None else min(count, self.at_most)


@dataclass(frozen=True)
class CodeAnswer:
    """How the answer to a code prompt is bounded. ``kind``: roles.code_answer. ``names``: what its tests call
    (:func:`akl_dist.verify.code_answer.entry_names`)."""

    kind: str
    names: frozenset[str]

    def spans(self, text: str, program: Span, whole: Span, *, think_open: bool) -> tuple[Span, ...]:
        """Those of a program: ``whole`` with kind ``program`` after a think section. Without one nearly all of the response would
        be answer, so that the kind is signature_and_return there."""
        section = final_section(text, think_open=think_open)
        if self.kind == "program" and section is not None and section[0] > 0:
            return (whole,)
        return tuple(signature_and_return(text, program, self.names))


def position_place(
    text: str, *, truncated: bool, think_open: bool = False, position: str = "marker", code: CodeAnswer | None = None
) -> Place:
    """What the position vote covers: the final section's answer marker, delimiters included; of code the last closed fenced block,
    bounded as ``code`` says. Without a marker the last non-empty line's last 32 tokens if the response stopped by itself, nothing
    if it was truncated. ``tail``: the last tenth of the final section's tokens, whatever they say.

    Args:
        text: the response up to its end token.
        truncated: the engine stopped it at the length limit.
        think_open: the prompt ended with ``<think>``.
        position: roles.position.
        code: of a code prompt, else None.
    """
    section = final_section(text, think_open=think_open)
    if section is None:
        return Place()
    if position == "tail":
        return Place((section,), one_in=TAIL)
    if code is not None:
        block = _last_block(text, section)
        if block is not None:
            return Place(code.spans(text, *block, think_open=think_open))
    else:
        marker = locate(text, think_open=think_open)
        if marker is not None:
            return Place((marker.outer,))
    line = None if truncated else last_line(text, section)
    return Place() if line is None else Place((line,), at_most=MAX_TAIL_TOKENS)


def verifier_place(text: str, span: Span | None, *, think_open: bool = False, code: CodeAnswer | None = None) -> Place:
    """What the verifier's vote covers: the range it read the answer from (of a program as ``code`` says); nothing without one."""
    if span is None:
        return Place()
    return Place((span,) if code is None else code.spans(text, span, span, think_open=think_open))


def _last_block(text: str, section: Span) -> tuple[Span, Span] | None:
    """Content and whole of the last fenced block that is closed."""
    for block in reversed(blocks(text, section)):
        start, end = block.span
        if end >= section[1]:
            continue  # never closed
        opening = max(text.rfind("\n", 0, max(start - 1, 0)) + 1, section[0])
        closing = text.find("\n", end, section[1])
        return block.span, (opening, section[1] if closing < 0 else closing)
    return None


class TokenSpans:
    """Character ranges of the tokens of several responses, as arrays.

    Args:
        responses: per response the character range of each token, in its order.
    """

    def __init__(self, responses: Sequence[Sequence[Span]]) -> None:
        counts = np.fromiter(map(len, responses), np.int64, len(responses))
        self.stops = np.cumsum(counts)
        flat = np.fromiter(chain.from_iterable(chain.from_iterable(responses)), np.int64, 2 * int(counts.sum())).reshape(-1, 2)
        lengths = np.asarray([spans[-1][1] if spans else 0 for spans in responses], np.int64)
        starts = np.cumsum(lengths) - lengths  # of the texts, one after another
        self.texts = list(zip(starts.tolist(), lengths.tolist(), strict=True))
        """Of each response where its text begins among all of them, and its length as far as tokens reach."""
        self.start, self.end = (flat + np.repeat(starts, counts)[:, None]).T
        self.num_characters = int(lengths.sum())


def token_votes(places: Sequence[Place], tokens: TokenSpans) -> np.ndarray:
    """bool [n], responses one after another: the token has a character in one of its response's ranges (``places``, one each).
    Tokens without characters never vote."""
    edges = np.zeros(tokens.num_characters + 1, np.int64)
    marked = [(base + min(a, length), base + min(b, length)) for place, (base, length) in zip(places, tokens.texts, strict=True)
              for a, b in place.spans if a < b]
    if marked:
        opened, closed = np.asarray(marked).T
        np.add.at(edges, opened, 1)
        np.add.at(edges, closed, -1)
    inside = np.concatenate([[0], np.cumsum(np.cumsum(edges)[:-1] > 0)])  # characters in a range before each
    out = inside[tokens.end] > inside[tokens.start]
    for row in (row for row, place in enumerate(places) if not place.takes_all):
        mine = out[tokens.stops[row - 1] if row else 0 : tokens.stops[row]]
        voting = np.flatnonzero(mine)
        mine[voting[: len(voting) - places[row].kept(len(voting))]] = False
    return out
