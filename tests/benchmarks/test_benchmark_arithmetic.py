"""The benchmarks' arithmetic on numbers a reader can redo. Nothing is timed here."""

from __future__ import annotations

import collections
import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from benchmarks import __main__ as everything
from benchmarks import driver_bytes as driver
from benchmarks import orchestration_overhead as overhead


def step_time(wall: float, bare: tuple[float, float, float], others: float = 0.0) -> overhead.StepTime:
    metrics = {"time/rollout_s": 1.0, "time/reference_s": 2.0, "time/learner_s": 3.0, "time/verify_s": 0.5, "time/roles_s": 0.3,
               "time/weight_sync_s": 0.25, "time/step_s": 6.875}
    return overhead.StepTime(wall, overhead.spans(metrics, wall), dict(zip(overhead.STAGES, bare, strict=True)), others)


def test_spans_add_up_to_the_step():
    parts = step_time(7.0, (1, 2, 3)).spans
    assert parts["verdicts"] == pytest.approx(0.2)  # 0.5 of verify, 0.3 of it roles
    assert parts["between stages"] == pytest.approx(6.875 - 6.75)
    assert parts["recording"] == pytest.approx(0.125)
    assert sum(parts.values()) == pytest.approx(7.0)


def test_ratio_is_the_median_of_ratios_of_steps():
    times = [step_time(7.0, (1.0, 2.0, 2.0)), step_time(9.0, (1.0, 2.0, 3.0)), step_time(24.0, (2.0, 4.0, 6.0))]
    summary = overhead.summarise(times)
    assert summary["ratio"] == 1.5  # of 1.4, 1.5 and 2.0; the ratio of the medians 9 and 6 would agree, that of the sums not
    assert sum(one.wall for one in times) / sum(sum(one.bare.values()) for one in times) != pytest.approx(1.5)
    assert summary["ratio_quartiles"] == pytest.approx([1.45, 1.75])
    assert summary["excess_s"]["learner"] == 0.0  # 3 - 2, 3 - 3, 3 - 6
    assert summary["excess_s"]["weight sync"] == 0.25  # has no bare counterpart: counts in full
    assert "ratio 1.500" in overhead.table(summary)


def test_a_single_step_has_a_summary():
    assert overhead.summarise([step_time(12.0, (1.0, 2.0, 3.0))])["ratio_quartiles"] == [2.0, 2.0]


def test_noisy_steps_are_set_aside_unless_too_few_are_quiet():
    quiet = [step_time(7.0, (1, 2, 3), 0.01)] * overhead.MIN_QUIET
    noisy = [step_time(20.0, (1, 2, 3), 0.4)] * 3
    assert overhead.quiet_steps(quiet + noisy, 0.05) == quiet
    assert overhead.quiet_steps(quiet[1:] + noisy, 0.05) == quiet[1:] + noisy


@pytest.mark.parametrize(("stage", "field", "value", "word"), [
    ("rollout", "groups_equal", 31, "31 of 32"), ("reference", "largest_logp_gap", 0.01, "0.01"),
    ("reference", "largest_logp_gap", float("nan"), "nan"), ("learner", "loss", 0.52, "loss"),
    ("learner", "grad_norm", 1.5, "grad_norm"),
])
def test_different_work_is_noticed(stage, field, value, word):
    metrics = {"learner/loss": 0.5, "learner/grad_norm": 1.0}
    answers = {"rollout": {"groups": 32, "groups_equal": 32}, "reference": {"largest_logp_gap": 1e-6},
               "learner": {"loss": 0.500001, "grad_norm": 1.0}}
    assert overhead.differences(4, metrics, answers) == []
    answers[stage] = {**answers[stage], field: value}
    (problem,) = overhead.differences(4, metrics, answers)
    assert "step 4" in problem and word in problem


def test_the_timed_verify_stage_hands_on_what_it_is_given():
    """With dynamic sampling the verdicts of earlier draws count in the bound on faults."""
    inner, note = mock.Mock(), mock.Mock()
    timed = overhead.TimedVerify(inner, note)
    assert timed.collect("ticket", ["earlier"]) is inner.collect.return_value
    inner.collect.assert_called_once_with("ticket", ["earlier"])
    assert timed.label(1, 2, 3) is inner.label.return_value and note.roles_s >= 0


def test_steps_must_fill_blocks():
    assert overhead.arguments(["--steps", "6", "--block", "3"]).steps == 6
    for wrong in (["--steps", "7"], ["--steps", "3"], ["--block", "0"]):
        with pytest.raises(SystemExit):
            overhead.arguments(wrong)


