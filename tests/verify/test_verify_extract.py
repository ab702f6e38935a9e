from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akl_dist.verify.extract import extract, locate
from akl_dist.verify.segments import final_section, last_line

ROWS = [json.loads(line) for line in (Path(__file__).parent / "data/text_cases.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("row", ROWS, ids=[row["id"] for row in ROWS])
def test_cases(row):
    marker = extract(row["response"])
    assert (marker.answer if marker else None) == row["expected_answer_or_null"], row["why"]
    if marker:
        assert row["response"][slice(*marker.span)] == marker.answer
        assert marker.outer[0] <= marker.span[0] and marker.span[1] <= marker.outer[1]


def test_final_section_by_hand():
    assert final_section("<think>7+3</think>ab<eos>") == (18, 20)
    assert final_section("ab") == (0, 2)
    assert final_section("<think>ab") is None
    assert final_section("<think>a</think>b<think>c") is None
    assert final_section("ab</think>c") == (10, 11)
    assert final_section("ab", think_open=True) is None
    assert last_line("x\n  yz \n\n", (0, 9)) == (4, 6)
    assert last_line(" \n ", (0, 3)) is None


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"$\boxed{1}$, $\boxed{2}$ and $\boxed{3}$", "1, 2, 3"),  # joined only by commas and words: one list
        (r"\boxed{15} and \boxed{15}", "15"),
        (r"\boxed{1} so \boxed{2}", "2"),
        (r"\boxed{5}, as told in \boxed{}", "5"),  # an echoed empty box is no answer
        ("The final answer is $5$. I hope it is correct.", "5"),
        ("**Final Answer:**\n42", "42"),
        ("The answer is 3.5. Yes", "3.5"),
        ("the answer is **12**.", "12"),
        ("#### Step 3\nfoo", None),  # a heading
        ("```python\nprint(1)\n```", None),  # a program is no answer to a mathematics problem
        ("<answer>5", None),
        ("<think>\\boxed{3}</think>nothing", None),
    ],
)
def test_rules(response, answer):
    marker = extract(response)
    assert (marker.answer if marker else None) == answer


def test_code_block_is_located():
    text = "first\n```python\na = 1\n```\nthen\n```python\nb = 2\n```\nend"
    marker = locate(text)
    assert marker is not None and marker.kind == "code" and marker.answer == "b = 2\n"
    assert text[slice(*marker.outer)] == "```python\nb = 2\n```"


@given(st.text(alphabet="abc ,.\n", max_size=60))
def test_harmless_prose_changes_nothing(prose):
    marker = extract(f"{prose}\\boxed{{7}}{prose}")
    assert marker is not None and marker.answer == "7"


@given(st.text(alphabet="\\boxed{}<think>/answer#$ 1\n", max_size=200))
def test_never_raises_and_spans_hold(text):
    marker = locate(text)
    if marker:
        assert 0 <= marker.outer[0] <= marker.span[0] <= marker.span[1] <= marker.outer[1] <= len(text)


def test_cost_is_linear_in_hostile_text():
    start = time.process_time()
    for piece in ("\\boxed{", "\\boxed{1}", "{", "#### ", "answer: $$", "<answer>", "\\boxed{x" * 3 + "}" * 3, "```\n"):
        locate(piece * (60_000 // len(piece)))
    locate("\\boxed{" * 8000 + "1" + "}" * 8000)
    assert time.process_time() - start < 3


def test_one_number_in_two_spellings_is_one_answer():
    def answer(text):
        marker = extract(text)
        assert marker is not None and text[slice(*marker.span)].endswith(marker.answer[-1])
        return marker.answer

    assert answer("\\boxed{15\\frac{39}{40}}, or \\boxed{\\frac{639}{40}}") == "\\frac{639}{40}"
    assert answer("\\boxed{0.5} or \\boxed{1/2}") == "1/2"
    assert answer("\\boxed{1} or \\boxed{2}") == "1, 2"  # the control
    assert answer("\\boxed{x} or \\boxed{y}") == "x, y"
    assert answer("\\boxed{9^{9^{9^9}}} or \\boxed{9}") == "9^{9^{9^9}}, 9"
