"""Which prompts are sampled from the reference and when, and what the learner is handed. Stand-ins for every stage."""

from __future__ import annotations

import dataclasses

import pytest

from akl_dist.cokl.stage import (
    Anchors,
    WithReferenceSamples,
    drawn_with,
    needs_reference_samples,
    prompts_of_run,
    sample_reference,
)
from akl_dist.config.schema import CoKLConfig, Config, ObjectiveConfig, RolloutConfig
from akl_dist.contract.records import (
    JudgedGroup,
    LabelledGroup,
    Prompt,
    ReferenceGroup,
    RolloutGroup,
    Sampling,
    Status,
    TrainingGroup,
    Update,
    Verdict,
)
from akl_dist.contract.reference_samples import ReferenceSamples
from akl_dist.data.source import PromptSource

PROMPTS = [Prompt(f"s/{i}", "s", "", (1, 2), "1") for i in range(10)]
HOW = Sampling(2, 1.0, 8, (0,), ("cokl", 0))


def config(**cokl) -> Config:
    objective = ObjectiveConfig(cokl=CoKLConfig(beta=0.1, estimator="paper", **cokl))
    return Config(objective=objective, rollout=RolloutConfig(prompts_per_step=3))


class World:
    """Engines, graders, reference and buffer in one; ``calls`` is what was asked for, in order."""

    def __init__(self, known=()) -> None:
        self.calls: list[str] = []
        self.known, self.sampled = set(known), []

    def prompt_ids(self):
        return set(self.known)

    def sample(self, prompts, sampling):
        assert sampling is HOW
        self.calls.append(f"sample {len(prompts)}")
        self.sampled += [p.prompt_id for p in prompts]
        return [RolloutGroup(p, (3, 3), ("stop", "stop"), 0, "e", None) for p in prompts]

    def submit(self, groups):
        self.calls.append("submit")
        return groups

    def score(self, groups):
        self.calls.append("score")
        return [ReferenceGroup(g.prompt.prompt_id, (0.0, 0.0), (0.0, 0.0), None) for g in groups]

    def collect(self, ticket, earlier=()):
        self.calls.append("collect")
        return [JudgedGroup(g.prompt.prompt_id, (Verdict(Status.OK), Verdict(Status.WRONG)), (1, 0), None) for g in ticket]

    def add(self, rollouts, judged, reference):
        names = [[g.prompt.prompt_id for g in rollouts], [g.prompt_id for g in judged], [g.prompt_id for g in reference]]
        assert names[0] == names[1] == names[2]
        self.known |= set(names[0])
        return sum(verdict.status is Status.OK for group in judged for verdict in group.verdicts)

    def take(self, prompt_ids):
        return [ReferenceSamples(one, (1, 2), (3,), 2, None) for one in prompt_ids if one in self.known]


def fill(world: World, prompts, *, stop=lambda: False, per_draw: int = 4) -> list[str]:
    said: list[str] = []
    sample_reference(prompts, world, world, world, world, sampling=HOW, prompts_per_draw=per_draw, stop_requested=stop,
                     say=said.append)
    return said


def test_sampling_before_training():
    world = World()
    said = fill(world, PROMPTS)
    assert world.sampled == [p.prompt_id for p in PROMPTS]
    assert world.calls[:4] == ["sample 4", "submit", "score", "collect"]  # graders work while the reference scores
    assert [c for c in world.calls if c.startswith("sample")] == ["sample 4", "sample 4", "sample 2"]
    assert said == ["sampling the reference: 2 responses to each of 10 prompts",
                    "sampled the reference: 20 responses to 10 prompts, 50.0 % correct"]


def test_a_resumed_run_draws_only_what_is_missing():
    world = World(known={"s/0", "s/2"})
    fill(world, PROMPTS[:4])
    assert world.sampled == ["s/1", "s/3"]
    again = World(known=world.known)
    assert fill(again, PROMPTS[:4]) == ["reference samples of 4 prompts are there already"]
    assert again.calls == []


def test_a_stop_ends_it_after_the_draw_under_way():
    world = World()
    assert fill(world, PROMPTS, stop=lambda: len(world.known) >= 4) == ["sampling the reference: 2 responses to each of 10 prompts"]
    assert world.known == {p.prompt_id for p in PROMPTS[:4]}, "what was drawn is kept"


