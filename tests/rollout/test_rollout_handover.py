"""Arrays that an engine gives out early stay alive until their last reader lets go of them, however late Ray's messages are.

An engine's process owns what it puts into the store. Its book of who else holds an object must list the driver before it lets go
of its own handle, or the object is deleted under the reader's hands. A delay of Ray's own messages makes such a race certain.

And they go once nobody holds them, those of abandoned draws included: what is in the store does not grow with the draws.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest

pytestmark = pytest.mark.stack

DELAY_US = 300_000
LATE = ("CoreWorkerService.grpc_server.ReportGeneratorItemReturns", "CoreWorkerService.grpc_client.PushTask.OnReplyReceived")
PROMPTS, DRAWS = 6, 8
TOKENS, MANY_DRAWS, SETTLE_S = 1000, 40, 20.0


class Stop(Exception):
    """What ends a draw half-way."""


def begin(tokens: int, engines: int):
    """A pool on a cluster of its own, whose stand-in engines answer with ``tokens`` times the first token of the prompt."""
    import ray

    import akl_dist.rollout.pool as module
    from akl_dist.contract.records import RolloutArrays
    from akl_dist.rollout.launch import EngineSettings
    from akl_dist.rollout.sampler import SampledGroup

    class Engine:
        policy_version = 0

        def stream(self, prompts, sampling, every_s):
            for index, prompt in enumerate(prompts):
                arrays = RolloutArrays(np.full(tokens, prompt.token_ids[0], np.int32), np.zeros(tokens, np.float32))
                yield [(index, SampledGroup(arrays, (tokens,), ("stop",), ()))]

        def close(self):
            pass

    class Actor(module.RolloutActor):
        def start(self):
            self._engine = Engine()
            return {}

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    module.RolloutActor = Actor
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    settings = EngineSettings(model_path="unused", dtype="float32", max_model_len=8)
    return module.RolloutPool(run_id="late", settings=settings, actor_options=[{"num_cpus": 0}] * engines, timeout_s=60)


def drawn(pool, draw: int, finished=None):
    """The groups of six prompts, whose first tokens go on from those of the draw before."""
    from akl_dist.contract.records import Prompt, Sampling

    sampling = Sampling(group_size=1, temperature=1.0, max_response_tokens=TOKENS, end_ids=(1,), seed_key=(0,))
    prompts = [Prompt(f"p/{draw}/{i}", "p", "", (draw * PROMPTS + i,), "") for i in range(PROMPTS)]
    return pool.sample(prompts, sampling, finished)


def first_tokens(groups) -> list[int]:
    from akl_dist.cluster.gather import fetch_all

    arrays = fetch_all([group.arrays for group in groups], timeout_s=30, stage="rollout", what="arrays")
    return [int(one.token_ids[0]) for one in arrays]


def late() -> None:
    """In a process of its own, since Ray reads the delays when it starts: draws, and reads every draw's arrays at the end."""
    pool = begin(2, engines=1)
    held = [group for draw in range(DRAWS) for group in drawn(pool, draw)]
    assert first_tokens(held) == list(range(DRAWS * PROMPTS))
    pool.close()
    print("all", len(held))


def stored(largest: int = 0) -> int:
    """Objects in the store, once there are at most ``largest`` of them, or after a while."""
    import ray
    from ray._private.internal_api import memory_summary

    deadline = time.monotonic() + SETTLE_S
    while True:
        summary = memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)
        found = re.search(r"Plasma memory usage \d+ MiB, (\d+) objects", summary)
        assert found is not None, summary
        if int(found[1]) <= largest or time.monotonic() > deadline:
            return int(found[1])
        time.sleep(0.2)


def many() -> None:
    """Many draws, read by another process a draw later (as the dump is written) and then let go; every fourth is abandoned."""
    import ray

    pool = begin(TOKENS, engines=2)
    reader = ray.remote(num_cpus=0)(first_tokens)
    pending = None

    def stop(groups):
        raise Stop

    for draw in range(MANY_DRAWS):
        if draw % 4 == 3:
            with pytest.raises(Stop):
                drawn(pool, draw, stop)
            continue
        groups = drawn(pool, draw)
        if pending is not None:
            assert ray.get(pending[1], timeout=60) == list(range(pending[0] * PROMPTS, (pending[0] + 1) * PROMPTS))
        pending = draw, reader.remote(groups)
        if draw % 10 == 8:
            assert (found := stored(2 * PROMPTS)) <= 2 * PROMPTS, f"after {draw + 1} draws: {found} objects"
    del groups
    assert (left := stored()) == 0, f"in the end: {left} objects"
    held = [group for draw in range(10) for group in drawn(pool, draw)]
    assert stored(len(held)) == len(held) == 10 * PROMPTS, "negative control: what is held is there"
    pool.close()
    print("all", MANY_DRAWS)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), **environment}
    return subprocess.run([sys.executable, __file__, *arguments], env=environment, capture_output=True, text=True, timeout=180)


@pytest.mark.parametrize("method", LATE)
def test_arrays_live_as_long_as_their_readers_however_late_messages_are(method):
    done = run("late", RAY_testing_asio_delay_us=f"{method}={DELAY_US}:{DELAY_US}")
    assert done.returncode == 0 and f"all {DRAWS * PROMPTS}" in done.stdout, done.stderr[-3000:]


def test_arrays_that_nobody_holds_leave_the_store():
    done = run("many")
    assert done.returncode == 0 and f"all {MANY_DRAWS}" in done.stdout, done.stderr[-3000:]


if __name__ == "__main__":
    {"late": late, "many": many}[sys.argv[1]]()
