"""What the configuration adds to the loss of a micro-batch, by hand: KL in the reward, matched and adaptive betas, the unweighted
k3, rollout correction, trust-region metrics, entropy bonus. Policy and old policy are uniform over three tokens where not said."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from step_batches import NO_KL, run, sample, totals_of

from akl_dist.config.schema import CorrectionConfig, KLConfig, ObjectiveConfig
from akl_dist.learner.step import RoleBetas, role_betas, strength_metrics
from akl_dist.zero3.planning import Totals

THIRD, SIXTH = math.log(1 / 3), math.log(1 / 6)
LN2 = math.log(2)
K2, K3 = LN2**2 / 2, LN2 - 0.5  # at pi = 1/3, ref = 1/6
ROLES = [False, False, True]


def kl(**changes) -> ObjectiveConfig:
    return ObjectiveConfig(kl=KLConfig(**{"estimator": "sampled", "beta_reasoning": 2.0, "beta_answer": 3.0} | changes))


def corrected(kind: str, **changes) -> ObjectiveConfig:
    return dataclasses.replace(NO_KL, correction=CorrectionConfig(kind, **changes))


# --- KL in the reward --------------------------------------------------------------------------------------------

IN_REWARD = kl(direction_reasoning="reverse", placement="reward")


def test_kl_in_the_reward_by_hand():
    """k1 = ln 2 on three tokens costs 2, 2, 3 ln 2: to go 7, 5, 3 ln 2. At ratio 1 the loss is -sum(1 - to go) / 3."""
    step = run([sample(3, ref=SIXTH, rollout=THIRD, answer=ROLES)], objective=IN_REWARD)
    per_token = torch.tensor([1 - 7 * LN2, 1 - 5 * LN2, 1 - 3 * LN2])
    assert step.loss == pytest.approx(-float(per_token.sum()) / 3, rel=1e-5)
    onehot = torch.eye(3)  # the sampled tokens are 0, 1, 2
    torch.testing.assert_close(step.gradient, -per_token[:, None] / 3 * (onehot - 1 / 3))
    metrics = step.metrics()
    assert metrics["objective/kl_loss_reasoning"] == metrics["objective/kl_loss_answer"] == 0.0
    assert metrics["objective/kl_reward_reasoning"] == pytest.approx(4 * LN2 / 3, rel=1e-5)
    assert metrics["objective/kl_reward_answer"] == pytest.approx(LN2, rel=1e-5)
    assert metrics["objective/kl_activity_reasoning"] == pytest.approx(LN2 * math.sqrt((7**2 + 5**2) / 2), rel=1e-5)
    assert metrics["objective/kl_activity_answer"] == pytest.approx(3 * LN2, rel=1e-5)


def test_kl_in_the_reward_is_that_of_the_policy_in_training():
    """k1 = log(pi/ref) = ln 2 whatever the anchor is (old = 1/4, or mu = 1/2 with anchor rollout). Two answer tokens of beta 3 cost
    6 + 3 times k1; the ratio pi/anchor is 4/3, or 2/3, clipped at .8 for A < 0."""
    one = sample(2, ref=SIXTH, rollout=math.log(1 / 2), answer=[True, True])
    advantages = [1 - 6 * LN2, 1 - 3 * LN2]
    assert advantages[0] < 0 and advantages[1] < 0
    old = run([one], objective=IN_REWARD, old=torch.full((2,), math.log(1 / 4)))
    assert old.loss == pytest.approx(-4 / 3 * sum(advantages) / 2, rel=1e-5)
    rollout = run([one], objective=dataclasses.replace(IN_REWARD, anchor="rollout"))
    assert rollout.loss == pytest.approx(-0.8 * sum(advantages) / 2, rel=1e-5)
    for step in (old, rollout):
        assert step.metrics()["objective/kl_reward_answer"] == pytest.approx(3 * LN2, rel=1e-5)


@pytest.mark.parametrize("anchor", ["old", "rollout"])
def test_a_policy_that_is_the_reference_pays_no_kl_in_the_reward(anchor):
    """pi = ref, however far the anchor is (the engine's gap is no KL): with an outcome of 0 there is no gradient at all."""
    one = sample(2, advantage=0.0, ref=THIRD, rollout=SIXTH, answer=[False, True])
    step = run([one], objective=dataclasses.replace(IN_REWARD, anchor=anchor), old=torch.full((2,), SIXTH))
    assert not step.gradient.any() and step.loss == 0.0 and "objective/kl_reward_answer" not in step.metrics()


def test_truncation_is_reported_where_kl_weights_are_in_force():
    """mu = 1/6: w = 2, above 1.5, on one of two tokens."""
    one = sample(2, rollout=[SIXTH, THIRD], ref=SIXTH)
    assert run([one], objective=kl(max_weight=1.5)).metrics()["objective/kl_truncated_fraction"] == 0.5
    unweighted = [kl(direction_answer="forward", state_weight="none", max_weight=1.5),
                  kl(direction_reasoning="reverse", placement="reward", max_weight=1.5)]
    for objective in unweighted:
        assert "objective/kl_truncated_fraction" not in run([one], objective=objective).metrics()


@pytest.mark.parametrize(("state_weight", "largest"), [("token", 2.0), ("cumulative", 5.0)])
def test_default_truncation_is_that_of_the_weight(state_weight, largest):
    """A weight of 8 is cut to 2 as a token's and to 5 as a product's; k3 = ln 2 - 1/2 at pi = 1/3, ref = 1/6."""
    one = sample(1, advantage=0.0, rollout=math.log(1 / 24), ref=SIXTH)
    objective = kl(state_weight=state_weight)
    assert run([one], objective=objective).loss == pytest.approx(largest * 2 * K3, rel=1e-5)
    untruncated = kl(state_weight=state_weight, max_weight=None)
    assert run([one], objective=untruncated).loss == pytest.approx(8 * 2 * K3, rel=1e-5)


@pytest.mark.parametrize(("name", "ratios"), [
    ("ppo", [4, 1, 2, 1]), ("ctpo", [4, 4, 8, 1]), ("ctpo_geomean", [4, 2, 2, 1]), ("gspo", [2, 2, 2, 1])])
def test_ratio_metrics_are_of_the_ratio_that_the_loss_clips(name, ratios):
    """Ratios 4, 1, 2 of one sequence and 1 of another: running products 4, 4, 8, their geometric means 4, 2, 2."""
    objective = dataclasses.replace(NO_KL, policy_loss=name)
    old = THIRD - torch.tensor([4.0, 1.0, 2.0, 1.0]).log()
    metrics = run([sample(3), sample(1)], objective=objective, old=old).metrics()
    assert metrics["objective/ratio_mean"] == pytest.approx(sum(ratios) / 4, rel=1e-5)
    assert metrics["objective/ratio_max"] == pytest.approx(max(ratios), rel=1e-5)


@pytest.mark.parametrize(("name", "clamped"), [("ppo", 0), ("ctpo", 1 / 3), ("ctpo_geomean", 0), ("gspo", 0)])
def test_clamped_fraction_is_of_the_ratio_that_the_loss_clips(name, clamped):
    """Three log-ratios of 9 nats: only the running sum 27 passes the bound of 20."""
    objective = dataclasses.replace(NO_KL, policy_loss=name)
    metrics = run([sample(3)], objective=objective, old=torch.full((3,), THIRD - 9)).metrics()
    assert metrics["objective/clamped_fraction"] == pytest.approx(clamped)


def test_masked_content_stays_out_of_the_reward():
    nan = sample(2, advantage=math.nan, trains=False, rollout=math.nan, ref=math.nan)
    one = sample(2, ref=SIXTH, rollout=THIRD)
    both, alone = run([one, nan], objective=IN_REWARD), run([one], objective=IN_REWARD)
    assert both.loss == pytest.approx(alone.loss) and not both.gradient[2:].any() and both.sums == pytest.approx(alone.sums)


# --- betas -------------------------------------------------------------------------------------------------------


def test_matched_betas_by_hand():
    """2 of 10 tokens are answers: .2 * 6 + .8 * 1 = 2 for both roles; the total strength 2 * 6 + 8 * 1 = 10 * 2 is kept."""
    config, totals = KLConfig(beta_reasoning=1.0, beta_answer=6.0, strength="matched"), Totals(10, 3, 2)
    assert role_betas(config, totals) == pytest.approx((2.0, 2.0), abs=1e-12)
    assert role_betas(config, totals, 0.5) == pytest.approx((1.0, 1.0))
    assert role_betas(config, Totals(0, 0, 0)) == (1.0, 1.0)
    assert role_betas(dataclasses.replace(config, strength="roles"), totals, 2.0) == RoleBetas(2.0, 12.0)
    assert role_betas(dataclasses.replace(config, strength="equal"), totals, 2.0) == RoleBetas(12.0, 12.0)


def test_the_share_is_of_the_whole_update_and_not_of_the_micro_batch():
    objective = kl(direction_reasoning="reverse", beta_reasoning=1.0, beta_answer=6.0, strength="matched")
    one = sample(2, advantage=0.0, rollout=THIRD, ref=SIXTH, answer=[False, True])  # half of this micro-batch is answer
    step = run([one], objective=objective, totals=Totals(10, 5, 2))
    assert step.sums["kl_loss_reasoning"] == pytest.approx(2.0 * K2 / 10, rel=1e-5)
    assert step.sums["kl_loss_answer"] == pytest.approx(2.0 * K2 / 10, rel=1e-5)


def test_adaptive_coefficient_scales_both_roles_and_nothing_else():
    one = sample(2, rollout=THIRD, ref=SIXTH, answer=[False, True])
    plain, scaled = run([one], objective=kl()), run([one], objective=kl(), kl_coefficient=0.25)
    for name in ("kl_loss_reasoning", "kl_loss_answer"):
        assert scaled.sums[name] == pytest.approx(plain.sums[name] / 4, rel=1e-6) and plain.sums[name] > 0
    assert scaled.sums["policy_loss"] == plain.sums["policy_loss"]
    for role in ("reasoning", "answer"):
        name = f"objective/kl_activity_{role}"
        assert scaled.metrics()[name] == pytest.approx(plain.metrics()[name] / 4, rel=1e-5)


def test_strength_metrics():
    updates = [Totals(10, 3, 2), Totals(10, 3, 4), Totals(0, 0, 0)]
    matched = KLConfig(beta_reasoning=1.0, beta_answer=6.0, strength="matched", adaptive_target=0.1)
    assert strength_metrics(matched, updates, 2.0) == {
        "objective/kl_coefficient": 2.0, "objective/kl_beta_matched": pytest.approx(2 * (2.0 + 3.0) / 2)}
    assert strength_metrics(KLConfig(), updates, 1.0) == {}


def test_unweighted_k3_by_hand():
    """pi = 1/3, mu = 1/6, ref = 1/6: the weight pi/mu is 2 with state_weight token and left out with none."""
    one = sample(1, advantage=0.0, rollout=SIXTH, ref=SIXTH)
    assert run([one], objective=kl()).loss == pytest.approx(2 * 2 * K3, rel=1e-5)
    unweighted = run([one], objective=kl(direction_answer="forward", state_weight="none"))
    assert unweighted.loss == pytest.approx(2 * K3, rel=1e-5) and unweighted.sums["truncated"] == 0
    # d k3 / d logp = 1 - ref/pi = 1/2
    torch.testing.assert_close(unweighted.gradient, 2 * 0.5 * torch.tensor([[2 / 3, -1 / 3, -1 / 3]]))


# --- rollout correction ------------------------------------------------------------------------------------------


def test_token_weights_by_hand():
    """old = 1/3 and mu = 1/6, 1/3: weights 2 and 1, truncated to 1.5 and 1. They multiply loss and gradient."""
    one = sample(2, rollout=[SIXTH, THIRD])
    step, plain = run([one], objective=corrected("tis", high=1.5)), run([one])
    assert step.loss == pytest.approx(-(1.5 + 1) / 2, rel=1e-6)
    torch.testing.assert_close(step.gradient, plain.gradient * torch.tensor([[1.5], [1.0]]))
    metrics = step.metrics()
    assert metrics["objective/correction_weight_mean"] == pytest.approx(1.25, rel=1e-6)
    assert metrics["objective/correction_ess"] == pytest.approx(2.5**2 / (2 * 3.25), rel=1e-6)
    assert metrics["objective/correction_rejected_fraction"] == 0.0
    assert not [name for name in plain.metrics() if "correction" in name]


def test_the_ratio_is_that_of_the_old_policy_and_not_of_the_current_one():
    """old = mu: nothing to correct, however far the policy has moved since."""
    one, old = sample(2, rollout=SIXTH), torch.full((2,), SIXTH)
    assert run([one], objective=corrected("tis"), old=old).loss == pytest.approx(run([one], old=old).loss)


def test_a_token_outside_the_band_has_no_policy_loss_but_keeps_its_kl():
    objective = dataclasses.replace(kl(), correction=CorrectionConfig("icepop", low=0.5, high=1.5))
    step = run([sample(2, rollout=[SIXTH, THIRD], ref=THIRD)], objective=objective)
    assert step.sums["policy_loss"] == pytest.approx(-1 / 2) and not step.gradient[0].any() and step.gradient[1].any()
    assert step.metrics()["objective/correction_rejected_fraction"] == 0.5
    assert step.metrics()["objective/clip_fraction"] == 0.0  # rejected is not clipped
    pulled = run([sample(2, rollout=[SIXTH, THIRD], ref=SIXTH)], objective=objective)
    assert pulled.gradient[0].any(), "the KL term has weights of its own"


def test_a_rejected_sequence_loses_its_policy_loss_as_a_whole():
    """Products of old/mu: 2 * 1 = 2 is outside [.5, 1.5], 1 inside."""
    samples = [sample(2, rollout=[SIXTH, THIRD]), sample(1, rollout=THIRD)]
    step = run(samples, objective=corrected("mis", level="sequence", low=0.5, high=1.5))
    assert step.loss == pytest.approx(-1 / 3) and not step.gradient[:2].any() and step.gradient[2].any()
    assert step.metrics()["objective/correction_rejected_fraction"] == pytest.approx(2 / 3)
    sequence = run(samples, objective=corrected("tis", level="sequence", high=5.0))  # weight 2 on both tokens of the first
    assert sequence.loss == pytest.approx(-(2 + 2 + 1) / 3, rel=1e-6)


def test_everything_rejected_gives_metrics_and_no_update():
    step = run([sample(2, rollout=SIXTH)], objective=corrected("icepop", high=1.5))
    assert step.loss == 0.0 and not step.gradient.any()
    metrics = step.metrics()
    assert (metrics["objective/correction_ess"], metrics["objective/correction_rejected_fraction"]) == (0.0, 1.0)


# --- trust regions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("delta", "deviation", "negative"), [(0.15, 1.0, 0.0), (0.075, 2.0, 0.5), (12.5, 0.012, 0.0)])
def test_trust_region_weights_by_hand(delta, deviation, negative):
    """|pi - mu| = .15, pi > mu: weight 1 - .15 / delta for A > 0 (moving away), 1 + .15 / delta for A < 0. A = 0 does not count."""
    mu = math.log(1 / 3 - 0.15)
    objective = dataclasses.replace(NO_KL, policy_loss="drpo", policy_loss_params={"delta": delta}, anchor="rollout")
    samples = [sample(1, rollout=mu, advantage=a) for a in (1.0, -1.0, 0.0)]
    metrics = run(samples, objective=objective).metrics()
    assert metrics["objective/trust_weight_deviation"] == pytest.approx(deviation, rel=1e-3)
    assert metrics["objective/trust_weight_negative_fraction"] == negative


def test_spo_has_trust_metrics_and_ppo_has_none():
    """r = 2, epsilon .2: weight 1 - 1 / .2 = -4 for A > 0."""
    objective = dataclasses.replace(NO_KL, policy_loss="spo", policy_loss_params={"epsilon": 0.2})
    old = torch.full((1,), SIXTH)
    metrics = run([sample(1)], objective=objective, old=old).metrics()
    assert metrics["objective/trust_weight_deviation"] == pytest.approx(5.0, rel=1e-4)
    assert metrics["objective/trust_weight_negative_fraction"] == 1.0
    assert not [name for name in run([sample(1)], old=old).metrics() if "trust" in name]


# --- entropy bonus -----------------------------------------------------------------------------------------------


def test_gradient_of_the_entropy_bonus():
    """d H / d z_v = -p(v) (log p(v) + H); the bonus is taken off the loss, so the loss's gradient is coef/N p (log p + H)."""
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.5, 1.5, 0.0]], dtype=torch.float64)
    objective = dataclasses.replace(NO_KL, entropy_coef=0.3)
    step = run([sample(2, advantage=0.0)], objective=objective, logits=logits)
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1, keepdim=True)
    expected = 0.3 / 2 * logprobs.exp() * (logprobs + entropy)
    torch.testing.assert_close(step.gradient, expected, rtol=1e-9, atol=1e-12)
    assert step.loss == pytest.approx(-0.3 * float(entropy.mean()), rel=1e-9)
    after = (logits - step.gradient).log_softmax(-1)
    assert (-(after.exp() * after).sum(-1) > entropy[:, 0]).all(), "a step of descent raises the entropy"


def test_the_totals_of_these_tests_count_what_trains():
    assert totals_of([sample(3, answer=ROLES), sample(2, trains=False)]) == Totals(3, 1, 1)
