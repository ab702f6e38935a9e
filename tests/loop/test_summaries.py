"""Metrics of a step and of an evaluation, by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from akl_dist.config.schema import ObjectiveConfig
from akl_dist.contract.errors import VerifierFault
from akl_dist.contract.records import (
    JudgedGroup,
    LabelledGroup,
    Prompt,
    ReferenceGroup,
    RolloutGroup,
    Status,
    SyncReport,
    TrainingGroup,
    Turns,
    Verdict,
)
from akl_dist.summaries import (
    Evaluation,
    activity_summary,
    objective_metrics,
    roles_metrics,
    rollout_metrics,
    summarise_evaluation,
    verify_metrics,
    weight_sync_metrics,
)
from akl_dist.training_batch import training_groups

OK, WRONG, NONE, LATE = (Verdict(s) for s in (Status.OK, Status.WRONG, Status.NO_ANSWER, Status.TIMEOUT))


def group(name, verdicts, *, source="s", lengths=None, answer=None, votes=(0,) * 8, k3=None):
    size = len(verdicts)
    lengths = lengths or (4,) * size
    rollout = RolloutGroup(Prompt(name, source, "", (1,), "1"), tuple(lengths), ("stop",) * (size - 1) + ("length",), 0, "e", None)
    judged = JudgedGroup(name, tuple(verdicts), tuple(2 if v in (OK, WRONG) else 0 for v in verdicts), None)
    reference = ReferenceGroup(name, (0.0,) * size, tuple(k3 or (0.0,) * size), None)
    return LabelledGroup(rollout, judged, reference, tuple(answer or (1,) * size), votes, None)


def advantages_of(groups, **objective):
    return training_groups(groups, ObjectiveConfig(**objective), max_tokens=10)


def test_rollout_and_verify():
    groups = [group("a", (OK, WRONG)), group("b", (NONE, LATE), lengths=(2, 10))]
    rollout = rollout_metrics([g.rollout for g in groups], seconds=2.0, discarded={})
    assert rollout == {"rollout/tokens": 20, "rollout/response_tokens_mean": 5.0, "rollout/truncated_fraction": 0.5,
                       "rollout/tokens_per_s": 10.0}
    verify = verify_metrics([g.judged for g in groups])
    assert verify["verify/accuracy"] == pytest.approx(1 / 3), "over the three that have a verdict"
    assert verify["verify/timeout_fraction"] == 0.25 == verify["verify/no_answer_fraction"]


def test_accuracy_is_absent_without_any_verdict():
    assert "verify/accuracy" not in verify_metrics([group("a", (LATE, LATE)).judged])


def test_roles():
    metrics = roles_metrics([group("a", (OK, NONE), answer=(2, 0), votes=(5, 0, 1, 0, 0, 0, 0, 2))])
    assert metrics["roles/answer_fraction"] == 0.25 and metrics["roles/vote_agreement"] == 7 / 8
    assert metrics["roles/answer_span_tokens"] == 2.0 and metrics["roles/votes_010"] == 1
    pairs = {name: metrics[f"roles/agreement_{name}"] for name in ("position_entropy", "position_verifier", "entropy_verifier")}
    assert pairs == {"position_entropy": 7 / 8, "position_verifier": 1.0, "entropy_verifier": 7 / 8}
    assert metrics["roles/likelihood_ratio_entropy"] == 6.0, "1 over 1/6"
    assert "roles/likelihood_ratio_position" not in metrics, "no such vote on reasoning: undefined"


def test_no_verdict_is_no_reward():
    """A timeout neither trains nor moves the group's mean: advantages as if the sample were not there."""
    with_late, without = (advantages_of([group("a", v)], normalize_std=False)[0] for v in ((OK, WRONG, LATE), (OK, WRONG)))
    assert with_late.advantages[:2] == without.advantages == (0.5, -0.5)
    assert with_late.advantages[2] == 0.0 and with_late.trains == (True, True, False)
    as_zero = advantages_of([group("a", (OK, WRONG, WRONG))], normalize_std=False)[0]
    assert as_zero.advantages[0] != 0.5, "control: a zero reward would have moved the mean"


