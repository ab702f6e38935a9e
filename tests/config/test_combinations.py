"""Every combination of the objective's parts either validates and then trains, or is refused with a reason before anything loads.

The axes are sampled from their whole product. Which combinations are refused is stated a second time here (``refused_keys``), from
the mathematics and not from the rules' code, so that a rule that is missing or too wide fails the test.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from typing import Any

import numpy as np
import pytest

from akl_dist.config import typed
from akl_dist.config.choices import CHOICES, POLICY_LOSS_PARAMS
from akl_dist.config.compose import compose
from akl_dist.config.resolve import resolved_objective
from akl_dist.config.schema import CoKLConfig, Config, CorrectionConfig, ObjectiveConfig
from akl_dist.config.validate import validate
from akl_dist.contract.errors import ConfigError

PRESETS = {"ppo": {"dual_clip": 3.0}, "cispo": {"clip_low": 0.2}, "ctpo_geomean": {"clip_space": "ratio", "clip_high": 0.2}}
"""Parameters beside the defaults for some losses, so that those paths are taken, too."""

AXES: dict[str, tuple[Any, ...]] = {
    "policy_loss": (*POLICY_LOSS_PARAMS, "weighted_reinforce"),
    "anchor": CHOICES["objective.anchor"],
    "advantage": CHOICES["objective.advantage"],
    "aggregation": CHOICES["objective.aggregation"],
    "correction": tuple(itertools.product(CHOICES["objective.correction.kind"], CHOICES["objective.correction.level"])),
    "estimator": CHOICES["objective.kl.estimator"],
    "direction_reasoning": CHOICES["objective.kl.direction_reasoning"],
    "direction_answer": CHOICES["objective.kl.direction_answer"],
    "state_weight": CHOICES["objective.kl.state_weight"],
    "placement": CHOICES["objective.kl.placement"],
    "kl_denominator": CHOICES["objective.kl.kl_denominator"],
    "beta": (0.0, 0.1),
    "cokl": (None, *CHOICES["objective.cokl.estimator"]),
    "roles": CHOICES["roles.rule"],
    "dynamic_sampling_rounds": (0, 2),
    "updates_per_step": (1, 2),
    "dtype": ("float32", "bfloat16"),  # of the engines; the learner's stays float32
}
SAMPLED, TRAINED = 2000, 40


def combinations(count: int) -> list[dict[str, Any]]:
    """The same ``count`` points of the product every time."""
    chooser = random.Random(0)
    return [{name: chooser.choice(values) for name, values in AXES.items()} for _ in range(count)]


def refused_keys(c: dict[str, Any]) -> set[str]:
    """Keys that the combination is refused for."""
    kind, level = c["correction"]
    correcting, refused = kind in ("tis", "icepop", "mis"), set()
    if correcting and c["anchor"] == "rollout" and c["policy_loss"] != "reinforce":
        refused.add("objective.correction.kind")  # pi/mu and old/mu: old/mu twice
    if not correcting and level == "sequence":
        refused.add("objective.correction.level")  # nothing reads it
    if c["state_weight"] == "none" and c["estimator"] != "sampled":
        refused.add("objective.kl.state_weight")
    if c["placement"] == "reward":
        refused |= {f"objective.kl.direction_{role}" for role in ("reasoning", "answer")
                    if c["beta"] > 0 and c[f"direction_{role}"] != "reverse"}
        refused |= {"objective.kl.estimator"} if c["estimator"] != "sampled" else set()
        refused |= {"objective.kl.kl_denominator"} if c["kl_denominator"] == "role" else set()
        refused |= {"objective.kl.state_weight"} if c["state_weight"] != "token" else set()
    if c["dynamic_sampling_rounds"] and c["advantage"] in ("reinforce_pp", "gae"):
        refused.add("rollout.dynamic_sampling_rounds")  # groups without spread train there
    return refused


@pytest.fixture(scope="module")
def base() -> Config:
    return compose(["+exp=tiny"])


def configured(base: Config, c: dict[str, Any]) -> Config:
    weighted = c["policy_loss"] == "weighted_reinforce"
    name = "reinforce" if weighted else c["policy_loss"]
    params = {"max_weight": 2.0} if weighted else PRESETS.get(name, {})
    kl = dataclasses.replace(
        base.objective.kl, beta_reasoning=c["beta"], beta_answer=c["beta"],
        **{key: c[key] for key in ("estimator", "direction_reasoning", "direction_answer", "state_weight", "placement",
                                   "kl_denominator")})
    kind, level = c["correction"]
    objective = ObjectiveConfig(
        policy_loss=name, policy_loss_params=params, kl=kl, correction=CorrectionConfig(kind=kind, level=level),
        cokl=CoKLConfig(beta=0.01, estimator=c["cokl"]) if c["cokl"] else CoKLConfig(),
        **{key: c[key] for key in ("anchor", "advantage", "aggregation")})
    half = c["dtype"] == "bfloat16"
    return dataclasses.replace(
        base, objective=objective, roles=dataclasses.replace(base.roles, rule=c["roles"]),
        rollout=dataclasses.replace(base.rollout, dtype=c["dtype"], dynamic_sampling_rounds=c["dynamic_sampling_rounds"]),
        learner=dataclasses.replace(base.learner, updates_per_step=c["updates_per_step"]),
        weight_sync=dataclasses.replace(base.weight_sync, max_gap=None, mean_gap=0.05) if half else base.weight_sync)


def refusals(config: Config) -> dict[str, str]:
    try:
        validate(config)
    except ConfigError as error:
        return {problem.subject: f"{problem.expected} {problem.remedy}" for problem in error.problems}
    return {}


def test_each_combination_validates_or_is_refused_with_the_reason(base: Config) -> None:
    seen = {name: set() for name in AXES}
    accepted = 0
    for c in combinations(SAMPLED):
        found = refusals(configured(base, c))
        assert set(found) == refused_keys(c), c
        for key, words in found.items():
            assert key in typed.hints() and len(words.split()) >= 8, f"{key}: {words!r} gives no reason"
        if not found:
            accepted += 1
            for name, value in c.items():
                seen[name].add(value)
    assert accepted > 200
    usable = {name: set(values) for name, values in AXES.items()}
    usable["correction"] -= {("auto", "sequence"), ("none", "sequence")}
    assert seen == usable, "every value of every axis is part of an accepted combination"


def batch_of(c: dict[str, Any], objective: ObjectiveConfig):
    """Three sequences of one micro-batch, one of them without a verdict, with its statistics; the policy has moved a little."""
    import torch

    from akl_dist.learner.batch import Sample, pack
    from akl_dist.objective import TopkReference, token_statistics
    from akl_dist.zero3.planning import Totals

    vocabulary, generator = 6, torch.Generator().manual_seed(7)
    samples = []
    for n, advantage in ((5, 1.2), (3, -0.7), (4, math.nan)):
        draw = np.random.default_rng(n)
        per_token = draw.normal(size=n).astype(np.float32) if c["advantage"] == "gae" else advantage
        samples.append(Sample(
            np.array([0]), draw.integers(0, vocabulary, n), draw.normal(-1.8, 0.3, n).astype(np.float32),
            draw.normal(-1.8, 0.3, n).astype(np.float32), {}, np.arange(n) >= n - 2, per_token, not math.isnan(advantage)))
    batch = pack([(0, i) for i in range(3)], samples)
    logits = torch.randn(12, vocabulary, generator=generator, requires_grad=True)
    ref = torch.log_softmax(torch.randn(12, vocabulary, generator=generator), -1)
    top = ref.topk(2, -1)
    target = ref.gather(-1, batch.targets[:, None])
    rest = (1 - top.values.exp().sum(-1) - torch.where((top.indices == batch.targets[:, None]).any(-1), 0.0, target[:, 0].exp()))
    kept = {"full": {"ref_logprobs": ref}, "sampled": {},
            "topk": {"topk": TopkReference(top.indices, top.values, rest.clamp(min=1e-9).log(), target[:, 0])}}
    statistics = token_statistics(logits, batch.targets, temperature=1.0, with_gradient_norms=True, **kept[objective.kl.estimator])
    old = None if c["updates_per_step"] == 1 else statistics.logp.detach() + 0.1 * torch.randn(12, generator=generator)
    return batch, statistics, logits, old, Totals(8, 2, 4)


def test_what_validates_trains(base: Config) -> None:
    """A finite loss, a finite gradient and finite metrics for a sample of the accepted combinations that holds every loss."""
    from akl_dist.learner.step import micro_batch_loss

    # Without the CoKL term, which is one of whole prompts and not of a micro-batch.
    accepted: list[dict[str, Any]] = [c | {"cokl": None} for c in combinations(SAMPLED) if not refused_keys(c)]
    chosen = accepted[:TRAINED] + [next(c for c in accepted if c["policy_loss"] == name) for name in AXES["policy_loss"]]
    for c in chosen:
        objective = resolved_objective(configured(base, c))
        batch, statistics, logits, old, totals = batch_of(c, objective)
        result = micro_batch_loss(batch, statistics, objective=objective, totals=totals, old_logp=old)
        result.loss.backward()
        gradient = logits.grad
        assert gradient is not None and bool(gradient.isfinite().all()) and bool(result.loss.isfinite()), c
        masking = c["correction"][0] in ("icepop", "mis")  # which may reject every token of so small a batch
        assert masking or bool(gradient[:8].any()), f"nothing trains: {c}"
        assert not bool(gradient[8:].any()), f"a response without a verdict trains: {c}"
        assert bool(result.sums.isfinite().all()) and bool(result.maxima.isfinite().all()), c


@pytest.mark.parametrize(("change", "key", "part"), [
    ({"advantage": "gae", "normalize_std": False}, "objective.normalize_std", "grpo or rloo"),
    ({"advantage": "reinforce_pp", "gamma": 0.99}, "objective.gamma", "objective.advantage=gae"),
    ({"gae_lambda": 0.95}, "objective.gae_lambda", "objective.advantage=gae"),
    ({"overlong_penalty": 0.5}, "objective.overlong_penalty", "objective.overlong_buffer_tokens"),
    ({"overlong_buffer_tokens": 65}, "objective.overlong_buffer_tokens", "rollout.max_response_tokens=64"),
])
def test_keys_that_nothing_reads(base: Config, change: dict[str, Any], key: str, part: str) -> None:
    found = refusals(dataclasses.replace(base, objective=dataclasses.replace(base.objective, **change)))
    assert list(found) == [key] and part in found[key]


def test_critic_keys_need_a_critic(base: Config) -> None:
    critic = dataclasses.replace(base.critic, lr=1e-4, clip=None, warmup_steps=3, max_grad_norm=2.0, whiten=False, path="tiny")
    assert set(refusals(dataclasses.replace(base, critic=critic))) == {
        f"critic.{field.name}" for field in dataclasses.fields(critic)}
    with_gae = dataclasses.replace(base.objective, advantage="gae", gamma=0.99, gae_lambda=0.95)
    assert refusals(dataclasses.replace(base, critic=critic, objective=with_gae)) == {}


def test_dynamic_sampling_needs_groups_to_draw(base: Config, tmp_path) -> None:
    (tmp_path / f"step_{base.steps:06d}.parquet").write_bytes(b"")
    for change, part in (({"group_size": 1}, "group of one"), ({"replay": str(tmp_path)}, "no others can be drawn")):
        rollout = dataclasses.replace(base.rollout, dynamic_sampling_rounds=1, **change)
        found = refusals(dataclasses.replace(base, rollout=rollout))
        assert list(found) == ["rollout.dynamic_sampling_rounds"] and part in found["rollout.dynamic_sampling_rounds"]
