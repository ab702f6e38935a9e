"""A run that fails: one clear error, exit code 1, the first failure in result.json, nothing left behind."""

from __future__ import annotations

import os
import signal

import pytest

from tests.end_to_end.conftest import SMALL, wait_for

pytestmark = [pytest.mark.end_to_end, pytest.mark.stack, pytest.mark.timeout(600)]


ACTORS = [("rollout", "RolloutActor"), ("reference", "ReferenceActor"), ("learner", "LearnerActor")]


@pytest.mark.parametrize(("stage", "title"), ACTORS)
def test_a_dead_actor_is_named(command_line, stage, title):
    process = command_line.start(*SMALL, "steps=200", "run_id=x")
    assert wait_for(lambda: len(command_line.metrics("x")) >= 1 or process.poll() is not None, timeout_s=200)
    victims = [pid for pid, name in command_line.processes().items() if title in name]
    assert victims, command_line.processes()
    os.kill(victims[-1], signal.SIGKILL)
    console = command_line.folder / "console.log"
    assert process.wait(timeout=120) == 1, console.read_text()
    result = command_line.result("x")
    assert result["status"] == "failed" and result["steps"] >= 1
    failure = result["first_failure"]
    assert failure["error"] == "ActorDied" and failure["actor"].startswith(f"{stage}/x/"), failure
    assert failure["actor"] in console.read_text()
    assert command_line.wait_until_gone() == {}


def test_a_non_finite_loss_stops_before_the_weights_change(command_line):
    done = command_line.run(*SMALL, "steps=3", "run_id=x", "objective.kl.beta_answer=1e38", "objective.kl.beta_reasoning=1e38")
    assert done.returncode == 1, done.stdout + done.stderr
    failure = command_line.result("x")["first_failure"]
    assert failure["error"] == "NonFiniteLoss" and failure["stage"] == "learner"
    assert list((command_line.run_directory("x") / "failures").glob("*.npz")), "the batch is dumped"
    assert command_line.wait_until_gone() == {}


def test_a_verifier_that_never_answers_stops_the_run(command_line):
    """Every judgement runs into a limit that nothing can keep: killed, counted, and above the bound the run stops."""
    done = command_line.run(*SMALL, "steps=2", "run_id=x", "verify.timeout_s=1e-6")
    assert done.returncode == 1, done.stdout + done.stderr
    failure = command_line.result("x")["first_failure"]
    assert failure["stage"] == "verify", failure
    assert command_line.wait_until_gone() == {}
