"""Kinds of fault, not rows: random and hostile texts through the extractor, the fence parser, the number grammar and equality.

Equality runs in killable graders with the limit training uses: a text that hangs the comparison shows as a timeout, and the run of
the test goes on.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from akl_dist.contract.records import Status
from akl_dist.verify.code_extract import STYLES, blocks, extract_program
from akl_dist.verify.code_output import same_output
from akl_dist.verify.code_tests import BadTests, plan_asserts, plan_check
from akl_dist.verify.extract import extract, locate
from akl_dist.verify.grader import GraderPool
from akl_dist.verify.math import invalid_gold
from akl_dist.verify.normalize import canonical
from akl_dist.verify.quantity import TooLarge, parse_quantity
from akl_dist.verify.rows import PROBES, RowItem

DATA = Path(__file__).parent / "data"
LIMIT_S = 5.0
FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

ATOMS = st.sampled_from(
    [
        "0",
        "1",
        "2",
        "-3",
        "7",
        "12",
        "0.5",
        ".25",
        "1,000",
        "10^3",
        "\\frac12",
        "\\frac{3}{4}",
        "2\\frac{1}{2}",
        "1 3/5",
        "50\\%",
        "\\pi",
        "e",
        "i",
        "x",
        "y",
        "\\sqrt{2}",
        "\\sqrt[3]{5}",
        "90^\\circ",
        "3 \\text{ cm}",
        "\\$5",
        "\\infty",
        "\\emptyset",
        "5!",
        "2^{10}",
        "101_2",
        "A",
        "\\text{red}",
        "1e-9",
        "0.\\overline{3}",
    ]
)
JOINS = st.sampled_from(
    [
        "{}+{}",
        "{}-{}",
        "{}\\cdot {}",
        "{}/{}",
        "\\frac{{{}}}{{{}}}",
        "({},{})",
        "[{},{})",
        "{},{}",
        "{} \\text{{ and }} {}",
        "\\{{{},{}\\}}",
        "{}={}",
        "{}\\le {}",
        "{}^{{{}}}",
        "\\pm {},{}",
        "{}\\cup {}",
        "{}:{}",
        "\\begin{{pmatrix}}{}\\\\{}\\end{{pmatrix}}",
        "{}{}",
        "\\sqrt{{{}}}+{}",
        "\\log_{{{}}} {}",
    ]
)
EXPRESSIONS = st.recursive(ATOMS, lambda inner: st.builds(lambda form, a, b: form.format(a, b), JOINS, inner, inner), max_leaves=5)
NOISE = st.text(alphabet="0123456789.,+-*/^_=<>()[]{}|\\!%$°&;: xyzeπ√²½\n\t", max_size=40)


@pytest.fixture(scope="module")
def pool():
    with GraderPool(num_workers=1, timeout_s=LIMIT_S, judge="akl_dist.verify.rows:judge", probes=PROBES) as made:
        yield made


def verdicts(pool, *pairs):
    return pool.judge_many([RowItem("math", {"gold": gold, "answer_text": answer}) for gold, answer in pairs])


@FEW
@given(a=EXPRESSIONS, b=EXPRESSIONS)
def test_expressions_are_judged_both_ways_alike(pool, a, b):
    there, back, own, again = verdicts(pool, (a, b), (b, a), (a, a), (a, f"${a}$"))
    assert there.correct is back.correct, f"{a!r} against {b!r}: {there}, {back}"
    assert own.status is again.status is Status.OK
    assert there.status in (Status.OK, Status.WRONG, Status.NO_ANSWER), there


@FEW
@given(a=NOISE, b=st.one_of(NOISE, EXPRESSIONS))
def test_noise_is_judged_both_ways_alike(pool, a, b):
    there, back, own = verdicts(pool, (a, b), (b, a), (a, a))
    if invalid_gold(a):
        assert there.status is own.status is Status.INVALID_GOLD
        return
    assert own.status is Status.OK, f"{a!r}: {own}"
    assert there.status in (Status.OK, Status.WRONG, Status.NO_ANSWER), there
    if not invalid_gold(b):
        assert there.correct is back.correct, f"{a!r} against {b!r}: {there}, {back}"


def hostile_texts() -> list[str]:
    """Towers, factorials, nesting, long sums, products and powers of unknowns: each would cost minutes if it were evaluated."""
    return [
        "9^{9^{9^{9}}}",
        "10^{10^{10}}\\pi",
        "99999!!",
        "(((((9!)!)!)!)!)",
        "\\binom{10^9}{10^8}",
        "2^{99999999}+x",
        "(x+1)^{99999}",
        "(x+y+z)^{200}",
        "\\sqrt{" * 60 + "2" + "}" * 60,
        "\\frac{1}{" * 80 + "2" + "}" * 80,
        "{" * 3000,
        "(" * 3000,
        "x^" * 900 + "2",
        "+".join(f"\\sqrt{{{n}}}" for n in range(2, 300)),
        "\\cdot".join(f"(x+{n})" for n in range(300)),
        "1e999999999",
        "\\sum_{k=1}^{10^{12}} \\frac{1}{k}",
        "\\prod_{k=1}^{10^9} k",
        "\\int_0^{10^9} e^{x^2} dx",
        "\\lim_{n\\to\\infty} n!",
        "\\sin(" * 50 + "1" + ")" * 50,
        ",".join(str(n) for n in range(1500)),
        "=".join("x" * 800),
        "0." + "9" * 3000,
        "-" * 3900,
        "\\begin{pmatrix}" + "\\\\".join("&".join("\\sqrt{2}" for _ in range(12)) for _ in range(12)) + "\\end{pmatrix}",
        "\\pm 1" * 40,
        " ".join("\\pm 1 +" for _ in range(30)) + "x",
        "a" * 3900,
        "\\" * 3999,
        "_{" * 1500,
        "|" * 3000,
        "__import__('os')",
        "(lambda: 1)()",
        "().__class__.__bases__",
        "\x00" * 100,
        "\ud800\udfff" * 50,
    ]


def test_hostile_texts_cost_their_limit_and_delay_nothing(pool):
    """As answers and as golds, each with a good row behind it; none is equal to what it is compared with."""
    texts = hostile_texts()
    pairs = [pair for text in texts for pair in ((text, "6"), ("6", text), ("\\sqrt{8}", "2\\sqrt{2}"), (text, text + "+1"))]
    start, before = time.monotonic(), pool.counters()
    found = verdicts(pool, *pairs)
    elapsed, timeouts = time.monotonic() - start, pool.counters()["timeouts"] - before["timeouts"]
    assert {verdict.status for verdict in found[2::4]} == {Status.OK}, "the good rows in between"
    wrongly = [
        (pair, verdict)
        for index, (pair, verdict) in enumerate(zip(pairs, found, strict=True))
        if index % 4 != 2 and verdict.status is Status.OK
    ]
    assert wrongly == []
    assert elapsed < 60 + timeouts * (LIMIT_S + 5), "nobody waits for a neighbour"
    assert len(pool.pids()) == 1


def cases(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


@FEW
@given(st.sampled_from(cases("text_cases.jsonl")), st.text(alphabet="abc xyz,.\n", max_size=200))
def test_prose_around_a_response_changes_nothing(row, prose):
    """In front always; behind wherever something is marked in a way that prose cannot continue (a box, a tag)."""
    marker = extract(row["response"])
    if row["response"].startswith("<think>") or "</think>" in row["response"]:
        return
    in_front = extract(f"{prose}\n{row['response']}")
    assert (in_front and in_front.answer) == row["expected_answer_or_null"]
    if marker is not None and marker.kind == "box":
        behind = extract(f"{row['response']}\n{prose}")
        assert behind is not None and behind.answer == marker.answer


FENCES = st.lists(
    st.sampled_from(["```", "````", "~~~", "```python", "~~~py", "x = 1", "", "  ", "\\boxed{1}", "`", "``` ```", "text"]),
    max_size=12,
)


@given(FENCES)
def test_fences(lines):
    """A located block is text between two fence lines of one kind; nothing raises."""
    text = "\n".join(lines)
    marker = locate(text)
    if marker is None or marker.kind != "code":
        return
    assert marker.answer == text[slice(*marker.span)]
    block = text[slice(*marker.outer)].split("\n")
    assert block[0].lstrip()[:3] == block[-1].lstrip()[:3] and block[0].lstrip()[:3] in ("```", "~~~")


@given(FENCES)
def test_fences_of_programs(lines):
    """The blocks a program is taken from: in order, apart, text of the response, and nothing raises for any style."""
    text = "\n".join(lines)
    found = blocks(text, (0, len(text)))
    borders = [edge for block in found for edge in block.span]
    assert borders == sorted(borders) and all(0 <= edge <= len(text) for edge in borders)
    for style in STYLES:
        source = extract_program(text, style=style, entry_point="f", prompt="def f():\n", think_open=False)
        assert source is None or 0 <= source.span[0] <= source.span[1] <= len(text)


@pytest.mark.parametrize(
    "piece",
    [
        "\\boxed{",
        "\\boxed{1}",
        "```\n",
        "```py\nx\n```\n",
        "#### ",
        "answer is ",
        "<answer>",
        "<think>",
        "}",
        "\\boxed{1} and ",
        "**Answer:** ",
        "$$",
        "\\\\",
        "Question: ",
        "Answer: $",
    ],
)
def test_extraction_is_fast_on_anything_repeated(piece):
    text = piece * (200_000 // len(piece))
    start = time.process_time()
    locate(text)
    extract(text + "\\boxed{7}")
    for style in STYLES:
        extract_program(text, style=style, entry_point="f", prompt="def f():\n", think_open=False)
    assert time.process_time() - start < 8


@given(st.text(max_size=60))
def test_normaliser_never_raises_and_settles(text):
    once = canonical(text)
    with contextlib.suppress(TooLarge):
        parse_quantity(once)
    assert canonical(f" {text} ") == once


@given(st.integers(-(10**30), 10**30), st.sampled_from(["", "x", "..", ",,", "e", "^", "!!!", "(", "{"]))
def test_a_number_is_read_whole_or_not_at_all(number, tail):
    quantity = parse_quantity(f"{number}{tail}")
    assert (quantity is not None) is (tail == "")
    assert quantity is None or quantity.value == number


MARKERS = st.lists(
    st.sampled_from([
        "\\boxed{", "\\fbox{", "\\boxed 7", "}", "{", "\\}", "\\\\", "<answer>", "</answer>", "<think>", "</think>",
        "#### ", "####", "The answer is ", "Answer: ", "**", "$", "$$", "\\(", "\\)", "\\text{and}", " or ", ", ", ".",
        "\n", "\n\n", "Question: ", "7", "1/2", "x", "```", "```python\n", "~~~", "é", "\ud800", "\x00", "\r\n", "\u2028",
        "🙂"
    ]),
    max_size=25,
).map("".join)


@settings(max_examples=400, deadline=None)
@given(MARKERS, st.booleans())
def test_extraction_from_any_markers(text, think_open):
    """Nothing raises; an answer is text of the final section, and the same each time; unfinished reasoning has none."""
    for find in (locate, extract):
        marker = find(text, think_open=think_open)
        assert marker == find(text, think_open=think_open)
        if marker is None:
            continue
        assert 0 <= marker.outer[0] <= marker.span[0] <= marker.span[1] <= marker.outer[1] <= len(text)
        inside = text[slice(*marker.span)]
        assert marker.answer == inside or all(part in inside for part in marker.answer.split(", ")), "a list of boxes"
        assert marker.kind == "code" or marker.answer.strip() == marker.answer != ""
        last = text.rfind("</think>")
        assert marker.outer[0] >= last, "nothing comes from the reasoning"
    if think_open and "</think>" not in text:
        assert locate(text, think_open=True) is None


TOKENS = st.lists(
    st.sampled_from([
        "1", "2", "10", "007", "3.5", ".5", "1,000", "2e3", "1e-2", "+", "-", "/", "\\cdot", "^", "^{2}", "!", "!!", "(",
        ")", "{", "}", "\\frac{1}{3}", "\\sqrt{4}", "\\sqrt[3]{8}", "0.\\overline{3}", " ", "0"
    ]),
    min_size=1, max_size=9,
).map("".join)


def value_of(text):
    """The exact value, None for what is no number, "large" for what is not evaluated."""
    try:
        quantity = parse_quantity(text)
    except TooLarge:
        return "large"
    return None if quantity is None else quantity.value


@settings(max_examples=500, deadline=None)
@given(TOKENS)
def test_number_grammar_agrees_with_itself(text):
    """What is read as a number keeps its value in parentheses, negated, doubled, and with noise behind it is no number at all."""
    start = time.perf_counter()
    value = value_of(text)
    assert time.perf_counter() - start < 1
    if value is None or value == "large":
        return
    assert value_of(f"({text})") == value_of(f"{{{text}}}") == value_of(f" {text} ") == value or " " in text
    if " " not in text:  # a blank may make a mixed number of a text as a whole, and of no part of it
        assert value_of(f"-({text})") == -value and value_of(f"({text})-1") == value - 1
        assert value_of(f"2\\cdot({text})") == 2 * value
    assert value_of(f"{text}x") is None and value_of(f"({text}") is None


LINES = st.lists(
    st.sampled_from([
        "assert f(1) == 2", "assert f(f(1)) in (1, 2)", "x = f(3)", "for k in range(3):", "    assert f(k) == k", "assert",
        "import math", "import os, sys", "def check(candidate):", "    assert candidate(1) == 2", "class A(f): pass",
        "lambda: f", "assert f == f", "del f", "try:", "except f: pass", "assert not f(1)", "f = 1", "assert (f := 3)",
        "\x00", "(" * 120, "assert f(" + "[" * 60 + "]" * 60 + ") == 1", "async def g(): await f(1)", "from f import *",
        "@f", "global f", "  x"
    ]),
    max_size=6,
)


@settings(max_examples=200, deadline=None)
@given(LINES)
def test_tests_are_planned_or_refused(lines):
    """The parser of tests: a plan that has something to run, or BadTests; nothing else for any mixture of lines."""
    text = "\n".join(lines)
    for make in (
        lambda: plan_asserts(lines, setup="", entry_point="f", prompt="", program=""),
        lambda: plan_asserts([text], setup=text, entry_point="", prompt=text, program=text),
        lambda: plan_check(text, entry_point="f", prompt="def f(x):\n", setup="", program=""),
    ):
        with contextlib.suppress(BadTests):
            plan = make()
            assert plan.checks or plan.test_run is not None


OUTPUTS = st.lists(st.sampled_from([
        "1", "1.0", "007", "7", "-0.0", "1e3", "1000.0", "a", "A", " ", "\n", "\r\n", "nan", ".5", "0.50", "\t"
    ]),
                   max_size=8).map("".join)


@given(OUTPUTS, OUTPUTS)
def test_outputs_are_compared_both_ways_alike(one, other):
    assert same_output(one, one) and same_output(one, one + "\n\n") and same_output(one, other) is same_output(other, one)
