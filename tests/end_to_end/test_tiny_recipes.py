"""Every method's tiny recipe trains on the real stack: Ray, vLLM, ZeRO-3 over two ranks. Two steps each, one sweep.

``python -m tests.end_to_end.test_tiny_recipes [NAME ...]`` runs them (all by default) in a temporary folder and records
golden_recipes.json anew.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from akl_dist.config.compose import group_choices
from tests.end_to_end.conftest import SMALL, CommandLine

pytestmark = [pytest.mark.end_to_end, pytest.mark.stack, pytest.mark.timeout(1200)]

GOLDEN = Path(__file__).with_name("golden_recipes.json")
# tiny_akl is exp/tiny under another name (a configuration test says so), which test_train.py runs.
RECIPES = tuple(name for name in group_choices()["exp"] if name.startswith("tiny_") and name != "tiny_akl")
STEPS = 2
KEPT = ("verify/accuracy", "rollout/response_tokens_mean", "learner/tokens", "objective/entropy", "objective/ratio_mean",
        "objective/clip_fraction", "objective/kl_value_k3", "objective/policy_loss", "learner/grad_norm")
# So that the policy trains, too; and what two engines draw is what one would.
PPO = ("critic.warmup_steps=0", "rollout.num_engines=2")
OPTIONAL = ("rollout/dynamic_rounds", "rollout/dynamic_replaced_groups", "rollout/dynamic_zero_spread_left",
            "rollout/discarded_tokens", "objective/overlong_penalty_mean",
            "objective/zero_spread_group_fraction")


def train(line: CommandLine, names: Sequence[str]) -> dict[str, list[dict]]:
    """Metrics of each recipe, by name; one process runs them one after another."""
    small = [*(argument for argument in SMALL if not argument.startswith("+exp")), f"steps={STEPS}", "journal.tensorboard=false",
             "journal.dump_rollouts=false"]
    swept = ",".join(name for name in names if name != "tiny_ppo")
    commands = [("-m", f"+exp={swept}")] if swept else []
    commands += [("+exp=tiny_ppo", *PPO)] if "tiny_ppo" in names else []
    for command in commands:
        done = line.run(*command, *small, timeout_s=1100)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    found = {}
    for name in names:
        (metrics,) = (line.folder / "outputs" / name).rglob("metrics.jsonl")
        assert json.loads(metrics.with_name("result.json").read_text())["status"] == "finished", name
        found[name] = [json.loads(row) for row in metrics.read_text().splitlines()]
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, list[dict]]:
    line = CommandLine(tmp_path_factory.mktemp("recipes"))
    found = train(line, RECIPES)
    assert line.wait_until_gone() == {}
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_finite_metrics(runs, name):
    rows = runs[name]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert [key for key, value in row.items() if not math.isfinite(value)] == []
        assert row["learner/grad_norm"] > 0 and row["objective/clamped_fraction"] == 0


@pytest.mark.parametrize("name", RECIPES)
def test_golden_metrics(runs, name):
    """Recorded from such a run. Tight on the first step; bands afterwards, since a single other token changes what follows."""
    for expected, row in zip(json.loads(GOLDEN.read_text())[name], runs[name], strict=True):
        first = expected["step"] == 1
        assert row["verify/accuracy"] == pytest.approx(expected["verify/accuracy"], abs=0.04 if first else 0.35)
        for key in ("rollout/response_tokens_mean", "learner/tokens", "objective/entropy"):
            assert row[key] == pytest.approx(expected[key], rel=0.02 if first else 0.4), (expected["step"], key)
        if first:
            assert row["learner/grad_norm"] == pytest.approx(expected["learner/grad_norm"], rel=0.1)
            assert row["objective/policy_loss"] == pytest.approx(expected["objective/policy_loss"], rel=0.1, abs=5e-3)
            assert row["objective/ratio_mean"] == pytest.approx(expected["objective/ratio_mean"], rel=0.05)
        assert 0 <= row["objective/kl_value_k3"] < 0.5


def test_methods_differ(runs):
    """The first step draws the same responses for all that keep every group and have the same data; what they compute differs.
    (At the reference every KL's gradient is 0, so recipes that differ in their KL alone differ in the second step.)"""
    methods = [name for name in RECIPES if name not in ("tiny_dapo", "tiny_cokl", "tiny_continual", "tiny_tir")]
    assert len({runs[name][0]["learner/tokens"] for name in methods}) == 1
    norms = {tuple(round(row["learner/grad_norm"], 6) for row in runs[name]) for name in methods}
    assert len(norms) == len(methods), "two recipes compute the same gradients"


def test_dynamic_sampling_replaces_groups(runs):
    rows = runs["tiny_dapo"]
    assert sum(row["rollout/dynamic_replaced_groups"] for row in rows) > 0
    for row in rows:
        assert row["rollout/dynamic_rounds"] <= 2
        assert row["objective/zero_spread_group_fraction"] * 8 == row["rollout/dynamic_zero_spread_left"]
        assert row["objective/overlong_penalty_mean"] > 0
    plain = runs["tiny_gspo"]
    assert sum(row["objective/zero_spread_group_fraction"] for row in plain) > 0, "without it some groups have no spread"


def test_the_tool_is_called(runs):
    """Conversations in a sandbox: some responses call it, none lost its environment, and only sampled tokens train."""
    for row in runs["tiny_tir"]:
        assert 0.3 < row["rollout/tool_calls_mean"] < 2 and 1 < row["rollout/turns_mean"] < 3
        assert row["rollout/environment_fault_fraction"] == 0 and row["rollout/observation_tokens_mean"] > 1
        assert row["learner/tokens"] == row["rollout/tokens"], "no verdict is missing, and what the tool wrote is not counted"
        assert row["objective/rollout_mismatch_mean"] < 1e-4, "the learner sees the ids that the engine sampled after"


def kept(rows: list[dict]) -> list[dict]:
    return [{"step": row["step"]} | {key: round(row[key], 6) for key in (*KEPT, *OPTIONAL) if key in row} for row in rows]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        recorded = {name: kept(rows) for name, rows in train(CommandLine(Path(folder)), sys.argv[1:] or RECIPES).items()}
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    GOLDEN.write_text(json.dumps({name: (golden | recorded)[name] for name in RECIPES}, indent=1) + "\n")
