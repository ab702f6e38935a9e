"""The rules on policy losses and their parameters: borders, anchors, and agreement with what the objective accepts."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from akl_dist.config import choices
from akl_dist.config.schema import Config, ObjectiveConfig
from akl_dist.config.validate import validate
from akl_dist.config.validate_objective import objective_warnings
from akl_dist.contract.errors import ConfigError


def problems(**objective: Any) -> dict[str, str]:
    try:
        validate(dataclasses.replace(Config(), objective=dataclasses.replace(ObjectiveConfig(), **objective)))
    except ConfigError as error:
        return {problem.subject: str(problem) for problem in error.problems}
    return {}


def refused(loss: str, **params: Any) -> set[str]:
    found = problems(policy_loss=loss, policy_loss_params=params)
    return {key.removeprefix("objective.policy_loss_params.") for key in found}


@pytest.mark.parametrize(("loss", "fits", "breaks"), [
    ("ppo", {"clip_low": 0, "clip_high": 0.28, "dual_clip": 3}, {"clip_low": 1.1, "clip_high": -1, "dual_clip": 1}),
    ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4}, {"clip_low": None, "clip_high": "wide", "dual_clip": 3}),
    ("cispo", {"clip_low": None, "clip_high": 4}, {"clip_low": 10, "clip_high": None}),
    ("ctpo", {"clip_low": 2, "dual_clip": 0.05, "power": 0, "clip_space": "log"},
     {"clip_low": -1, "dual_clip": 0, "power": math.nan, "clip_space": "logs"}),
    ("ctpo_geomean", {"power": -0.5, "clip_space": "ratio", "clip_low": 0.2, "dual_clip": 3}, {"power": 3, "clip_high": math.inf}),
    ("ctpo", {"clip_space": "log", "clip_low": 1.5, "dual_clip": 0.5}, {"clip_space": "ratio", "clip_low": 1.5, "dual_clip": 0.5}),
    ("spo", {"epsilon": 0.2}, {"epsilon": 0, "delta": 1}),
    ("drpo", {"delta": 0.08}, {"delta": -0.1}),
    ("dppo_tv", {"delta_low": 0, "delta_high": 0.15, "max_ratio": 20}, {"delta_low": -1, "delta_high": True, "max_ratio": 0}),
    ("dppo_kl", {"delta_low": 0.05}, {"delta": 0.05}),
    ("reinforce", {"max_weight": None}, {"max_weight": 0}),
])  # fmt: skip
def test_borders(loss, fits, breaks):
    assert refused(loss) == refused(loss, **fits) == set()
    assert refused(loss, **breaks) == set(breaks) - {key for key, value in breaks.items() if value == "ratio"}


def test_anchor():
    for loss in choices.POLICY_LOSS_PARAMS:
        assert problems(policy_loss=loss, anchor="rollout") == {}
        assert problems(policy_loss=loss, anchor="old") == {}
        config = dataclasses.replace(Config(), objective=ObjectiveConfig(policy_loss=loss))
        warned = any("the policy that sampled" in sentence for sentence in objective_warnings(config))
        assert warned == (loss in ("drpo", "dppo_tv", "dppo_kl"))


VALUES = (None, -1, 0, 1e-4, 0.05, 0.2, 1, 1.5, 3, 20, "log", "ratio")
CASES = [(loss, name) for loss, params in choices.POLICY_LOSS_PARAMS.items() for name in params]


@pytest.mark.parametrize(("loss", "name"), CASES)
def test_what_validation_accepts_the_objective_accepts(loss, name):
    """And what it refuses raises there, too: in the log space for the prefix losses, and but for the bounds on `power`."""
    torch = pytest.importorskip("torch")
    from akl_dist.objective import policy_loss

    fits = choices.POLICY_LOSS_PARAMS[loss][name][0]
    zeros, ones = torch.zeros(1, 2), torch.ones(1, 2)
    for space in ({}, {"clip_space": "ratio"}) if "clip_space" in choices.POLICY_LOSS_PARAMS[loss] else ({},):
        for value in VALUES:
            within = fits(value) and not (space and name in choices.RATIO_SPACE and not choices.RATIO_SPACE[name][0](value))
            try:
                policy_loss(loss, logp=zeros, anchor_logp=zeros, advantages=ones, mask=ones, **{**space, name: value})
                raised = False
            except (ValueError, TypeError):
                raised = True
            assert raised == (not within) or (name == "power" and value in (3, 20)) or (name == "power" and space), value
