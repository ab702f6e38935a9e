"""The loss of one micro-batch: numbers by hand, masks, anchors, denominators, metrics."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from step_batches import NO_KL, VOCAB, run, sample

from akl_dist.config.schema import KLConfig, ObjectiveConfig
from akl_dist.learner.batch import pack
from akl_dist.learner.step import micro_batch_loss
from akl_dist.learner.step_metrics import MAXIMA, SUMS, metrics_from_sums
from akl_dist.objective import token_statistics
from akl_dist.zero3.planning import Totals
from akl_dist.zero3.rank import learning_rate


def test_on_policy_loss_by_hand():
    # Ratio 1 everywhere: loss = -(2 tokens * 1 + 1 token * -2) / 3 = 0; gradient of a token = -A/3 (onehot - 1/3).
    loss, gradient, sums, maxima = run([sample(2, advantage=1.0), sample(1, advantage=-2.0)])
    assert loss == pytest.approx(0.0, abs=1e-7)
    expected = torch.tensor([[-2.0, 1, 1], [1, -2, 1], [4, -2, -2]]) / 9
    torch.testing.assert_close(gradient, expected)
    assert sums["tokens"] == 3 and sums["ratio"] == 3 and maxima["ratio"] == 1
    assert sums["entropy"] == pytest.approx(3 * math.log(3), rel=1e-6)


def test_old_log_probs_move_the_ratio_and_clip():
    # old = log 1/3 - log 2, so ratio 2; A = 1 and clip 1.2: loss = -1.2 and no gradient.
    old = torch.full((2,), math.log(1 / 3) - math.log(2))
    loss, gradient, sums, maxima = run([sample(2)], old=old)
    assert loss == pytest.approx(-1.2) and not gradient.any()
    assert sums["clipped"] == 2 and maxima["ratio"] == pytest.approx(2.0)


def test_anchor_rollout_takes_the_engine_log_probs():
    objective = dataclasses.replace(NO_KL, anchor="rollout")
    loss, _, sums, _ = run([sample(2, rollout=math.log(1 / 3) + 0.1)], objective=objective)
    assert loss == pytest.approx(-math.exp(-0.1), rel=1e-6)
    assert sums["mismatch"] == pytest.approx(0.2, rel=1e-5)


def test_mismatch_is_of_the_old_policy_and_ess_of_the_current_one():
    # pi = 1/3 has moved by log 2 from old = mu = 1/6: no engine mismatch, but weights pi/mu = 2.
    one, old = sample(2, rollout=math.log(1 / 6)), torch.full((2,), math.log(1 / 6))
    _, _, sums, maxima = run([one], old=old)
    assert sums["mismatch"] == pytest.approx(0.0, abs=1e-6) and maxima["mismatch"] == pytest.approx(0.0, abs=1e-6)
    assert sums["weight"] == pytest.approx(4.0, rel=1e-5)
    _, _, sums, maxima = run([one], old=old + torch.tensor([0.0, -0.5]))
    assert sums["mismatch"] == pytest.approx(0.5, rel=1e-5) and maxima["mismatch"] == pytest.approx(0.5, rel=1e-5)
    _, _, sums, _ = run([one])  # without an old pass the current policy stands for it
    assert sums["mismatch"] == pytest.approx(2 * math.log(2), rel=1e-5)


def test_sampled_kl_by_hand_and_by_role():
    # pi = 1/3, mu = 1/3 (weight 1), ref = 1/6: log(pi/ref) = log 2. k3 = 1/2 - 1 + log 2; k2 = (log 2)^2 / 2.
    objective = ObjectiveConfig(kl=KLConfig(beta_reasoning=2.0, beta_answer=3.0, estimator="sampled"))
    one = sample(2, advantage=0.0, rollout=math.log(1 / 3), ref=math.log(1 / 6), answer=[False, True])
    loss, _, sums, _ = run([one], objective=objective)
    k3, k2 = math.log(2) - 0.5, math.log(2) ** 2 / 2
    assert loss == pytest.approx((2 * k3 + 3 * k2) / 2, rel=1e-5)
    assert sums["kl_loss_reasoning"] == pytest.approx(k3, rel=1e-5) and sums["kl_loss_answer"] == pytest.approx(1.5 * k2, rel=1e-5)
    assert sums["kl_k1"] == pytest.approx(2 * math.log(2), rel=1e-5) and sums["kl_k3"] == pytest.approx(2 * k3, rel=1e-5)


def test_role_denominator_divides_each_role_by_its_own_count():
    kl = KLConfig(beta_reasoning=2.0, beta_answer=3.0, estimator="sampled", kl_denominator="role")
    one = sample(3, advantage=0.0, rollout=math.log(1 / 3), ref=math.log(1 / 6), answer=[False, False, True])
    _, _, sums, _ = run([one], objective=ObjectiveConfig(kl=kl))
    assert sums["kl_loss_reasoning"] == pytest.approx(2 * (math.log(2) - 0.5), rel=1e-5)
    assert sums["kl_loss_answer"] == pytest.approx(3 * math.log(2) ** 2 / 2, rel=1e-5)


def test_full_kl_by_hand():
    # pi uniform, ref = (1/2, 1/4, 1/4): forward = log 3 - H(ref) = log 3 - 1.5 log 2; reverse = -log 3 + (log 2 + 2 log 4)/3.
    ref = np.log(np.array([[0.5, 0.25, 0.25]] * 2, np.float32))
    objective = ObjectiveConfig(kl=KLConfig(beta_reasoning=1.0, beta_answer=1.0, estimator="full"))
    loss, _, sums, _ = run([sample(2, advantage=0.0, full=ref, answer=[False, True])], objective=objective)
    forward, reverse = math.log(3) - 1.5 * math.log(2), -math.log(3) + 5 * math.log(2) / 3
    assert loss == pytest.approx((forward + reverse) / 2, rel=1e-5)
    assert sums["kl_forward"] == pytest.approx(2 * forward, rel=1e-5) and sums["kl_reverse"] == pytest.approx(2 * reverse, rel=1e-5)
    with pytest.raises(ValueError, match="full"):
        run([sample(2)], objective=objective)


def test_entropy_coefficient():
    loss, _, _, _ = run([sample(2, advantage=0.0)], objective=dataclasses.replace(NO_KL, entropy_coef=0.5))
    assert loss == pytest.approx(-0.5 * math.log(3), rel=1e-6)


@pytest.mark.parametrize(("aggregation", "expected"), [
    ("token_mean", -(2 * 1 + 1 * 4) / 3),
    ("seq_mean_token_mean", -(1 + 4) / 2),
    ("seq_mean_token_sum_norm", -(2 * 1 + 1 * 4) / (2 * 10)),
])
def test_aggregations(aggregation, expected):
    objective = dataclasses.replace(NO_KL, aggregation=aggregation, aggregation_norm=10)
    loss, _, _, _ = run([sample(2, advantage=1.0), sample(1, advantage=4.0)], objective=objective)
    assert loss == pytest.approx(expected)


def test_micro_batches_add_up_to_the_whole():
    torch.manual_seed(0)
    samples = [sample(n, advantage=a, ref=-0.7, answer=[i % 2 == 0 for i in range(n)]) for n, a in ((3, 1.0), (2, -1.0), (4, 0.5))]
    objective, totals, logits = ObjectiveConfig(kl=KLConfig(0.3, 0.6, estimator="sampled")), Totals(9, 3, 5), torch.randn(9, VOCAB)
    whole, gradient, sums, maxima = run(samples, objective=objective, totals=totals, logits=logits)
    parts = [run(samples[:1], objective=objective, totals=totals, logits=logits[:3]),
             run(samples[1:], objective=objective, totals=totals, logits=logits[3:])]
    assert sum(part[0] for part in parts) == pytest.approx(whole, rel=1e-6)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), gradient)
    for name in SUMS:
        assert sum(part[2][name] for part in parts) == pytest.approx(sums[name], rel=1e-5, abs=1e-9), name
    assert max(part[3]["ratio"] for part in parts) == maxima["ratio"]


def test_a_masked_sample_counts_nowhere_even_when_it_holds_nan():
    nan = sample(2, advantage=float("nan"), trains=False, rollout=float("nan"), ref=float("nan"))
    objective = ObjectiveConfig(kl=KLConfig(0.3, 0.6, estimator="sampled"))
    loss, gradient, sums, maxima = run([sample(2), nan], objective=objective)
    alone = run([sample(2)], objective=objective)
    assert loss == pytest.approx(alone[0]) and not gradient[2:].any()
    assert sums == pytest.approx(alone[2]) and maxima == pytest.approx(alone[3])


def test_a_dummy_gives_zero_connected_to_the_graph():
    batch = pack((), [])
    logits = torch.randn(1, VOCAB, requires_grad=True)
    statistics = token_statistics(logits, batch.targets, temperature=1.0, with_gradient_norms=True)
    result = micro_batch_loss(batch, statistics, objective=NO_KL, totals=Totals(5, 1, 0), old_logp=None)
    result.loss.backward()
    assert float(result.loss.detach()) == 0.0 and logits.grad is not None and not logits.grad.any() and not result.sums.any()


def test_metrics_are_absent_where_undefined():
    _, _, sums, maxima = run([sample(2, advantage=0.0, rollout=math.log(1 / 3), ref=math.log(1 / 3))])
    metrics = metrics_from_sums(sums, maxima, updates=1, exact=False)
    assert not [name for name in metrics if "activity" in name or "cosine" in name]  # no policy gradient, pi = ref
    assert metrics["objective/ess"] == pytest.approx(1.0) and all(math.isfinite(value) for value in metrics.values())
    assert metrics_from_sums(dict.fromkeys(SUMS, 0.0), dict.fromkeys(MAXIMA, 0.0), updates=0, exact=False) == {}


def test_activity_by_hand():
    # One reasoning token: c_policy = -A = -1, c_kl = beta * d k3/d logp = 2 * (1 - ref/pi) = 2 * 1/2: activity 1.
    one = sample(1, advantage=1.0, rollout=math.log(1 / 3), ref=math.log(1 / 6))
    kl = KLConfig(beta_reasoning=2.0, beta_answer=9.0, estimator="sampled")
    _, _, sums, maxima = run([one], objective=ObjectiveConfig(kl=kl))
    metrics = metrics_from_sums(sums, maxima, updates=1, exact=False)
    assert metrics["objective/kl_activity_reasoning"] == pytest.approx(1.0, rel=1e-5)
    assert "objective/kl_activity_answer" not in metrics


def test_ess_by_hand():
    # Weights 1 and 1/2: (1.5)^2 / (2 * 1.25) = 0.9.
    samples = [sample(1, rollout=math.log(1 / 3)), sample(1, rollout=math.log(2 / 3))]
    _, _, sums, maxima = run(samples)
    assert metrics_from_sums(sums, maxima, updates=1, exact=False)["objective/ess"] == pytest.approx(0.9, rel=1e-5)


def test_unknown_names_are_refused():
    for field, match in (({"anchor": "new"}, "anchor"), ({"kl": KLConfig(placement="both")}, "placement"),
                         ({"kl": KLConfig(estimator="sampled", kl_denominator="both")}, "kl_denominator")):
        with pytest.raises(ValueError, match=match):
            run([sample(1)], objective=dataclasses.replace(NO_KL, **field))


def test_learning_rate_warm_up():
    assert [learning_rate(step, lr=4.0, warmup_steps=4) for step in range(6)] == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]
    assert learning_rate(0, lr=4.0, warmup_steps=0) == 4.0
