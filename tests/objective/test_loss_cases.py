"""Every row of data/loss_cases.jsonl: small inputs with known right values, and the values that known bugs give."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from akl_dist.objective import (
    aggregate,
    akl_full_loss,
    full_kl,
    group_advantages,
    kl_loss,
    kl_value_k1,
    kl_value_k2,
    kl_value_k3,
    policy_loss,
    token_statistics,
    zero_spread_groups,
)

ROWS = {row["id"]: row for row in map(json.loads, (Path(__file__).parent / "data" / "loss_cases.jsonl").read_text().splitlines())}
CHECKS: dict[str, Callable[[dict, dict, float], None]] = {}


def case(name: str):
    def add(function):
        CHECKS[name] = function
        return function

    return add


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(got, expected, tol: float) -> None:
    assert torch.as_tensor(got, dtype=torch.float64).tolist() == pytest.approx(expected, abs=tol, rel=0)


@pytest.mark.parametrize("name", sorted(ROWS))
def test_row(name):
    row = ROWS[name]
    CHECKS[name](row["inputs"], row["expected"], row["tol"])


def test_every_row_has_a_check_and_every_check_a_row():
    assert set(ROWS) == set(CHECKS)


@case("L001")
def three_reductions(inputs, expected, tol):
    values, mask = tensor(inputs["per_token"]), tensor(inputs["mask"])
    close(aggregate(values, mask, "token_mean"), expected["token_mean"], tol)
    close(aggregate(values, mask, "seq_mean_token_mean"), expected["seq_mean_token_mean"], tol)
    got = aggregate(values, mask, "seq_mean_token_sum_norm", norm=inputs["L_const"])
    close(got, expected["seq_mean_token_sum_over_L"], tol)
    assert values.mean().item() == pytest.approx(expected["unmasked_mean_is_wrong"])


@case("L004")
def denominator_counts_the_mask_of_the_numerator(inputs, expected, tol):
    values, mask = torch.full((3, 3), 99.0, dtype=torch.float64), torch.zeros(3, 3)
    for row, (total, count) in enumerate(zip(inputs["row_sums_of_loss"], inputs["row_tokens"], strict=True)):
        values[row, :count], mask[row, :count] = total / count, 1
    close(aggregate(values, mask, "token_mean"), expected["token_mean"], tol)
    stale = int(mask.sum()) + inputs["truncated_row_tokens_masked"]
    close(aggregate(values, mask, "token_mean", total_tokens=stale), expected["stale_denominator_is_wrong"], tol)


@case("L007")
def both_standard_deviations(inputs, expected, tol):
    rewards, index = tensor(inputs["rewards"]), torch.zeros(4, dtype=torch.long)
    close(group_advantages(rewards, index, normalize_std=False), expected["centered"], tol)
    for std in ("sample", "population"):
        got = group_advantages(rewards, index, normalize_std=True, std=std, eps=inputs["eps"])
        close(got, expected[f"over_{std}_std"], tol)


@case("L008")
def no_spread_is_exactly_zero(inputs, expected, tol):
    got = group_advantages(torch.tensor(inputs["rewards"]), torch.zeros(4, dtype=torch.long), normalize_std=True, eps=0)
    assert got.tolist() == expected["advantages"]


@case("L010")
def float32_residue_is_not_amplified(inputs, expected, tol):
    rewards = torch.tensor(inputs["rewards"], dtype=getattr(torch, inputs["dtype"]))
    got = group_advantages(rewards, torch.zeros(len(rewards), dtype=torch.long), normalize_std=True, eps=0)
    assert got.abs().max().item() <= expected["max_abs_advantage_at_most"]


@case("L012")
def a_failed_verification_is_not_a_zero_reward(inputs, expected, tol):
    rewards, valid = tensor([float(reward) for reward in inputs["rewards"]]), torch.tensor(inputs["valid"])
    index = torch.zeros(3, dtype=torch.long)
    got = group_advantages(rewards, index, valid=valid, normalize_std=True, std=inputs["std"], eps=inputs["eps"])
    close(got, expected["advantages"], tol)


@case("L013")
def filtering_uses_the_raw_outcome(inputs, expected, tol):
    index = torch.zeros(4, dtype=torch.long)
    assert bool(~zero_spread_groups(tensor(inputs["raw_correct"]), index)[0]) is expected["keep_group"]
    assert not zero_spread_groups(tensor(inputs["shaped_reward"]), index).any()


@case("L014")
def value_estimators(inputs, expected, tol):
    tensors = {"logp": tensor([inputs["logp"]]), "ref_logp": tensor([inputs["logp_ref"]]), "mask": tensor([1.0])}
    for name, estimator in (("k1", kl_value_k1), ("k2", kl_value_k2), ("k3", kl_value_k3)):
        close(estimator(**tensors), [expected[name]], tol)


def expected_gradient(logits, ref_probs, behaviour_probs, loss) -> float:
    """d/d logit 0 of the mean over tokens drawn from the behaviour policy of `loss(logp, ref_logp, behaviour_logp)`."""
    leaf = tensor(logits).requires_grad_(True)
    behaviour = tensor(behaviour_probs)
    value = loss(torch.log_softmax(leaf, -1), tensor(ref_probs).log(), behaviour.log())
    (behaviour * value).sum().backward()
    return leaf.grad[0].item()


@case("L015")
def which_gradient_each_estimator_has(inputs, expected, tol):
    logits, ref = inputs["policy_logits"], inputs["ref_probs"]
    probs = torch.softmax(tensor(logits), -1).tolist()

    def surrogate(direction):
        return lambda logp, ref_logp, mu: kl_loss(direction, logp=logp, ref_logp=ref_logp, behaviour_logp=mu, mask=torch.ones(2))

    leaf = tensor(logits).requires_grad_(True)
    exact = full_kl("reverse", logprobs=torch.log_softmax(leaf, -1), ref_logprobs=tensor(ref).log())
    exact.backward()
    close(exact.detach(), expected["kl_value"], tol)
    close(leaf.grad[0], expected["true_grad_logit0"], tol)
    close(expected_gradient(logits, ref, probs, surrogate("reverse")), expected["expected_grad_k2"], tol)
    close(expected_gradient(logits, ref, probs, surrogate("forward")), expected["expected_grad_k3"], tol)
    k1 = expected_gradient(logits, ref, probs, lambda logp, ref_logp, mu: logp - ref_logp)
    close(k1, expected["expected_grad_k1"], tol)


@case("L016")
def off_policy_needs_the_weight(inputs, expected, tol):
    arguments = inputs["policy_logits"], inputs["ref_probs"], inputs["behaviour_probs"]

    def weighted(logp, ref_logp, behaviour_logp):
        return kl_loss("reverse", logp=logp, ref_logp=ref_logp, behaviour_logp=behaviour_logp, mask=torch.ones(2))

    def unweighted(logp, ref_logp, behaviour_logp):
        return kl_loss("reverse", logp=logp, ref_logp=ref_logp, behaviour_logp=logp.detach(), mask=torch.ones(2))

    close(expected_gradient(*arguments, weighted), expected["k2_with_detached_weight"], tol)
    close(expected_gradient(*arguments, unweighted), expected["k2_without_weight"], tol)


@case("L018")
def kl_is_added_with_a_plus_sign(inputs, expected, tol):
    logprobs, ref = tensor([inputs["policy_probs"]]).log(), tensor([inputs["ref_probs"]]).log()
    zero, one = tensor([0.0]), torch.ones(1)
    term = akl_full_loss(
        kl_forward=full_kl("forward", logprobs=logprobs, ref_logprobs=ref),
        kl_reverse=full_kl("reverse", logprobs=logprobs, ref_logprobs=ref),
        logp=zero,
        behaviour_logp=zero,
        answer_mask=one,
        mask=one,
        beta_reasoning=7.0,
        beta_answer=inputs["beta"],
    )
    close(term, [expected["term_added_to_loss"]], tol)
    assert bool(term > 0) is expected["sign_positive"]


@case("L020")
def token_t_is_scored_with_the_logits_before_it(inputs, expected, tol):
    logits, tokens = tensor(inputs["logits"]), torch.tensor(inputs["tokens"])
    logp = token_statistics(logits[:-1], tokens[1:], temperature=1.0).logp
    close(logp, [expected["logp_token1"], expected["logp_token2"]], tol)
    shifted = token_statistics(logits, tokens, temperature=1.0).logp
    close(shifted[1], expected["shift_error_token1_would_be"], tol)


@case("L021")
def logits_are_scaled_and_logprobs_never(inputs, expected, tol):
    logits, token = tensor([inputs["logits"]]), torch.tensor([inputs["token"]])
    close(token_statistics(logits, token, temperature=inputs["temperature"]).logp, [expected["logp"]], tol)
    plain = token_statistics(logits, token, temperature=1.0).logp
    close(plain, [expected["ignoring_T_is_wrong"]], tol)
    close(plain / inputs["temperature"], [expected["dividing_logp_by_T_is_wrong"]], tol)


@case("L023")
def truncated_sampling_is_compared_on_one_support(inputs, expected, tol):
    full = tensor([[inputs["prob_full_vocab"], inputs["kept_mass_top_p"] - inputs["prob_full_vocab"], 0.2]]).log()
    truncated = full.clone()
    truncated[0, 2] = -math.inf
    token = torch.tensor([0])
    sampler = token_statistics(truncated, token, temperature=1.0)
    trainer = token_statistics(full, token, temperature=1.0)
    close(sampler.logp, [expected["sampler_logp"]], tol)
    close(trainer.logp, [expected["trainer_full_logp"]], tol)
    close((trainer.logp - sampler.logp).exp(), [expected["uncorrected_ratio"]], tol)
    same_support = token_statistics(truncated, token, temperature=1.0)
    close((same_support.logp - sampler.logp).exp(), [expected["ratio_on_same_support"]], tol)
    close(sampler.entropy, [math.log(2)], tol)


@case("L024")
def first_on_policy_step_has_zero_loss_and_a_gradient(inputs, expected, tol):
    logp = tensor([inputs["new_logp"]]).requires_grad_(True)
    anchor, advantages = tensor([inputs["old_logp"]]), tensor([inputs["advantages"]])
    mask = torch.ones(1, 2)
    loss = aggregate(policy_loss("ppo", logp=logp, anchor_logp=anchor, advantages=advantages, mask=mask), mask, "token_mean")
    loss.backward()
    close((logp.detach() - anchor).exp()[0], expected["ratios"], tol)
    close(loss.detach(), expected["loss_value"], tol)
    close(logp.grad[0], expected["grad_wrt_logp"], tol)
