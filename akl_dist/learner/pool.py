"""Learner on Ray: an actor per ZeRO-3 rank. Each rank fetches the arrays of its own groups; the driver moves headers only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from akl_dist.cluster import actor as process
from akl_dist.cluster.gather import fetch_all, gather, store
from akl_dist.cluster.reserve import with_environment
from akl_dist.config.schema import LearnerConfig, ObjectiveConfig
from akl_dist.contract.errors import StaleRollout
from akl_dist.contract.records import Handle, ParameterInfo, TrainingGroup, Update
from akl_dist.learner.batch import Sample, samples_of
from akl_dist.learner.worker import LearnerWorker
from akl_dist.zero3.gathering import to_wire
from akl_dist.zero3.planning import RankUpdate, SampleKey, lengths_of, plan_updates
from akl_dist.zero3.rank import listen

STAGE = "learner"
CLOSE_TIMEOUT_S = 10.0
ARRAYS: dict[str, Callable[[TrainingGroup], Handle]] = {
    "rollout": lambda group: group.labelled.rollout.arrays,
    "reference": lambda group: group.labelled.reference.arrays,
    "roles": lambda group: group.labelled.roles,
}
"""What a rank fetches of each of its groups."""


@dataclass(frozen=True)
class LearnerSettings:
    """What every rank is made with. Plain values, so that they cross processes.

    Attributes:
        model_path: local Hugging Face folder with safetensors weights.
        dtype: "float32" | "bfloat16".
        attention: attention implementation name of transformers.
        device: "cpu" | "cuda".
        temperature: sampling temperature of the rollouts.
        failures: folder for the batches of failed updates.
    """

    model_path: str
    dtype: str
    attention: str
    device: str
    learner: LearnerConfig
    objective: ObjectiveConfig
    temperature: float
    seed: int
    failures: str


class LearnerActor:
    """One rank in a process of its own. The worker is made by :meth:`start`, so that its errors reach the driver as raised.

    Every method but :meth:`rendezvous`, :meth:`ping` and :meth:`sync_manifest` is a collective: it waits for the other ranks,
    and the limit on one collective unblocks it when one of them is gone.
    """

    def __init__(self, settings: LearnerSettings, name: str, rank: int, world_size: int) -> None:
        process.enter()
        self._settings, self._name, self._rank, self._world_size = settings, name, rank, world_size
        self._store: Any = None
        self._worker: LearnerWorker | None = None

    @property
    def worker(self) -> LearnerWorker:
        assert self._worker is not None, f"{self._name}: start() comes first"
        return self._worker

    def rendezvous(self) -> tuple[str, int]:
        """Rank 0 only: listen on a port the system chooses and return where."""
        address = ray.util.get_node_ip_address()
        self._store = listen(address)
        return address, self._store.port

    def start(self, rendezvous: tuple[str, int]) -> str:
        settings = self._settings
        self._worker = LearnerWorker(
            model_path=settings.model_path, dtype=settings.dtype, attention=settings.attention, rank=self._rank,
            world_size=self._world_size, master_addr=rendezvous[0], master_port=rendezvous[1], device=settings.device,
            num_threads=settings.learner.num_threads, learner=settings.learner, objective=settings.objective,
            seed=settings.seed, temperature=settings.temperature, timeout_s=settings.learner.timeout_s,
            failures=Path(settings.failures), store=self._store,
        )
        return self._name

    def ping(self) -> int:
        """Optimizer steps taken; answers only when the rank is up and idle."""
        return self.worker.optimizer_steps

    def update(
        self, groups: Mapping[int, TrainingGroup], plans: Sequence[RankUpdate], step: int, kl_coefficient: float
    ) -> Update:
        rollout, reference, roles = (
            fetch_all([pick(group) for group in groups.values()], timeout_s=self._settings.learner.timeout_s, stage=STAGE,
                      what=f"{kind} arrays of {len(groups)} groups")
            for kind, pick in ARRAYS.items()
        )
        samples: dict[SampleKey, Sample] = {}
        for position, (index, group) in enumerate(groups.items()):
            own = samples_of(group, rollout[position], reference[position], roles[position])
            samples.update({(index, response): sample for response, sample in enumerate(own)})
        return self.worker.update(samples, plans, step=step, kl_coefficient=kl_coefficient)

    def sync_manifest(self) -> list[ParameterInfo]:
        return self.worker.manifest()

    def gather_bucket(self, names: Sequence[str]) -> list[Handle] | None:
        """Rank 0: one reference to {name: (dtype, values)}, in a list so that the driver gets the reference and not the values."""
        bucket = self.worker.gather_bucket(names)
        if bucket is None:
            return None
        return [store({name: to_wire(tensor) for name, tensor in bucket.items()})]

    def probe_logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[np.ndarray] | None:
        """Rank 0: log-probs of the probe; the other ranks only take part."""
        logp = self.worker.probe_logprobs(token_ids)
        return logp if self._rank == 0 else None

    def parameters_checksum(self) -> str:
        return self.worker.parameters_checksum()

    def save(self, folder: str) -> None:
        self.worker.save(Path(folder))

    def load(self, folder: str) -> None:
        self.worker.load(Path(folder))

    def export(self, folder: str) -> None:
        self.worker.export(Path(folder))

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()


class LearnerPool:
    """The learner stage: ``len(actor_options)`` ranks named ``learner/<run id>/<rank>``.

    Consumes training groups, produces new weights. Waits for the ranks alone; each call has the learner's deadline.

    Args:
        run_id: part of the actors' names.
        settings: what each rank is made with.
        actor_options: Ray options of each rank (placement bundle, num_cpus, num_gpus, runtime_env), rank 0 first.
        max_staleness: policy versions a sample may be behind at its batch's first update.
        current_version: number of completed syncs, asked at each update.
    """

    def __init__(
        self, *, run_id: str, settings: LearnerSettings, actor_options: Sequence[Mapping[str, Any]], max_staleness: int,
        current_version: Callable[[], int],
    ) -> None:
        assert actor_options, "a learner needs at least one rank"
        self._learner, self._timeout_s = settings.learner, settings.learner.timeout_s
        self._max_staleness, self._current_version = max_staleness, current_version
        self.ranks: dict[str, Any] = {}
        """Actor name -> handle, rank 0 first, for the weight sync."""
        threads = str(settings.learner.num_threads)
        needed = {"DS_ACCELERATOR": settings.device, "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}
        for rank, options in enumerate(actor_options):
            name = f"learner/{run_id}/{rank}"
            actor = ray.remote(LearnerActor).options(**with_environment(options, needed), name=name, max_restarts=0)
            self.ranks[name] = actor.remote(settings, name, rank, len(actor_options))
        rendezvous = next(iter(self.ranks.values())).rendezvous.remote()
        self._started = {name: rank.start.remote(rendezvous) for name, rank in self.ranks.items()}

    def ready(self) -> dict[str, Any]:
        """Actor name -> reference that resolves once the rank is up (all ranks start together)."""
        return dict(self._started)

    def ping(self) -> dict[str, int]:
        """Optimizer steps taken by each rank."""
        return self._all(lambda rank: rank.ping.remote(), "answering a ping")

    def update(self, groups: Sequence[TrainingGroup], *, step: int, kl_coefficient: float = 1.0) -> Update:
        """All optimizer steps of loop iteration ``step``; ``kl_coefficient`` is the adaptive factor of both betas.

        Raises:
            StaleRollout: a group older than the bound allows.
            NonFiniteLoss: weights unchanged by the update concerned.
        """
        self._refuse_stale(groups)
        plans = plan_updates(
            [lengths_of(group) for group in groups], num_ranks=len(self.ranks), updates_per_step=self._learner.updates_per_step,
            max_tokens_per_micro_batch=self._learner.max_tokens_per_micro_batch,
        )
        refs = {}
        for rank, (name, actor) in enumerate(self.ranks.items()):
            own = {index: groups[index] for plan in plans for index in plan.groups[rank]}
            refs[name] = actor.update.remote(own, [plan.for_rank(rank) for plan in plans], step, kl_coefficient)
        results = gather(refs, timeout_s=self._timeout_s, stage=STAGE, doing=f"updating at step {step}")
        return next(iter(results.values()))

    def _refuse_stale(self, groups: Sequence[TrainingGroup]) -> None:
        version = self._current_version()
        for group in groups:
            rollout = group.labelled.rollout
            age = version - rollout.policy_version
            if not 0 <= age <= self._max_staleness:
                raise StaleRollout(
                    f"prompt {rollout.prompt.prompt_id}",
                    got=f"sampled by policy version {rollout.policy_version} at version {version}",
                    expected=f"at most {self._max_staleness} versions behind, and none ahead", stage=STAGE, actor=rollout.engine,
                    remedy="Raise rollout.max_staleness, or check that every engine was synced.",
                )

    def save(self, folder: Path) -> None:
        """Every rank writes its part of the checkpoint into the existing folder, which all nodes must see."""
        self._all(lambda rank: rank.save.remote(str(folder)), f"saving to {folder}")

    def load(self, folder: Path) -> None:
        self._all(lambda rank: rank.load.remote(str(folder)), f"loading {folder}")

    def export(self, folder: Path) -> None:
        self._all(lambda rank: rank.export.remote(str(folder)), f"exporting to {folder}")

    def parameters_checksum(self) -> str:
        return next(iter(self._all(lambda rank: rank.parameters_checksum.remote(), "hashing parameters").values()))

    def close(self) -> None:
        """Leave the process group within a limit, then end the processes."""
        refs = [rank.close.remote() for rank in self.ranks.values()]
        ray.wait(refs, num_returns=len(refs), timeout=CLOSE_TIMEOUT_S)
        for rank in self.ranks.values():
            ray.kill(rank)

    def _all(self, call: Callable[[Any], Any], doing: str) -> dict[str, Any]:
        return gather({name: call(rank) for name, rank in self.ranks.items()}, timeout_s=self._timeout_s, stage=STAGE, doing=doing)
