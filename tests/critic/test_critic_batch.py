"""Targets, loss and metrics of the critic at hand-made numbers; combination of ranks; the warm-up. No process, no cluster."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from critic_groups import training_group

from akl_dist.contract.records import CriticArrays, RolloutArrays, TrainingGroup, Turns, Update
from akl_dist.critic.batch import (
    MOMENTS,
    SUMS,
    ValueSample,
    mean_advantage,
    metrics_from_sums,
    micro_batch_loss,
    pack,
    samples_of,
    target_moments,
    targets_of,
    token_advantages,
)
from akl_dist.critic.pool import RankReport, combined
from akl_dist.critic.warmup import AfterWarmup


def sample(length: int, reward: float) -> ValueSample:
    return ValueSample(np.array([7, 8]), np.arange(length, dtype=np.int32), reward)


def packed(*samples: ValueSample):
    return pack([(0, index) for index in range(len(samples))], samples)


def test_the_reward_lies_on_the_last_token_of_each_response():
    batch = packed(sample(3, 1.0), sample(1, -0.5))
    assert batch.rewards.tolist() == [[0, 0, 1], [-0.5, 0, 0]]
    assert batch.mask.tolist() == [[True, True, True], [True, False, False]]
    assert not pack([], []).mask.any()


def test_targets_by_hand():
    """V = (1, 2, 4), reward 8, gamma = lam = 1/2: advantages (1/4, 1, 4), returns (5/4, 3, 8)."""
    targets = targets_of(packed(sample(3, 8.0)), torch.tensor([1.0, 2.0, 4.0]), gamma=0.5, lam=0.5)
    assert targets.advantages.tolist() == [[0.25, 1, 4]] and targets.returns.tolist() == [[1.25, 3, 8]]


def test_loss_is_a_share_of_the_whole_update_and_a_dummy_is_zero_but_connected():
    samples = [sample(3, 1.0), sample(2, 0.0), sample(4, 0.5)]
    torch.manual_seed(0)
    values = torch.randn(9)

    def loss(rows, flat, old):
        batch = packed(*rows)
        targets = targets_of(batch, old, gamma=1.0, lam=0.9)
        return micro_batch_loss(batch, flat, targets, clip=0.2, total_tokens=9)

    old = values + 0.3
    whole, sums = loss(samples, values, old)
    parts = [loss(samples[:1], values[:3], old[:3]), loss(samples[1:], values[3:], old[3:])]
    assert whole.item() == pytest.approx(sum(part[0].item() for part in parts), rel=1e-6)
    torch.testing.assert_close(sums, parts[0][1] + parts[1][1])
    assert sums[SUMS.index("clipped")] == 9, "every value is .3 from its old one"
    leaf = torch.ones(1, requires_grad=True)
    dummy = pack([], [])
    zero, _ = micro_batch_loss(dummy, leaf, targets_of(dummy, leaf, gamma=1.0, lam=1.0), clip=0.2, total_tokens=9)
    zero.backward()
    assert zero.item() == 0 and leaf.grad.tolist() == [0]


def test_explained_variance_by_hand():
    """Returns 0 and 2; values 0 and 1: errors 0 and 1, so 1 - .25 / 1. A constant offset explains as much; a constant nothing."""
    def explained(values):
        batch = packed(sample(1, 0.0), sample(1, 2.0))
        moments = target_moments(batch, targets_of(batch, torch.tensor(values), gamma=1.0, lam=1.0))
        sums = dict.fromkeys(SUMS, 0.0)
        return metrics_from_sums(sums, dict(zip(MOMENTS, moments.tolist(), strict=True)), updates=1)

    assert explained([0.0, 1.0])["critic/explained_variance"] == pytest.approx(0.75)
    assert explained([5.0, 7.0])["critic/explained_variance"] == pytest.approx(1.0)
    assert explained([3.0, 3.0])["critic/explained_variance"] == pytest.approx(0.0)
    assert explained([2.0, 0.0])["critic/explained_variance"] == pytest.approx(-3.0)
    assert explained([0.0, 1.0])["critic/value_mean"] == 0.5 and explained([0.0, 1.0])["critic/return_mean"] == 1.0


def test_metrics_are_absent_where_undefined():
    nothing = metrics_from_sums(dict.fromkeys(SUMS, 0.0), dict.fromkeys(MOMENTS, 0.0), updates=0)
    assert nothing == {}
    equal = dict(zip(MOMENTS, (2.0, 0.0, 2.0, 2.0, 2.0, 2.0), strict=True))  # two returns of 1
    assert "critic/explained_variance" not in metrics_from_sums(dict.fromkeys(SUMS, 0.0), equal, updates=1)


def test_only_responses_with_a_verdict_are_samples():
    group = training_group("a", lengths=(2, 3, 1), advantages=(1.0, 0.0, 0.25), trains=(True, False, True))
    found = samples_of(4, group, RolloutArrays(np.arange(6, dtype=np.int32), np.zeros(6, np.float32)))
    assert [(key, one.response_ids.tolist(), one.reward) for key, one in found.items()] == [
        ((4, 0), [0, 1], 1.0), ((4, 2), [5], 0.25)]


def report(handles, means, advantages) -> RankReport:
    values = np.asarray(advantages, np.float64)
    return RankReport(handles, means, np.array([len(values), values.sum(), (values**2).sum()]), {"critic/value_loss": 0.5})


def test_ranks_are_combined_with_the_moments_of_all():
    """Rank 0 has group 0 with tokens 1, 1, 3; rank 1 group 2 with 5, 0: mean 2, unbiased variance (1 + 1 + 1 + 9 + 4) / 4."""
    groups = [training_group("a", lengths=(2, 1), advantages=(1.0, 0.0), trains=(True, True)),
              training_group("b", lengths=(4,), advantages=(0.0,), trains=(False,)),
              training_group("c", lengths=(2,), advantages=(1.0,), trains=(True,))]
    reports = [report({0: "h0"}, {0: (1.0, 3.0)}, [1, 1, 3]), report({2: "h2"}, {2: (2.5,)}, [5, 0])]
    appraisal = combined(groups, reports, whiten=True)
    first, second, third = appraisal.groups
    assert (first.token_advantages, second.token_advantages, third.token_advantages) == ("h0", None, "h2")
    assert first.advantage_mean == 2.0 and first.advantage_deviation == pytest.approx(2.0)
    assert first.advantages == pytest.approx((-0.5, 0.5)) and third.advantages == pytest.approx((0.25,))
    assert second.advantages == (0.0,)
    assert appraisal.metrics["critic/advantage_mean"] == 2.0 and appraisal.metrics["critic/value_loss"] == 0.5
    plain = combined(groups, reports, whiten=False).groups[0]
    assert (plain.advantage_mean, plain.advantage_deviation, plain.advantages) == (0.0, 1.0, (1.0, 3.0))


def test_the_policy_waits_for_the_critic():
    class Learner:
        def update(self, groups, *, step, kl_coefficient):
            return Update(1, 0, {"learner/loss": step * kl_coefficient})

    learner = AfterWarmup(Learner(), steps=2)  # type: ignore[arg-type]
    updates = [learner.update([], step=step, kl_coefficient=2.0) for step in (1, 2, 3)]
    assert [u.optimizer_steps for u in updates] == [0, 0, 1]
    assert updates[1].metrics == {"critic/warming_up": 1.0} and updates[2].metrics == {"learner/loss": 6.0}


def test_the_learner_trains_on_whitened_token_advantages():
    from akl_dist.contract.records import ReferenceArrays, RoleArrays
    from akl_dist.learner import batch as learner

    group: TrainingGroup = dataclasses.replace(training_group("a", lengths=(2, 1), advantages=(9.0, 9.0), trains=(True, True)),
                                               advantage_mean=2.0, advantage_deviation=2.0)
    zeros = np.zeros(3, np.float32)
    arrays = (RolloutArrays(np.arange(3, dtype=np.int32), zeros), ReferenceArrays(zeros, zeros), RoleArrays(zeros.astype(bool)))
    samples = learner.samples_of(group, *arrays, CriticArrays(np.array([1, 1, 4], np.float32)))
    batch = learner.pack([(0, 0), (0, 1)], samples)
    assert batch.grid(batch.advantages).tolist() == [[-0.5, -0.5], [1.0, 0.0]]
    plain = learner.samples_of(group, *arrays)
    assert learner.pack([(0, 0), (0, 1)], plain).advantages.tolist() == [9, 9, 9]
    with pytest.raises(ValueError, match="advantages have shape"):
        learner.samples_of(group, *arrays, CriticArrays(np.zeros(2, np.float32)))


def test_what_an_environment_wrote_has_no_value_and_no_reward():
    """Two sampled tokens around one of the environment and one after the last: advantages as without them."""
    whole = dataclasses.replace(sample(4, 8.0), mask=np.array([True, False, True, False]))
    batch = packed(whole)
    assert batch.rewards.tolist() == [[0, 0, 8, 0]] and batch.mask.tolist() == [[True, False, True, False]]
    targets = targets_of(batch, torch.tensor([1.0, 9.0, 2.0, 9.0]), gamma=0.5, lam=0.5)
    alone = targets_of(packed(sample(2, 8.0)), torch.tensor([1.0, 2.0]), gamma=0.5, lam=0.5)
    assert targets.advantages[0, [0, 2]].tolist() == alone.advantages[0].tolist()
    assert targets.advantages[0, [1, 3]].tolist() == [0, 0]


def test_samples_carry_the_mask_of_their_turns():
    group = training_group("p", lengths=(4, 2), advantages=(1.0, 0.0), trains=(True, True))
    rollout = dataclasses.replace(group.labelled.rollout, turns=(Turns((1, 2, 1)), Turns((2,))))
    group = dataclasses.replace(group, labelled=dataclasses.replace(group.labelled, rollout=rollout))
    made = samples_of(0, group, RolloutArrays(np.arange(6, dtype=np.int32), np.zeros(6, np.float32)))
    masks = [one.mask for one in made.values()]
    assert [None if mask is None else mask.tolist() for mask in masks] == [[True, False, False, True], [True, True]]


def test_the_learner_gets_an_advantage_for_every_token_of_a_conversation():
    """[sampled, written, sampled] and a response of one turn: the learner's arrays keep their whole length, and a response's own
    advantage is the mean over its sampled tokens. V = (1, ., 2), reward 8, gamma = lam = 1/2: advantages (3/2, ., 6)."""
    from akl_dist.contract.records import ReferenceArrays, RoleArrays
    from akl_dist.learner import batch as learner

    group = training_group("p", lengths=(3, 2), advantages=(8.0, 0.0), trains=(True, True))
    rollout = dataclasses.replace(group.labelled.rollout, turns=(Turns((1, 1, 1)), Turns((2,))))
    group = dataclasses.replace(group, labelled=dataclasses.replace(group.labelled, rollout=rollout))
    zeros = np.zeros(5, np.float32)
    arrays = RolloutArrays(np.arange(5, dtype=np.int32), zeros)
    samples = samples_of(0, group, arrays)
    batch = pack(list(samples), list(samples.values()))
    targets = targets_of(batch, torch.tensor([1.0, 9.0, 2.0, 0.0, 0.0]), gamma=0.5, lam=0.5)
    made = token_advantages(batch, targets, samples)
    first = made[0, 0]
    assert first.dtype == np.float32 and first[1] == 0 and first[2] == 6 and first[0] == 0 + 0.5 * 2 - 1 + 0.25 * 6
    assert mean_advantage(samples[0, 0], first) == (first[0] + first[2]) / 2
    assert mean_advantage(samples[0, 1], made[0, 1]) == 0.0 and mean_advantage(None, np.zeros(2, np.float32)) == 0.0
    critic = CriticArrays(np.concatenate([made[0, 0], made[0, 1]]))
    (one, two) = learner.samples_of(group, arrays, ReferenceArrays(zeros, zeros), RoleArrays(zeros.astype(bool)), critic)
    assert one.token_advantages.tolist() == first.tolist() and len(two.token_advantages) == 2
