"""One packed row as tensors: several sequences one after another, and their response tokens on a grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from akl_dist.contract.packing import pack_row


@dataclass(frozen=True)
class RowTensors:
    """T input tokens, n predicted response tokens, B sequences of at most L response tokens.

    input_ids, position_ids int64 [1, T]; predict_index, targets int64 [n]; sequence_index, token_index int64 [n] place a flat
    token in the [B, L] grid. A dummy has one input token and one target.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    predict_index: torch.Tensor
    targets: torch.Tensor
    sequence_index: torch.Tensor
    token_index: torch.Tensor
    grid_shape: tuple[int, int]

    def grid(self, flat: torch.Tensor, fill: float | bool = 0.0) -> torch.Tensor:
        """Spread a flat [n] tensor over [B, L]; cells past a response's end hold ``fill``. Differentiable."""
        out = torch.full(self.grid_shape, fill, dtype=flat.dtype, device=flat.device)
        return out.index_put((self.sequence_index, self.token_index), flat)

    def flat(self, grid: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`grid`: [B, L] to [n]."""
        return grid[self.sequence_index, self.token_index]


def row_tensors(sequences: Sequence[tuple[np.ndarray, np.ndarray]], device: torch.device | str) -> RowTensors:
    """One row from (prompt ids, response ids) pairs; no sequence gives the dummy."""
    if not sequences:
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        return RowTensors(zero[None], zero[None], zero, zero, zero, zero, (1, 1))
    row = pack_row(sequences)

    def ints(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return RowTensors(
        ints(row.input_ids)[None], ints(row.position_ids)[None], ints(row.predict_index), ints(row.targets),
        ints(row.sequence_index), ints(row.token_index), (len(sequences), max(row.response_lengths)),
    )
