"""Selection at unmasked positions. Masked positions may hold NaN, so nothing here ever multiplies by a mask."""

from __future__ import annotations

import torch
from torch import Tensor


def as_bool(mask: Tensor) -> Tensor:
    """Mask of any dtype (bool, integer or float; non-zero = counts) as bool, same shape."""
    return mask if mask.dtype == torch.bool else mask != 0


def select(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where `mask`, exact zeros elsewhere (same shape); the gradient at masked positions is exactly 0.

    `0 * NaN` is NaN, in the value and in the gradient; `where` on the *input* of a formula keeps both clean.
    """
    return torch.where(as_bool(mask), values, torch.zeros((), dtype=values.dtype, device=values.device))


def at_least_float32(values: Tensor) -> Tensor:
    """Half-precision and integer tensors as float32; float32 and float64 unchanged."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()
