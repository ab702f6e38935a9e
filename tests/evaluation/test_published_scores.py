"""Published scores: what the data file must state, and arithmetic that a reader can redo."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import yaml

from akl_dist import published
from akl_dist.data.recipes import RECIPES
from akl_dist.evaluation import BenchmarkResult, Estimate
from akl_dist.published import Protocol, PublishedScore, compare, compared, find, known_model, published_scores, report

ROOT = Path(__file__).resolve().parents[2]
OURS = Protocol(mode="thinking", problems=30, shots=0, samples=64, temperature=1.0, top_p=1.0, top_k=0, presence_penalty=0.0,
                max_tokens=8192, prompt="Think.")


def result(mean: float | None, error: float | None, *, name: str = "b", samples: int = 4) -> BenchmarkResult:
    return BenchmarkResult(name, 30, samples, Estimate(mean, error, 30), {}, None, {}, 0.0, 0.0, 0.0, 0.0)


def score(value: float, **protocol) -> PublishedScore:
    return PublishedScore("m", "b", value, "accuracy", "A Report, Table 1", Protocol(**protocol))


def test_every_entry_is_complete():
    benchmarks = {part.name for parts in RECIPES.values() for part in parts}
    for one in published_scores():
        where = f"{one.model} on {one.benchmark}"
        assert one.benchmark in benchmarks and 0 < one.score < 100, where
        assert re.fullmatch(r"(.+, arXiv \d{4}\.\d{5}, Table \d+|model card of \S+, .+)", one.source), f"{where}: {one.source}"
        named = re.fullmatch(r"accuracy|pass@1|avg@(\d+)", one.metric)
        assert named, f"{where}: {one.metric}"
        assert one.protocol.samples == (int(named[1]) if named[1] else None), f"{where}: as many samples as the metric says"
        assert one.protocol.mode in (None, "thinking", "non-thinking")
        assert one.score == round(one.score, 1), f"{where}: as printed"


def test_two_modes_have_two_protocols():
    """A model of two modes has both scores, and a model of one mode none with a mode."""
    modes: dict[tuple[str, str], set[str | None]] = {}
    for one in published_scores():
        modes.setdefault((one.model, one.benchmark), set()).add(one.protocol.mode)
    assert all(found in ({None}, {"thinking", "non-thinking"}) for found in modes.values())
    assert {found is not None and found.score for found in (
        find("Qwen/Qwen3-4B", "aime24", "thinking"), find("Qwen/Qwen3-4B", "aime24", "non-thinking"))} == {73.8, 25.0}


def test_every_model_of_the_shipped_experiments_is_on_file():
    models = set()
    for file in (ROOT / "conf/exp").glob("*.yaml"):
        path = (yaml.safe_load(file.read_text()).get("model") or {}).get("path", "")
        if "/" in path:
            models.add(path)
    assert models and models <= {one.model for one in published_scores()}


def test_a_file_that_breaks_the_rules_is_refused(tmp_path, monkeypatch):
    text = (ROOT / "akl_dist" / published.DATA).read_text()
    monkeypatch.setattr(published.resources, "files", lambda package: tmp_path)
    twice = text.replace('benchmark = "math", score = 75.5', 'benchmark = "gsm8k", score = 75.5')
    for broken, error in ((twice, ValueError), (text.replace("shots = 5", "shot = 5"), TypeError),
                          (text.replace('source = "smollm2"', 'source = "hearsay"'), KeyError)):
        assert broken != text
        (tmp_path / published.DATA).write_text(broken)
        with pytest.raises(error):
            published_scores.__wrapped__()


def test_difference_in_standard_errors():
    """Ours 90 +- 1 against 91.6: -1.6 points are -1.6 standard errors."""
    one = compare(score(91.6), result(0.90, 0.01), OURS)
    assert one is not None
    assert (one.difference, one.z) == (pytest.approx(-1.6), pytest.approx(-1.6))
    assert one.standard_error_of == published.OURS_ALONE
    assert ("published 91.6 % (accuracy; A Report, Table 1), ours 90.0 % +- 1.0 (avg@4): difference -1.6 points, -1.6 standard "
            "errors (ours, clustered by problem)") in one.text()
    assert one.not_stated[:3] == ("problems", "shots", "samples") and one.differs == ()


def test_a_greedy_published_score_brings_its_own_error():
    """50 % of 100 problems, one greedy answer each: sqrt(.25 / 100) = .05; with .12 of ours .13."""
    greedy = compare(score(50.0, samples=1, temperature=0.0, problems=100), result(0.63, 0.12), OURS)
    assert greedy is not None
    assert (greedy.standard_error, greedy.z) == (pytest.approx(13.0), pytest.approx(1.0))
    assert greedy.standard_error_of == published.BOTH
    for protocol in ({"samples": 1, "problems": 100}, {"samples": 1, "temperature": 0.0}, {"samples": 4, "temperature": 0.0,
                                                                                          "problems": 100}):
        alone = compare(score(50.0, **protocol), result(0.63, 0.12), OURS)
        assert alone is not None and alone.standard_error == pytest.approx(12.0), "nothing is known of its error"


def test_no_standard_error_no_z():
    for error in (None, 0.0):
        one = compare(score(50.0), result(0.5, error), OURS)
        assert one is not None and one.z is None and "no standard error" in one.text()
    assert compare(score(50.0), result(None, None), OURS) is None


def test_every_difference_is_named():
    theirs = score(73.8, mode="non-thinking", problems=30, samples=64, temperature=0.6, top_p=0.95, max_tokens=38912,
                   prompt="Reason.")
    one = compare(theirs, result(0.7, 0.06), OURS)
    assert one is not None
    assert [name for name, _, _ in one.differs] == ["mode", "temperature", "top_p", "max_tokens", "prompt"]
    assert one.not_stated == ("shots", "top_k", "presence_penalty")
    assert "temperature 1 here, 0.6 there" in one.text() and "max_tokens 8192 here, 38912 there" in one.text()
    stored = json.loads(json.dumps(one.to_dict()))
    assert stored["differs"]["temperature"] == {"here": 1.0, "there": 0.6} and math.isclose(stored["z"], -3.8 / 6)


@pytest.mark.parametrize(("path", "name"), [
    ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
    ("/models/qwen2.5-7b-instruct", "Qwen/Qwen2.5-7B-Instruct"),
    ("/cache/models--Qwen--Qwen3-4B/snapshots/0123abc", "Qwen/Qwen3-4B"),
    ("outputs/akl_7b/run/hf", None), ("/models/Qwen2.5-7B", None), ("tiny", None), ("", None),
])
def test_which_model_it_is(path, name):
    assert known_model(path) == name


def test_comparisons_fit_a_terminal():
    theirs = score(73.8, mode="non-thinking", problems=30, samples=64, temperature=0.6, top_p=0.95, max_tokens=38912,
                   prompt="Please reason step by step, and put your final answer within \\boxed{}.")
    text = report("m", "m", {"b": compare(theirs, result(0.7, 0.06), OURS)})
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100 and len(lines) > 4
    assert "max_tokens 8192 here, 38912 there" in " ".join(text.split()), "nothing is lost"
    assert r"within \boxed{}.' there" in " ".join(text.split()), "as one writes it"


def test_nothing_on_file_is_said():
    model, found = compared("Qwen/Qwen3-4B", {"gsm8k": result(0.9, 0.1)}, {"gsm8k": OURS})
    assert (model, found) == ("Qwen/Qwen3-4B", {"gsm8k": None})
    assert report(model, "Qwen/Qwen3-4B", found).endswith("gsm8k: no published score on file")
    assert report(None, "mine", {"gsm8k": None}) == "published scores: none on file for mine"
    assert "which /models/qwen3-4b is taken for" in report("Qwen/Qwen3-4B", "/models/qwen3-4b", {})
