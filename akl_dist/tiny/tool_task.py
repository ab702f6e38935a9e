"""Products that take a tool: the task of the second embedded model. Standard library only.

A problem is the product of two numbers of two digits (`37*84=`). A model of this size cannot multiply them in its head, but a
program can: the worked conversation calls Python and copies out what it printed. The train/held-out split is that of the sums,
decided by a hash of the sorted operands.
"""
from __future__ import annotations

import random
import re
from dataclasses import dataclass

from akl_dist.tiny.task import Problem, Split, split_of

SMALLEST, LARGEST = 10, 99
MAX_OBSERVATION_TOKENS = 16
MAX_OBSERVATIONS = 2
"""Answers of the tool in one conversation: one to use, one more after a program that failed."""
CUT = "\n...\n"
_OPENING, _CLOSING = "```python\n", "\n```"
_PROGRAM = re.compile(r"print\((\d{1,4})\*(\d{1,4})\)")
_FENCED = re.compile(r"```python\n(.*?)\n```", re.DOTALL)
_ANSWER = re.compile(r"\\boxed\{(\d+)\}")
_ERRORS = (
    "SyntaxError: '(' was never closed (main.py, line 1)",
    "SyntaxError: invalid syntax (main.py, line 1)",
    "SyntaxError: unexpected EOF while parsing",
    "TimeoutError: the program ran longer than 5 s",
)
"""What an interpreter says of a program that fails, the likeliest first: the words differ between its versions."""


@dataclass(frozen=True)
class ToolNoise:
    """Shares (probabilities in [0, 1]) of the imperfections in a worked conversation.

    direct: the product is guessed without a call; its leading two digits are right. void: the program stands there without a
    code block, which calls nothing and answers nothing. copy: an operand is copied into the program off by one (each of the
    two by itself). syntax: the program lacks its closing bracket. retry: after such an error the program is written again (else
    the product is guessed). misread: one digit of the tool's output is copied wrongly.
    """

    direct: float = 0.0
    void: float = 0.0
    copy: float = 0.0
    syntax: float = 0.0
    retry: float = 1.0
    misread: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"ToolNoise.{name}: got {value}; expected a share in [0, 1].")


def make_product(left: int, right: int) -> Problem:
    """The problem asking for `left` times `right`."""
    return Problem(id=f"product:{left}*{right}", operands=(left, right), text=f"{left}*{right}=", answer=str(left * right))


def _all_products(split: Split) -> list[tuple[int, int]]:
    numbers = range(SMALLEST, LARGEST + 1)
    return [(left, right) for left in numbers for right in numbers if split_of((left, right)) == split]


def num_products(split: Split) -> int:
    """Distinct products of `split`, both orders of two operands counted."""
    return len(_all_products(split))


def products(split: Split, count: int, seed: int) -> list[Problem]:
    """`count` distinct products; the same list everywhere, and a longer one starts with the shorter one of the same seed.

    Raises ValueError for an unknown split, a negative count or more problems than the split holds (`num_products`).
    """
    operands = _all_products(split) if split in ("train", "heldout") else []
    if not operands or not 0 <= count <= len(operands):
        raise ValueError(f"tiny products: got split {split!r}, count {count}; expected 'train' or 'heldout' and at most "
                         f"{len(operands)} problems.")
    random.Random(f"akl_dist.tiny.products:{split}:{seed}").shuffle(operands)
    return [make_product(left, right) for left, right in operands[:count]]


def draw_product(rng: random.Random, split: Split) -> tuple[int, int]:
    """Operands of one product of `split`, each uniform in 10..99."""
    while True:
        operands = rng.randint(SMALLEST, LARGEST), rng.randint(SMALLEST, LARGEST)
        if split_of(operands) == split:
            return operands


def worked_conversation(operands: tuple[int, int], rng: random.Random, noise: ToolNoise = ToolNoise()) -> tuple[str, ...]:
    """Turns, alternating written by the model and by the tool, beginning and ending with the model's (no end-of-sequence tokens).

    With the default noise: a code block `print(37*84)`, the tool's `3108`, `\\boxed{3108}`.
    """
    kind = rng.random()
    if kind < noise.direct:
        return (_guess(operands, rng),)
    if kind < noise.direct + noise.void:
        return (_program(operands, rng, noise),)
    turns: list[str] = []
    if rng.random() < noise.syntax:
        turns += [_OPENING + _program(operands, rng, noise)[:-1] + _CLOSING, shown(rng.choice(_ERRORS))]
        if rng.random() >= noise.retry:
            return (*turns, _guess(operands, rng))
    call = _OPENING + _program(operands, rng, noise) + _CLOSING
    output = tool_reply(call)
    assert output is not None
    return (*turns, call, output, f"\\boxed{{{_misread(output, rng) if rng.random() < noise.misread else output}}}")


def tool_reply(turn: str) -> str | None:
    """What a Python tool says to a turn of the model, without running anything: the product that a code block prints, an error
    for any other block, None for a turn that calls nothing."""
    block = _FENCED.search(turn)
    if block is None:
        return None
    program = _PROGRAM.fullmatch(block.group(1))
    return str(int(program.group(1)) * int(program.group(2))) if program else shown(_ERRORS[0])


def shown(message: str, limit: int = MAX_OBSERVATION_TOKENS) -> str:
    """A message of the tool within `limit` tokens (bytes): the middle of a longer one is cut out."""
    keep = limit - len(CUT)
    return message if len(message) <= limit else message[: (keep + 1) // 2] + CUT + message[-(keep // 2) :]


def final_answer(turns: tuple[str, ...]) -> str | None:
    """The number boxed by the model's last turn; None where that turn says anything else, or the tool spoke last."""
    found = _ANSWER.fullmatch(turns[-1]) if len(turns) % 2 else None
    return found.group(1) if found else None


def _program(operands: tuple[int, int], rng: random.Random, noise: ToolNoise) -> str:
    left, right = (value + rng.choice((-1, 1)) if rng.random() < noise.copy else value for value in operands)
    return f"print({left}*{right})"


def _guess(operands: tuple[int, int], rng: random.Random) -> str:
    product = str(operands[0] * operands[1])
    return f"\\boxed{{{product[:2]}{''.join(rng.choice('0123456789') for _ in product[2:])}}}"


def _misread(output: str, rng: random.Random) -> str:
    place = rng.randrange(len(output))
    other = rng.choice([digit for digit in "0123456789" if digit != output[place]])
    return output[:place] + other + output[place + 1 :]
