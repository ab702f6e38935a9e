"""Critic on Ray: an actor per ZeRO-3 rank. Each rank fetches the token ids of its own groups and stores their advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from akl_dist.cluster.gather import fetch_all, store_all
from akl_dist.contract.records import Appraisal, CriticArrays, Handle, TrainingGroup
from akl_dist.critic.batch import ValueSample, mean_advantage, samples_of
from akl_dist.critic.worker import CriticWorker
from akl_dist.objective import mean_and_deviation
from akl_dist.zero3.planning import RankUpdate, SampleKey, lengths_of, plan_updates
from akl_dist.zero3.pool import RankActor, RankPool, RankSettings

STAGE = "critic"


@dataclass(frozen=True)
class CriticSettings(RankSettings):
    """Attributes:
    clip: window of the value loss; None = unclipped.
    gamma, lam: of the generalized advantages.
    whiten: advantages of a step to mean 0 and variance 1 over its tokens.
    """

    clip: float | None
    gamma: float
    lam: float
    whiten: bool


@dataclass(frozen=True)
class RankReport:
    """One rank's groups: handle of each group's :class:`CriticArrays`, mean advantage of each of its responses; moments float64
    [3] of the rank's advantages; metrics of the whole step."""

    handles: dict[int, Handle]
    means: dict[int, tuple[float, ...]]
    moments: np.ndarray
    metrics: dict[str, float]


class CriticActor(RankActor):
    """One rank in a process of its own."""

    @property
    def worker(self) -> CriticWorker:
        return super().worker

    def make_worker(self, rendezvous: tuple[str, int]) -> CriticWorker:
        settings: CriticSettings = self._settings
        return CriticWorker(
            model_path=settings.model_path, dtype=settings.dtype, attention=settings.attention, rank=self._rank,
            world_size=self._world_size, master_addr=rendezvous[0], master_port=rendezvous[1], device=settings.device,
            num_threads=settings.learner.num_threads, learner=settings.learner, clip=settings.clip, gamma=settings.gamma,
            lam=settings.lam, seed=settings.seed, timeout_s=settings.learner.timeout_s, failures=Path(settings.failures),
            store=self._store,
        )

    def appraise(self, groups: Mapping[int, TrainingGroup], plans: Sequence[RankUpdate], step: int) -> RankReport:
        rollouts = fetch_all([group.labelled.rollout.arrays for group in groups.values()], stage=STAGE,
                             timeout_s=self._settings.learner.timeout_s, what=f"rollout arrays of {len(groups)} groups")
        samples: dict[SampleKey, ValueSample] = {}
        for (index, group), rollout in zip(groups.items(), rollouts, strict=True):
            samples |= samples_of(index, group, rollout)
        appraisal = self.worker.appraise(samples, plans, step=step)
        arrays = {index: _group_arrays(index, group, appraisal.advantages) for index, group in groups.items()}
        handles = store_all([CriticArrays(np.concatenate(pieces)) for pieces in arrays.values()])
        means = {index: tuple(mean_advantage(samples.get((index, s)), piece) for s, piece in enumerate(pieces))
                 for index, pieces in arrays.items()}
        return RankReport(dict(zip(arrays, handles, strict=True)), means, appraisal.moments, appraisal.metrics)


def _group_arrays(index: int, group: TrainingGroup, advantages: Mapping[SampleKey, np.ndarray]) -> list[np.ndarray]:
    """The advantages of each response of a group; zeros for one that does not train."""
    lengths = group.labelled.rollout.response_lengths
    return [advantages.get((index, s), np.zeros(n, np.float32)) for s, n in enumerate(lengths)]


class CriticPool(RankPool):
    """The critic: ``len(actor_options)`` ranks named ``critic/<run id>/<rank>``.

    Consumes training groups whose ``advantages`` are rewards, gives them back with an advantage per token. Waits for the ranks
    alone; each call has the learner's deadline.
    """

    def __init__(self, *, run_id: str, settings: CriticSettings, actor_options: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(role=STAGE, run_id=run_id, actor=CriticActor, settings=settings, actor_options=actor_options)
        self._settings = settings

    def appraise(self, groups: Sequence[TrainingGroup], *, step: int) -> Appraisal:
        """Advantages of every token, then the critic's own updates on the same groups.

        Raises:
            NonFiniteLoss: weights unchanged by the update concerned.
        """
        learner = self._settings.learner
        plans = plan_updates(
            [lengths_of(group) for group in groups], num_ranks=len(self.ranks), updates_per_step=learner.updates_per_step,
            max_tokens_per_micro_batch=learner.max_tokens_per_micro_batch,
        )
        refs = {}
        for rank, (name, actor) in enumerate(self.ranks.items()):
            own = {index: groups[index] for plan in plans for index in plan.groups[rank]}
            refs[name] = actor.appraise.remote(own, [plan.for_rank(rank) for plan in plans], step)
        return combined(groups, list(self.wait(refs, f"appraising at step {step}").values()), whiten=self._settings.whiten)


def combined(groups: Sequence[TrainingGroup], reports: Sequence[RankReport], *, whiten: bool) -> Appraisal:
    """The groups with their advantages, whitened with the moments of all ranks; a group of no rank has nothing that trains."""
    moments = torch.from_numpy(np.sum([report.moments for report in reports], axis=0))
    mean, deviation = mean_and_deviation(moments)
    shift, scale = (mean, deviation) if whiten else (0.0, 1.0)
    handles = {index: handle for report in reports for index, handle in report.handles.items()}
    means = {index: values for report in reports for index, values in report.means.items()}
    out = [
        replace(
            group, token_advantages=handles.get(index), advantage_mean=shift, advantage_deviation=scale,
            advantages=tuple((value - shift) / scale if trains else 0.0 for value, trains in zip(
                means.get(index, group.advantages), group.trains, strict=True)))
        for index, group in enumerate(groups)
    ]
    return Appraisal(out, {**reports[0].metrics, "critic/advantage_mean": mean, "critic/advantage_deviation": deviation})