def test_objective():
    mixed = TrainingGroup(group("a", (OK, WRONG)), (1.5, -0.5), (True, True))
    equal = TrainingGroup(group("b", (OK, LATE)), (0.0, 0.0), (True, False))
    assert objective_metrics([mixed, equal]) == {
        "objective/zero_spread_group_fraction": 0.5, "objective/masked_sample_fraction": 0.25, "objective/advantage_max_abs": 1.5}


def test_evaluation_clusters_by_problem():
    """Means .5, 1, 0 of three problems: mean .5, standard error sqrt(.25 / 3)."""
    groups = [group("a", (OK, WRONG), k3=(0.4, 0.4)), group("b", (OK, LATE)), group("c", (NONE, WRONG))]
    e = summarise_evaluation([g.rollout for g in groups], [g.judged for g in groups], [g.reference for g in groups],
                             step=3, policy_version=3, seed=1)
    assert (e.problems, e.samples, e.undecided) == (3, 2, 1)
    assert e.accuracy == 0.5 and e.accuracy_standard_error == pytest.approx(math.sqrt(0.25 / 3))
    assert e.kl_per_token == pytest.approx(0.8 / 24) and e.metrics()["evaluate/s/avg_at_2"] == 0.5


def test_a_single_problem_has_no_standard_error():
    e = evaluation_of([group("a", (OK, LATE))])
    assert e.accuracy == 1.0 and e.accuracy_standard_error is None and "evaluate/s/standard_error" not in e.metrics()
    assert "avg@2 100.0 % (1 held-out problems, sampling seed 1, 1 of 2 responses without a verdict)" in e.text()


def evaluation_of(groups):
    return summarise_evaluation([g.rollout for g in groups], [g.judged for g in groups], [g.reference for g in groups],
                                step=3, policy_version=3, seed=1)


def test_evaluation_of_several_sources():
    """Means 1/2 and 0 of source a, 1 of source b: 1/4 and 1 by source, 1/2 over all problems."""
    e = evaluation_of([group("a/1", (OK, WRONG), source="a"), group("b/1", (OK, OK), source="b", lengths=(1, 3)),
                       group("a/2", (NONE, WRONG), source="a")])
    assert (e.data_set, e.problems, e.accuracy) == ("a+b", 3, 0.5)
    metrics = e.metrics()
    assert (metrics["evaluate/a/avg_at_2"], metrics["evaluate/b/avg_at_2"]) == (0.25, 1.0)
    assert (metrics["evaluate/a/problems"], metrics["evaluate/b/problems"]) == (2, 1)
    assert metrics["evaluate/b/response_tokens"] == 2.0
    assert {name.split("/")[1] for name in metrics} == {"a", "b"}, "nothing is reported under a merged name"
    stored = json.loads(json.dumps(e.to_dict()))
    assert stored["accuracy"] == 0.5 and stored["by_source"]["a"]["accuracy"] == 0.25
    assert Evaluation.from_dict(stored) == e
    first, *rest = e.text().splitlines()
    assert "after step 3 on a+b: avg@2 50.0 %" in first
    assert [line.split(":")[0].strip() for line in rest] == ["a", "b"] and "avg@2 25.0 %" in rest[0]


def test_majority_by_source():
    """Majorities 1 and 1/2 of source a (no value where nothing is decided), 0 of b: 3/4 and 0, and none of their mixture."""
    groups = [replace(group(name, (OK, WRONG), source=name[0]), judged=replace(group(name, (OK, WRONG)).judged, majority=value))
              for name, value in (("a/1", 1.0), ("b/1", 0.0), ("a/2", 0.5), ("a/3", None))]
    e = evaluation_of(groups)
    assert (e.metrics()["evaluate/a/maj_at_k"], e.metrics()["evaluate/b/maj_at_k"]) == (0.75, 0.0)
    assert e.maj_at_k is None and Evaluation.from_dict(json.loads(json.dumps(e.to_dict()))) == e
    assert evaluation_of(groups[:1]).maj_at_k == 1.0


