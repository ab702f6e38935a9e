"""Golds with several accepted answers: the written form, the verdicts, and golds that only look like it."""

from __future__ import annotations

import pytest

from akl_dist.contract.golds import MAX_ALTERNATIVES, alternatives, any_of
from akl_dist.contract.records import Status
from akl_dist.verify.math import distinct_answers, invalid_gold, judge_answer


def test_written_form_and_back():
    assert any_of(["9", "10.5", "\\frac{1}{2}"]) == "any of: 9 | 10.5 | \\frac{1}{2}"
    assert alternatives(any_of(["9", "10"])) == ("9", "10")
    assert alternatives("any of: 9|10") == ("9", "10")  # as a person may write it in a data file
    assert alternatives("9 | 10") is None and alternatives("|x|") is None
    for bad in ([], [" "], ["a|b"], ["1"] * (MAX_ALTERNATIVES + 1)):
        with pytest.raises(ValueError, match="any_of"):
            any_of(bad)


@pytest.mark.parametrize(
    ("gold", "answer", "status"),
    [
        ("any of: 9 | 10", "10", Status.OK),
        ("any of: 9 | 10", "9.0", Status.OK),
        ("any of: 9 | 1/2", "0.5", Status.OK),
        ("any of: 9 | 10", "11", Status.WRONG),
        ("any of: 9 | 10", "", Status.NO_ANSWER),
        ("any of: 9 | no solution", "11", Status.WRONG),  # an answer that one alternative cannot be compared with is an answer
        ("any of: 7", "7", Status.OK),
        ("any of: 9 | ", "9", Status.INVALID_GOLD),
        ("any of: ", "9", Status.INVALID_GOLD),
        ("|x|", "|x|", Status.OK),  # bars alone mean what they mean in mathematics
        ("9 | 10", "9", Status.NO_ANSWER),
    ],
)
def test_verdicts(gold, answer, status):
    assert judge_answer(gold=gold, answer=answer)[0] is status


def test_invalid_golds_say_which():
    assert invalid_gold("any of: 1 | {2") == "gold has unbalanced braces (one of the accepted answers)"
    assert "more than" in invalid_gold("any of: " + "1|" * MAX_ALTERNATIVES + "1")
    assert invalid_gold("any of: 1 | 2") == ""


def test_a_failed_comparison_leaves_no_verdict_unless_another_holds(monkeypatch):
    """A comparison that raised might have been the right one: not a wrong answer."""
    from akl_dist.verify import math

    whole = math.compare

    def compare(right, given):
        if right == "13":
            raise RecursionError("boom")
        return whole(right, given)

    monkeypatch.setattr(math, "compare", compare)
    assert judge_answer(gold="any of: 12 | 13", answer="5")[0] is Status.ERROR
    assert judge_answer(gold="any of: 13 | 5", answer="5.0")[0] is Status.OK


def test_different_answers_are_counted_by_how_they_are_written():
    assert distinct_answers(["14", "14.0", " 14 ", "15", "14.00"]) == 2
    assert distinct_answers(["14.05", "14.5", "140", "14"]) == 4
    assert distinct_answers(["1/2", "0.5"]) == 2  # values are not compared
    assert distinct_answers([]) == 0
