"""KL terms at hand-made numbers: values, weights, extreme inputs, roles, layouts."""

from __future__ import annotations

import math

import pytest
import torch

from akl_dist.objective import (
    akl_loss,
    bounded_log_ratio,
    full_kl,
    full_kl_loss,
    kl_loss,
    segment_cumsum,
    state_weights,
)

LN2, LN3 = math.log(2), math.log(3)


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def test_surrogate_values_by_hand():
    """pi/ref = 2, pi/mu = 3: k3 = 1/2 - 1 + ln 2, k2 = ln(2)^2 / 2."""
    tensors = {"logp": row(LN2), "ref_logp": row(0.0), "behaviour_logp": row(LN2 - LN3), "mask": row(1.0)}
    k3, k2 = LN2 - 0.5, LN2**2 / 2
    assert kl_loss("forward", **tensors).item() == pytest.approx(3 * k3, rel=1e-12)
    assert kl_loss("reverse", **tensors).item() == pytest.approx(3 * k2, rel=1e-12)
    assert kl_loss("symmetric", **tensors).item() == pytest.approx(1.5 * (k3 + k2), rel=1e-12)
    assert kl_loss("reverse", **tensors, max_weight=2.0).item() == pytest.approx(2 * k2, rel=1e-12)


def test_state_weights_by_hand():
    """pi/mu = 2, (masked), 3, 1/2: products 2, -, 6, 3 up to t and 1, -, 2, 6 up to t-1."""
    tensors = {"logp": row(LN2, math.nan, LN3, -LN2), "behaviour_logp": row(0, math.nan, 0, 0), "mask": row(1, 0, 1, 1)}
    expected = {
        ("token", True): [2, 1, 3, 0.5],
        ("token", False): [1, 1, 1, 1],
        ("cumulative", True): [2, 1, 6, 3],
        ("cumulative", False): [1, 1, 2, 6],
        ("none", True): [1, 1, 1, 1],
        ("none", False): [1, 1, 1, 1],
    }
    for (state_weight, include), weights in expected.items():
        got = state_weights(**tensors, state_weight=state_weight, include_current=include).weight
        assert got[0].tolist() == pytest.approx(weights, rel=1e-12)
    truncated = state_weights(**tensors, state_weight="cumulative", max_weight=5.0)
    assert truncated.weight[0].tolist() == pytest.approx([2, 1, 5, 3], rel=1e-12)
    assert truncated.truncated[0].tolist() == [False, False, True, False]


def test_full_loss_weights_by_hand():
    """Exact divergences 1, 2, 4 after ratios 2, 3: cumulative weights 1, 2, 6."""
    got = full_kl_loss(
        "forward",
        kl_forward=row(1, 2, 4),
        kl_reverse=row(9, 9, 9),
        logp=row(LN2, LN3, 5.0),
        behaviour_logp=row(0, 0, 0),
        mask=row(1, 1, 1),
        state_weight="cumulative",
    )
    assert got[0].tolist() == pytest.approx([1, 4, 24], rel=1e-12)


def test_cumulative_sum_is_bounded_and_not_its_terms():
    """Log-ratios 30 and -30 sum to 0: weight 1 at the second token, e^20 at the first."""
    got = state_weights(logp=row(30, -30), behaviour_logp=row(0, 0), mask=row(1, 1), state_weight="cumulative").weight
    assert got[0].tolist() == pytest.approx([math.exp(20), 1.0], rel=1e-12)


