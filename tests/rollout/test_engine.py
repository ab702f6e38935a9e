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
from akl_dist.rollout.environment import Step  # noqa: E402
from akl_dist.rollout.environment_pool import Fault  # noqa: E402
from akl_dist.rollout.launch import EngineSettings, asked, check_effective, engine_environment  # noqa: E402
from akl_dist.rollout.manifest import parameter_manifest  # noqa: E402
from akl_dist.rollout.sampler import Sampler, Tools, sampling_params  # noqa: E402
from akl_dist.rollout.sampling import request_seed  # noqa: E402


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

    engine, real = made[0], made[0]._llm.llm_engine.step

    def broken(change):
        changed = []

        def step():
            outputs = real()
            if outputs and not changed:
                changed.append(change(outputs))
            return outputs

        monkeypatch.setattr(engine._llm.llm_engine, "step", step)
        with pytest.raises(RunError) as error:
            engine.sample(prompts(2), sampling(temperature=1.0))
        assert not engine._llm.llm_engine.has_unfinished_requests(), "nothing of a failed draw is left in the engine"
        return str(error.value)

    assert "echo" in broken(lambda outputs: outputs[0].prompt_token_ids.reverse())
    assert "replies" in broken(lambda outputs: outputs.pop())
    assert "reply to request" in broken(lambda outputs: outputs.append(outputs[0]))
    assert "log-probs" in broken(lambda outputs: outputs[0].outputs[0].token_ids.pop())
    assert "not finite" in broken(lambda outputs: outputs[0].outputs[0].logprobs.logprobs.__setitem__(0, float("nan")))
    assert "finish reason" in broken(lambda outputs: setattr(outputs[0].outputs[0], "finish_reason", "abort"))
    monkeypatch.undo()
    assert len(engine.sample(prompts(2), sampling(temperature=1.0))) == 2


def test_samples_are_those_of_vllms_own_generate(made):
    """The loop over add_request and step draws what one call of LLM.generate draws, to the bit."""
    from engine_models import prompts, sampling

    engine, batch, settings = made[0], prompts(6), sampling(temperature=1.0)
    requests = [(prompt, index) for prompt in batch for index in range(settings.group_size)]
    params = [sampling_params(settings, request_seed(settings.seed_key, p.prompt_id, i), max_tokens=24) for p, i in requests]
    replies = engine._llm.generate([{"prompt_token_ids": list(p.token_ids)} for p, _ in requests], params, use_tqdm=False)
    groups = engine.sample(batch, settings)
    assert np.concatenate([g.arrays.token_ids for g in groups]).tolist() == [t for r in replies for t in r.outputs[0].token_ids]
    assert np.concatenate([g.arrays.logp for g in groups]).tolist() == [
        np.float32(value) for r in replies for value in r.outputs[0].logprobs.logprobs]
    assert all(group.turns == () and group.arrays.entropy is None for group in groups)


def test_groups_come_as_they_end(made):
    from engine_models import prompts, sampling

    engine, batch = made[0], prompts(16)
    settings = dataclasses.replace(sampling(temperature=1.0), group_size=1)
    whole = engine.sample(batch, settings)
    stream = engine.stream(batch, settings)
    first = next(stream)
    assert engine._llm.llm_engine.has_unfinished_requests() and len(first) < 16, "others are still sampled"
    rest = list(stream)
    came = [one for finished in [first, *rest] for one in finished]
    assert sorted(index for index, _ in came) == list(range(16)) and [index for index, _ in came] != list(range(16))
    for index, group in came:
        assert group.arrays.token_ids.tolist() == whole[index].arrays.token_ids.tolist()
    assert [len(finished) for finished in engine.stream(batch, settings, 1000.0)] == [16], "all that ends within the time, at once"
    abandoned = engine.stream(batch, settings)
    next(abandoned)
    abandoned.close()
    assert not engine._llm.llm_engine.has_unfinished_requests()


def test_a_prompts_own_limit(made):
    from engine_models import prompts, sampling

    short, other = dataclasses.replace(prompts(1)[0], max_response_tokens=3), prompts(2)[1]
    groups = made[0].sample([short, other], sampling(temperature=1.0, group_size=16))
    assert max(groups[0].response_lengths) == 3 and max(groups[1].response_lengths) > 3
    wide = dataclasses.replace(short, max_response_tokens=99)
    assert max(made[0].sample([wide], sampling(temperature=1.0))[0].response_lengths) <= 24, "never more than the run's"


def test_entropies_from_the_twenty_most_probable(made):
    import torch
    from engine_models import VOCABULARY, prompts, sampling

    engine, model, _ = made
    (group,) = drawn(Sampler(engine._llm, name="e", vocab_size=VOCABULARY, entropy_topk=20), prompts(1), sampling(temperature=0.7))
    (plain,) = engine.sample(prompts(1), sampling(temperature=0.7))
    assert group.arrays.token_ids.tolist() == plain.arrays.token_ids.tolist(), "asking for entropies changes no sample"
    np.testing.assert_allclose(group.arrays.logp, plain.arrays.logp, atol=1e-5)
    ids, prompt = rows(group)[0][0].tolist(), prompts(1)[0].token_ids
    with torch.no_grad():
        logp = torch.log_softmax(model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1] / 0.7, -1).numpy()
    exact = -(np.exp(logp) * logp).sum(-1)
    rest = 1 - np.sort(np.exp(logp), -1)[:, -20:].sum(-1)
    found = group.arrays.entropy[: len(ids)]
    assert group.arrays.entropy.dtype == np.float32 and len(group.arrays.entropy) == len(group.arrays.logp)
    assert (found <= exact + 1e-4).all() and (exact <= found + rest * np.log(4) + 1e-4).all()
    assert exact.max() > 1.0, "and the bias is small against it"


