"""Covers the pool's own work on a real Ray cluster, with a stand-in for vLLM: assignment, order, names, failures."""

from __future__ import annotations

import os
import sys
import time

import numpy as np
import pytest

pytestmark = pytest.mark.stack

import akl_dist.rollout.pool as pool_module  # noqa: E402
from akl_dist.cluster.gather import Part, fetch, fetch_all, gather  # noqa: E402
from akl_dist.contract.errors import ActorDied, DeadlineExceeded, ModelError, RunError  # noqa: E402
from akl_dist.contract.records import Prompt, RolloutArrays, Sampling, Turns  # noqa: E402
from akl_dist.rollout.launch import EngineSettings  # noqa: E402
from akl_dist.rollout.pool import RolloutActor, RolloutPool  # noqa: E402
from akl_dist.rollout.sampler import SampledGroup  # noqa: E402

SETTINGS = EngineSettings(model_path="unused", dtype="float32", max_model_len=32)
SAMPLING = Sampling(group_size=2, temperature=1.0, max_response_tokens=4, end_ids=(1,), seed_key=(0,))


class StandInEngine:
    """Two responses per prompt: (prompt id, 1) and (prompt id, prompt id, 1), the last prompt's first, each in a list of its own.
    Prompt ids 66, 67, 68 and 71 fail in their ways; 69 lets a second pass, and others with it."""

    policy_version = 5

    def __init__(self):
        self.effective = {"dtype": "float32"}

    def stream(self, prompts, sampling, every_s):
        for index, prompt in reversed(list(enumerate(prompts))):
            if prompt.token_ids == (66,):
                raise ModelError("engine", got="a", expected="b", remedy="c", stage="rollout")
            if prompt.token_ids == (67,):
                time.sleep(1.0)  # what was given out before has left the process
                os._exit(1)
            if prompt.token_ids == (68,):
                time.sleep(30)
            if prompt.token_ids == (69,):
                time.sleep(1.0)
            if prompt.token_ids == (71,):
                continue
            (first,) = prompt.token_ids
            ids = np.array([first, 1, first, first, 1], np.int32)
            arrays = RolloutArrays(ids, np.full(5, -0.5, np.float32))
            turns = (Turns((2,)), Turns((1, 1, 1), calls=1)) if first == 70 else ()
            yield [(index, SampledGroup(arrays, (2, 3), ("stop", "stop"), turns))]

    def close(self):
        pass


class StandInActor(RolloutActor):
    def start(self):
        if self._settings.model_path == "bad":
            raise ModelError("model folder bad", got="nothing", expected="a model", remedy="", stage="rollout")
        self._engine = StandInEngine()
        return {**self._engine.effective, "environment": dict(os.environ)}


@pytest.fixture
def make(local_ray, monkeypatch):
    local_ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr(pool_module, "RolloutActor", StandInActor)
    monkeypatch.setattr(pool_module, "CLOSE_TIMEOUT_S", 1.0)
    pools = []

    def build(count, *, settings=SETTINGS, timeout_s=60.0, **options):
        run_id = f"test{len(pools)}"
        actor_options = [{"num_cpus": 0, **options} for _ in range(count)]
        pools.append(RolloutPool(run_id=run_id, settings=settings, actor_options=actor_options, timeout_s=timeout_s))
        return pools[-1]

    yield build
    for pool in pools:
        pool.close()


def prompts(*ids):
    return [Prompt(f"p/{i}", "p", "", (i,), "") for i in ids]


def test_prompts_are_dealt_in_turn_and_come_back_in_order(make):
    pool = make(2, runtime_env={"env_vars": {"OMP_NUM_THREADS": "7", "MY_SETTING": "1"}})
    started = gather(pool.ready(), timeout_s=60, stage="rollout", doing="starting")
    assert list(started) == ["rollout/test0/0", "rollout/test0/1"] == list(pool.engines)
    environment = started["rollout/test0/0"]["environment"]
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE" and environment["MY_SETTING"] == "1"
    assert environment["OMP_NUM_THREADS"] == "7", "what the caller sets goes first"
    assert pool.ping() == {"rollout/test0/0": 5, "rollout/test0/1": 5}

    groups = pool.sample(prompts(11, 12, 13, 14, 15), SAMPLING)
    assert [group.prompt.prompt_id for group in groups] == ["p/11", "p/12", "p/13", "p/14", "p/15"]
    assert [group.engine[-1] for group in groups] == ["0", "1", "0", "1", "0"]
    assert {group.policy_version for group in groups} == {5}
    for group in groups:
        assert isinstance(group.arrays, Part), "arrays do not pass the driver"
        arrays = fetch(group.arrays, timeout_s=30, stage="rollout", what="arrays")
        assert arrays.token_ids.tolist() == [group.prompt.token_ids[0], 1, *[group.prompt.token_ids[0]] * 2, 1]
        assert group.response_lengths == (2, 3) and group.num_tokens == len(arrays.logp)
    assert set(pool.busy_s) == set(pool.engines) and min(pool.busy_s.values()) >= 0

    assert [g.prompt.prompt_id for g in pool.sample(prompts(11), SAMPLING)] == ["p/11"]  # fewer prompts than engines
    assert pool.busy_s["rollout/test0/1"] == 0.0
    assert pool.sample([], SAMPLING) == []


