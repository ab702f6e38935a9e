"""Vectors recorded from public implementations (source in each case) against ours: values and gradients in float64.

Compared where the log-ratio, and the running sum or mean that is exponentiated, is within the peer's clamps (20; 10 for
GSPO and CTPO): beyond them ours bounds the value only and keeps the gradient, on purpose. Masked positions of the cases
hold garbage; here it is overwritten with NaN, which must not leak either. One file a peer: cases refer to arrays by "#n".
"""

from __future__ import annotations

import functools
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
    loss_log_ratio,
    policy_loss,
    policy_statistics,
    rollout_correction,
    token_gradient,
    weighted_sum,
)

GOLDEN = Path(__file__).parent / "data" / "golden"
PEERS = ("ctpo", "openrlhf", "stablerl", "trl", "trldppo", "unirl", "verl")
OTHER_TESTS = ("verl_adv-gae", "verl_adv-reinforce_plus_plus", "verl_value_loss", "openrlhf_gae", "openrlhf_ValueLoss", "rlax_")
AGGREGATION = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum_norm",
    "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
}
# What is not compared, by prefix, because ours differs on purpose.
EXCEPTIONS = {
    "stablerl/ppo_": ({"value"}, "a masked policy gradient (-A r mask logp); ours is PPO's surrogate: same gradient, other value"),
    "trl/grpo-dapo-klbiascorr": ({"gradient"}, "differentiates the importance weight of its KL term; ours is a constant"),
}  # fmt: skip


@functools.cache
def peer_cases(peer: str) -> dict[str, dict]:
    file = json.loads((GOLDEN / f"{peer}.json").read_text())

    def resolve(node):
        if isinstance(node, dict):
            return {key: resolve(value) for key, value in node.items()}
        return file["arrays"][int(node[1:])] if isinstance(node, str) and node[:1] == "#" else node

    return {name: resolve(case) for name, case in file["cases"].items()}


def names(*prefixes: str) -> list[str]:
    every = [f"{peer}/{case}" for peer in PEERS for case in peer_cases(peer)]
    found = [name for prefix in prefixes for name in every if name.startswith(prefix)]
    assert found
    return found


def load(name: str) -> dict:
    peer, _, case = name.partition("/")
    return peer_cases(peer)[case]


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def poison(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, values, torch.full_like(values, math.nan))


def assert_close(got, expected, *, dtype: str = "float64") -> None:
    rtol, atol = (1e-7, 1e-9) if dtype == "float64" else (1e-5, 1e-6)
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)


def first(hyper: dict, *keys: str):
    return next((hyper[key] for key in keys if hyper.get(key) is not None), None)


def clip_window(hyper: dict) -> dict:
    low = first(hyper, "clip_ratio_low", "clip_eps_low", "epsilon_low", "clip_range")
    high = first(hyper, "clip_ratio_high", "clip_eps_high", "epsilon_high", "clip_range_high")
    return {"clip_low": low, "clip_high": high or low}


