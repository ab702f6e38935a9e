"""What the loop asks of each stage. Pools on Ray implement these; so do the small in-process stand-ins of unit tests."""

from __future__ import annotations

from collections.abc import Sequence
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

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[RolloutGroup]:
        """One group per prompt, in the prompts' order. Waits for the engines, within the stage's deadline."""
        ...


class VerifyStage(Protocol):
    """Judges responses and labels token roles."""

    def submit(self, groups: Sequence[RolloutGroup]) -> Any:
        """Start judging; returns a ticket for :meth:`collect`. Does not wait, so graders work while the reference scores."""
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
