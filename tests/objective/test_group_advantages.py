"""Group advantages at hand-made numbers, degenerate groups, and invariances."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from akl_dist.objective import group_advantages, zero_spread_groups


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_interleaved_groups_by_hand():
    """Group 5: rewards 1, 0, 2 (mean 1, sample std 1). Group -2: 3, 5 (mean 4, sample std sqrt 2)."""
    rewards, index = tensor(1, 3, 0, 5, 2), torch.tensor([5, -2, 5, -2, 5])
    assert group_advantages(rewards, index, normalize_std=False).tolist() == [0, -1, -1, 1, 1]
    normalised = group_advantages(rewards, index, normalize_std=True, eps=0.0).tolist()
    assert normalised == pytest.approx([0, -math.sqrt(0.5), -1, math.sqrt(0.5), 1], rel=1e-12)
    # leave-one-out: reward minus the mean of the others, e.g. 0 - (1 + 2) / 2
    assert group_advantages(rewards, index, normalize_std=False, leave_one_out=True).tolist() == [0, -2, -1.5, 2, 1.5]


def test_degenerate_groups_are_exactly_zero():
    """A group of one, one with a single valid member, equal rewards, and a spread of a rounding error."""
    rewards = tensor(7, 1, math.nan, 0.3, 0.1 + 0.2)
    index, valid = torch.tensor([0, 1, 1, 2, 2]), torch.tensor([True, True, False, True, True])
    for options in ({"normalize_std": True, "eps": 0.0}, {"normalize_std": False, "leave_one_out": True}):
        assert group_advantages(rewards, index, valid=valid, **options).tolist() == [0] * 5
    assert zero_spread_groups(rewards, index, valid=valid).tolist() == [True] * 5
    assert not zero_spread_groups(tensor(0, 1), torch.tensor([0, 0])).any()


def test_one_pass_float32_is_the_known_bug():
    """Negative control: E[x^2] - E[x]^2 in float32 turns rounding into advantages."""
    rewards = torch.full((8,), 0.45) + torch.tensor([0, 0, 0, 0, 0, 0, 0, 3e-8])
    variance = ((rewards * rewards).mean() - rewards.mean() ** 2).clamp(min=0)
    one_pass = (rewards - rewards.mean()) / (variance.sqrt() + 1e-12)
    assert one_pass.abs().max() > 1
    assert (group_advantages(rewards, torch.zeros(8, dtype=torch.long), normalize_std=True) == 0).all()


def test_large_offset_keeps_a_real_spread():
    got = group_advantages(tensor(1e6, 1e6 + 0.5), torch.tensor([0, 0]), normalize_std=False)
    assert got.tolist() == [-0.25, 0.25]


def test_all_invalid_and_empty_batches_are_legal():
    nothing = torch.zeros(0)
    assert group_advantages(nothing, torch.zeros(0, dtype=torch.long), normalize_std=True).shape == (0,)
    got = group_advantages(tensor(math.nan, math.nan), torch.tensor([0, 0]), valid=torch.tensor([False, False]), normalize_std=True)
    assert got.tolist() == [0, 0]


def test_mistakes_are_refused():
    index = torch.tensor([0, 0])
    with pytest.raises(ValueError, match="not a zero reward"):
        group_advantages(tensor(1, math.nan), index, normalize_std=True)
    with pytest.raises(ValueError, match="did you mean 'sample'"):
        group_advantages(tensor(1, 0), index, normalize_std=True, std="samples")
    with pytest.raises(ValueError, match="group_index"):
        group_advantages(tensor(1, 0), torch.tensor([0]), normalize_std=True)


rewards_and_groups = st.lists(
    st.tuples(st.floats(-1e30, 1e30, allow_subnormal=False), st.integers(-3, 3), st.booleans()),
    min_size=1,
    max_size=20,
)


@settings(max_examples=100, deadline=None)
@given(rewards_and_groups, st.booleans(), st.booleans(), st.randoms(use_true_random=False))
def test_total_bounded_and_independent_of_order_and_invalid_rewards(samples, normalize_std, leave_one_out, random):
    rewards = tensor(*(sample[0] for sample in samples))
    index = torch.tensor([sample[1] for sample in samples])
    valid = torch.tensor([sample[2] for sample in samples])
    options = {"normalize_std": normalize_std, "leave_one_out": leave_one_out}
    got = group_advantages(rewards, index, valid=valid, **options)
    assert got.isfinite().all() and (got[~valid] == 0).all()
    if normalize_std and not leave_one_out:
        assert got.abs().max() <= math.sqrt(len(samples))
    order = torch.tensor(random.sample(range(len(samples)), len(samples)))
    shuffled = group_advantages(rewards[order], index[order], valid=valid[order], **options)
    scale = rewards.abs().max().clamp(min=1e-300).item() if not normalize_std else 1.0
    torch.testing.assert_close(shuffled, got[order], rtol=1e-9, atol=1e-12 * scale)
    garbage = torch.where(valid, rewards, torch.full_like(rewards, math.nan))
    assert torch.equal(group_advantages(garbage, index, valid=valid, **options), got)