class ScriptedEnvironments:
    """Answers turn t of every response with the t-th step; with ``fails`` the first turn of all is a fault instead. Replies come
    one poll later."""

    def __init__(self, steps, *, fails=False):
        self.steps, self.fails, self.lost = steps, fails, None
        self.tasks, self.heard, self.closed, self.replies = {}, {}, [], []

    def open(self, key, task):
        self.tasks[key], self.heard[key] = task, []

    def step(self, key, turn):
        self.heard[key].append(turn)
        if self.fails and self.lost is None:
            self.lost = key
        self.replies.append((key, Fault("killed") if key == self.lost else self.steps[len(self.heard[key]) - 1]))

    def close_one(self, key):
        self.closed.append(key)

    def poll(self, timeout_s):
        replies, self.replies = self.replies, []
        return replies


def conversing(engine, environments, **changes):
    from engine_models import VOCABULARY

    tools = Tools(environments=environments, observation_ids=lambda text: [int(word) for word in text.split()],
                  text=lambda ids: " ".join(map(str, ids)), max_turns=2, max_turn_tokens=8, void_turns="mask_turn", silence_s=5.0)
    return Sampler(engine._llm, name="e", vocab_size=VOCABULARY, tools=dataclasses.replace(tools, **changes))


def drawn(sampler, batch, settings):
    return [group for _, group in sorted(one for finished in sampler.stream(batch, settings) for one in finished)]


def test_conversations(made):
    """Up to two answers of two tokens. Every sampled token has the model's log-prob after all that stands before it."""
    from engine_models import END, prompts, reference_logp, sampling

    engine, model, _ = made
    environments = ScriptedEnvironments([Step("2 3", call=True), Step("4 5", void=True), Step("6 7", call=True)], fails=True)
    batch, settings = prompts(6), sampling(temperature=1.0)
    groups = drawn(conversing(engine, environments), batch, settings)
    plain = engine.sample(batch, settings)
    reasons = {reason for group in groups for reason in group.finish_reasons}
    assert reasons == {"turns", "length", "stop"} and len(environments.tasks) == 24
    assert sorted(environments.closed) == sorted(environments.tasks), "every environment is closed once"
    for place, (prompt, group) in enumerate(zip(batch, groups, strict=True)):
        for number, (ids, logp) in enumerate(zip(*rows(group), strict=True)):
            turns, key = group.turns[number], f"test/{place}#{place}.{number}"
            task = environments.tasks[key]
            assert (task.prompt_id, task.sample_index) == (prompt.prompt_id, number)
            expected = reference_logp(model, [*prompt.token_ids, *ids.tolist()])[len(prompt.token_ids) - 1 :]
            mask = turns.sampled_mask()
            np.testing.assert_allclose(logp[mask], expected[mask], atol=1e-4)
            assert (logp[~mask] == 0).all() and ids[~mask].tolist() == [2, 3, 4, 5][: (~mask).sum()]
            pieces = np.split(ids, np.cumsum(turns.segments)[:-1])[::2]
            assert [" ".join(map(str, piece[:-1])) for piece in pieces if piece[-1] == END] == environments.heard[key]
            first = rows(plain[place])[0][number].tolist()
            assert pieces[0].tolist() == first[:8], "the first turn has the seed of a response in one piece"
            assert max(map(len, pieces)) <= 8 and len(ids) <= 24
            assert turns.left_out == turns.void and turns.void == ((1,) if len(environments.heard[key]) > 1 else ())
            assert turns.fault == ("killed" if key == environments.lost else "")
            assert turns.calls == (0 if turns.fault else sum(turn != 1 for turn in range(len(environments.heard[key]))))
            assert group.finish_reasons[number] == "stop" or not turns.fault
    assert environments.lost is not None


def test_each_turn_has_a_seed_of_its_own(made):
    from engine_models import prompts, sampling

    engine, settings = made[0], sampling(temperature=1.0, group_size=8)
    (prompt,) = prompts(1)
    (group,) = drawn(conversing(engine, ScriptedEnvironments([Step("2 3"), Step(None)]), max_turn_tokens=None), [prompt], settings)
    checked = 0
    for number, (ids, turns) in enumerate(zip(rows(group)[0], group.turns, strict=True)):
        if turns.num_turns < 2:
            continue
        begin, longest = turns.last_turn, 24 - turns.last_turn
        so_far = dataclasses.replace(prompt, token_ids=(*prompt.token_ids, *ids[:begin].tolist()))
        again = dataclasses.replace(settings, seed_key=(*settings.seed_key, "turn", 1), max_response_tokens=longest)
        (other,) = engine.sample([so_far], again)
        assert rows(other)[0][number].tolist() == ids[begin:].tolist()
        checked += 1
    assert checked >= 2


def test_environments_that_fall_silent_are_named(made):
    from engine_models import prompts, sampling

    environments = ScriptedEnvironments([])
    environments.step = lambda key, turn: None
    with pytest.raises(RunError, match=r"environments: got no answer"):
        drawn(conversing(made[0], environments, silence_s=0.1), prompts(4), sampling(temperature=1.0))
    assert sorted(environments.closed) == sorted(environments.tasks), "a failed draw leaves no environment open"


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
