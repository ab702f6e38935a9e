"""The reference buffer on Ray: an actor beside the driver, so that bulk arrays never pass through the driver."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from akl_dist.cluster import actor
from akl_dist.cluster.gather import fetch_all, gather, store_all
from akl_dist.cokl.buffer import DrawnGroup, ReferenceBuffer
from akl_dist.contract.records import JudgedGroup, ReferenceGroup, RolloutGroup
from akl_dist.contract.reference_samples import ReferenceSamples

STAGE = "cokl"


class BufferActor:
    """Reads and writes the buffer. The buffer is opened by :meth:`start`, so that its errors reach the driver as raised."""

    def __init__(self, folder: str, drawn_with: Mapping[str, Any], timeout_s: float) -> None:
        actor.enter()
        self._folder, self._drawn_with, self._timeout_s = folder, dict(drawn_with), timeout_s
        self._buffer: ReferenceBuffer | None = None

    @property
    def buffer(self) -> ReferenceBuffer:
        assert self._buffer is not None, "start() comes first"
        return self._buffer

    def start(self) -> set[str]:
        """The prompts that are in the buffer already."""
        self._buffer = ReferenceBuffer(Path(self._folder), self._drawn_with)
        return self.buffer.prompt_ids()

    def add(
        self, rollouts: Sequence[RolloutGroup], judged: Sequence[JudgedGroup], reference: Sequence[ReferenceGroup]
    ) -> int:
        tokens, verdicts, scores = (
            fetch_all([group.arrays for group in groups], timeout_s=self._timeout_s, stage=STAGE,
                      what=f"reference samples of {len(groups)} prompts")
            for groups in (rollouts, judged, reference)
        )
        rows = zip(rollouts, tokens, judged, verdicts, scores, strict=True)
        return self.buffer.add([DrawnGroup(*row) for row in rows])

    def take(self, prompt_ids: Sequence[str]) -> list[ReferenceSamples]:
        found = self.buffer.correct(prompt_ids)
        handles = store_all([samples.arrays for samples in found])
        return [dataclasses.replace(samples, arrays=handle) for samples, handle in zip(found, handles, strict=True)]


class BufferPool:
    """The buffer of one run, ``cokl/<run id>/0``. Waits for its actor alone, within ``timeout_s``.

    Args:
        folder: of the buffer, in the run directory.
        drawn_with: what samples are drawn with; see :class:`~akl_dist.cokl.buffer.ReferenceBuffer`.
        options: Ray options of the actor, beside the driver.
    """

    def __init__(
        self, *, run_id: str, folder: Path, drawn_with: Mapping[str, Any], options: Mapping[str, Any], timeout_s: float
    ) -> None:
        self._name, self._timeout_s = f"{STAGE}/{run_id}/0", timeout_s
        actor_class = ray.remote(BufferActor).options(**options, name=self._name, max_restarts=0)
        self._actor: Any = actor_class.remote(str(folder.resolve()), dict(drawn_with), timeout_s)

    def prompt_ids(self) -> set[str]:
        """Prompts that have been sampled, in this run or in an earlier attempt at it."""
        return self._call(self._actor.start.remote(), "opening the reference buffer")

    def add(
        self, rollouts: Sequence[RolloutGroup], judged: Sequence[JudgedGroup], reference: Sequence[ReferenceGroup]
    ) -> int:
        """Keep the groups; returns how many of their responses are correct. They are on disk afterwards."""
        ref = self._actor.add.remote(list(rollouts), list(judged), list(reference))
        return self._call(ref, f"keeping reference samples of {len(rollouts)} prompts")

    def take(self, prompt_ids: Sequence[str]) -> list[ReferenceSamples]:
        """The correct responses to each of the prompts that were sampled, in their order."""
        return self._call(self._actor.take.remote(list(prompt_ids)), f"reading reference samples of {len(prompt_ids)} prompts")

    def close(self) -> None:
        ray.kill(self._actor)

    def _call(self, ref: Any, doing: str) -> Any:
        return gather({self._name: ref}, timeout_s=self._timeout_s, stage=STAGE, doing=doing)[self._name]
