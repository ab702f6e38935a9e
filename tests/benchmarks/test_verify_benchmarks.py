"""The arithmetic of the verifier's benchmarks on numbers a reader can redo. Nothing is timed and no grader runs."""

from __future__ import annotations

import collections
import itertools

import pytest

from akl_dist.contract.records import Status, Verdict
from akl_dist.verify.grader import Item
from akl_dist.verify.math import judge_answer
from benchmarks import verify_inputs as inputs
from benchmarks import verify_leaks as leaks
from benchmarks import verify_throughput as throughput
from benchmarks.verify_throughput import Block, Timed


def test_ratio_is_the_median_of_blocks_and_rates_are_of_all():
    summary = throughput.summarise([Block(10, 1.0, 2.0), Block(10, 1.0, 4.0), Block(10, 6.0, 4.0)])
    assert summary["ratio"] == 0.5  # of 0.25, 0.5 and 1.5; that of the sums is 0.8
    assert summary["ratio_quartiles"] == [0.375, 1.0]
    assert (summary["answers"], summary["answers_per_s"], summary["math_verify_per_s"]) == (30, 3.8, 3.0)  # 30 / 8, 30 / 10


def test_latencies_are_of_the_honest_ones():
    judged = [Timed(0.001 * k, False, Status.OK) for k in range(1, 102)]
    judged += [Timed(2.0, True, Status.TIMEOUT), Timed(1.0, True, Status.WRONG, "time_limit")]
    judged += [Timed(0.1, True, Status.WRONG, "exit"), Timed(0.051, False, Status.ERROR)]
    found = throughput.latency(judged, 2.0)
    assert (found["honest"], found["hostile"], found["hostile_at_limit"], found["hostile_longest_s"]) == (102, 3, 2, 2.0)
    assert found["p50_ms"] == 51.0 and found["p99_ms"] == pytest.approx(100.0, abs=0.1)
    assert found["honest_without_verdict"] == 1 and found["hostile_accepted"] == 0
    assert found["per_s"] == pytest.approx(102 / (0.001 * 101 * 102 / 2 + 0.051), abs=0.1)
    assert throughput.latency([*judged, Timed(0.1, True, Status.OK)], 2.0)["hostile_accepted"] == 1


class FakePool:
    def judge_many(self, items):
        return [Verdict(Status.OK if item.response_text == item.gold else Status.WRONG) for item in items]


def test_each_input_is_judged_and_kept_apart():
    mixed = [inputs.Mixed(Item("a", "a", False), False), inputs.Mixed(Item("a", "b", False), True)]
    assert [(one.hostile, one.status) for one in throughput.timed(FakePool(), mixed)] == [(False, Status.OK), (True, Status.WRONG)]


@pytest.mark.parametrize(("count", "share", "hostile"), [(100, 0.05, 5), (1000, 0.01, 10), (99, 0.01, 0), (7, 0.0, 0)])
def test_mixture_has_its_share_evenly_and_all_honest_ones_in_turn(count, share, hostile):
    honest, bad = [Item("1", str(k), False) for k in range(3)], [Item("1", f"bad {k}", False) for k in range(2)]
    mixed = list(inputs.mixture(honest, bad, count, share))
    places = [index for index, one in enumerate(mixed) if one.hostile]
    assert len(mixed) == count and len(places) == hostile
    assert len({b - a for a, b in itertools.pairwise(places)}) <= 1
    fine = [one.item.response_text for one in mixed if not one.hostile]
    assert fine == [str(k % 3) for k in range(len(fine))]
    turns = collections.Counter(one.item.response_text for one in mixed if one.hostile)
    assert max(turns.values(), default=0) - min(turns.values(), default=0) <= 1


def test_inputs_without_published_files_hold_right_and_wrong_ones():
    pairs = inputs.answers()
    assert len(pairs) > 500 and pairs == inputs.answers()
    sums = [(gold, answer) for gold, answer in pairs if gold.isdigit() and answer.isdigit()]
    verdicts = collections.Counter(judge_answer(gold=gold, answer=answer)[0] for gold, answer in sums)
    assert verdicts[Status.OK] >= 100 and verdicts[Status.WRONG] >= 100
    assert len(inputs.programs()) > 10 and all(one.response_text for one in inputs.programs())
    assert max(len(answer) for _, answer in inputs.hostile_answers()) >= 1_000_000


def test_leftovers_are_counted_and_shown():
    one = {"judgements": 10, "seconds": 1.0, "statuses": {"ok": 10}, "graders_started": 2, "kills": 0, "recycled": 1,
           "processes": 1, "zombies": 2, "descriptors": 0, "control_groups": 4, "grown_mib": 0.5}
    assert leaks.leftovers(one) == 7
    assert "left 1 processes, 2 zombies, 0 descriptors, 4 control groups; memory +0.50 MiB" in leaks.line("answers", one)


def test_table_shows_every_mixture():
    quiet = throughput.latency([Timed(0.01, False, Status.OK)], 1.0)
    answers = {"answers": 10, "answers_per_s": 5.0, "math_verify_per_s": 1.0, "ratio": 0.2, "ratio_quartiles": [0.1, 0.3],
               "differ": 3}
    text = throughput.table(answers, {"answers": {"alone": quiet, "mixed": quiet}, "programs": {"alone": quiet, "mixed": quiet}})
    assert "0.200 (quartiles 0.100 to 0.300), 3 judged otherwise" in text and len(text.splitlines()) == 6
