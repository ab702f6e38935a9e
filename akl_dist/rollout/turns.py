"""One response under way: what has been sampled, what an environment has answered, and when it ends. No engine in here.

Token ids go in and come out; the ids of earlier turns are never made again. Each request's ids must begin with those of the
request before it and of the turn sampled there (the prefix check); where they do not, the policy would go on from a text that it
did not write, and the response ends in a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from akl_dist.contract.records import Turns

if TYPE_CHECKING:
    from akl_dist.rollout.environment import Step

PREFIX_FAULT = "prefix check: the ids of the next request do not begin with those sampled so far"
VOID_TURNS = ("keep", "mask_turn", "mask_response")


@dataclass(frozen=True)
class TurnLimits:
    """Bounds of one response.

    Attributes:
        max_tokens: of the whole response, what the environment writes included.
        max_turn_tokens: sampled in one turn; None = what is left of ``max_tokens``.
        max_turns: answers of the environment; 0 = the response is sampled in one piece.
        void_turns: "keep" | "mask_turn" | "mask_response": whether void turns, or responses with one, are left out of training.
    """

    max_tokens: int
    max_turn_tokens: int | None = None
    max_turns: int = 0
    void_turns: str = "keep"

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.max_turns < 0 or self.void_turns not in VOID_TURNS or (
                self.max_turn_tokens is not None and self.max_turn_tokens < 1):
            raise ValueError(f"{self}: expected positive numbers of tokens and void_turns among {VOID_TURNS}")


class Conversation:
    """A response from its prompt to its end: sampled turns and answers of the environment by turns.

    The order of calls is :meth:`next_request`, :meth:`sampled`, then, unless ``finish_reason`` is set, :meth:`answered`, and so on.

    Attributes:
        finish_reason: None while the response is under way, then "stop" (the policy's own end), "length" (a bound on tokens) or
            "turns" (the last turn allowed still wanted an answer).
        fault: why there can be no verdict; empty where all went well.
    """

    def __init__(self, prompt_ids: Sequence[int], limits: TurnLimits) -> None:
        self.limits = limits
        self.prompt_ids = list(prompt_ids)
        self.finish_reason: str | None = None
        self.fault = ""
        self.segments: list[int] = []
        self.void: list[int] = []
        self.calls = self.failed_calls = 0
        self.score: float | None = None
        self._ids: list[int] = []
        self._logp: list[np.ndarray] = []
        self._entropy: list[np.ndarray] = []
        self._must_begin: list[int] = list(prompt_ids)

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    @property
    def turn(self) -> int:
        """Index of the turn to sample next, 0 the first."""
        return (len(self.segments) + 1) // 2

    @property
    def observations(self) -> int:
        return len(self.segments) // 2

    @property
    def budget(self) -> int:
        """Tokens that the next turn may have."""
        left = self.limits.max_tokens - self.num_tokens
        return left if self.limits.max_turn_tokens is None else min(left, self.limits.max_turn_tokens)

    def next_request(self) -> list[int] | None:
        """Prompt and everything so far, to sample the next turn from; None where the prefix check fails: the response has then
        ended in a fault, without the answer that nothing was sampled after."""
        ids = self.prompt_ids + self._ids
        if ids[: len(self._must_begin)] != self._must_begin:
            self._drop_last_answer()
            self.end_in_fault(PREFIX_FAULT)
            return None
        return ids

    def sampled(
        self, request_ids: Sequence[int], ids: np.ndarray, logp: np.ndarray, entropy: np.ndarray | None, reason: str
    ) -> None:
        """Append a turn as the engine reports it.

        Args:
            request_ids: what the engine says it sampled after.
            ids, logp, entropy: int32, float32 and (or None) float32, each [n], n of 1 to ``budget``; end token included.
            reason: "stop" at an end token, or "length".
        """
        assert self.finish_reason is None and len(self.segments) % 2 == 0, "a turn follows a prompt or an answer"
        assert 1 <= len(ids) <= self.budget and len(ids) == len(logp), "the engine's reply was checked against its request"
        self._append(ids.tolist(), logp, entropy)
        self._must_begin = [*request_ids, *ids.tolist()]
        if reason == "length" or self.limits.max_turns == 0 or self.fault:
            self.finish_reason = reason

    def answered(self, step: Step, observation_ids: Callable[[str], Sequence[int]]) -> None:
        """Take the environment's answer to the last turn: the response ends, or goes on behind the answer's tokens.

        Args:
            observation_ids: token ids of an answer, from after the turn's end token to where the next turn begins.
        """
        assert self.finish_reason is None and len(self.segments) % 2 == 1, "an answer follows a turn"
        turn = len(self.segments) // 2
        self.calls += step.call
        self.failed_calls += step.call and step.failed
        if step.void:
            self.void.append(turn)
        if step.score is not None:
            self.score = float(step.score)
        if self.observations == self.limits.max_turns:
            self.finish_reason = "stop" if step.observation is None else "turns"
        elif step.observation is None:
            self.finish_reason = "stop"
        else:
            ids = list(observation_ids(step.observation))
            if self.num_tokens + len(ids) + 1 > self.limits.max_tokens:
                self.finish_reason = "length"
            elif ids:
                self._append(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.float32))
            else:
                self.end_in_fault("an answer of no tokens: the chat template writes nothing for the environment's message")

    def end_in_fault(self, reason: str) -> None:
        """The environment failed: there will be no verdict. A turn that is being sampled is still taken; nothing follows it."""
        assert reason, "a fault has a reason"
        self.fault = self.fault or reason
        if self.segments and len(self.segments) % 2 == 1 and self.finish_reason is None:
            self.finish_reason = "stop"

    def turns(self) -> Turns:
        """How the response came about; only once it has ended."""
        assert self.finish_reason is not None, "the response has not ended"
        return Turns(
            segments=tuple(self.segments), void=tuple(self.void), left_out=self._left_out(), calls=self.calls,
            failed_calls=self.failed_calls, score=self.score, fault=self.fault)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Token ids int32, log-probs float32 and, where every turn came with them, entropies float32; each [num_tokens]."""
        entropy = np.concatenate(self._entropy).astype(np.float32) if len(self._entropy) == len(self._logp) else None
        return np.asarray(self._ids, np.int32), np.concatenate(self._logp).astype(np.float32), entropy

    def _append(self, ids: list[int], logp: np.ndarray, entropy: np.ndarray | None) -> None:
        self._ids += ids
        self._logp.append(logp)
        if entropy is not None:
            self._entropy.append(entropy)
        self.segments.append(len(ids))

    def _drop_last_answer(self) -> None:
        if len(self.segments) % 2 == 0 and self.segments:
            length = self.segments.pop()
            del self._ids[len(self._ids) - length :]
            self._logp.pop()
            self._entropy.pop()

    def _left_out(self) -> tuple[int, ...]:
        if not self.void or self.limits.void_turns == "keep":
            return ()
        return tuple(self.void) if self.limits.void_turns == "mask_turn" else tuple(range(self.turn))
