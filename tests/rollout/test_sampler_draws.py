"""The sampler against a scripted engine: who is asked what, what is taken back when a draw is given up, and what comes out.

The engine's own behaviour (sampling, log-probs, abort) is that of tests/rollout/test_engine.py and test_conversations.py.
"""

from __future__ import annotations

import random
import sys
import types
from dataclasses import dataclass, field

import numpy as np
import pytest

from akl_dist.contract.records import Prompt, Sampling
from akl_dist.rollout import sampler as module
from akl_dist.rollout.environment import Step
from akl_dist.rollout.environment_pool import EnvironmentPool, Fault
from akl_dist.rollout.sampler import Sampler, Tools

END, OTHER_END = 1, 2
SAMPLING = Sampling(group_size=2, temperature=1.0, max_response_tokens=40, end_ids=(END, OTHER_END), seed_key=(0, "step", 1))
FRAME = (90, 91)  # what the template writes around a message


@dataclass
class Reply:
    token_ids: list[int]
    finish_reason: str

    @property
    def logprobs(self) -> list[int]:
        return self.token_ids


@dataclass
class Output:
    request_id: str
    prompt_token_ids: list[int]
    outputs: list[Reply]
    finished: bool = True


@dataclass
class ScriptedEngine:
    """One request ends per step, in a shuffled order; ``turn(prompt_ids, limit, seed)`` says what is sampled."""

    turn: object
    requests: dict = field(default_factory=dict)
    aborted: list = field(default_factory=list)
    seen: list = field(default_factory=list)
    order: random.Random = field(default_factory=lambda: random.Random(0))

    def add_request(self, request_id, prompt, params):
        self.requests[request_id] = (prompt, params)
        self.seen.append((prompt, params))

    def step(self):
        if not self.requests:
            return []
        name = self.order.choice(sorted(self.requests))
        prompt, (limit, seed) = self.requests.pop(name)
        ids = self.turn(prompt, limit, seed)
        cut = len(ids) >= limit and ids[limit - 1] not in (END, OTHER_END)
        return [Output(name, prompt, [Reply(ids[:limit], "length" if cut else "stop")])]

    def has_unfinished_requests(self):
        return bool(self.requests)

    def abort_request(self, names):
        self.aborted += names
        for name in names:
            self.requests.pop(name, None)


@dataclass
class ScriptedEnvironments:
    """Answers in the order asked, ``late`` polls after that; ``answer(task, turn)`` gives a step or a fault."""

    answer: object
    late: int = 0
    live: dict = field(default_factory=dict)
    waiting: list = field(default_factory=list)
    closed: list = field(default_factory=list)

    def open(self, key, task):
        assert key not in self.live, "opened twice"
        self.live[key] = task
        if task.text == "broken":
            self.waiting.append((self.late, key, Fault("cannot be set up")))

    def step(self, key, turn):
        self.waiting.append((self.late, key, self.answer(self.live[key], turn)))

    def close_one(self, key):
        del self.live[key]
        self.closed.append(key)
        self.waiting = [one for one in self.waiting if one[1] != key]

    def poll(self, timeout_s):
        ready = [(key, step) for left, key, step in self.waiting if left <= 0]
        self.waiting = [(left - 1, key, step) for left, key, step in self.waiting if left > 0]
        return ready


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch):
    """What the sampler takes from vLLM, as plain values."""
    engine = types.ModuleType("vllm.inputs.engine")
    engine.tokens_input = lambda ids: ids
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.inputs", types.ModuleType("vllm.inputs"))
    monkeypatch.setitem(sys.modules, "vllm.inputs.engine", engine)
    monkeypatch.setattr(module, "sampling_params", lambda sampling, seed, *, max_tokens, logprobs=0: (max_tokens, seed))
    monkeypatch.setattr(module, "flat_scores", lambda ids: (list(ids), -np.ones(len(ids), np.float32)))


def sampler_of(turn, environments, **limits):
    engine = ScriptedEngine(turn)
    tools = Tools(environments=environments, observation_ids=lambda text: (FRAME[0], *text.encode(), FRAME[1]),
                  text=lambda ids: bytes(ids).decode(), **{"max_turns": 2, "max_turn_tokens": None, "void_turns": "keep",
                                                           "silence_s": 5.0, **limits})
    return Sampler(types.SimpleNamespace(llm_engine=engine), name="engine", vocab_size=200, tools=tools), engine


def prompts(*texts):
    return [Prompt(f"p/{index}", "p", text, (50 + index,), "gold") for index, text in enumerate(texts)]


def drawn(sampler, given, sampling=SAMPLING):
    return dict(one for finished in sampler.stream(given, sampling) for one in finished)


def test_a_draw_that_is_given_up_leaves_nothing_and_the_next_one_starts_clean():
    def answer(task, turn):
        return Step(None if task.text == "short" else "more", call=True)

    environments = ScriptedEnvironments(answer, late=2)
    sampler, engine = sampler_of(lambda prompt, limit, seed: [*b"x", END], environments, max_turns=4)
    given = prompts("short", "b", "c", "d")
    stream = sampler.stream(given, SAMPLING)
    next(stream)
    running = sorted(engine.requests)
    assert running and environments.live, "in the middle of conversations"
    stream.close()
    assert sorted(engine.aborted) == running and not engine.requests and not environments.live and not environments.waiting
    whole = drawn(sampler, given)
    assert sorted(whole) == [0, 1, 2, 3] and not environments.live
    fresh, _ = sampler_of(lambda prompt, limit, seed: [*b"x", END], ScriptedEnvironments(answer), max_turns=4)
    again = drawn(fresh, given)
    assert all((whole[i].arrays.token_ids == again[i].arrays.token_ids).all() for i in whole)


