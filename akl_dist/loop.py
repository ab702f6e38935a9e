"""The training loop, top to bottom. Stages are the Protocols of ``contract.stages``; records pass between them.

Waits for: each stage in turn, within that stage's own deadline. Unblocked by: the stage's pool, or its error.
A feature is another implementation of a stage, not a branch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from akl_dist.config.schema import Config
from akl_dist.contract.records import JudgedGroup, Prompt, RolloutGroup, Sampling, TrainingGroup
from akl_dist.contract.stages import CriticStage, LearnerStage, ReferenceStage, RolloutStage, VerifyStage, WeightSyncStage
from akl_dist.drawing import PromptTaker, draw
from akl_dist.objective.shaping import adapted_coefficient
from akl_dist.spans import Spans
from akl_dist.summaries import (
    Evaluation,
    objective_metrics,
    roles_metrics,
    rollout_metrics,
    source_metrics,
    summarise_evaluation,
    verify_metrics,
    weight_sync_metrics,
)
from akl_dist.training_batch import overlong_metrics, training_groups


@dataclass(frozen=True)
class Progress:
    """Absolute counters; what a resume restores. ``step`` is the last finished one."""

    step: int = 0
    policy_version: int = 0
    optimizer_steps: int = 0
    kl_coefficient: float = 1.0  # adaptive factor of both betas in the next step
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

    def evaluation_done(self, progress: Progress, rollouts: Sequence[RolloutGroup], judged: Sequence[JudgedGroup]) -> None: ...


@dataclass(frozen=True)
class Stages:
    rollout: RolloutStage
    verify: VerifyStage
    reference: ReferenceStage
    learner: LearnerStage
    weight_sync: WeightSyncStage
    critic: CriticStage | None = None  # gives every token its own advantage; None = advantages of whole responses


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
        del groups  # as long as a handle is held, the store keeps its arrays: the next step's need the room
        if progress.step == config.steps or due(progress.step, config.checkpoint.every) or run.stop_requested():
            run.save(progress)
    if run.evaluation_prompts and progress.step == config.steps and progress.evaluations["last"].step != progress.step:
        progress = evaluated(run, progress)
    return progress


def one_step(run: Run, progress: Progress) -> tuple[Progress, dict[str, float], list[TrainingGroup]]:
    """One loop iteration: rollout to sync. Graders work while the reference scores."""
    config, stages, step, spans = run.config, run.stages, progress.step + 1, Spans()
    how, longest = sampling(run, config.rollout.group_size, ("train", config.seed, step)), config.rollout.max_response_tokens
    drawing = draw(run.prompts, stages.rollout, stages.verify, how, spans, count=config.rollout.prompts_per_step,
                   rounds=config.rollout.dynamic_sampling_rounds)
    rollouts = drawing.rollouts
    with spans.measure("reference"):
        reference = stages.reference.score(rollouts)
    with spans.measure("verify"):
        judged = drawing.judged()
        labelled = stages.verify.label(rollouts, judged, reference)
    groups, critic_metrics = appraised(stages, training_groups(labelled, config.objective, max_tokens=longest), step, spans)
    with spans.measure("learner"):
        update = stages.learner.update(groups, step=step, kl_coefficient=progress.kl_coefficient)
    with spans.measure("weight_sync"):
        report = stages.weight_sync.sync(progress.policy_version + 1, rollouts[:config.weight_sync.probe_sequences])
    metrics: dict[str, float] = {"policy_version": report.policy_version}
    metrics |= rollout_metrics(rollouts, seconds=spans.seconds["rollout"], discarded=drawing.metrics)
    metrics |= verify_metrics([*judged, *drawing.left_out]) | overlong_metrics(labelled, config.objective, max_tokens=longest)
    metrics |= source_metrics(rollouts, judged) | roles_metrics(labelled) | objective_metrics(groups) | dict(critic_metrics)
    metrics |= dict(update.metrics) | weight_sync_metrics(report)
    progress = replace(progress, step=step, policy_version=report.policy_version,
                       optimizer_steps=progress.optimizer_steps + update.optimizer_steps,
                       kl_coefficient=next_kl_coefficient(config, progress.kl_coefficient, update.metrics))
    return progress, metrics | spans.metrics(), groups


def appraised(
    stages: Stages, groups: list[TrainingGroup], step: int, spans: Spans
) -> tuple[list[TrainingGroup], Mapping[str, float]]:
    """The groups with the critic's advantages, and its metrics; as they are where no critic trains."""
    if stages.critic is None:
        return groups, {}
    with spans.measure("critic"):
        appraisal = stages.critic.appraise(groups, step=step)
    return appraisal.groups, appraisal.metrics


def next_kl_coefficient(config: Config, coefficient: float, metrics: Mapping[str, float]) -> float:
    """The adaptive factor of both betas after a step: towards ``objective.kl.adaptive_target`` by the step's k3 estimate of
    KL(policy || reference); unchanged without a target, or where nothing was measured (no token trained)."""
    kl, measured = config.objective.kl, metrics.get("objective/kl_value_k3")
    if kl.adaptive_target is None or measured is None:
        return coefficient
    return adapted_coefficient(coefficient, kl=measured, target=kl.adaptive_target, horizon=kl.adaptive_horizon)


def evaluated(run: Run, progress: Progress) -> Progress:
    """avg@k on the held-out problems with the training engines, at the training temperature, same seeds every time."""
    config, stages = run.config, run.stages
    key = ("evaluate", config.evaluate.seed)
    verdicts = stages.verify.stream()
    rollouts = stages.rollout.sample(run.evaluation_prompts, sampling(run, config.evaluate.samples, key), verdicts.add)
    ticket = verdicts.ticket(rollouts)
    reference = stages.reference.score(rollouts)
    judged = stages.verify.collect(ticket)
    evaluation = summarise_evaluation(
        rollouts, judged, reference, step=progress.step, policy_version=progress.policy_version, seed=config.evaluate.seed)
    progress = progress.with_evaluation(evaluation)
    run.recorder.evaluation_done(progress, rollouts, judged)
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