def test_akl_by_hand_and_uniform_settings():
    """Reasoning: 0.1 k3, answer: 10 k2, masked: 0."""
    tensors = {"logp": row(LN2, LN2, 9), "ref_logp": row(0, 0, 0), "behaviour_logp": row(LN2, LN2, 9)}
    roles = {"answer_mask": row(0, 1, 1), "mask": row(1, 1, 0)}
    got = akl_loss(**tensors, **roles, beta_reasoning=0.1, beta_answer=10.0)
    assert got[0].tolist() == pytest.approx([0.1 * (LN2 - 0.5), 10 * LN2**2 / 2, 0], rel=1e-12)
    for direction in ("forward", "reverse", "symmetric"):
        uniform = akl_loss(
            **tensors,
            **roles,
            beta_reasoning=0.5,
            beta_answer=0.5,
            direction_reasoning=direction,
            direction_answer=direction,
        )
        assert torch.equal(uniform, 0.5 * kl_loss(direction, **tensors, mask=roles["mask"]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("x", [-100.0, -20.0, 0.0, 20.0, 100.0])
def test_bounded_log_ratio_value_and_gradient(x, dtype):
    leaf = torch.tensor([x], dtype=dtype, requires_grad=True)
    bounded = bounded_log_ratio(leaf)
    assert bounded.item() == max(-20.0, min(20.0, x))
    bounded.exp().sum().backward()
    assert leaf.grad.item() == pytest.approx(math.exp(max(-20.0, min(20.0, x))), rel=1e-5)


def test_hard_clamp_loses_the_corrective_gradient():
    """Negative control: what bounding would do without the straight-through form."""
    leaf = torch.tensor([100.0], requires_grad=True)
    leaf.clamp(-20, 20).exp().sum().backward()
    assert leaf.grad.item() == 0.0


@pytest.mark.parametrize("direction", ["forward", "reverse", "symmetric"])
@pytest.mark.parametrize("state_weight", ["token", "cumulative"])
def test_extreme_log_ratios_stay_finite_and_keep_their_sign(direction, state_weight):
    logp = torch.tensor([[100.0, -100.0, 0.0, math.nan]], requires_grad=True)
    loss = kl_loss(
        direction,
        logp=logp,
        ref_logp=torch.tensor([[0.0, 0.0, 0.0, math.nan]]),
        behaviour_logp=torch.tensor([[math.log(1e-12), 0.0, -100.0, math.inf]]),
        mask=torch.tensor([[1, 1, 1, 0]]),
        state_weight=state_weight,
    )
    loss.sum().backward()
    assert loss.isfinite().all() and logp.grad.isfinite().all()
    assert logp.grad[0, 0] > 0 > logp.grad[0, 1]
    assert loss[0, 3] == 0 and logp.grad[0, 3] == 0


def test_multiplying_by_the_mask_leaks_nan():
    """Negative control for selection: 0 * NaN is NaN, in the value and in the gradient."""
    logp, mask = torch.tensor([[1.0, math.nan]], requires_grad=True), torch.tensor([[1.0, 0.0]])
    wrong = ((-logp).exp() - 1 + logp) * mask
    wrong.sum().backward()
    assert wrong.isnan().any() and logp.grad.isnan().any()


def test_full_kl_by_hand_and_excluded_tokens():
    """pi = (1/2, 1/2, 0), ref = (1/4, 3/4, 0): forward .25 ln .5 + .75 ln 1.5, reverse .5 ln 2 + .5 ln(2/3)."""
    logprobs = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64).log().requires_grad_(True)
    ref = torch.tensor([[0.25, 0.75, 0.0]], dtype=torch.float64).log()
    forward = full_kl("forward", logprobs=logprobs, ref_logprobs=ref)
    reverse = full_kl("reverse", logprobs=logprobs, ref_logprobs=ref)
    assert forward.item() == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), rel=1e-12)
    assert reverse.item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), rel=1e-12)
    symmetric = full_kl("symmetric", logprobs=logprobs, ref_logprobs=ref)
    assert symmetric.item() == pytest.approx((forward.item() + reverse.item()) / 2, rel=1e-12)
    (forward + reverse).sum().backward()
    assert logprobs.grad.isfinite().all()


def test_full_kl_gradients_in_the_logits():
    logits = torch.tensor([0.3, -1.0, 2.0, 0.1], dtype=torch.float64)
    ref = torch.log_softmax(torch.tensor([-0.5, 0.2, 1.0, 1.5], dtype=torch.float64), -1)
    probs = torch.softmax(logits, -1)
    log_ratio = probs.log() - ref
    expected = {
        "forward": probs - ref.exp(),
        "reverse": probs * (log_ratio - (probs * log_ratio).sum()),
    }
    for direction, gradient in expected.items():
        leaf = logits.clone().requires_grad_(True)
        full_kl(direction, logprobs=torch.log_softmax(leaf, -1), ref_logprobs=ref).backward()
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-12, atol=1e-14)


def test_segment_cumsum_by_hand():
    x, ids = torch.tensor([1.0, 2, 3, 10, 20, 5]), torch.tensor([7, 7, 7, 2, 2, 9])
    assert segment_cumsum(x, ids).tolist() == [1, 3, 6, 10, 30, 5]
    assert segment_cumsum(x, ids, exclusive=True).tolist() == [0, 1, 3, 0, 10, 0]
    assert segment_cumsum(x.view(2, 3)).tolist() == [[1, 3, 6], [10, 30, 35]]


def test_segment_cumsum_does_not_carry_float32_error_into_later_segments():
    """A segment of large values before small ones; the float32 running total loses the small ones (control)."""
    x = torch.cat([torch.full((1000,), 16777.217), torch.full((4,), 1e-3)])
    ids = torch.cat([torch.zeros(1000, dtype=torch.long), torch.ones(4, dtype=torch.long)])
    expected = torch.tensor([1e-3, 2e-3, 3e-3, 4e-3], dtype=torch.float64)
    torch.testing.assert_close(segment_cumsum(x, ids)[1000:], expected, rtol=1e-4, atol=0)
    total = x.cumsum(0)
    assert ((total[1000:] - total[999]).double() - expected).abs().max() > 1e-3


def test_packed_cumulative_weights_need_segments():
    flat = torch.zeros(4)
    with pytest.raises(ValueError, match="segment_ids"):
        state_weights(logp=flat, behaviour_logp=flat, mask=torch.ones(4), state_weight="cumulative")


def test_mistakes_are_refused_with_the_nearest_name():
    tensors = {"logp": row(0.0), "ref_logp": row(0.0), "behaviour_logp": row(0.0), "mask": row(1.0)}
    with pytest.raises(ValueError, match="did you mean 'reverse'"):
        kl_loss("revers", **tensors)
    with pytest.raises(ValueError, match="did you mean 'cumulative'"):
        kl_loss("reverse", **tensors, state_weight="cumulativ")
    with pytest.raises(ValueError, match="max_weight"):
        kl_loss("reverse", **tensors, max_weight=0.0)
    with pytest.raises(ValueError, match="beta_answer"):
        akl_loss(**tensors, answer_mask=row(1.0), beta_reasoning=0.1, beta_answer=-0.1)
    with pytest.raises(ValueError, match="shape"):
        kl_loss("reverse", **{**tensors, "ref_logp": torch.zeros(1)})
