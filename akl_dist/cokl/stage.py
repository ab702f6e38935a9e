"""Which prompts are sampled from the reference, the sampling before training, and the learner stage that gets the samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from akl_dist.config.schema import Config
from akl_dist.config.validate_cokl import FROM_REFERENCE
from akl_dist.contract.records import JudgedGroup, Prompt, ReferenceGroup, RolloutGroup, Sampling, TrainingGroup, Update
from akl_dist.contract.reference_samples import ReferenceSamples
from akl_dist.contract.stages import ReferenceStage, RolloutStage, VerifyStage
from akl_dist.data.mixture import source_from_state
from akl_dist.data.source import PromptSource


class Buffer(Protocol):
    """What this module asks of the buffer; :class:`~akl_dist.cokl.pool.BufferPool` on Ray."""

    def prompt_ids(self) -> set[str]: ...

    def add(
        self, rollouts: Sequence[RolloutGroup], judged: Sequence[JudgedGroup], reference: Sequence[ReferenceGroup]
    ) -> int: ...

    def take(self, prompt_ids: Sequence[str]) -> list[ReferenceSamples]: ...


class SampleTaker(Protocol):
    """A learner that takes reference samples beside a step's groups."""

    def update(
        self, groups: Sequence[TrainingGroup], *, step: int, kl_coefficient: float,
        reference_samples: Sequence[ReferenceSamples],
    ) -> Update: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...

    def export(self, folder: Path) -> None: ...


def needs_reference_samples(config: Config) -> bool:
    return config.objective.cokl.beta > 0 and config.objective.cokl.estimator in FROM_REFERENCE


def drawn_with(config: Config, model_folder: str) -> dict[str, Any]:
    """What a reference sample depends on: samples drawn with something else are not this run's."""
    rollout, cokl = config.rollout, config.objective.cokl
    return {"model": model_folder, "dtype": rollout.dtype, "temperature": rollout.temperature, "seed": config.seed,
            "max_response_tokens": rollout.max_response_tokens, "samples": cokl.reference_samples}


class Anchors:
    """Anchor prompts of each step: as many as a step trains on, round and round through one fixed order. A function of the step
    alone, so that a resumed run takes the same ones."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, per_step: int) -> None:
        self._prompts = {prompt.prompt_id: prompt for prompt in prompts}
        self._order = PromptSource(prompts, seed=seed).order(0)
        self._per_step = min(per_step, len(self._order))

    def of_step(self, step: int) -> list[str]:
        first = (step - 1) * self._per_step
        return [self._order[(first + place) % len(self._order)] for place in range(self._per_step)]

    def of_run(self, first_step: int, last_step: int) -> list[Prompt]:
        """Every anchor prompt of these steps, once, in the order of first use."""
        ids = dict.fromkeys(one for step in range(first_step, last_step + 1) for one in self.of_step(step))
        return [self._prompts[one] for one in ids]


def prompts_of_run(prompts: Sequence[Prompt], position: Mapping[str, Any], config: Config, *, steps_left: int) -> list[Prompt]:
    """The prompts that the remaining steps will take, once each, in order; with dynamic sampling the most they may take.

    ``position`` is the state of the run's prompt source, which is left alone.
    """
    source = source_from_state(prompts, position)
    found: dict[str, Prompt] = {}
    for _ in range(steps_left * (1 + config.rollout.dynamic_sampling_rounds)):
        if len(found) == len(source):
            break
        found |= {prompt.prompt_id: prompt for prompt in source.take(config.rollout.prompts_per_step)}
    return list(found.values())


def sample_reference(
    prompts: Sequence[Prompt], buffer: Buffer, rollout: RolloutStage, verify: VerifyStage, reference: ReferenceStage, *,
    sampling: Sampling, prompts_per_draw: int, stop_requested: Callable[[], bool], say: Callable[[str], None],
) -> None:
    """Draw, judge, score and keep responses to the prompts that the buffer lacks. The engines must hold the reference's weights,
    as they do until the first sync. A stop request ends it after the draw under way; what was drawn is kept.

    Args:
        sampling: its seeds belong to prompts and samples, so a draw does not depend on what was drawn before.
        prompts_per_draw: bounds the responses in flight.
    """
    known = buffer.prompt_ids()
    missing = [prompt for prompt in prompts if prompt.prompt_id not in known]
    if not missing:
        say(f"reference samples of {len(prompts)} prompts are there already")
        return
    say(f"sampling the reference: {sampling.group_size} responses to each of {len(missing)} prompts")
    correct = drawn = 0
    for start in range(0, len(missing), prompts_per_draw):
        if stop_requested():
            return
        groups = rollout.sample(missing[start : start + prompts_per_draw], sampling)
        ticket = verify.submit(groups)
        scores = reference.score(groups)
        correct += buffer.add(groups, verify.collect(ticket), scores)
        drawn += sum(len(group.response_lengths) for group in groups)
    say(f"sampled the reference: {drawn} responses to {len(missing)} prompts, {100 * correct / drawn:.1f} % correct")


class WithReferenceSamples:
    """A learner stage that hands each step's reference samples to the learner: of the step's own prompts, or of its anchors."""

    def __init__(self, learner: SampleTaker, buffer: Buffer, anchors: Anchors | None) -> None:
        self._learner, self._buffer, self._anchors = learner, buffer, anchors

    def update(self, groups: Sequence[TrainingGroup], *, step: int, kl_coefficient: float) -> Update:
        own = [group.labelled.rollout.prompt.prompt_id for group in groups]
        samples = self._buffer.take(own if self._anchors is None else self._anchors.of_step(step))
        return self._learner.update(groups, step=step, kl_coefficient=kl_coefficient, reference_samples=samples)

    def save(self, folder: Path) -> None:
        self._learner.save(folder)

    def load(self, folder: Path) -> None:
        self._learner.load(folder)

    def export(self, folder: Path) -> None:
        self._learner.export(folder)