def test_groups_come_while_others_are_sampled(make):
    """The second engine's only prompt takes a second. Of the first engine's two, the last one ends first."""
    pool = make(2)
    gather(pool.ready(), timeout_s=60, stage="rollout", doing="starting")
    came, begin = [], time.monotonic()
    groups = pool.sample(prompts(11, 69, 70), SAMPLING, lambda some: came.append((some, time.monotonic() - begin)))
    assert [group.prompt.prompt_id for group in groups] == ["p/11", "p/69", "p/70"]
    order = [group for some, _ in came for group in some]
    assert [group.prompt.prompt_id for group in order] == ["p/70", "p/11", "p/69"]
    assert came[1][1] < 0.9 < came[2][1], "two groups were there before the third had ended"
    assert {id(group) for group in order} == {id(group) for group in groups}, "the very groups of the result"
    assert groups[2].turns == (Turns((2,)), Turns((1, 1, 1), calls=1)) and groups[0].turns == ()
    assert 0.9 < pool.busy_s["rollout/test0/1"] < 5 and pool.busy_s["rollout/test0/0"] < 0.9


def test_an_engine_that_dies_in_the_middle_is_named(make):
    pool, came = make(2), []
    with pytest.raises(ActorDied, match="rollout/test0/1"):
        pool.sample(prompts(11, 67, 12, 14), SAMPLING, came.extend)
    assert "p/14" in [group.prompt.prompt_id for group in came], "it had delivered a group before"


def test_failures_name_the_engine(make):
    pool = make(2)
    with pytest.raises(ModelError) as error:
        pool.sample(prompts(1, 66), SAMPLING)
    assert error.value.actor == "rollout/test0/1"
    with pytest.raises(ActorDied, match="rollout/test0/0"):
        pool.sample(prompts(67, 1), SAMPLING)


def test_a_draw_after_one_that_was_given_up(make):
    """Calls of the old draw are still queued when the new one begins; none of their groups gets into it."""
    pool = make(2)
    for end in ("consumer", "engine", "consumer"):
        def finished(groups, fails=end == "consumer"):
            if fails:
                raise ZeroDivisionError("of the consumer")

        with pytest.raises((ZeroDivisionError, ModelError)):
            pool.sample(prompts(66, 66, *range(100, 130)) if end == "engine" else prompts(*range(100, 130)), SAMPLING, finished)
        groups = pool.sample(prompts(*range(200, 231)), SAMPLING)
        assert [group.prompt.prompt_id for group in groups] == [f"p/{i}" for i in range(200, 231)]
        arrays = fetch_all([group.arrays for group in groups], timeout_s=30, stage="rollout", what="arrays")
        assert [int(one.token_ids[0]) for one in arrays] == list(range(200, 231))


def test_an_engine_that_leaves_a_prompt_out_is_named(make):
    pool = make(2)
    with pytest.raises(RunError, match="groups of 5 prompts: got 4") as error:
        pool.sample(prompts(1, 2, 3, 71, 5), SAMPLING)
    assert error.value.actor == "rollout/test0/1"


def test_a_hanging_engine_meets_the_deadline(make):
    pool = make(2, timeout_s=30.0)
    gather(pool.ready(), timeout_s=60, stage="rollout", doing="starting")
    pool._timeout_s = 1.5
    with pytest.raises(DeadlineExceeded, match="rollout/test0/1"):
        pool.sample(prompts(1, 68), SAMPLING)


def test_a_start_that_fails_says_why(make):
    pool = make(1, settings=EngineSettings(model_path="bad", dtype="float32", max_model_len=32))
    with pytest.raises(ModelError, match="model folder bad"):
        gather(pool.ready(), timeout_s=60, stage="rollout", doing="starting")
