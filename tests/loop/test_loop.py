"""The loop itself, with small stand-ins for its stages: order, versions, stops, saves. No cluster, no engine."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest

from akl_dist.config.schema import CheckpointConfig, Config, EvaluateConfig, KLConfig, ObjectiveConfig, RolloutConfig
from akl_dist.contract.records import (
    Appraisal,
    JudgedGroup,
    LabelledGroup,
    Prompt,
    ReferenceGroup,
    RolloutGroup,
    Status,
    SyncReport,
    Update,
    Verdict,
)
from akl_dist.loop import Progress, Run, Stages, train

PROMPTS = [Prompt(f"s/{i}", "s", "", (1, 2), "1") for i in range(8)]


class Stream:
    """A batch under judgement: what was added while it was sampled must be the very groups that the ticket names."""

    def __init__(self, submit) -> None:
        self.submit, self.added = submit, []

    def add(self, groups):
        self.added += groups

    def ticket(self, order):
        assert sorted(map(id, self.added)) == sorted(map(id, order))
        return self.submit(order)


class World:
    """Every stage in one object; ``calls`` is what the loop asked for, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.version, self.position, self.seeds = 0, 0, []
        self.saved: list[Progress] = []
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.stop_after: int | None = None
        self.buckets = 1
        self.coefficients: list[float] = []
        self.measured: dict[str, float] = {}

    def take(self, n):
        self.position += n
        return [PROMPTS[(self.position + i) % len(PROMPTS)] for i in range(n)]

    def state(self):
        return {"position": self.position}

    def sample(self, prompts, sampling, finished=lambda groups: None):
        self.calls.append("sample")
        self.seeds.append(sampling.seed_key)
        size = sampling.group_size
        groups = [RolloutGroup(p, (3,) * size, ("stop",) * size, self.version, "e", None) for p in prompts]
        for group in reversed(groups):
            finished([group])
        return groups

    def stream(self):
        return Stream(self.submit)

    def submit(self, groups):
        self.calls.append("submit")
        return groups

    def collect(self, ticket, earlier=()):
        self.calls.append("collect")
        verdicts = {g.prompt.prompt_id: tuple(Verdict(Status.OK if i % 2 else Status.WRONG) for i in range(len(g.response_lengths)))
                    for g in ticket}
        return [JudgedGroup(name, v, (1,) * len(v), None) for name, v in verdicts.items()]

    def score(self, groups):
        self.calls.append("score")
        return [ReferenceGroup(g.prompt.prompt_id, (0.0,) * len(g.response_lengths), (0.0,) * len(g.response_lengths), None)
                for g in groups]

    def label(self, groups, judged, reference):
        self.calls.append("label")
        return [LabelledGroup(*parts, (1,) * len(parts[0].response_lengths), (1,) * 8, None)
                for parts in zip(groups, judged, reference, strict=True)]

    def update(self, groups, *, step, kl_coefficient):
        self.calls.append("update")
        self.coefficients.append(kl_coefficient)
        assert all(g.labelled.rollout.policy_version == self.version for g in groups), "on-policy"
        return Update(1, 0, {"learner/loss": 0.5} | self.measured)

    def sync(self, policy_version, probe):
        self.calls.append("sync")
        assert probe
        self.version = policy_version
        return SyncReport(policy_version, 0.0, self.buckets, self.buckets, 0.0, 0.0, 0.0)

    def step_done(self, progress, metrics, groups):
        self.steps.append((progress.step, metrics))
        if progress.step == self.stop_after:
            self.calls.append("stop")

    def evaluation_done(self, progress, rollouts, judged):
        assert [g.prompt.prompt_id for g in rollouts] == [g.prompt_id for g in judged]
        self.calls.append("evaluated")

    def run(self, config: Config, *, held_out=()) -> Run:
        stages = Stages(self, self, self, self, self)  # type: ignore[arg-type]
        return Run(config, stages, self, held_out, PROMPTS[:2], (0,), self, self.saved.append, lambda: "stop" in self.calls)


