"""Bookkeeping on Ray, beside the driver: a scribe that writes rollout dumps, and the replay of earlier dumps.

Both resolve and make handles in an actor of their own, so that bulk arrays never pass through the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from akl_dist.bookkeeping.rollout_dump import DumpRow, ReplayOrder, ReplayReader, dump_path, rows_of_group, write_rollouts
from akl_dist.bookkeeping.sample_records import evaluation_path, problem_row, write_evaluation
from akl_dist.cluster import actor
from akl_dist.cluster.gather import fetch, fetch_all, gather, store
from akl_dist.contract.errors import DataError
from akl_dist.contract.records import JudgedArrays, JudgedGroup, Prompt, RolloutGroup, Sampling, SyncReport, TrainingGroup


class ScribeActor:
    """Writes one Parquet file per step, and one JSONL file per evaluation."""

    def __init__(self) -> None:
        actor.enter()

    def write(self, folder: str, step: int, groups: Sequence[TrainingGroup], timeout_s: float) -> int:
        """Rows written."""
        rows: list[DumpRow] = []
        for group in groups:
            what = f"arrays of prompt {group.labelled.rollout.prompt.prompt_id}"
            parts = [fetch(handle, timeout_s=timeout_s, stage="rollout", what=what) for handle in (
                group.labelled.rollout.arrays, group.labelled.judged.arrays, group.labelled.reference.arrays,
                group.labelled.roles)]
            assert isinstance(parts[1], JudgedArrays)
            rows += rows_of_group(step, group, *parts)
        return write_rollouts(dump_path(Path(folder), step), rows)

    def write_samples(
        self, path: str, rollouts: Sequence[RolloutGroup], judged: Sequence[JudgedGroup], sandbox: str | None, timeout_s: float
    ) -> None:
        texts = fetch_all([group.arrays for group in judged], timeout_s=timeout_s, stage="verify",
                          what=f"verdicts of {len(judged)} problems")
        write_evaluation(Path(path), [problem_row(*row, sandbox) for row in zip(rollouts, judged, texts, strict=True)])


class Scribe:
    """Dumps a step's rollouts while the next step runs; at most one dump is under way (the next call waits for it).

    Args:
        folder: of the rollout dumps.
        evaluations: folder of the evaluations' samples.
        options: Ray options of its actor.
        timeout_s: limit of one dump.
    """

    def __init__(self, *, run_id: str, folder: Path, evaluations: Path, options: Mapping[str, Any], timeout_s: float) -> None:
        self._name, self._folder, self._timeout_s = f"scribe/{run_id}/0", str(folder.resolve()), timeout_s
        self._evaluations = evaluations.resolve()
        self._actor: Any = ray.remote(ScribeActor).options(**options, name=self._name, max_restarts=0).remote()
        self._pending: dict[str, Any] = {}

    def write(self, step: int, groups: Sequence[TrainingGroup]) -> None:
        self.flush()
        self._pending = {self._name: self._actor.write.remote(self._folder, step, groups, self._timeout_s)}

    def write_samples(
        self, step: int, rollouts: Sequence[RolloutGroup], judged: Sequence[JudgedGroup], sandbox: str | None
    ) -> None:
        """The samples of the evaluation after ``step``. ``sandbox``: the form of isolation in which programs ran, if any."""
        self.flush()
        path = str(evaluation_path(self._evaluations, step))
        call = self._actor.write_samples.remote(path, rollouts, judged, sandbox, self._timeout_s)
        self._pending = {self._name: call}

    def flush(self) -> None:
        """Wait until the last dump is on disk."""
        pending, self._pending = self._pending, {}
        gather(pending, timeout_s=self._timeout_s, stage="rollout", doing="writing the rollout dump")

    def close(self) -> None:
        ray.kill(self._actor)


class ReplayActor:
    """Reads dumps and puts their arrays into the object store."""

    def __init__(self, folder: str) -> None:
        actor.enter()
        self._reader = ReplayReader(folder)

    def groups(self, step: int, policy_version: int, name: str) -> list[RolloutGroup]:
        return [RolloutGroup(prompt=g.prompt, response_lengths=g.response_lengths, finish_reasons=g.finish_reasons,
                             policy_version=policy_version, engine=name, arrays=store(g.arrays), turns=g.turns)
                for g in self._reader.read(step)]


class ReplayPool:
    """Rollout stage, prompt source and weight sync of a run without engines (``rollout.replay``).

    Which dump a step takes is the part of ``order`` (:class:`ReplayOrder`). The dump stands for what the present policy
    drew, so its groups carry the present version; how far they are from it shows in ``objective/rollout_mismatch_mean``.
    """

    def __init__(
        self, *, run_id: str, folder: str, order: ReplayOrder, options: Mapping[str, Any], timeout_s: float,
        policy_version: int = 0,
    ) -> None:
        self._name, self._timeout_s = f"rollout/{run_id}/replay", timeout_s
        self._order, self._version = order, policy_version
        self._actor: Any = ray.remote(ReplayActor).options(**options, name=self._name, max_restarts=0).remote(
            str(Path(folder).resolve()))
        self._next: list[RolloutGroup] = []

    def ready(self) -> dict[str, Any]:
        return {}

    def take(self, n: int) -> list[Prompt]:
        """The prompts of the next dump. Raises DataError when there is none, or when it has another number of prompts."""
        step = self._order.take()
        ref = self._actor.groups.remote(step, self._version, self._name)
        groups = gather({self._name: ref}, timeout_s=self._timeout_s, stage="rollout", doing=f"reading the dump of step {step}")
        self._next = groups[self._name]
        if len(self._next) != n:
            raise DataError(f"rollout.replay, step {step}", got=f"{len(self._next)} prompts", stage="rollout",
                            expected=f"{n} (rollout.prompts_per_step)",
                            remedy=f"Set rollout.prompts_per_step={len(self._next)}.")
        return [group.prompt for group in self._next]

    def state(self) -> dict[str, Any]:
        return self._order.state()

    def sample(
        self, prompts: Sequence[Prompt], sampling: Sampling, finished: Callable[[Sequence[RolloutGroup]], None] | None = None
    ) -> list[RolloutGroup]:
        """The groups of the dump that :meth:`take` has read; all are there at once, so ``finished`` is not called."""
        for group in self._next:
            if len(group.response_lengths) != sampling.group_size:
                raise DataError(f"rollout.replay, prompt {group.prompt.prompt_id}", got=f"{len(group.response_lengths)} responses",
                                expected=f"{sampling.group_size} (rollout.group_size)", stage="rollout",
                                remedy="Set rollout.group_size to the dump's.")
        assert [g.prompt.prompt_id for g in self._next] == [p.prompt_id for p in prompts], "prompts of another dump"
        return self._next

    def sync(self, policy_version: int, probe: Sequence[RolloutGroup]) -> SyncReport:
        """No engine to bring weights to: only the version moves. The report's 0 buckets say that nothing was transferred."""
        self._version = policy_version
        return SyncReport(policy_version, 0.0, 0, 0, 0.0, 0.0, 0.0)

    def close(self) -> None:
        ray.kill(self._actor)
