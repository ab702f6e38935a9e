"""The ZeRO-3 critic in real processes: gradients and advantages against plain torch, failures, checkpoints.

Covered: gloo on CPU, one and two ranks, float32. Not covered: NCCL, bfloat16, optimizer offload.
"""

from __future__ import annotations

import critic_world as world
import numpy as np
import pytest
import torch

from akl_dist.objective import advantage_moments, generalized_advantages

pytestmark = pytest.mark.stack
TOLERANCE = 5e-6  # float32 sums in another order


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("critic")
    world.learner_world.build_model(folder / "model")
    out = {"folder": folder}
    for batch in ((("training", 2), ("gradients", 1)), (("resume", 2), ("gradients_of_two", 2))):
        if batch[0][0] == "resume":
            (folder / "checkpoint").symlink_to(folder / "training" / "checkpoint")
        started = [(name, world.learner_world.start(name.removesuffix("_of_two"), ranks, folder / name, folder, world.__file__))
                   for name, ranks in batch]
        for name, processes in started:
            out[name] = world.learner_world.finish(processes, folder / name)
    return out


def plain_values(folder, sample, head) -> torch.Tensor:
    """One process, no packing, no sharding: values of the states before each response token."""
    model, weight, bias = head
    ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids]).astype(np.int64))
    hidden = model.model(ids[None]).last_hidden_state[0, len(sample.prompt_ids) - 1 : -1]
    return hidden @ weight[0] + bias[0]


def plain_model(folder):
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(5)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    weight, bias = (torch.randn(shape, generator=generator) * 0.3 for shape in ((1, model.config.hidden_size), (1,)))
    return model, weight.requires_grad_(True), bias.requires_grad_(True)


def returns_of(sample, values) -> tuple[torch.Tensor, torch.Tensor]:
    rewards = torch.zeros(1, len(values))
    rewards[0, -1] = sample.reward
    got = generalized_advantages(rewards=rewards, values=values.detach()[None], mask=torch.ones(1, len(values)), gamma=world.GAMMA,
                                 lam=world.LAM)
    return got.advantages[0], got.returns[0]


def plain_gradients(folder) -> dict[str, torch.Tensor]:
    samples, head = world.make_samples(), plain_model(folder)
    count = sum(len(s.response_ids) for s in samples.values())
    clipped = 0
    for sample in samples.values():
        values = plain_values(folder, sample, head)
        _, returns = returns_of(sample, values)
        old = values.detach() + 0.3
        window = values.clamp(old - world.CLIP, old + world.CLIP)
        errors = torch.stack([(values - returns) ** 2, (window - returns) ** 2])
        clipped += int((errors[1] > errors[0]).sum())
        (0.5 * errors.max(0).values.sum() / count).backward()
    assert 0 < clipped < count, "the window is at work on some tokens and not on others"
    model, weight, bias = head
    found = {f"decoder.{name.removeprefix('model.')}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {"head.weight": weight.grad, "head.bias": bias.grad}


def largest_gap(a, b) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def test_gradient_equals_plain_torch_for_one_and_two_ranks(runs):
    expected = plain_gradients(runs["folder"])
    assert max(float(g.abs().max()) for g in expected.values()) > 0.1
    assert largest_gap(runs["gradients"][0]["one_cut"], expected) < TOLERANCE
    for rank in runs["gradients_of_two"]:
        assert largest_gap(rank["one_cut"], expected) < TOLERANCE


def test_gradient_does_not_depend_on_the_cut(runs):
    for run in ("gradients", "gradients_of_two"):
        for rank in runs[run]:
            assert largest_gap(rank["one_cut"], rank["many_cuts"]) < TOLERANCE
            assert largest_gap(rank["one_cut"], rank["again"]) < TOLERANCE


def test_advantages_equal_plain_torch_and_moments_add_up_over_ranks(runs):
    samples, head = world.make_samples(), plain_model(runs["folder"])
    expected = {key: returns_of(s, plain_values(runs["folder"], s, head))[0] for key, s in samples.items()}
    flat = torch.cat(list(expected.values()))
    moments = advantage_moments(flat, torch.ones_like(flat))
    for run in ("gradients", "gradients_of_two"):
        appraisals = [rank["appraised"] for rank in runs[run]]
        got = {key: value for one in appraisals for key, value in one.advantages.items()}
        assert got.keys() == expected.keys() and sum(len(one.advantages) for one in appraisals) == len(expected)
        for key in expected:
            np.testing.assert_allclose(got[key], expected[key].numpy(), atol=1e-5)
        np.testing.assert_allclose(sum(one.moments for one in appraisals), moments.numpy(), rtol=1e-5, atol=1e-4)
        assert all(one.metrics == appraisals[0].metrics for one in appraisals)


def test_a_new_critic_is_zero_and_its_advantages_are_discounted_rewards(runs):
    samples = world.make_samples()
    got = {key: value for rank in runs["training"] for key, value in rank["first"].advantages.items()}
    for key, sample in samples.items():
        steps = np.arange(len(sample.response_ids))[::-1]
        np.testing.assert_allclose(got[key], sample.reward * (world.GAMMA * world.LAM) ** steps, rtol=1e-5)
    metrics = runs["training"][0]["first"].metrics
    assert metrics["critic/value_mean"] == 0 and metrics["critic/explained_variance"] == pytest.approx(0, abs=1e-9)
    assert metrics["critic/grad_norm"] > 0 and metrics["critic/lr"] == world.LEARNER.lr


def test_it_learns_the_reward_of_responses_it_has_seen(runs):
    """The same three batches again and again: the value loss falls and the values explain the returns."""
    early, late = runs["training"][0]["metrics"], runs["training"][0]["later"][-3:]
    assert max(m["critic/value_loss"] for m in late) < 0.5 * min(m["critic/value_loss"] for m in early)
    assert min(m["critic/explained_variance"] for m in late) > 0.5


def test_a_failed_update_and_one_without_verdicts_leave_the_weights(runs):
    for rank in runs["training"]:
        assert rank["unchanged"] and rank["changed"]
        assert rank["silent"] == ({}, {"critic/lr": world.LEARNER.lr})
        stage, message = rank["bad"]
        assert stage == "critic" and "(4, 1)" in message and "critic.lr" in message
    assert list((runs["folder"] / "training" / "failures").glob("*.npz"))


def test_resume_is_bit_exact_and_topology_is_checked(runs):
    first, resumed = runs["training"][0], runs["resume"][0]
    assert resumed["loaded_differs"]
    assert (resumed["after_six"], resumed["steps"]) == (first["after_six"], first["steps"])
    assert "no learner checkpoint" in resumed["other_role"]
