"""The critic's pool on a local Ray: two ranks, each fetching its own groups; advantages lie in the object store."""

from __future__ import annotations

import dataclasses

import critic_world as world
import numpy as np
import pytest
import ray
from critic_groups import training_group

from akl_dist.cluster.gather import fetch, gather, store
from akl_dist.contract.errors import NonFiniteLoss
from akl_dist.contract.records import RolloutArrays
from akl_dist.critic.pool import CriticPool, CriticSettings

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    folder = tmp_path_factory.mktemp("critic_pool")
    world.learner_world.build_model(folder / "model")
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    settings = CriticSettings(
        model_path=str(folder / "model"), dtype="float32", attention="sdpa", device="cpu", seed=0,
        learner=dataclasses.replace(world.LEARNER, timeout_s=60.0), failures=str(folder / "failures"), clip=0.2, gamma=1.0, lam=1.0,
        whiten=True)
    pool = CriticPool(run_id="test", settings=settings, actor_options=[{"num_cpus": 0.5}] * 2)
    try:
        gather(pool.ready(), timeout_s=120.0, stage="critic", doing="starting")
        yield pool
    finally:
        pool.close()
        ray.shutdown()


def groups(reward: float = 1.0):
    """Four groups of two responses (2 and 3 tokens); in each the first earns ``reward``, the second nothing, and the last group
    has no verdict."""
    arrays = store(RolloutArrays(np.array([3, 4, 5, 6, 7], np.int32), np.zeros(5, np.float32)))
    return [training_group(f"p{index}", lengths=(2, 3), advantages=(reward, 0.0), trains=(index != 3,) * 2, arrays=arrays)
            for index in range(4)]


def test_every_token_gets_an_advantage(pool):
    """A new critic values every state 0 and lam is 1, so a response's tokens all have its reward: 6 ones and 9 zeros."""
    before = pool.parameters_checksum()
    appraisal = pool.appraise(groups(), step=1)
    values = [fetch(g.token_advantages, timeout_s=10.0, stage="critic", what="advantages") for g in appraisal.groups[:3]]
    assert [one.advantages.tolist() for one in values] == [[1, 1, 0, 0, 0]] * 3
    assert appraisal.groups[3].token_advantages is None
    mean, deviation = 0.4, (15 * 0.4 * 0.6 / 14) ** 0.5
    assert appraisal.groups[0].advantage_mean == pytest.approx(mean)
    assert appraisal.groups[0].advantage_deviation == pytest.approx(deviation, rel=1e-6)
    assert appraisal.groups[1].advantages == pytest.approx(((1 - mean) / deviation, -mean / deviation), rel=1e-6)
    assert appraisal.metrics["critic/return_mean"] == pytest.approx(0.4)
    assert pool.parameters_checksum() != before and pool.ping() == {"critic/test/0": 1, "critic/test/1": 1}


def test_non_finite_loss_reaches_the_driver_as_raised(pool):
    before = pool.parameters_checksum()
    with pytest.raises(NonFiniteLoss, match="value loss"):
        pool.appraise(groups(float("inf")), step=2)
    assert pool.parameters_checksum() == before
