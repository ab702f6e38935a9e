"""Figures a reader can redo, enumeration, and what must not pass for a result."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akl_dist.contract.errors import RunError
from akl_dist.contract.records import Status
from akl_dist.evaluation import Estimate, SampleRecord, default_ks, estimate, maj_at_k, pass_at_k, summarise, table
from akl_dist.verify.votes import vote_key

ROWS = {row["id"]: row for row in map(json.loads, (Path(__file__).parent / "data/metric_cases.jsonl").read_text().splitlines())}
STATUS = {1: Status.OK, 0: Status.WRONG, None: Status.TIMEOUT}


def sample(problem: str, index: int, score: int | None = 0, extracted: str | None = "0", *, benchmark: str = "b", status=None,
           tokens: int = 10, truncated: bool = False, span: int = 2, votes: bool = True) -> SampleRecord:
    return SampleRecord(benchmark, problem, index, status or STATUS[score], extracted, tokens, truncated, span, votes)


def records(scores: dict[str, list[int | None]], benchmark: str = "b") -> list[SampleRecord]:
    return [sample(problem, index, score, benchmark=benchmark)
            for problem, row in scores.items() for index, score in enumerate(row)]


@pytest.mark.parametrize(("n", "c", "k", "value"), [
    (4, 1, 1, 0.25), (4, 1, 2, 0.5), (4, 1, 4, 1.0), (5, 0, 5, 0.0), (2, 1, 4, None),
    (10, 3, 5, 1 - 21 / 252),  # C(7, 5) = 21 of C(10, 5) = 252 draws hold no right one
    (1000, 1, 100, 0.1),
])
def test_pass_at_k_by_hand(n, c, k, value):
    assert pass_at_k(n=n, c=c, k=k) == (None if value is None else pytest.approx(value, abs=1e-12))


@given(st.integers(1, 7), st.data())
def test_pass_at_k_equals_enumeration(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    scores = [1] * c + [0] * (n - c)
    draws = [any(draw) for draw in itertools.combinations(scores, k)]
    assert pass_at_k(n=n, c=c, k=k) == pytest.approx(sum(draws) / len(draws), abs=1e-12)
    biased = 1 - (1 - c / n) ** k
    if 0 < c < n and k > 1:
        assert pass_at_k(n=n, c=c, k=k) > biased, "the plug-in estimate is too low: a control that this one is not it"


@pytest.mark.parametrize("bad", [{"n": 2, "c": 3, "k": 1}, {"n": 2, "c": -1, "k": 1}, {"n": 2, "c": 1, "k": 0}])
def test_pass_at_k_refuses_nonsense(bad):
    with pytest.raises(ValueError, match="expected 0 <= c <= n"):
        pass_at_k(**bad)


@pytest.mark.parametrize(("answers", "value"), [
    ([("7", 1), ("7", 1), ("8", 0)], 1.0),
    ([("7", 1), ("8", 0), ("8", 0)], 0.0),
    ([("7", 1), ("8", 0)], 0.5),  # a tie is the expectation of a fair draw
    ([("7", 1), ("8", 0), ("9", 0)], 1 / 3),
    ([("1/2", 0), ("0.5", 0), ("\\frac12", 0), ("7", 1), ("7.0", 1)], 0.0),  # one wrong number in three spellings outvotes
    ([("\\text{Red}", 0), ("red", 0), ("blue", 1)], 0.0),
    ([("7", 1), ("8", 0), ("8", None), ("8", None)], 0.5),  # what has no verdict does not vote
    ([(None, None)], None),
])
def test_majority_by_hand(answers, value):
    rows = [sample("p", index, score, text) for index, (text, score) in enumerate(answers)]
    assert maj_at_k(rows) == (None if value is None else pytest.approx(value))


def test_no_answer_does_not_vote():
    silent = [sample("p", index, extracted=None, status=Status.NO_ANSWER) for index in range(3)]
    assert maj_at_k(silent) == 0.0
    assert maj_at_k([*silent, sample("p", 3, 1, "7")]) == 1.0


def test_huge_numbers_vote():
    huge = ("2^{20000}", "2^{20000}", "9^{9^{9^9}}")
    rows = [sample("p", index, 0, text) for index, text in enumerate(huge)] + [sample("p", 3, 1, "7")]
    assert maj_at_k(rows) == 0.0


def test_standard_error_is_clustered_by_problem():
    """Two problems, one always right, one never: mean 1/2, SE = sqrt(((1/2)^2 + (1/2)^2) / (2 - 1) / 2) = 1/2, however many
    samples each has. Pooled samples would claim sqrt(.25 / 7) = 0.19."""
    one = summarise(records({"p": [1] * 4, "q": [0] * 4}), {"b": ["p", "q"]}, samples=4)["b"]
    assert (one.avg_at_k.mean, one.avg_at_k.standard_error) == (0.5, pytest.approx(0.5))
    assert one.avg_at_k.standard_error > 2 * math.sqrt(0.25 / 7)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=20))
def test_estimate_is_the_textbook_one(values):
    found = estimate([*values, None])
    assert found.mean == pytest.approx(statistics.fmean(values))
    assert found.standard_error == pytest.approx(statistics.stdev(values) / math.sqrt(len(values)), abs=1e-9)
    assert found.problems == len(values)


def test_one_problem_has_no_standard_error():
    assert estimate([1.0]) == Estimate(1.0, None, 1)
    assert estimate([None]) == Estimate(None, None, 0)


def test_by_hand():
    rows = [sample("p", 0, 1, "7", tokens=10, span=2), sample("p", 1, 0, "8", tokens=20, span=4),
            sample("q", 0, None, None, tokens=30, span=0), sample("q", 1, 1, "3", tokens=40, span=3),
            sample("r", 0, extracted=None, status=Status.NO_ANSWER, tokens=64, truncated=True, span=0),
            sample("r", 1, extracted=None, status=Status.ERROR, tokens=4, span=0)]
    one = summarise(rows, {"b": ["p", "q", "r"]}, samples=2)["b"]
    assert one.avg_at_k.mean == pytest.approx((0.5 + 1 + 0) / 3)  # q by its one verdict
    assert one.pass_at_k[1].mean == pytest.approx((0.5 + 1 + 0) / 3)
    assert one.pass_at_k[2] == Estimate(1.0, None, 1), "only p has two verdicts"
    assert one.maj_at_k.mean == pytest.approx((0.5 + 1 + 0) / 3)
    assert one.undecided == {"timeout": 1, "error": 1}
    assert (one.truncated_fraction, one.no_answer_fraction) == (pytest.approx(1 / 6), pytest.approx(1 / 6))
    assert (one.response_tokens, one.answer_span_tokens) == (pytest.approx(28.0), 3.0)


def test_programs_have_no_majority():
    rows = [sample("p", 0, 1, "def f(): ...", votes=False)]
    assert summarise(rows, {"b": ["p"]}, samples=1)["b"].maj_at_k is None


def test_benchmarks_are_never_pooled():
    rows = records({"p": [1, 0], "q": [0, 0]}, "small") + records({"p": [1, 1]}, "large")
    found = summarise(rows, {"small": ["p", "q"], "large": ["p"]}, samples=2)
    assert list(found) == ["small", "large"]
    assert (found["small"].avg_at_k.mean, found["large"].avg_at_k.mean) == (0.25, 1.0)


SIX = records({"p": [1, 0], "q": [0, 1], "r": [None, 1]})


@given(st.permutations(SIX))
def test_order_of_records_does_not_matter(rows):
    expected = {"b": ["p", "q", "r"]}
    assert summarise(rows, expected, samples=2) == summarise(SIX, expected, samples=2)


@pytest.mark.parametrize(("change", "message"), [
    (lambda rows: rows[:-1], "1 missing, e.g. b q sample 1"),
    (lambda rows: [*rows, rows[0]], "1 repeated, e.g. b p sample 0"),
    (lambda rows: [*rows, sample("z", 0)], "1 unasked, e.g. b z sample 0"),
    (lambda rows: [*rows, sample("p", 2)], "1 unasked, e.g. b p sample 2"),
    (lambda rows: [*rows[:-1], sample("p", 1)], "1 missing"),
    (lambda rows: [], "4 missing"),
])
def test_what_is_no_result(change, message):
    rows = records({"p": [1, 0], "q": [0, 0]})
    summarise(rows, {"b": ["p", "q"]}, samples=2)
    with pytest.raises(RunError, match=message):
        summarise(change(rows), {"b": ["p", "q"]}, samples=2)


def test_repeated_ids_asked_for():
    with pytest.raises(RunError, match="repeat"):
        summarise(records({"p": [1]}), {"b": ["p", "p"]}, samples=1)


def test_ks():
    assert [default_ks(n) for n in (1, 2, 3, 8, 12)] == [(1,), (1, 2), (1, 2, 3), (1, 2, 4, 8), (1, 2, 4, 8, 12)]


def test_tables_fit_a_terminal():
    """Benchmarks that do not fit side by side into 100 columns go below each other; each keeps its own figures."""
    names = ["gsm8k", "mbpp_sanitized", "humaneval", "aime24", "sums/of_one's_own_with_a_long_name"]
    rows = [row for right, name in enumerate(names) for row in records({p: [1] * right + [0] * (4 - right) for p in "pq"}, name)]
    results = summarise(rows, {name: ["p", "q"] for name in names}, samples=4)
    text = table(results)
    assert max(map(len, text.splitlines())) <= 100
    assert [text.count(name) for name in names] == [1] * 5 and 1 < text.count("avg@k (%)") < 5
    found = [cell for line in text.splitlines() if line.startswith("avg@k") for cell in line.split("(%)")[1].split("+- 0.0")]
    assert [cell.strip() for cell in found if cell.strip()] == ["0.0", "25.0", "50.0", "75.0", "100.0"]
    assert table({"a": results["gsm8k"]}).count("avg@k (%)") == 1


def test_table_shows_what_is_missing():
    rows = records({"p": [1, None], "q": [0, 0]})
    text = table(summarise(rows, {"b": ["p", "q"]}, samples=2))
    assert "timeout 1" in text and "(1 problems)" in text and "50.0 +- 50.0" in text


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if "pass_at_k" in row["expected"]])
def test_pass_at_k_cases(name):
    row = ROWS[name]
    value = row["expected"]["pass_at_k"]
    assert pass_at_k(**row["inputs"]) == (None if value is None else pytest.approx(value, abs=row["tol"]))


def test_case_of_two_benchmarks():
    inputs, expected = ROWS["L043"]["inputs"], ROWS["L043"]["expected"]
    rows, ids = [], {}
    for name, given_ in inputs.items():  # of A 9 of 30 problems right in all samples, of B 9 of each 10
        ids[name] = [str(index) for index in range(given_["problems"])]
        right = round(given_["acc"] * 10)
        rows.append(records({p: [int(int(p) % 10 < right)] * given_["samples"] for p in ids[name]}, name))
    found = {name: summarise(of_one, {name: ids[name]}, samples=inputs[name]["samples"])[name]
             for name, of_one in zip(inputs, rows, strict=True)}
    assert found["A"].avg_at_k.mean == pytest.approx(expected["avg_A"], abs=1e-9)
    assert found["B"].avg_at_k.mean == pytest.approx(expected["avg_B"], abs=1e-3)
    assert all(abs(one.avg_at_k.mean - expected["pooled_is_wrong"]) > 0.1 for one in found.values())


def test_case_of_one_text_under_two_ids():
    scores = ROWS["L044"]["inputs"]["scores"]
    one = summarise(records({f"p{i}": [score] for i, score in enumerate(scores)}), {"b": ["p0", "p1"]}, samples=1)["b"]
    assert (one.problems, one.avg_at_k.mean) == (2, ROWS["L044"]["expected"]["avg"])


def test_cases_of_padding_and_missing_verdicts():
    inputs, expected = ROWS["L045"]["inputs"], ROWS["L045"]["expected"]
    rows = records({f"p{i}": [score] for i, score in enumerate(inputs["scores"])})
    one = summarise(rows, {"b": ["p0", "p1", "p2"]}, samples=1)["b"]
    assert one.avg_at_k.mean == pytest.approx(expected["mean"])
    with pytest.raises(RunError, match="1 unasked"):  # a row that fills the last batch
        summarise([*rows, sample("padding", 0)], {"b": ["p0", "p1", "p2"]}, samples=1)
    inputs, expected = ROWS["L046"]["inputs"], ROWS["L046"]["expected"]
    one = summarise(records({"p": inputs["scores"]}), {"b": ["p"]}, samples=3)["b"]
    assert (one.avg_at_k.mean, sum(one.undecided.values())) == (expected["mean_over_valid"], expected["invalid_count"])


def test_long_answers_vote_letter_by_letter():
    """What is too long to be read as a number costs no time: it is the same only as itself."""
    one, other = "1" * 100_000, "1" * 100_000 + ".0"
    assert vote_key(Status.WRONG, one) == vote_key(Status.WRONG, one) != vote_key(Status.WRONG, other)
    assert vote_key(Status.WRONG, "11") == vote_key(Status.WRONG, "11.0"), "control"