def ours(name: str, hyper: dict) -> tuple[str, dict]:
    """Our name and parameters of a case's loss."""
    if "-rolloutis" in name:  # the peer's defaults: 0.2 on either side of every trust region
        hyper = {**load(name.replace("-rolloutis", ""))["hyperparameters"], "delta_low": 0.2, "delta_high": 0.2}
    if name.startswith("ctpo/"):
        loss = "ctpo_geomean" if "geomean" in name else "ctpo"
        if "la_power" in hyper:
            bounds = {ours: hyper[f"la_clip_{theirs}"] for ours, theirs in (("clip_low", "low"), ("clip_high", "high"))}
            return loss, {**bounds, "dual_clip": hyper["la_clip_c"], "power": hyper["la_power"]}
        return loss, {**clip_window(hyper), "dual_clip": hyper["clip_ratio_c"], "clip_space": "ratio"}
    if "dppo" in name:
        low, high = first(hyper, "delta_low", "epsilon"), first(hyper, "delta_high", "epsilon_high")
        return "dppo_kl" if "kl" in name else "dppo_tv", {"delta_low": low, "delta_high": high, "max_ratio": hyper["clip_ratio_c"]}
    if name.startswith("unirl/") and "epsilon" in hyper:
        return ("drpo", {"delta": hyper["epsilon"]}) if hyper["mu_weighted"] else ("spo", {"epsilon": hyper["epsilon"]})
    if name.startswith("trl/grpo-cispo"):  # its epsilon_high is the largest weight itself
        return "cispo", {"clip_high": hyper["epsilon_high"] - 1}
    if "cispo" in name:
        return "cispo", {**clip_window(hyper), "clip_low": hyper["clip_ratio_low"] if hyper["clip_ratio_low"] <= 1 else None}
    if "gspo" in name:
        return "gspo", clip_window(hyper)
    if name.startswith("stablerl/ppo"):
        return "ppo", {"clip_low": hyper["delta_low"], "clip_high": hyper["delta_high"]}
    return "ppo", {**clip_window(hyper), "dual_clip": first(hyper, "clip_ratio_c", "dual_clip", "delta")}


def aggregation(name: str, golden: dict, mask: torch.Tensor) -> tuple[str, dict] | None:
    """Aggregation mode and its arguments as the peer had them; None where it is the sum over tokens."""
    hyper, items, rows = golden["hyperparameters"], golden["inputs"].get("num_items_in_batch"), mask.shape[0]
    if name.startswith("unirl/") or hyper.get("loss_agg_mode") == "token-sum":
        return None
    if name.startswith("verl/gspo"):
        return "seq_mean_token_mean", {}
    if name.startswith("openrlhf/"):
        if "gspo" in name or not hyper.get("token_level_loss", True):
            return "seq_mean_token_mean", {"total_sequences": hyper.get("global_batch_size")}
        return "token_mean", {"total_tokens": hyper.get("batch_num_tokens")}
    if hyper.get("loss_type") == "grpo":  # divides by all rows, also by fully masked ones; ours is told that count
        return "seq_mean_token_mean", {"total_sequences": rows}
    if hyper.get("loss_type") == "dr_grpo":
        return "seq_mean_token_sum_norm", {"total_sequences": rows, "norm": hyper["max_completion_length"]}
    mode = AGGREGATION[hyper.get("loss_agg_mode", "token-mean")]
    if mode == "seq_mean_token_sum_norm":
        return mode, {"norm": mask.shape[1] if hyper["loss_agg_mode"].endswith("norm") else 1}
    return mode, {"total_tokens": None if hyper.get("loss_type") == "bnpo" else items} if mode == "token_mean" else {}


