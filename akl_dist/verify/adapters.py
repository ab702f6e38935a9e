"""Reward functions of one's own: found, held against the way they are called, called, and their answers made verdicts of.

Three signatures: ``akl`` (keywords, those of them that the function takes), ``verl`` (``compute_score(data_source, solution_str,
ground_truth, extra_info)``, by keyword as verl calls it) and ``openrlhf`` (``reward_func(queries, prompts, labels)``, by position,
in batches of one). Standard library only: tensors are known by their ``tolist``.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import math
import numbers
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from akl_dist.contract.errors import UserError, nearest
from akl_dist.contract.records import Status, Verdict
from akl_dist.verify.extract import locate
from akl_dist.verify.grader import Item

SIGNATURES = ("akl", "verl", "openrlhf")
AKL_KEYWORDS = ("response", "gold", "prompt", "extra", "truncated", "source", "transcript")
VERL_KEYWORDS = ("data_source", "solution_str", "ground_truth", "extra_info")
OPENRLHF_ARGUMENTS = ("queries", "prompts", "labels")
REMEDY = "docs/rewards.md has complete examples."
REASON_CHARACTERS = 300
FAILURES = (ArithmeticError, AssertionError, AttributeError, EOFError, ImportError, LookupError, MemoryError, NameError, OSError,
            RuntimeError, SyntaxError, TypeError, ValueError, re.error)
"""What a reward function raises in the ordinary way: no verdict, and the grader lives on. Anything else ends the grader, and there
is no verdict either."""

RewardFunction = Callable[..., Any]


@dataclass(frozen=True)
class RewardItem(Item):
    """One judgement with all that a reward of one's own may ask for.

    ``response_text``: of a conversation its last turn; ``transcript`` then holds all of it ("" where there is one turn).
    ``kind``: the verifier of the prompt's source in a mixture ("" the run's own). ``extra``: JSON text of the row's other columns.
    ``rendered``: the prompt through the chat template, where a signature needs it. ``with_terms``: False for probes.
    """

    kind: str = ""
    prompt: str = ""
    extra: str = ""
    source: str = ""
    prompt_id: str = ""
    rendered: str = ""
    transcript: str = ""
    with_terms: bool = True

    def extras(self) -> dict[str, Any]:
        """``extra`` as a dictionary. Raises ValueError for anything else."""
        values = json.loads(self.extra) if self.extra else {}
        if not isinstance(values, dict):
            raise ValueError(f"extra of {self.prompt_id or 'the prompt'} is {type(values).__name__}, no JSON object")
        return values


@dataclass(frozen=True)
class JudgedBy:
    """A reward beside another number that decides right or wrong (OpenRLHF's ``rewards`` and ``scores``)."""

    reward: Any
    judged: Any


# --- at start-up -----------------------------------------------------------------------------------------------------


def load_function(path: str, *, signature: str, key: str = "verify.custom") -> RewardFunction:
    """Import ``module:function`` and hold the function against the signature it will be called with.

    Raises:
        UserError: no such module or function, an import that fails, or parameters that do not fit.
    """
    module_name, _, name = path.partition(":")
    try:
        function: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a module of the user's own may raise anything; it is raised again, with its name
        raise UserError(key, got=f"{path!r}, whose module does not import ({type(error).__name__}: {error})", stage="config",
                        expected="module:function", remedy="Start where that file is, or put its folder on PYTHONPATH.") from error
    for part in name.split("."):
        if not hasattr(function, part):
            there = [one for one in dir(function) if callable(getattr(function, one)) and not one.startswith("_")]
            close = nearest(part, there)
            raise UserError(key, got=f"{path!r}, without {part!r}", expected=f"a function of {module_name}", stage="config",
                            remedy=f"Write {key}={module_name}:{close}." if close else REMEDY)
        function = getattr(function, part)
    check_signature(function, signature, path=path, key=key)
    return function


def check_signature(function: Any, signature: str, *, path: str, key: str) -> None:
    """Raise UserError unless the function can be called the way ``signature`` calls it."""
    wanted = {"akl": AKL_KEYWORDS, "verl": VERL_KEYWORDS, "openrlhf": OPENRLHF_ARGUMENTS}[signature]
    try:
        parameters = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise UserError(key, got=f"{path!r}: {error}", expected="a function", remedy=REMEDY, stage="config") from error
    try:
        _bind(function, signature)
    except TypeError as error:
        how = "any of the keywords " if signature == "akl" else "all of the keywords " if signature == "verl" else "by position "
        raise UserError(key, got=f"{path}{parameters} ({error})", expected=f"a function that takes {how}{', '.join(wanted)}, and "
                        f"needs nothing else (signature={signature})", stage="config",
                        remedy=_other_signature(function, key) or REMEDY) from error


def _bind(function: Any, signature: str) -> None:
    """Raise TypeError unless the function can be called the way ``signature`` calls it."""
    parameters = inspect.signature(function)
    if signature == "openrlhf":
        parameters.bind(*OPENRLHF_ARGUMENTS)
    elif signature == "verl":
        parameters.bind(**dict.fromkeys(VERL_KEYWORDS))
    elif not akl_keywords(function):
        raise TypeError("it takes none of them")
    else:
        parameters.bind(**dict.fromkeys(akl_keywords(function)))


def _other_signature(function: Any, key: str) -> str:
    """The remedy where the function's parameters have the names of another signature; "" where they have not."""
    names = list(inspect.signature(function).parameters)
    named = {"verl": "solution_str" in names, "openrlhf": names[:3] == list(OPENRLHF_ARGUMENTS), "akl": "response" in names}
    fits = next((signature for signature, right in named.items() if right), "")
    return f"Write {key.removesuffix('custom')}signature={fits}; {REMEDY}" if fits else ""


def akl_keywords(function: RewardFunction) -> tuple[str, ...]:
    """Those of :data:`AKL_KEYWORDS` that the function takes by keyword; all of them where it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        return AKL_KEYWORDS
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(one.name for one in parameters if one.name in AKL_KEYWORDS and one.kind in by_keyword)


# --- in the grader ---------------------------------------------------------------------------------------------------


def call(function: RewardFunction, signature: str, item: RewardItem) -> Any:
    """What the function answers for one response, awaited where it is a coroutine. Raises whatever the function raises."""
    extra = item.extras()
    if signature == "akl":
        values = {"response": item.response_text, "gold": item.gold, "prompt": item.prompt, "extra": extra,
                  "truncated": item.truncated, "source": item.source, "transcript": item.transcript or item.response_text}
        answer = function(**{name: values[name] for name in akl_keywords(function)})
    elif signature == "verl":
        answer = function(data_source=extra.get("data_source", item.source), solution_str=item.response_text,
                          ground_truth=item.gold, extra_info=extra.get("extra_info", extra))
    else:
        prompt = item.rendered or item.prompt
        answer = function([prompt + item.response_text], [prompt], [item.gold])
    if inspect.isawaitable(answer):
        answer = asyncio.run(_awaited(answer))
    return only_element(answer) if signature == "openrlhf" else answer


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


def only_element(answer: Any) -> Any:
    """The one number of a batch of one: ``rewards`` (and, for right or wrong, ``scores``) of OpenRLHF's dictionary, or a list."""
    if isinstance(answer, Mapping):
        if "rewards" not in answer and "scores" not in answer:
            raise ValueError(f"a dictionary with {sorted(map(str, answer))[:5]}, expected rewards or scores")
        reward = only_element(answer.get("rewards", answer.get("scores")))
        return JudgedBy(reward, only_element(answer["scores"])) if "scores" in answer else reward
    values = plain(answer)
    while isinstance(values, (list, tuple)):
        if len(values) != 1:
            raise ValueError(f"{len(values)} rewards for a batch of one response")
        values = plain(values[0])
    return values


def plain(value: Any) -> Any:
    """A tensor's, an array's or an array scalar's values as Python's own; anything else as it is."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else value


def verdict_of(answer: Any, *, right_at: float) -> Verdict:
    """The verdict that an answer means. A number is right from ``right_at`` on; what means nothing is an ``error``, never a zero.

    A mapping holds ``score``, and may say ``status``, ``correct`` (or verl's ``acc``), ``extracted``, ``reason``; other entries are
    not read.
    """
    answer = plain(answer)
    if isinstance(answer, Verdict):
        return _own_verdict(answer)
    if isinstance(answer, Status):
        return Verdict(answer)
    if isinstance(answer, bool):
        return Verdict(Status.OK if answer else Status.WRONG)
    if isinstance(answer, Mapping):
        return _of_mapping(answer, right_at)
    reward, judged = (answer.reward, answer.judged) if isinstance(answer, JudgedBy) else (answer, answer)
    score, measure = finite(reward), finite(judged)
    if score is None or measure is None:
        return failed(f"a reward of {shown(reward if score is None else judged)}, expected a finite number")
    return Verdict(Status.OK if measure >= right_at else Status.WRONG, score=score)


def _own_verdict(verdict: Verdict) -> Verdict:
    if not isinstance(verdict.status, Status) or not isinstance(verdict.reason, str):
        return failed("a Verdict without a Status, or with a reason that is no text")
    if verdict.score is not None and finite(verdict.score) is None:
        return failed(f"a Verdict with score {shown(verdict.score)}, expected a finite number")
    return replace(verdict, score=None if verdict.score is None else finite(verdict.score), terms=(),
                   reason=verdict.reason[:REASON_CHARACTERS])


def _of_mapping(answer: Mapping[Any, Any], right_at: float) -> Verdict:
    score = None
    if answer.get("score") is not None:
        score = finite(answer["score"])
        if score is None:
            return failed(f"score {shown(answer['score'])}, expected a finite number")
    status = _status(answer, score, right_at)
    if not isinstance(status, Status):
        return failed(status)
    extracted, reason = answer.get("extracted"), answer.get("reason") or ""
    if not isinstance(extracted, (str, type(None))) or not isinstance(reason, str):
        return failed("extracted or reason that is no text")
    return Verdict(status, extracted, reason=reason[:REASON_CHARACTERS], score=score if status.trains else None)


def _status(answer: Mapping[Any, Any], score: float | None, right_at: float) -> Status | str:
    """The status that a mapping says, or why it says none."""
    given = plain(answer.get("acc") if answer.get("correct") is None else answer["correct"])
    if given is not None and given not in (0, 1):
        return f"correct {shown(given)}, expected true or false"
    named = answer.get("status")
    if named is not None:
        known = [status for status in Status if isinstance(named, str) and named in (status, status.value)]
        if not known:
            return f"status {shown(named)}, expected one of {', '.join(status.value for status in Status)}"
        if given is not None and bool(given) != (known[0] is Status.OK):
            return f"status {known[0].value} beside correct {bool(given)}"
        return known[0]
    if given is not None:
        return Status.OK if given else Status.WRONG
    if score is None:
        return f"an answer with {sorted(map(str, answer))[:5]}, expected a finite score, or status or correct"
    return Status.OK if score >= right_at else Status.WRONG


def finite(value: Any) -> float | None:
    """A finite real number as float; None for anything else (a boolean counts as 0 or 1)."""
    value = plain(value)
    try:
        number = float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def with_answer(verdict: Verdict, response: str, *, think_open: bool = False) -> Verdict:
    """The verdict with an answer and its span, which token roles vote by.

    What the verdict brings stays: its span, or the last place of its ``extracted`` in the response. One that brings neither gets
    what the standard extractor finds, if anything.
    """
    if not isinstance(verdict.extracted, (str, type(None))):
        return failed(f"extracted {shown(verdict.extracted)}, expected text")
    if verdict.span is not None:
        span = verdict.span
        bounds = isinstance(span, tuple) and len(span) == 2 and all(isinstance(one, int) for one in span)
        if not bounds or not 0 <= span[0] <= span[1] <= len(response):
            return failed(f"span {shown(span)} of a response of {len(response)} characters")
        return verdict if verdict.extracted is not None else replace(verdict, extracted=response[span[0] : span[1]])
    if verdict.extracted is not None:
        start = response.rfind(verdict.extracted)
        return replace(verdict, span=(start, start + len(verdict.extracted))) if start >= 0 and verdict.extracted else verdict
    marker = locate(response, think_open=think_open)
    return verdict if marker is None else replace(verdict, extracted=marker.answer, span=marker.span)


def failed(reason: str) -> Verdict:
    """No verdict: what a reward did wrong."""
    return Verdict(Status.ERROR, reason=reason[:REASON_CHARACTERS])


def shown(value: Any) -> str:
    """A value for a message: short, and without calling what a foreign type does for its text."""
    if value is None or type(value) in (bool, int, float, str, list, tuple):
        text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a huge integer"
        return text if len(text) <= 60 else text[:60] + "..."
    return type(value).__name__
