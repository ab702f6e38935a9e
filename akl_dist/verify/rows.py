"""Judges of one row of ``akl_dist.score``'s input, called in a grader process. Standard library and the trainer's own verifiers.

A row that cannot be judged as written raises nothing: it is ``error``, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from akl_dist.contract.records import Status, Verdict
from akl_dist.verify import math
from akl_dist.verify.extract import extract


@dataclass(frozen=True)
class RowItem:
    """What travels to the grader: the fields of :func:`judge`, and no more of the row than it needs."""

    verifier: str
    fields: dict[str, Any] = field(default_factory=dict)


PROBES: tuple[tuple[RowItem, Status], ...] = (
    (RowItem("math", {"gold": "2\\sqrt{2}", "answer_text": "\\sqrt{8}"}), Status.OK),
    (RowItem("math", {"gold": "2\\sqrt{2}", "answer_text": "\\sqrt{7}"}), Status.WRONG),
    (RowItem("math", {"gold": "\\frac{1}{2}", "response": "<think>0.7?</think>so \\boxed{0.5}"}), Status.OK),
    (RowItem("extract", {"response": "<think>\\boxed{3}</think>so"}), Status.NO_ANSWER),
    (RowItem("extract", {"response": "\\boxed{4}"}), Status.OK),
)
"""Known-right and known-wrong rows that every grader judges before it is used."""

FIELDS = {
    "math": ("gold", "answer_text", "response", "truncated", "think_open"),
    "extract": ("response", "think_open"),
}
"""Verifier -> the columns it reads; the grader is sent these alone."""


def judge(*, verifier: str, fields: dict[str, Any]) -> Verdict:
    """The verdict on one row.

    ``math`` compares ``answer_text`` (already extracted) with ``gold`` where there is one, else judges the whole ``response``
    (with the optional booleans ``truncated`` and ``think_open``, as training does). ``extract`` has nothing to compare with:
    ``ok`` says that there is an answer.
    """
    wrong_type = [name for name in ("truncated", "think_open") if not isinstance(fields.get(name, False), bool)]
    if wrong_type:
        return malformed(f"{wrong_type[0]} is {type(fields[wrong_type[0]]).__name__}, not true or false")
    if verifier == "math" and "gold" not in fields:
        return malformed("no column gold")
    if verifier == "math" and ("answer_text" in fields and (fields["answer_text"] is not None or "response" not in fields)):
        return _math_answer(fields["gold"], fields["answer_text"])
    response = fields.get("response")
    if not isinstance(response, str):
        columns = "answer_text or response" if verifier == "math" else "response"
        return malformed(f"no column {columns}" if "response" not in fields else f"response is {type(response).__name__}, not text")
    think_open = fields.get("think_open", False)
    if verifier == "math":
        return math.judge(gold=as_text(fields["gold"]), response_text=response, truncated=fields.get("truncated", False),
                          think_open=think_open)
    marker = extract(response, think_open=think_open)
    if marker is None:
        return Verdict(Status.NO_ANSWER, reason="nothing to extract")
    return Verdict(Status.OK, marker.answer, marker.span)


def _math_answer(gold: Any, answer: Any) -> Verdict:
    gold, answer = as_text(gold), as_text(answer)
    if answer is not None and not isinstance(answer, str):
        return malformed(f"answer_text is {type(answer).__name__}, not text")
    bad_gold = math.invalid_gold(gold)
    if bad_gold:
        return Verdict(Status.INVALID_GOLD, answer, reason=bad_gold)
    if answer is None:
        return Verdict(Status.NO_ANSWER, reason="nothing to extract")
    status, reason = math.judge_answer(gold=gold, answer=answer)
    return Verdict(status, answer, reason=reason)


def as_text(value: Any) -> Any:
    """A JSON number as text (a gold may be written as one); anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    return str(value) if isinstance(value, int) else repr(value)


def malformed(reason: str) -> Verdict:
    """The verdict on a row that is not one."""
    return Verdict(Status.ERROR, reason=f"malformed row: {reason}")


def warm_up() -> None:
    """Pay for sympy before the first timed judgement."""
    math.warm_up()
