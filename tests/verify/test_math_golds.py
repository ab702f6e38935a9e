"""Release gate: every published gold is usable and equal to itself, however it is written down, and to no other gold.

Skipped where a checkout has no copy of the published files.
"""

from __future__ import annotations

import json
import random
import re

import pytest

from akl_dist.contract.records import Status
from akl_dist.data.recipes import gsm8k_gold
from akl_dist.verify.grader import GraderPool
from akl_dist.verify.rows import PROBES, RowItem

FILES = {"gsm8k_train": 7473, "gsm8k_test": 1319, "math_train": 7500, "math500": 500, "aime24": 30, "aime25": 30}
EMPTY_UPSTREAM = {"math_train": ["train/number_theory/7115.json", "train/number_theory/7117.json"]}
"""Rows whose published solution boxes nothing: no gold, and no other exception."""
COLLISIONS = {"math_train": {("50\\%", "\\frac{1}{2}"), ("20", "20^\\circ"), ("1", "k = 1")}}
"""Pairs of the seeded shuffle that are one answer in two spellings."""


LAST_OF_SEVERAL = {
    "math_train": ["algebra/152", "algebra/1771", "intermediate_algebra/1964", "intermediate_algebra/396", "number_theory/796",
                   "number_theory/837", "prealgebra/452", "precalculus/1149", "precalculus/860"],
}
"""Solutions that box several values joined by "and" or "or", of which the published gold keeps the last alone."""


@pytest.fixture(scope="module")
def pool():
    with GraderPool(num_workers=2, timeout_s=10.0, judge="akl_dist.verify.rows:judge", probes=PROBES) as made:
        yield made


@pytest.fixture
def golds(published):
    def read(name: str) -> list[tuple[str, str]]:
        rows = [json.loads(line) for line in (published / f"{name}.jsonl").open(encoding="utf-8")]
        assert len(rows) == FILES[name]
        adapter = gsm8k_gold if name.startswith("gsm8k") else str
        return [(str(row.get("unique_id", index)), adapter(row["answer"]) or "") for index, row in enumerate(rows)]

    return read


REWRITINGS = (
    lambda gold: gold,
    lambda gold: f"${gold}$",
    lambda gold: f" \\( {gold} \\) ",
    lambda gold: gold.replace("\\dfrac", "\\frac").replace("\\frac", "\\tfrac"),
    lambda gold: gold.replace("\\left", "").replace("\\right", ""),
    lambda gold: f"{gold.rstrip('.')}.",
    lambda gold: re.sub(r"(?<=[^\\ ]),(?=[^ ])(?!\d{3}(?!\d))(?!\\!)(?!})", ", ", gold),
    lambda gold: f"\\,{gold}\\;",
)


@pytest.mark.parametrize("name", FILES)
def test_every_gold_equals_itself_in_a_box(pool, golds, name):
    """Extraction included."""
    rows = golds(name)
    verdicts = pool.judge_many([RowItem("math", {"gold": gold, "response": f"so $\\boxed{{{gold}}}$."}) for _, gold in rows])
    failed = [(key, verdict.status) for (key, _), verdict in zip(rows, verdicts, strict=True) if verdict.status is not Status.OK]
    assert failed == [(key, Status.INVALID_GOLD) for key in EMPTY_UPSTREAM.get(name, [])]


@pytest.mark.parametrize(("name", "column"), [("gsm8k_train", "answer"), ("gsm8k_test", "answer"), ("math_train", "solution"),
                                              ("math500", "solution")])
def test_published_solutions_are_right(pool, golds, published, name, column):
    """The whole worked solution as a response: the extractor finds the gold, and nothing else, in each."""
    rows = golds(name)
    solutions = [json.loads(line)[column] for line in (published / f"{name}.jsonl").open(encoding="utf-8")]
    verdicts = pool.judge_many([RowItem("math", {"gold": gold, "response": solution})
                                for (_, gold), solution in zip(rows, solutions, strict=True)])
    failed = [key for (key, _), verdict in zip(rows, verdicts, strict=True) if verdict.status is not Status.OK]
    known = EMPTY_UPSTREAM.get(name, []) + [f"train/{key}.json" for key in LAST_OF_SEVERAL.get(name, [])]
    assert sorted(failed) == sorted(known)


@pytest.mark.parametrize("name", ["gsm8k_test", "math500", "aime24", "aime25", "math_train"])
def test_every_gold_equals_its_rewritings(pool, golds, name):
    rows = [gold for _, gold in golds(name) if gold]
    rows = rows[:: 4 if len(rows) > 2000 else 1]
    pairs = [(gold, written) for gold in rows for rewrite in REWRITINGS if (written := rewrite(gold)) != gold]
    verdicts = pool.judge_many([RowItem("math", {"gold": gold, "answer_text": written}) for gold, written in pairs])
    assert [pair for pair, verdict in zip(pairs, verdicts, strict=True) if verdict.status is not Status.OK] == []


@pytest.mark.parametrize("name", FILES)
def test_no_gold_equals_another(pool, golds, name):
    """Against a shuffled gold: equal only where the text is the same or the collision is listed; the same verdict both ways."""
    rows = [gold for _, gold in golds(name)]
    shuffled = list(rows)
    random.Random(0).shuffle(shuffled)
    pairs = [pair for pair in zip(rows, shuffled, strict=True) if all(pair)]
    there = pool.judge_many([RowItem("math", {"gold": a, "answer_text": b}) for a, b in pairs])
    equal = {pair for pair, verdict in zip(pairs, there, strict=True) if verdict.status is Status.OK and pair[0] != pair[1]}
    assert equal == COLLISIONS.get(name, set())
    assert not [pair for pair, verdict in zip(pairs, there, strict=True) if not verdict.status.trains]
    sample = slice(0, None, 5 if len(pairs) > 2000 else 1)
    back = pool.judge_many([RowItem("math", {"gold": b, "answer_text": a}) for a, b in pairs[sample]])
    both = zip(pairs[sample], there[sample], back, strict=True)
    assert [pair for pair, one, other in both if one.status is not other.status] == []


@pytest.mark.parametrize("name", ["gsm8k_test", "aime25"])
def test_a_wrong_number_is_wrong(pool, golds, name):
    """The control of the gate: one more than the gold, its negative, and ten times it."""
    rows = [int(gold) for _, gold in golds(name) if int(gold) > 0]
    pairs = [(n, wrong) for n in rows for wrong in (n + 1, -n, 10 * n)]
    verdicts = pool.judge_many([RowItem("math", {"gold": str(a), "answer_text": str(b)}) for a, b in pairs])
    assert {verdict.status for verdict in verdicts} == {Status.WRONG}
