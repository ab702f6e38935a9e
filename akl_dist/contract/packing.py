"""Packing and balancing of sequences by length: pure functions shared by the stages that run forward passes.

A *packed row* holds several sequences one after another with position ids that restart at 0. Attention implementations
isolate such sequences from the restarting positions alone, but only when the model is called with ``use_cache=False``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from akl_dist.contract.errors import UserError
from akl_dist.contract.records import RolloutArrays, RolloutGroup


@dataclass(frozen=True)
class PackedRow:
    """One row for one forward pass over ``T`` input tokens that predicts ``n`` response tokens of ``B`` sequences.

    input_ids, position_ids: int64 [T]. The last response token of a sequence is predicted but never an input.
    predict_index: int64 [n], position in the row whose hidden state predicts the token.
    targets: int64 [n], the response tokens, sequence after sequence.
    sequence_index: int64 [n], which of the B sequences a token belongs to.
    token_index: int64 [n], the token's place in its own response, from 0.
    response_lengths: the B lengths.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray
    predict_index: np.ndarray
    targets: np.ndarray
    sequence_index: np.ndarray
    token_index: np.ndarray
    response_lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        n = sum(self.response_lengths)
        if self.input_ids.shape != self.position_ids.shape:
            raise ValueError(f"input ids {self.input_ids.shape} and position ids {self.position_ids.shape} do not align")
        for name in ("predict_index", "targets", "sequence_index", "token_index"):
            if getattr(self, name).shape != (n,):
                raise ValueError(f"{name} has shape {getattr(self, name).shape}, expected ({n},)")


def row_tokens(prompt_tokens: int, response_tokens: int) -> int:
    """Input tokens one sequence occupies in a row: all but the last token of the response."""
    return prompt_tokens + response_tokens - 1


def pack_row(sequences: Sequence[tuple[Sequence[int] | np.ndarray, Sequence[int] | np.ndarray]]) -> PackedRow:
    """Lay (prompt ids, response ids) pairs out one after another.

    Raises:
        ValueError: no sequence, an empty prompt or an empty response.
    """
    if not sequences:
        raise ValueError("a row needs at least one sequence")
    ids, positions, predict, targets, sequence_index, token_index, lengths = [], [], [], [], [], [], []
    start = 0
    for row, (prompt, response) in enumerate(sequences):
        if len(prompt) < 1 or len(response) < 1:
            raise ValueError(f"sequence {row}: {len(prompt)} prompt and {len(response)} response tokens, expected 1 or more")
        width = row_tokens(len(prompt), len(response))
        ids.append(np.concatenate([np.asarray(prompt, np.int64), np.asarray(response, np.int64)])[:-1])
        positions.append(np.arange(width, dtype=np.int64))
        predict.append(start + len(prompt) - 1 + np.arange(len(response), dtype=np.int64))
        targets.append(np.asarray(response, np.int64))
        sequence_index.append(np.full(len(response), row, np.int64))
        token_index.append(np.arange(len(response), dtype=np.int64))
        lengths.append(len(response))
        start += width
    join = np.concatenate
    return PackedRow(join(ids), join(positions), join(predict), join(targets), join(sequence_index), join(token_index),
                     tuple(lengths))


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of ``lengths`` in bins that hold at most ``capacity``, longest first, ties by index (deterministic).

    Bins keep the order in which they were opened, and the indices inside a bin are ascending.

    Raises:
        UserError: one length alone exceeds the capacity.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > capacity:
            raise UserError(
                "learner.max_tokens_per_micro_batch / reference.max_tokens_per_batch", got=f"a sequence of {length} tokens",
                expected=f"at most {capacity} tokens", stage="config",
                remedy="Raise it to at least data.max_prompt_tokens + rollout.max_response_tokens.",
            )
        place = next((b for b, free in enumerate(room) if free >= length), None)
        if place is None:
            bins.append([])
            room.append(capacity)
            place = len(bins) - 1
        bins[place].append(index)
        room[place] -= length
    return [sorted(members) for members in bins]


def deal(weights: Sequence[int], num_hands: int) -> list[list[int]]:
    """Indices of ``weights`` dealt to ``num_hands`` hands so that their sums are close: longest processing time first.

    Deterministic: ties go to the lower index and the lower hand. The largest sum is at most 4/3 of the best possible
    (Graham 1969). Indices inside a hand are ascending; hands may be empty.
    """
    if num_hands < 1:
        raise ValueError(f"{num_hands} hands, expected at least 1")
    hands: list[list[int]] = [[] for _ in range(num_hands)]
    loads = [0] * num_hands
    for index in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        hand = min(range(num_hands), key=lambda h: (loads[h], h))
        hands[hand].append(index)
        loads[hand] += weights[index]
    return [sorted(members) for members in hands]


def probe_sequence(group: RolloutGroup, arrays: RolloutArrays, max_tokens: int) -> list[int]:
    """Prompt and first response without its last token (an engine scores sequences below its full length), cut at
    ``max_tokens``."""
    response = arrays.token_ids[: group.response_lengths[0]].tolist()
    return [*group.prompt.token_ids, *response][:-1][:max_tokens]
