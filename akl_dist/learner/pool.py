"""Learner on Ray: an actor per ZeRO-3 rank. Each rank fetches the arrays of its own groups; the driver moves headers only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from akl_dist.cluster.gather import fetch_all, store, store_all
from akl_dist.config.schema import ObjectiveConfig
from akl_dist.contract.entropies import EntropyArrays
from akl_dist.contract.errors import StaleRollout
from akl_dist.contract.records import Handle, ParameterInfo, RolloutGroup, TrainingGroup, Update
from akl_dist.contract.reference_samples import ReferenceSamples
from akl_dist.learner.batch import Sample, samples_of
from akl_dist.learner.cokl import CoklUpdate, cokl_samples, plan_cokl
from akl_dist.learner.worker import LearnerWorker
from akl_dist.zero3.gathering import to_wire
from akl_dist.zero3.planning import GroupLengths, RankUpdate, SampleKey, lengths_of, plan_updates
from akl_dist.zero3.pool import RankActor, RankPool, RankSettings

STAGE = "learner"
ARRAYS: dict[str, Callable[[TrainingGroup], Handle]] = {
    "rollout": lambda group: group.labelled.rollout.arrays,
    "reference": lambda group: group.labelled.reference.arrays,
    "roles": lambda group: group.labelled.roles,
    "critic": lambda group: group.token_advantages,
}
"""What a rank fetches of each of its groups."""


@dataclass(frozen=True)
class LearnerSettings(RankSettings):
    """Attributes:
    objective: what is optimised.
    temperature: sampling temperature of the rollouts.
    """

    objective: ObjectiveConfig
    temperature: float


class LearnerActor(RankActor):
    """One rank in a process of its own; :meth:`sync_manifest` is no collective, the other methods are."""

    @property
    def worker(self) -> LearnerWorker:
        return super().worker

    def make_worker(self, rendezvous: tuple[str, int]) -> LearnerWorker:
        settings: LearnerSettings = self._settings
        return LearnerWorker(
            model_path=settings.model_path, dtype=settings.dtype, attention=settings.attention, rank=self._rank,
            world_size=self._world_size, master_addr=rendezvous[0], master_port=rendezvous[1], device=settings.device,
            num_threads=settings.learner.num_threads, learner=settings.learner, objective=settings.objective,
            seed=settings.seed, temperature=settings.temperature, timeout_s=settings.learner.timeout_s,
            failures=Path(settings.failures), store=self._store,
        )

    def update(
        self, groups: Mapping[int, TrainingGroup], plans: Sequence[RankUpdate], step: int, kl_coefficient: float,
        cokl: tuple[Sequence[CoklUpdate], Mapping[int, ReferenceSamples]] | None = None,
    ) -> Update:
        rollout, reference, roles, critic = (
            fetch_all([pick(group) for group in groups.values()], timeout_s=self._settings.learner.timeout_s, stage=STAGE,
                      what=f"{kind} arrays of {len(groups)} groups")
            for kind, pick in ARRAYS.items()
        )
        samples: dict[SampleKey, Sample] = {}
        for position, (index, group) in enumerate(groups.items()):
            own = samples_of(group, rollout[position], reference[position], roles[position], critic[position])
            samples.update({(index, response): sample for response, sample in enumerate(own)})
        if cokl is None:
            return self.worker.update(samples, plans, step=step, kl_coefficient=kl_coefficient)
        cokl_plans, reference_samples = cokl
        arrays = fetch_all([one.arrays for one in reference_samples.values()], timeout_s=self._settings.learner.timeout_s,
                           stage=STAGE, what=f"reference samples of {len(reference_samples)} prompts")
        members = cokl_samples(samples, reference_samples, arrays)
        return self.worker.update(samples, plans, step=step, kl_coefficient=kl_coefficient, cokl=(cokl_plans, members))

    def entropies(self, groups: Mapping[int, RolloutGroup], plan: RankUpdate) -> dict[int, Handle]:
        """Index of a group -> handle of :class:`EntropyArrays`, of this rank's groups."""
        arrays = fetch_all([group.arrays for group in groups.values()], timeout_s=self._settings.learner.timeout_s, stage=STAGE,
                           what=f"rollout arrays of {len(groups)} groups")
        sequences: dict[SampleKey, tuple[np.ndarray, np.ndarray]] = {}
        for (index, group), record in zip(groups.items(), arrays, strict=True):
            prompt, cuts = np.asarray(group.prompt.token_ids, np.int64), np.cumsum(group.response_lengths)[:-1]
            sequences |= {(index, i): (prompt, ids) for i, ids in enumerate(np.split(record.token_ids, cuts))}
        entropies = self.worker.entropies(sequences, plan)
        records = [EntropyArrays(np.concatenate([entropies[index, i] for i in range(len(group.response_lengths))]))
                   for index, group in groups.items()]
        return dict(zip(groups, store_all(records), strict=True))

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

    def export(self, folder: str) -> None:
        self.worker.export(Path(folder))


