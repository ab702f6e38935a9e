"""The plan names what the learner will minimise: the betas that are used, corrections resolved, every term that has a weight."""

from __future__ import annotations

import pytest

from akl_dist.cluster import preflight
from akl_dist.cluster.placement import layout
from akl_dist.cluster.plan_text import plan_text
from akl_dist.config.command_line import check_command_line
from akl_dist.config.compose import compose
from akl_dist.config.schema import Config


def composed(*overrides: str) -> Config:
    return compose(check_command_line(overrides).overrides)


def rows(*overrides: str) -> dict[str, str]:
    """The first table of the plan."""
    config = composed(*overrides)
    table = plan_text(config, layout(config)).split("\n\n")[1].splitlines()
    start = table[0].index("value")
    return {line[:start].strip(): line[start:] for line in table[2:]}


def test_the_default_experiment() -> None:
    found = rows("+exp=tiny")
    assert list(found) == ["model", "data", "verifier", "policy loss", "advantage", "rollout correction", "KL on reasoning tokens",
                           "KL on answer tokens", "KL estimator", "token roles"]
    assert found["policy loss"] == "ppo(default parameters), anchor old, token_mean"
    assert found["advantage"] == "grpo, divided by the group's standard deviation"
    assert (found["KL on reasoning tokens"], found["KL on answer tokens"]) == ("forward, beta 0.1", "reverse, beta 1")
    assert found["KL estimator"] == "full, state weight token" and found["rollout correction"] == "none (auto)"


@pytest.mark.parametrize(("overrides", "beta"), [
    (["objective/kl=uniform_forward"], "beta 1 (strength equal)"),
    (["objective/kl=uniform_forward_matched"], "beta f * 1 + (1 - f) * 0.1 (strength matched, f = share of answer tokens)"),
    (["objective/kl=uniform_forward", "objective.kl.strength=roles", "objective.kl.beta_answer=0.1"], "beta 0.1"),
])
def test_the_betas_that_are_used(overrides: list[str], beta: str) -> None:
    found = rows("+exp=tiny", *overrides)
    assert found["KL on reasoning tokens"] == found["KL on answer tokens"] == f"forward, {beta}"


@pytest.mark.parametrize("overrides", [
    ["+exp=ctpo_14b"], ["objective/kl=none"],
    ["objective/kl=uniform_forward", "objective.kl.beta_answer=0"],  # beta_reasoning is 1e-3, which strength equal does not read
])
def test_no_kl_is_one_line(overrides: list[str]) -> None:
    found = rows(*overrides)
    assert [found[key] for key in found if key.startswith("KL")] == ["none"] and "KL to the reference" in found


@pytest.mark.parametrize(("overrides", "row", "text"), [
    (["+exp=ctpo_14b"], "rollout correction", "tis of the sequence ratio, at most 5"),
    (["objective.correction.kind=mis", "objective.correction.low=0.5"], "rollout correction",
     "mis of the token ratio, at least 0.5, at most 2"),
    (["rollout.dtype=bfloat16"], "rollout correction", "tis of the token ratio, at most 2 (auto)"),
    (["+exp=ctpo_14b"], "policy loss",
     "ctpo(clip_low=0.025, clip_high=0.05, dual_clip=null, power=0.5, clip_space=log), anchor old, token_mean"),
    (["+exp=tiny_drpo"], "policy loss", "drpo(delta=12.5), anchor rollout, seq_mean_token_sum_norm(64)"),
    (["+exp=tiny_drpo"], "advantage", "grpo, not divided by the group's standard deviation"),
    (["+exp=tiny_ppo"], "advantage", "gae (gamma 1, lambda 1, whitened), critic tiny, lr 0.003, 3 steps of its own first"),
    (["+exp=tiny_reinforce_pp"], "advantage", "reinforce_pp"),
    (["+exp=tiny_cokl"], "CoKL", "beta 0.01, paper, 4 reference responses a prompt, clip 0.2, prompts same"),
    (["+exp=tiny_continual"], "CoKL", "beta 0.05, reference_buffer, 4 reference responses a prompt, ESS at least 0.5 n, prompts "
     "anchor_dataset"),
    (["+exp=tiny_dapo"], "overlong penalty", "up to 1 over the last 40 of 64 tokens"),
    (["objective.entropy_coef=0.01"], "entropy bonus", "0.01"),
    (["objective.kl.adaptive_target=0.1"], "adaptive betas", "towards 0.1 nats a token, horizon 100 steps"),
    ([], "KL estimator", "topk(20), state weight token"),
    (["objective.kl.kl_denominator=role"], "KL estimator", "topk(20), state weight token, over the tokens of its role"),
    (["objective/kl=uniform_k3"], "KL estimator", "sampled, state weight none"),
    (["objective/kl=uniform_reverse"], "KL estimator", "sampled, state weight token up to 2"),
    (["objective.kl.state_weight=cumulative", "objective.kl.max_weight=null"], "KL estimator",
     "topk(20), state weight cumulative, unbounded"),
    (["objective/kl=uniform_reverse", "objective.kl.placement=reward"], "KL estimator", "sampled, in the reward"),
])
def test_every_part_of_the_objective_is_named(overrides: list[str], row: str, text: str) -> None:
    assert rows(*overrides)[row] == text


def test_a_critic_from_the_hub_is_missing_here() -> None:
    def missing(*overrides: str) -> list[str]:
        config = composed("+exp=tiny", *overrides)
        return [item for item in preflight.lacking(config, layout(config)) if item.startswith("hub:")]

    assert missing("objective.advantage=gae") == missing("objective.advantage=gae", "critic.path=tiny") == []
    (item,) = missing("objective.advantage=gae", "critic.path=Qwen/Qwen3-4B")
    assert "critic's model Qwen/Qwen3-4B" in item
    same = missing("objective.advantage=gae", "model.path=Qwen/Qwen3-4B", "critic.path=Qwen/Qwen3-4B")
    assert len(same) == 1 and "hub: model Qwen/Qwen3-4B" in same[0]


def test_data_verifier_and_roles_name_what_differs() -> None:
    assert rows("+exp=tiny")["verifier"].strip() == "math" and rows("+exp=tiny")["token roles"].strip() == "majority"
    mixed = rows("data=math_code", "data.mixture.mbpp.weight=3", "rollout.max_response_tokens=512", "roles=tail",
                 "learner.max_tokens_per_micro_batch=4096", "reference.max_tokens_per_batch=4096")
    assert "mbpp" in mixed["data"] and "%" in mixed["data"] and mixed["verifier"].strip() == "code, math"
    assert mixed["token roles"].strip() == "majority (position tail, code_answer signature_and_return)"
    tool = rows("+exp=tiny_tir", "verify.terms={format: {weight: 0.1}}")
    assert tool["verifier"].strip() == "math + 0.1 format; conversations with python, at most 2 answers"
