"""One response under way, by hand: who wrote which token, how it ends, what is left out, and the prefix check."""

from __future__ import annotations

import numpy as np
import pytest

from akl_dist.contract.records import Turns
from akl_dist.rollout.environment import Step
from akl_dist.rollout.sampler import topk_entropy
from akl_dist.rollout.turns import PREFIX_FAULT, Conversation, TurnLimits

END = 1
PROMPT = (5, 6)


def conversation(**limits) -> Conversation:
    return Conversation(PROMPT, TurnLimits(**{"max_tokens": 12, "max_turns": 2, **limits}))


def say(one: Conversation, *ids: int, reason: str = "stop", entropy: float | None = None) -> list[int]:
    """Sample a turn after what the conversation asks for; returns the request."""
    request = one.next_request()
    assert request is not None
    logp = -np.arange(1, len(ids) + 1, dtype=np.float32)
    entropies = None if entropy is None else np.full(len(ids), entropy, np.float32)
    one.sampled(request, np.asarray(ids, np.int32), logp, entropies, reason)
    return request


def tokens(observation: str) -> list[int]:
    """Token ids of an answer: 20 + the number of each digit."""
    return [20 + int(digit) for digit in observation]


def test_two_calls_and_an_answer():
    one = conversation()
    assert one.budget == 12 and one.turn == 0
    assert say(one, 7, END) == [5, 6]
    one.answered(Step("34", call=True), tokens)
    assert one.finish_reason is None and (one.turn, one.observations, one.budget) == (1, 1, 8)
    assert say(one, 8, 9, END) == [5, 6, 7, 1, 23, 24], "ids of earlier turns are sent as they came"
    one.answered(Step("5", call=True, failed=True, score=0.25), tokens)
    assert say(one, 10, END) == [5, 6, 7, 1, 23, 24, 8, 9, 1, 25]
    one.answered(Step(None), tokens)
    assert one.finish_reason == "stop"
    ids, logp, entropy = one.arrays()
    assert ids.tolist() == [7, 1, 23, 24, 8, 9, 1, 25, 10, 1] and ids.dtype == np.int32
    assert logp.tolist() == [-1, -2, 0, 0, -1, -2, -3, 0, -1, -2] and logp.dtype == np.float32 and entropy is None
    turns = one.turns()
    assert turns == Turns((2, 2, 3, 1, 2), calls=2, failed_calls=1, score=0.25)
    assert turns.trained_mask().tolist() == [True] * 2 + [False] * 2 + [True] * 3 + [False] + [True] * 2
    assert (turns.num_tokens, turns.num_turns, turns.last_turn, turns.trained_tokens) == (10, 3, 8, 7)


def test_one_piece_without_an_environment():
    one = Conversation(PROMPT, TurnLimits(4))
    assert one.budget == 4
    say(one, 7, 8, END)
    assert one.finish_reason == "stop" and one.arrays()[0].tolist() == [7, 8, 1]
    one = Conversation(PROMPT, TurnLimits(2))
    say(one, 7, 8, reason="length")
    assert one.finish_reason == "length"


@pytest.mark.parametrize(("step", "reason"), [
    (Step("9", call=True), "turns"), (Step("9", void=True), "turns"), (Step(None), "stop"), (Step(None, void=True), "stop"),
    (Step(None, call=True), "stop")])  # a call that ends the response by itself, such as one that hands the answer in
def test_the_turn_after_the_last_answer_is_final(step, reason):
    one = conversation(max_turns=1)
    say(one, END)
    one.answered(Step("9", call=True), tokens)
    say(one, END)
    one.answered(step, tokens)
    assert one.finish_reason == reason and one.turns().segments == (1, 1, 1), "no tokens of an answer that nobody reads"
    assert one.turns().calls == 1 + step.call and one.turns().void == ((1,) if step.void else ())


def test_an_answer_needs_room_for_one_more_token():
    """2 sampled tokens + 3 of the answer + 1: six fit into six and not into five."""
    for longest, reason, segments in ((6, None, [2, 3]), (5, "length", [2])):
        one = conversation(max_tokens=longest)
        say(one, 7, END)
        one.answered(Step("123", call=True), tokens)
        assert one.finish_reason == reason and one.segments == segments
    assert one.turns().calls == 1 and one.arrays()[0].tolist() == [7, 1], "the call is counted, its answer is not there"


