"""The training loop, top to bottom. Stages are the Protocols of ``contract.stages``; records pass between them.

Waits for: each stage in turn, within that stage's own deadline. Unblocked by: the stage's pool, or its error.
A feature is another implementation of a stage, not a branch here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from akl_dist.config.schema import Config
from akl_dist.contract.records import Prompt, Sampling, TrainingGroup
from akl_dist.contract.stages import LearnerStage, ReferenceStage, RolloutStage, VerifyStage, WeightSyncStage
from akl_dist.spans import Spans
from akl_dist.summaries import (
    Evaluation,
    objective_metrics,
    roles_metrics,
    rollout_metrics,
    summarise_evaluation,
    verify_metrics,
    weight_sync_metrics,
)
from akl_dist.training_batch import training_groups


class PromptTaker(Protocol):
    """Where prompts come from; its position is part of a checkpoint."""

    def take(self, n: int) -> list[Prompt]: ...

    def state(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Progress:
    """Absolute counters; what a resume restores. ``step`` is the last finished one."""

    step: int = 0
    policy_version: int = 0
    optimizer_steps: int = 0
    evaluations: dict[str, Evaluation] = field(default_factory=dict)  # initial, best, last

    def with_evaluation(self, evaluation: Evaluation) -> Progress:
        seen = dict(self.evaluations)
        seen.setdefault("initial", evaluation)
        if "best" not in seen or evaluation.accuracy > seen["best"].accuracy:
            seen["best"] = evaluation
        seen["last"] = evaluation
        return replace(self, evaluations=seen)


class Recorder(Protocol):
    """Where a finished step goes: metrics file, TensorBoard, rollout dump, console."""

    def step_done(self, progress: Progress, metrics: dict[str, float], groups: Sequence[TrainingGroup]) -> None: ...

    def evaluation_done(self, progress: Progress) -> None: ...


@dataclass(frozen=True)
class Stages:
    rollout: RolloutStage
    verify: VerifyStage
    reference: ReferenceStage
    learner: LearnerStage
    weight_sync: WeightSyncStage


@dataclass(frozen=True)
class Run:
    """Everything the loop needs besides its progress."""

    config: Config
    stages: Stages
    prompts: PromptTaker
    evaluation_prompts: Sequence[Prompt]
    probe_prompts: Sequence[Prompt]
    end_ids: tuple[int, ...]
    recorder: Recorder
    save: Callable[[Progress], None]
    stop_requested: Callable[[], bool]


def train(run: Run, progress: Progress) -> Progress:
    """Train until ``config.steps`` are done or a stop is requested; a step that has begun is always finished.

    The weights are proven equal between learner and engines before the first rollout (``first_sync``) and after every step.
    """
    config = run.config
    if run.stop_requested():
        return progress
    first_sync(run, progress)
    if run.evaluation_prompts and not progress.evaluations:
        progress = evaluated(run, progress)
    while progress.step < config.steps and not run.stop_requested():
        progress, metrics, groups = one_step(run, progress)
        if run.evaluation_prompts and due(progress.step, config.evaluate.every):
            progress = evaluated(run, progress)
            metrics |= progress.evaluations["last"].metrics()
        run.recorder.step_done(progress, metrics, groups)
        if progress.step == config.steps or due(progress.step, config.checkpoint.every) or run.stop_requested():
            run.save(progress)
    if run.evaluation_prompts and progress.step == config.steps and progress.evaluations["last"].step != progress.step:
        progress = evaluated(run, progress)
    return progress


def one_step(run: Run, progress: Progress) -> tuple[Progress, dict[str, float], list[TrainingGroup]]:
    """One loop iteration: rollout to sync. Graders work while the reference scores."""
    config, stages, step, spans = run.config, run.stages, progress.step + 1, Spans()
    with spans.measure("rollout"):
        prompts = run.prompts.take(config.rollout.prompts_per_step)
        rollouts = stages.rollout.sample(prompts, sampling(run, config.rollout.group_size, ("train", config.seed, step)))
    ticket = stages.verify.submit(rollouts)
    with spans.measure("reference"):
        reference = stages.reference.score(rollouts)
    with spans.measure("verify"):
        judged = stages.verify.collect(ticket)
        labelled = stages.verify.label(rollouts, judged, reference)
    groups = training_groups(labelled, normalize_std=config.objective.normalize_std)
    with spans.measure("learner"):
        update = stages.learner.update(groups, step=step)
    with spans.measure("weight_sync"):
        report = stages.weight_sync.sync(progress.policy_version + 1, rollouts[:config.weight_sync.probe_sequences])
    metrics: dict[str, float] = {"policy_version": report.policy_version}
    metrics |= rollout_metrics(rollouts, seconds=spans.seconds["rollout"]) | verify_metrics(judged)
    metrics |= roles_metrics(labelled) | objective_metrics(groups) | dict(update.metrics) | weight_sync_metrics(report)
    progress = replace(progress, step=step, policy_version=report.policy_version,
                       optimizer_steps=progress.optimizer_steps + update.optimizer_steps)
    return progress, metrics | spans.metrics(), groups


def evaluated(run: Run, progress: Progress) -> Progress:
    """avg@k on the held-out problems with the training engines, at the training temperature, same seeds every time."""
    config, stages = run.config, run.stages
    key = ("evaluate", config.evaluate.seed)
    rollouts = stages.rollout.sample(run.evaluation_prompts, sampling(run, config.evaluate.samples, key))
    ticket = stages.verify.submit(rollouts)
    reference = stages.reference.score(rollouts)
    evaluation = summarise_evaluation(
        rollouts, stages.verify.collect(ticket), reference, step=progress.step, policy_version=progress.policy_version,
        seed=config.evaluate.seed,
    )
    progress = progress.with_evaluation(evaluation)
    run.recorder.evaluation_done(progress)
    return progress


def first_sync(run: Run, progress: Progress) -> None:
    """Bring the learner's weights to the engines and compare log-probs before anything is sampled for training.

    On a fresh run both loaded the same files, so this is the step-0 gate; on a resumed run it restores the engines.
    """
    drawn = run.stages.rollout.sample(run.probe_prompts, sampling(run, 1, ("probe", run.config.seed)))
    run.stages.weight_sync.sync(progress.policy_version, drawn)


def sampling(run: Run, group_size: int, seed_key: tuple[int | str, ...]) -> Sampling:
    rollout = run.config.rollout
    return Sampling(group_size=group_size, temperature=rollout.temperature,
                    max_response_tokens=rollout.max_response_tokens, end_ids=run.end_ids, seed_key=seed_key)


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
