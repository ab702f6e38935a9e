"""Which rank runs which responses in which micro-batch of which update. Pure: needs lengths only.

Planning happens once, on the driver; the denominators of a loss are therefore global constants, known before the first
forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from akl_dist.contract.packing import deal, first_fit_decreasing, row_tokens
from akl_dist.contract.records import TrainingGroup

SampleKey = tuple[int, int]
"""(index of the group in the step's batch, index of the response in its group)."""


@dataclass(frozen=True)
class GroupLengths:
    """A group as the planner sees it: lengths in tokens; ``trains`` and ``answer_tokens`` per response. ``trained_tokens``: those
    of each response that count in the loss; None where all do."""

    prompt_tokens: int
    response_tokens: tuple[int, ...]
    answer_tokens: tuple[int, ...]
    trains: tuple[bool, ...]
    trained_tokens: tuple[int, ...] | None = None

    @property
    def counted_tokens(self) -> tuple[int, ...]:
        return self.response_tokens if self.trained_tokens is None else self.trained_tokens


def lengths_of(group: TrainingGroup) -> GroupLengths:
    rollout = group.labelled.rollout
    return GroupLengths(len(rollout.prompt.token_ids), rollout.response_lengths, group.labelled.answer_tokens, group.trains,
                        rollout.trained_lengths)


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
        tokens=sum(groups[g].counted_tokens[s] for g, s in trained), sequences=len(trained),
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