def config(**changes) -> Config:
    base = Config(steps=3, seed=7, rollout=RolloutConfig(prompts_per_step=4, group_size=2), evaluate=EvaluateConfig(samples=2))
    return dataclasses.replace(base, **changes)


def test_one_step_in_order_and_graders_overlap_the_reference():
    world = World()
    done = train(world.run(config(steps=1)), Progress())
    assert world.calls == ["sample", "sync", "sample", "submit", "score", "collect", "label", "update", "sync"]
    assert (done.step, done.policy_version, done.optimizer_steps) == (1, 1, 1)
    assert world.seeds[1] == ("train", 7, 1), "samples depend on the run seed and the step alone"


def test_a_critic_comes_before_the_learner_and_its_groups_are_trained_on():
    world = World()

    class Critic:
        def appraise(self, groups, *, step):
            world.calls.append("appraise")
            assert [g.advantages for g in groups] == [(0.0, 1.0)] * 4, "rewards, not advantages of a group"
            return Appraisal([dataclasses.replace(g, advantages=(-9.0, 9.0)) for g in groups], {"critic/value_loss": 0.25})

    run = world.run(config(steps=1, objective=ObjectiveConfig(advantage="gae")))
    stages = dataclasses.replace(run.stages, critic=Critic())  # type: ignore[arg-type]
    train(dataclasses.replace(run, stages=stages), Progress())
    assert world.calls[-4:] == ["label", "appraise", "update", "sync"]
    ((_, metrics),) = world.steps
    assert metrics["critic/value_loss"] == 0.25 and metrics["time/critic_s"] >= 0 and metrics["objective/advantage_max_abs"] == 9


def test_metrics_of_a_step():
    world = World()
    train(world.run(config(steps=1)), Progress())
    ((step, metrics),) = world.steps
    assert step == 1 and metrics["policy_version"] == 1 and metrics["verify/accuracy"] == 0.5
    for name in ("time/step_s", "time/rollout_s", "time/learner_s", "time/idle_fraction", "learner/loss",
                 "weight_sync/logprob_gap"):
        assert name in metrics
    assert 0 <= metrics["time/idle_fraction"] <= 1


def test_a_step_without_a_transfer_has_no_sync_metrics():
    world = World()
    world.buckets = 0
    done = train(world.run(config(steps=1)), Progress())
    ((_, metrics),) = world.steps
    assert not [name for name in metrics if name.startswith("weight_sync/")] and done.policy_version == 1


def test_evaluations_before_during_and_after_with_the_same_seeds():
    world = World()
    done = train(world.run(config(evaluate=EvaluateConfig(every=2, samples=2)), held_out=PROMPTS[4:]), Progress())
    assert {name: e.step for name, e in done.evaluations.items()} == {"initial": 0, "best": 0, "last": 3}
    assert [key for key in world.seeds if key[0] == "evaluate"] == [("evaluate", 1234)] * 3
    assert "evaluate/s/avg_at_2" in world.steps[1][1] and "evaluate/s/avg_at_2" not in world.steps[2][1]


def test_saves_when_due_and_at_the_end():
    world = World()
    train(world.run(config(steps=5, checkpoint=CheckpointConfig(every=2))), Progress())
    assert [p.step for p in world.saved] == [2, 4, 5]


def test_a_steps_groups_are_let_go_before_the_next_ones_are_sampled():
    """A handle that is held keeps its arrays in the store: two steps' arrays at once would halve the longest responses."""
    class Watching(World):
        def __init__(self):
            super().__init__()
            self.seen: list[weakref.ref] = []
            self.alive: list[int] = []

        def sample(self, prompts, sampling, finished=lambda groups: None):
            self.alive.append(sum(one() is not None for one in self.seen))
            return super().sample(prompts, sampling, finished)

        def step_done(self, progress, metrics, groups):
            self.seen += map(weakref.ref, [*groups, *(group.labelled.rollout for group in groups)])

    world = Watching()
    gc.disable()  # by counting alone, as in a run, where a collection comes when it comes
    try:
        train(world.run(config(steps=3), held_out=PROMPTS[4:]), Progress())
    finally:
        gc.enable()
    assert len(world.seen) == 3 * 8 and world.alive == [0] * 6, "of the probe, three steps and two evaluations"


