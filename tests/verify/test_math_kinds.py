"""Kinds of answers beyond the listed cases: matrices as they are typeset, names of units, words of scale, degrees under angle
functions, foreign brackets, invisible characters, formatting around the whole answer."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from akl_dist.contract.records import Status
from akl_dist.verify.equality import _value_of_chain
from akl_dist.verify.math import judge, judge_answer
from akl_dist.verify.normalize import canonical
from akl_dist.verify.units import split_unit

ROWS = [json.loads(line) for line in (Path(__file__).parent / "data/math_kinds.jsonl").read_text().splitlines()]


def same(a: str, b: str) -> bool:
    return judge_answer(gold=a, answer=b)[0] is Status.OK


@pytest.mark.parametrize("row", ROWS, ids=[row["id"] for row in ROWS])
def test_kinds_both_ways(row):
    assert same(row["gold"], row["answer_text"]) is row["expected"], row["why"]
    assert same(row["answer_text"], row["gold"]) is row["expected"], "not symmetric"
    for text in (row["gold"], row["answer_text"]):
        assert same(text, text) and canonical(canonical(text)) == canonical(text)


@pytest.mark.parametrize(("text", "body", "unit"), [
    ("5 centimetres", "5", "centimeter"), ("5\\text{ sq. ft}", "5", "foot^2"), ("5 miles per hour", "5", "mph"),
    ("3 million dollars", "(3)\\cdot 10^{6}", "dollar"), ("\x033 million", "(3)\\cdot 10^{6}", "dollar"), ("5€", "5", "euro"),
    ("5\\pmod{7}", "5", "mod 7"), ("10\\pi \\text{ cm}^2", "10\\pi", "centimeter^2"), ("6rs", "6rs", ""), ("3 sinx", "3 sinx", ""),
    ("5 factorial", "5 factorial", ""), ("2 dozen eggs", "(2)\\cdot 12", "egg"), ("5 m/s", "5", "m/s"), ("3 times", "3", "time"),
    ("12 otherwise", "12 otherwise", ""),
    ("12 \\text{5}", "12 \\text{5}", ""), ("USD 5", "5", "dollar"), ("12 sq ft", "12", "foot^2")])
def test_units(text, body, unit):
    assert split_unit(text) == (body, unit)


@pytest.mark.parametrize("answer", ["5 \\mod 7", "5 \\bmod 0", "\\mod", "5\\pmod{}", "x\\equiv"])
def test_a_modulus_is_never_a_fault_of_the_grader(answer):
    assert judge_answer(gold="3", answer=answer)[0] in (Status.WRONG, Status.NO_ANSWER)


@pytest.mark.parametrize(("text", "value"), [
    ("2^3 = 8", "8"), ("x = 3+5 = 8", "x=8"), ("\\frac{2}{3} \\approx 0.67", "\\frac{2}{3}"), ("8 = 9", "8 = 9"),
    ("2x = 8", "2x = 8"), ("42 \\approx 5", "42 \\approx 5"), ("x = 9 = 8", "x = 9 = 8"), ("f(x) = x = 2", "f(x) = x = 2")])
def test_only_a_chain_that_agrees_has_a_value(text, value):
    assert _value_of_chain(text, 0) == value


def test_long_answers_cost_little():
    """Bracket scans are quadratic, so that nothing beyond the limits is scanned."""
    start = time.perf_counter()
    for part in ("\\frac1{", "\\{x|<", "\\sqrt(", "a+", "1="):
        assert not judge(gold="8", response_text=f"\\boxed{{{part * 9000}}} or \\boxed{{8{part * 9000}}}", truncated=False).correct
        assert judge_answer(gold="8", answer=part * 9000)[0] is Status.NO_ANSWER
    assert time.perf_counter() - start < 5
