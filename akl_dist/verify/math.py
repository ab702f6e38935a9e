"""Verdict on one response to a mathematics problem: extract, normalise, compare. Pure, in-process, no time limit of its own.

Meant to run inside a killable grader process (:mod:`akl_dist.verify.grader`), which owns the limit. sympy is imported only
when exact arithmetic cannot decide.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from akl_dist.contract.golds import MAX_ALTERNATIVES, alternatives
from akl_dist.contract.records import Status, Verdict
from akl_dist.verify.equality import Outcome, compare
from akl_dist.verify.extract import extract
from akl_dist.verify.normalize import canonical, identity_key
from akl_dist.verify.quantity import TooLarge

MAX_GOLD = 4000  # characters
MAX_ANSWER = 4000
MAX_NESTING = 40
_ZEROS = re.compile(r"(?<=\d)\.0+(?!\d)")
FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)
"""What sympy raises on expressions it cannot handle: the grader's failure, hence no verdict, never a wrong answer."""


def judge(*, gold: str, response_text: str, truncated: bool, think_open: bool = False) -> Verdict:
    """The verdict on a whole response.

    A truncated response is ``no_answer`` (it never stopped by itself), but what it marked is still reported, so that the
    answer span depends on the text alone.

    Args:
        gold: the right answer, already extracted.
        response_text: the response up to its end token, think markers included.
        truncated: the engine stopped it at the length limit.
        think_open: the prompt ended with ``<think>``.
    """
    bad_gold = invalid_gold(gold)
    marker = extract(response_text, think_open=think_open)
    extracted, span = (None, None) if marker is None else (marker.answer, marker.span)
    if bad_gold:
        return Verdict(Status.INVALID_GOLD, extracted, span, bad_gold)
    if marker is None:
        return Verdict(Status.NO_ANSWER, reason="truncated" if truncated else "nothing to extract")
    if truncated:
        return Verdict(Status.NO_ANSWER, extracted, span, "truncated")
    status, reason = judge_answer(gold=gold, answer=marker.answer)
    return Verdict(status, extracted, span, reason)


def judge_answer(*, gold: str, answer: str) -> tuple[Status, str]:
    """Status and reason for an answer that is already extracted. The same path for training, evaluation and tools.

    With several accepted answers (:mod:`akl_dist.contract.golds`) one equality is enough. Where none holds, a comparison that
    failed leaves no verdict, since it might have been the right one.
    """
    accepted = alternatives(gold) if isinstance(gold, str) and not invalid_gold(gold) else None
    if accepted is not None:
        verdicts = [judge_answer(gold=one, answer=answer) for one in accepted]
        ranked = (Status.OK, Status.ERROR, Status.WRONG, Status.NO_ANSWER)
        return min(verdicts, key=lambda verdict: ranked.index(verdict[0]))
    bad_gold = invalid_gold(gold)
    if bad_gold:
        return Status.INVALID_GOLD, bad_gold
    if len(answer) > MAX_ANSWER:
        return Status.NO_ANSWER, f"unparseable: more than {MAX_ANSWER} characters"
    right, given = canonical(gold), canonical(answer)
    if not given:
        return Status.NO_ANSWER, "empty answer"
    if identity_key(right) == identity_key(given):
        return Status.OK, ""
    if max(nesting(right), nesting(given)) > MAX_NESTING:
        return Status.WRONG, f"not evaluated: more than {MAX_NESTING} nested groups"
    try:
        outcome = compare(right, given)
    except TooLarge as error:
        return Status.WRONG, f"not evaluated: {error}"
    except FAILURES as error:
        return Status.ERROR, f"{type(error).__name__}: {error}"[:300]
    if outcome is Outcome.EQUAL:
        return Status.OK, ""
    if outcome is Outcome.UNPARSED:
        return Status.NO_ANSWER, "unparseable: equal only to identical text"
    return Status.WRONG, "near" if outcome is Outcome.NEAR else ""


def invalid_gold(gold: str) -> str:
    """Why a gold cannot be used, or "" if it can: it must be non-empty text that equals itself after normalisation.

    A gold with several accepted answers is usable when each of them is.
    """
    if not isinstance(gold, str):
        return f"gold is {type(gold).__name__}, not text"
    accepted = alternatives(gold)
    if accepted is not None:
        if len(accepted) > MAX_ALTERNATIVES:
            return f"gold has more than {MAX_ALTERNATIVES} accepted answers"
        return next((f"{reason} (one of the accepted answers)" for reason in map(_invalid_single, accepted) if reason), "")
    return _invalid_single(gold)


def _invalid_single(gold: str) -> str:
    if len(gold) > MAX_GOLD:
        return f"gold has more than {MAX_GOLD} characters"
    key = canonical(gold)
    if not any(char.isalnum() for char in key):
        return "gold is empty"
    if _unbalanced(key):
        return "gold has unbalanced braces"
    return ""


def distinct_answers(answers: Sequence[str]) -> int:
    """How many of these answers are written differently, but for formatting and a decimal part of zeros (14 and 14.0 are one).

    A comparison of values would need the equality, and a time limit, for each pair: 1/2 and 0.5 count as two.
    """
    return len({_ZEROS.sub("", identity_key(canonical(answer))) for answer in answers})


def nesting(text: str) -> int:
    """The largest number of brackets open at once, closed later or not."""
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}" and depth > 0)
        deepest = max(deepest, depth)
    return deepest


def _unbalanced(text: str) -> bool:
    depth, index = 0, 0
    while index < len(text):
        if text[index] == "\\":
            index += 2
            continue
        depth += (text[index] == "{") - (text[index] == "}")
        if depth < 0:
            return True
        index += 1
    return depth != 0


def warm_up() -> None:
    """Import sympy and the parser and run them once, so that no timed judgement pays for it."""
    judge_answer(gold="2\\sqrt{2}", answer="\\sqrt{8}")
