"""Covers a real vLLM engine on CPU, untied model: sampling, its log-probs, refusals. Weight updates: tests/weight_sync."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

pytestmark = pytest.mark.stack

from akl_dist.contract.errors import ModelError, RunError, UserError, WeightSyncError  # noqa: E402
from akl_dist.contract.records import Prompt  # noqa: E402
from akl_dist.rollout import launch  # noqa: E402
from akl_dist.rollout.engine import EngineState, RolloutEngine  # noqa: E402
from akl_dist.rollout.launch import EngineSettings, asked, check_effective, engine_environment  # noqa: E402
from akl_dist.rollout.manifest import parameter_manifest  # noqa: E402


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    from engine_models import save_model

    # A budget that a batch of prompts exceeds: vLLM must not cut a seeded request's prompt over two batches, which rewinds its
    # generator and fails on CPU.
    before, launch.CPU_BATCH_TOKENS = launch.CPU_BATCH_TOKENS, 64
    folder = tmp_path_factory.mktemp("untied")
    model = save_model(folder, tied=False)
    settings = EngineSettings(model_path=str(folder), dtype="float32", max_model_len=32, kv_cache_gib=0.05, max_num_seqs=64)
    engine = RolloutEngine(settings, name="rollout/test/0")
    launch.CPU_BATCH_TOKENS = before
    yield engine, model, settings
    engine.close()


def rows(group):
    borders = np.cumsum(group.response_lengths)[:-1]
    return np.split(group.arrays.token_ids, borders), np.split(group.arrays.logp, borders)


def test_groups_have_the_shape_they_claim(made):
    from engine_models import END, prompts, sampling

    groups = made[0].sample(prompts(16), sampling(temperature=1.0))
    assert len(groups) == 16
    reasons = set()
    for group in groups:
        assert group.arrays.token_ids.dtype == np.int32 and group.arrays.logp.dtype == np.float32
        assert len(group.response_lengths) == 4 and sum(group.response_lengths) == len(group.arrays.logp)
        for ids, reason in zip(rows(group)[0], group.finish_reasons, strict=True):
            reasons.add(reason)
            assert (ids[-1] == END) == (reason == "stop"), "the end token stays in the ids"
            assert END not in ids[:-1] and (reason == "stop" or len(ids) == 24)
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_logp_is_of_the_distribution_sampled(made, temperature):
    from engine_models import prompts, reference_logp, sampling

    engine, model, _ = made
    gap, wrong = [], []
    for prompt, group in zip(prompts(4), engine.sample(prompts(4), sampling(temperature=temperature)), strict=True):
        for ids, logp in zip(*rows(group), strict=True):
            whole, start = [*prompt.token_ids, *ids.tolist()], len(prompt.token_ids) - 1
            gap.append(np.abs(logp - reference_logp(model, whole, temperature=temperature)[start:]).max())
            wrong.append(np.abs(logp - reference_logp(model, whole)[start:]).max())
    assert max(gap) < 1e-4
    if temperature != 1.0:
        assert max(wrong) > 0.1, "log-probs before temperature are another thing: the check above can fail"


def test_samples_do_not_depend_on_company_or_order(made):
    from engine_models import prompts, sampling

    engine, batch, settings = made[0], prompts(12), sampling(temperature=1.0)
    together = engine.sample(batch, settings)
    reversed_ = engine.sample(batch[::-1], settings)[::-1]
    apart = [group for prompt in batch for group in engine.sample([prompt], settings)]
    for a, b, c in zip(together, reversed_, apart, strict=True):
        assert a.arrays.token_ids.tolist() == b.arrays.token_ids.tolist() == c.arrays.token_ids.tolist()
        np.testing.assert_allclose(a.arrays.logp, b.arrays.logp, atol=1e-5)
        np.testing.assert_allclose(a.arrays.logp, c.arrays.logp, atol=1e-5)
    other = engine.sample(batch, dataclasses.replace(settings, seed_key=(0, "step", 4)))
    assert any(a.arrays.token_ids.tolist() != b.arrays.token_ids.tolist() for a, b in zip(together, other, strict=True))
    assert len({tuple(ids.tolist()) for ids in rows(together[0])[0]}) > 1, "the samples of one prompt differ"


def test_end_ids_are_the_ones_sent(made):
    from engine_models import END, prompts, sampling

    groups = made[0].sample(prompts(16), sampling(temperature=1.0, end_ids=(7, 9)))
    ids = np.concatenate([group.arrays.token_ids for group in groups])
    assert END in ids, "the checkpoint's own end token ends nothing unless it is sent"
    lasts = {
        int(row[-1]) for group in groups for row, why in zip(rows(group)[0], group.finish_reasons, strict=True) if why == "stop"
    }
    assert lasts == {7, 9}


def test_prompt_logprobs_are_the_models(made):
    from engine_models import reference_logp

    engine, model, _ = made
    sequences = [[2, 5], [3, 9, 9, 4, 17, 1, 20], list(range(2, 24)) + [6] * 9]  # the longest the engine can score: 31
    for ids, logp in zip(sequences, engine.prompt_logprobs(sequences), strict=True):
        assert logp.shape == (len(ids) - 1,)
        np.testing.assert_allclose(logp, reference_logp(model, ids), atol=1e-4)
    for bad in ([2], [3] * 32):
        with pytest.raises(RunError, match="probe sequence 0"):
            engine.prompt_logprobs([bad])


def test_requests_the_engine_would_bend_are_refused(made):
    from engine_models import prompts, sampling

    engine = made[0]
    assert engine.sample([], sampling(temperature=1.0)) == []
    for temperature in (0.0, 0.005, float("nan"), -1.0):
        with pytest.raises(UserError, match=r"rollout\.temperature"):
            engine.sample(prompts(1), sampling(temperature=temperature))
    with pytest.raises(UserError, match="prompt long"):
        engine.sample([Prompt("long", "test", "", (2,) * 9, "")], sampling(temperature=1.0))
    with pytest.raises(RunError, match="end_ids"):
        engine.sample(prompts(1), sampling(temperature=1.0, end_ids=()))


def test_replies_are_compared_with_requests(made, monkeypatch):
    from engine_models import prompts, sampling

    engine, real = made[0], made[0]._llm.generate

    def broken(change):
        def generate(requests, **arguments):
            outputs = real(requests, **arguments)
            change(outputs)
            return outputs

        monkeypatch.setattr(engine._llm, "generate", generate)
        with pytest.raises(RunError) as error:
            engine.sample(prompts(2), sampling(temperature=1.0))
        return str(error.value)

    assert "echo" in broken(lambda outputs: outputs.reverse())
    assert "replies" in broken(lambda outputs: outputs.pop())
    assert "log-probs" in broken(lambda outputs: outputs[0].outputs[0].token_ids.pop())
    assert "not finite" in broken(lambda outputs: outputs[1].outputs[0].logprobs.logprobs.__setitem__(0, float("nan")))
    assert "finish reason" in broken(lambda outputs: setattr(outputs[0].outputs[0], "finish_reason", "abort"))


def test_settings_are_read_back(made):
    engine, _, settings = made
    assert engine.effective == asked(settings)
    assert engine.effective["num_threads"] == 1 and engine.effective["logprobs_mode"] == "processed_logprobs"
    with pytest.raises(ModelError, match="max_num_seqs=64 instead of 128"):
        check_effective(engine.effective, asked(dataclasses.replace(settings, max_num_seqs=128)), "e")


def test_environment_binds_no_threads_and_does_not_spin():
    cpu = engine_environment(device="cpu", num_threads=3, enforce_eager=True)
    assert (cpu["OMP_NUM_THREADS"], cpu["OMP_WAIT_POLICY"], cpu["VLLM_CPU_OMP_THREADS_BIND"]) == ("3", "PASSIVE", "nobind")
    assert cpu["TORCHDYNAMO_DISABLE"] == "1" and cpu["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert engine_environment(device="cpu", num_threads=1, enforce_eager=False)["TORCHDYNAMO_DISABLE"] == "0"
    assert "TORCHDYNAMO_DISABLE" not in engine_environment(device="cuda", num_threads=1, enforce_eager=True)


def test_manifest_is_the_checkpoints(made):
    engine, model, _ = made
    state = model.state_dict()
    listed = {parameter.name: (parameter.shape, parameter.dtype) for parameter in engine.parameter_manifest()}
    assert listed == {name: (tuple(value.shape), "float32") for name, value in state.items()}
    with pytest.raises(ModelError, match="safetensors"):
        parameter_manifest("/nonexistent")


# --- weight updates: the refusals, which leave the engine as it was or end its life, so they come last ----------------


def test_update_session(made):
    from engine_models import bucket_of, perturb, prompts, reference_logp, sampling

    engine, model, _ = made
    manifest = engine.parameter_manifest()
    before = engine.sample(prompts(4), sampling(temperature=1.0))  # fills the prefix cache with old keys and values
    perturb(model, seed=1)
    with pytest.raises(WeightSyncError, match="state 'ready'"):
        engine.load_bucket({})
    engine.begin_update(manifest)
    with pytest.raises(WeightSyncError, match="state 'updating'"):
        engine.sample(prompts(1), sampling(temperature=1.0))
    with pytest.raises(WeightSyncError, match="state 'updating'"):
        engine.prompt_logprobs([[2, 3]])
    for start in range(0, len(manifest), 5):  # fused weights arrive in different buckets
        names = [parameter.name for parameter in manifest[start : start + 5]]
        engine.load_bucket(bucket_of(model, names))
    engine.finish_update()
    with pytest.raises(WeightSyncError, match="state 'loaded'"):
        engine.sample(prompts(1), sampling(temperature=1.0))  # nobody has verified it
    ids = [*prompts(1)[0].token_ids, 5, 6, 7]
    np.testing.assert_allclose(engine.prompt_logprobs([ids])[0], reference_logp(model, ids), atol=1e-4)
    assert engine.policy_version == 0
    engine.confirm_update(3)
    assert (engine.policy_version, engine.state) == (3, EngineState.READY)
    after = engine.sample(prompts(4), sampling(temperature=1.0))
    for prompt, group in zip(prompts(4), after, strict=True):
        ids, logp = rows(group)[0][0], rows(group)[1][0]
        expected = reference_logp(model, [*prompt.token_ids, *ids.tolist()])[len(prompt.token_ids) - 1 :]
        np.testing.assert_allclose(logp, expected, atol=1e-4)
    assert any(a.arrays.token_ids.tolist() != b.arrays.token_ids.tolist() for a, b in zip(before, after, strict=True))


def test_prefix_cache_that_cannot_be_dropped_ends_the_engine(made, monkeypatch):
    from engine_models import bucket_of, prompts, sampling

    engine, model, _ = made
    manifest = engine.parameter_manifest()
    engine.begin_update(manifest)
    names = [parameter.name for parameter in manifest]
    engine.load_bucket(bucket_of(model, names))
    monkeypatch.setattr(engine._llm, "reset_prefix_cache", lambda: False)
    with pytest.raises(WeightSyncError, match="prefix cache"):
        engine.finish_update()
    with pytest.raises(WeightSyncError, match="Restart the engine"):
        engine.sample(prompts(1), sampling(temperature=1.0))
    engine.state = EngineState.READY  # only the flag was faulty here: the weights are whole


def test_partial_session_ends_the_engine(made):
    from engine_models import bucket_of, prompts, sampling

    engine, model, _ = made
    manifest = engine.parameter_manifest()
    engine.begin_update(manifest)
    names = [parameter.name for parameter in manifest[:-1]]
    engine.load_bucket(bucket_of(model, names))
    with pytest.raises(WeightSyncError, match=f"no {manifest[-1].name}"):
        engine.finish_update()
    for call in (
        lambda: engine.sample(prompts(1), sampling(temperature=1.0)),
        lambda: engine.prompt_logprobs([[2, 3]]),
        lambda: engine.begin_update(manifest),
        lambda: engine.confirm_update(4),
    ):
        with pytest.raises(WeightSyncError, match="Restart the engine"):
            call()
    assert engine.policy_version == 3