def test_bounds_of_one_turn():
    one = conversation(max_turn_tokens=3, max_tokens=8)
    assert one.budget == 3
    say(one, 7, 8, END)
    one.answered(Step("123", call=True), tokens)
    assert one.budget == 2, "what is left of the whole response"
    one = conversation(max_turn_tokens=3)
    say(one, 7, 8, 9, reason="length")
    assert one.finish_reason == "length", "a turn that is cut off calls nothing"


@pytest.mark.parametrize(("void_turns", "left_out", "mask"), [
    ("keep", (), [1, 1, 0, 1, 0, 1, 1]), ("mask_turn", (0,), [0, 0, 0, 1, 0, 1, 1]), ("mask_response", (0, 1, 2), [0] * 7)])
def test_void_turns(void_turns, left_out, mask):
    one = conversation(void_turns=void_turns)
    say(one, 7, END)
    one.answered(Step("1", void=True), tokens)
    say(one, END)
    one.answered(Step("2", call=True), tokens)
    say(one, 7, END)
    one.answered(Step(None), tokens)
    turns = one.turns()
    assert (turns.void, turns.left_out) == ((0,), left_out) and turns.trained_mask().tolist() == [bool(m) for m in mask]


def test_a_response_without_void_turns_is_kept_whole():
    one = conversation(void_turns="mask_response")
    say(one, END)
    one.answered(Step(None), tokens)
    assert one.turns().left_out == ()


def test_faults_keep_what_was_sampled():
    one = conversation()
    say(one, 7, END)
    one.end_in_fault("killed")
    one.end_in_fault("a later reason")
    assert one.turns() == Turns((2,), fault="killed") and one.finish_reason == "stop"
    one = conversation()
    one.end_in_fault("reset failed")
    assert one.finish_reason is None, "the turn under way is still taken: a response has tokens"
    say(one, 7, END)
    assert one.turns() == Turns((2,), fault="reset failed")
    one = conversation()
    say(one, END)
    one.answered(Step("", call=True), tokens)
    assert "no tokens" in one.turns().fault


def test_prefix_check():
    one = conversation()
    say(one, 7, 8, END)
    one.answered(Step("4", call=True), tokens)
    one._ids[1] = 9  # as a policy's own ids that went through text and back
    assert one.next_request() is None
    assert one.turns().fault == PREFIX_FAULT and one.turns().segments == (3,), "the answer that nothing followed is dropped"
    ids, logp, _ = one.arrays()
    assert len(ids) == len(logp) == 3
    one = conversation()
    request = one.next_request()
    one.sampled([*request, 99], np.asarray([END], np.int32), np.zeros(1, np.float32), None, "stop")
    one.answered(Step("4", call=True), tokens)
    assert one.next_request() is None, "the engine sampled after another prompt"


def test_entropies_are_zero_where_the_environment_wrote():
    one = conversation()
    say(one, 7, END, entropy=0.5)
    one.answered(Step("34", call=True), tokens)
    say(one, END, entropy=0.25)
    one.answered(Step(None), tokens)
    assert one.arrays()[2].tolist() == [0.5, 0.5, 0, 0, 0.25]


@pytest.mark.parametrize("limits", [
    {"max_tokens": 0}, {"max_turn_tokens": 0}, {"max_turns": -1}, {"void_turns": "drop"}])
def test_limits_that_are_none(limits):
    with pytest.raises(ValueError, match="void_turns among"):
        conversation(**limits)


def test_entropy_from_the_most_probable_tokens():
    """p = (1/2, 1/4, 1/8, 1/8): H = 1.75 log 2. With k = 2 the rest, 1/4, is one lump: 1.5 log 2; a sampled token among the rest
    is known, too: its 1/8 and a lump of 1/8."""
    log = np.log
    rows = [([0, 0, 1], [0.5, 0.5, 0.25]), ([3, 0, 1], [0.125, 0.5, 0.25])]
    got = topk_entropy(np.asarray([ids for ids, _ in rows]), log(np.asarray([p for _, p in rows], np.float32)))
    np.testing.assert_allclose(got, [1.5 * log(2), 1.75 * log(2)], rtol=1e-6)
    whole = topk_entropy(np.asarray([[2, 0, 1, 2, 3]]), log(np.asarray([[0.125, 0.5, 0.25, 0.125, 0.125]], np.float32)))
    np.testing.assert_allclose(whole, [1.75 * log(2)], rtol=1e-6)
    certain = topk_entropy(np.asarray([[0, 0, 1]]), np.asarray([[0.0, 0.0, -np.inf]], np.float32))
    assert certain.tolist() == [0.0] and got.dtype == np.float32
