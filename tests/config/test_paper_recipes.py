"""The shipped recipes hold the papers' numbers, and every twin keeps its recipe's objective."""

from __future__ import annotations

import pytest

from akl_dist.config import typed
from akl_dist.config.compose import compose, group_choices
from akl_dist.config.schema import Config
from akl_dist.config.validate import not_run_yet, validate, warnings

ALL = group_choices()["exp"]
RECIPES = ("akl_72b", "akl_32b", "akl_14b", "akl_7b", "ctpo_14b", "ctpo_4b", "cokl_4b", "drpo_30b_a3b", "drpo_4b", "grpo", "gspo",
           "dapo", "ppo")
TWINS = ("akl", "ctpo", "drpo", "grpo", "gspo", "dapo", "cispo", "spo", "dppo", "rloo", "reinforce_pp", "ppo", "cokl")

CTPO = {"rollout.prompts_per_step": 512, "rollout.group_size": 8, "learner.updates_per_step": 16, "learner.lr": 1e-6, "steps": 305,
        "data.max_prompt_tokens": 16384, "rollout.max_response_tokens": 8192, "rollout.temperature": 1.0,
        "objective.policy_loss": "ctpo", "objective.anchor": "old", "objective.normalize_std": True,
        "objective.kl.beta_reasoning": 0, "objective.kl.beta_answer": 0, "objective.correction.kind": "tis",
        "objective.correction.level": "sequence", "objective.correction.high": 5.0, "model.path": "Qwen/Qwen3-14B",
        "data.recipe": "deepscaler"}
DRPO = {"rollout.prompts_per_step": 64, "rollout.group_size": 8, "learner.updates_per_step": 4, "learner.lr": 1e-6,
        "learner.weight_decay": 0.01, "objective.normalize_std": False, "objective.aggregation": "seq_mean_token_sum_norm",
        "objective.aggregation_norm": 8192, "rollout.max_response_tokens": 8192, "objective.anchor": "rollout",
        "objective.policy_loss_params": {"delta": 12.5}, "objective.kl.beta_answer": 0, "model.path": "Qwen/Qwen3-4B",
        "data.recipe": "dapo_math"}
NUMBERS = {
    "ctpo_14b": CTPO, "ctpo_4b": CTPO | {"model.path": "Qwen/Qwen3-4B"},
    "drpo_4b": DRPO, "drpo_30b_a3b": DRPO | {"model.path": "Qwen/Qwen3-30B-A3B"},
    "cokl_4b": {"objective.cokl.beta": 1e-3, "objective.cokl.clip": 0.2, "objective.cokl.estimator": "paper",
                "objective.cokl.reference_samples": 4, "rollout.group_size": 8, "model.path": "Qwen/Qwen3-4B"},
    "dapo": {"objective.policy_loss_params": {"clip_low": 0.2, "clip_high": 0.28}, "objective.overlong_buffer_tokens": 4096,
             "rollout.max_response_tokens": 20480, "rollout.prompts_per_step": 512, "rollout.group_size": 16,
             "learner.updates_per_step": 16, "learner.lr": 1e-6, "objective.aggregation": "token_mean",
             "data.recipe": "dapo_math"},
    "ppo": {"objective.advantage": "gae", "objective.gamma": 1.0, "objective.gae_lambda": 1.0, "critic.lr": 1e-5},
    "gspo": {"objective.policy_loss_params": {"clip_low": 3e-4, "clip_high": 4e-4}, "objective.aggregation": "seq_mean_token_mean"},
    "grpo": {"objective.policy_loss": "ppo", "objective.kl.strength": "equal", "objective.kl.beta_answer": 0.04},
    **{f"akl_{size}": {"model.path": f"Qwen/Qwen2.5-{size.upper()}-Instruct", "objective.kl.beta_reasoning": 1e-3,
                       "objective.kl.beta_answer": 4e-2, "objective.kl.direction_reasoning": "forward",
                       "objective.kl.direction_answer": "reverse", "data.recipe": "gsm8k_math"}
       for size in ("7b", "14b", "32b", "72b")},
}


def test_every_recipe_ships() -> None:
    assert set(RECIPES) == set(NUMBERS) and set(RECIPES) <= set(ALL)
    assert {f"tiny_{name}" for name in TWINS} <= set(ALL)


@pytest.mark.parametrize("exp", RECIPES)
def test_the_papers_numbers(exp: str) -> None:
    config = compose([f"+exp={exp}"])
    validate(config)
    assert {key: typed.value_of(config, key) for key in NUMBERS[exp]} == NUMBERS[exp]
    assert config.model.dtype == config.rollout.dtype == "bfloat16" and config.cluster.device == "cuda"


