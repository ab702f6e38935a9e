"""What the benchmarks of the verifier judge: honest answers and programs, and hostile ones mixed in at a given share."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from akl_dist.data.recipes import gsm8k_gold
from akl_dist.verify.code import gold_text
from akl_dist.verify.grader import Item

CASES = Path(__file__).resolve().parents[1] / "tests" / "verify" / "data"
PUBLISHED = ("gsm8k_test", "math500", "aime24", "aime25")
T = TypeVar("T")


@dataclass(frozen=True)
class Mixed:
    """One input of a mixture."""

    item: Item
    hostile: bool


def answers(folder: Path | None = None) -> list[tuple[str, str]]:
    """Pairs of a gold and an answer: hard hand-made ones, sums and fractions, and each published gold of ``folder`` with itself and
    with another."""
    pairs = [(str(row["gold"]), str(row["answer_text"])) for row in _rows(CASES / "math_cases.jsonl") if row.get("answer_text")]
    draw = random.Random(0)
    for _ in range(100):
        n, d = draw.randrange(2, 5000), draw.randrange(2, 60)
        pairs += [(str(n), str(n)), (str(n), str(n + 1)), (f"{n:,}", str(n)), (f"\\frac{{{n}}}{{{d}}}", f"{n}/{d}"),
                  (f"{n}\\sqrt{{2}}", f"\\sqrt{{{2 * n * n}}}")]
    for name, file in [] if folder is None else [(name, folder / f"{name}.jsonl") for name in PUBLISHED]:
        rows = _rows(file)
        read = gsm8k_gold if name.startswith("gsm8k") else str
        golds = [gold for row in rows if (gold := read(row["answer"]))]
        pairs += list(zip(golds, golds, strict=True)) + list(zip(golds, golds[1:] + golds[:1], strict=True))
    return draw.sample(pairs, len(pairs))


def response_of(answer: str) -> str:
    return f"<think>let me see</think>so it is $\\boxed{{{answer}}}$."


def hostile_answers() -> list[tuple[str, str]]:
    """Towers, factorials, nesting, endless sums and long texts; each would cost minutes if it were evaluated as it stands."""
    texts = ["9^{9^{9^{9}}}", "10^{10^{10}}\\pi", "(((((9!)!)!)!)!)", "99999!!", "\\binom{10^9}{10^8}", "(x+1)^{99999}",
             "(x+y+z)^{200}", "\\sqrt{" * 60 + "2" + "}" * 60, "\\frac{1}{" * 80 + "2" + "}" * 80,
             "(" * 3000, "x^" * 900 + "2", "1" * 1_000_000, "\\boxed{" * 140_000,
             "+".join(["\\sqrt{2}"] * 100_000), "\\sum_{k=1}^{10^{12}} \\frac{1}{k}", "\\prod_{k=1}^{10^9} k",
             "\\int_0^{10^9} e^{x^2} dx", "+".join(f"\\sqrt{{{n}}}" for n in range(2, 300)), "\\lim_{n\\to\\infty} n!"]
    return [(gold, text) for text in texts for gold in ("6", "2\\sqrt{2}", "x^2+1")]


def published_folder() -> Path | None:
    """The folder of published data files, where AKL_SHARED names one."""
    folder = Path(os.environ.get("AKL_SHARED", "/nowhere")) / "data"
    return folder if folder.is_dir() else None


ADD = gold_text("instruct_function", {"entry_point": "add", "asserts": ["assert add(2, 3) == 5", "assert add(-1, 1) == 0"]})
HOSTILE_PROGRAMS = {
    "endless loop": "def add(a, b):\n    while True: pass",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "output flood": "while True: print('x' * 4096)",
}


def fenced(source: str) -> str:
    return f"```python\n{source}\n```"


def programs(folder: Path | None = None, most: int = 200) -> list[Item]:
    """Honest programs with their tests, right ones and wrong ones."""
    made = [Item(ADD, fenced(f"def add(a, b):\n    return a {sign} b"), False) for sign in "+-"]
    made += [Item(gold_text(row["prompt_style"], row["tests"]), row["completion"], False)
             for row in _rows(CASES / "code_cases.jsonl") if row["expected"]]
    for row in _rows(folder / "mbpp.jsonl")[:most] if folder else ():
        tests = {"asserts": row["test_list"], "setup": row.get("test_setup_code", "")}
        made.append(Item(gold_text("instruct_function", tests), fenced(row["code"]), False))
    return random.Random(0).sample(made, len(made))


def hostile_programs() -> list[Item]:
    return [Item(ADD, fenced(source), False) for source in HOSTILE_PROGRAMS.values()]


def items(pairs: Iterable[tuple[str, str]]) -> list[Item]:
    return [Item(gold, response_of(answer), False) for gold, answer in pairs]


def mixture(honest: Sequence[Item], hostile: Sequence[Item], count: int, share: float) -> Iterator[Mixed]:
    """``count`` inputs of which one in ``1 / share`` is hostile, evenly spaced; both kinds repeat from the start when used up."""
    every = round(1 / share) if share else count + 1
    for index in range(count):
        number, rest = divmod(index, every)
        if rest == every - 1:
            yield Mixed(hostile[number % len(hostile)], True)
        else:
            yield Mixed(honest[(index - number) % len(honest)], False)


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
