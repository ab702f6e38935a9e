"""The ZeRO-3 learner in real processes: gradients against plain torch, failures, checkpoints, export.

Covered: gloo on CPU, one and two ranks, float32, tied and untied heads. Not covered: NCCL, bfloat16, optimizer offload.
"""

from __future__ import annotations

import json

import learner_world as world
import numpy as np
import pytest
import torch

pytestmark = pytest.mark.stack
TOLERANCE = 5e-6  # float32 sums in another order; the gradients' largest entry is about 0.7


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learner")
    world.build_model(folder / "model")
    world.build_model(folder / "tied", tied=True)
    out = {"folder": folder}
    for batch in ((("training", 2), ("gradients", 1)), (("resume", 2), ("tied", 1))):
        if batch[0][0] == "resume":
            (folder / "checkpoint").symlink_to(folder / "training" / "checkpoint")
        started = [(name, world.start(name, ranks, folder / name, folder)) for name, ranks in batch]
        for name, processes in started:
            out[name] = world.finish(processes, folder / name)
    return out


def plain_gradients(folder, samples) -> dict[str, torch.Tensor]:
    """One process, no packing, no chunks, no sharding, and the loss written out."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    frozen = model.get_output_embeddings().weight.detach().clone()
    kl, count = world.OBJECTIVE.kl, sum(len(s.response_ids) for s in samples.values() if s.trains)
    for sample in samples.values():
        if not sample.trains:
            continue
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids]).astype(np.int64))
        logits = model(ids[None]).logits[0, len(sample.prompt_ids) - 1 : -1] / world.TEMPERATURE
        logprobs, targets = logits.log_softmax(-1), torch.from_numpy(sample.response_ids.astype(np.int64))
        logp = logprobs.gather(-1, targets[:, None])[:, 0]
        if "hidden" in sample.ref_rows:
            ref = (torch.from_numpy(sample.ref_rows["hidden"]) @ frozen.T / world.TEMPERATURE).log_softmax(-1)
            forward = (ref.exp() * (ref - logprobs)).sum(-1)
            reverse = (logprobs.exp() * (logprobs - ref)).sum(-1)
        else:
            pairs = [divergences_by_hand(row, int(targets[t]), sample, t) for t, row in enumerate(logprobs)]
            forward, reverse = (torch.stack(values) for values in zip(*pairs, strict=True))
        penalty = torch.where(torch.from_numpy(sample.answer_mask), kl.beta_answer * reverse, kl.beta_reasoning * forward)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        loss = (-sample.advantage * logp + penalty - world.OBJECTIVE.entropy_coef * entropy).sum() / count
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def divergences_by_hand(logprobs, target: int, sample, t: int):
    """Both divergences at one state with the masses of the buckets added up one token at a time."""
    rows = sample.ref_rows
    kept = zip(rows["topk_ids"][t].tolist(), rows["topk_logp"][t], strict=True)
    masses = {i: (logprobs[i].exp(), float(np.exp(logp))) for i, logp in kept}
    masses[target] = (logprobs[target].exp(), float(np.exp(sample.ref_logp[t])))
    others = [logprobs[i].exp() for i in range(world.VOCAB) if i not in masses]
    masses[-1] = (torch.stack(others).sum(), float(np.exp(rows["topk_rest"][t])))
    return sum(q * (np.log(q) - p.log()) for p, q in masses.values()), sum(p * (p.log() - np.log(q)) for p, q in masses.values())


def largest_gap(a, b) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def test_gradient_equals_plain_torch_for_one_and_two_ranks(runs):
    expected = plain_gradients(runs["folder"] / "model", world.make_samples())
    assert max(float(g.abs().max()) for g in expected.values()) > 0.1
    assert largest_gap(runs["gradients"][0]["one_cut"], expected) < TOLERANCE
    for rank in runs["training"]:
        assert largest_gap(rank["gradients"]["one_cut"], expected) < TOLERANCE


def test_topk_gradient_equals_plain_torch_on_two_ranks_and_with_a_tied_head(runs):
    for folder, results in (("model", runs["training"]), ("tied", runs["tied"])):
        expected = plain_gradients(runs["folder"] / folder, world.make_samples(estimator="topk"))
        for rank in results:
            assert largest_gap(rank["topk"], expected) < TOLERANCE
    full = runs["training"][0]["gradients"]["one_cut"]
    assert largest_gap(runs["training"][0]["topk"], full) > 1000 * TOLERANCE  # the control: another reference


@pytest.mark.parametrize("cut", ["many_cuts", "reordered", "again"])
def test_gradient_does_not_depend_on_the_cut(runs, cut):
    expected = runs["gradients"][0]["one_cut"]
    assert largest_gap(runs["gradients"][0][cut], expected) < TOLERANCE
    assert largest_gap(runs["training"][0]["gradients"][cut], expected) < TOLERANCE


def test_the_comparison_sees_a_small_change(runs):
    """Negative control: another advantage of one of 17 samples is far outside the tolerance."""
    import dataclasses

    samples = world.make_samples()
    samples[2, 0] = dataclasses.replace(samples[2, 0], advantage=samples[2, 0].advantage + 0.01)
    assert largest_gap(plain_gradients(runs["folder"] / "model", samples), runs["gradients"][0]["one_cut"]) > 20 * TOLERANCE


def test_parameters_are_sharded(runs):
    whole = {name: int(np.prod(p.shape)) for name, p in plain_parameters(runs["folder"] / "model").items()}
    for rank in runs["training"]:
        assert set(rank["numel"].values()) == {0}
        assert rank["shard"] == {name: numel // 2 for name, numel in whole.items()}


def test_the_references_head_stays_as_it_was_and_out_of_the_model(runs):
    before = plain_parameters(runs["folder"] / "model")
    for rank in runs["training"]:  # after nine optimizer steps
        weight, bias = rank["frozen_head"]
        assert torch.equal(weight, before["lm_head.weight"]) and bias is None and not weight.requires_grad
        assert rank["manifest"] == list(before)
    after = plain_parameters(runs["folder"] / "training" / "export")
    assert not torch.equal(after["lm_head.weight"], before["lm_head.weight"])


def test_a_bucket_is_whole_on_rank_0_and_nowhere_else(runs):
    first, second = (rank["bucket"] for rank in runs["training"])
    assert second is None
    expected = plain_parameters(runs["folder"] / "model")
    assert set(first) == {"model.norm.weight", "lm_head.weight"}
    for name, tensor in first.items():
        assert torch.equal(tensor, expected[name])


def plain_parameters(folder):
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


@pytest.mark.parametrize("kind", ["bad_loss", "bad_gradient"])
def test_non_finite_numbers_leave_the_weights_alone_on_every_rank(runs, kind):
    messages = [rank[kind] for rank in runs["training"]]
    assert messages[0] == messages[1] and "no error" not in messages[0]
    assert all(rank["unchanged"] for rank in runs["training"])
    if kind == "bad_loss":
        assert "loss of micro-batch" in messages[0] and "(4, 1)" in messages[0] and "rank 1" in messages[0]
        (dump,) = (runs["folder"] / "training" / "failures").glob("loss*.npz")
        with np.load(dump) as arrays:
            assert np.isinf(arrays["4/1/advantage"])
            np.testing.assert_array_equal(arrays["4/1/response_ids"], world.make_samples()[4, 1].response_ids)
    assert not list((runs["folder"] / "training" / "failures").glob("*.tmp"))


def test_dropped_gradients_do_not_leak_into_the_next_update(runs):
    for rank in runs["training"]:
        assert largest_gap(rank["gradient_after_failure"], rank["gradients"]["one_cut"]) == 0.0


def test_fully_masked_update_is_skipped_and_counted(runs):
    for rank in runs["training"]:
        steps, skipped, metrics = rank["masked"]
        assert (steps, skipped) == (0, 1)
        assert all(np.isfinite(value) for value in metrics.values()) and "learner/loss" not in metrics


def test_metrics_are_global_and_finite(runs):
    first, second = (rank["metrics"] for rank in runs["training"])
    assert first == second
    samples = world.make_samples(100)
    tokens = sum(len(s.response_ids) for s in samples.values() if s.trains)
    metrics = first[0].metrics
    assert metrics["learner/tokens"] == tokens and metrics["learner/lr"] == pytest.approx(0.005)  # warm-up of two steps
    assert metrics["objective/ratio_max"] == 1.0 and metrics["objective/clip_fraction"] == 0.0
    assert first[1].optimizer_steps == 2 and first[1].metrics["objective/ratio_max"] > 1.0  # second update: off-policy
    assert all(np.isfinite(value) for update in first for value in update.metrics.values())
    expected = -sum(s.advantage * len(s.response_ids) for s in samples.values() if s.trains) / tokens
    assert metrics["objective/policy_loss"] == pytest.approx(expected, rel=1e-5)


def test_three_and_three_steps_are_six_to_the_bit(runs):
    whole, resumed = runs["training"][0], runs["resume"][0]
    assert whole["changed"] and resumed["loaded_differs"]
    assert resumed["after_six"] == whole["after_six"] and resumed["steps"] == whole["steps"] == 9
    assert "world_size" in resumed["other_topology"]


def expected_probe(model, ids):
    logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(-1, torch.tensor(ids)[1:, None])[:, 0].detach().numpy()


def test_probe_is_at_temperature_one_and_for_every_token_but_the_first(runs):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(runs["folder"] / "model")
    for rank in runs["training"]:
        for got, ids in zip(rank["probe"], [list(range(9)), [3], list(range(5, 24))], strict=True):
            np.testing.assert_allclose(got, expected_probe(model, ids), atol=1e-5)


def test_entropies_of_every_response_token_at_the_sampling_temperature(runs):
    """Each rank gives those of its own responses, together every one once; one response at a time is the same."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(runs["folder"] / "model")
    samples = [sample for (g, _), sample in sorted(world.make_samples().items()) if g != 1]
    found = [rank["entropies"] for rank in runs["training"]]
    assert all(found) and sum(map(len, found)) == len(samples) and len({key for part in found for key in part}) == len(samples)
    merged = {key: values for part in found for key, values in part.items()}
    for key, sample in zip(sorted(merged), samples, strict=True):
        ids = torch.tensor([[*sample.prompt_ids.tolist(), *sample.response_ids.tolist()]])
        logits = model(ids).logits[0, len(sample.prompt_ids) - 1:-1].detach() / world.TEMPERATURE
        np.testing.assert_allclose(merged[key], torch.distributions.Categorical(logits=logits).entropy().numpy(), atol=1e-4)
        assert merged[key].dtype == np.float32


