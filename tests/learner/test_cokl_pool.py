"""Reference samples on a local Ray: kept and handed out by the buffer's actor, fetched by the learner's ranks."""

from __future__ import annotations

import dataclasses

import cokl_world
import learner_world as world
import numpy as np
import pytest

from akl_dist.cluster.gather import fetch, gather, store
from akl_dist.cokl.pool import BufferPool
from akl_dist.cokl.stage import Anchors, WithReferenceSamples
from akl_dist.contract.records import (
    JudgedArrays,
    JudgedGroup,
    Prompt,
    ReferenceArrays,
    ReferenceGroup,
    RolloutArrays,
    RolloutGroup,
    Status,
    Verdict,
)
from akl_dist.learner.pool import LearnerPool, LearnerSettings

pytestmark = pytest.mark.stack
DRAWN_WITH = {"model": "m"}


def make_buffer(folder, name: str) -> BufferPool:
    return BufferPool(run_id=name, folder=folder, drawn_with=DRAWN_WITH, options={"num_cpus": 0}, timeout_s=60.0)


def drawn(prompts: list[Prompt]):
    """Three responses of 4 tokens to each prompt, in the object store; the second is wrong."""
    rng = np.random.default_rng(2)
    rollouts, judged, reference = [], [], []
    for prompt in prompts:
        tokens = rng.integers(0, world.VOCAB, 12).astype(np.int32)
        logp, flags = (-rng.random(12)).astype(np.float32), np.zeros(12, bool)
        rollouts.append(RolloutGroup(prompt, (4, 4, 4), ("stop",) * 3, 0, "e", store(RolloutArrays(tokens, logp))))
        verdicts = tuple(Verdict(status) for status in (Status.OK, Status.WRONG, Status.OK))
        judged.append(JudgedGroup(prompt.prompt_id, verdicts, (1, 1, 1), store(JudgedArrays(("t",) * 3, ("1",) * 3, flags, flags))))
        reference.append(ReferenceGroup(prompt.prompt_id, (0.0,) * 3, (0.0,) * 3, store(ReferenceArrays(logp, logp))))
    return rollouts, judged, reference


@pytest.fixture(scope="module")
def groups(local_ray):
    return cokl_world.training_groups(cokl_world.samples(), store)


@pytest.fixture(scope="module")
def buffer(groups, tmp_path_factory):
    folder = tmp_path_factory.mktemp("buffer")
    pool = make_buffer(folder, "first")
    assert pool.prompt_ids() == set()
    assert pool.add(*drawn([group.labelled.rollout.prompt for group in groups[:4]])) == 8
    pool.close()
    again = make_buffer(folder, "second")  # as a resumed run opens it
    yield again
    again.close()


def test_samples_outlive_the_actor_that_drew_them(buffer):
    assert buffer.prompt_ids() == {f"p/{n}" for n in range(4)}
    first, second = buffer.take(["p/3", "p/9", "p/0"])
    assert (first.prompt_id, second.prompt_id, second.response_lengths, second.drawn) == ("p/3", "p/0", (4, 4), 3)
    arrays = fetch(second.arrays, timeout_s=30.0, stage="cokl", what="samples")
    tokens = np.random.default_rng(2).integers(0, world.VOCAB, 12)
    assert arrays.token_ids.tolist() == [*tokens[:4], *tokens[8:]] and (arrays.seq_logp < 0).all()


@pytest.mark.parametrize("prompts", ["same", "anchor_dataset"])
def test_the_learner_trains_with_them(buffer, groups, tmp_path, prompts):
    world.build_model(tmp_path / "model")
    buffer.prompt_ids()
    cokl = dataclasses.replace(cokl_world.COKL, estimator="reference_buffer", prompts=prompts)
    settings = LearnerSettings(
        model_path=str(tmp_path / "model"), dtype="float32", attention="sdpa", device="cpu", seed=0, temperature=world.TEMPERATURE,
        learner=dataclasses.replace(world.LEARNER, timeout_s=60.0), failures=str(tmp_path / "failures"),
        objective=dataclasses.replace(world.OBJECTIVE, cokl=cokl))
    learner = LearnerPool(run_id=prompts, settings=settings, actor_options=[{"num_cpus": 0.5}] * 2, max_staleness=0,
                          current_version=lambda: 0)
    anchors = None
    if prompts == "anchor_dataset":
        anchors = Anchors([group.labelled.rollout.prompt for group in groups[:4]], seed=0, per_step=3)
    try:
        gather(learner.ready(), timeout_s=120.0, stage="learner", doing="starting")
        update = WithReferenceSamples(learner, buffer, anchors).update(groups, step=1, kl_coefficient=1.0)
    finally:
        learner.close()
    assert update.optimizer_steps == 1 and all(np.isfinite(value) for value in update.metrics.values())
    # of six prompts four were sampled, two correct responses each; of the anchors three take part in a step
    expected = (4, 2) if anchors is None else (3, 0)
    assert (update.metrics["objective/cokl_prompts"], update.metrics["objective/cokl_skipped_prompts"]) == expected
    assert update.metrics["objective/cokl_divergence"] > 0
