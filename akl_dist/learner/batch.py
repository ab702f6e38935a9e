"""From groups to micro-batches: what each rank runs in each update, and the tensors of one micro-batch. Pure.

Planning needs lengths only and happens once on the driver; the denominators of the loss are therefore global constants,
known before the first forward pass. Packing needs the arrays and happens on the rank that owns them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from akl_dist.contract.packing import deal, first_fit_decreasing, pack_row, row_tokens
from akl_dist.contract.records import ReferenceArrays, RoleArrays, RolloutArrays, TrainingGroup

SampleKey = tuple[int, int]
"""(index of the group in the step's batch, index of the response in its group)."""


@dataclass(frozen=True)
class Sample:
    """One response with everything the loss needs. Per-token arrays have the response's length n.

    ref_logprobs is [n, V] where the KL is exact over the vocabulary, else None. A sample with ``trains`` False counts nowhere.
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    rollout_logp: np.ndarray
    ref_logp: np.ndarray
    ref_logprobs: np.ndarray | None
    answer_mask: np.ndarray
    advantage: float
    trains: bool

    def __post_init__(self) -> None:
        n = len(self.response_ids)
        for name in ("rollout_logp", "ref_logp", "answer_mask"):
            if getattr(self, name).shape != (n,):
                raise ValueError(f"{name} has shape {getattr(self, name).shape}, expected ({n},)")
        if self.ref_logprobs is not None and self.ref_logprobs.shape[0] != n:
            raise ValueError(f"ref_logprobs has {self.ref_logprobs.shape[0]} rows, expected {n}")


def samples_of(group: TrainingGroup, rollout: RolloutArrays, reference: ReferenceArrays, roles: RoleArrays) -> list[Sample]:
    """Cut a group's flat arrays into its responses."""
    lengths = group.labelled.rollout.response_lengths
    n = sum(lengths)
    for name, array in (("token_ids", rollout.token_ids), ("ref logp", reference.logp), ("answer_mask", roles.answer_mask)):
        if array.shape != (n,):
            raise ValueError(f"prompt {group.labelled.rollout.prompt.prompt_id}: {name} has shape {array.shape}, expected ({n},)")
    prompt_ids = np.asarray(group.labelled.rollout.prompt.token_ids, np.int64)
    ends = np.cumsum(lengths)
    samples = []
    for start, end, advantage, trains in zip(ends - lengths, ends, group.advantages, group.trains, strict=True):
        cut = slice(int(start), int(end))
        full = None if reference.logprobs is None else reference.logprobs[cut]
        samples.append(Sample(prompt_ids, rollout.token_ids[cut], rollout.logp[cut], reference.logp[cut], full,
                              roles.answer_mask[cut], float(advantage), bool(trains)))
    return samples


# --- planning ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupLengths:
    """A group as the planner sees it: lengths in tokens; ``trains`` and ``answer_tokens`` per response."""

    prompt_tokens: int
    response_tokens: tuple[int, ...]
    answer_tokens: tuple[int, ...]
    trains: tuple[bool, ...]


def lengths_of(group: TrainingGroup) -> GroupLengths:
    rollout = group.labelled.rollout
    return GroupLengths(len(rollout.prompt.token_ids), rollout.response_lengths, group.labelled.answer_tokens, group.trains)


@dataclass(frozen=True)
class Totals:
    """Global counts of one update over all ranks: the denominators. Only samples that train are counted."""

    tokens: int
    sequences: int
    answer_tokens: int

    @property
    def reasoning_tokens(self) -> int:
        return self.tokens - self.answer_tokens


@dataclass(frozen=True)
class RankUpdate:
    """One rank's part of one update. Every rank has the same number of micro-batches; an empty tuple is a dummy one."""

    totals: Totals
    micro_batches: tuple[tuple[SampleKey, ...], ...]
    padding_fraction: float


@dataclass(frozen=True)
class UpdatePlan:
    """One update over all ranks. ``groups[r]`` are the groups rank r needs; ``padding_fraction`` is the share of input
    tokens that only fill up dummy micro-batches."""

    totals: Totals
    groups: tuple[tuple[int, ...], ...]
    micro_batches: tuple[tuple[tuple[SampleKey, ...], ...], ...]  # [rank][micro-batch]
    padding_fraction: float

    def for_rank(self, rank: int) -> RankUpdate:
        return RankUpdate(self.totals, self.micro_batches[rank], self.padding_fraction)


DUMMY_TOKENS = 1
"""Input tokens of a dummy micro-batch."""


def plan_updates(
    groups: Sequence[GroupLengths], *, num_ranks: int, updates_per_step: int, max_tokens_per_micro_batch: int
) -> list[UpdatePlan]:
    """Split the prompts, in order, into updates; deal each update's groups to ranks; pack each rank's sequences.

    Whole groups are dealt by their token count (longest first), sequences are packed first-fit decreasing. Deterministic,
    and independent of the arrays' contents.

    Raises:
        UserError: one sequence is longer than a micro-batch may be.
    """
    if updates_per_step < 1:
        raise ValueError(f"updates_per_step is {updates_per_step}, expected at least 1")
    parts = np.array_split(np.arange(len(groups)), updates_per_step)
    return [_plan_update(groups, [int(i) for i in part], num_ranks, max_tokens_per_micro_batch) for part in parts]


def _plan_update(groups: Sequence[GroupLengths], members: list[int], num_ranks: int, capacity: int) -> UpdatePlan:
    keys = {g: [(g, s) for s, trains in enumerate(groups[g].trains) if trains] for g in members}
    trained = [key for g in members for key in keys[g]]
    totals = Totals(
        tokens=sum(groups[g].response_tokens[s] for g, s in trained), sequences=len(trained),
        answer_tokens=sum(groups[g].answer_tokens[s] for g, s in trained),
    )
    size = {(g, s): row_tokens(groups[g].prompt_tokens, groups[g].response_tokens[s]) for g, s in trained}
    used = [g for g in members if keys[g]]
    hands = deal([sum(size[key] for key in keys[g]) for g in used], num_ranks)
    rank_groups = [tuple(used[i] for i in hand) for hand in hands]
    rows = []
    for mine in rank_groups:
        own = [key for g in mine for key in keys[g]]
        rows.append([tuple(own[i] for i in bin_) for bin_ in first_fit_decreasing([size[key] for key in own], capacity)])
    count = max((len(row) for row in rows), default=0)
    dummies = sum(count - len(row) for row in rows) * DUMMY_TOKENS
    real = sum(size.values())
    return UpdatePlan(
        totals, tuple(rank_groups), tuple(tuple(row) + ((),) * (count - len(row)) for row in rows),
        padding_fraction=dummies / (dummies + real) if dummies + real else 0.0,
    )


# --- tensors -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one packed row: T input tokens, n predicted response tokens, B sequences of at most L response tokens.

    input_ids, position_ids [1, T]; predict_index, targets [n]; sequence_index, token_index [n] place a flat token in the
    [B, L] grid. rollout_logp, ref_logp float32 [n]; ref_logprobs float32 [n, V] or None; answer_mask, mask bool [n];
    advantages float32 [B]. A dummy has one input token, one target and an all-False mask.
    """

    keys: tuple[SampleKey, ...]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    predict_index: torch.Tensor
    targets: torch.Tensor
    sequence_index: torch.Tensor
    token_index: torch.Tensor
    grid_shape: tuple[int, int]
    rollout_logp: torch.Tensor
    ref_logp: torch.Tensor
    ref_logprobs: torch.Tensor | None
    answer_mask: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor

    def grid(self, flat: torch.Tensor, fill: float | bool = 0.0) -> torch.Tensor:
        """Spread a flat [n] tensor over [B, L]; cells past a response's end hold ``fill``. Differentiable."""
        out = torch.full(self.grid_shape, fill, dtype=flat.dtype, device=flat.device)
        return out.index_put((self.sequence_index, self.token_index), flat)


def pack(keys: Sequence[SampleKey], samples: Sequence[Sample], *, device: torch.device | str = "cpu") -> MicroBatch:
    """One micro-batch from the samples of one row; no samples give the dummy.

    Raises:
        ValueError: some samples carry full reference log-probs and some do not, or keys and samples do not align.
    """
    if len(keys) != len(samples):
        raise ValueError(f"{len(keys)} keys for {len(samples)} samples")
    if not samples:
        return _dummy(device)
    has_full = {sample.ref_logprobs is not None for sample in samples}
    if len(has_full) > 1:
        raise ValueError("some samples of a micro-batch have full reference log-probs and some have none")
    row = pack_row([(sample.prompt_ids, sample.response_ids) for sample in samples])

    def floats(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(s, name) for s in samples]).astype(np.float32)).to(device)

    def ints(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    def flags(arrays: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(arrays).astype(bool)).to(device)

    return MicroBatch(
        keys=tuple(keys), input_ids=ints(row.input_ids)[None], position_ids=ints(row.position_ids)[None],
        predict_index=ints(row.predict_index), targets=ints(row.targets), sequence_index=ints(row.sequence_index),
        token_index=ints(row.token_index), grid_shape=(len(samples), max(row.response_lengths)),
        rollout_logp=floats("rollout_logp"), ref_logp=floats("ref_logp"),
        ref_logprobs=floats("ref_logprobs") if has_full == {True} else None,
        answer_mask=flags([s.answer_mask for s in samples]),
        mask=flags([np.full(len(s.response_ids), s.trains) for s in samples]),
        advantages=torch.tensor([s.advantage for s in samples], dtype=torch.float32, device=device),
    )


def _dummy(device: torch.device | str) -> MicroBatch:
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    real, false = torch.zeros(1, device=device), torch.zeros(1, dtype=torch.bool, device=device)
    return MicroBatch((), zero[None], zero[None], zero, zero, zero, zero, (1, 1), real, real, None, false, false, real)