def factor(name: str, golden: dict, old: torch.Tensor, logp: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | float:
    """What the peer multiplies its policy loss by, made by ours wherever the case has the inputs for it."""
    inputs, hyper = golden["inputs"], golden["hyperparameters"]
    if hyper.get("enable_vllm_is_correction") and "gspo" not in name:
        kind = {"seq-mask-tis": "mis", None: "tis"}.get(*[hyper.get("vllm_is_correction_type")] * 2)
        low, high = hyper["vllm_is_truncated_threshold"]
        rollout = poison(tensor(inputs["rollout_logp"]), mask)
        # the peer's tis also raises weights below the lower threshold; there are none in these cases
        bounds = {"high": high} if kind == "tis" else {"low": low, "high": high}
        weight = rollout_correction(kind, old_logp=old, rollout_logp=rollout, mask=mask, **bounds).weight
        assert kind != "tis" or (weight[mask] > low).all()
        return weight
    if hyper.get("off_policy_mask_threshold") is not None:
        # keeps a sequence if A >= 0 or the engine's mean log-ratio to pi is small; no part of ours, so it is made here
        gap = torch.where(mask, tensor(inputs["sampling_per_token_logps"]) - logp.detach(), 0.0)
        near = gap.sum(-1) / mask.sum(-1).clamp(min=1) <= hyper["off_policy_mask_threshold"]
        return (near | (tensor(inputs["advantages"]) >= 0)).double().unsqueeze(-1)
    given = first(inputs, "rollout_is_weights", "importance_sampling_ratio")
    return 1.0 if given is None else tensor(given)


def within_clamps(loss: str, log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    x = torch.where(mask, log_ratio, 0.0)
    count = mask.cumsum(-1).clamp(min=1)
    if loss == "gspo":
        return mask & ((x.sum(-1) / count[:, -1]).abs() <= 10).unsqueeze(-1)
    if loss in ("ctpo", "ctpo_geomean"):
        unclamped = (x.abs() > 20).cumsum(-1) == 0
        total = x.cumsum(-1)
        return mask & unclamped & ((total / count if loss == "ctpo_geomean" else total).abs() <= 10)
    return mask & (x.abs() <= 20)


WITH_POLICY_LOSS = ("verl/vanilla", "verl/gspo", "verl/cispo", "verl/dppo", "openrlhf/PolicyLoss", "trl/", "trldppo/", "unirl/",
                    "stablerl/", "ctpo/")  # fmt: skip
POLICY = [name for name in names(*WITH_POLICY_LOSS) if "-reduction-" not in name]


@pytest.mark.parametrize("name", POLICY)
def test_policy_loss(name):
    golden = load(name)
    inputs, hyper = golden["inputs"], golden["hyperparameters"]
    skipped = next((what for prefix, (what, _) in EXCEPTIONS.items() if name.startswith(prefix)), set())
    mask = tensor(inputs["mask"]) != 0
    logp = poison(tensor(inputs["logp"]), mask).requires_grad_(True)
    # with its correction on, OpenRLHF's GSPO takes the whole ratio pi/mu inside the clip: our anchor rollout
    from_rollout = name.startswith(("stablerl/", "openrlhf/PolicyLoss-gspo-vllmis"))
    old = poison(tensor(inputs["rollout_logp" if from_rollout else "old_logp"]), mask)
    advantages = tensor(inputs["advantages"])
    if advantages.dim() == 2:
        advantages = poison(advantages, mask)
    which, params = ours(name, hyper)
    loss = policy_loss(which, logp=logp, anchor_logp=old, advantages=advantages, mask=mask, **params)
    loss = loss * factor(name, golden, old, logp, mask)
    if hyper.get("beta"):
        ref = poison(tensor(inputs["ref_logp"]), mask)
        behaviour = old if hyper["use_bias_correction_kl"] else logp.detach()
        loss = loss + hyper["beta"] * kl_loss("forward", logp=logp, ref_logp=ref, behaviour_logp=behaviour, mask=mask)
    inside = within_clamps(which, logp.detach() - old, mask)
    if name.startswith("stablerl/ppo"):  # its ratio stops at 20 whatever the sign of A
        inside &= logp.detach() - old <= math.log(hyper["clip_ratio_c"])
    # more than the on-policy single value must be compared, or the test says nothing
    assert inside.sum() >= (4 if which in ("gspo", "ctpo", "ctpo_geomean") or "edges" in name else 20)
    how = aggregation(name, golden, mask)
    total = loss.sum() if how is None else aggregate(loss, mask, how[0], **how[1])
    total = total * hyper.get("dp_size", 1)  # the peer's gradients are averaged over ranks afterwards, ours are summed
    if "value" not in skipped:
        assert_close(loss.detach()[inside], tensor(golden["outputs"]["per_token_loss"]).expand_as(mask)[inside])
        if "loss" in golden["outputs"] and bool((inside == mask).all()):
            assert_close(total.detach(), tensor(golden["outputs"]["loss"]))
    assert loss.detach()[~mask].abs().sum() == 0
    total.backward()
    if "gradient" not in skipped:
        assert_close(logp.grad[inside], tensor(golden["grad"])[inside])
    assert logp.grad[~mask].abs().sum() == 0


@pytest.mark.parametrize("name", names("unirl/drpo-reduction"))
def test_drpo_over_packed_sequences(name):
    golden = load(name)
    inputs, hyper = golden["inputs"], golden["hyperparameters"]
    lengths, width = inputs["lengths"], max(inputs["lengths"])

    def rows(key):
        pieces = torch.split(tensor(inputs[key]), lengths)
        return torch.stack([torch.nn.functional.pad(piece, (0, width - len(piece))) for piece in pieces])

    mask = rows("loss_mask_packed") != 0
    logp = poison(rows("logp_packed"), mask).requires_grad_(True)
    loss = policy_loss("drpo", logp=logp, anchor_logp=poison(rows("old_logp_packed"), mask), mask=mask,
                       advantages=tensor(inputs["advantages"]), delta=hyper["epsilon"])  # fmt: skip
    # the peer's denominators also count masked tokens and empty sequences; ours are told so
    counts = {"total_tokens": sum(lengths), "total_sequences": len(lengths), "norm": hyper["horizon"]}
    total = aggregate(loss, mask, AGGREGATION[hyper["loss_agg_mode"]], **counts)
    total.backward()
    assert_close(total.detach(), tensor(golden["outputs"]["loss"]))
    flat = torch.cat([row[:length] for row, length in zip(logp.grad, lengths, strict=True)])
    assert_close(flat, tensor(golden["grad"]))


@pytest.mark.parametrize("name", names("verl/rollout_is"))
def test_rollout_correction(name):
    golden = load(name)
    hyper = golden["hyperparameters"]
    mask = tensor(golden["inputs"]["mask"]) != 0
    log_ratio = poison(tensor(golden["inputs"]["log_ratio"]), mask)
    threshold = hyper["rollout_is_threshold"]
    bounds = {"high": threshold}
    if isinstance(threshold, str):
        bounds = dict(zip(("low", "high"), map(float, threshold.split("_")), strict=True))
    kind, level = "icepop" if "low" in bounds else "tis", hyper["rollout_is"]
    got = rollout_correction(kind, old_logp=log_ratio, rollout_logp=torch.zeros_like(log_ratio), mask=mask, level=level, **bounds)
    weight, metrics = got.weight, golden["outputs"]["metrics"]
    if level == "token":
        kept = weight[mask]
        share = kept.sum() ** 2 / (kept.numel() * (kept**2).sum())
        assert share.item() == pytest.approx(metrics["rollout_is_eff_sample_size"], rel=1e-6)  # the peer adds 1e-8
    if hyper["batch_normalize"]:  # a division by the global mean, left to whoever knows the whole batch
        filled = mask.any(-1)
        mean = weight[mask].mean() if level == "token" else weight.amax(-1)[filled].mean()
        assert mean.item() == pytest.approx(metrics["rollout_is_batch_norm_factor"], rel=1e-9)
        weight = weight / mean
    assert_close(weight, tensor(golden["outputs"]["weights"]))


CLIPPED = [name for name in names("verl/vanilla", "verl/gspo", "ctpo/") if "rolloutis" not in name]


@pytest.mark.parametrize("name", [name for name in CLIPPED if not (name.startswith("ctpo/") and "edges" in name)])
def test_clip_fraction(name):
    golden = load(name)
    inputs = {key: tensor(value) for key, value in golden["inputs"].items()}
    mask = inputs["mask"]
    which, parameters = ours(name, golden["hyperparameters"])
    arguments = {"anchor_logp": inputs["old_logp"], "advantages": inputs["advantages"], "mask": mask}
    gradient = token_gradient(lambda x: policy_loss(which, logp=x, **arguments, **parameters), inputs["logp"])
    log_ratio = loss_log_ratio(which, logp=inputs["logp"], anchor_logp=inputs["old_logp"], mask=mask)
    sums = policy_statistics(log_ratio=log_ratio, advantages=inputs["advantages"], mask=mask, gradient=gradient)
    metrics = golden["outputs"]["metrics"]
    # the peer counts the window and the dual clip apart; they are disjoint
    expected = metrics["actor/pg_clipfrac"] + metrics["actor/pg_clipfrac_lower"]
    assert (sums.clipped / sums.tokens).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", names("verl/agg_loss"))
def test_aggregation(name):
    golden = load(name)
    hyper = golden["hyperparameters"]
    mask = tensor(golden["inputs"]["mask"]) != 0
    values = poison(tensor(golden["inputs"]["loss_mat"]), mask).requires_grad_(True)
    norm = (hyper.get("loss_scale_factor") or mask.shape[1]) if hyper["mode"].endswith("norm") else 1
    if hyper["mode"] == "token-sum":
        loss = weighted_sum(values, mask, torch.ones_like(values.detach()))
    else:
        loss = aggregate(values, mask, AGGREGATION[hyper["mode"]], total_tokens=hyper.get("batch_num_tokens"),
                         total_sequences=hyper.get("global_batch_size"), norm=norm)  # fmt: skip
    loss = loss * hyper.get("dp_size", 1)  # the peer's gradients are averaged over ranks afterwards, ours are summed
    loss.backward()
    assert_close(loss.detach(), tensor(golden["outputs"]["loss"]))
    assert_close(values.grad, tensor(golden["grad"]))


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("verl_adv-grpo*.json")) + sorted(GOLDEN.glob("verl_adv-rloo*.json")), ids=str)
def test_group_advantages(path):
    golden = json.loads(path.read_text())
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
    # a group of one: the peer's loops return its raw reward, ours 0
    assert (got[~several] == 0).all()
    dtype = "float32" if "float32" in golden["formula"] else golden["dtype"]
    assert_close((got.unsqueeze(-1) * mask)[several], expected[several], dtype=dtype)


