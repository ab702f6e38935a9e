"""Rows of data/metric_cases.jsonl: what an evaluation averages over, and what it must not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from akl_dist.contract.records import JudgedGroup, Prompt, ReferenceGroup, RolloutGroup, Status, Verdict
from akl_dist.summaries import Evaluation, summarise_evaluation

ROWS = {row["id"]: row for row in map(json.loads, (Path(__file__).parent / "data" / "metric_cases.jsonl").read_text().splitlines())}
STATUS = {1: Status.OK, 0: Status.WRONG, None: Status.TIMEOUT}


def evaluation(problems: list[tuple[str, str, list]]) -> Evaluation:
    """``problems``: (source, text, score of each sample: 1, 0 or None for no verdict)."""
    rollouts, judged, reference = [], [], []
    for index, (source, text, scores) in enumerate(problems):
        size, name = len(scores), f"{source}/{index}"
        rollouts.append(RolloutGroup(Prompt(name, source, text, (1,), "1"), (4,) * size, ("stop",) * size, 0, "e", None))
        judged.append(JudgedGroup(name, tuple(Verdict(STATUS[score]) for score in scores), (1,) * size, None))
        reference.append(ReferenceGroup(name, (0.0,) * size, (0.0,) * size, None))
    return summarise_evaluation(rollouts, judged, reference, step=0, policy_version=0, seed=0)


def test_benchmarks_apart():
    """Of each benchmark as many right as its accuracy says, spread over its problems."""
    inputs, expected = ROWS["L043"]["inputs"], ROWS["L043"]["expected"]
    problems = []
    for source, figures in inputs.items():
        count = figures["problems"] * figures["samples"]
        right = round(figures["acc"] * count)
        scores = [int((i + 1) * right // count > i * right // count) for i in range(count)]
        problems += [(source, "", scores[i::figures["problems"]]) for i in range(figures["problems"])]
    metrics = evaluation(problems).metrics()
    assert metrics["evaluate/A/avg_at_k"] == pytest.approx(expected["avg_A"], abs=1e-9)
    assert metrics["evaluate/B/avg_at_k"] == pytest.approx(expected["avg_B"], abs=1e-3)  # 1187 of 1319
    pooled = expected["pooled_is_wrong"]
    assert not [name for name, value in metrics.items() if name.endswith("avg_at_k") and abs(value - pooled) < 0.1]


def test_problems_are_told_apart_by_their_id():
    inputs, expected = ROWS["L044"]["inputs"], ROWS["L044"]["expected"]
    seen = evaluation([("s", "the same text", [score]) for score in inputs["scores"]])
    assert (seen.problems, seen.accuracy) == (expected["groups"], expected["avg"])
    assert seen.accuracy != expected["best_of_group_merged_is_wrong"]


def test_the_last_batch_is_not_filled_up():
    inputs, expected = ROWS["L045"]["inputs"], ROWS["L045"]["expected"]
    seen = evaluation([("s", "", [score]) for score in inputs["scores"]])
    assert seen.accuracy == pytest.approx(expected["mean"], abs=1e-9) != expected["counting_padding_is_wrong"]
    assert seen.problems == len(inputs["scores"]) < inputs["padded_to"]


def test_missing_verdicts_are_counted_and_not_averaged():
    inputs, expected = ROWS["L046"]["inputs"], ROWS["L046"]["expected"]
    seen = evaluation([("s", "", [score]) for score in inputs["scores"]])
    assert (seen.accuracy, seen.undecided) == (expected["mean_over_valid"], expected["invalid_count"])
