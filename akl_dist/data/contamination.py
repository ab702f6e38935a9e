"""Whether training problems stand in the evaluation set, by normalised text. Pure, stdlib only."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

_TYPESETTING = re.compile(r"\\[\[\]()]|\\[,;:! ]|\\(?:left|right)(?![A-Za-z])|\\(?=[dt]frac(?![A-Za-z]))[dt]")
_WRITTEN = re.compile(r"[.,;:!?'\"](?!\d)|[${}\\\s]")


def normalised(text: str) -> str:
    """Text for comparing problems: compatibility form, case folded, without spacing, math delimiters, braces, backslashes and the
    punctuation of sentences. Operators, parentheses and decimal points stay: 7+36 is not 73+6."""
    return _WRITTEN.sub("", _TYPESETTING.sub("", unicodedata.normalize("NFKC", text)).casefold())


def overlapping(
    train: Sequence[str], evaluation: Sequence[str], *, embedded: bool = False, least: int = 80
) -> tuple[set[int], set[int]]:
    """Which training and which evaluation texts are the same problem, by normalised text: (indices in train, in evaluation).

    With ``embedded`` an evaluation text of at least ``least`` normalised characters also counts where it stands inside a
    training prompt, between whatever words a data set puts around its problems.
    """
    by_text: dict[str, list[int]] = {}
    for index, text in enumerate(evaluation):
        by_text.setdefault(normalised(text), []).append(index)
    by_start = {key[:least]: [] for key in by_text if len(key) >= least} if embedded else {}
    for key in by_text if by_start else ():
        if len(key) >= least:
            by_start[key[:least]].append(key)
    trained, evaluated = set(), set()
    for index, text in enumerate(train):
        key = normalised(text)
        same = [key] if key in by_text else []
        if by_start:
            starts = (by_start.get(key[at : at + least], ()) for at in range(len(key) - least + 1))
            same += [one for ones in starts for one in ones if one in key]
        if same:
            trained.add(index)
            evaluated.update(position for one in same for position in by_text[one])
    return trained, evaluated
