"""Every policy loss at hand-made numbers, PPO's gradient at the edges, and the registry."""

from __future__ import annotations

import math

import pytest
import torch

from akl_dist.objective import (
    POLICY_LOSSES,
    loss_log_ratio,
    policy_loss,
    policy_statistics,
    register_policy_loss,
    token_gradient,
)


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def ratios(*values: float) -> dict[str, torch.Tensor]:
    """logp and anchor with the given ratios pi/anchor."""
    return {"logp": row(*map(math.log, values)), "anchor_logp": row(*(0.0 for _ in values))}


def test_ppo_values_and_gradients_by_hand():
    """Window [.8, 1.2]. A = 1: -min(r, 1.2); A = -1: max(r, .8). Gradient -A r inside or on the corrective side."""
    arguments = ratios(1.1, 1.5, 0.5, 1.5, 0.5, 1.0)
    arguments["logp"].requires_grad_(True)
    loss = policy_loss("ppo", **arguments, advantages=row(1, 1, 1, -1, -1, -2), mask=torch.ones(1, 6))
    assert loss[0].tolist() == pytest.approx([-1.1, -1.2, -0.5, 1.5, 0.8, 2.0], rel=1e-12)
    loss.sum().backward()
    assert arguments["logp"].grad[0].tolist() == pytest.approx([-1.1, 0, -0.5, 1.5, 0, 2.0], rel=1e-12)


def test_asymmetric_window_and_dual_clip_by_hand():
    """[.8, 1.28] and A = -1, r = 5 with dual clip 3: loss 3, no gradient; without it: loss 5, gradient 5."""
    arguments = ratios(1.25, 1.3, 5.0)
    advantages, mask = row(1, 1, -1), torch.ones(1, 3)

    def gradient(**params):
        return token_gradient(
            lambda x: policy_loss("ppo", logp=x, anchor_logp=arguments["anchor_logp"], advantages=advantages, mask=mask, **params),
            arguments["logp"],
        )[0].tolist()

    loss = policy_loss("ppo", **arguments, advantages=advantages, mask=mask, clip_high=0.28, dual_clip=3.0)
    assert loss[0].tolist() == pytest.approx([-1.25, -1.28, 3.0], rel=1e-12)
    assert gradient(clip_high=0.28, dual_clip=3.0) == pytest.approx([-1.25, 0, 0], rel=1e-12)
    assert gradient(clip_high=0.28) == pytest.approx([-1.25, 0, 5.0], rel=1e-12)


