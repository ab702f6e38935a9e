"""PPO with a critic through the command line on the real stack: warm-up, checkpoint of both models, bit-equal resume."""

from __future__ import annotations

import pytest

from tests.end_to_end.conftest import SMALL, CommandLine, untimed

pytestmark = [pytest.mark.end_to_end, pytest.mark.stack, pytest.mark.timeout(900)]
PPO = (*SMALL, "objective.advantage=gae", "objective.gae_lambda=0.95", "critic.lr=1e-3", "critic.warmup_steps=1",
       "learner.updates_per_step=2", "steps=4", "checkpoint.every=2")


@pytest.fixture(scope="module")
def line(tmp_path_factory) -> CommandLine:
    line = CommandLine(tmp_path_factory.mktemp("ppo"))
    done = line.run(*PPO, "run_id=whole")
    assert done.returncode == 0, done.stdout + done.stderr
    return line


def test_the_critic_trains_first_and_then_both(line):
    rows = line.metrics("whole")
    assert [row.get("critic/warming_up") for row in rows] == [1.0, None, None, None]
    assert "learner/grad_norm" not in rows[0] and all(row["learner/grad_norm"] > 0 for row in rows[1:])
    assert rows[0]["critic/value_mean"] == 0.0 and rows[1]["critic/value_mean"] > 0, "values start at 0 and rise to the rewards"
    for row in rows:
        assert row["critic/grad_norm"] > 0 and row["critic/value_loss"] > 0 and row["time/critic_s"] > 0
    # the policy was not updated in step 1, so the second batch is still the reference's
    assert abs(rows[1]["objective/kl_value_k3"]) < 1e-3 < rows[-1]["objective/kl_value_k3"]


def test_a_resumed_run_writes_the_same_metrics(line):
    checkpoint = line.run_directory("whole") / "checkpoints" / "step_000002"
    assert {"learner_topology.json", "critic_topology.json"} <= {path.name for path in checkpoint.iterdir()}
    done = line.run(*PPO, "run_id=resumed", f"resume={checkpoint}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert untimed(line.metrics("resumed")) == untimed(line.metrics("whole")[2:])
