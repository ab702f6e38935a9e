"""Input checks of the objective package: every message says subject, got, expected and remedy.

This package imports nothing but torch and the standard library, so it raises plain `ValueError`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import torch
from torch import Tensor


def require(condition: bool, subject: str, *, got: object, expected: str, remedy: str) -> None:
    """Raise `ValueError` unless `condition` holds."""
    if not condition:
        raise ValueError(f"{subject}: got {got}, expected {expected}; {remedy}")


def require_name(subject: str, name: str, options: Iterable[str]) -> str:
    """Return `name` if it is one of `options`; otherwise raise `ValueError` naming the nearest option."""
    known = sorted(options)
    if name in known:
        return name
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.4)
    remedy = f"did you mean {near[0]!r}?" if near else "use one of the listed names"
    raise ValueError(f"{subject}: got {name!r}, expected one of {', '.join(known) or '(none)'}; {remedy}")


def require_shape(subject: str, tensor: Tensor, shape: torch.Size) -> None:
    """Raise `ValueError` unless `tensor` has exactly `shape`: silent broadcasting hides layout mistakes."""
    require(
        tensor.shape == shape,
        subject,
        got=f"shape {tuple(tensor.shape)}",
        expected=f"shape {tuple(shape)}",
        remedy="pass per-token tensors of one layout, padded [B, T] or packed [n]",
    )


def require_rows(subject: str, tensor: Tensor) -> None:
    """Raise `ValueError` unless `tensor` is [B, T], one whole sequence a row: [n] would run across sequences."""
    require(
        tensor.dim() == 2,
        subject,
        got=f"shape {tuple(tensor.shape)}",
        expected="[B, T], one sequence a row",
        remedy="spread packed tokens over a grid of sequences first",
    )
