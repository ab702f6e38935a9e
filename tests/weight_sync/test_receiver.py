"""Covers the engine's side on real vLLM engines: tied embeddings, what a session refuses, NaN, bfloat16.

The known-wrong variants (head not sent, a session per bucket) are run here, so that the checks are seen to fail.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

pytestmark = pytest.mark.stack

from akl_dist.contract.errors import WeightSyncError  # noqa: E402
from akl_dist.contract.records import ParameterInfo  # noqa: E402
from akl_dist.rollout.engine import EngineState, RolloutEngine  # noqa: E402
from akl_dist.rollout.launch import EngineSettings  # noqa: E402
from akl_dist.weight_sync.plan import check_gap, check_manifest, gap_statistics, plan_buckets  # noqa: E402
from akl_dist.weight_sync.sender import gather_bucket, manifest  # noqa: E402

PROBE = [[2, 5, 9, 10, 4, 17], [3, 9, 9, 4, 17, 20, 8]]


def make(folder, *, dtype: str = "float32") -> RolloutEngine:
    settings = EngineSettings(model_path=str(folder), dtype=dtype, max_model_len=32, kv_cache_gib=0.02, max_num_seqs=16)
    return RolloutEngine(settings, name="rollout/test/1")


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    from engine_models import save_model

    folder = tmp_path_factory.mktemp("tied")
    model = save_model(folder, tied=True)
    engine = make(folder)
    yield engine, model
    engine.close()


@pytest.fixture
def restore(tied):
    """The engine with the model's weights again after a test that spoiled it: reload, and zero what the KV cache holds."""
    yield
    engine, model = tied
    worker = engine._llm.llm_engine.model_executor.driver_worker.worker
    if worker._weight_update_active or engine.state is EngineState.BROKEN:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        worker._weight_update_active = False
        worker.weight_transfer_engine.reset_weight_update_target()
        finalize_layerwise_reload(worker.get_model(), worker.model_config)
    for cache in worker.model_runner.kv_caches:
        cache.zero_()
    engine.state = EngineState.READY
    send(engine, model)
    engine.confirm_update(engine.policy_version)
    assert gap(engine, model).max < 1e-4


def send(engine, model, *, skip=(), bucket_bytes=100_000) -> int:
    parameters = [p for p in manifest(model, prefix_to_strip="", tied=True) if p.name not in skip]
    buckets = plan_buckets(parameters, bucket_bytes)
    engine.begin_update(parameters)
    for bucket in buckets:
        engine.load_bucket(gather_bucket(model, [p.name for p in bucket], prefix_to_strip="", tied=True, rank=0))
    engine.finish_update()
    return len(buckets)


def gap(engine, model):
    from engine_models import reference_logp

    return gap_statistics([reference_logp(model, ids) for ids in PROBE], engine.prompt_logprobs(PROBE))


def test_tied_model_takes_new_weights_in_several_buckets(tied, restore):
    from engine_models import perturb

    engine, model = tied
    assert [p for p in engine.parameter_manifest() if p.name == "lm_head.weight"] == [
        ParameterInfo("lm_head.weight", (24, 128), "float32")
    ]
    check_manifest(manifest(model, prefix_to_strip="", tied=True), engine.parameter_manifest(), engine="e")
    assert gap(engine, model).max < 1e-4
    perturb(model, seed=2)
    assert gap(engine, model).max > 0.1, "the weights moved far enough for a stale engine to be seen"
    assert send(engine, model) > 5
    assert gap(engine, model).max < 1e-4


def test_tied_head_that_is_not_sent_is_caught_before_and_during(tied, restore):
    engine, model = tied
    sent = [p for p in manifest(model, prefix_to_strip="", tied=True) if p.name != "lm_head.weight"]
    with pytest.raises(WeightSyncError, match=r"missing lm_head\.weight"):
        check_manifest(sent, engine.parameter_manifest(), engine="e")
    with pytest.raises(WeightSyncError, match="without all of their weights: lm_head"):
        send(engine, model, skip=("lm_head.weight",))


def test_tied_head_that_is_not_sent_would_be_stale(tied, restore, monkeypatch):
    """The trap itself, with the coverage check taken away: no error, and a large gap that the bound catches."""
    from engine_models import perturb

    from akl_dist.weight_sync.receiver import BucketReceiver

    engine, model = tied
    perturb(model, seed=3)
    monkeypatch.setattr(BucketReceiver, "check_coverage", lambda self: None)
    send(engine, model, skip=("lm_head.weight",))
    found = gap(engine, model)
    assert 0.1 < found.max < math.inf
    with pytest.raises(WeightSyncError, match="at most 0.001"):
        check_gap(found, mean_bound=1e-3, max_bound=1e-3, engine="e")


def test_nan_weights_fail_the_probe(tied, restore):
    import torch

    engine, model = tied
    weight = model.model.layers[1].mlp.up_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = math.nan
    send(engine, model)
    with torch.no_grad():
        weight.copy_(kept)
    found = gap(engine, model)
    assert found.max == math.inf
    with pytest.raises(WeightSyncError, match="NaN or infinity"):
        check_gap(found, mean_bound=1e9, max_bound=None, engine="e")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda bucket: {"extra.weight": bucket["model.norm.weight"]}, "extra.weight.*not announced"),
        (lambda bucket: {"model.norm.weight": ("float32", np.zeros(64, np.float32))}, r"shape \(64,\)"),
        (lambda bucket: {"model.norm.weight": ("bfloat16", np.zeros(128, np.float32))}, "bytes of bfloat16"),
        (lambda bucket: {"model.norm.weight": ("int8", np.zeros(128, np.int8))}, "bytes of int8"),
    ],
)
def test_what_a_session_refuses(tied, restore, change, message):
    engine, model = tied
    engine.begin_update(manifest(model, prefix_to_strip="", tied=True))
    bucket = gather_bucket(model, ["model.norm.weight"], prefix_to_strip="", tied=True, rank=0)
    with pytest.raises(WeightSyncError, match=message):
        engine.load_bucket(change(bucket))
    assert engine.state is EngineState.BROKEN


def test_second_delivery_is_refused(tied, restore):
    engine, model = tied
    engine.begin_update(manifest(model, prefix_to_strip="", tied=True))
    bucket = gather_bucket(model, ["model.norm.weight"], prefix_to_strip="", tied=True, rank=0)
    engine.load_bucket(bucket)
    with pytest.raises(WeightSyncError, match="second delivery"):
        engine.load_bucket(bucket)


def test_bfloat16_engine_takes_bfloat16_and_float32(tmp_path):
    import torch
    from engine_models import perturb, reference_logp, save_model

    model = save_model(tmp_path, tied=False)
    engine = make(tmp_path, dtype="bfloat16")
    try:
        for dtype in (torch.bfloat16, torch.float32):
            perturb(model, seed=5)
            model.to(dtype)
            parameters = manifest(model, prefix_to_strip="", tied=False)
            engine.begin_update(parameters)
            names = [p.name for p in parameters]
            engine.load_bucket(gather_bucket(model, names, prefix_to_strip="", tied=False, rank=0))
            engine.finish_update()
            learner = [reference_logp(model.to(torch.bfloat16).float(), ids) for ids in PROBE]
            found = gap_statistics(learner, engine.prompt_logprobs(PROBE))
            assert found.mean < 0.1 and found.max < 0.5, found  # activations are rounded to 8 bits
            engine.confirm_update(engine.policy_version + 1)
    finally:
        engine.close()
