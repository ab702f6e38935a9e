"""Covers the transaction on a real Ray cluster: order, overlap and failures with stand-ins, then one real vLLM engine.

Not covered: more than one node, CUDA, gathers under ZeRO-3.
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np
import pytest

pytestmark = pytest.mark.stack

from akl_dist.cluster.gather import gather, store  # noqa: E402
from akl_dist.contract.errors import ActorDied, DeadlineExceeded, WeightSyncError  # noqa: E402
from akl_dist.contract.packing import probe_sequence  # noqa: E402
from akl_dist.contract.records import ParameterInfo, Prompt, RolloutArrays, RolloutGroup  # noqa: E402
from akl_dist.weight_sync.pool import WeightSyncPool, prompt_probe  # noqa: E402

NAMES = ["w0", "w1", "w2", "w3"]
STEP_S = 0.2


class StandInRank:
    """A learner rank whose log-probs are minus the sum of its weights."""

    def __init__(self, rank: int, version: int = 1) -> None:
        self.rank, self.events = rank, []
        self.values = {name: np.full(8, version + i, np.float32) for i, name in enumerate(NAMES)}

    def sync_manifest(self):
        return [ParameterInfo(name, (8,), "float32") for name in NAMES]

    def gather_bucket(self, names):
        start = time.time()
        time.sleep(STEP_S)
        self.events.append((names, start, time.time()))
        return [store({name: ("float32", self.values[name]) for name in names})] if self.rank == 0 else None

    def probe_logprobs(self, token_ids):
        total = sum(float(v.sum()) for v in self.values.values())
        return [np.full(len(ids) - 1, -total, np.float32) for ids in token_ids]

    def timeline(self):
        return self.events


class StandInEngine:
    """An engine whose log-probs are minus the sum of what it loaded; ``fault`` says how it goes wrong."""

    def __init__(self, fault: str = "") -> None:
        self.fault, self.events, self.calls, self.loaded, self.version = fault, [], [], {}, 0

    def parameter_manifest(self):
        names = NAMES if self.fault != "other model" else [*NAMES[:3], "w9"]
        return [ParameterInfo(name, (8,), "float32") for name in names]

    def begin_update(self, manifest):
        self.calls.append("begin")

    def load_bucket(self, bucket):
        start = time.time()
        if self.fault == "dies":
            os._exit(1)
        time.sleep(60 if self.fault == "hangs" else STEP_S)
        if not (self.fault == "stale" and "w2" in bucket):
            self.loaded.update({name: array for name, (_, array) in bucket.items()})
        self.calls.append("load")
        self.events.append((list(bucket), start, time.time()))

    def finish_update(self):
        self.calls.append("finish")

    def probe_sequences(self, groups, max_tokens):
        return [probe_sequence(group, group.arrays, max_tokens) for group in groups]

    def prompt_logprobs(self, token_ids):
        self.calls.append("probe")
        total = float("nan") if self.fault == "nan" else sum(float(v.sum()) for v in self.loaded.values())
        return [np.full(len(ids) - 1, -total, np.float32) for ids in token_ids]

    def confirm_update(self, policy_version):
        self.calls.append("confirm")
        self.version = policy_version

    def history(self):
        return self.calls, self.events, self.version


PROBE = [
    RolloutGroup(
        prompt=Prompt("p/1", "p", "", (5, 6), ""),
        response_lengths=(2, 1),
        finish_reasons=("stop", "stop"),
        policy_version=0,
        engine="e",
        arrays=RolloutArrays(np.array([7, 1, 1], np.int32), np.zeros(3, np.float32)),
    )
]


@pytest.fixture
def make(local_ray):
    local_ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    actors = []

    def build(*faults, ranks=2, bucket_bytes=32, timeout_s=60.0):
        learner = {f"learner/x/{r}": local_ray.remote(StandInRank).options(num_cpus=0).remote(r) for r in range(ranks)}
        engines = {
            f"rollout/x/{i}": local_ray.remote(StandInEngine).options(num_cpus=0).remote(fault) for i, fault in enumerate(faults)
        }
        actors.extend([*learner.values(), *engines.values()])
        gather({name: e.history.remote() for name, e in engines.items()}, timeout_s=60, stage="test", doing="starting")
        pool = WeightSyncPool(
            learner_ranks=learner, engines=engines, bucket_bytes=bucket_bytes, mean_gap=1e-3, max_gap=1e-3, timeout_s=timeout_s
        )
        return pool, learner, engines

    yield build
    for actor in actors:
        local_ray.kill(actor)


def history(engine):
    return gather({"e": engine.history.remote()}, timeout_s=30, stage="test", doing="history")["e"]


def test_the_transaction_in_order_with_overlap(make):
    pool, learner, engines = make("", "")
    report = pool.sync(4, PROBE)
    assert (report.policy_version, report.buckets, report.bytes, report.gap_max) == (4, 4, 4 * 8 * 4, 0.0)
    assert report.seconds < 4 * 2 * STEP_S + 2.0
    for engine in engines.values():
        calls, loads, version = history(engine)
        assert calls == ["begin", *["load"] * 4, "finish", "probe", "confirm"] and version == 4
        assert [names for names, *_ in loads] == [["w0"], ["w1"], ["w2"], ["w3"]]
        rank0 = gather({"r": learner["learner/x/0"].timeline.remote()}, timeout_s=30, stage="test", doing="timeline")["r"]
        for i in range(3):
            assert rank0[i + 1][1] < loads[i][2], "bucket i + 1 is gathered while bucket i is loaded"
        for i in range(2):
            assert rank0[i + 2][1] >= loads[i][2], "at most two buckets are alive"


def test_only_the_first_response_is_scored_without_its_last_token(make):
    pool, _, _ = make("")
    pool._deadline = time.monotonic() + 10
    assert pool._probe_sequences(pool._build_probe(PROBE)) == [[5, 6, 7]]
    assert pool._probe_sequences(pool._build_probe(prompt_probe([PROBE[0].prompt], policy_version=0))) == [[5, 6]]
    with pytest.raises(WeightSyncError, match="probe"):
        pool.sync(1, [])


@pytest.mark.parametrize(("fault", "words"), [("stale", "got 24 nats; expected at most 0.001"), ("nan", "NaN or infinity")])
def test_wrong_weights_are_not_confirmed(make, fault, words):
    pool, _, engines = make("", fault)
    with pytest.raises(WeightSyncError, match=words) as error:
        pool.sync(1, PROBE)
    assert error.value.actor == "rollout/x/1"
    for engine in engines.values():
        assert history(engine)[2] == 0, "no engine goes on after one of them failed"


def test_another_model_is_found_before_anything_moves(make):
    pool, _, engines = make("", "other model")
    with pytest.raises(WeightSyncError, match=r"rollout/x/1.*missing w9.*unexpected w3"):
        pool.sync(1, PROBE)
    assert all(history(engine)[0] == [] for engine in engines.values())


def test_dead_and_hanging_engines_are_named(make):
    pool, *_ = make("", "dies")
    with pytest.raises(ActorDied, match="rollout/x/1"):
        pool.sync(1, PROBE)
    pool, *_ = make("hangs", "", timeout_s=3.0)
    with pytest.raises(DeadlineExceeded, match=r"rollout/x/0.*loading bucket 1 of 4"):
        pool.sync(1, PROBE)


# --- with a real engine ------------------------------------------------------------------------------------------------


class ModelRank:
    """A learner rank without ZeRO: the whole model, with the functions a real rank uses."""

    def __init__(self, rank: int, folder: str) -> None:
        from transformers import Qwen2ForCausalLM

        self.rank, self.model = rank, Qwen2ForCausalLM.from_pretrained(folder).eval()

    def sync_manifest(self):
        from engine_models import manifest_of

        return manifest_of(self.model)

    def gather_bucket(self, names):
        from engine_models import bucket_of

        bucket = bucket_of(self.model, names)
        return [store(bucket)] if self.rank == 0 else None

    def probe_logprobs(self, token_ids):
        from engine_models import reference_logp

        return [reference_logp(self.model, ids) for ids in token_ids]

    def train(self):
        from engine_models import perturb

        perturb(self.model, seed=11)
        return True


def test_real_engine(local_ray, tmp_path):
    import engine_models

    from akl_dist.cluster.reserve import with_environment
    from akl_dist.rollout.launch import EngineSettings
    from akl_dist.rollout.pool import RolloutPool

    local_ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    local_ray.cloudpickle.register_pickle_by_value(engine_models)
    engine_models.save_model(tmp_path, tied=True)
    rollout = RolloutPool(
        run_id="real",
        settings=EngineSettings(model_path=str(tmp_path), dtype="float32", max_model_len=32, kv_cache_gib=0.02, max_num_seqs=16),
        actor_options=[{"num_cpus": 0}],
        timeout_s=240.0,
    )
    path = os.pathsep.join(p for p in sys.path if p)
    options = with_environment({"num_cpus": 0}, {"OMP_NUM_THREADS": "1", "PYTHONPATH": path})
    learner = {f"learner/real/{r}": local_ray.remote(ModelRank).options(**options).remote(r, str(tmp_path)) for r in range(1)}
    try:
        gather(rollout.ready(), timeout_s=240, stage="rollout", doing="starting")
        sync = WeightSyncPool(
            learner_ranks=learner, engines=rollout.engines, bucket_bytes=200_000, mean_gap=1e-4, max_gap=1e-4, timeout_s=120.0
        )
        prompts, sampling = engine_models.prompts(6), engine_models.sampling(temperature=1.0)
        first = sync.sync(1, prompt_probe(prompts, policy_version=0))
        groups = rollout.sample(prompts, sampling)
        assert {group.policy_version for group in groups} == {1}
        gather({"learner": learner["learner/real/0"].train.remote()}, timeout_s=60, stage="learner", doing="training")
        second = sync.sync(2, groups)
        assert (second.policy_version, second.buckets) == (2, first.buckets) and second.buckets > 3
        assert 0 < second.gap_mean <= second.gap_p99 <= second.gap_max < 1e-4
        assert rollout.ping() == {"rollout/real/0": 2}
        moved = rollout.sample(prompts, sampling)
        tokens = [[fetch_ids(group) for group in batch] for batch in (groups, moved)]
        assert tokens[0] != tokens[1], "the engine samples from the new weights"
    finally:
        rollout.close()
        for actor in learner.values():
            local_ray.kill(actor)


def fetch_ids(group: RolloutGroup) -> list[int]:
    from akl_dist.cluster.gather import fetch

    return fetch(group.arrays, timeout_s=30, stage="rollout", what="arrays").token_ids.tolist()
