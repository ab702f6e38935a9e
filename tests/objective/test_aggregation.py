"""Aggregation modes: weights by hand, degenerate batches, global denominators, mistakes."""

from __future__ import annotations

import math

import pytest
import torch

from akl_dist.objective import AGGREGATIONS, aggregate, aggregation_weights, weighted_sum


def test_weights_by_hand():
    """Two sequences of 3 and 1 tokens, packed; the whole step has 10 tokens in 4 sequences."""
    lengths = torch.tensor([3.0, 3, 3, 1], dtype=torch.float64)
    totals = {"total_tokens": 10, "total_sequences": 4, "norm": 5}
    expected = {
        "token_mean": [0.1] * 4,
        "seq_mean_token_mean": [1 / 12] * 3 + [1 / 4],
        "seq_mean_token_sum_norm": [1 / 20] * 4,
    }
    for mode in AGGREGATIONS:
        got = aggregation_weights(mode, sequence_lengths=lengths, **totals)
        assert got.tolist() == pytest.approx(expected[mode], rel=1e-12)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_fully_masked_batch_and_row(mode):
    values = torch.tensor([[1.0, 3.0], [math.nan, math.nan]], requires_grad=True)
    one_row = aggregate(values, torch.tensor([[1, 1], [0, 0]]), mode, norm=2)
    assert one_row.item() == pytest.approx(2.0)
    nothing = aggregate(values, torch.zeros(2, 2), mode, norm=2)
    nothing.backward()
    assert nothing.item() == 0.0 and values.grad.tolist() == [[0, 0], [0, 0]]
    assert aggregate(torch.zeros(0, 2), torch.zeros(0, 2), mode, norm=2).item() == 0.0


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_masked_nan_does_not_leak(mode):
    values = torch.tensor([[1.0, math.nan]], requires_grad=True)
    loss = aggregate(values, torch.tensor([[True, False]]), mode, norm=1)
    loss.backward()
    assert loss.item() == 1.0 and values.grad.tolist() == [[1.0, 0.0]]


def test_mean_of_micro_batch_means_is_the_known_bug():
    """Rows of 3 ones and 1 nine: token mean 3; the mean of the rows' own means is 5, shares of the step add to 3."""
    values, mask = torch.tensor([[1.0, 1, 1], [9, 9, 9]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    whole = aggregate(values, mask, "token_mean")
    wrong = sum(aggregate(values[i : i + 1], mask[i : i + 1], "token_mean") for i in range(2)) / 2
    right = sum(aggregate(values[i : i + 1], mask[i : i + 1], "token_mean", total_tokens=4) for i in range(2))
    assert (whole.item(), wrong.item(), right.item()) == (3.0, 5.0, 3.0)


def test_mistakes_are_refused():
    values = torch.ones(1, 2)
    with pytest.raises(ValueError, match="did you mean 'token_mean'"):
        aggregate(values, values, "token-mean")
    with pytest.raises(ValueError, match="norm=None"):
        aggregate(values, values, "seq_mean_token_sum_norm")
    with pytest.raises(ValueError, match="weighted_sum"):
        aggregate(values[0], values[0], "token_mean")
    with pytest.raises(ValueError, match="total_tokens=None"):
        aggregation_weights("token_mean", sequence_lengths=values)
    with pytest.raises(ValueError, match="shape"):
        weighted_sum(values, values, torch.ones(2))