E = math.exp
HAND = {
    # one row of ratios pi/anchor (anchor probability .5 where it matters), A, mask; losses; gradients
    "gspo": (
        # mean log-ratio of the unmasked: (ln 2 + ln .5 + ln 1.21) / 3 -> 1.21^(1/3) = 1.0656, window [.95, 1.05]
        {"clip_low": 0.05, "clip_high": 0.05}, [2, 0.5, 1.21, None], [1, -1, -2, None],
        [-1.05, 1.21 ** (1 / 3), 2 * 1.21 ** (1 / 3), 0], [0, 1.21 ** (1 / 3), 2 * 1.21 ** (1 / 3), 0],
    ),
    "cispo": ({"clip_low": 0.5}, [1.5, 1.1, 0.2, 5], [1, 2, -1, -1],
              lambda p: [-1.2 * p[0], -2.2 * p[1], 0.5 * p[2], 1.2 * p[3]], [-1.2, -2.2, 0.5, 1.2]),
    # prefix products 1.05, 1.155, (masked), 1.2705; windows exp(.05 t^.5): 1.051, 1.0733, -, 1.0905
    "ctpo": ({}, [1.05, 1.1, None, 1.1], [1, 1, None, -1], [-1.05, -E(0.05 * 2**0.5), 0, 1.2705], [-1.05, 0, 0, 1.2705]),
    # geometric means 1.05, 1.155^(1/2) = 1.0747, -, 1.2705^(1/3) = 1.0831; windows exp(.05 t^-.5): 1.051, 1.036, -, 1.029
    "ctpo_geomean": ({}, [1.05, 1.1, None, 1.1], [1, 1, None, -1],
                     [-1.05, -E(0.05 / 2**0.5), 0, 1.2705 ** (1 / 3)], [-1.05, 0, 0, 1.2705 ** (1 / 3)]),
    # -A r + |A| (r - 1)^2 / .4; gradient -A r (1 - sign(A (r - 1)) |r - 1| / .2)
    "spo": ({}, [1.1, 1.2, 1.4, 0.8], [1, 1, 1, 2],
            [-1.1 + 0.025, -1.2 + 0.1, -1.4 + 0.4, -1.6 + 0.2], [-0.55, 0, 1.4, -1.6 * 2]),
    # mu = .5: -A r + |A| .5 (r - 1)^2 / .5; gradient -A r (1 - sign(A (r - 1)) |pi - mu| / .25)
    "drpo": ({"delta": 0.25}, [1.2, 1.5, 1.8, 0.8], [1, 1, 1, -2],
             [-1.2 + 0.04, -1.5 + 0.25, -1.8 + 0.64, 1.6 + 0.08], [-1.2 * 0.6, 0, 1.8 * 0.6, 1.6 * 0.6]),
    # mu = .5: pi .6, .7 (masked: .2 above), .7 with A < 0 comes back, .3 with A < 0 is masked
    "dppo_tv": ({}, [1.2, 1.4, 1.4, 0.6], [1, 1, -1, -1], lambda p: [-1.2 * p[0], 0, 1.4 * p[2], 0], [-1.2, 0, 1.4, 0]),
    # D(.5 | .6) = .0204, D(.5 | .7) = .0872
    "dppo_kl": ({}, [1.2, 1.4, 1.4, 0.6], [1, 1, -1, -1], lambda p: [-1.2 * p[0], 0, 1.4 * p[2], 0], [-1.2, 0, 1.4, 0]),
    "reinforce": ({"max_weight": 1.5}, [1.2, 3.0, 0.1, None], [1, 2, -1, None],
                  lambda p: [-1.2 * p[0], -3 * p[1], 0.1 * p[2], 0], [-1.2, -3, 0.1, 0]),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(HAND))
def test_values_and_gradients_by_hand(name):
    params, ratio, advantages, losses, gradients = HAND[name]
    anchor = math.log(0.5)
    values = [math.nan if r is None else anchor + math.log(r) for r in ratio]
    logp = row(*values).requires_grad_(True)
    loss = policy_loss(
        name,
        logp=logp,
        anchor_logp=row(*(math.nan if r is None else anchor for r in ratio)),
        advantages=row(*(math.nan if a is None else a for a in advantages)),
        mask=row(*(r is not None for r in ratio)),
        **params,
    )
    loss.sum().backward()
    expected = losses(values) if callable(losses) else losses
    assert loss[0].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert logp.grad[0].tolist() == pytest.approx(gradients, rel=1e-12, abs=1e-12)


def test_every_loss_has_numbers_by_hand():
    assert {"ppo", *HAND} == set(POLICY_LOSSES)


def test_the_dual_clip_of_ctpo_removes_the_corrective_gradient():
    """A = -1, S = ln 1.2 above e^.05: 1.2 with gradient 1.2 by default, e^.05 and none with the authors' code's bound."""
    tensors = {"anchor_logp": row(0.0), "advantages": row(-1.0), "mask": row(1.0)}
    for params, loss, gradient in (({}, 1.2, 1.2), ({"dual_clip": 0.05}, E(0.05), 0.0)):
        x = row(math.log(1.2))
        assert policy_loss("ctpo", logp=x, **tensors, **params).item() == pytest.approx(loss)
        assert token_gradient(lambda v, p=params: policy_loss("ctpo", logp=v, **tensors, **p), x).item() == pytest.approx(gradient)


def test_reinforce_without_a_weight_ignores_the_anchor():
    tensors = {"logp": row(-2.0), "advantages": row(3.0), "mask": row(1.0)}
    assert policy_loss("reinforce", anchor_logp=row(-7.0), **tensors).item() == 6.0


