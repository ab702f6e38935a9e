"""Vectors recorded from public implementations (source in each file) against ours: values and gradients in float64.

Compared where |log-ratio| <= 20: beyond it ours bounds the value only and keeps the gradient, on purpose.
Masked positions of the files hold garbage; here it is overwritten with NaN, which must not leak either.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from akl_dist.objective import (
    aggregate,
    group_advantages,
    kl_loss,
    kl_value_k1,
    kl_value_k2,
    kl_value_k3,
    policy_loss,
    policy_statistics,
    token_gradient,
    weighted_sum,
)

GOLDEN = Path(__file__).parent / "data" / "golden"
AGGREGATION = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
}


def names(*prefixes: str) -> list[str]:
    found = [path.stem for prefix in prefixes for path in sorted(GOLDEN.glob(f"{prefix}*.json"))]
    assert found
    return found


def load(name: str) -> dict:
    return json.loads((GOLDEN / f"{name}.json").read_text())


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def poison(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, values, torch.full_like(values, math.nan))


def assert_close(got, expected, *, dtype: str = "float64") -> None:
    rtol, atol = (1e-7, 1e-9) if dtype == "float64" else (1e-5, 1e-6)
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)


def ppo_parameters(hyper: dict) -> dict:
    low = next(hyper[key] for key in ("clip_ratio_low", "clip_eps_low", "epsilon_low", "clip_range") if key in hyper)
    high = next(
        (hyper[key] for key in ("clip_ratio_high", "clip_eps_high", "epsilon_high", "clip_range_high") if hyper.get(key)),
        low,
    )
    return {"clip_low": low, "clip_high": high, "dual_clip": hyper.get("clip_ratio_c", hyper.get("dual_clip"))}


def ppo_aggregation(golden: dict, mask: torch.Tensor) -> tuple[str, dict] | None:
    """Aggregation mode and its arguments as the peer had them; None where it returns per-token values only."""
    hyper, rows, width = golden["hyperparameters"], mask.shape[0], mask.shape[1]
    if "loss_type" in hyper:  # grpo divides by all rows, also by fully masked ones; ours is told that count
        return {
            "grpo": ("seq_mean_token_mean", {"total_sequences": rows}),
            "bnpo": ("token_mean", {}),
            "dapo": ("token_mean", {"total_tokens": golden["inputs"].get("num_items_in_batch")}),
            "dr_grpo": (
                "seq_mean_token_sum_norm",
                {"total_sequences": rows, "norm": hyper["max_completion_length"]},
            ),
        }[hyper["loss_type"]]
    if "loss_agg_mode" in hyper:
        mode = AGGREGATION[hyper["loss_agg_mode"]]
        return mode, {"norm": width} if mode == "seq_mean_token_sum_norm" else {}
    if "clip_eps_low" in hyper:
        return ("token_mean" if hyper.get("token_level_loss", True) else "seq_mean_token_mean"), {}
    return None


@pytest.mark.parametrize("name", names("verl_vanilla", "openrlhf_PolicyLoss", "trl_grpo", "unirl_grpo"))
def test_ppo(name):
    golden = load(name)
    inputs, hyper = golden["inputs"], golden["hyperparameters"]
    mask = tensor(inputs["mask"]) != 0
    logp = poison(tensor(inputs["logp"]), mask).requires_grad_(True)
    old = poison(tensor(inputs["old_logp"]), mask)
    advantages = tensor(inputs["advantages"])
    if advantages.dim() == 2:
        advantages = poison(advantages, mask)
    loss = policy_loss("ppo", logp=logp, anchor_logp=old, advantages=advantages, mask=mask, **ppo_parameters(hyper))
    if hyper.get("beta"):
        ref = poison(tensor(inputs["ref_logp"]), mask)
        # bias-corrected: k3 times pi/old. Ours keeps the weight constant (the peer differentiates it too): value only.
        behaviour = old if hyper["use_bias_correction_kl"] else logp.detach()
        loss = loss + hyper["beta"] * kl_loss("forward", logp=logp, ref_logp=ref, behaviour_logp=behaviour, mask=mask)
    inside = mask & ((logp.detach() - old).abs() <= 20)
    # more than the on-policy single value must be compared, or the test says nothing
    assert inside.sum() >= 20
    assert_close(loss.detach()[inside], tensor(golden["outputs"]["per_token_loss"])[inside])
    assert loss.detach()[~mask].abs().sum() == 0
    how = ppo_aggregation(golden, mask)
    total = loss.sum() if how is None else aggregate(loss, mask, how[0], **how[1])
    if how is not None and bool((inside == mask).all()):
        assert_close(total.detach(), tensor(golden["outputs"]["loss"]))
    if not hyper.get("use_bias_correction_kl"):
        total.backward()
        assert_close(logp.grad[inside], tensor(golden["grad"])[inside])
        assert logp.grad[~mask].abs().sum() == 0


@pytest.mark.parametrize("name", names("verl_vanilla_"))
def test_clip_fraction(name):
    golden = load(name)
    inputs = {key: tensor(value) for key, value in golden["inputs"].items()}
    mask = inputs["mask"]
    arguments = {"anchor_logp": inputs["old_logp"], "advantages": inputs["advantages"], "mask": mask}
    parameters = ppo_parameters(golden["hyperparameters"])
    gradient = token_gradient(lambda x: policy_loss("ppo", logp=x, **arguments, **parameters), inputs["logp"])
    sums = policy_statistics(logp=inputs["logp"], gradient=gradient, **arguments)
    metrics = golden["outputs"]["metrics"]
    # the peer counts the window and the dual clip apart; they are disjoint
    expected = metrics["actor/pg_clipfrac"] + metrics["actor/pg_clipfrac_lower"]
    assert (sums.clipped / sums.tokens).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", names("verl_agg_loss"))
def test_aggregation(name):
    golden = load(name)
    hyper = golden["hyperparameters"]
    mask = tensor(golden["inputs"]["mask"]) != 0
    values = poison(tensor(golden["inputs"]["loss_mat"]), mask).requires_grad_(True)
    mode = AGGREGATION[hyper["mode"]]
    arguments = {}
    if mode == "token_mean":
        arguments["total_tokens"] = hyper.get("batch_num_tokens")
    else:
        arguments["total_sequences"] = hyper.get("global_batch_size")
    if mode == "seq_mean_token_sum_norm":
        arguments["norm"] = hyper.get("loss_scale_factor") or mask.shape[1]
    # dp_size: the peer's gradients are averaged over ranks afterwards, ours are summed
    loss = aggregate(values, mask, mode, **arguments) * hyper.get("dp_size", 1)
    loss.backward()
    assert_close(loss.detach(), tensor(golden["outputs"]["loss"]))
    assert_close(values.grad, tensor(golden["grad"]))


@pytest.mark.parametrize("name", names("verl_adv"))
def test_group_advantages(name):
    golden = load(name)
    inputs, hyper = golden["inputs"], golden["hyperparameters"]
    mask = tensor(inputs["mask"])
    index = torch.tensor([ord(group) for group in inputs["index"]])
    rewards = tensor(inputs["token_level_rewards"]).sum(-1)
    rloo = "rloo" in golden["function"]
    got = group_advantages(
        rewards,
        index,
        normalize_std=not rloo and hyper.get("norm_adv_by_std", True),
        leave_one_out=rloo,
        eps=hyper.get("epsilon", 1e-6),
    )
    expected = tensor(golden["outputs"]["advantages"])
    several = torch.tensor([inputs["index"].count(group) > 1 for group in inputs["index"]])
    assert several.sum() >= 7
    # a group of one: the peer returns its raw reward, ours 0
    assert (got[~several] == 0).all()
    dtype = "float32" if "float32" in golden["formula"] else golden["dtype"]
    assert_close((got.unsqueeze(-1) * mask)[several], expected[several], dtype=dtype)


@pytest.mark.parametrize("name", names("verl_kl_penalty", "openrlhf_compute_approx_kl"))
def test_kl_values_and_surrogate_gradients(name):
    golden = load(name)
    mask = tensor(golden["inputs"]["mask"]) != 0
    logp = poison(tensor(golden["inputs"]["logp"]), mask).requires_grad_(True)
    ref = poison(tensor(golden["inputs"]["ref_logp"]), mask)
    kind = name.split("-")[1][:2]
    estimator = {"k1": kl_value_k1, "k2": kl_value_k2, "k3": kl_value_k3}[kind]
    value = estimator(logp=logp, ref_logp=ref, mask=mask)
    assert not value.requires_grad
    expected = tensor(golden["outputs"]["per_token"])
    # both peers also cap the result at +-10, which removes its gradient: compared below the cap only
    inside = mask & ((logp.detach() - ref).abs() <= 20) & (expected.abs() < 10)
    assert inside.sum() >= 20
    assert_close(value[inside], expected[inside], dtype=golden["dtype"])
    if kind != "k1":
        direction = "reverse" if kind == "k2" else "forward"
        loss = kl_loss(direction, logp=logp, ref_logp=ref, behaviour_logp=logp, mask=mask)
        weighted_sum(loss, mask, torch.ones_like(loss)).backward()
        assert_close(logp.grad[inside], tensor(golden["grad"])[inside], dtype=golden["dtype"])
