"""An environment for tests, as a user would write one: it counts the characters of a turn, and has had enough after two."""

from __future__ import annotations

from akl_dist.rollout.environment import Step, Task


class Counting:
    def __init__(self, *, enough: int) -> None:
        self.enough, self.seen = enough, 0

    def reset(self, task: Task) -> None:
        if task.gold == "refused":
            raise ValueError("a task that this environment cannot set up")

    def step(self, turn: str) -> Step:
        self.seen += 1
        if self.seen == self.enough:
            return Step(None, score=0.5)
        return Step(str(len(turn)), call=True)

    def close(self) -> None:
        pass