@pytest.mark.parametrize("name", names("verl/kl_penalty", "openrlhf/compute_approx_kl"))
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
    assert inside.sum() >= (20 if "edges" not in name else 1)
    assert_close(value[inside], expected[inside], dtype=golden["dtype"])
    if kind != "k1":
        direction = "reverse" if kind == "k2" else "forward"
        loss = kl_loss(direction, logp=logp, ref_logp=ref, behaviour_logp=logp, mask=mask)
        weighted_sum(loss, mask, torch.ones_like(loss)).backward()
        assert_close(logp.grad[inside], tensor(golden["grad"])[inside], dtype=golden["dtype"])


def test_every_case_is_used():
    used = {*POLICY, *names("unirl/drpo-reduction", "verl/rollout_is", "verl/agg_loss", "verl/kl_penalty",
                            "openrlhf/compute_approx_kl")}  # fmt: skip
    assert used == set(names(*PEERS)) and len(used) == 212
    assert all(any(name.startswith(prefix) for name in POLICY) for prefix in EXCEPTIONS)
    tested_here = ("verl_adv-grpo", "verl_adv-rloo")
    for path in GOLDEN.glob("*.json"):
        assert path.stem in PEERS or path.stem.startswith((*tested_here, *OTHER_TESTS)), path


@pytest.mark.parametrize(("name", "parameter"), [
    ("ctpo/cum-token-cumprod-la_moderate", "clip_low"), ("ctpo/cum-token-cumprod-la_moderate", "power"),
    ("unirl/drpo-eps0.15_moderate", "delta"), ("unirl/spo-eps0.2_moderate", "epsilon"),
    ("verl/gspo-papereps_moderate", "clip_low"), ("verl/dppo_tv_moderate", "delta_low"),
])  # fmt: skip
def test_the_comparison_can_fail(name, parameter):
    """Negative control: with one parameter halved the recorded values are missed."""
    golden = load(name)
    arguments = {key: tensor(golden["inputs"][key]) for key in ("logp", "advantages", "mask")}
    mask, (which, params) = arguments["mask"] != 0, ours(name, golden["hyperparameters"])

    def per_token():
        return policy_loss(which, anchor_logp=tensor(golden["inputs"]["old_logp"]), **arguments, **params)[mask]

    expected = tensor(golden["outputs"]["per_token_loss"])[mask]
    assert_close(per_token(), expected)
    params[parameter] /= 2
    with pytest.raises(AssertionError):
        assert_close(per_token(), expected)
