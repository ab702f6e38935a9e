"""The frozen reference against plain, unpacked forward passes; and its pool on a local Ray."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from akl_dist.contract.errors import UserError
from akl_dist.contract.records import Prompt, RolloutArrays, RolloutGroup
from akl_dist.reference.worker import ReferenceWorker, Responses

VOCAB, TEMPERATURE = 24, 0.7
RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(0, VOCAB, n) for n in (5, 2)]
RESPONSES = [[RNG.integers(0, VOCAB, n).astype(np.int32) for n in sizes] for sizes in ((7, 1, 12), (3, 9))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False, initializer_range=0.3,
    )
    path = tmp_path_factory.mktemp("reference")
    Qwen2ForCausalLM(config).float().save_pretrained(path)
    return path


def make_worker(folder, *, max_tokens=64, chunk=5, estimator="full", dtype="float32"):
    return ReferenceWorker(
        model_path=str(folder), dtype=dtype, attention="sdpa", temperature=TEMPERATURE, num_threads=1,
        max_tokens_per_batch=max_tokens, logprob_chunk_tokens=chunk, kl_estimator=estimator, topk=4, device="cpu")


def plain_logprobs(model, prompt, responses) -> torch.Tensor:
    rows = []
    for response in responses:
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
        rows.append(model(ids).logits[0, len(prompt) - 1 : -1].div(TEMPERATURE).log_softmax(-1))
    return torch.cat(rows).detach()


@pytest.mark.parametrize(("max_tokens", "chunk"), [(64, 1000), (64, 5), (17, 3)])
def test_scores_equal_plain_forward_passes(folder, max_tokens, chunk):
    worker = make_worker(folder, max_tokens=max_tokens, chunk=chunk)
    for prompt, responses in zip(PROMPTS, RESPONSES, strict=True):
        expected = plain_logprobs(worker.model, prompt, responses)
        targets = torch.from_numpy(np.concatenate(responses).astype(np.int64))
        logp = expected.gather(-1, targets[:, None])[:, 0]
        mu = logp.numpy() + 0.5
        scored = worker.score([Responses(prompt.tolist(), responses, mu)])[0]
        np.testing.assert_allclose(scored.arrays.logp, logp, atol=1e-5)
        np.testing.assert_allclose(scored.arrays.entropy, -(expected.exp() * expected).sum(-1), atol=1e-5)
        head = worker.model.get_output_embeddings().weight
        again = (torch.from_numpy(scored.arrays.hidden) @ head.T / TEMPERATURE).log_softmax(-1)
        np.testing.assert_allclose(again, expected, atol=1e-5)
        assert set(scored.arrays.rows) == {"hidden"}
        # mu/ref = e^0.5 on every token: k1 = 0.5 and k3 = e^-0.5 - 1 + 0.5 each.
        sizes = np.array([len(response) for response in responses])
        np.testing.assert_allclose(scored.kl_k1, 0.5 * sizes, rtol=1e-4)
        np.testing.assert_allclose(scored.kl_k3, (np.exp(-0.5) - 0.5) * sizes, rtol=1e-4)


def test_packing_across_groups_changes_nothing(folder):
    """Two groups scored together equal each scored alone."""
    worker = make_worker(folder)
    groups = [Responses(prompt.tolist(), responses, np.zeros(sum(map(len, responses)), np.float32))
              for prompt, responses in zip(PROMPTS, RESPONSES, strict=True)]
    for together, group in zip(worker.score(groups), groups, strict=True):
        (alone,) = worker.score([group])
        np.testing.assert_allclose(together.arrays.logp, alone.arrays.logp, atol=1e-5)
        np.testing.assert_allclose(together.kl_k3, alone.kl_k3, rtol=1e-4)


def test_temperature_matters(folder):
    """Negative control: log-probs at temperature 1 are far from the worker's."""
    worker = make_worker(folder)
    scored = worker.score([Responses(PROMPTS[0].tolist(), RESPONSES[0], np.zeros(20, np.float32))])[0]
    worker.temperature = 1.0
    other = worker.score([Responses(PROMPTS[0].tolist(), RESPONSES[0], np.zeros(20, np.float32))])[0]
    assert np.abs(scored.arrays.logp - other.arrays.logp).max() > 0.1


@pytest.mark.parametrize(("max_tokens", "chunk"), [(64, 1000), (17, 3)])
def test_topk_side_data_equal_plain_forward_passes(folder, max_tokens, chunk):
    worker = make_worker(folder, max_tokens=max_tokens, chunk=chunk, estimator="topk")
    expected = plain_logprobs(worker.model, PROMPTS[0], RESPONSES[0])
    (scored,) = worker.score([Responses(PROMPTS[0].tolist(), RESPONSES[0], np.zeros(20, np.float32))])
    arrays = scored.arrays
    assert set(arrays.rows) == {"topk_ids", "topk_logp", "topk_rest"}
    assert arrays.topk_ids.dtype == np.int32 and arrays.topk_ids.shape == (20, 4)
    values, ids = expected.topk(4)
    np.testing.assert_array_equal(arrays.topk_ids, ids)
    np.testing.assert_allclose(arrays.topk_logp, values, atol=1e-5)
    for t, target in enumerate(np.concatenate(RESPONSES[0])):
        kept = {*ids[t].tolist(), int(target)}
        rest = sum(math.exp(expected[t, v]) for v in range(VOCAB) if v not in kept)
        assert arrays.topk_rest[t] == pytest.approx(math.log(rest), abs=1e-4)
    assert len({len({*row, int(y)}) for row, y in zip(ids.tolist(), np.concatenate(RESPONSES[0]), strict=True)}) == 2  # both cases


