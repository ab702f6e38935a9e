"""How many different right answers an evaluation finds: of problems that accept several, and of no others."""

from __future__ import annotations

from akl_dist.contract.golds import any_of
from akl_dist.contract.records import JudgedGroup, Prompt, ReferenceGroup, RolloutGroup, Status, Verdict
from akl_dist.summaries import Evaluation, summarise_evaluation

SEVERAL = any_of(["1", "2", "3"])


def evaluation(*problems: tuple[str, str, int]) -> Evaluation:
    """Of (source, gold, different right answers) triples, three samples each."""
    rows = []
    for number, (source, gold, distinct) in enumerate(problems):
        name = f"{source}/{number}"
        rollout = RolloutGroup(Prompt(name, source, "", (1,), gold), (2, 2, 2), ("stop",) * 3, 0, "e", None)
        judged = JudgedGroup(name, (Verdict(Status.OK),) * 3, (1, 1, 1), None, distinct)
        rows.append((rollout, judged, ReferenceGroup(name, (0.0,) * 3, (0.0,) * 3, None)))
    return summarise_evaluation(*map(list, zip(*rows, strict=True)), step=1, policy_version=1, seed=0)


def test_mean_over_the_problems_that_accept_several():
    found = evaluation(("a", SEVERAL, 3), ("a", SEVERAL, 2), ("a", "1", 1))
    assert found.distinct_correct == 2.5
    assert found.metrics()["evaluate/a/distinct_correct"] == 2.5
    assert "2.50 different right answers a problem" in found.text()


def test_absent_where_every_problem_has_one_answer():
    found = evaluation(("a", "1", 1), ("a", "2", 1))
    assert found.distinct_correct is None
    assert "evaluate/a/distinct_correct" not in found.metrics() and "different" not in found.text()


def test_per_source_and_through_a_checkpoint():
    found = evaluation(("a", SEVERAL, 3), ("b", "1", 1))
    metrics = found.metrics()
    assert metrics["evaluate/a/distinct_correct"] == 3 and "evaluate/b/distinct_correct" not in metrics
    assert Evaluation.from_dict(found.to_dict()) == found
    older = {key: value for key, value in found.to_dict().items() if key not in ("distinct_correct", "by_source")}
    assert Evaluation.from_dict(older).distinct_correct is None
