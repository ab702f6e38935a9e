"""An update's loss, gradient and metrics do not depend on how its responses are cut, ordered or dealt to ranks: every part divides
by the counts of the whole. For KL per role's own count, KL in the reward, matched betas, rollout correction, every aggregation."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from step_batches import VOCAB, run, totals_of

from akl_dist.config.schema import CorrectionConfig, KLConfig, ObjectiveConfig
from akl_dist.learner.batch import Sample
from akl_dist.zero3.planning import GroupLengths, plan_updates

KL = KLConfig(beta_reasoning=0.3, beta_answer=0.7, estimator="sampled", max_weight=1.5)
OBJECTIVES = {
    "role_denominator": ObjectiveConfig(kl=dataclasses.replace(KL, kl_denominator="role"), entropy_coef=0.1),
    "role_denominator_sequence_mean": ObjectiveConfig(
        kl=dataclasses.replace(KL, kl_denominator="role", state_weight="cumulative"), aggregation="seq_mean_token_mean"),
    "full_role_denominator": ObjectiveConfig(kl=dataclasses.replace(KL, estimator="full", kl_denominator="role")),
    "reward": ObjectiveConfig(kl=dataclasses.replace(KL, direction_reasoning="reverse", placement="reward")),
    "reward_sequence_mean": ObjectiveConfig(
        kl=dataclasses.replace(KL, direction_reasoning="reverse", placement="reward"), aggregation="seq_mean_token_mean"),
    "matched": ObjectiveConfig(kl=dataclasses.replace(KL, strength="matched"), aggregation="seq_mean_token_sum_norm",
                               aggregation_norm=10),
    "corrected": ObjectiveConfig(kl=KL, correction=CorrectionConfig("tis", high=1.2)),
    "rejected_sequences": ObjectiveConfig(kl=KL, correction=CorrectionConfig("mis", level="sequence", low=0.5, high=2.0)),
    "unweighted": ObjectiveConfig(kl=dataclasses.replace(KL, state_weight="none", direction_answer="forward")),
}
NAMES = st.sampled_from(sorted(OBJECTIVES))
SETTINGS = settings(max_examples=25, deadline=None)


def make(seed: int, size: int) -> list[tuple[Sample, torch.Tensor, torch.Tensor]]:
    """Responses with their logits and old log-probs; the second one does not train and holds NaN."""
    rng = np.random.default_rng(seed)
    out = []
    for index in range(size):
        n, trains = int(rng.integers(1, 6)), index != 1
        floats = [np.log(rng.uniform(0.1, 0.9, n) if trains else np.full(n, np.nan)).astype(np.float32) for _ in range(2)]
        full = np.log(rng.dirichlet(np.ones(VOCAB), n)).astype(np.float32)
        sample = Sample(rng.integers(0, VOCAB, 2), rng.integers(0, VOCAB, n).astype(np.int32), *floats, {"hidden": full},
                        rng.random(n) < 0.4, float(rng.normal()) if trains else float("nan"), trains)
        logits, old = (torch.from_numpy(rng.normal(size=shape)) for shape in ((n, VOCAB), (n,)))
        out.append((sample, logits, old.abs().neg()))
    return out


def step_of(parts, objective: ObjectiveConfig, totals):
    return run([s for s, _, _ in parts], objective=objective, totals=totals, logits=torch.cat([z for _, z, _ in parts]),
               old=torch.cat([old for _, _, old in parts]))


def update(batch, objective: ObjectiveConfig, cuts, *, totals=None):
    """Loss, gradient per response, sums and maxima of an update whose micro-batches are index lists."""
    totals = totals or totals_of([s for s, _, _ in batch])
    steps = [(cut, step_of([batch[i] for i in cut], objective, totals)) for cut in cuts]
    gradients = {}
    for cut, step in steps:
        gradients |= dict(zip(cut, step.gradient.split([len(batch[i][1]) for i in cut]), strict=True))
    sums = {name: sum(step.sums[name] for _, step in steps) for name in steps[0][1].sums}
    maxima = {name: max(step.maxima[name] for _, step in steps) for name in steps[0][1].maxima}
    return sum(step.loss for _, step in steps), gradients, sums, maxima


def assert_same(got, expected) -> None:
    assert got[0] == pytest.approx(expected[0], rel=1e-9, abs=1e-12)
    assert got[2] == pytest.approx(expected[2], rel=1e-8, abs=1e-11) and got[3] == pytest.approx(expected[3], rel=1e-8, abs=1e-11)
    for index, gradient in expected[1].items():  # what does not train may be left out
        torch.testing.assert_close(got[1].get(index, torch.zeros_like(gradient)), gradient, rtol=1e-8, atol=1e-12)


@SETTINGS
@given(st.integers(0, 10**6), st.integers(3, 7), NAMES, st.randoms(use_true_random=False))
def test_cut_and_order(seed, size, name, random):
    batch, objective = make(seed, size), OBJECTIVES[name]
    whole = update(batch, objective, [list(range(size))])
    order = random.sample(range(size), size)
    at = sorted(random.sample(range(1, size), random.randint(1, size - 1)))
    cuts = [order[i:j] for i, j in zip([0, *at], [*at, size], strict=True)]
    assert_same(update(batch, objective, cuts), whole)
    assert not whole[1][1].any(), "the response without a verdict moves nothing"


@SETTINGS
@given(st.integers(0, 10**6), NAMES, st.integers(1, 3), st.integers(10, 40))
def test_dealing_to_ranks(seed, name, ranks, capacity):
    """Three groups of two: dealt and packed as the driver plans it, the ranks' shares add up to the update of one rank."""
    batch, objective = make(seed, 6), OBJECTIVES[name]
    groups = [GroupLengths(2, tuple(len(s.response_ids) for s, _, _ in pair), tuple(int(s.answer_mask.sum()) for s, _, _ in pair),
                           tuple(s.trains for s, _, _ in pair)) for pair in zip(batch[::2], batch[1::2], strict=True)]
    (plan,) = plan_updates(groups, num_ranks=ranks, updates_per_step=1, max_tokens_per_micro_batch=capacity)
    assert plan.totals == totals_of([s for s, _, _ in batch])
    cuts = [[2 * g + s for g, s in micro_batch] for rank in plan.micro_batches for micro_batch in rank if micro_batch]
    assert_same(update(batch, objective, cuts, totals=plan.totals), update(batch, objective, [list(range(6))]))


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_negative_control_counts_of_the_micro_batch(name):
    """Each part dividing by its own counts, as a mean of means does, is another update."""
    batch, objective = make(4, 6), OBJECTIVES[name]
    cuts = [[0, 1, 2], [3], [4, 5]]
    whole = update(batch, objective, [list(range(6))])
    own = [step_of([batch[i] for i in cut], objective, None) for cut in cuts]
    assert abs(sum(step.loss for step in own) / len(own) - whole[0]) > 1e-3 * abs(whole[0])
