"""Recipes of the known data sets: where they live, which columns they have, how the gold answer is read off.

Schemas as published by openai/gsm8k (Cobbe et al. 2021), EleutherAI/hendrycks_math (Hendrycks et al. 2021),
HuggingFaceH4/MATH-500 and aime_2024, math-ai/aime25, google-research-datasets/mbpp, openai/openai_humaneval,
open-r1/DAPO-Math-17k-Processed and agentica-org/DeepScaleR-Preview-Dataset. A gold adapter returns None where it finds no answer;
the loader then refuses the row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from akl_dist.contract.errors import DataError, nearest
from akl_dist.data import composed
from akl_dist.data.composed import RowAdapter

GoldAdapter = Callable[[str], "str | None"]


@dataclass(frozen=True)
class Instruction:
    """Text put after each problem, and the verifier whose extractor reads what it asks for: one unit with a version. Another text
    or another verifier is another version."""

    version: str
    text: str
    verifier: str = "math"


BOXED = Instruction("boxed-1", "\n\nReason step by step and put the final answer within \\boxed{}.")
NO_INSTRUCTION = Instruction("none", "")
WRITE_FUNCTION = Instruction("function-1", "\n\nWrite the function, with what it needs, in a ```python block.", "code")
COMPLETE_FUNCTION = Instruction("completion-1", "\n\nComplete this function. Write it as a whole in a ```python block.", "code")


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
    ``compose`` takes the place of prompt and gold columns where they are more than one column.
    ``splits`` maps a split asked for to the hub's name of it; ``split_of`` tells a row's split where a file holds several.
    ``benchmark``: only evaluated, neither trained nor anchored on. ``evaluates`` False: only trained on.
    ``brings_extra``: columns that are neither problem, gold nor id go to rewards and environments of one's own.
    ``generated`` names a task of ``akl_dist.tiny`` whose rows are made up on the spot: neither a hub data set nor a file is
    needed. ``trains`` False: a retained task, evaluated and (with CoKL) anchored on, never trained on.
    """

    name: str
    prompt_column: str
    gold_columns: tuple[GoldColumn, ...]
    id_columns: tuple[str, ...]
    instruction: Instruction
    hub_name: str | None = None
    hub_configs: tuple[str | None, ...] = (None,)
    known_unusable: Mapping[str, str] = field(default_factory=dict)
    generated: str | None = None
    trains: bool = True
    benchmark: bool = False
    evaluates: bool = True
    brings_extra: bool = False
    other_prompt_columns: tuple[str, ...] = ()
    prompt_adapter: Callable[[str], str] | None = None
    compose: RowAdapter | None = None
    splits: Mapping[str, str] = field(default_factory=dict)
    split_of: Callable[[Mapping[str, object]], str | None] | None = None


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

MATH500 = replace(MATH, name="math500", hub_name="HuggingFaceH4/MATH-500", hub_configs=(None,), known_unusable={}, benchmark=True)

AIME24 = Recipe(
    name="aime24",
    prompt_column="problem",
    gold_columns=(GoldColumn("answer", plain_gold, "the answer as text"),),
    id_columns=("id",),
    instruction=BOXED,
    hub_name="HuggingFaceH4/aime_2024",
    splits={"test": "train"},  # the hub's only split
    benchmark=True,
)

AIME25 = replace(AIME24, name="aime25", hub_name="math-ai/aime25", splits={})

DAPO_MATH = Recipe(
    name="dapo_math",
    prompt_column="prompt",
    other_prompt_columns=("problem",),
    prompt_adapter=composed.without_dapo_words,
    gold_columns=(
        GoldColumn("solution", plain_gold, "the answer as text"),
        GoldColumn("answer", plain_gold, "the answer as text"),
    ),
    id_columns=(),
    instruction=BOXED,
    hub_name="open-r1/DAPO-Math-17k-Processed",
    hub_configs=("all",),
    evaluates=False,
)

DEEPSCALER = Recipe(
    name="deepscaler",
    prompt_column="problem",
    gold_columns=(GoldColumn("answer", plain_gold, "the answer as text"),),
    id_columns=(),
    instruction=BOXED,
    hub_name="agentica-org/DeepScaleR-Preview-Dataset",
    evaluates=False,
)

MBPP = Recipe(
    name="mbpp",
    prompt_column="text",
    gold_columns=(),
    id_columns=("task_id",),
    instruction=WRITE_FUNCTION,
    hub_name="google-research-datasets/mbpp",
    hub_configs=("full",),
    compose=composed.mbpp,
    split_of=composed.mbpp_split,
)

MBPP_SANITIZED = replace(MBPP, name="mbpp_sanitized", prompt_column="prompt", hub_configs=("sanitized",))

HUMANEVAL = Recipe(
    name="humaneval",
    prompt_column="prompt",
    gold_columns=(),
    id_columns=("task_id",),
    instruction=COMPLETE_FUNCTION,
    hub_name="openai/openai_humaneval",
    compose=composed.humaneval,
    benchmark=True,
)

VERL = Recipe(
    name="verl",
    prompt_column="prompt",
    gold_columns=(),
    id_columns=(),
    instruction=NO_INSTRUCTION,
    compose=composed.verl,
)
"""Files made for verl: the prompt is a conversation that carries its own instruction."""

GENERIC = Recipe(
    name="generic",
    prompt_column="prompt",
    gold_columns=(GoldColumn("answer", plain_gold, "the answer as text"),),
    id_columns=("id",),
    instruction=NO_INSTRUCTION,
    brings_extra=True,
)

TINY = Recipe(
    name="tiny",
    prompt_column="text",
    gold_columns=(GoldColumn("answer", plain_gold, "the answer as text"),),
    id_columns=("id",),
    instruction=NO_INSTRUCTION,
    generated="sums",
)

MULTI_SOLUTION = replace(TINY, name="multi_solution", generated="blanks")
"""Sums with a blank: twelve right answers each (``7+{}+6=``: 14 to 25)."""

PAIRS = replace(TINY, name="tiny_pairs", generated="pairs")
"""Sums of two operands: new to the shipped model."""

TINY_TIR = replace(TINY, name="tiny_tir", generated="products")
"""Products of two numbers of two digits, for a model that may call Python."""

RECIPES: Mapping[str, tuple[Recipe, ...]] = {
    "tiny": (TINY,),
    "multi_solution": (MULTI_SOLUTION,),
    "continual": (PAIRS, replace(TINY, trains=False)),
    "tiny_tir": (TINY_TIR,),
    "gsm8k": (GSM8K,),
    "math": (MATH,),
    "gsm8k_math": (GSM8K, MATH),
    "math500": (MATH500,),
    "aime24": (AIME24,),
    "aime25": (AIME25,),
    "dapo_math": (DAPO_MATH, AIME24, AIME25),
    "deepscaler": (DEEPSCALER, AIME24, MATH500),
    "mbpp": (MBPP,),
    "mbpp_sanitized": (MBPP_SANITIZED,),
    "humaneval": (HUMANEVAL,),
    "verl": (VERL,),
    "generic": (GENERIC,),
}
"""Recipe name -> the data sets it concatenates, in order."""


def benchmark_of(file: Path, instruction: Instruction) -> tuple[Recipe, ...]:
    """The benchmark that a single file is named after (``math500.jsonl``), if it asks for answers in the same words; else none."""
    known = {part.name: part for parts in RECIPES.values() for part in parts}
    part = known.get(file.stem)
    return (part,) if part is not None and part.instruction == instruction else ()


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
