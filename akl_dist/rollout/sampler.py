"""Draws responses from one vLLM engine, each available as soon as it has ended; conversations take turns with environments.

The engine's own loop (add_request, step) and not ``LLM.generate``, which returns when the last response has ended. vLLM is
imported where it is used, not with this module.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import numpy as np

from akl_dist.contract.errors import DataError, RunError
from akl_dist.contract.records import Prompt, RolloutArrays, Sampling, Turns
from akl_dist.rollout.environment import Step, Task
from akl_dist.rollout.environment_pool import Fault
from akl_dist.rollout.sampling import request_seed
from akl_dist.rollout.turns import Conversation, TurnLimits

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

POLL_S = 1.0  # between looks at the environments while nothing is sampled


class SampledGroup(NamedTuple):
    """Responses to one prompt. arrays: flat over the responses; response_lengths, finish_reasons: [group_size]; turns:
    [group_size] where there is an environment, else empty."""

    arrays: RolloutArrays
    response_lengths: tuple[int, ...]
    finish_reasons: tuple[str, ...]
    turns: tuple[Turns, ...] = ()


Finished = list[tuple[int, SampledGroup]]
"""Groups that have ended, each with the index of its prompt."""


class Environments(Protocol):
    """What is asked of :class:`~akl_dist.rollout.environment_pool.EnvironmentPool`."""

    def open(self, key: str, task: Task) -> None: ...

    def step(self, key: str, turn: str) -> None: ...

    def close_one(self, key: str) -> None: ...

    def poll(self, timeout_s: float) -> list[tuple[str, Step | Fault]]: ...


@dataclass(frozen=True)
class Tools:
    """How a conversation goes on after a turn.

    Attributes:
        environments: one per response, from its first request to its end.
        observation_ids: token ids of an answer of the environment, from after the turn's end token to the next turn's beginning.
        text: text of a turn's token ids.
        max_turns, max_turn_tokens, void_turns: see :class:`TurnLimits`.
        silence_s: how long no environment may answer while all responses wait for one.
    """

    environments: Environments
    observation_ids: Callable[[str], Sequence[int]]
    text: Callable[[Sequence[int]], str]
    max_turns: int
    max_turn_tokens: int | None
    void_turns: str
    silence_s: float


class Sampler:
    """Responses of one engine.

    Args:
        llm: made by :func:`akl_dist.rollout.launch.build`; nothing else may have requests in it while :meth:`stream` is under way.
        name: how errors call the engine.
        vocab_size: ids are below it.
        entropy_topk: most probable tokens from which entropies are estimated; 0 = no entropies.
        tools: None = every response is sampled in one piece.
    """

    def __init__(self, llm: LLM, *, name: str, vocab_size: int, entropy_topk: int = 0, tools: Tools | None = None) -> None:
        self.llm, self.name, self.vocab_size, self.tools = llm, name, vocab_size, tools
        self.entropy_topk = min(entropy_topk, vocab_size)
        self.request_ids = itertools.count()

    def stream(self, prompts: Sequence[Prompt], sampling: Sampling, every_s: float = 0.0) -> Iterator[Finished]:
        """Groups as they end, at most one list every ``every_s`` seconds; the last list ends the draw.

        Raises:
            RunError: a reply of the engine does not fit its request, or no environment answers any more.
        """
        draw = _Draw(self, prompts, sampling)
        try:
            draw.begin()
            last = time.monotonic()
            while draw.unfinished:
                draw.advance()
                if draw.finished and (not draw.unfinished or time.monotonic() - last >= every_s):
                    finished, draw.finished = draw.finished, []
                    yield finished
                    last = time.monotonic()
        finally:
            draw.abandon()

    def error(self, subject: str, *, got: str, expected: str) -> RunError:
        return RunError(
            f"{self.name}, {subject}",
            got=got,
            expected=expected,
            stage="rollout",
            actor=self.name,
            remedy="The engine's reply does not fit its request; resume from the last checkpoint.",
        )


@dataclass
class _Response:
    """One response under way: ``place`` is (index of its prompt, index in its group), ``sent`` the ids of the request that runs."""

    place: tuple[int, int]
    prompt: Prompt
    conversation: Conversation
    key: str
    sent: list[int]


class _Draw:
    """One call of :meth:`Sampler.stream`."""

    def __init__(self, sampler: Sampler, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        self._sampler, self._sampling, self._tools = sampler, sampling, sampler.tools
        self._engine = sampler.llm.llm_engine
        self._prompts = prompts
        self._groups: list[dict[int, _Response]] = [{} for _ in prompts]
        self._running: dict[str, _Response] = {}  # by request
        self._open: dict[str, _Response] = {}  # by environment
        self._asked: set[str] = set()  # environments that owe an answer
        self._heard = time.monotonic()
        self.unfinished = len(prompts) * sampling.group_size
        self.finished: Finished = []

    def begin(self) -> None:
        for index, prompt in enumerate(self._prompts):
            for number in range(self._sampling.group_size):
                conversation = Conversation(prompt.token_ids, self._limits(prompt))
                response = _Response((index, number), prompt, conversation, f"{prompt.prompt_id}#{index}.{number}", [])
                if self._tools is not None:
                    seed = request_seed((*self._sampling.seed_key, "environment"), prompt.prompt_id, number)
                    task = Task(prompt.prompt_id, prompt.text, prompt.gold, prompt.extra, number, seed, prompt.think_open)
                    self._open[response.key] = response
                    self._tools.environments.open(response.key, task)
                self._request(response)

    def advance(self) -> None:
        """One step of the engine, and what the environments have answered meanwhile."""
        if self._running:
            for output in self._engine.step():
                self._reply(cast("RequestOutput", output))  # nothing here asks for pooling
            if self._running and not self._engine.has_unfinished_requests():
                raise self._sampler.error("replies", got=f"none to {len(self._running)} requests", expected="one to each")
        if self._tools is None:
            return
        answers = self._tools.environments.poll(0.0 if self._running else POLL_S)
        if answers or self._running:
            self._heard = time.monotonic()
        elif time.monotonic() - self._heard > self._tools.silence_s:
            raise RunError(
                f"{self._sampler.name}, environments", got=f"no answer to {len(self._asked)} turns for {self._tools.silence_s:g} s",
                expected="an answer, or a failure within the limit of a step", stage="rollout", actor=self._sampler.name,
                remedy="The processes of rollout.tools are stuck; see the engine's log, and resume from the last checkpoint.")
        for key, answer in answers:
            self._answer(key, answer)

    def abandon(self) -> None:
        """Take back what is under way after an error: the engine has no request and the pool no environment of this draw."""
        if self._running:
            self._engine.abort_request(list(self._running))
        if self._tools is not None:
            for key in self._open:
                self._tools.environments.close_one(key)
        self._running, self._open = {}, {}

    # --- one response --------------------------------------------------------------------------------------------------

    def _limits(self, prompt: Prompt) -> TurnLimits:
        longest = response_limit(prompt, self._sampling)
        if self._tools is None:
            return TurnLimits(longest)
        return TurnLimits(longest, self._tools.max_turn_tokens, self._tools.max_turns, self._tools.void_turns)

    def _request(self, response: _Response) -> None:
        from vllm.inputs.engine import tokens_input

        conversation, sampling = response.conversation, self._sampling
        ids = conversation.next_request()
        if ids is None:
            self._end(response)
            return
        key = sampling.seed_key if conversation.turn == 0 else (*sampling.seed_key, "turn", conversation.turn)
        seed = request_seed(key, response.prompt.prompt_id, response.place[1])
        params = sampling_params(sampling, seed, max_tokens=conversation.budget, logprobs=self._sampler.entropy_topk)
        request_id = f"sample-{next(self._sampler.request_ids)}"
        response.sent = ids
        self._running[request_id] = response
        self._engine.add_request(request_id, tokens_input(list(ids)), params)

    def _reply(self, output: RequestOutput) -> None:
        response = self._running.get(output.request_id)
        if response is None or not output.finished or len(output.outputs) != 1:
            raise self._sampler.error(
                f"reply to request {output.request_id}",
                got=f"{len(output.outputs)} responses, finished={output.finished}, asked for={response is not None}",
                expected="one finished response to a request that is under way")
        echo = list(output.prompt_token_ids or ())
        if echo != response.sent:
            raise self._sampler.error("echo of a prompt", got="other token ids", expected="those that were sent")
        ids, logp, entropy, reason = self._checked(output, response)
        del self._running[output.request_id]
        conversation = response.conversation
        conversation.sampled(echo, ids, logp, entropy, reason)
        if conversation.finish_reason is not None:
            self._end(response)
        else:
            assert self._tools is not None, "a response without an environment ends with its turn"
            self._asked.add(response.key)
            self._tools.environments.step(response.key, self._tools.text(ids[:-1].tolist()))

    def _answer(self, key: str, answer: Step | Fault) -> None:
        response = self._open.get(key)
        if response is None:
            return  # its response has ended meanwhile
        assert self._tools is not None
        conversation, asked = response.conversation, key in self._asked
        self._asked.discard(key)
        if isinstance(answer, Fault):
            conversation.end_in_fault(answer.reason)
            if not asked:
                return  # its turn is being sampled, and ends the response
        elif asked:
            try:
                conversation.answered(answer, self._tools.observation_ids)
            except DataError as error:  # text that the model's vocabulary does not cover
                conversation.end_in_fault(f"{error.subject}: {error.got}")
        else:
            raise self._sampler.error(f"environment of {key}", got="an answer", expected="none, since no turn was sent to it")
        if conversation.finish_reason is not None:
            self._end(response)
        else:
            self._request(response)

    def _end(self, response: _Response) -> None:
        if self._open.pop(response.key, None) is not None and self._tools is not None:
            self._tools.environments.close_one(response.key)
        index, number = response.place
        group = self._groups[index]
        group[number] = response
        self.unfinished -= 1
        if len(group) == self._sampling.group_size:
            members = [group[place].conversation for place in range(len(group))]
            self.finished.append((index, _group(members, conversations=self._tools is not None)))
            group.clear()

    def _checked(self, output: RequestOutput, response: _Response) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, str]:
        """Ids, log-probs, entropies and finish reason of a reply that is what was asked for."""
        sampler, reply, limit = self._sampler, output.outputs[0], response.conversation.budget
        ids = np.asarray(reply.token_ids, dtype=np.int32)
        scored_ids, logp, entropy = self._scores(reply.logprobs)
        where = f"response to prompt {response.prompt.prompt_id}"
        if not 1 <= len(ids) <= limit or len(logp) != len(ids):
            raise sampler.error(where, got=f"{len(ids)} ids, {len(logp)} log-probs", expected=f"the same number, 1 to {limit}")
        if scored_ids != list(reply.token_ids) or ids.min() < 0 or ids.max() >= sampler.vocab_size:
            raise sampler.error(where, got="log-probs of other tokens, or ids outside the vocabulary",
                                expected="log-probs of the sampled ids")
        if not np.isfinite(logp).all():
            raise sampler.error(where, got="log-probs that are not finite", expected="finite values")
        reason = reply.finish_reason
        ended = np.isin(ids, self._sampling.end_ids)
        stops = reason == "stop" and ended[-1] and not ended[:-1].any()
        cut = reason == "length" and len(ids) == limit and not ended.any()
        if not (stops or cut):
            raise sampler.error(where, got=f"finish reason {reason!r} after {len(ids)} tokens",
                                expected='"stop" at its first end token, or "length" at the token limit')
        return ids, logp, entropy, str(reason)

    def _scores(self, entries: object) -> tuple[list[int], np.ndarray, np.ndarray | None]:
        """Sampled ids, their log-probs float32 [n] and, where asked for, entropies float32 [n]."""
        ids, logp = flat_scores(entries)
        width = 1 + self._sampler.entropy_topk
        if width == 1:
            return ids, logp, None
        if len(ids) % width:
            raise self._sampler.error("log-probs", got=f"{len(ids)} values", expected=f"{width} for each token")
        rows, values = np.asarray(ids).reshape(-1, width), logp.reshape(-1, width)
        return rows[:, 0].tolist(), np.ascontiguousarray(values[:, 0]), topk_entropy(rows, values)


def response_limit(prompt: Prompt, sampling: Sampling) -> int:
    """Tokens that a response to this prompt may have: its source's own limit, but never more than the run is laid out for."""
    return min(prompt.max_response_tokens or sampling.max_response_tokens, sampling.max_response_tokens)


