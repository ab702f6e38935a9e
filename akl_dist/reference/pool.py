"""Reference on Ray: an actor per copy of the frozen model, groups dealt by their tokens, arrays kept on the actor's node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from akl_dist.cluster import actor as process
from akl_dist.cluster.gather import fetch_all, gather, store_all
from akl_dist.cluster.reserve import with_environment
from akl_dist.contract.packing import deal
from akl_dist.contract.records import ReferenceGroup, RolloutArrays, RolloutGroup
from akl_dist.reference.worker import ReferenceWorker, Responses

STAGE = "reference"


@dataclass(frozen=True)
class ReferenceSettings:
    """What each worker is made with; see :class:`~akl_dist.reference.worker.ReferenceWorker`. timeout_s: limit of one call."""

    model_path: str
    dtype: str
    attention: str
    device: str
    temperature: float
    num_threads: int
    max_tokens_per_batch: int
    logprob_chunk_tokens: int
    kl_estimator: str
    topk: int
    timeout_s: float

    @property
    def environment(self) -> dict[str, str]:
        """What OpenMP reads when it is loaded."""
        return {"OMP_NUM_THREADS": str(self.num_threads), "OMP_WAIT_POLICY": "PASSIVE"}


class ReferenceActor:
    """One frozen model in a process of its own; made by :meth:`start`, so that its errors reach the driver as raised."""

    def __init__(self, settings: ReferenceSettings, name: str) -> None:
        process.enter()
        self._settings, self._name = settings, name
        self._worker: ReferenceWorker | None = None

    def start(self) -> str:
        settings = self._settings
        self._worker = ReferenceWorker(
            model_path=settings.model_path, dtype=settings.dtype, attention=settings.attention, temperature=settings.temperature,
            num_threads=settings.num_threads, max_tokens_per_batch=settings.max_tokens_per_batch,
            logprob_chunk_tokens=settings.logprob_chunk_tokens, kl_estimator=settings.kl_estimator, topk=settings.topk,
            device=settings.device,
        )
        return self._name

    @property
    def worker(self) -> ReferenceWorker:
        assert self._worker is not None, f"{self._name}: start() comes first"
        return self._worker

    def ping(self) -> str:
        """Its name; answers only when the model is loaded and the worker idle."""
        assert self.worker is not None
        return self._name

    def score(self, groups: Sequence[RolloutGroup]) -> list[ReferenceGroup]:
        """Resolve all groups, score them packed together, store group by group."""
        arrays: list[RolloutArrays] = fetch_all(
            [group.arrays for group in groups], timeout_s=self._settings.timeout_s, stage=STAGE,
            what=f"rollout arrays of {len(groups)} groups")
        scored = self.worker.score([
            Responses(group.prompt.token_ids, np.split(own.token_ids, np.cumsum(group.response_lengths)[:-1]), own.logp,
                      group.trained_mask() if group.turns else None)
            for group, own in zip(groups, arrays, strict=True)
        ])
        handles = store_all([one.arrays for one in scored])
        return [ReferenceGroup(group.prompt.prompt_id, one.kl_k1, one.kl_k3, handle)
                for group, one, handle in zip(groups, scored, handles, strict=True)]


class ReferencePool:
    """The reference stage: ``len(actor_options)`` workers named ``reference/<run id>/<i>``.

    Consumes rollout groups, produces their scores; waits for the workers alone, within ``settings.timeout_s``.

    Args:
        actor_options: Ray options of each worker (placement bundle, num_cpus, num_gpus, runtime_env).
    """

    def __init__(self, *, run_id: str, settings: ReferenceSettings, actor_options: Sequence[Mapping[str, Any]]) -> None:
        assert actor_options, "a reference pool needs at least one worker"
        self._timeout_s = settings.timeout_s
        self.workers: dict[str, Any] = {}
        """Actor name -> handle."""
        for index, options in enumerate(actor_options):
            name = f"reference/{run_id}/{index}"
            actor = ray.remote(ReferenceActor).options(**with_environment(options, settings.environment), name=name, max_restarts=0)
            self.workers[name] = actor.remote(settings, name)
        self._started = {name: worker.start.remote() for name, worker in self.workers.items()}

    def ready(self) -> dict[str, Any]:
        """Actor name -> reference that resolves once the worker's model is loaded."""
        return dict(self._started)

    def ping(self) -> dict[str, str]:
        refs = {name: worker.ping.remote() for name, worker in self.workers.items()}
        return gather(refs, timeout_s=self._timeout_s, stage=STAGE, doing="answering a ping")

    def score(self, groups: Sequence[RolloutGroup]) -> list[ReferenceGroup]:
        """One record per group, in the groups' order."""
        names = list(self.workers)
        tokens = [len(g.prompt.token_ids) * len(g.response_lengths) + g.num_tokens for g in groups]
        shares = {name: hand for name, hand in zip(names, deal(tokens, len(names)), strict=True) if hand}
        refs = {name: self.workers[name].score.remote([groups[i] for i in hand]) for name, hand in shares.items()}
        results = gather(refs, timeout_s=self._timeout_s, stage=STAGE, doing=f"scoring {len(groups)} groups")
        scored = {i: record for name, hand in shares.items() for i, record in zip(hand, results[name], strict=True)}
        return [scored[i] for i in range(len(groups))]

    def close(self) -> None:
        for worker in self.workers.values():
            ray.kill(worker)
