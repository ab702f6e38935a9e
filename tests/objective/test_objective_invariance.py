"""The step's loss and gradient do not depend on masked content, order, micro-batch cut, padding or packing."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from akl_dist.objective import (
    AGGREGATIONS,
    aggregate,
    aggregation_weights,
    akl_full_loss,
    akl_loss,
    policy_loss,
    weighted_sum,
)

NORM = 16.0
FIELDS = ("logp", "old", "ref", "behaviour", "advantages", "forward", "reverse")


class Batch(NamedTuple):
    """Per-token tensors [B, T], or [n] with the sequence of each token."""

    values: dict[str, torch.Tensor]
    mask: torch.Tensor
    answer: torch.Tensor


def make(seed: int, rows: int, width: int) -> Batch:
    """Random rows with random interior masks; row 0 is fully masked, row 1 has an unmasked token."""
    generator = torch.Generator().manual_seed(seed)
    values = {name: torch.randn(rows, width, generator=generator, dtype=torch.float64) for name in FIELDS}
    mask = torch.rand(rows, width, generator=generator) < 0.7
    mask[0] = False
    mask[1, 0] = True
    return Batch(values, mask, torch.rand(rows, width, generator=generator) < 0.4)


def per_token(values, mask, answer, state_weight, segment_ids=None) -> torch.Tensor:
    """Policy loss plus a sampled and an exact AKL term, so that every per-token path is covered."""
    roles = {"answer_mask": answer, "mask": mask, "beta_reasoning": 0.3, "beta_answer": 0.6}
    state = {"state_weight": state_weight, "max_weight": 5.0, "segment_ids": segment_ids}
    logps = {"logp": values["logp"], "behaviour_logp": values["behaviour"]}
    return (
        policy_loss("ppo", logp=values["logp"], anchor_logp=values["old"], advantages=values["advantages"], mask=mask)
        + akl_loss(ref_logp=values["ref"], **logps, **roles, **state)
        + akl_full_loss(kl_forward=values["forward"], kl_reverse=values["reverse"], **logps, **roles, **state)
    )


def leaves(values) -> dict[str, torch.Tensor]:
    differentiable = ("logp", "forward", "reverse")
    return {name: value.clone().requires_grad_(name in differentiable) for name, value in values.items()}


def totals(batch: Batch) -> dict[str, float]:
    return {
        "total_tokens": int(batch.mask.sum()),
        "total_sequences": int(batch.mask.any(-1).sum()),
        "norm": NORM,
    }


def step(batch: Batch, mode: str, state_weight: str, sizes: list[int] | None = None, count: dict | None = None):
    """Loss and gradients [B, T] of a step, its rows cut into micro-batches of the given sizes."""
    values = leaves(batch.values)
    loss, start = 0.0, 0
    for size in sizes or [len(batch.mask)]:
        part = slice(start, start + size)
        start += size
        tokens = per_token(
            {name: value[part] for name, value in values.items()}, batch.mask[part], batch.answer[part], state_weight
        )
        share = aggregate(tokens, batch.mask[part], mode, **(count or totals(batch)))
        share.backward()
        loss += share.item()
    return loss, {name: values[name].grad for name in ("logp", "forward", "reverse")}


def assert_same(got, expected, position=lambda gradient: gradient) -> None:
    assert math.isclose(got[0], expected[0], rel_tol=1e-12, abs_tol=1e-12)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(got[1][name], position(gradient), rtol=1e-10, atol=1e-13)


batches = st.builds(make, st.integers(0, 10**6), st.integers(2, 6), st.integers(1, 7))
modes, weights = st.sampled_from(AGGREGATIONS), st.sampled_from(["token", "cumulative"])
SETTINGS = settings(max_examples=40, deadline=None)


@SETTINGS
@given(batches, modes, weights, st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_masked_content(batch, mode, state_weight, garbage):
    filled = {name: torch.where(batch.mask, value, torch.full_like(value, garbage)) for name, value in batch.values.items()}
    changed = Batch(filled, batch.mask, batch.answer | ~batch.mask)
    assert_same(step(changed, mode, state_weight), step(batch, mode, state_weight))


@SETTINGS
@given(batches, modes, weights, st.randoms(use_true_random=False))
def test_order_of_rows(batch, mode, state_weight, random):
    order = torch.tensor(random.sample(range(len(batch.mask)), len(batch.mask)))
    shuffled = Batch({name: value[order] for name, value in batch.values.items()}, batch.mask[order], batch.answer[order])
    assert_same(step(shuffled, mode, state_weight), step(batch, mode, state_weight), lambda gradient: gradient[order])


@SETTINGS
@given(batches, modes, weights, st.data())
def test_micro_batch_cut(batch, mode, state_weight, data):
    rows, sizes = len(batch.mask), []
    while sum(sizes) < rows:
        sizes.append(data.draw(st.integers(1, rows - sum(sizes))))
    assert_same(step(batch, mode, state_weight, sizes), step(batch, mode, state_weight))


@SETTINGS
@given(batches, modes, weights, st.integers(0, 3), st.integers(0, 3), st.integers(0, 2))
def test_padding(batch, mode, state_weight, left, right, empty_rows):
    def pad(tensor, fill):
        return torch.nn.functional.pad(tensor, (left, right, 0, empty_rows), value=fill)

    padded = Batch({name: pad(value, math.nan) for name, value in batch.values.items()}, pad(batch.mask, 0), pad(batch.answer, 0))
    assert_same(step(padded, mode, state_weight), step(batch, mode, state_weight), lambda gradient: pad(gradient, 0))


@SETTINGS
@given(batches, modes, weights, st.randoms(use_true_random=False))
def test_packed_equals_padded(batch, mode, state_weight, random):
    """Sequences one after another in any order, without the padding: sum(values * weight)."""
    expected = step(batch, mode, state_weight)
    order = random.sample(range(len(batch.mask)), len(batch.mask))
    ends = [int(row.nonzero().max()) + 1 if row.any() else 0 for row in batch.mask]

    def pack(tensor):
        return torch.cat([tensor[row, : ends[row]] for row in order])

    values = leaves({name: pack(value) for name, value in batch.values.items()})
    mask = pack(batch.mask)
    ids = pack(torch.arange(len(batch.mask)).unsqueeze(-1).expand_as(batch.mask))
    tokens = per_token(values, mask, pack(batch.answer), state_weight, ids)
    lengths = pack(batch.mask.sum(-1, keepdim=True).double().expand(batch.mask.shape))
    loss = weighted_sum(tokens, mask, aggregation_weights(mode, sequence_lengths=lengths, **totals(batch)))
    loss.backward()
    got = loss.item(), {name: values[name].grad for name in expected[1]}
    assert_same(got, expected, pack)


def test_a_local_denominator_breaks_the_micro_batch_cut():
    """Negative control: with each micro-batch's own counts the cut changes the loss."""
    batch = make(0, 5, 6)
    local = {"norm": NORM}
    whole, cut = step(batch, "token_mean", "token"), step(batch, "token_mean", "token", [2, 3], local)
    assert abs(cut[0] - whole[0]) > 1e-3


def test_packing_without_segments_would_run_across_sequences():
    """Negative control: one cumulative product over a packed pair differs from two."""
    batch = make(1, 2, 5)
    batch.mask[:] = True
    flat = {name: value.flatten() for name, value in batch.values.items()}
    ids = torch.arange(2).repeat_interleave(5)
    right = per_token(flat, batch.mask.flatten(), batch.answer.flatten(), "cumulative", ids)
    wrong = per_token(flat, batch.mask.flatten(), batch.answer.flatten(), "cumulative", torch.zeros_like(ids))
    assert torch.equal(right[:5], wrong[:5]) and not torch.allclose(right[5:], wrong[5:])
