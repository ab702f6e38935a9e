"""Aggregation of per-token losses: one global denominator for a whole optimizer step, whatever the batch cut.

Every mode is a weight per token, `aggregation_weights`; an aggregate is the sum of value times weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from akl_dist.objective._checks import require, require_name, require_shape
from akl_dist.objective.masking import as_bool, at_least_float32, select

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm")
Count = int | float | Tensor


def _reciprocal(total: Count, like: Tensor) -> Tensor:
    """1 / total as a 0-d tensor; 0 for an empty batch, so that its loss is 0 and not NaN."""
    count = torch.as_tensor(total, dtype=like.dtype, device=like.device)
    return torch.where(count > 0, 1 / count.clamp(min=torch.finfo(like.dtype).tiny), torch.zeros_like(count))


def aggregation_weights(
    mode: str,
    *,
    sequence_lengths: Tensor,
    total_tokens: Count | None = None,
    total_sequences: Count | None = None,
    norm: float | None = None,
) -> Tensor:
    """Weight of each token in the step's loss: `loss = sum over ranks and micro-batches of sum(values * weight)`.

    * token_mean: 1 / total_tokens
    * seq_mean_token_mean: 1 / (own sequence's token count * total_sequences)
    * seq_mean_token_sum_norm: 1 / (total_sequences * norm)

    Args:
        sequence_lengths: per token, the number of unmasked tokens of the sequence it belongs to, counted over the
            whole sequence; any layout, packed [n] or padded [B, T].
        total_tokens: unmasked tokens of the whole optimizer step, all ranks and micro-batches (token_mean).
        total_sequences: sequences of the whole step with at least one unmasked token (both sequence modes).
        norm: tokens that a sequence sum is divided by (seq_mean_token_sum_norm; Dr.GRPO-style constant).

    Returns: tensor of the shape of `sequence_lengths`, float32 (float64 if they are); zeros for an empty step.
        Masked positions get a weight too: select, as `weighted_sum` does.
    Raises: `ValueError` on an unknown mode or where the count that the mode needs is missing.
    """
    require_name("aggregation", mode, AGGREGATIONS)
    lengths = at_least_float32(sequence_lengths)
    if mode == "token_mean":
        return _reciprocal(_given(total_tokens, mode, "total_tokens"), lengths).expand_as(lengths)
    per_sequence = _reciprocal(_given(total_sequences, mode, "total_sequences"), lengths)
    if mode == "seq_mean_token_mean":
        return per_sequence / lengths.clamp(min=1)
    constant = _given(norm, mode, "norm")
    require(bool(constant > 0), "aggregation norm", got=constant, expected="a positive token count", remedy="e.g. 8192")
    return (per_sequence / constant).expand_as(lengths)


def _given(value: Count | None, mode: str, name: str) -> Count:
    if value is None:
        raise ValueError(f"aggregation {mode!r}: got {name}=None, expected a number; pass {name} for the whole step")
    return value


def weighted_sum(values: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """Sum of value times weight over unmasked tokens: a scalar. Masked values may hold NaN and get gradient 0."""
    require_shape("mask", mask, values.shape)
    require_shape("weights", weights, values.shape)
    values = at_least_float32(values)
    return (select(values, mask) * select(weights.to(values.dtype), mask)).sum()


def aggregate(
    values: Tensor,
    mask: Tensor,
    mode: str,
    *,
    total_tokens: Count | None = None,
    total_sequences: Count | None = None,
    norm: float | None = None,
) -> Tensor:
    """Aggregate per-token values [B, T], one whole sequence a row, to a scalar. See `aggregation_weights`.

    Args:
        values: per-token losses; masked entries may hold NaN.
        mask: [B, T], bool or float. A fully masked row counts nowhere; a fully masked batch gives 0.
        mode: one of `AGGREGATIONS`.
        total_tokens, total_sequences: counts of the whole optimizer step. None: the counts of this batch, right
            only where this batch is the whole step. A micro-batch gives its share of the step's loss (shares add up).
        norm: needed by seq_mean_token_sum_norm.
    """
    require(
        values.dim() == 2,
        "aggregate values",
        got=f"shape {tuple(values.shape)}",
        expected="[B, T]",
        remedy="for packed [n] values use weighted_sum with aggregation_weights",
    )
    require_shape("mask", mask, values.shape)
    lengths = as_bool(mask).sum(-1, keepdim=True)
    weights = aggregation_weights(
        mode,
        sequence_lengths=lengths.to(at_least_float32(values).dtype).expand_as(values),
        total_tokens=lengths.sum() if total_tokens is None else total_tokens,
        total_sequences=(lengths > 0).sum() if total_sequences is None else total_sequences,
        norm=norm,
    )
    return weighted_sum(values, mask, weights)
