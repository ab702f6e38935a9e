"""Recipes of the known data sets: where they live, which columns they have, how the gold answer is read off.

Schemas as published by openai/gsm8k (Cobbe et al. 2021), EleutherAI/hendrycks_math (Hendrycks et al. 2021) and
HuggingFaceH4/MATH-500. A gold adapter returns None where it finds no answer; the loader then refuses the row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from akl_dist.contract.errors import DataError, nearest

GoldAdapter = Callable[[str], "str | None"]


@dataclass(frozen=True)
class Instruction:
    """Text put after each problem. It belongs to the answer extractor, so the pair is one unit with a version."""

    version: str
    text: str


BOXED = Instruction("boxed-1", "\n\nReason step by step and put the final answer within \\boxed{}.")
NO_INSTRUCTION = Instruction("none", "")


@dataclass(frozen=True)
class GoldColumn:
    """A column that holds the gold, and how to read it. ``expected`` says in words what the adapter looks for."""

    column: str
    adapter: GoldAdapter
    expected: str


@dataclass(frozen=True)
class Recipe:
    """One data set.

    ``gold_columns`` and ``id_columns`` are tried in order; the first present is used. ``hub_configs`` are concatenated.
    ``known_unusable`` maps the SHA-256 of a problem's text to the upstream row that has no gold answer: such rows are
    left out and reported, any other row without gold is an error.
    """

    name: str
    prompt_column: str
    gold_columns: tuple[GoldColumn, ...]
    id_columns: tuple[str, ...]
    instruction: Instruction
    hub_name: str | None = None
    hub_configs: tuple[str | None, ...] = (None,)
    known_unusable: Mapping[str, str] = field(default_factory=dict)


def plain_gold(text: str) -> str | None:
    """The text itself without surrounding white space; None when nothing is left."""
    return text.strip() or None


_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


def gsm8k_gold(text: str) -> str | None:
    """The answer after the last ``####``; commas go only where they group thousands (``1,234`` -> ``1234``)."""
    _, marker, answer = text.rpartition("####")
    answer = answer.strip()
    if not marker or not answer or "\n" in answer:
        return None
    return answer.replace(",", "") if _GROUPED.fullmatch(answer) else answer


_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")


def last_boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{...}`` (or ``\\fbox``), braces balanced.

    ``\\boxed 9$`` reads up to the dollar sign. None when there is no box, its braces do not close, or it is empty.
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    rest = text[boxes[-1].end() :]
    if not rest.startswith("{"):
        return rest.split("$")[0].strip() or None
    depth = 0
    for position, character in enumerate(rest):
        escaped = position > 0 and rest[position - 1] == "\\"
        if escaped or character not in "{}":
            continue
        depth += 1 if character == "{" else -1
        if depth == 0:
            return rest[1:position].strip() or None
    return None


GSM8K = Recipe(
    name="gsm8k",
    prompt_column="question",
    gold_columns=(GoldColumn("answer", gsm8k_gold, "a worked solution ending in '#### <number>'"),),
    id_columns=(),
    instruction=BOXED,
    hub_name="openai/gsm8k",
    hub_configs=("main",),
)

MATH = Recipe(
    name="math",
    prompt_column="problem",
    gold_columns=(
        GoldColumn("answer", plain_gold, "the answer as text"),
        GoldColumn("solution", last_boxed, "a solution with a closed, non-empty \\boxed{...}"),
    ),
    id_columns=("unique_id",),
    instruction=BOXED,
    hub_name="EleutherAI/hendrycks_math",
    hub_configs=(
        "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra",
        "precalculus",
    ),
    known_unusable={
        "6bf518e40168794fbba95ee91ea9d554d1df9d1e01976b708d82702736b488c7": "train/number_theory/7115: empty box",
        "debc1683173552965f459a0842c34b946893bc89d68e686bc97eca8e04a94c2a": "train/number_theory/7117: empty box",
    },
)

GENERIC = Recipe(
    name="generic",
    prompt_column="prompt",
    gold_columns=(GoldColumn("answer", plain_gold, "the answer as text"),),
    id_columns=("id",),
    instruction=NO_INSTRUCTION,
)

TINY = Recipe(
    name="tiny",
    prompt_column="text",
    gold_columns=(GoldColumn("answer", plain_gold, "the answer as text"),),
    id_columns=("id",),
    instruction=NO_INSTRUCTION,
)
"""Generated sums: rows come from ``akl_dist.tiny.task``, so there is neither a hub data set nor a file."""

RECIPES: Mapping[str, tuple[Recipe, ...]] = {
    "tiny": (TINY,),
    "gsm8k": (GSM8K,),
    "math": (MATH,),
    "gsm8k_math": (GSM8K, MATH),
    "generic": (GENERIC,),
}
"""Recipe name -> the data sets it concatenates, in order."""


def find_recipe(name: str) -> tuple[Recipe, ...]:
    """The parts of a recipe. Raises DataError for an unknown name."""
    if name in RECIPES:
        return RECIPES[name]
    near = nearest(name, RECIPES)
    raise DataError(
        "data.recipe", got=repr(name), expected=f"one of {', '.join(RECIPES)}", stage="data",
        remedy=(f"Did you mean {near!r}? " if near else "")
        + "Any other data set: data.recipe=generic with data.path= or data.name= and data.columns.",
    )
