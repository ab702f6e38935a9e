from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import yaml

from akl_dist.bookkeeping import atomic
from akl_dist.bookkeeping.journal import Journal, RunDirectory, failure_record, new_run_id, read_metrics
from akl_dist.contract.errors import RunError, WeightSyncError


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "tiny", "run-1", {"seed": 0, "learner": {"lr": 1e-6}, "run_id": None})


# --- run directory -----------------------------------------------------------------------------------------------


def test_run_directory(run, tmp_path):
    assert run.root == tmp_path / "tiny" / "run-1"
    assert yaml.safe_load(run.config.read_text()) == {"seed": 0, "learner": {"lr": 1e-6}, "run_id": None}
    environment = json.loads(run.environment.read_text())
    assert environment["packages"]["ray"] and environment["machine"]["cpu_count"] == os.cpu_count()
    assert environment["machine"]["memory_bytes"] > 2**28
    assert run.logs.is_dir() and run.checkpoints.is_dir()


def test_environment_holds_no_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_TOKEN", "hunter2-do-not-record")
    run = RunDirectory.create(tmp_path, "tiny", "r", {})
    recorded = "".join(p.read_text() for p in run.root.rglob("*") if p.is_file())
    assert "hunter2" not in recorded and "SOME_API_TOKEN" not in recorded


def test_entering_again_keeps_metrics(run, tmp_path):
    Journal(run, tensorboard=False).record(1, {"a/b": 1.0})
    again = RunDirectory.create(tmp_path, "tiny", "run-1", {"seed": 0, "steps": 20})
    assert read_metrics(again.metrics) == [{"step": 1, "a/b": 1.0}]
    assert yaml.safe_load(again.config.read_text())["steps"] == 20


def test_run_ids_differ():
    assert len({new_run_id() for _ in range(20)}) > 1


def test_result(run):
    failure = failure_record(WeightSyncError("engine 1", got="gap 2.2", expected="gap below 0.001", remedy="Stop.",
                                             stage="weight_sync", actor="rollout-1"))
    evaluation = {"initial": {"accuracy": 0.5}, "best": None, "last": None}
    run.write_result("failed", steps=3, first_failure=failure, evaluation=evaluation)
    result = run.read_result()
    assert result is not None
    assert (result["status"], result["steps"], result["evaluation"]) == ("failed", 3, evaluation)
    assert set(result["first_failure"]) == {"time", "stage", "actor", "error", "message"}
    assert result["first_failure"]["error"] == "WeightSyncError"
    assert (result["first_failure"]["stage"], result["first_failure"]["actor"]) == ("weight_sync", "rollout-1")
    assert failure_record(KeyError("x"), stage="learner", actor="learner-0")["actor"] == "learner-0"


def test_result_is_checked(run):
    evaluation = {"initial": None, "best": None, "last": None}
    for status, failure, evaluations in (("done", None, evaluation), ("failed", None, evaluation), ("finished", None, {})):
        with pytest.raises(ValueError, match=r"expected|needs"):
            run.write_result(status, steps=1, first_failure=failure, evaluation=evaluations)
    with pytest.raises(ValueError, match="JSON compliant"):
        run.write_result("finished", steps=1, first_failure=None, evaluation={**evaluation, "last": float("nan")})
    assert run.read_result() is None, "a refused result must leave nothing behind"


def test_replacing_leaves_the_old_file_on_failure(tmp_path):
    path = tmp_path / "f.txt"
    atomic.write_text(path, "old")
    with pytest.raises(RuntimeError), atomic.replacing(path) as temporary:
        temporary.write_text("half of the n")
        raise RuntimeError("killed here")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_any_text_can_be_written():
    assert json.loads(atomic.strict_json({"message": "lone \ud800 surrogate"})) == {"message": "lone \ud800 surrogate"}
    assert atomic.strict_json("\ud800é").isascii()


# --- metrics -----------------------------------------------------------------------------------------------------


