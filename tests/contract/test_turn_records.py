"""Which tokens of a conversation count, from lengths alone."""

from __future__ import annotations

import numpy as np
import pytest

from akl_dist.contract.records import Prompt, RolloutGroup, Turns

PROMPT = Prompt("p", "s", "", (1, 2), "3")


def group(*turns: Turns) -> RolloutGroup:
    lengths = tuple(one.num_tokens for one in turns)
    return RolloutGroup(PROMPT, lengths, ("stop",) * len(turns), 0, "engine", None, turns)


def test_masks_by_hand() -> None:
    turns = Turns((2, 3, 1, 1, 2), void=(1,), left_out=(1,))
    assert (turns.num_tokens, turns.num_turns, turns.last_turn, turns.trained_tokens) == (9, 3, 7, 4)
    assert turns.sampled_mask().astype(int).tolist() == [1, 1, 0, 0, 0, 1, 0, 1, 1]
    assert turns.trained_mask().astype(int).tolist() == [1, 1, 0, 0, 0, 0, 0, 1, 1]
    one = Turns((4,))
    assert (one.num_turns, one.last_turn, one.trained_tokens) == (1, 0, 4)
    ended_by_the_environment = Turns((4, 2))
    assert (ended_by_the_environment.num_turns, ended_by_the_environment.last_turn) == (1, 0)


def test_a_group_counts_what_its_turns_say() -> None:
    mixed = group(Turns((2, 1, 3)), Turns((2,)), Turns((1, 4, 1), left_out=(0, 1)))
    assert mixed.response_lengths == (6, 2, 6) and mixed.trained_lengths == (5, 2, 0)
    assert mixed.trained_mask().astype(int).tolist() == [1, 1, 0, 1, 1, 1] + [1, 1] + [0] * 6
    plain = RolloutGroup(PROMPT, (2, 3), ("stop", "turns"), 0, "engine", None)
    assert plain.trained_lengths == (2, 3) and np.all(plain.trained_mask()) and plain.truncated == (False, True)


@pytest.mark.parametrize("segments", [(), (0,), (2, 0, 1)])
def test_empty_segments_are_refused(segments) -> None:
    with pytest.raises(ValueError, match="segments"):
        Turns(segments)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="turns left out"):
        Turns((2, 1), left_out=(1,))
    with pytest.raises(ValueError, match="turns of"):
        RolloutGroup(PROMPT, (3,), ("stop",), 0, "engine", None, (Turns((2, 2)),))