@pytest.mark.parametrize(("name", "params", "message"), [
    ("ppo", {"clip_low": 1.5}, "ppo clip_low"), ("gspo", {"clip_high": -0.1}, "gspo clip_high"),
    ("cispo", {"clip_low": 2.0}, "cispo clip_low"), ("ctpo", {"clip_space": "logs"}, "did you mean 'log'"),
    ("ctpo", {"clip_low": -0.1}, "clip_low"), ("ctpo", {"dual_clip": 0.0}, "dual_clip"),
    ("ctpo", {"clip_space": "ratio", "clip_low": 1.5}, "at most 1"),
    ("ctpo_geomean", {"clip_space": "ratio", "dual_clip": 0.05}, "above 1"), ("spo", {"epsilon": 0.0}, "spo epsilon"),
    ("drpo", {"delta": -1.0}, "drpo delta"), ("dppo_tv", {"delta_low": -0.1}, "dppo delta_low"),
    ("dppo_kl", {"max_ratio": 0.0}, "max_ratio"), ("reinforce", {"max_weight": 0.0}, "max_weight"),
])  # fmt: skip
def test_parameters_out_of_range_are_named(name, params, message):
    with pytest.raises(ValueError, match=message):
        policy_loss(name, **ratios(1.0), advantages=row(1.0), mask=row(1.0), **params)


def test_a_rows_advantage_holds_for_its_tokens():
    logp, mask = torch.zeros(2, 3), torch.tensor([[1, 1, 0], [1, 0, 0]])
    loss = policy_loss("ppo", logp=logp, anchor_logp=logp, advantages=torch.tensor([2.0, -1.0]), mask=mask)
    assert loss.tolist() == [[-2, -2, 0], [1, 0, 0]]


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_extreme_ratios_stay_finite(advantage):
    """Log-ratios of +-100 and an anchor probability of 1e-12; NaN where masked, in every input."""
    logp = torch.tensor([[100.0, -100.0, 0.0, math.nan]], requires_grad=True)
    loss = policy_loss(
        "ppo",
        logp=logp,
        anchor_logp=torch.tensor([[0.0, 0.0, math.log(1e-12), math.nan]]),
        advantages=torch.tensor([[advantage, advantage, advantage, math.nan]]),
        mask=torch.tensor([[True, True, True, False]]),
    )
    loss.sum().backward()
    assert loss.isfinite().all() and logp.grad.isfinite().all()
    assert loss[0, 3] == 0 and logp.grad[0, 3] == 0
    if advantage < 0:
        assert logp.grad[0, 0] > 0  # far outside, yet it still pulls back


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_only_logp_is_differentiated(name):
    tensors = {name: torch.full((1, 2), -0.1, requires_grad=True) for name in ("logp", "anchor_logp", "advantages")}
    policy_loss(name, **tensors, mask=torch.ones(1, 2)).sum().backward()
    assert tensors["logp"].grad is not None
    assert tensors["anchor_logp"].grad is None and tensors["advantages"].grad is None


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_half_precision_is_computed_in_float32(name):
    logp = torch.tensor([[-1.0]], dtype=torch.bfloat16, requires_grad=True)
    loss = policy_loss(name, logp=logp, anchor_logp=logp, advantages=torch.ones(1), mask=torch.ones(1, 1))
    assert loss.dtype == torch.float32


def test_statistics_by_hand():
    """Ratios 1.1, 1.5, e^25 (clamped to e^20), one masked. Clipped: 1.5 with A = 1; the third pulls back, A = -1."""
    arguments = {
        "anchor_logp": row(0, 0, 0, math.nan),
        "advantages": row(1, 1, -1, math.nan),
        "mask": row(1, 1, 1, 0),
    }
    logp = row(math.log(1.1), math.log(1.5), 25.0, math.nan)
    gradient = token_gradient(lambda x: policy_loss("ppo", logp=x, **arguments), logp)
    log_ratio = loss_log_ratio("ppo", logp=logp, anchor_logp=arguments["anchor_logp"], mask=arguments["mask"])
    got = policy_statistics(log_ratio=log_ratio, advantages=arguments["advantages"], mask=arguments["mask"], gradient=gradient)
    assert (got.tokens.item(), got.clipped.item(), got.clamped.item()) == (3, 1, 1)
    assert got.ratio_sum.item() == pytest.approx(2.6 + math.exp(20), rel=1e-12)
    assert got.ratio_max.item() == pytest.approx(math.exp(20), rel=1e-12)