@pytest.mark.parametrize(("run", "export", "probe"), [("training", "export", "probe_six"), ("tied", "export_tied", "probe")])
def test_export_reloads_with_equal_log_probs(runs, run, export, probe):
    from transformers import AutoModelForCausalLM

    folder = runs["folder"] / run / export
    model = AutoModelForCausalLM.from_pretrained(folder)
    np.testing.assert_allclose(runs[run][0][probe][0], expected_probe(model, list(range(9))), atol=1e-5)
    assert (folder / "tokenizer.json").is_file() and json.loads((folder / "config.json").read_text())["dtype"] == "float32"


def test_tied_head_is_listed_and_gathered_explicitly_but_exported_once(runs):
    from safetensors import safe_open

    (first,) = runs["tied"]
    names = [info.name for info in first["manifest"]]
    assert names[-1] == "lm_head.weight" and first["manifest"][-1].shape == (world.VOCAB, 32)
    assert {info.dtype for info in first["manifest"]} == {"float32"}
    assert list(first["bucket"]) == names
    assert torch.equal(first["bucket"]["lm_head.weight"], first["bucket"]["model.embed_tokens.weight"])
    with safe_open(runs["folder"] / "tied" / "export_tied" / "model.safetensors", framework="pt") as reader:
        assert sorted(reader.keys()) == sorted(set(names) - {"lm_head.weight"})
    expected = plain_gradients(runs["folder"] / "tied", world.make_samples())
    assert largest_gap(first["gradients"], expected) < TOLERANCE
