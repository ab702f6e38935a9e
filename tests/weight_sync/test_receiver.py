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
    from engine_models import bucket_of, manifest_of

    parameters = [p for p in manifest_of(model) if p.name not in skip]
    buckets = plan_buckets(parameters, bucket_bytes)
    engine.begin_update(parameters)
    for bucket in buckets:
        engine.load_bucket(bucket_of(model, [p.name for p in bucket]))
    engine.finish_update()
    return len(buckets)


def gap(engine, model):
    from engine_models import reference_logp

    return gap_statistics([reference_logp(model, ids) for ids in PROBE], engine.prompt_logprobs(PROBE))


def test_tied_model_takes_new_weights_in_several_buckets(tied, restore):
    from engine_models import manifest_of, perturb

    engine, model = tied
    assert [p for p in engine.parameter_manifest() if p.name == "lm_head.weight"] == [
        ParameterInfo("lm_head.weight", (24, 128), "float32")
    ]
    check_manifest(manifest_of(model), engine.parameter_manifest(), engine="e")
    assert gap(engine, model).max < 1e-4
    perturb(model, seed=2)
    assert gap(engine, model).max > 0.1, "the weights moved far enough for a stale engine to be seen"
    assert send(engine, model) > 5
    assert gap(engine, model).max < 1e-4


def test_tied_head_that_is_not_sent_is_caught_before_and_during(tied, restore):
    from engine_models import manifest_of

    engine, model = tied
    sent = [p for p in manifest_of(model) if p.name != "lm_head.weight"]
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
    with pytest.raises(WeightSyncError, match=r"at most 0\.001"):
        check_gap(found, mean_bound=1e-3, max_bound=1e-3, engine="e")


def test_a_reload_per_bucket_would_corrupt(tied, restore):
    """Why there is one reload around all buckets: a reload per bucket finalises fused weights that are partly there."""
    from engine_models import perturb

    engine, model = tied
    perturb(model, seed=4)
    runner = engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner
    state = {**model.state_dict(), "lm_head.weight": model.lm_head.weight.detach()}
    for name, value in state.items():
        runner.reload_weights(weights_iterator=iter([(name, value)]))
    engine._llm.reset_prefix_cache()
    assert gap(engine, model).max > 0.1


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
    from engine_models import bucket_of, manifest_of

    engine, model = tied
    engine.begin_update(manifest_of(model))
    bucket = bucket_of(model, ["model.norm.weight"])
    with pytest.raises(WeightSyncError, match=message):
        engine.load_bucket(change(bucket))
    assert engine.state is EngineState.BROKEN


def test_second_delivery_is_refused(tied, restore):
    from engine_models import bucket_of, manifest_of

    engine, model = tied
    engine.begin_update(manifest_of(model))
    bucket = bucket_of(model, ["model.norm.weight"])
    engine.load_bucket(bucket)
    with pytest.raises(WeightSyncError, match="second delivery"):
        engine.load_bucket(bucket)


def test_bfloat16_engine_takes_bfloat16_and_float32(tmp_path):
    import torch
    from engine_models import bucket_of, manifest_of, perturb, reference_logp, save_model

    model = save_model(tmp_path, tied=False)
    engine = make(tmp_path, dtype="bfloat16")
    try:
        for dtype in (torch.bfloat16, torch.float32):
            perturb(model, seed=5)
            model.to(dtype)
            parameters = manifest_of(model)
            engine.begin_update(parameters)
            names = [p.name for p in parameters]
            engine.load_bucket(bucket_of(model, names))
            engine.finish_update()
            learner = [reference_logp(model.to(torch.bfloat16).float(), ids) for ids in PROBE]
            found = gap_statistics(learner, engine.prompt_logprobs(PROBE))
            assert found.mean < 0.1 and found.max < 0.5, found  # activations are rounded to 8 bits
            engine.confirm_update(engine.policy_version + 1)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("rows_of_worker", "loaded", "partial"),
    [(24, 24 * 3, False), (24, 23 * 3, True), (24, 0, True), (0, 0, False)],
)
def test_padding_rows_of_a_vocabulary_are_not_missed(rows_of_worker, loaded, partial):
    """Of 32 padded rows of 3, a tensor-parallel worker owns 24 real ones, or none at all."""
    from types import SimpleNamespace

    import torch
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    from akl_dist.weight_sync.receiver import _is_partial

    class Shard(VocabParallelEmbedding):
        def __init__(self):
            torch.nn.Module.__init__(self)
            self.weight = torch.nn.Parameter(torch.zeros(32, 3))
            self.shard_indices = SimpleNamespace(num_org_elements=rows_of_worker, num_elements_padded=32)

    layer = Shard()
    info = get_layerwise_info(layer)
    info.load_numel, info.load_numel_total = loaded, 96
    assert _is_partial(layer) is partial