def topk_entropy(token_ids: np.ndarray, logp: np.ndarray) -> np.ndarray:
    """Entropy in nats of the distribution at each token, float32 [n], from its most probable tokens.

    Exact for the tokens that are known (the sampled one and the k most probable ones); the mass r of all others counts as one
    token, -r log r. The estimate is therefore too small, by r times the entropy among the others: by 0 up to
    r log(vocabulary - k). It is exact where k covers the vocabulary.

    Args:
        token_ids, logp: [n, 1 + k], the sampled token first; it may be among the k others, too.
    """
    values = logp.astype(np.float64)
    p = np.exp(values)
    p[:, 0] = np.where((token_ids[:, 1:] == token_ids[:, :1]).any(axis=1), 0.0, p[:, 0])  # counted among the k
    known = -(p * np.where(p > 0, values, 0.0)).sum(axis=1)
    rest = np.clip(1.0 - p.sum(axis=1), 0.0, 1.0)
    return (known - np.where(rest > 0, rest * np.log(np.maximum(rest, 1e-300)), 0.0)).astype(np.float32)


def flat_scores(entries: object) -> tuple[list[int], np.ndarray]:
    """Token ids and log-probs, float32 [n], of a reply to a request with ``flat_logprobs``."""
    from vllm.logprobs import FlatLogprobs

    assert isinstance(entries, FlatLogprobs), f"log-probs came as {type(entries).__name__}"
    return entries.token_ids, np.asarray(entries.logprobs, dtype=np.float32)


def sampling_params(sampling: Sampling, seed: int, *, max_tokens: int, logprobs: int = 0) -> SamplingParams:
    """Every field that shapes the distribution, explicitly; only ``end_ids`` end a response (hence ignore_eos)."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        n=1,
        temperature=sampling.temperature,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        seed=seed,
        stop_token_ids=list(sampling.end_ids),
        ignore_eos=True,
        min_tokens=0,
        max_tokens=max_tokens,
        logprobs=logprobs,
        flat_logprobs=True,
        detokenize=False,
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    assert (params.temperature, params.seed, params.top_k) == (sampling.temperature, seed, 0), "vLLM changed a sampling field"
    return params


def _group(members: Sequence[Conversation], *, conversations: bool) -> SampledGroup:
    ids, logps, entropies = zip(*(one.arrays() for one in members), strict=True)
    entropy = None if any(row is None for row in entropies) else np.concatenate(entropies)
    arrays = RolloutArrays(token_ids=np.concatenate(ids), logp=np.concatenate(logps), entropy=entropy)
    turns = tuple(one.turns() for one in members) if conversations else ()
    return SampledGroup(arrays, tuple(len(row) for row in ids), tuple(str(one.finish_reason) for one in members), turns)
