"""Rollout correction at hand-made numbers, its edges, and what each kind and level does to a row."""

from __future__ import annotations

import math

import pytest
import torch

from akl_dist.objective import CORRECTION_LEVELS, CORRECTIONS, rollout_correction


def ratios(*rows: list[float | None]) -> dict[str, torch.Tensor]:
    """old and rollout log-probs with the given ratios old/mu; None = masked, holding NaN."""
    values = torch.tensor([[math.nan if w is None else math.log(w) for w in row] for row in rows], dtype=torch.float64)
    mask = torch.tensor([[w is not None for w in row] for row in rows])
    return {"old_logp": values - 1, "rollout_logp": torch.where(mask, -1.0, math.nan).double(), "mask": mask}


ROWS = ratios([0.5, 4.0, None, 1.0], [3.0, 2.0, 0.2, None], [None, None, None, None])


def rows_of(tensor: torch.Tensor) -> list[list[float]]:
    return [[round(value, 9) for value in row] for row in tensor.tolist()]


@pytest.mark.parametrize(("kind", "level", "bounds", "weight", "rejected"), [
    ("none", "token", {}, [[1, 1, 0, 1], [1, 1, 1, 0], [0] * 4], []),
    ("tis", "token", {}, [[0.5, 2, 0, 1], [2, 2, 0.2, 0], [0] * 4], []),
    # products 2 and 1.2
    ("tis", "sequence", {"high": 1.5}, [[1.5, 1.5, 0, 1.5], [1.2, 1.2, 1.2, 0], [0] * 4], []),
    ("icepop", "token", {"low": 0.4, "high": 3.5}, [[0.5, 0, 0, 1], [3, 2, 0, 0], [0] * 4], [(0, 1), (1, 2)]),
    ("icepop", "token", {"high": 3.5}, [[0.5, 0, 0, 1], [3, 2, 0.2, 0], [0] * 4], [(0, 1)]),
    ("icepop", "sequence", {"low": 1.5, "high": 2.5}, [[2, 2, 0, 2], [0] * 4, [0] * 4], [(1, 0), (1, 1), (1, 2)]),
    ("mis", "sequence", {"low": 1.5, "high": 2.5}, [[2, 2, 0, 2], [0] * 4, [0] * 4], [(1, 0), (1, 1), (1, 2)]),
    # geometric means 2^(1/3) = 1.26 and 1.2^(1/3) = 1.063: the row stays or goes as a whole, its token weights are kept
    ("mis", "token", {"low": 1.0, "high": 1.2}, [[0] * 4, [3, 2, 0.2, 0], [0] * 4], [(0, 0), (0, 1), (0, 3)]),
])  # fmt: skip
def test_by_hand(kind, level, bounds, weight, rejected):
    got = rollout_correction(kind, level=level, **ROWS, **bounds)
    assert rows_of(got.weight) == [[float(value) for value in row] for row in weight]
    assert [tuple(position) for position in got.rejected.nonzero().tolist()] == rejected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("level", CORRECTION_LEVELS)
@pytest.mark.parametrize("kind", CORRECTIONS)
def test_extremes_are_finite_and_detached(kind, level, dtype):
    old = torch.tensor([[-0.1, -100.0, math.nan], [-30.0] * 3, [math.nan] * 3], dtype=dtype).requires_grad_(True)
    mu = torch.tensor([[-100.0, -0.1, math.nan], [math.log(1e-12)] * 3, [math.nan] * 3], dtype=dtype)
    mask = ~old.isnan()
    got = rollout_correction(kind, old_logp=old, rollout_logp=mu, mask=mask, level=level)
    assert got.weight.isfinite().all() and not got.weight.requires_grad
    assert (got.weight[~mask] == 0).all() and not got.rejected[~mask].any()
    assert got.weight.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
    assert ((got.weight == 0) | ~got.rejected).all()


@pytest.mark.parametrize("kind", CORRECTIONS)
@pytest.mark.parametrize("level", CORRECTION_LEVELS)
def test_agreeing_engines_change_nothing(kind, level):
    logp = -torch.rand(2, 5)
    got = rollout_correction(kind, old_logp=logp, rollout_logp=logp, mask=torch.ones(2, 5), level=level, high=1.0)
    assert (got.weight == 1).all() and not got.rejected.any()


def test_sequence_weights_degenerate_and_token_weights_do_not():
    """Why token TIS is the default: 8192 tokens with an independent error of 0.03 nats spread the product over e^2.7."""
    noise = torch.randn(64, 8192, generator=torch.Generator().manual_seed(0)) * 0.03
    arguments = {"old_logp": noise, "rollout_logp": torch.zeros_like(noise), "mask": torch.ones_like(noise)}

    def share(weight):
        return (weight.sum() ** 2 / (weight.numel() * (weight**2).sum())).item()

    assert share(rollout_correction("tis", level="token", **arguments).weight) > 0.99
    assert share(rollout_correction("tis", level="sequence", high=1e9, **arguments).weight[:, 0]) < 0.3


@pytest.mark.parametrize(("arguments", "message"), [
    ({"kind": "tiss"}, "did you mean 'tis'"),
    ({"kind": "tis", "level": "tokens"}, "did you mean 'token'"),
    ({"kind": "tis", "low": 0.5}, "use icepop to drop small ratios"),
    ({"kind": "icepop", "low": 3.0}, "from 0 to high=2.0"),
    ({"kind": "tis", "high": 0.0}, "a positive number"),
])  # fmt: skip
def test_mistakes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        rollout_correction(arguments.pop("kind"), **ROWS, **arguments)


def test_a_packed_layout_has_no_sequences():
    flat = torch.zeros(3)
    assert rollout_correction("tis", old_logp=flat, rollout_logp=flat, mask=torch.ones(3)).weight.tolist() == [1, 1, 1]
    for kind, level in (("tis", "sequence"), ("mis", "token")):
        with pytest.raises(ValueError, match="one sequence a row"):
            rollout_correction(kind, old_logp=flat, rollout_logp=flat, mask=torch.ones(3), level=level)
