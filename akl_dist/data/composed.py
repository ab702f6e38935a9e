"""Row adapters of data sets whose problem or gold is more than one column: code benchmarks and verl's layout. Stdlib only.

An adapter returns a :class:`Composed`, or in words what the row lacks.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Composed:
    """What a row gives: the problem's text (of a conversation, its last user message), the gold, and where a row has them the
    messages of its own prompt as (role, content), the name of its source, and as JSON text what else a reward may want."""

    text: str
    gold: str
    messages: tuple[tuple[str, str], ...] = ()
    source: str | None = None
    extra: str = ""


RowAdapter = Callable[[Mapping[str, Any]], "Composed | str"]
ROLES = ("system", "user", "assistant")


def code_gold(prompt_style: str, tests: Mapping[str, Any]) -> str:
    """A code task's gold, as text: the columns that the code verifier reads beside the completion."""
    return json.dumps({"prompt_style": prompt_style, "tests": tests}, ensure_ascii=True, sort_keys=True)


def mbpp(row: Mapping[str, Any]) -> Composed | str:
    """MBPP (Austin et al. 2021, arXiv 2108.07732), full (column ``text``) or sanitized (``prompt``).

    The prompt shows the first of the tests, which gives the function's name and arguments; all of them judge. Where there is
    only one, the prompt shows its call without the expected value: a test that is all of the hidden tests is never shown.
    """
    text: Any = row.get("text", row.get("prompt"))
    tests: Any = row.get("test_list")
    setup = [row.get("test_setup_code") or "", *(row.get("test_imports") or ())]
    if not isinstance(text, str) or not text.strip():
        return "no text in column 'text' or 'prompt'"
    if not _texts(tests) or not _texts(setup):
        return "no asserts in column 'test_list'"
    shown = tests[0] if len(set(tests)) > 1 else _call_of(tests[0])
    if shown is None:
        return "one assert only, and not one that compares a call"
    gold = code_gold("instruct_function", {"entry_point": "", "setup": "\n".join(filter(None, setup)), "asserts": list(tests)})
    return Composed(f"{text}\nYour code should satisfy:\n{shown}", gold)


def mbpp_split(row: Mapping[str, Any]) -> str | None:
    """The published split of a task id; the file as published holds all four in one."""
    try:
        number = int(row["task_id"])
    except (KeyError, TypeError, ValueError):
        return None
    last = {"prompt": 10, "test": 510, "validation": 600, "train": 974}
    return next((name for name, end in last.items() if number <= end), None)


def humaneval(row: Mapping[str, Any]) -> Composed | str:
    """HumanEval (Chen et al. 2021, arXiv 2107.03374): the prompt, byte for byte; ``check(candidate)`` judges."""
    prompt, test, entry_point = (row.get(name) for name in ("prompt", "test", "entry_point"))
    if not _texts([prompt, test, entry_point]) or not (prompt and test and entry_point):
        return "no text in columns 'prompt', 'test' and 'entry_point'"
    return Composed(str(prompt), code_gold("humaneval_completion", {
        "entry_point": entry_point, "prompt": prompt, "setup": "", "test": test}))


class Numeral(str):
    """A number of a JSON file in its own spelling (``0.10``); where it goes into JSON again it is a number again."""