def test_a_stop_finishes_the_step_and_saves():
    world = World()
    world.stop_after = 2
    done = train(world.run(config(steps=5)), Progress())
    assert done.step == 2 and [p.step for p in world.saved] == [2]


def test_resumed_goes_on_with_absolute_counters():
    world = World()
    world.version = 2
    done = train(world.run(config(steps=4)), Progress(step=2, policy_version=2, optimizer_steps=2))
    assert (done.step, done.policy_version, done.optimizer_steps) == (4, 4, 4)
    assert [s for s, _ in world.steps] == [3, 4]


ADAPTIVE = ObjectiveConfig(kl=KLConfig(adaptive_target=0.1, adaptive_horizon=2))


def test_the_adaptive_coefficient_follows_the_measured_kl():
    # KL .3 of .1 is 200 % too much, counted as 20 %: a factor 1 + .2 / 2; half the target is 50 % too little: 1 - .2 / 2.
    world = World()
    world.measured = {"objective/kl_value_k3": 0.3}
    done = train(world.run(config(steps=2, objective=ADAPTIVE)), Progress())
    assert world.coefficients == pytest.approx([1.0, 1.1]) and done.kl_coefficient == pytest.approx(1.21)
    world.measured = {"objective/kl_value_k3": 0.05}
    assert train(world.run(config(steps=3, objective=ADAPTIVE)), done).kl_coefficient == pytest.approx(1.21 * 0.9)
    world.measured = {}  # no token trained: nothing was measured
    assert train(world.run(config(steps=3, objective=ADAPTIVE)), done).kl_coefficient == done.kl_coefficient


def test_a_resumed_coefficient_goes_on_as_if_uninterrupted():
    whole, first, second = World(), World(), World()
    for world in (whole, first, second):
        world.measured = {"objective/kl_value_k3": 0.13}
    done = train(whole.run(config(steps=4, objective=ADAPTIVE)), Progress())
    half = train(first.run(config(steps=2, objective=ADAPTIVE)), Progress())
    second.version = half.policy_version
    assert train(second.run(config(steps=4, objective=ADAPTIVE)), half) == done
    assert first.coefficients + second.coefficients == whole.coefficients
    forgotten = dataclasses.replace(half, kl_coefficient=1.0)  # negative control: a checkpoint without the coefficient
    second.version = half.policy_version
    assert train(second.run(config(steps=4, objective=ADAPTIVE)), forgotten).kl_coefficient != done.kl_coefficient


def test_a_constant_coefficient_stays_one():
    world = World()
    world.measured = {"objective/kl_value_k3": 0.3}
    assert train(world.run(config(steps=2)), Progress()).kl_coefficient == 1.0 and world.coefficients == [1.0, 1.0]


def test_a_finished_run_only_syncs():
    world = World()
    done = train(world.run(config(steps=2)), Progress(step=2, policy_version=2))
    assert done.step == 2 and world.steps == [] and "update" not in world.calls


def test_best_is_the_highest_accuracy():
    world = World()
    done = train(world.run(config(steps=1), held_out=PROMPTS[4:]), Progress())
    lower = dataclasses.replace(done.evaluations["last"], accuracy=0.1, step=9)
    higher = dataclasses.replace(lower, accuracy=0.9, step=10)
    seen = done.with_evaluation(lower).with_evaluation(higher).evaluations
    assert (seen["initial"].step, seen["best"].step, seen["last"].step) == (0, 10, 10)
    with pytest.raises(dataclasses.FrozenInstanceError):
        done.step = 5  # type: ignore[misc]
