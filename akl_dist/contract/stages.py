"""What the loop asks of each stage. Pools on Ray implement these; so do the small in-process stand-ins of unit tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from akl_dist.contract.records import (
    Appraisal,
    JudgedGroup,
    LabelledGroup,
    Prompt,
    ReferenceGroup,
    RolloutGroup,
    Sampling,
    SyncReport,
    TrainingGroup,
    Update,
)


class RolloutStage(Protocol):
    """Draws responses with the current policy."""

    def sample(
        self, prompts: Sequence[Prompt], sampling: Sampling, finished: Callable[[Sequence[RolloutGroup]], None] | None = None
    ) -> list[RolloutGroup]:
        """One group per prompt, in the prompts' order. Waits for the engines, within the stage's deadline.

        ``finished`` is called with groups as they end, the same objects as in the result, while others are still sampled; a
        stage that has all groups at once need not call it.
        """
        ...


class VerdictStream(Protocol):
    """A batch whose groups are judged while others of it are still sampled."""

    def add(self, groups: Sequence[RolloutGroup]) -> None:
        """Start judging. Waits only while ``verify.queue_groups`` other groups wait for a grader, within the stage's deadline."""
        ...

    def ticket(self, order: Sequence[RolloutGroup]) -> Any:
        """The whole batch, for :meth:`VerifyStage.collect`; judges what was not added before. Does not wait."""
        ...


class VerifyStage(Protocol):
    """Judges responses and labels token roles."""

    def stream(self) -> VerdictStream:
        """A new batch, to be judged as it is sampled."""
        ...

    def submit(self, groups: Sequence[RolloutGroup]) -> Any:
        """Start judging a whole batch; returns a ticket for :meth:`collect`. Does not wait, so graders work while the reference
        scores."""
        ...

    def collect(self, ticket: Any, earlier: Sequence[JudgedGroup] = ()) -> list[JudgedGroup]:
        """Verdicts in the order submitted. Waits for the graders, within the stage's deadline.

        ``earlier`` are verdicts of the same step: the bound on responses without a verdict holds for all of them together, since
        a few groups drawn later are too small a sample for it.
        """
        ...

    def label(
        self, groups: Sequence[RolloutGroup], judged: Sequence[JudgedGroup], reference: Sequence[ReferenceGroup]
    ) -> list[LabelledGroup]:
        """Token roles by the configured rule; needs the reference's entropies."""
        ...


class ReferenceStage(Protocol):
    """Log-probs and entropies under the frozen reference model."""

    def score(self, groups: Sequence[RolloutGroup]) -> list[ReferenceGroup]: ...


class CriticStage(Protocol):
    """Owns the value model (objective.advantage=gae)."""

    def appraise(self, groups: Sequence[TrainingGroup], *, step: int) -> Appraisal:
        """An advantage for every token of groups whose ``advantages`` are rewards, then the critic's own optimizer steps.
        Raises NonFiniteLoss before its weights change."""
        ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


class LearnerStage(Protocol):
    """Owns the policy's weights."""

    def update(self, groups: Sequence[TrainingGroup], *, step: int, kl_coefficient: float) -> Update:
        """All optimizer steps of one iteration, with both betas times ``kl_coefficient``. Raises NonFiniteLoss before the
        weights change."""
        ...

    def save(self, folder: Path) -> None:
        """Write this stage's part of a checkpoint (sharded weights, optimizer, RNG) into an existing folder."""
        ...

    def load(self, folder: Path) -> None: ...

    def export(self, folder: Path) -> None:
        """Write a Hugging Face checkpoint (weights, config, tokenizer) into ``folder``."""
        ...


class WeightSyncStage(Protocol):
    """Brings the learner's weights to every engine and proves that they arrived."""

    def sync(self, policy_version: int, probe: Sequence[RolloutGroup]) -> SyncReport:
        """Transfer, drop caches, compare log-probs on ``probe``. Raises WeightSyncError above the bound."""
        ...
