"""What is refused of a CoKL term, each with its reason, and that every variant that makes sense composes."""

from __future__ import annotations

import pytest

from akl_dist.config.compose import compose
from akl_dist.config.validate import validate, warnings
from akl_dist.contract.errors import ConfigError

BASE = ["+exp=tiny", "objective.kl.beta_reasoning=0", "objective.kl.beta_answer=0", "objective.cokl.beta=0.1"]
ANCHORED = ["objective.cokl.prompts=anchor_dataset", "objective.cokl.estimator=reference_buffer"]


def problems(*overrides: str) -> str:
    try:
        validate(compose(list(overrides)))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["objective.cokl.estimator=paper", "objective.cokl.clip=0.5", "objective.cokl.reference_samples=1"],
        ["objective.cokl.estimator=reference_buffer", "objective.cokl.min_ess_fraction=0", "learner.updates_per_step=2"],
        ["objective.cokl.length_normalize=true"],
        [*ANCHORED, "data=continual"],
    ],
)
def test_variants_that_make_sense(overrides):
    assert problems(*BASE, *overrides) == ""


@pytest.mark.parametrize("experiment", ["tiny_cokl", "tiny_continual"])
def test_experiments(experiment):
    assert problems(f"+exp={experiment}") == ""
    assert not [line for line in warnings(compose([f"+exp={experiment}"])) if "cokl" in line]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["objective.cokl.beta=0", "objective.cokl.estimator=paper"], "objective.cokl.estimator.*objective.cokl.beta above 0"),
        (["objective.cokl.beta=0", "objective.cokl.clip=0.3"], "objective.cokl.clip.*nothing reads it"),
        (["objective.cokl.clip=0.3"], "objective.cokl.clip.*objective.cokl.estimator=paper"),
        (["objective.cokl.reference_samples=8"], "objective.cokl.reference_samples.*paper or reference_buffer"),
        (["objective.cokl.estimator=paper", "objective.cokl.min_ess_fraction=0.1"], "min_ess_fraction.*group or reference_buffer"),
        (["objective.cokl.estimator=reference_buffer", "objective.cokl.reference_samples=1"], "reference_samples.*at least 2"),
        (["rollout.group_size=1"], "objective.cokl.estimator.*correct responses of a group"),
        (["objective.cokl.prompts=anchor_dataset", "data=continual"], "objective.cokl.estimator.*which no step samples"),
        (ANCHORED, "data.anchor_path.*no retained task"),
        (["data.anchor_path=README.md"], "data.anchor_path.*nothing reads it"),
        ([*ANCHORED, "data.anchor_path=/no/such/file.jsonl"], "data.anchor_path.*existing file"),
        (["objective.cokl.estimator=papr"], "objective.cokl.estimator.*paper"),
        (["objective.cokl.beta=-1"], "objective.cokl.beta"),
        (["data=multi_solution", "data.name=org/set"], "data.name.*generated"),
    ],
)
def test_refusals(overrides, reason):
    import re

    found = problems(*BASE, *overrides)
    assert re.search(reason, found, re.DOTALL), found


def test_a_replay_has_no_engines_to_sample_the_reference(tmp_path):
    (tmp_path / "step_000001.parquet").write_bytes(b"")
    replay = f"rollout.replay={tmp_path}"
    assert "no engines" in problems(*BASE, replay, "objective.cokl.estimator=paper")
    assert "objective.cokl" not in problems(*BASE, replay)


def test_beside_a_full_kl_term_a_warning():
    assert [line for line in warnings(compose(["+exp=tiny", "objective.cokl.beta=0.1"])) if "anchors wrong responses" in line]
    assert not [line for line in warnings(compose(BASE)) if "anchors wrong responses" in line]