def verl(row: Mapping[str, Any]) -> Composed | str:
    """verl's layout: ``data_source``, ``prompt`` (a list of role and content), ``reward_model.ground_truth``, ``extra_info``.

    The messages reach the chat template as they are. A ground truth of several parts (a code task's tests) and ``extra_info``
    become JSON text; ``ability`` and ``reward_model.style`` decide nothing here.
    """
    messages, model, source = row.get("prompt"), row.get("reward_model"), row.get("data_source")
    if not isinstance(messages, list) or not messages:
        return "no list of messages in column 'prompt'"
    for message in messages:
        if not isinstance(message, Mapping) or message.get("role") not in ROLES or not isinstance(message.get("content"), str):
            return f"a message in 'prompt' that is no role ({', '.join(ROLES)}) with a text"
    if messages[-1]["role"] != "user":
        return "a prompt that does not end with a user's message"
    if not messages[-1]["content"].strip():
        return "no text in the user's message that ends 'prompt'"
    try:
        gold = _ground_truth(model.get("ground_truth") if isinstance(model, Mapping) else None)
        extra = jsonable(row.get("extra_info"))
    except ValueError as error:
        return str(error)
    except RecursionError:
        return "'reward_model.ground_truth' or 'extra_info' nested too deeply"
    if not gold:
        return "no text in 'reward_model.ground_truth'"
    if source is not None and (not isinstance(source, str) or not source.strip()):
        return "no text in column 'data_source'"
    pairs = tuple((message["role"], message["content"]) for message in messages)
    extra = extra if isinstance(extra, dict | None) else {"extra_info": extra}
    return Composed(pairs[-1][1], gold, pairs, source, "" if extra is None else _json(extra))


def other_columns(row: Mapping[str, Any], used: Collection[str | None]) -> str:
    """JSON text of the columns that are not ``used``, for a reward or an environment of one's own; "" without any. A value that
    JSON cannot hold (bytes, dates, nan) is left out."""
    kept: dict[str, Any] = {}
    for name in row.keys() - set(used):
        with contextlib.suppress(ValueError, RecursionError):
            kept[name] = jsonable(row[name])
    return _json(kept) if kept else ""


def _json(values: Any) -> str:
    return json.dumps(values, ensure_ascii=True, sort_keys=True)


def _ground_truth(value: Any) -> str | None:
    """A gold as text: text itself, a number in its spelling, JSON of a dictionary or list. Raises ValueError."""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, bool) or value is None:
        return None
    plain = jsonable(value, "'reward_model.ground_truth'")
    if isinstance(plain, int | float):
        return str(plain)
    return _json(plain) if plain else None


def jsonable(value: Any, where: str = "'extra_info'") -> Any:
    """``value`` with nothing in it but what JSON holds: arrays become lists, their numbers plain ones.

    Raises ValueError naming the place of what JSON cannot hold (bytes, dates, decimals, nan, keys that are no text).
    """
    if isinstance(value, Numeral):
        return int(value) if value.lstrip("-").isdigit() else jsonable(float(value), where)
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} in {where}, which JSON cannot hold")
        return value
    if isinstance(value, Mapping):
        strange = [key for key in value if not isinstance(key, str)]
        if strange:
            raise ValueError(f"the key {strange[0]!r} in {where}, which JSON cannot hold (only text)")
        return {key: jsonable(one, f"{where}[{key!r}]") for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(one, f"{where}[{index}]") for index, one in enumerate(value)]
    if hasattr(value, "dtype") and hasattr(value, "tolist"):  # numpy's arrays and scalars
        return jsonable(value.tolist(), where)
    raise ValueError(f"a {type(value).__name__} in {where}, which JSON cannot hold")


DAPO_OPENING = ("Solve the following math problem step by step. The last line of your response should be of the form Answer: "
                "$Answer (without quotes) where $Answer is the answer to the problem.\n\n")
DAPO_CLOSING = "\n\nRemember to put your answer on its own line after \"Answer:\"."


def without_dapo_words(text: str) -> str:
    """A DAPO-Math problem without the fixed words around it, which ask for another answer format than the recipe's own."""
    return text.removeprefix(DAPO_OPENING).removesuffix(DAPO_CLOSING)


def _texts(values: Any) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str) and bool(values) and all(isinstance(v, str) for v in values)


def _call_of(test: str) -> str | None:
    """The left side of ``assert f(...) == value``, where it is a call; None for anything else."""
    try:
        tree = ast.parse(test)
    except (SyntaxError, ValueError, RecursionError):
        return None
    node = tree.body[0] if len(tree.body) == 1 else None
    if not (isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare) and isinstance(node.test.left, ast.Call)):
        return None
    return ast.unparse(node.test.left)