def test_conversations():
    """Two responses of 4 + 3 + 2 and 5 sampled, observed, sampled tokens: 11 sampled; one of three turns void; one call, failed."""
    turns = (Turns((4, 3, 2), void=(0,), left_out=(0,), calls=1, failed_calls=1), Turns((5,), fault="the worker died"))
    one = RolloutGroup(Prompt("p", "s", "", (1,), "1"), (9, 5), ("stop", "turns"), 0, "e", None, turns)
    metrics = rollout_metrics([one], seconds=2.0, discarded={})
    assert one.sampled_lengths == (6, 5)
    assert metrics == {
        "rollout/tokens": 11, "rollout/response_tokens_mean": 5.5, "rollout/truncated_fraction": 0.5, "rollout/tokens_per_s": 5.5,
        "rollout/turns_mean": 1.5, "rollout/tool_calls_mean": 0.5, "rollout/tool_failed_fraction": 1.0,
        "rollout/void_turn_fraction": pytest.approx(1 / 3), "rollout/observation_tokens_mean": 1.5,
        "rollout/environment_fault_fraction": 0.5}
    quiet = replace(one, turns=(Turns((9,)), Turns((5,))))
    assert "rollout/tool_failed_fraction" not in rollout_metrics([quiet], seconds=2.0, discarded={}), "no call, no share of calls"
    labelled = LabelledGroup(one, group("p", (OK, WRONG)).judged, ReferenceGroup("p", (0.0,) * 2, (0.7, 0.7), None), (1, 0),
                             (0,) * 8, None)
    e = evaluation_of([labelled])
    assert (e.response_tokens, e.truncated_fraction) == (5.5, 0.5)
    assert e.kl_per_token == pytest.approx(1.4 / 7), "over the 2 + 5 tokens that count"
    assert roles_metrics([labelled])["roles/answer_fraction"] == pytest.approx(1 / 7)


def test_evaluation_of_one_source_keeps_its_form():
    e = evaluation_of([group("s/1", (OK, WRONG))])
    assert e.data_set == "s" and set(e.by_source) == {"s"} and "\n" not in e.text()
    stored = e.to_dict()
    assert (stored["accuracy"], stored["by_source"]["s"]["accuracy"]) == (0.5, 0.5)
    assert "evaluate/s/maj_at_k" not in e.metrics(), "answers that do not vote have no majority"
    older = {key: value for key, value in stored.items() if key not in ("by_source", "maj_at_k")}  # an older checkpoint's
    assert Evaluation.from_dict(older).metrics() == e.metrics()


def test_pass_at_k_of_an_evaluation():
    """One of two right: pass@2 = 1; the problem with one verdict only has no estimate of it; none right: 0."""
    e = evaluation_of([group("a/1", (OK, WRONG), source="a"), group("a/2", (OK, LATE), source="a"),
                       group("a/3", (WRONG, NONE), source="a")])
    assert e.metrics()["evaluate/a/pass_at_2"] == 0.5 and "evaluate/a/pass_at_1" not in e.metrics()
    assert Evaluation.from_dict(json.loads(json.dumps(e.to_dict()))) == e


def test_a_source_without_a_verdict_has_no_figures():
    e = evaluation_of([group("a/1", (OK, OK), source="a"), group("b/1", (LATE, LATE), source="b")])
    assert set(e.by_source) == {"a"} and (e.problems, e.undecided) == (2, 2)
    with pytest.raises(VerifierFault, match="no verdict on any of 1 problems"):
        evaluation_of([group("b/1", (LATE, LATE), source="b")])


def test_no_sync_metrics_where_nothing_was_transferred():
    moved = weight_sync_metrics(SyncReport(1, 0.5, 100, 2, 0.1, 0.2, 0.3))
    assert moved == {"weight_sync/seconds": 0.5, "weight_sync/bytes": 100, "weight_sync/logprob_gap": 0.1,
                     "weight_sync/logprob_gap_p99": 0.2, "weight_sync/logprob_gap_max": 0.3}
    assert weight_sync_metrics(SyncReport(1, 0.0, 0, 0, 0.0, 0.0, 0.0)) == {}


def test_records_of_different_problems_are_refused():
    a, b = group("a", (OK, WRONG)), group("b", (OK, WRONG))
    with pytest.raises(AssertionError, match="order"):
        summarise_evaluation([a.rollout], [b.judged], [a.reference], step=0, policy_version=0, seed=1)
    with pytest.raises(ValueError, match="different prompts"):
        LabelledGroup(a.rollout, b.judged, a.reference, (1, 1), (0,) * 8, None)


def test_activity_line():
    rows = [{"objective/kl_activity_answer": v} for v in (0.1, 0.3, 0.2)]
    assert activity_summary(rows) == "KL gradient over policy gradient, median over steps: answer 20.0 %"
    assert activity_summary([{}]) == ""
