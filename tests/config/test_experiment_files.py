"""A group chosen on the command line is what runs: experiments leave to groups what groups decide; sweeps compare one thing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import yaml

from akl_dist.config.command_line import check_command_line, sweep
from akl_dist.config.compose import compose, conf_dir
from akl_dist.config.schema import Config, KLConfig
from akl_dist.config.validate import validate, warnings

FILES = {file.stem: file for file in [*sorted((conf_dir() / "exp").glob("*.yaml")), conf_dir() / "tiny_base.yaml"]}
PRESET_KEYS = {"policy_loss", "policy_loss_params", "advantage", "anchor", "normalize_std", "aggregation"}
WITHOUT_KL = [name for name, file in FILES.items() if "override /objective/kl: none" in file.read_text()]


def preset_keys(text: str) -> set[str]:
    """Keys of an experiment's own body that would beat a preset of the command line."""
    objective = (yaml.safe_load(text) or {}).get("objective") or {}
    return PRESET_KEYS & set(objective)


def betas(text: str) -> dict[str, Any]:
    kl = ((yaml.safe_load(text) or {}).get("objective") or {}).get("kl") or {}
    return {key: value for key, value in kl.items() if key.startswith("beta_")}


def effective(kl: KLConfig) -> tuple[float, float]:
    return (kl.beta_answer if kl.strength == "equal" else kl.beta_reasoning, kl.beta_answer)


@pytest.mark.parametrize("name", FILES)
def test_no_body_pins_what_a_preset_decides(name: str) -> None:
    text = FILES[name].read_text()
    assert preset_keys(text) == set()
    assert all(value > 0 for value in betas(text).values()), "no KL is the group's choice: objective/kl: none"


def test_the_check_sees_a_pinned_key() -> None:
    assert preset_keys("objective: {anchor: old, kl: {beta_answer: 0}}") == {"anchor"}
    assert betas("objective: {anchor: old, kl: {beta_answer: 0}}") == {"beta_answer": 0}


def test_a_preset_replaces_ppo_on_the_ppo_recipes() -> None:
    for exp in ("ppo", "tiny_ppo"):
        assert compose([f"+exp={exp}"]).objective.advantage == "gae"
        config = compose([f"+exp={exp}", "objective=grpo"])
        assert (config.objective.advantage, config.objective.policy_loss) == ("grpo", "ppo")


@pytest.mark.parametrize("preset", ["drpo_paper", "drpo_unclipped", "dppo_tv", "dppo_kl"])
def test_presets_with_another_anchor_hold_on_the_large_recipe(preset: str) -> None:
    config = compose(["+exp=akl_7b", f"objective={preset}"])
    validate(config)
    assert config.objective.anchor == "rollout" and not any("objective.anchor" in note for note in warnings(config))


@pytest.mark.parametrize("name", WITHOUT_KL)
def test_an_experiment_without_a_kl_takes_the_one_of_the_command_line(name: str) -> None:
    assert effective(compose([f"+exp={name}"]).objective.kl) == (0, 0)
    for arm in ("akl", "uniform_k3"):
        chosen = compose([f"+exp={name}", f"objective/kl={arm}"])
        assert chosen.objective.kl == compose([f"objective/kl={arm}"]).objective.kl
        assert min(effective(chosen.objective.kl)) > 0


def test_which_experiments_have_no_kl() -> None:
    assert set(WITHOUT_KL) == {
        "cokl_4b", "ctpo_14b", "dapo", "drpo_4b", "gspo", "ppo", "sweep_policy_loss", "tiny_cispo", "tiny_cokl", "tiny_continual",
        "tiny_ctpo", "tiny_dapo", "tiny_dppo", "tiny_drpo", "tiny_gspo", "tiny_reinforce_pp", "tiny_rloo", "tiny_spo",
        "tiny_tir"}


@pytest.mark.parametrize(("exp", "beta"), [("grpo", 0.04), ("tiny_grpo", 0.2), ("tiny_uniform_reverse", 0.2)])
def test_one_strength_is_one_beta(exp: str, beta: float) -> None:
    kl = compose([f"+exp={exp}"]).objective.kl
    assert (kl.strength, *effective(kl)) == ("equal", beta, beta)


def jobs(exp: str) -> list[Config]:
    configs = [compose(job) for job in sweep(check_command_line(["-m", f"+exp={exp}"]), stamp="T")]
    return [config for config in configs if config.seed == 0]


def test_the_direction_sweep_changes_the_direction_alone() -> None:
    arms = [config.objective.kl for config in jobs("sweep_kl_direction")]
    directions = {(kl.direction_reasoning, kl.direction_answer) for kl in arms}
    assert len(directions) == len(arms) == 4
    alike = {dataclasses.replace(kl, direction_reasoning="forward", direction_answer="forward") for kl in arms}
    assert len(alike) == 1 and effective(alike.pop()) == (1.0, 1.0)


def test_the_loss_sweep_divides_token_sums_by_the_longest_response() -> None:
    sums = [config for config in jobs("sweep_policy_loss") if config.objective.aggregation == "seq_mean_token_sum_norm"]
    assert len(sums) == 3 and all(config.objective.aggregation_norm == config.rollout.max_response_tokens == 64 for config in sums)


@pytest.mark.parametrize("preset", ["dr_grpo", "drpo_paper", "drpo_geometry", "drpo_reciprocal", "drpo_unclipped"])
def test_token_sums_follow_the_response_length_unless_told_otherwise(preset: str) -> None:
    assert compose([f"objective={preset}", "rollout.max_response_tokens=8192"]).objective.aggregation_norm == 8192
    assert compose([f"objective={preset}", "objective.aggregation_norm=100"]).objective.aggregation_norm == 100


def test_files_that_bring_a_sweep_say_when_it_is_read() -> None:
    bringing = {name for name, file in FILES.items() if "hydra" in yaml.safe_load(file.read_text())}
    assert bringing == {name for name in FILES if name.startswith("sweep_")}
    for name in bringing:
        header = FILES[name].read_text().partition("defaults:")[0]
        assert f"-m +exp={name}" in header and "without -m the sweep below is not read" in header
