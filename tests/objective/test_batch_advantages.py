"""REINFORCE++ advantages: hand-made numbers, a recorded vector, invariances, and what a sequence mean would give."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from akl_dist.objective import batch_whitened_advantages

GOLDEN = Path(__file__).parent / "data" / "golden" / "verl_adv-reinforce_plus_plus_g1.0.json"


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_by_hand():
    """Reward 1 on 1 token, 0 on 3: token mean 1/4, squares (9/16 + 3/16) over 4 - 1 tokens, so variance 1/4."""
    got = batch_whitened_advantages(tensor(1, 0), torch.tensor([1, 3]), eps=0.0)
    assert got.tolist() == pytest.approx([1.5, -0.5], rel=1e-12)
    # one response, one vote is another algorithm: mean 1/2
    assert got.tolist() != pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], rel=1e-2)


def test_recorded_vector():
    """Its rewards lie on every token, so each token enters as a response of one token with its own reward-to-go."""
    golden = json.loads(GOLDEN.read_text())
    mask = torch.tensor(golden["inputs"]["mask"]) != 0
    to_go = torch.tensor(golden["outputs"]["returns"], dtype=torch.float64)[mask]
    expected = torch.tensor(golden["outputs"]["advantages"], dtype=torch.float64)[mask]
    got = batch_whitened_advantages(to_go, torch.ones(len(to_go), dtype=torch.long))
    torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-9)


def test_a_response_counts_once_per_token():
    """The token-weighted result equals that of the same tokens listed one by one."""
    rewards, lengths = tensor(1, 0, 0.5), torch.tensor([2, 5, 3])
    one_by_one = batch_whitened_advantages(rewards.repeat_interleave(lengths), torch.ones(10, dtype=torch.long))
    got = batch_whitened_advantages(rewards, lengths)
    torch.testing.assert_close(got.repeat_interleave(lengths), one_by_one, rtol=1e-12, atol=0)


def test_baseline_variant_by_hand():
    """Group 0: 1, 0 -> +-1/2 on 1 token each. Group 1: 3, 3 -> 0 on 2 tokens. Mean 0, variance (1/4 + 1/4) / 3."""
    rewards, lengths, groups = tensor(1, 0, 3, 3), torch.tensor([1, 1, 1, 1]), torch.tensor([0, 0, 1, 1])
    got = batch_whitened_advantages(rewards, lengths, group_index=groups, eps=0.0)
    assert got.tolist() == pytest.approx([0.5 * math.sqrt(6), -0.5 * math.sqrt(6), 0, 0], rel=1e-12)
    # without the baseline the easy group looks good
    assert batch_whitened_advantages(rewards, lengths)[2] > 0.5


def test_baseline_variant_leaves_a_response_without_baseline_out():
    """Group 1 has one member; group 2 one with a verdict."""
    rewards = tensor(1, 0, 9, 5, math.nan)
    groups, valid = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([1, 1, 1, 1, 0])
    got = batch_whitened_advantages(rewards, torch.ones(5, dtype=torch.long), group_index=groups, valid=valid, eps=0.0)
    assert got.tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5), 0, 0, 0], rel=1e-12)


def test_no_verdict_is_not_a_zero_reward():
    rewards, lengths = tensor(1, math.nan, 0), torch.tensor([4, 100, 4])
    got = batch_whitened_advantages(rewards, lengths, valid=torch.tensor([True, False, True]), eps=0.0)
    assert got.tolist() == pytest.approx([math.sqrt(7 / 8), 0, -math.sqrt(7 / 8)], rel=1e-12)
    as_zero = batch_whitened_advantages(tensor(1, 0, 0), lengths, eps=0.0)
    assert as_zero[0] > 2 * got[0]


@pytest.mark.parametrize("groups", [None, torch.zeros(3, dtype=torch.long)])
def test_no_spread_is_exactly_zero(groups):
    for rewards in (torch.full((3,), 0.45), tensor(0, 0, 0), tensor(0.3, 0.1 + 0.2, 0.3)):
        assert batch_whitened_advantages(rewards, torch.tensor([1, 7, 2]), group_index=groups, eps=0.0).tolist() == [0] * 3
    empty = batch_whitened_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.long))
    assert empty.shape == (0,)
    nobody = batch_whitened_advantages(tensor(1, 0), torch.tensor([3, 3]), valid=torch.zeros(2))
    assert nobody.tolist() == [0, 0]


samples = st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 9), st.integers(0, 2), st.booleans()), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(samples, st.booleans(), st.randoms(use_true_random=False))
def test_mean_zero_deviation_one_and_order_free(rows, baseline, random):
    def run(rows):
        rewards, lengths, groups, valid = (torch.tensor(column) for column in zip(*rows, strict=True))
        index = groups if baseline else None
        return batch_whitened_advantages(rewards.double(), lengths, group_index=index, valid=valid), lengths.double()

    got, weight = run(rows)
    shuffled = list(range(len(rows)))
    random.shuffle(shuffled)
    again, _ = run([rows[i] for i in shuffled])
    torch.testing.assert_close(again, got[torch.tensor(shuffled)], rtol=1e-9, atol=1e-9)
    assert got.isfinite().all()
    if got.abs().max() > 1e-2:
        used = got != 0
        assert (weight * got).sum().abs() <= 1e-6 * (weight * got.abs()).sum() + 1e-9
        assert (weight * got**2)[used].sum() <= weight.sum()


def test_mistakes_are_refused():
    with pytest.raises(ValueError, match="not a zero reward"):
        batch_whitened_advantages(tensor(1, math.nan), torch.tensor([1, 1]))
    with pytest.raises(ValueError, match="lengths"):
        batch_whitened_advantages(tensor(1, 0), torch.tensor([1, -1]))
    with pytest.raises(ValueError, match="lengths"):
        batch_whitened_advantages(tensor(1, 0), torch.tensor([1]))
