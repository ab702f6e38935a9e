"""GAE, its whitening moments and the value loss: hand-made numbers, recorded vectors, invariances, known-wrong variants."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from akl_dist.objective import advantage_moments, aggregate, generalized_advantages, mean_and_deviation, value_loss

GOLDEN = Path(__file__).parent / "data" / "golden"


def names(prefix: str) -> list[str]:
    found = sorted(path.stem for path in GOLDEN.glob(f"{prefix}*.json"))
    assert found
    return found


def load(name: str) -> dict:
    return json.loads((GOLDEN / f"{name}.json").read_text())


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def poison(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, values, torch.full_like(values, math.nan))


def close(got, expected) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-9)


def test_by_hand():
    """gamma = lam = 1/2, V = (1, 2, 4), reward 8 at the end. delta = (0, 0, 4); A = (0 + 1/4 * 1, 0 + 1/4 * 4, 4)."""
    got = generalized_advantages(
        rewards=tensor([[0, 0, 8]]), values=tensor([[1, 2, 4]]), mask=torch.ones(1, 3), gamma=0.5, lam=0.5
    )
    assert got.advantages.tolist() == [[0.25, 1, 4]]
    assert got.returns.tolist() == [[1.25, 3, 8]]


def test_a_masked_span_is_skipped():
    """The same response with tool output (garbage) in its middle, and padding behind it."""
    values, rewards = tensor([[1, 2, 4]]), tensor([[0, 0, 8]])
    plain = generalized_advantages(rewards=rewards, values=values, mask=torch.ones(1, 3), gamma=0.9, lam=0.8)
    place = [0, 3, 4]
    wide = torch.full((1, 7), math.nan, dtype=torch.float64)
    wide_values, wide_rewards, mask = wide.clone(), wide.clone(), torch.zeros(1, 7)
    wide_values[0, place], wide_rewards[0, place], mask[0, place] = values[0], rewards[0], 1
    got = generalized_advantages(rewards=wide_rewards, values=wide_values, mask=mask, gamma=0.9, lam=0.8)
    assert torch.equal(got.advantages[0, place], plain.advantages[0])
    assert torch.equal(got.returns[0, place], plain.returns[0])
    assert got.advantages[mask == 0].abs().sum() == 0 and got.returns[mask == 0].abs().sum() == 0


@pytest.mark.parametrize("name", names("verl_adv-gae"))
def test_recorded_gae_with_masked_spans(name):
    golden = load(name)
    mask = tensor(golden["inputs"]["mask"]) != 0
    assert (mask[:, 1:] & ~mask[:, :-1]).any(), "no interior mask: the case says nothing about skipping"
    got = generalized_advantages(
        rewards=poison(tensor(golden["inputs"]["token_level_rewards"]), mask),
        values=poison(tensor(golden["inputs"]["values"]), mask), mask=mask,
        gamma=golden["hyperparameters"]["gamma"], lam=golden["hyperparameters"]["lam"],
    )
    outputs = golden["outputs"]
    close(got.advantages[mask], tensor(outputs["advantages_raw"])[mask])
    close(got.returns[mask], tensor(outputs["returns"])[mask])
    mean, deviation = mean_and_deviation(advantage_moments(got.advantages, mask))
    close(((got.advantages - mean) / deviation)[mask], tensor(outputs["advantages_whitened"])[mask])


@pytest.mark.parametrize("name", names("openrlhf_gae"))
def test_recorded_gae_of_a_peer_that_cuts_at_masked_spans(name):
    """Contiguous responses agree. With interior spans ours differs on purpose, and only before a span."""
    golden = load(name)
    mask = tensor(golden["inputs"]["mask"]) != 0
    got = generalized_advantages(
        rewards=poison(tensor(golden["inputs"]["rewards"]), mask), values=poison(tensor(golden["inputs"]["values"]), mask),
        mask=mask, gamma=golden["hyperparameters"]["gamma"], lam=golden["hyperparameters"]["lambd"],
    )
    expected = tensor(golden["outputs"]["advantages"])
    if "contiguous" in name:
        close(got.advantages[mask], expected[mask])
        close(got.returns[mask], tensor(golden["outputs"]["returns"])[mask])
        return
    # lam = 0: only the token just before a span sees another next value
    before_span = torch.zeros_like(mask)
    before_span[:, :-1] = mask[:, :-1] & ~mask[:, 1:] & (mask.flip(-1).cumsum(-1).flip(-1)[:, 1:] > 0)
    assert before_span.any()
    close(got.advantages[mask & ~before_span], expected[mask & ~before_span])
    assert ((got.advantages - expected).abs()[before_span] > 1e-3).all()


def episodes(discounts: list[float]) -> list[slice]:
    """Rows of a recorded trajectory: a discount of 0 ends an episode."""
    ends = [index + 1 for index, discount in enumerate(discounts) if discount == 0 or index == len(discounts) - 1]
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


@pytest.mark.parametrize("name", names("rlax_truncated_gae") + names("rlax_lambda_returns"))
def test_recorded_lambda_returns_and_gae(name):
    """The peer bootstraps past the end; ours does not, so that value is handed over as a reward."""
    golden = load(name)
    inputs, lam, discounts = golden["inputs"], golden["hyperparameters"]["lambda_"], golden["inputs"]["discount_t"]
    is_gae = "gae" in name
    following = inputs["values"][1:] if is_gae else inputs["v_t"]
    values = tensor([inputs["values"][0] if is_gae else 0.7, *following[:-1]])
    rewards, expected = tensor(inputs["r_t"]), tensor(golden["outputs"]["advantages" if is_gae else "returns"])
    rewards[-1] += discounts[-1] * following[-1]
    gamma = max(discounts)
    for part in episodes(discounts):
        row = generalized_advantages(rewards=rewards[part][None], values=values[part][None],
                                     mask=torch.ones(1, part.stop - part.start), gamma=gamma, lam=lam)  # fmt: skip
        close((row.advantages if is_gae else row.returns)[0], expected[part])


def test_lam_one_is_reward_to_go_and_lam_zero_one_step():
    torch.manual_seed(0)
    rewards, values, mask = torch.randn(3, 9).double(), torch.randn(3, 9).double(), torch.ones(3, 9)
    full = generalized_advantages(rewards=rewards, values=values, mask=mask, gamma=1.0, lam=1.0)
    close(full.returns, rewards.flip(-1).cumsum(-1).flip(-1))
    step = generalized_advantages(rewards=rewards, values=values, mask=mask, gamma=0.7, lam=0.0)
    close(step.advantages[:, :-1], (rewards + 0.7 * values.roll(-1, -1) - values)[:, :-1])


def test_a_right_critic_has_no_advantage_on_average():
    """Two equally likely tokens, then reward 1 or 0. V = (1/2, then 1 or 0): every advantage of the second token is 0."""
    got = generalized_advantages(
        rewards=tensor([[0, 1], [0, 0]]), values=tensor([[0.5, 1], [0.5, 0]]), mask=torch.ones(2, 2), lam=0.95
    )
    assert got.advantages.tolist() == [[0.5, 0], [-0.5, 0]]


def test_float32_inputs_are_summed_in_float64():
    """20,000 steps: a float32 sum of the rewards would be off by more than the tolerance."""
    n = 20_000
    got = generalized_advantages(rewards=torch.full((1, n), 0.1), values=torch.zeros(1, n), mask=torch.ones(1, n))
    assert got.advantages.dtype == torch.float32
    exact = n * float(torch.tensor(0.1))
    assert got.advantages[0, 0].item() == pytest.approx(exact, rel=1e-7)
    naive = torch.zeros(())
    for _ in range(n):
        naive = naive + torch.tensor(0.1)
    assert abs(naive.item() - exact) > 1e-6 * exact


def test_moments_add_up_over_any_cut():
    torch.manual_seed(1)
    values, mask = torch.randn(6, 11).double(), torch.rand(6, 11) < 0.6
    values = poison(values, mask)
    whole = mean_and_deviation(advantage_moments(values, mask))
    parts = sum(advantage_moments(values[rows], mask[rows]) for rows in (slice(0, 1), slice(1, 4), slice(4, 6)))
    assert mean_and_deviation(parts) == pytest.approx(whole, rel=1e-12)
    kept = values[mask]
    assert whole[0] == pytest.approx(kept.mean().item()) and whole[1] == pytest.approx(kept.std().item(), rel=1e-6)
    # averaging the parts' own deviations is the known mistake
    mean_of_parts = sum(mean_and_deviation(advantage_moments(values[r : r + 1], mask[r : r + 1]))[1] for r in range(6)) / 6
    assert mean_of_parts != pytest.approx(whole[1], rel=1e-3)


def test_degenerate_moments():
    assert mean_and_deviation(advantage_moments(tensor([[3.0]]), torch.zeros(1, 1))) == (0.0, 1.0)
    assert mean_and_deviation(advantage_moments(tensor([[3.0]]), torch.ones(1, 1))) == (0.0, 1.0)
    equal = torch.full((4, 5), 0.45)
    mean, deviation = mean_and_deviation(advantage_moments(equal, torch.ones(4, 5)))
    assert ((equal - mean) / deviation).abs().max() < 1e-3, "rounding is not amplified"


# --- value loss -----------------------------------------------------------------------------------------------------


def test_value_loss_by_hand():
    """v_old = 0, clip 1, R = 3. v = 0.5: inside. v = 2: moved past the window towards R: error of 1, no gradient.
    v = -2: moved past the window away from R: its own error, pulled back."""
    values = tensor([0.5, 2, -2]).requires_grad_(True)
    loss = value_loss(values=values, old_values=torch.zeros(3), returns=torch.full((3,), 3.0), mask=torch.ones(3), clip=1.0)
    assert loss.tolist() == [0.5 * 2.5**2, 0.5 * 4, 0.5 * 25]
    loss.sum().backward()
    assert values.grad.tolist() == [-2.5, 0, -5]


@pytest.mark.parametrize("name", names("openrlhf_ValueLoss") + names("verl_value_loss"))
def test_recorded_value_losses(name):
    """Both peers carry the factor 0.5 and average over all tokens, so nothing has to be rescaled."""
    golden = load(name)
    inputs, hyper = golden["inputs"], golden["hyperparameters"]
    mask = tensor(inputs["mask"]) != 0
    verl = name.startswith("verl")
    values = poison(tensor(inputs["vpreds" if verl else "values"]), mask).requires_grad_(True)
    old = poison(tensor(inputs["values" if verl else "old_values"]), mask)
    loss = value_loss(values=values, old_values=old, returns=poison(tensor(inputs["returns"]), mask), mask=mask,
                      clip=hyper["cliprange_value"] if verl else hyper["clip_eps"])  # fmt: skip
    assert loss[~mask].abs().sum() == 0
    total = aggregate(loss, mask, "token_mean")
    total.backward()
    close(total.detach(), tensor(golden["outputs"]["loss"]))
    close(values.grad[mask], tensor(golden["grad"])[mask])
    assert values.grad[~mask].abs().sum() == 0


def test_the_smaller_error_is_the_wrong_clip():
    """Negative control: min(errors) lets a value run away for free; ours is never below the plain squared error."""
    torch.manual_seed(2)
    values, old, returns = torch.randn(200), torch.randn(200), torch.randn(200)
    ours = value_loss(values=values, old_values=old, returns=returns, mask=torch.ones(200), clip=0.2)
    plain = 0.5 * (values - returns) ** 2
    wrong = 0.5 * torch.minimum((values - returns) ** 2, (values.clamp(old - 0.2, old + 0.2) - returns) ** 2)
    assert (ours >= plain).all() and (ours > plain).any()
    assert (wrong < plain).any()


def test_mistakes_are_refused():
    ones = torch.ones(1, 3)
    with pytest.raises(ValueError, match="gamma"):
        generalized_advantages(rewards=ones, values=ones, mask=ones, gamma=1.5)
    with pytest.raises(ValueError, match="lam"):
        generalized_advantages(rewards=ones, values=ones, mask=ones, lam=-0.1)
    with pytest.raises(ValueError, match="rewards"):
        generalized_advantages(rewards=torch.ones(1), values=ones, mask=ones)
    with pytest.raises(ValueError, match="value clip"):
        value_loss(values=ones, old_values=ones, returns=ones, mask=ones, clip=0.0)
