"""The responses of a group as the policy's loss needs them, and the tensors of one micro-batch. Pure.

Which rank runs what is decided before, by `zero3.planning`; packing needs the arrays and happens on the rank that owns them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from akl_dist.contract.records import CriticArrays, ReferenceArrays, RoleArrays, RolloutArrays, TrainingGroup
from akl_dist.objective import TopkReference
from akl_dist.zero3.planning import SampleKey
from akl_dist.zero3.rows import RowTensors, row_tensors


@dataclass(frozen=True)
class Sample:
    """One response with everything the loss needs. Per-token arrays have the response's length n.

    ref_rows are the arrays of :attr:`ReferenceArrays.rows`, by name. advantage is one number for all tokens, or [n] (from a
    critic). A sample with ``trains`` False counts nowhere; of one that trains the tokens in ``token_mask`` count (None: all).
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    rollout_logp: np.ndarray
    ref_logp: np.ndarray
    ref_rows: Mapping[str, np.ndarray]
    answer_mask: np.ndarray
    advantage: float | np.ndarray
    trains: bool
    token_mask: np.ndarray | None = None

    def __post_init__(self) -> None:
        n = len(self.response_ids)
        for name in ("rollout_logp", "ref_logp", "answer_mask"):
            if getattr(self, name).shape != (n,):
                raise ValueError(f"{name} has shape {getattr(self, name).shape}, expected ({n},)")
        for name, array in self.ref_rows.items():
            if len(array) != n:
                raise ValueError(f"reference's {name} has {len(array)} rows, expected {n}")
        if self.token_mask is not None and self.token_mask.shape != (n,):
            raise ValueError(f"token_mask has shape {self.token_mask.shape}, expected ({n},)")
        if np.shape(self.advantage) not in ((), (n,)):
            raise ValueError(f"advantage has shape {np.shape(self.advantage)}, expected one number or ({n},)")

    @property
    def token_advantages(self) -> np.ndarray:
        """float32 [n]."""
        return np.broadcast_to(np.float32(self.advantage), len(self.response_ids))

    @property
    def mask(self) -> np.ndarray:
        """bool [n]: tokens that count in the loss."""
        if self.trains and self.token_mask is not None:
            return self.token_mask
        return np.full(len(self.response_ids), self.trains)


def samples_of(
    group: TrainingGroup, rollout: RolloutArrays, reference: ReferenceArrays, roles: RoleArrays,
    critic: CriticArrays | None = None,
) -> list[Sample]:
    """Cut a group's flat arrays into its responses. With a critic each token has its own advantage, whitened here."""
    lengths = group.labelled.rollout.response_lengths
    n = sum(lengths)
    for name, array in (("token_ids", rollout.token_ids), ("ref logp", reference.logp), ("answer_mask", roles.answer_mask)):
        if array.shape != (n,):
            raise ValueError(f"prompt {group.labelled.rollout.prompt.prompt_id}: {name} has shape {array.shape}, expected ({n},)")
    advantages: Sequence[float | np.ndarray] = group.advantages
    if critic is not None:
        if critic.advantages.shape != (n,):
            raise ValueError(f"prompt {group.labelled.rollout.prompt.prompt_id}: advantages have shape {critic.advantages.shape}, "
                             f"expected ({n},)")
        whitened = (critic.advantages.astype(np.float64) - group.advantage_mean) / group.advantage_deviation
        advantages = np.split(whitened.astype(np.float32), np.cumsum(lengths)[:-1])
    prompt_ids = np.asarray(group.labelled.rollout.prompt.token_ids, np.int64)
    ends = np.cumsum(lengths)
    mask = group.labelled.rollout.trained_mask() if group.labelled.rollout.turns else None
    samples = []
    for start, end, advantage, trains in zip(ends - lengths, ends, advantages, group.trains, strict=True):
        cut = slice(int(start), int(end))
        rows = {name: array[cut] for name, array in reference.rows.items()}
        samples.append(Sample(prompt_ids, rollout.token_ids[cut], rollout.logp[cut], reference.logp[cut], rows,
                              roles.answer_mask[cut], advantage, bool(trains), None if mask is None else mask[cut]))
    return samples


# --- tensors -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MicroBatch(RowTensors):
    """A packed row (see :class:`~akl_dist.zero3.rows.RowTensors`) with what the policy's loss needs.

    rollout_logp, ref_logp, advantages float32 [n]; ref_hidden [n, H] or None, ref_topk of n states or None (what the estimators
    ``full`` and ``topk`` need); answer_mask, mask bool [n]. A dummy has an all-False mask.
    """

    keys: tuple[SampleKey, ...]
    rollout_logp: torch.Tensor
    ref_logp: torch.Tensor
    ref_hidden: torch.Tensor | None
    ref_topk: TopkReference | None
    answer_mask: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor


def pack(keys: Sequence[SampleKey], samples: Sequence[Sample], *, device: torch.device | str = "cpu") -> MicroBatch:
    """One micro-batch from the samples of one row; no samples give the dummy.

    Raises:
        ValueError: samples that carry different arrays of the reference, or keys and samples that do not align.
    """
    if len(keys) != len(samples):
        raise ValueError(f"{len(keys)} keys for {len(samples)} samples")
    row = row_tensors([(sample.prompt_ids, sample.response_ids) for sample in samples], device)
    if not samples:
        real, false = torch.zeros(1, device=device), torch.zeros(1, dtype=torch.bool, device=device)
        return MicroBatch(**vars(row), keys=(), rollout_logp=real, ref_logp=real, ref_hidden=None, ref_topk=None,
                          answer_mask=false, mask=false, advantages=real)
    carried = {tuple(sorted(sample.ref_rows)) for sample in samples}
    if len(carried) > 1:
        raise ValueError(f"samples of one micro-batch carry different arrays of the reference: {sorted(carried)}")

    def floats(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(s, name) for s in samples]).astype(np.float32)).to(device)

    def flags(arrays: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(arrays).astype(bool)).to(device)

    rows = {name: _tensor(np.concatenate([s.ref_rows[name] for s in samples])).to(device) for name in samples[0].ref_rows}
    return MicroBatch(
        **vars(row), keys=tuple(keys), rollout_logp=floats("rollout_logp"), ref_logp=floats("ref_logp"),
        ref_hidden=rows.get("hidden"),
        ref_topk=TopkReference(rows["topk_ids"], rows["topk_logp"], rows["topk_rest"], floats("ref_logp"))
        if "topk_ids" in rows else None,
        answer_mask=flags([s.answer_mask for s in samples]),
        mask=flags([s.mask for s in samples]),
        advantages=floats("token_advantages"),
    )


def _tensor(array: np.ndarray) -> torch.Tensor:
    """uint16 holds the bits of bfloat16."""
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if array.dtype == np.uint16 else torch.from_numpy(array)