def test_one_strict_object_a_step(run):
    journal = Journal(run, tensorboard=False)
    journal.record(1, {"verify/accuracy": np.float32(0.5), "rollout/tokens": np.int64(7)})
    journal.record(2, {"policy_version": 2})
    assert run.metrics.read_text() == '{"step": 1, "verify/accuracy": 0.5, "rollout/tokens": 7}\n{"step": 2, "policy_version": 2}\n'


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("nan"), None, "0.5", True])
def test_a_metric_is_a_finite_number(run, value):
    journal = Journal(run, tensorboard=True)
    with pytest.raises(RunError, match=r"metric learner/grad_norm: got .*finite number") as caught:
        journal.record(1, {"learner/loss": 1.0, "learner/grad_norm": value})
    assert caught.value.stage == "learner"
    assert read_metrics(run.metrics) == [], "a refused step must leave no line"
    journal.close()


def test_steps_increase(run):
    journal = Journal(run, tensorboard=False)
    journal.record(3, {})
    for step in (3, 2):
        with pytest.raises(RunError, match=f"step {step} after step 3"):
            journal.record(step, {})
    with pytest.raises(RunError, match="step 3 after step 3"):
        Journal(run, tensorboard=False).record(3, {})  # a new process knows the last step too


def test_cut_back(run):
    journal = Journal(run, tensorboard=False)
    for step in range(1, 6):
        journal.record(step, {"x/y": step / 10})
    with run.metrics.open("a") as lines:
        lines.write('{"step": 6, "x/y"')  # the process was killed here
    resumed = Journal(run, tensorboard=False)
    assert resumed.cut_back(3) == 2
    resumed.record(4, {"x/y": 9.0})
    assert [(row["step"], row["x/y"]) for row in read_metrics(run.metrics)] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 9.0)]
    assert run.metrics.read_text().endswith("\n")


def test_damaged_line_is_named(run):
    run.metrics.write_text('{"step": 1}\n{"step" 2}\n{"step": 3}\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 2: got malformed JSON"):
        read_metrics(run.metrics)


def scalars(run: RunDirectory, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(run.tensorboard))
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(tag)]


def test_tensorboard_shows_the_same_numbers(run):
    journal = Journal(run, tensorboard=True)
    journal.record(1, {"verify/accuracy": 0.5})
    journal.record(2, {"verify/accuracy": 0.75})
    assert scalars(run, "verify/accuracy") == [(1, 0.5), (2, 0.75)], "readable while the run goes on"
    journal.close()


def test_tensorboard_forgets_what_was_cut_back(run):
    first = Journal(run, tensorboard=True)
    for step in (1, 2, 3):
        first.record(step, {"verify/accuracy": 0.25})
    first.close()
    second = Journal(run, tensorboard=True)
    second.cut_back(1)
    second.record(2, {"verify/accuracy": 0.5})
    second.close()
    assert scalars(run, "verify/accuracy") == [(1, 0.25), (2, 0.5)]


def test_bookkeeping_imports_no_torch(tmp_path):
    code = (
        "import sys, pathlib\n"
        "from akl_dist.bookkeeping import checkpoint, console, curve, journal, rollout_dump\n"
        "run = journal.RunDirectory.create(sys.argv[1], 'e', 'r', {})\n"
        "book = journal.Journal(run, tensorboard=True); book.record(1, {'a/b': 1.0}); book.close()\n"
        "curve.draw(run.root)\n"
        "print([m for m in ('torch', 'tensorflow', 'ray', 'transformers') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    out = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("content", [b"", b'{"status": "fini', b"\xff\xfe", b"[]", b"null", b'{"status": "finished"}',
                                     b'{"status": "done", "steps": 1, "evaluation": {}}'])
def test_damaged_result_names_the_file_and_the_remedy(run, content):
    run.result.write_bytes(content)
    with pytest.raises(RunError, match=r"result\.json: got .*expected .*Remove the file.*run_id"):
        run.read_result()