def test_log_ratios_by_hand():
    """1, 3, masked, 5: running sums 1, 4, -, 9; running means 1, 2, -, 3; the sequence's mean 3."""
    tensors = {"logp": row(1, 3, math.nan, 5), "anchor_logp": row(0, 0, math.nan, 0), "mask": row(1, 1, 0, 1)}
    expected = {"ppo": row(1, 3, 0, 5), "ctpo": row(1, 4, 0, 9), "ctpo_geomean": row(1, 2, 0, 3), "gspo": row(3, 3, 0, 3),
                "a loss of one's own": row(1, 3, 0, 5)}
    for name, values in expected.items():
        torch.testing.assert_close(loss_log_ratio(name, **tensors), values, check_dtype=False)


WIDE = {"ppo": {"clip_low": 1, "clip_high": 9}, "gspo": {"clip_low": 1, "clip_high": 9},
        "ctpo": {"clip_low": 9, "clip_high": 9}, "ctpo_geomean": {"clip_low": 9, "clip_high": 9}, "cispo": {"clip_high": 9},
        "reinforce": {"max_weight": 9}}


@pytest.mark.parametrize("name", sorted(WIDE))
def test_log_ratios_are_those_of_the_losses(name):
    """With A = 1 and nothing clipped the gradient in logp is -ratio."""
    tensors = {"logp": row(0.1, -0.4, 0.3, 0.2), "anchor_logp": row(0.0, 0.1, math.nan, 0.05), "mask": row(1, 1, 0, 1)}
    gradient = token_gradient(lambda x: policy_loss(name, **{**tensors, "logp": x, "advantages": row(1, 1, 1, 1)}, **WIDE[name]),
                              tensors["logp"])
    kept = tensors["mask"] != 0
    torch.testing.assert_close(loss_log_ratio(name, **tensors)[kept].exp(), -gradient[kept])


def test_unknown_names_and_parameters_name_the_nearest():
    tensors = {**ratios(1.0), "advantages": row(1.0), "mask": row(1.0)}
    with pytest.raises(ValueError, match="did you mean 'ppo'"):
        policy_loss("pp0", **tensors)
    with pytest.raises(ValueError, match="did you mean 'clip_low'"):
        policy_loss("ppo", **tensors, clip_lo=0.2)
    with pytest.raises(ValueError, match="dual_clip"):
        policy_loss("ppo", **tensors, dual_clip=1.0)
    with pytest.raises(ValueError, match="advantages"):
        policy_loss("ppo", **{**tensors, "advantages": torch.ones(3)})


def test_registration_of_a_loss_of_ones_own():
    @register_policy_loss("scaled_for_this_test")
    def scaled(*, logp, anchor_logp, advantages, mask, scale=1.0):
        assert not any(tensor.isnan().any() for tensor in (logp, anchor_logp, advantages))  # inputs arrive selected
        return -scale * advantages * logp

    try:
        loss = policy_loss(
            "scaled_for_this_test",
            logp=row(-2.0, math.nan),
            anchor_logp=row(0, math.nan),
            advantages=row(3.0, math.nan),
            mask=row(1, 0),
            scale=0.5,
        )
        assert loss.tolist() == [[3.0, 0.0]]
        with pytest.raises(ValueError, match="second registration"):
            register_policy_loss("scaled_for_this_test")(lambda *, logp, anchor_logp, advantages, mask: logp)
    finally:
        del POLICY_LOSSES["scaled_for_this_test"]
    with pytest.raises(ValueError, match="named parameters only"):
        register_policy_loss("open_ended")(lambda *, logp, anchor_logp, advantages, mask, **rest: logp)
    assert "open_ended" not in POLICY_LOSSES