class LearnerPool(RankPool):
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
        super().__init__(role=STAGE, run_id=run_id, actor=LearnerActor, settings=settings, actor_options=actor_options)
        self._learner, self._cokl = settings.learner, settings.objective.cokl
        self._max_staleness, self._current_version = max_staleness, current_version

    def update(
        self, groups: Sequence[TrainingGroup], *, step: int, kl_coefficient: float = 1.0,
        reference_samples: Sequence[ReferenceSamples] = (),
    ) -> Update:
        """All optimizer steps of loop iteration ``step``; ``kl_coefficient`` is the adaptive factor of both betas.
        ``reference_samples`` (of the groups' prompts, or of anchor prompts) take part in a CoKL term alone.

        Raises:
            StaleRollout: a group older than the bound allows.
            NonFiniteLoss: weights unchanged by the update concerned.
        """
        self._refuse_stale(groups)
        plans = plan_updates(
            [lengths_of(group) for group in groups], num_ranks=len(self.ranks), updates_per_step=self._learner.updates_per_step,
            max_tokens_per_micro_batch=self._learner.max_tokens_per_micro_batch,
        )
        cokl = None if self._cokl.beta == 0 else plan_cokl(
            plans, groups, reference_samples, cokl=self._cokl, num_ranks=len(self.ranks),
            capacity=self._learner.max_tokens_per_micro_batch)
        refs = {}
        for rank, (name, actor) in enumerate(self.ranks.items()):
            own = {index: groups[index] for plan in plans for index in plan.groups[rank]}
            refs[name] = actor.update.remote(own, [plan.for_rank(rank) for plan in plans], step, kl_coefficient,
                                             None if cokl is None else (cokl.for_rank(rank), cokl.reference[rank]))
        results = self.wait(refs, f"updating at step {step}")
        return next(iter(results.values()))

    def entropies(self, groups: Sequence[RolloutGroup]) -> list[Handle]:
        """Entropies of the present weights on every response token: for each group a handle of :class:`EntropyArrays`, in order.
        One forward pass, dealt to the ranks as an update is."""
        lengths = [GroupLengths(len(group.prompt.token_ids), group.response_lengths, (0,) * len(group.response_lengths),
                                (True,) * len(group.response_lengths)) for group in groups]
        plan, = plan_updates(lengths, num_ranks=len(self.ranks), updates_per_step=1,
                             max_tokens_per_micro_batch=self._learner.max_tokens_per_micro_batch)
        refs = {name: actor.entropies.remote({index: groups[index] for index in plan.groups[rank]}, plan.for_rank(rank))
                for rank, (name, actor) in enumerate(self.ranks.items())}
        found: dict[int, Handle] = {}
        for part in self.wait(refs, f"taking the policy's entropies of {len(groups)} groups").values():
            found |= part
        return [found[index] for index in range(len(groups))]

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

    def export(self, folder: Path) -> None:
        self.all(lambda rank: rank.export.remote(str(folder)), f"exporting to {folder}")
