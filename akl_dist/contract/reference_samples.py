"""Records of responses that were drawn from the frozen reference, for terms that need the reference's own draws (CoKL)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from akl_dist.contract.records import Handle


@dataclass(frozen=True)
class ReferenceSampleArrays:
    """token_ids int32 [n], the responses one after another; seq_logp float64 [k], log-prob of each whole response under the
    reference, in nats."""

    token_ids: np.ndarray
    seq_logp: np.ndarray


@dataclass(frozen=True)
class ReferenceSamples:
    """The verified-correct ones (k, possibly none) of ``drawn`` responses of the reference to one prompt."""

    prompt_id: str
    prompt_ids: tuple[int, ...]
    response_lengths: tuple[int, ...]
    drawn: int
    arrays: Handle  # -> ReferenceSampleArrays
