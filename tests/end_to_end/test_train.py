"""Training through the command line on the real stack: Ray, vLLM, ZeRO-3 over two ranks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import SMALL, CommandLine, untimed, wait_for

pytestmark = [pytest.mark.end_to_end, pytest.mark.stack, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory) -> CommandLine:
    """Six uninterrupted steps; the yardstick of the other tests."""
    line = CommandLine(tmp_path_factory.mktemp("six steps"))  # a path with a space
    done = line.run(*SMALL, "steps=6", "run_id=whole", "checkpoint.every=3", "evaluate.num_problems=16")
    assert done.returncode == 0, done.stdout + done.stderr
    assert line.wait_until_gone() == {}
    return line


def test_run_directory(six_steps):
    root = six_steps.run_directory("whole")
    for name in ("config.yaml", "environment.json", "metrics.jsonl", "result.json", "learning_curve.png", "hf/model.safetensors",
                 "rollouts/step_000006.parquet", "checkpoints/step_000006/manifest.json", "logs/learner-1.log"):
        assert (root / name).is_file(), name
    assert list((root / "tensorboard").iterdir())
    result = six_steps.result("whole")
    assert result["status"] == "finished" and result["steps"] == 6 and result["first_failure"] is None
    assert result["evaluation"]["initial"]["step"] == 0 and result["evaluation"]["last"]["step"] == 6
    steps = six_steps.metrics("whole")
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6] == [row["policy_version"] for row in steps]


def test_first_step_is_on_policy(six_steps):
    """The step-0 gates: ratio one, no KL to the reference, engine and learner agree."""
    first = six_steps.metrics("whole")[0]
    assert first["objective/ratio_mean"] == 1.0 and first["objective/clip_fraction"] == 0.0
    assert abs(first["objective/kl_value_k3"]) < 1e-6
    assert first["objective/rollout_mismatch_mean"] < 1e-4 and first["weight_sync/logprob_gap_max"] < 1e-3


def test_golden_metrics(six_steps):
    """Recorded from such a run. Tight on the first step; bands afterwards, since log-probs differ a little between CPUs and a
    single other token changes what follows."""
    golden = json.loads(Path(__file__).with_name("golden_tiny.json").read_text())
    for expected, row in zip(golden, six_steps.metrics("whole"), strict=True):
        first = expected["step"] == 1
        assert row["verify/accuracy"] == pytest.approx(expected["verify/accuracy"], abs=0.04 if first else 0.3)
        for name in ("rollout/response_tokens_mean", "learner/tokens", "objective/entropy", "roles/answer_fraction"):
            assert row[name] == pytest.approx(expected[name], rel=0.02 if first else 0.4), (expected["step"], name)
        if first:
            assert row["learner/grad_norm"] == pytest.approx(expected["learner/grad_norm"], rel=0.02)
        assert 0 <= row["objective/kl_value_k3"] < 0.5


def test_the_embedded_default_learns(tmp_path):
    """The whole of ``+exp=tiny``, seed 0: held-out accuracy starts between 30 and 70 % and rises by at least 15 points."""
    line = CommandLine(tmp_path)
    done = line.run("+exp=tiny", "cluster.address=local", "run_id=x", timeout_s=700)
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = (line.result("x")["evaluation"][name] for name in ("initial", "last"))
    assert before["problems"] >= 256 and before["samples"] == 4 and before["seed"] == after["seed"]
    assert 0.3 <= before["accuracy"] <= 0.7
    assert after["accuracy"] - before["accuracy"] >= 0.15
    assert f"{100 * after['accuracy']:.1f}" in done.stdout and "learning curve" in done.stdout
    activity = [row["objective/kl_activity_answer"] for row in line.metrics("x") if row["step"] > 5]
    assert 0.05 < sum(activity) / len(activity) < 1.0, "the KL term acts, and does not rule"


def test_killed_terminated_and_resumed_equals_uninterrupted(six_steps, tmp_path):
    """SIGKILL after the checkpoint of step 3, resume, SIGTERM, resume: the same metrics as six steps in one go."""
    line = CommandLine(tmp_path)
    arguments = (*SMALL, "steps=6", "run_id=cut", "checkpoint.every=3")
    first = line.start(*arguments)
    manifest = line.run_directory("cut") / "checkpoints/step_000003/manifest.json"
    assert wait_for(lambda: manifest.exists() or first.poll() is not None, timeout_s=200)
    first.send_signal(signal.SIGKILL)
    first.wait(timeout=30)
    assert line.wait_until_gone(60) == {}, "nothing survives the driver"

    second = line.start(*arguments)
    assert wait_for(lambda: len(line.metrics("cut")) == 4 or second.poll() is not None, timeout_s=200)
    second.send_signal(signal.SIGTERM)
    assert second.wait(timeout=100) == 143, (tmp_path / "console.log").read_text()
    assert line.result("cut")["status"] == "interrupted" and line.result("cut")["first_failure"] is None
    assert 4 <= line.result("cut")["steps"] < 6
    assert line.wait_until_gone() == {}

    third = line.run(*arguments)
    assert third.returncode == 0, third.stdout + third.stderr
    assert untimed(line.metrics("cut")) == untimed(six_steps.metrics("whole"))
    again = line.run(*arguments, timeout_s=60)
    assert again.returncode == 0 and "is finished" in again.stdout


def test_one_replayed_step_reproduces_the_gradient_norm(six_steps, tmp_path):
    line = CommandLine(tmp_path)
    dumps = six_steps.run_directory("whole") / "rollouts"
    done = line.run(*SMALL, "steps=1", "run_id=replay", f"rollout.replay='{dumps}'")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rollout/replay/0" not in done.stdout, "no engine is started"
    replayed, original = line.metrics("replay")[0], six_steps.metrics("whole")[0]
    assert replayed["learner/grad_norm"] == pytest.approx(original["learner/grad_norm"], rel=1e-6)
    assert replayed["verify/accuracy"] == original["verify/accuracy"]


def test_export_generates_the_engines_greedy_text(six_steps):
    """In processes of their own: transformers on the exported folder against vLLM on the same folder."""
    folder = six_steps.run_directory("whole") / "hf"
    script = Path(__file__).with_name("greedy.py")
    outputs = {}
    for engine in ("transformers", "vllm"):
        done = subprocess.run([sys.executable, str(script), engine, str(folder)], capture_output=True, text=True, timeout=240,
                              check=True)
        outputs[engine] = done.stdout.strip().splitlines()[-1]
    assert outputs["transformers"] == outputs["vllm"] and "boxed" in outputs["vllm"]
