"""Dynamic sampling by hand: which groups keep their slots, what is counted, and that it ends."""

from __future__ import annotations

import dataclasses

import pytest

from akl_dist.config.schema import RolloutConfig
from akl_dist.contract.records import JudgedGroup, Prompt, RolloutGroup, Sampling, Status, Verdict
from akl_dist.data.source import PromptSource
from akl_dist.drawing import draw, has_spread
from akl_dist.loop import Progress, train
from akl_dist.spans import Spans
from tests.loop.test_loop import PROMPTS, Stream, World, config

SAMPLING = Sampling(group_size=2, temperature=1.0, max_response_tokens=9, end_ids=(0,), seed_key=("train", 7, 3))
STATUSES = {"+": Status.OK, "-": Status.WRONG, "0": Status.NO_ANSWER, "?": Status.TIMEOUT}


def judged(name: str, outcomes: str) -> JudgedGroup:
    return JudgedGroup(name, tuple(Verdict(STATUSES[o]) for o in outcomes), (0,) * len(outcomes), None)


class Table:
    """Prompt source, engines and graders: prompt i has the i-th outcomes and i + 1 tokens a response."""

    def __init__(self, *outcomes: str) -> None:
        self.outcomes = {f"s/{i}": o for i, o in enumerate(outcomes)}
        self.prompts = [Prompt(name, "s", "", (1,), "1") for name in self.outcomes]
        self.position, self.seeds, self.asked, self.waiting, self.earlier = 0, [], [], [], []
        self.streams, self.early = [], []

    def take(self, n):
        taken = [self.prompts[(self.position + i) % len(self.prompts)] for i in range(n)]
        self.position += n
        return taken

    def state(self):
        return {"position": self.position}

    def sample(self, prompts, sampling, finished):
        self.seeds.append(sampling.seed_key)
        self.asked.append([p.prompt_id for p in prompts])
        lengths = {p.prompt_id: int(p.prompt_id[2:]) + 1 for p in prompts}
        groups = [RolloutGroup(p, (lengths[p.prompt_id],) * 2, ("stop",) * 2, 0, "e", None) for p in prompts]
        for group in reversed(groups):  # the last prompt's ends first
            self.early.append([group.prompt.prompt_id, len(self.streams[-1].added)])
            finished([group])
        return groups

    def stream(self):
        self.streams.append(Stream(self.submit))
        return self.streams[-1]

    def submit(self, groups):
        self.waiting.append(groups)
        return groups

    def collect(self, ticket, earlier=()):
        self.waiting.remove(ticket)
        self.earlier.append(len(earlier))
        return [judged(g.prompt.prompt_id, self.outcomes[g.prompt.prompt_id]) for g in ticket]

    def label(self, groups, judged, reference):
        raise AssertionError("drawing labels nothing")

    def draw(self, *, count, rounds):
        drawing = draw(self, self, self, SAMPLING, Spans(), count=count, rounds=rounds)
        groups, verdicts = drawing.rollouts, drawing.judged()
        assert [g.prompt.prompt_id for g in groups] == [j.prompt_id for j in verdicts]
        return [g.prompt.prompt_id for g in groups], drawing


@pytest.mark.parametrize(("outcomes", "spread"), [
    ("+-", True), ("+0", True), ("+-?", True), ("++", False), ("--", False), ("-0", False), ("+?", False), ("??", False)])
def test_spread_of_the_raw_outcome(outcomes, spread):
    assert has_spread(judged("a", outcomes)) is spread


def test_without_rounds_the_graders_go_on_working():
    table = Table("++", "+-")
    drawing = draw(table, table, table, SAMPLING, Spans(), count=2, rounds=0)
    assert len(table.waiting) == 1, "judged() alone waits for them"
    assert [g.prompt_id for g in drawing.judged()] == ["s/0", "s/1"] and not table.waiting
    assert drawing.metrics == {} and drawing.left_out == () and table.seeds == [("train", 7, 3)]


def test_groups_are_judged_as_they_end():
    """Prompt s/2 ends first; it is with the graders before s/1 has ended. The verdicts come in the order of the prompts."""
    table = Table("+-", "++", "-+")
    names, _ = table.draw(count=3, rounds=0)
    assert table.early == [["s/2", 0], ["s/1", 1], ["s/0", 2]] and names == ["s/0", "s/1", "s/2"]
    names, _ = (table := Table("+-", "++", "-+")).draw(count=2, rounds=1)
    assert len(table.streams) == 2 and names == ["s/0", "s/2"], "further draws are streamed, too, as batches of their own"


