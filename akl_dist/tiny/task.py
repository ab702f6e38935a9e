"""Generated sums with worked solutions: the task of the embedded tiny model. Standard library only.

A problem is the sum of 3 or 4 operands between 1 and 12. The train/held-out split is decided by a hash of the *sorted*
operands, so every ordering of the same operands falls on the same side and a held-out sum has no twin in training.
"""
from __future__ import annotations

import functools
import hashlib
import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "heldout"]

OPERAND_COUNTS = (3, 4)
LARGEST_OPERAND = 12
HELDOUT_PERCENT = 20
_SPLIT_SALT = "akl_dist.tiny:"


@dataclass(frozen=True)
class Problem:
    """One sum. `text` is the user's message (`7+3+6+2=`), `answer` the decimal value (`18`), `id` unique per text."""

    id: str
    operands: tuple[int, ...]
    text: str
    answer: str


@dataclass(frozen=True)
class Noise:
    """Shares (probabilities in [0, 1]) of the imperfections in a worked solution.

    step: a step's result is off by 1 or 10 (later steps go on from the wrong value). copy: an operand is copied off by
    one. direct: the reasoning is left empty and the (right) sum is stated at once. right_to_left: the operands are
    added from the right. decimal: the answer is written as `18.0`.
    """

    step: float = 0.0
    copy: float = 0.0
    direct: float = 0.0
    right_to_left: float = 0.0
    decimal: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"Noise.{name}: got {value}; expected a share in [0, 1].")


def split_of(operands: Sequence[int]) -> Split:
    """The side of the split on which these operands fall, the same for every order of them."""
    key = _SPLIT_SALT + ",".join(str(value) for value in sorted(operands))
    bucket = int.from_bytes(hashlib.sha256(key.encode("ascii")).digest()[:8], "big") % 100
    return "heldout" if bucket < HELDOUT_PERCENT else "train"


def make_problem(operands: Sequence[int]) -> Problem:
    """The problem asking for the sum of `operands` in the given order."""
    expression = "+".join(str(value) for value in operands)
    return Problem(
        id=f"sum:{expression}", operands=tuple(operands), text=f"{expression}=", answer=str(sum(operands))
    )


def draw_operands(
    rng: random.Random,
    split: Split,
    *,
    operand_counts: Sequence[int] = OPERAND_COUNTS,
    largest: int = LARGEST_OPERAND,
) -> tuple[int, ...]:
    """One operand tuple of `split`: the number of operands uniform in `operand_counts`, each uniform in 1..largest."""
    while True:
        operands = tuple(rng.randint(1, largest) for _ in range(rng.choice(operand_counts)))
        if split_of(operands) == split:
            return operands


@functools.cache
def num_problems(
    split: Split, *, operand_counts: tuple[int, ...] = OPERAND_COUNTS, largest: int = LARGEST_OPERAND
) -> int:
    """Distinct problems of `split`: all orderings of the operands that fall on its side (by default 4,432 held out, 18,032
    for training)."""
    return sum(
        math.factorial(count) // math.prod(math.factorial(n) for n in Counter(operands).values())
        for count in set(operand_counts)
        for operands in itertools.combinations_with_replacement(range(1, largest + 1), count)
        if split_of(operands) == split
    )


def problems(
    split: Split,
    count: int,
    seed: int,
    *,
    operand_counts: Sequence[int] = OPERAND_COUNTS,
    largest: int = LARGEST_OPERAND,
) -> list[Problem]:
    """`count` distinct problems of `split`, the same list for the same arguments on every machine.

    A longer list starts with the shorter one of the same seed. Raises ValueError for an unknown split, a negative count
    or more problems than the split holds (`num_problems`).
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"tiny problems: got split {split!r}; expected 'train' or 'heldout'.")
    if count < 0:
        raise ValueError(f"tiny problems: got count {count}; expected 0 or more.")
    available = num_problems(split, operand_counts=tuple(operand_counts), largest=largest) if count else 0
    if count > available:
        raise ValueError(
            f"tiny problems: got count {count}; expected at most {available} distinct problems in split "
            f"{split!r} (operand counts {tuple(operand_counts)}, operands up to {largest}); ask for fewer."
        )
    rng = random.Random(f"{_SPLIT_SALT}{split}:{seed}")
    chosen: dict[tuple[int, ...], Problem] = {}
    while len(chosen) < count:  # ends: every one of the `available` problems has a chance at each draw
        operands = draw_operands(rng, split, operand_counts=operand_counts, largest=largest)
        chosen.setdefault(operands, make_problem(operands))
    return list(chosen.values())


def worked_solution(operands: Sequence[int], rng: random.Random, noise: Noise = Noise()) -> str:
    """A response such as `<think>7+3=10;10+6=16;16+2=18</think>\\boxed{18}` (no end-of-sequence token).

    Right to left it is `<think>6+2=8;3+8=11;7+11=18</think>...`. With the default noise it is always correct.
    """
    if len(operands) < 2:
        raise ValueError(f"worked_solution: got {len(operands)} operands; expected at least 2.")
    if rng.random() < noise.direct:
        steps, value = [], sum(operands)
    else:
        steps, value = _steps(operands, rng, noise)
    decimal = ".0" if rng.random() < noise.decimal else ""
    return f"<think>{';'.join(steps)}</think>\\boxed{{{value}{decimal}}}"


def _steps(operands: Sequence[int], rng: random.Random, noise: Noise) -> tuple[list[str], int]:
    """The written additions and the value at which they arrive."""
    backwards = rng.random() < noise.right_to_left
    first, *rest = [_copied(value, rng, noise) for value in (reversed(operands) if backwards else operands)]
    steps, total = [], first
    for operand in rest:
        left, right = (operand, total) if backwards else (total, operand)
        total = _off_by(left + right, (-10, -1, 1, 10), rng) if rng.random() < noise.step else left + right
        steps.append(f"{left}+{right}={total}")
    return steps, total


def _copied(value: int, rng: random.Random, noise: Noise) -> int:
    return _off_by(value, (-1, 1), rng) if rng.random() < noise.copy else value


def _off_by(value: int, deltas: Sequence[int], rng: random.Random) -> int:
    """`value` plus one of `deltas`, never below zero: the task has no minus sign."""
    return value + rng.choice([delta for delta in deltas if value + delta >= 0])
