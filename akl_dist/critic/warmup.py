"""The learner of a run whose critic trains alone at first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from akl_dist.contract.records import TrainingGroup, Update
from akl_dist.contract.stages import LearnerStage


class AfterWarmup:
    """A learner stage that leaves the policy alone in the first ``steps`` loop steps: a critic that knows nothing yet would give
    it noise for advantages. Those steps count no optimizer step of the policy and report ``critic/warming_up``."""

    def __init__(self, learner: LearnerStage, steps: int) -> None:
        self._learner, self._steps = learner, steps

    def update(self, groups: Sequence[TrainingGroup], *, step: int, kl_coefficient: float) -> Update:
        if step <= self._steps:
            return Update(0, 0, {"critic/warming_up": 1.0})
        return self._learner.update(groups, step=step, kl_coefficient=kl_coefficient)

    def save(self, folder: Path) -> None:
        self._learner.save(folder)

    def load(self, folder: Path) -> None:
        self._learner.load(folder)

    def export(self, folder: Path) -> None:
        self._learner.export(folder)