def test_slots_are_refilled_in_order():
    """s/1, s/2, s/3 have no spread. Round 1 draws s/4, s/5, s/6: s/4 takes slot 1, s/6 slot 2; round 2 draws s/7 in vain."""
    table = Table("+-", "++", "--", "+?", "-+", "--", "+-", "++", "+-")
    names, drawing = table.draw(count=4, rounds=2)
    assert names == ["s/0", "s/4", "s/6", "s/3"], "the last slot keeps what it had"
    assert table.asked == [["s/0", "s/1", "s/2", "s/3"], ["s/4", "s/5", "s/6"], ["s/7"]]
    assert table.seeds == [("train", 7, 3), ("train", 7, 3, 1), ("train", 7, 3, 2)]
    assert [g.prompt_id for g in drawing.left_out] == ["s/1", "s/5", "s/2", "s/7"]
    assert drawing.metrics == {"rollout/dynamic_rounds": 2, "rollout/dynamic_replaced_groups": 2,
                               "rollout/dynamic_zero_spread_left": 1, "rollout/discarded_tokens": 2 * (2 + 6 + 3 + 8)}
    assert table.earlier == [0, 4, 7], "the bound on missing verdicts is over the whole step"
    assert table.position == 8, "one prompt more is left for the next step"


def test_it_stops_when_every_slot_is_filled():
    names, drawing = (table := Table("++", "+-", "-+", "+-")).draw(count=2, rounds=5)
    assert names == ["s/2", "s/1"] and len(table.seeds) == 2 and drawing.metrics["rollout/dynamic_rounds"] == 1
    names, drawing = (table := Table("+-", "+-", "++")).draw(count=2, rounds=5)
    assert names == ["s/0", "s/1"] and table.position == 2 and set(drawing.metrics.values()) == {0}


@pytest.mark.parametrize("rounds", [1, 3])
def test_bounded_when_nothing_has_spread(rounds):
    table = Table(*["--"] * 20)
    names, drawing = table.draw(count=4, rounds=rounds)
    assert names == ["s/0", "s/1", "s/2", "s/3"] and len(table.seeds) == rounds + 1
    assert drawing.metrics["rollout/dynamic_zero_spread_left"] == 4 and drawing.metrics["rollout/dynamic_replaced_groups"] == 0


def test_a_prompt_is_drawn_once_a_step():
    """Three prompts for a batch of two: the source comes round, and what was seen is passed over."""
    table = Table("++", "--", "++")
    names, drawing = table.draw(count=2, rounds=9)
    assert table.asked == [["s/0", "s/1"], ["s/2"]] and names == ["s/0", "s/1"]
    assert drawing.metrics["rollout/dynamic_rounds"] == 1, "nothing was drawn in the other rounds"


def test_the_position_of_a_resumed_run():
    """The source's state after a step contains the further draws: the next step sees the same prompts either way."""
    prompts = [Prompt(f"s/{i}", "s", "", (1,), "1") for i in range(12)]
    table = Table(*["--"] * 12)

    def step(source):
        return draw(source, table, table, SAMPLING, Spans(), count=3, rounds=1).rollouts

    whole = PromptSource(prompts, seed=5)
    step(whole)
    resumed = PromptSource.from_state(prompts, whole.state())
    assert [g.prompt.prompt_id for g in step(resumed)] == [g.prompt.prompt_id for g in step(whole)]
    assert whole.position == 12 and resumed.state() == whole.state()


class Uneven(World):
    """Every prompt of an even number has a right and a wrong response; the others are solved by all. In order: 0, 1, 2, ..."""

    def take(self, n):
        self.position += n
        return PROMPTS[self.position - n:self.position]

    def collect(self, ticket, earlier=()):
        self.calls.append("collect")
        groups = []
        for group in ticket:
            first = Status.WRONG if int(group.prompt.prompt_id[2:]) % 2 == 0 else Status.OK
            groups.append(JudgedGroup(group.prompt.prompt_id, (Verdict(first), Verdict(Status.OK)), (1, 1), None))
        return groups

    def score(self, groups):
        self.scored = [g.prompt.prompt_id for g in groups]
        return super().score(groups)

    def update(self, groups, *, step, kl_coefficient):
        self.trained = groups
        return super().update(groups, step=step, kl_coefficient=kl_coefficient)


def test_the_loop_scores_and_trains_what_was_kept():
    world = Uneven()
    changed = config(steps=1, rollout=RolloutConfig(prompts_per_step=4, group_size=2, dynamic_sampling_rounds=2))
    train(world.run(changed), Progress())
    assert world.calls[2:] == [*["sample", "submit", "collect"] * 3, "score", "label", "update", "sync"]
    trained = [g.labelled.rollout.prompt.prompt_id for g in world.trained]
    assert trained == world.scored and len(trained) == 4, "the reference scores kept groups only"
    assert all(any(g.advantages) for g in world.trained)
    ((_, metrics),) = world.steps
    assert metrics["rollout/dynamic_zero_spread_left"] == 0 == metrics["objective/zero_spread_group_fraction"]
    assert metrics["rollout/discarded_tokens"] == 3 * 2 * 3, "three groups of two responses of three tokens"
    assert metrics["verify/accuracy"] == pytest.approx((4 * 0.5 + 3 * 1.0) / 7), "over everything drawn"
    assert metrics["rollout/tokens"] == 24


def test_negative_control_replacing_nothing():
    world = Uneven()
    train(world.run(dataclasses.replace(config(steps=1))), Progress())
    ((_, metrics),) = world.steps
    assert metrics["objective/zero_spread_group_fraction"] == 0.5 and "rollout/dynamic_rounds" not in metrics