@pytest.mark.parametrize("name", TWINS)
def test_a_tiny_twin_runs_anywhere(name: str) -> None:
    config = compose([f"+exp=tiny_{name}"])
    validate(config)
    generated = ("multi_solution" if name == "cokl" else "tiny")
    assert (config.cluster.device, config.model.path, config.data.recipe) == ("cpu", "tiny", generated)
    assert not_run_yet(config) == [] and not any("updates_per_step" in text for text in warnings(config))
    large = {"drpo": "drpo_4b", "ctpo": "ctpo_14b", "akl": "akl_7b", "cokl": "cokl_4b"}.get(name, name)
    if large in ALL:
        same = ["policy_loss", "anchor", "advantage", "aggregation", "normalize_std", "correction"]
        twin: Config = compose([f"+exp={large}"])
        assert {key: getattr(config.objective, key) for key in same} == {key: getattr(twin.objective, key) for key in same}
        assert config.objective.cokl.estimator == twin.objective.cokl.estimator
        defaults = {"clip_low": 0.2, "clip_high": 0.2} if config.objective.policy_loss == "ppo" else {}
        assert defaults | dict(config.objective.policy_loss_params) == defaults | dict(twin.objective.policy_loss_params)
        assert bool(config.rollout.dynamic_sampling_rounds) == bool(twin.rollout.dynamic_sampling_rounds)
        assert bool(config.objective.overlong_buffer_tokens) == bool(twin.objective.overlong_buffer_tokens)


def test_a_mixture_of_experts_is_planned_only() -> None:
    (reason,) = not_run_yet(compose(["+exp=drpo_30b_a3b"]))
    assert "128 experts" in reason


@pytest.mark.parametrize(("objective", "delta"), [("drpo_paper", 12.5), ("drpo_geometry", 0.15), ("drpo_reciprocal", 0.08)])
def test_drpo_arms_differ_in_delta_alone(objective: str, delta: float) -> None:
    arm, unclipped = compose([f"objective={objective}"]).objective, compose(["objective=drpo_unclipped"]).objective
    assert arm.policy_loss == "drpo" and arm.policy_loss_params == {"delta": delta}
    for key in ("anchor", "advantage", "aggregation", "aggregation_norm", "normalize_std"):
        assert getattr(arm, key) == getattr(unclipped, key)


def test_the_unclipped_arm_is_the_surrogate_itself() -> None:
    """-A r at ratios from e^-20 to e^20, value and gradient: the limit of DRPO's formula for delta to infinity."""
    import torch

    from akl_dist.objective import policy_loss

    preset = compose(["objective=drpo_unclipped"]).objective
    x = torch.tensor([[-20.0, -1.0, 0.0, 3.0, 20.0]], dtype=torch.float64, requires_grad=True)
    for advantage in (1.5, -1.5):
        loss = policy_loss(preset.policy_loss, logp=x, anchor_logp=torch.zeros_like(x), advantages=torch.tensor([advantage]),
                           mask=torch.ones_like(x), **preset.policy_loss_params)
        (gradient,) = torch.autograd.grad(loss.sum(), x)
        torch.testing.assert_close(loss.detach(), -advantage * x.detach().exp(), rtol=1e-12, atol=0)
        torch.testing.assert_close(gradient, -advantage * x.detach().exp(), rtol=1e-12, atol=0)
        limit = policy_loss("drpo", logp=x, anchor_logp=torch.zeros_like(x), advantages=torch.tensor([advantage]),
                            mask=torch.ones_like(x), delta=1e30)
        torch.testing.assert_close(loss.detach(), limit.detach(), rtol=1e-9, atol=0)


def test_ctpo_parity_preset() -> None:
    paper, authors = compose(["objective=ctpo"]).objective, compose(["objective=ctpo_authors"]).objective
    assert paper.policy_loss_params["dual_clip"] is None and authors.policy_loss_params["dual_clip"] == 0.05
    assert (authors.correction.kind, authors.correction.level, authors.correction.high) == ("tis", "sequence", 5.0)
    assert {k: v for k, v in authors.policy_loss_params.items() if k != "dual_clip"} == {
        k: v for k, v in paper.policy_loss_params.items() if k != "dual_clip"}


def test_tiny_akl_is_tiny_by_its_methods_name() -> None:
    named, plain = (dict(typed.leaves(compose([f"+exp={exp}"]))) for exp in ("tiny_akl", "tiny"))
    assert {key for key in plain if plain[key] != named[key]} == {"experiment"}
