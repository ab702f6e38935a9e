"""The learner's pool on a local Ray: two ranks, each fetching its own groups; errors arrive as raised."""

from __future__ import annotations

import dataclasses

import learner_world as world
import numpy as np
import pytest
import ray

from akl_dist.cluster.gather import fetch, fetch_all, gather, store
from akl_dist.contract.errors import ActorDied, NonFiniteLoss, StaleRollout
from akl_dist.contract.records import (
    JudgedGroup,
    LabelledGroup,
    Prompt,
    ReferenceArrays,
    ReferenceGroup,
    RoleArrays,
    RolloutArrays,
    RolloutGroup,
    Status,
    TrainingGroup,
    Verdict,
)
from akl_dist.learner.pool import LearnerPool, LearnerSettings

pytestmark = pytest.mark.stack


def training_groups(samples, *, policy_version=0) -> list[TrainingGroup]:
    """The samples as records whose arrays lie in the object store."""
    groups = []
    for g in range(1 + max(g for g, _ in samples)):
        members = [samples[key] for key in sorted(samples) if key[0] == g]
        join = np.concatenate
        rollout = RolloutGroup(
            Prompt(f"test/{g}", "test", "", tuple(members[0].prompt_ids.tolist()), ""), tuple(len(m.response_ids) for m in members),
            ("stop",) * len(members), policy_version, "rollout/test/0",
            store(RolloutArrays(join([m.response_ids for m in members]), join([m.rollout_logp for m in members]))))
        zeros = (0.0,) * len(members)
        reference = ReferenceGroup(f"test/{g}", zeros, zeros, store(ReferenceArrays(
            join([m.ref_logp for m in members]), join([m.ref_logp for m in members]),
            hidden=join([m.ref_rows["hidden"] for m in members]))))
        judged = JudgedGroup(f"test/{g}", (Verdict(Status.OK),) * len(members), (0,) * len(members), None)
        labelled = LabelledGroup(rollout, judged, reference, tuple(int(m.answer_mask.sum()) for m in members), (0,) * 8,
                                 store(RoleArrays(join([m.answer_mask for m in members]))))
        groups.append(TrainingGroup(labelled, tuple(m.advantage for m in members), tuple(m.trains for m in members)))
    return groups


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pool")
    world.build_model(folder / "model")
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    settings = LearnerSettings(
        model_path=str(folder / "model"), dtype="float32", attention="sdpa", device="cpu",
        learner=dataclasses.replace(world.LEARNER, timeout_s=60.0), objective=world.OBJECTIVE, temperature=world.TEMPERATURE,
        seed=0, failures=str(folder / "failures"))
    pool = LearnerPool(run_id="test", settings=settings, actor_options=[{"num_cpus": 0.5}] * 2, max_staleness=1,
                       current_version=lambda: 1)
    try:
        gather(pool.ready(), timeout_s=120.0, stage="learner", doing="starting")
        yield pool
    finally:
        pool.close()
        ray.shutdown()


def test_update_changes_the_weights(pool):
    assert list(pool.ranks) == ["learner/test/0", "learner/test/1"]
    before, samples = pool.parameters_checksum(), world.make_samples()
    update = pool.update(training_groups(samples), step=1)
    tokens = sum(len(s.response_ids) for s in samples.values() if s.trains)
    assert update.optimizer_steps == 1 and update.metrics["learner/tokens"] == tokens
    expected = -sum(s.advantage * len(s.response_ids) for s in samples.values() if s.trains) / tokens
    assert update.metrics["objective/policy_loss"] == pytest.approx(expected, rel=1e-5)
    assert pool.parameters_checksum() != before
    assert pool.ping() == {"learner/test/0": 1, "learner/test/1": 1}


def test_stale_groups_are_refused(pool):
    groups = training_groups(world.make_samples(), policy_version=-1)
    with pytest.raises(StaleRollout, match="version -1 at version 1"):
        pool.update(groups, step=2)
    with pytest.raises(StaleRollout, match="none ahead"):
        pool.update(training_groups(world.make_samples(), policy_version=2), step=2)


def test_non_finite_loss_reaches_the_driver_as_raised(pool):
    before = pool.parameters_checksum()
    with pytest.raises(NonFiniteLoss, match=r"\(4, 1\)"):
        pool.update(training_groups(world.poisoned(world.make_samples())), step=3)
    assert pool.parameters_checksum() == before


def test_buckets_and_probe_for_the_weight_sync(pool):
    names = [info.name for info in ray.get(pool.ranks["learner/test/0"].sync_manifest.remote(), timeout=30)]
    refs = {name: rank.gather_bucket.remote(names[:2]) for name, rank in pool.ranks.items()}
    results = gather(refs, timeout_s=30.0, stage="weight_sync", doing="gathering")
    assert results["learner/test/1"] is None
    bucket = fetch(results["learner/test/0"][0], timeout_s=10.0, stage="weight_sync", what="bucket")
    assert bucket[names[0]][0] == "float32" and bucket[names[0]][1].shape == (world.VOCAB, 32)
    refs = {name: rank.probe_logprobs.remote([[1, 2, 3]]) for name, rank in pool.ranks.items()}
    first, second = gather(refs, timeout_s=30.0, stage="weight_sync", doing="probing").values()
    assert first[0].shape == (2,)
    assert second is None, "one copy is enough"


def test_entropies_come_back_in_the_groups_order(pool):
    groups = [group.labelled.rollout for group in training_groups(world.make_samples())]
    before = pool.parameters_checksum()
    def entropies(order):
        handles = pool.entropies([groups[index] for index in order])
        return fetch_all(handles, timeout_s=10.0, stage="learner", what="entropies")
    first, backwards = entropies(range(len(groups))), entropies(range(len(groups))[::-1])
    for group, one, other in zip(groups, first, backwards[::-1], strict=True):
        assert one.entropy.shape == (group.num_tokens,) and (one.entropy > 0).all()
        np.testing.assert_allclose(one.entropy, other.entropy, atol=1e-5)
    assert pool.parameters_checksum() == before


def test_a_dead_rank_is_named(pool):
    """Last: it ends one rank's process."""
    ray.kill(pool.ranks["learner/test/1"])
    with pytest.raises(ActorDied, match="learner/test/1"):
        pool.update(training_groups(world.make_samples()), step=4)
