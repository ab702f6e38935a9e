"""Golds with several accepted answers, as one text: ``any of: 9 | 10 | 11``. Standard library only.

The words in front tell such a gold from one that merely holds a bar (an absolute value, a norm).
"""

from __future__ import annotations

from collections.abc import Sequence

ANY_OF = "any of: "
BAR = "|"
MAX_ALTERNATIVES = 100  # each is compared with every answer


def any_of(answers: Sequence[str]) -> str:
    """The gold that accepts each of ``answers``. Raises ValueError for none, too many, an empty one, or one that holds a bar."""
    if not 1 <= len(answers) <= MAX_ALTERNATIVES or any(BAR in answer or not answer.strip() for answer in answers):
        raise ValueError(f"any_of: got {list(answers)[:5]}, expected 1 to {MAX_ALTERNATIVES} answers, none empty or with {BAR!r}")
    return ANY_OF + f" {BAR} ".join(answers)


def alternatives(gold: str) -> tuple[str, ...] | None:
    """The accepted answers of a gold made by :func:`any_of` (or written so in a data file); None for a gold that is one answer."""
    if not gold.startswith(ANY_OF):
        return None
    return tuple(part.strip() for part in gold.removeprefix(ANY_OF).split(BAR))