def test_bfloat16_hidden_states_travel_as_their_bits(folder):
    worker = make_worker(folder, dtype="bfloat16")
    (scored,) = worker.score([Responses(PROMPTS[0].tolist(), RESPONSES[0], np.zeros(20, np.float32))])
    assert scored.arrays.hidden.dtype == np.uint16 and scored.arrays.logp.dtype == np.float32
    hidden = torch.from_numpy(scored.arrays.hidden.view(np.int16)).view(torch.bfloat16)
    logits = worker.model.get_output_embeddings()(hidden).float()
    targets = torch.from_numpy(np.concatenate(RESPONSES[0]).astype(np.int64))
    again = (logits / TEMPERATURE).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    np.testing.assert_allclose(again.detach(), scored.arrays.logp, atol=1e-5)


def test_frozen_and_without_more_than_asked_for(folder):
    worker = make_worker(folder, estimator="sampled")
    scored = worker.score([Responses(PROMPTS[0].tolist(), RESPONSES[0], np.zeros(20, np.float32))])[0]
    assert scored.arrays.rows == {}
    assert not worker.model.training and not any(p.requires_grad for p in worker.model.parameters())


def test_refuses_what_cannot_be_scored(folder):
    worker = make_worker(folder, max_tokens=10)
    with pytest.raises(UserError, match="16 tokens"):
        worker.score([Responses(PROMPTS[0].tolist(), RESPONSES[0], np.zeros(20, np.float32))])[0]
    with pytest.raises(ValueError, match="expected"):
        worker.score([Responses(PROMPTS[0].tolist(), RESPONSES[0], np.zeros(3, np.float32))])[0]


@pytest.fixture(scope="module")
def cluster():
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.stack
def test_pool_deals_groups_and_keeps_their_order(folder, cluster):
    from akl_dist.cluster.gather import fetch, gather, store
    from akl_dist.reference.pool import ReferencePool, ReferenceSettings

    settings = ReferenceSettings(
        model_path=str(folder), dtype="float32", attention="sdpa", device="cpu", temperature=TEMPERATURE, num_threads=1,
        max_tokens_per_batch=64, logprob_chunk_tokens=8, kl_estimator="topk", topk=3, timeout_s=60.0)
    pool = ReferencePool(run_id="test", settings=settings, actor_options=[{"num_cpus": 0.5}, {"num_cpus": 0.5}])
    gather(pool.ready(), timeout_s=120.0, stage="reference", doing="starting")
    groups = []
    for index, (prompt, responses) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        flat = np.concatenate(responses)
        groups.append(RolloutGroup(
            Prompt(f"test/{index}", "test", "", tuple(prompt.tolist()), ""), tuple(len(r) for r in responses),
            ("stop",) * len(responses), 0, "rollout/test/0", store(RolloutArrays(flat, np.zeros(len(flat), np.float32)))))
    worker = make_worker(folder, estimator="sampled")
    for group, record, responses in zip(groups, pool.score(groups), RESPONSES, strict=True):
        assert record.prompt_id == group.prompt.prompt_id
        (expected,) = worker.score([Responses(group.prompt.token_ids, responses, np.zeros(group.num_tokens, np.float32))])
        arrays = fetch(record.arrays, timeout_s=10.0, stage="reference", what="scores")
        np.testing.assert_allclose(arrays.logp, expected.arrays.logp, atol=1e-6)
        assert arrays.topk_logp.shape == (group.num_tokens, 3)
        assert record.kl_k1 == pytest.approx(expected.kl_k1, rel=1e-5)
    assert set(pool.ping()) == {"reference/test/0", "reference/test/1"}
    pool.close()


def test_kl_estimates_leave_out_what_an_environment_wrote(folder):
    """The same scores for every token; sums over the sampled ones alone."""
    worker, responses = make_worker(folder, estimator="sampled"), RESPONSES[0]
    n = sum(map(len, responses))
    logp = np.full(n, -1.0, np.float32)
    mask = np.arange(n) % 3 != 1
    whole, part = worker.score([Responses(PROMPTS[0], responses, logp), Responses(PROMPTS[0], responses, logp, mask)])
    np.testing.assert_allclose(part.arrays.logp, whole.arrays.logp, rtol=1e-5)
    cuts = np.cumsum([len(r) for r in responses])[:-1]
    expected = [np.sum(-1.0 - ref[own].astype(np.float64))
                for ref, own in zip(np.split(part.arrays.logp, cuts), np.split(mask, cuts), strict=True)]
    assert part.kl_k1 == pytest.approx(expected, abs=1e-4) and whole.kl_k1 != pytest.approx(expected)