def test_samples_of_a_dump_carry_the_references_rows(tmp_path: Path):
    from akl_dist.bookkeeping.rollout_dump import DumpRow, dump_path, write_rollouts
    from benchmarks.bare_stages import samples_of_dump

    def row(prompt: str, index: int, length: int, reward: float | None) -> DumpRow:
        ramp = np.arange(length, dtype=np.float32)
        return DumpRow(
            step=1, prompt_id=prompt, source="s", sample_index=index, prompt_token_ids=(5, 6), prompt_text="p", gold="1",
            response_token_ids=np.arange(length, dtype=np.int32), text="t", role=ramp >= 1, logp=-ramp, ref_logp=-ramp - 1,
            entropy=ramp, advantage=0.5, reward=reward, status="ok" if reward is not None else "timeout", reason="",
            extracted=None, finish_reason="stop", policy_version=0, answer_span_tokens=0)

    write_rollouts(dump_path(tmp_path, 1), [row("a", 0, 1, 1.0), row("a", 1, 2, None), row("b", 0, 3, 0.0), row("b", 1, 1, 0.0)])
    scores = tmp_path / "scores.npz"
    np.savez(scores, hidden=np.arange(7)[:, None] * np.ones(4))  # row t of the dump's 7 tokens holds t
    samples, lengths = samples_of_dump(dump_path(tmp_path, 1), scores)
    assert list(samples) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [sample.ref_rows["hidden"][:, 0].tolist() for sample in samples.values()] == [[0], [1, 2], [3, 4, 5], [6]]
    assert [sample.trains for sample in samples.values()] == [True, False, True, True]
    assert [one.prompt_tokens for one in lengths] == [2, 2]
    assert [one.response_tokens for one in lengths] == [(1, 2), (3, 1)]
    assert [one.answer_tokens for one in lengths] == [(0, 1), (2, 0)]
    np.savez(scores)
    assert all(sample.ref_rows == {} for sample in samples_of_dump(dump_path(tmp_path, 1), scores)[0].values())


def traffic(sent: dict[str, int], received: dict[str, int]) -> driver.Traffic:
    return driver.Traffic(collections.Counter(sent), collections.Counter(received))


def test_traffic_by_stage():
    sent = {"more_groups": 10, "judge": 3, "label": 4, "load_bucket": 7, "prompt_logprobs": 5, "appraise": 8, "nobody's": 1}
    one = traffic(sent, {"more_groups": 90, "probe_sequences": 2})
    assert one.by_stage() == {"rollout": 100, "verify": 7, "weight_sync": 7, "weight_sync probe": 7, "critic": 8, "other": 1}
    assert one.total == 130 == sum(one.by_stage().values())


def test_driver_ratio_counts_everything_and_shows_the_rest_apart_from_the_probe():
    short = traffic({"more_groups": 100}, {"probe_sequences": 100})
    long = traffic({"more_groups": 101}, {"probe_sequences": 400})
    summary = driver.summarise({200: (long, {"RolloutArrays": 8000}), 20: (short, {"RolloutArrays": 800})})
    assert summary["tokens"] == [20, 200]
    assert summary["ratio"] == pytest.approx(501 / 200)
    assert summary["ratio_without_probe"] == pytest.approx(1.01)
    assert summary["bulk_ratio"] == 10.0
    assert summary["by_stage"] == {"rollout": [100, 101], "weight_sync probe": [100, 400]}
    assert "2.505" in driver.table(summary)


def test_bytes_only_of_the_long_responses_are_not_a_ratio_of_one():
    short, long = traffic({}, {}), traffic({"write": 5}, {})
    assert driver.summarise({1: (short, {}), 10: (long, {})})["ratio"] == float("inf")
    assert driver.summarise({1: (short, {}), 10: (short, {})})["ratio"] == 1.0


def test_output_is_split_into_text_and_result():
    assert everything.split('a table\nof two lines\n{"ratio": 1.0}\n') == ({"ratio": 1.0}, "a table\nof two lines")
    assert everything.split("Traceback\nValueError: no\n") == (None, "Traceback\nValueError: no")
    assert everything.split("3") == (None, "3")
    assert everything.split("") == (None, "")


def test_summary_says_what_was_met():
    good = everything.Outcome("driver_bytes", {"ratio": 1.002, "max_ratio": 1.05}, "", 0)
    missed = everything.Outcome("orchestration_overhead", {"ratio": 1.3, "max_ratio": 1.15, "quiet": False}, "", 1)
    silent = everything.Outcome("logprob_memory", None, "Traceback", 1)
    small = everything.Outcome("fused_head", {"ratio": None, "max_ratio": 1.6}, "", 1)  # no way fits into the machine's memory
    lines = everything.summary([good, missed, silent, small]).splitlines()
    words = (" met ", " missed ", " no result ", " no result ")
    assert [word in line for word, line in zip(words, lines[1:], strict=True)] == [True] * 4
    assert ["measure again" in line for line in lines[1:]] == [False, True, False, False]
    assert "1.002" in lines[1] and "<= 1.05" in lines[1]
    assert [one.met for one in (good, missed, silent)] == [True, False, False]


OUTSIDE_A_STEP = {"start", "ping", "close", "rendezvous", "save", "load", "export", "parameters_checksum", "add",
                  "write_samples"}
DUMPS_AND_REPLAYS = {"write": "dump", "groups": "rollout"}  # of akl_dist/bookkeeping


def test_the_driver_benchmark_knows_every_remote_method_of_a_step():
    called = {(path.parent.name, method) for path in (Path(everything.__file__).parents[1] / "akl_dist").rglob("pool.py")
              for method in re.findall(r"\.(\w+)\.remote\(", path.read_text())}
    assert len(called) > 25
    for folder, method in sorted(called):
        if method not in OUTSIDE_A_STEP:
            stage = driver.STAGE_OF.get(method, "none")
            assert stage.split()[0] == DUMPS_AND_REPLAYS.get(method, folder), f"{folder} calls {method}, which counts as {stage}"
    assert set(driver.STAGE_OF) == {method for _, method in called} - OUTSIDE_A_STEP, "methods that nobody calls any more"


@pytest.mark.stack
def test_a_reference_counts_each_time_it_occurs(local_ray):
    shared, own = local_ray.put(1), [local_ray.put(2), local_ray.put(3)]
    assert driver.size_of([shared, shared]) == driver.size_of(own) > driver.size_of([shared]) > 50
    text = "x" * 500
    assert 500 < driver.size_of([text, text]) < 600, "what is no reference counts as it is pickled"
