"""Further generated tasks for the tiny model. Standard library only.

*Blanks* have several right answers: in `7+{}+6=` the blank may be any operand from 1 to 12, so each of 14 to 25 is
right. The shipped model was never shown one; it fills in an operand of its own and adds up. *Pairs*, sums of two
operands up to 20 (`11+17=`), are the new task of continual learning: the model was only taught longer sums of smaller
numbers and goes on adding, and learning to stop after one addition costs it some of the old task.
"""
from __future__ import annotations

import functools
import itertools
import math
import random
from collections import Counter

from akl_dist.contract.golds import any_of
from akl_dist.tiny.task import LARGEST_OPERAND, OPERAND_COUNTS, Problem, Split, draw_operands, num_problems, problems, split_of

BLANK = "{}"
KNOWN_COUNTS = tuple(count - 1 for count in OPERAND_COUNTS)
"""Operands that stand beside the blank."""
PAIR_COUNTS = (2,)
PAIR_LARGEST = 20


def make_blank(known: tuple[int, ...], position: int) -> Problem:
    """The problem with `known` operands in their order and the blank before the one at `position` (or at the end)."""
    if not 0 <= position <= len(known):
        raise ValueError(f"make_blank: got position {position}; expected 0 to {len(known)}.")
    written = [str(value) for value in known]
    expression = "+".join([*written[:position], BLANK, *written[position:]])
    accepted = [str(sum(known) + filled) for filled in range(1, LARGEST_OPERAND + 1)]
    return Problem(id=f"blank:{expression}", operands=known, text=f"{expression}=", answer=any_of(accepted))


@functools.cache
def num_blanks(split: Split) -> int:
    """Distinct problems with a blank: orderings of the known operands times places of the blank. The split is decided by the
    sorted known operands, so all of them fall on one side."""
    return sum(
        (count + 1) * math.factorial(count) // math.prod(math.factorial(n) for n in Counter(known).values())
        for count in KNOWN_COUNTS
        for known in itertools.combinations_with_replacement(range(1, LARGEST_OPERAND + 1), count)
        if split_of(known) == split
    )


def blanks(split: Split, count: int, seed: int) -> list[Problem]:
    """`count` distinct problems with a blank; the same list everywhere, and a longer one starts with the shorter one.

    Raises ValueError for an unknown split, a negative count or more problems than the split holds (`num_blanks`).
    """
    if split not in ("train", "heldout") or not 0 <= count <= num_blanks(split):
        raise ValueError(f"tiny blanks: got split {split!r}, count {count}; expected 'train' or 'heldout' and at most "
                         f"{num_blanks(split) if split in ('train', 'heldout') else 0} problems.")
    rng = random.Random(f"akl_dist.tiny.blanks:{split}:{seed}")
    chosen: dict[str, Problem] = {}
    while len(chosen) < count:  # ends: every problem has a chance at each draw
        known = draw_operands(rng, split, operand_counts=KNOWN_COUNTS)
        problem = make_blank(known, rng.randint(0, len(known)))
        chosen.setdefault(problem.id, problem)
    return list(chosen.values())


def pairs(split: Split, count: int, seed: int) -> list[Problem]:
    """`count` distinct sums of two operands, as `akl_dist.tiny.task.problems`."""
    return problems(split, count, seed, operand_counts=PAIR_COUNTS, largest=PAIR_LARGEST)


def num_pairs(split: Split) -> int:
    """Distinct sums of two operands on one side."""
    return num_problems(split, operand_counts=PAIR_COUNTS, largest=PAIR_LARGEST)
