"""Arrays that an engine gives out early stay alive until their last reader lets go of them, however late Ray's messages are.

An engine's process owns what it puts into the store. Its book of who else holds an object must list the driver before it lets go
of its own handle, or the object is deleted under the reader's hands. A delay of Ray's own messages makes such a race certain.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.stack

DELAY_US = 300_000
LATE = ("CoreWorkerService.grpc_server.ReportGeneratorItemReturns", "CoreWorkerService.grpc_client.PushTask.OnReplyReceived")
PROMPTS, DRAWS = 6, 8


def main() -> None:
    """In a process of its own, since Ray reads the delays when it starts: draws, and reads every draw's arrays at the end."""
    import ray

    import akl_dist.rollout.pool as module
    from akl_dist.cluster.gather import fetch_all
    from akl_dist.contract.records import Prompt, RolloutArrays, Sampling
    from akl_dist.rollout.launch import EngineSettings
    from akl_dist.rollout.sampler import SampledGroup

    class Engine:
        policy_version = 0

        def stream(self, prompts, sampling, every_s):
            for index, prompt in enumerate(prompts):
                ids = np.array([*prompt.token_ids, 1], np.int32)
                yield [(index, SampledGroup(RolloutArrays(ids, np.zeros(2, np.float32)), (2,), ("stop",), ()))]

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
    pool = module.RolloutPool(run_id="late", settings=settings, actor_options=[{"num_cpus": 0}], timeout_s=60)
    sampling = Sampling(group_size=1, temperature=1.0, max_response_tokens=2, end_ids=(1,), seed_key=(0,))
    held = []
    for draw in range(DRAWS):
        held += pool.sample([Prompt(f"p/{draw}/{i}", "p", "", (draw * PROMPTS + i,), "") for i in range(PROMPTS)], sampling)
    arrays = fetch_all([group.arrays for group in held], timeout_s=30, stage="rollout", what="arrays")
    assert [int(one.token_ids[0]) for one in arrays] == list(range(DRAWS * PROMPTS))
    pool.close()
    print("all", len(arrays))


@pytest.mark.parametrize("method", LATE)
def test_arrays_live_as_long_as_their_readers_however_late_messages_are(method):
    environment = {**os.environ, "RAY_testing_asio_delay_us": f"{method}={DELAY_US}:{DELAY_US}", "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0 and f"all {DRAWS * PROMPTS}" in done.stdout, done.stderr[-3000:]


if __name__ == "__main__":
    main()
