"""Rollout on Ray: an actor per engine, prompts assigned statically, arrays kept in the store of the engine's node."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import ray

from akl_dist.cluster import actor as process
from akl_dist.cluster.gather import arrivals, fetch_all, gather, store_all
from akl_dist.cluster.reserve import with_environment
from akl_dist.contract.errors import RunError
from akl_dist.contract.packing import probe_sequence
from akl_dist.contract.records import ParameterInfo, Prompt, RolloutGroup, Sampling
from akl_dist.rollout.engine import RolloutEngine
from akl_dist.rollout.launch import EngineSettings
from akl_dist.rollout.sampler import SampledGroup

CLOSE_TIMEOUT_S = 10.0
PROBE_TIMEOUT_S = 60.0
EVERY_S = 0.1
"""Groups that end within this time travel together: a message and an object of the store cost more than a small group."""
LISTS_AHEAD = 8
"""Lists of groups that an engine may be ahead of the driver before it waits: calls that are queued at its process."""

Drawn = tuple[list[tuple[int, RolloutGroup]], float]
"""Groups that have ended, each with the index of its prompt in the engine's share; seconds the engine worked for them."""


class RolloutActor:
    """One engine in a process of its own. Calls run one after another; the driver is the only caller.

    The engine is made by :meth:`start` and not by the constructor, so that its errors reach the driver as raised.
    """

    def __init__(self, settings: EngineSettings, name: str) -> None:
        process.enter()
        self._settings, self._name = settings, name
        self._engine: RolloutEngine | None = None
        self._draw: Iterator[Drawn] = iter(())

    def start(self) -> dict[str, object]:
        """Make the engine; returns its effective settings."""
        if self._engine is None:
            self._engine = RolloutEngine(self._settings, name=self._name)
        return dict(self.engine.effective)

    @property
    def engine(self) -> RolloutEngine:
        assert self._engine is not None, f"{self._name}: start() comes first"
        return self._engine

    def ping(self) -> int:
        """Policy version; answers only when the engine is up and idle."""
        return self.engine.policy_version

    def begin_draw(self, prompts: Sequence[Prompt], sampling: Sampling) -> Drawn | None:
        """Begin to sample these prompts; the first of :meth:`more_groups`. What was left of a draw before is given up."""
        self._draw = self._groups(prompts, sampling)
        return self.more_groups()

    def more_groups(self) -> Drawn | None:
        """Groups that ended within the next ``EVERY_S`` or, where none did, the next to end; None when all have been given out.

        A call of its own for each list, and not one streaming call: the process that made an array deletes it when nobody else
        holds it, and of handles inside a streamed item Ray may learn too late that the caller does.
        """
        return next(self._draw, None)

    def _groups(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[Drawn]:
        begin = time.perf_counter()
        for finished in self.engine.stream(prompts, sampling, EVERY_S):
            groups = self._stored(prompts, finished)
            yield groups, time.perf_counter() - begin
            begin = time.perf_counter()  # the time between two calls is not the engine's work

    def _stored(self, prompts: Sequence[Prompt], finished: Sequence[tuple[int, SampledGroup]]) -> list[tuple[int, RolloutGroup]]:
        handles = store_all([sampled.arrays for _, sampled in finished])
        return [
            (index, RolloutGroup(
                prompt=prompts[index],
                response_lengths=sampled.response_lengths,
                finish_reasons=sampled.finish_reasons,
                policy_version=self.engine.policy_version,
                engine=self._name,
                arrays=handle,
                turns=sampled.turns,
            ))
            for (index, sampled), handle in zip(finished, handles, strict=True)
        ]

    def probe_sequences(self, groups: Sequence[RolloutGroup], max_tokens: int) -> list[list[int]]:
        """Token ids for a weight-sync probe from the first response of each group; see :func:`packing.probe_sequence`."""
        what = f"probe of {len(groups)} prompts"
        fetched = fetch_all([group.arrays for group in groups], timeout_s=PROBE_TIMEOUT_S, stage="weight_sync", what=what)
        sequences = [probe_sequence(group, arrays, max_tokens) for group, arrays in zip(groups, fetched, strict=True)]
        return [ids for ids in sequences if len(ids) >= 2]

    def prompt_logprobs(self, token_id_lists: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return self.engine.prompt_logprobs(token_id_lists)

    def parameter_manifest(self) -> list[ParameterInfo]:
        return self.engine.parameter_manifest()

    def begin_update(self, manifest: Sequence[ParameterInfo]) -> None:
        self.engine.begin_update(manifest)

    def load_bucket(self, bucket: Mapping[str, tuple[str, np.ndarray]]) -> None:
        self.engine.load_bucket(bucket)

    def finish_update(self) -> None:
        self.engine.finish_update()

    def confirm_update(self, policy_version: int) -> None:
        self.engine.confirm_update(policy_version)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


class RolloutPool:
    """The rollout stage: ``len(actor_options)`` engines named ``rollout/<run id>/<i>``.

    Consumes prompts, produces groups; waits for the engines alone. Prompt i goes to engine i modulo the number of
    engines; as seeds belong to samples and not to engines, the number of engines does not change what is drawn.

    Args:
        run_id: part of the actors' names.
        settings: what each engine is made with.
        actor_options: Ray options of each actor (placement bundle, num_cpus, num_gpus, runtime_env). Environment
            variables in a runtime_env go over those the engine needs.
        timeout_s: limit of one call of :meth:`sample`, and of an idle engine's :meth:`ping`.
    """

    def __init__(
        self, *, run_id: str, settings: EngineSettings, actor_options: Sequence[Mapping[str, Any]], timeout_s: float
    ) -> None:
        assert actor_options, "a rollout pool needs at least one engine"
        self._timeout_s = timeout_s
        self.busy_s: dict[str, float] = {}
        """Seconds each engine worked in the last call of :meth:`sample`."""
        self.engines: dict[str, Any] = {}
        """Actor name -> handle, for the weight sync."""
        for index, options in enumerate(actor_options):
            name = f"rollout/{run_id}/{index}"
            actor = ray.remote(RolloutActor).options(**with_environment(options, settings.environment), name=name, max_restarts=0)
            self.engines[name] = actor.remote(settings, name)
        self._started = {name: engine.start.remote() for name, engine in self.engines.items()}

    def ready(self) -> dict[str, Any]:
        """Actor name -> reference that resolves to the engine's effective settings once it is up."""
        return dict(self._started)

    def ping(self) -> dict[str, int]:
        """Policy version of each engine."""
        refs = {name: engine.ping.remote() for name, engine in self.engines.items()}
        return gather(refs, timeout_s=self._timeout_s, stage="rollout", doing="answering a ping")

    def sample(
        self, prompts: Sequence[Prompt], sampling: Sampling, finished: Callable[[Sequence[RolloutGroup]], None] | None = None
    ) -> list[RolloutGroup]:
        """One group per prompt, in the prompts' order.

        Args:
            finished: called with groups as they end, in any order, while others are still sampled. Its own time does not count
                against the limit.
        """
        names, doing = list(self.engines), f"sampling {len(prompts)} prompts"
        self.busy_s = dict.fromkeys(names, 0.0)
        ordered: dict[int, RolloutGroup] = {}
        calls = self._begin(prompts, sampling)
        for name, drawn in arrivals(calls, timeout_s=self._timeout_s, stage="rollout", doing=doing, again=self._again):
            groups, busy_s = drawn or ((), 0.0)
            self.busy_s[name] += busy_s
            for index, group in groups:
                slot = names.index(name) + index * len(names)
                assert group.prompt.prompt_id == prompts[slot].prompt_id, "an engine answered for another prompt"
                ordered[slot] = group
            if finished is not None and groups:
                finished([group for _, group in groups])
        if len(ordered) != len(prompts):
            missing = next(slot for slot in range(len(prompts)) if slot not in ordered)
            raise RunError(f"groups of {len(prompts)} prompts", got=str(len(ordered)), expected="one for each prompt",
                           remedy="An engine ended its answer early; resume from the last checkpoint.", stage="rollout",
                           actor=names[missing % len(names)])
        return [ordered[slot] for slot in range(len(prompts))]

    def _begin(self, prompts: Sequence[Prompt], sampling: Sampling) -> dict[Any, str]:
        calls = {}
        for index, (name, engine) in enumerate(self.engines.items()):
            if share := list(prompts[index :: len(self.engines)]):
                calls[engine.begin_draw.remote(share, sampling)] = name
                calls.update((engine.more_groups.remote(), name) for _ in range(LISTS_AHEAD - 1))
        return calls

    def _again(self, name: str, drawn: Drawn | None) -> Any:
        return None if drawn is None else self.engines[name].more_groups.remote()

    def close(self) -> None:
        """Let the engines give back workers and memory, within a limit, then end their processes."""
        refs = [engine.close.remote() for engine in self.engines.values()]
        ray.wait(refs, num_returns=len(refs), timeout=CLOSE_TIMEOUT_S)
        for engine in self.engines.values():
            ray.kill(engine)
