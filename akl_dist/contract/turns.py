"""How a response of several turns came about, by lengths alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Turns:
    """How one response came about in a conversation with an environment.

    segments: lengths in tokens, alternating sampled by the policy and written by the environment, beginning with a sampled one.
    void: turns (0 the first) with neither a call nor a final answer. left_out: turns whose sampled tokens do not train.
    calls, failed_calls: tool calls made, and those of them that ended in an error. score: what the environment itself gave, None
    where it gave nothing. fault: why there can be no verdict (the environment failed, not the policy), else empty.
    """

    segments: tuple[int, ...]
    void: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()
    calls: int = 0
    failed_calls: int = 0
    score: float | None = None
    fault: str = ""

    def __post_init__(self) -> None:
        if not self.segments or any(n < 1 for n in self.segments):
            raise ValueError(f"segments {self.segments}, expected lengths of at least 1 that begin with a sampled turn")
        if not all(0 <= turn < self.num_turns for turn in (*self.void, *self.left_out)):
            raise ValueError(f"void turns {self.void} and turns left out {self.left_out} of {self.num_turns}")

    @property
    def num_tokens(self) -> int:
        return sum(self.segments)

    @property
    def num_turns(self) -> int:
        return (len(self.segments) + 1) // 2

    @property
    def sampled_tokens(self) -> int:
        return sum(self.segments[::2])

    @property
    def trained_tokens(self) -> int:
        return sum(n for turn, n in enumerate(self.segments[::2]) if turn not in self.left_out)

    @property
    def last_turn(self) -> int:
        """Where the last sampled turn begins, in tokens of the response."""
        return sum(self.segments[: 2 * (self.num_turns - 1)])

    def sampled_mask(self) -> np.ndarray:
        """bool [n]: tokens sampled by the policy."""
        return np.repeat(np.arange(len(self.segments)) % 2 == 0, self.segments)

    def trained_mask(self) -> np.ndarray:
        """bool [n]: those of them that are in no turn left out."""
        kept = [index % 2 == 0 and index // 2 not in self.left_out for index in range(len(self.segments))]
        return np.repeat(np.asarray(kept), self.segments)
