"""Every registered policy loss: finite at the extremes, in float32 and float64, and invariant to what must not matter."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from akl_dist.objective import POLICY_LOSSES, policy_loss

VARIANTS = {
    "ppo": [{}, {"dual_clip": 3.0}, {"clip_low": 0.0, "clip_high": 0.0}],
    "gspo": [{}, {"clip_low": 0.2, "clip_high": 0.2}],
    "cispo": [{}, {"clip_low": 0.2}],
    "ctpo": [{}, {"dual_clip": 0.05}, {"power": 0.0}, {"power": 2.0}, {"clip_space": "ratio", "clip_low": 0.2, "dual_clip": 3.0}],
    "ctpo_geomean": [{}, {"dual_clip": 0.05}, {"power": 0.0}, {"clip_space": "ratio", "clip_low": 0.2, "dual_clip": 3.0}],
    "spo": [{}, {"epsilon": 12.5}],
    "drpo": [{}, {"delta": 0.08}],
    "dppo_tv": [{}, {"max_ratio": 1.0}],
    "dppo_kl": [{}, {"max_ratio": 1.0}],
    "reinforce": [{}, {"max_weight": 2.0}],
}
EVERY = [(name, params) for name, several in VARIANTS.items() for params in several]
LONG = 64
RARE = [math.log(1e-6), math.log(1e-12)]
ROWS = {  # (logp, anchor), each a row of LONG tokens
    "equal": ([-1.0] * LONG, [-1.0] * LONG),
    "certain": ([0.0] * LONG, [0.0] * LONG),
    "above one by rounding": ([1e-6] * LONG, [1e-6] * LONG),
    "+30": ([-0.1] * LONG, [-30.1] * LONG),
    "-30": ([-30.1] * LONG, [-0.1] * LONG),
    "+100": ([-0.1] * LONG, [-100.1] * LONG),
    "-100": ([-100.1] * LONG, [-0.1] * LONG),
    "alternating": ([-0.1, -100.1] * (LONG // 2), [-100.1, -0.1] * (LONG // 2)),
    "drifting up": ([-0.5] * LONG, [-3.5] * LONG),
    "drifting down": ([-3.5] * LONG, [-0.5] * LONG),
    "rare under mu": ([-0.7] * LONG, RARE * (LONG // 2)),
    "rare under pi": (RARE * (LONG // 2), [-0.7] * LONG),
    "rare under both": (RARE * (LONG // 2), list(reversed(RARE)) * (LONG // 2)),
    "certain under mu": ([-40.0] * LONG, [0.0] * LONG),
    "certain under pi": ([0.0] * LONG, [-40.0] * LONG),
    "fully masked": ([math.nan] * LONG, [math.nan] * LONG),
}


def test_every_loss_has_variants():
    assert set(VARIANTS) == set(POLICY_LOSSES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("advantage", [-3.0, 0.0, 3.0])
@pytest.mark.parametrize(("name", "params"), EVERY)
def test_values_and_gradients_are_finite(name, params, advantage, dtype):
    logp, anchor = (torch.tensor([pair[side] for pair in ROWS.values()], dtype=dtype) for side in (0, 1))
    mask = ~logp.isnan()
    mask[:, 5::7] = False  # interior tool tokens, holding NaN in every input
    advantages = torch.where(mask, advantage, math.nan).to(dtype)
    logp, anchor = logp.masked_fill(~mask, math.nan).requires_grad_(True), anchor.masked_fill(~mask, math.nan)
    loss = policy_loss(name, logp=logp, anchor_logp=anchor, advantages=advantages, mask=mask, **params)
    loss.sum().backward()
    assert loss.dtype == dtype and loss.isfinite().all() and logp.grad.isfinite().all()
    assert (loss[~mask] == 0).all() and (logp.grad[~mask] == 0).all()
    if advantage == 0:
        assert (loss == 0).all() and (logp.grad == 0).all()
        return
    names = list(ROWS)
    # far outside in the direction that A disapproves of, the pull back survives, except where a dual clip is asked for
    if "dual_clip" not in params:
        far = "+100" if advantage < 0 else "-100"
        gradient = logp.grad[names.index(far)][mask[names.index(far)]]
        assert (gradient * advantage < 0).all()


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_hard_clamp_would_lose_the_pull_back(name):
    """Negative control of the straight-through bound: the clamped log-ratio itself has gradient 0 beyond 20 nats."""
    x = torch.tensor([[25.0]], requires_grad=True)
    x.clamp(-20, 20).exp().sum().backward()
    assert x.grad.item() == 0
    logp = torch.tensor([[-0.1]], requires_grad=True)
    one = torch.ones(1, 1)
    policy_loss(name, logp=logp, anchor_logp=logp.detach() - 25, advantages=-one, mask=one).sum().backward()
    assert logp.grad.item() > 0


def test_prefix_sums_of_long_float32_rows():
    """8192 tokens: rho_t is that of an exact sum of the terms, to float32 rounding of the result."""
    x = torch.randn(1, 8192, generator=torch.Generator().manual_seed(0)) * 0.02
    exact = torch.tensor([math.fsum(x[0, : t + 1].tolist()) for t in range(0, 8192, 512)], dtype=torch.float64)
    assert exact.abs().max() > 0.5
    loss = policy_loss("ctpo", logp=x, anchor_logp=torch.zeros_like(x), advantages=-torch.ones(1, 8192), mask=torch.ones(1, 8192),
                       clip_low=18.0, power=0.0)  # fmt: skip
    torch.testing.assert_close(loss[0, ::512].double(), exact.exp(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["gspo", "ctpo", "ctpo_geomean"])
def test_losses_over_sequences_refuse_a_packed_layout(name):
    flat = torch.zeros(4)
    with pytest.raises(ValueError, match="one sequence a row"):
        policy_loss(name, logp=flat, anchor_logp=flat, advantages=flat, mask=torch.ones(4))


# --- invariances --------------------------------------------------------------------------------------------------


def batch(seed: int, rows: int, width: int) -> dict[str, torch.Tensor]:
    """Moderate and large log-ratios, random interior masks, a fully masked row."""
    generator = torch.Generator().manual_seed(seed)
    logp = -torch.rand(rows, width, generator=generator, dtype=torch.float64) * 4
    scale = 10 ** (torch.rand(rows, width, generator=generator, dtype=torch.float64) * 3 - 2)
    mask = torch.rand(rows, width, generator=generator) < 0.7
    mask[0] = False
    noise = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    advantages = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    return {"logp": logp, "anchor_logp": (logp + noise * scale).clamp(max=0), "advantages": advantages, "mask": mask}


def loss_and_gradient(name: str, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = tensors["logp"].clone().requires_grad_(True)
    loss = policy_loss(name, **{**tensors, "logp": leaf})
    loss.sum().backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def assert_same(got, expected) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


batches = st.builds(batch, st.integers(0, 10**6), st.integers(2, 4), st.integers(1, 6))
names = st.sampled_from(sorted(VARIANTS))
SETTINGS = settings(max_examples=120, deadline=None)


@SETTINGS
@given(names, batches, st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_masked_content(name, tensors, garbage):
    filled = {key: value.masked_fill(~tensors["mask"], garbage) for key, value in tensors.items() if key != "mask"}
    assert_same(loss_and_gradient(name, {**filled, "mask": tensors["mask"]}), loss_and_gradient(name, tensors))


@SETTINGS
@given(names, batches, st.randoms(use_true_random=False))
def test_order_and_independence_of_rows(name, tensors, chance):
    rows = tensors["mask"].shape[0]
    order = torch.tensor(chance.sample(range(rows), rows))
    whole = loss_and_gradient(name, tensors)
    assert_same(loss_and_gradient(name, {k: v[order] for k, v in tensors.items()}), tuple(x[order] for x in whole))
    one = slice(rows - 1, rows)
    assert_same(loss_and_gradient(name, {k: v[one] for k, v in tensors.items()}), tuple(x[one] for x in whole))


@SETTINGS
@given(names, batches, st.integers(0, 3), st.integers(0, 3), st.integers(0, 2))
def test_padding(name, tensors, left, right, empty_rows):
    def pad(tensor, fill):
        return torch.nn.functional.pad(tensor, (left, right, 0, empty_rows), value=fill)

    padded = {key: pad(value, 0 if key == "mask" else math.nan) for key, value in tensors.items()}
    assert_same(loss_and_gradient(name, padded), tuple(pad(x, 0) for x in loss_and_gradient(name, tensors)))


@SETTINGS
@given(names, batches, st.floats(0.1, 10))
def test_scale_of_the_advantages(name, tensors, scale):
    """Every loss is positively homogeneous in A: twice the advantage, twice the loss."""
    scaled = loss_and_gradient(name, {**tensors, "advantages": tensors["advantages"] * scale})
    assert_same(scaled, tuple(x * scale for x in loss_and_gradient(name, tensors)))