def test_prompts_of_the_run_are_those_that_training_takes():
    source = PromptSource(PROMPTS, seed=5)
    source.take(3)
    position = source.state()
    found = prompts_of_run(PROMPTS, position, config(), steps_left=2)
    assert source.state() == position, "the run's own source is left alone"
    assert [p.prompt_id for p in found] == [p.prompt_id for _ in range(2) for p in source.take(3)]


def test_prompts_of_a_long_run_are_the_data_set_once():
    found = prompts_of_run(PROMPTS, PromptSource(PROMPTS, seed=5).state(), config(), steps_left=10**6)
    assert sorted(p.prompt_id for p in found) == sorted(p.prompt_id for p in PROMPTS)


def test_dynamic_sampling_may_take_more_prompts():
    position = PromptSource(PROMPTS, seed=5).state()
    dynamic = dataclasses.replace(config(), rollout=RolloutConfig(prompts_per_step=3, dynamic_sampling_rounds=1))
    assert [len(prompts_of_run(PROMPTS, position, c, steps_left=1)) for c in (config(), dynamic)] == [3, 6]


def test_anchors_are_a_function_of_the_step():
    anchors = Anchors(PROMPTS, seed=2, per_step=4)
    steps = [anchors.of_step(step) for step in range(1, 6)]
    assert [len(set(step)) for step in steps] == [4] * 5
    assert steps[:2] == [Anchors(PROMPTS, seed=2, per_step=4).of_step(step) for step in (1, 2)]
    assert {one for step in steps for one in step} == {p.prompt_id for p in PROMPTS}  # 20 places go round twice
    assert sorted(one for step in steps for one in step) == sorted([p.prompt_id for p in PROMPTS] * 2)
    assert [p.prompt_id for p in anchors.of_run(2, 3)] == list(dict.fromkeys(steps[1] + steps[2]))
    assert len(Anchors(PROMPTS[:3], seed=2, per_step=4).of_step(9)) == 3
    assert Anchors(PROMPTS, seed=3, per_step=4).of_step(1) != steps[0]


class Learner:
    def update(self, groups, *, step, kl_coefficient, reference_samples):
        self.handed = [one.prompt_id for one in reference_samples]
        assert kl_coefficient == 0.5
        return Update(1, 0)


def group(name: str) -> TrainingGroup:
    prompt = Prompt(name, "s", "", (1, 2), "1")
    rollout, judged = RolloutGroup(prompt, (3,), ("stop",), 0, "e", None), JudgedGroup(name, (Verdict(Status.OK),), (1,), None)
    labelled = LabelledGroup(rollout, judged, ReferenceGroup(name, (0.0,), (0.0,), None), (1,), (1,) * 8, None)
    return TrainingGroup(labelled, (0.0,), (True,))


def test_the_learner_gets_the_samples_of_the_steps_prompts_or_anchors():
    world, learner = World(known={p.prompt_id for p in PROMPTS}), Learner()
    groups = [group("s/3"), group("s/1"), group("new")]
    WithReferenceSamples(learner, world, None).update(groups, step=2, kl_coefficient=0.5)
    assert learner.handed == ["s/3", "s/1"]  # never sampled: no reference responses, so no term
    anchors = Anchors(PROMPTS, seed=2, per_step=2)
    WithReferenceSamples(learner, world, anchors).update(groups, step=3, kl_coefficient=0.5)
    assert learner.handed == anchors.of_step(3)


@pytest.mark.parametrize(("beta", "estimator", "needed"), [(0.1, "paper", True), (0.1, "reference_buffer", True),
                                                           (0.1, "group", False), (0.0, "paper", False)])  # fmt: skip
def test_who_needs_reference_samples(beta, estimator, needed):
    assert needs_reference_samples(Config(objective=ObjectiveConfig(cokl=CoKLConfig(beta=beta, estimator=estimator)))) is needed


def test_samples_depend_on_what_they_are_drawn_with():
    one = drawn_with(config(), "m")
    others = [drawn_with(config(), "n"), drawn_with(config(reference_samples=5), "m"),
              drawn_with(dataclasses.replace(config(), seed=1), "m"),
              drawn_with(dataclasses.replace(config(), rollout=RolloutConfig(temperature=0.5)), "m")]
    assert all(other != one for other in others)
    assert drawn_with(dataclasses.replace(config(), steps=99), "m") == one