def test_an_error_in_the_middle_takes_everything_back():
    environments = ScriptedEnvironments(lambda task, turn: Step("more", call=True))
    turns = iter([[*b"x", END]] * 3 + [[500]])
    sampler, engine = sampler_of(lambda prompt, limit, seed: next(turns), environments)
    with pytest.raises(module.RunError, match="outside the vocabulary"):
        drawn(sampler, prompts("a", "b", "c"))
    assert not engine.requests and not environments.live


def test_a_draw_over_the_real_pool_can_be_given_up_while_steps_run():
    with EnvironmentPool(environment="environment_fakes:Obedient", params={}, num_workers=1, timeout_s=20.0) as pool:
        sampler, engine = sampler_of(lambda prompt, limit, seed: [*b"sleep 0.2", END], pool, max_turns=1)
        stream = sampler.stream(prompts("a", "b"), SAMPLING)
        assert len(next(stream)) >= 1
        stream.close()
        assert not pool._rollouts and not engine.requests
        whole = drawn(sampler, prompts("a", "b"))
        assert sorted(whole) == [0, 1] and not any(one.fault for group in whole.values() for one in group.turns)
        assert not pool._rollouts and not engine.requests


def test_a_response_whose_environment_cannot_be_set_up_ends_with_its_first_turn():
    environments = ScriptedEnvironments(lambda task, turn: Step(None), late=0)
    sampler, _ = sampler_of(lambda prompt, limit, seed: [*b"xy", END], environments)
    groups = drawn(sampler, prompts("broken", "fine"))
    assert [one.fault for one in groups[0].turns] == ["cannot be set up"] * 2 and groups[0].response_lengths == (3, 3)
    assert not any(one.fault for one in groups[1].turns) and not environments.live


@pytest.mark.parametrize("seed", range(25))
def test_any_conversation(seed):
    """Whatever policy and environments do: requests extend each other token by token, limits hold, every environment is closed
    once, and the arrays are what was sampled and written."""
    dice = random.Random(seed)
    limits = {"max_turns": dice.randint(1, 4), "max_turn_tokens": dice.choice([None, 1, 5, 12]),
              "void_turns": dice.choice(["keep", "mask_turn", "mask_response"])}

    def turn(prompt, limit, number):
        own = random.Random(number)
        return [*(own.randint(60, 80) for _ in range(own.choice([0, 0, 1, 3, 9]))), own.choice([END, OTHER_END])]

    def answer(task, text):
        own = random.Random(f"{task.seed}{text}{seed}")
        if own.random() < 0.1:
            return Fault("gone")
        return Step(own.choice([None, "", "A" * own.randint(1, 20)]), call=own.random() < 0.7, failed=own.random() < 0.5,
                    void=own.random() < 0.3, score=own.choice([None, own.random()]))

    environments = ScriptedEnvironments(answer, late=dice.randint(0, 3))
    sampler, engine = sampler_of(turn, environments, **limits)
    engine.order = dice
    given = prompts(*(dice.choice(["fine", "broken"]) for _ in range(4)))
    groups = drawn(sampler, given)
    assert sorted(groups) == [0, 1, 2, 3] and not environments.live
    assert len(environments.closed) == len(set(environments.closed)) == 8
    seeds = [number for _, (_, number) in engine.seen]
    assert len(seeds) == len(set(seeds)), "every turn of every response is drawn with a seed of its own"
    for index, group in groups.items():
        ends = np.cumsum(group.response_lengths)
        pieces = zip(np.split(group.arrays.token_ids, ends[:-1]), np.split(group.arrays.logp, ends[:-1]), group.turns,
                     group.finish_reasons, strict=True)
        for ids, logp, turns, reason in pieces:
            assert len(ids) <= SAMPLING.max_response_tokens and turns.num_turns <= limits["max_turns"] + 1
            assert (logp != 0).tolist() == turns.sampled_mask().tolist()
            assert len(turns.segments) % 2 == 1, "nothing is written that nothing is sampled after"
            cuts = np.split(ids, np.cumsum(turns.segments)[:-1])
            for written in cuts[1::2]:
                assert written[0] == FRAME[0] and written[-1] == FRAME[1] and set(written[1:-1]) <= {65}
            for sampled in cuts[:-1:2]:
                assert sampled[-1] in (END, OTHER_END) and not np.isin(sampled[:-1], (END, OTHER_END)).any()
            for upto in np.cumsum([0, *turns.segments])[::2][: turns.num_turns]:
                assert ([50 + index, *ids[:upto].tolist()]) in [list(prompt) for prompt, _ in engine.seen], "ids of a request"
            assert reason in ("stop", "length", "turns")
            assert not turns.fault or given[index].text == "broken" or turns.fault == "gone"
            kept = turns.trained_mask()
            assert kept.sum() == turns.trained_tokens <= turns.sampled_tokens and not kept[~turns.sampled_mask()].any()
