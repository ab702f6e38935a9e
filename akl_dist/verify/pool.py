"""Verify on Ray: supervisor actors, each with grader processes of its own. Text and masks stay behind handles."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from akl_dist.cluster import actor
from akl_dist.cluster.gather import answered, fetch_all, gather, store_all
from akl_dist.cluster.reserve import with_environment
from akl_dist.config.schema import RolesConfig, VerifyConfig
from akl_dist.contract.errors import RunError, VerifierFault
from akl_dist.contract.records import Handle, JudgedGroup, LabelledGroup, ReferenceGroup, RolloutGroup
from akl_dist.verify.worker import LabelParts, VerifyWorker

CLOSE_TIMEOUT_S = 10.0
FETCH_TIMEOUT_S = 120.0
GRACE_S = 60.0  # beyond a call's own limit: decoding, queueing and replacing graders
CALLS_IN_FLIGHT = 2  # of one supervisor: one that it works on, and one that it finds when that is done


@dataclass(frozen=True)
class VerifySettings:
    """What each supervisor is made with. ``tokenizer_path`` is a folder with ``tokenizer.json`` on every node; ``kinds``: verifiers
    that prompts may name (config.mixture.verifiers)."""

    tokenizer_path: str
    end_ids: tuple[int, ...]
    verify: VerifyConfig
    roles: RolesConfig
    seed: int = 0
    kinds: tuple[str, ...] = ()


class VerifyActor:
    """One supervisor. Calls run one after another; the driver is the only caller.

    The graders are started by :meth:`start` and not by the constructor, so that its errors reach the driver as raised.
    """

    def __init__(self, settings: VerifySettings, num_graders: int) -> None:
        actor.enter()
        self._settings, self._num_graders = settings, num_graders
        self._worker: VerifyWorker | None = None

    def start(self) -> dict[str, Any]:
        """Start the graders and run their probes; returns their process ids and the isolation in which they run programs."""
        if self._worker is None:
            settings = self._settings
            self._worker = VerifyWorker(
                settings.tokenizer_path,
                end_ids=settings.end_ids,
                config=settings.verify,
                roles=settings.roles,
                seed=settings.seed,
                num_workers=self._num_graders,
                kinds=settings.kinds,
            )
        return {"grader_pids": self.worker.grader_pids(), "isolation": self.worker.isolation}

    @property
    def worker(self) -> VerifyWorker:
        assert self._worker is not None, "start() comes first"
        return self._worker

    def ping(self) -> dict[str, int]:
        """Totals of the grader pool; answers only when the graders are up and the supervisor idle."""
        return self.worker.counters()

    def judge(self, groups: Sequence[RolloutGroup]) -> list[JudgedGroup]:
        arrays = _fetched([group.arrays for group in groups], "rollout")
        judged = self.worker.judge(groups, arrays)
        handles = store_all([one.arrays for one in judged])
        return [dataclasses.replace(one, arrays=handle) for one, handle in zip(judged, handles, strict=True)]

    def label(self, groups: Sequence[tuple[RolloutGroup, JudgedGroup, ReferenceGroup, Handle]]) -> list[LabelledGroup]:
        rollout, judgement, scores = (
            _fetched([row[i].arrays for row in groups], stage) for i, stage in enumerate(("rollout", "verify", "reference"))
        )
        policy = _fetched([row[3] for row in groups], "learner")
        parts = [
            LabelParts(group, rollout[i], judged, judgement[i], reference, scores[i], policy[i] and policy[i].entropy)
            for i, (group, judged, reference, _) in enumerate(groups)
        ]
        labelled = self.worker.label(parts)
        handles = store_all([record.roles for record in labelled])
        return [dataclasses.replace(record, roles=handle) for record, handle in zip(labelled, handles, strict=True)]

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()


def _fetched(handles: Sequence[Any], stage: str) -> list[Any]:
    return fetch_all(handles, timeout_s=FETCH_TIMEOUT_S, stage=stage, what=f"{stage} arrays of {len(handles)} groups")


@dataclass(frozen=True)
class Ticket:
    """A batch under judgement: where it was added, and the groups whose verdicts are wanted, in order."""

    stream: VerdictStream
    groups: tuple[RolloutGroup, ...]


class VerdictStream:
    """Groups of one batch on their way through the supervisors, while others of the batch are still sampled.

    Work goes to the supervisor with the fewest groups in flight; each has at most ``CALLS_IN_FLIGHT`` calls, so that it finds the
    next one when it ends one, and a call takes whatever waits then. The rest waits here. Verdicts do not depend on who gives them.

    Args:
        actors: name -> supervisor.
        config: ``queue_groups`` bounds what waits, ``batch_timeout_s`` is the limit of one call.
    """

    def __init__(self, actors: Mapping[str, Any], config: VerifyConfig) -> None:
        self._actors, self._config = actors, config
        self._queue: collections.deque[RolloutGroup] = collections.deque()
        self._calls: dict[Any, tuple[str, list[RolloutGroup]]] = {}  # reference -> supervisor, what it judges
        self._added: dict[int, RolloutGroup] = {}  # by identity: a prompt may be in a batch twice
        self._judged: dict[int, JudgedGroup] = {}

    def add(self, groups: Sequence[RolloutGroup]) -> None:
        """Have groups judged. Waits, within the limit of a call, only while ``verify.queue_groups`` others wait already."""
        self._take_answers(0.0)
        for group in groups:
            while len(self._queue) >= self._config.queue_groups and not self._dispatch():
                self._take_answers(self._limit)
            self._added[id(group)] = group
            self._queue.append(group)
        self._dispatch()

    def ticket(self, order: Sequence[RolloutGroup]) -> Ticket:
        """The end of the batch: its groups in the order in which :meth:`VerifyPool.collect` gives their verdicts. Groups that were
        not added before are added now. Does not wait; all work is with the supervisors afterwards."""
        self._queue.extend(group for group in order if id(group) not in self._added)
        self._added.update((id(group), group) for group in order)
        if len(self._added) != len(order):
            raise RunError("groups to judge", got=f"{len(self._added)} added, {len(order)} in the batch",
                           expected="those of the batch, each once", stage="verify",
                           remedy="Groups were added that are not in the batch; this is a bug in the caller.")
        self._take_answers(0.0)
        self._dispatch(extra=1)
        return Ticket(self, tuple(order))

    def judged(self, order: Sequence[RolloutGroup]) -> list[JudgedGroup]:
        """Wait for what is in flight; the verdicts of these groups."""
        while self._calls:
            self._take_answers(self._limit)
            self._dispatch()
        return [self._judged[id(group)] for group in order]

    @property
    def _limit(self) -> float:
        return self._config.batch_timeout_s + GRACE_S

    def _in_flight(self, name: str) -> list[int]:
        return [len(groups) for supervisor, groups in self._calls.values() if supervisor == name]

    def _dispatch(self, *, extra: int = 0) -> bool:
        """Send what waits to supervisors that may take a call, each one call; whether anything was sent."""
        calls = {name: self._in_flight(name) for name in self._actors}
        load = {name: sum(sizes) for name, sizes in calls.items() if len(sizes) < CALLS_IN_FLIGHT + extra}
        shares: dict[str, list[RolloutGroup]] = {name: [] for name in load}
        while load and self._queue:
            name = min(load, key=lambda one: load[one])
            shares[name].append(self._queue.popleft())
            load[name] += 1
        for name, share in shares.items():
            if share:
                self._calls[self._actors[name].judge.remote(share)] = (name, share)
        return any(shares.values())

    def _take_answers(self, timeout_s: float) -> None:
        names = {ref: name for ref, (name, _) in self._calls.items()}
        doing = f"judging the responses to {sum(len(share) for _, share in self._calls.values())} prompts"
        for ref, judged in answered(names, timeout_s=timeout_s, stage="verify", doing=doing).items():
            _, share = self._calls.pop(ref)
            _check_order("verify", [group.prompt.prompt_id for group in share], [one.prompt_id for one in judged])
            self._judged.update((id(group), one) for group, one in zip(share, judged, strict=True))


class VerifyPool:
    """The verify stage: supervisors named ``verify/<run id>/<i>``, one per entry of ``actor_options``.

    Consumes rollout and reference groups, produces judged and labelled ones; waits for the supervisors alone, within
    ``verify.batch_timeout_s`` for one call. Graders work between :meth:`stream` and :meth:`collect` while other stages run.

    Args:
        run_id: part of the actors' names.
        settings: what each supervisor is made with; ``verify.num_workers`` graders are shared out among the supervisors.
        actor_options: Ray options of each actor (placement bundle, num_cpus, runtime_env).
        policy_entropies: with roles.entropy_source=policy_forward what gives the policy's entropies of groups when they are
            labelled: handles of EntropyArrays, one each.
    """

    def __init__(
        self, *, run_id: str, settings: VerifySettings, actor_options: Sequence[Mapping[str, Any]],
        policy_entropies: Callable[[Sequence[RolloutGroup]], Sequence[Handle]] | None = None,
    ) -> None:
        assert actor_options, "a verify pool needs at least one supervisor"
        self._config, self._policy_entropies = settings.verify, policy_entropies
        self._actors: dict[str, Any] = {}
        for index, options in enumerate(actor_options):
            name = f"verify/{run_id}/{index}"
            graders = max(1, len(range(index, settings.verify.num_workers, len(actor_options))))
            remote = ray.remote(VerifyActor).options(**with_environment(options, {}), name=name, max_restarts=0)
            self._actors[name] = remote.remote(settings, graders)
        self._started = {name: remote.start.remote() for name, remote in self._actors.items()}

    def ready(self) -> dict[str, Any]:
        """Actor name -> reference that resolves once its graders are up and have passed their probes."""
        return dict(self._started)

    def stream(self) -> VerdictStream:
        """A new batch, whose groups may be added as they are sampled."""
        return VerdictStream(self._actors, self._config)

    def submit(self, groups: Sequence[RolloutGroup]) -> Ticket:
        """A whole batch at once. Does not wait."""
        return self.stream().ticket(groups)

    def collect(self, ticket: Ticket, earlier: Sequence[JudgedGroup] = ()) -> list[JudgedGroup]:
        """Judged groups in the ticket's order.

        Raises:
            VerifierFault: the share of responses without a verdict passes ``verify.max_faulty_fraction``, those of
                ``earlier`` groups of the same step counted in.
        """
        judged = ticket.stream.judged(ticket.groups)
        _check_order("verify", [group.prompt.prompt_id for group in ticket.groups], [group.prompt_id for group in judged])
        check_faults([*earlier, *judged], self._config.max_faulty_fraction)
        return judged

    def label(
        self, groups: Sequence[RolloutGroup], judged: Sequence[JudgedGroup], reference: Sequence[ReferenceGroup]
    ) -> list[LabelledGroup]:
        entropies = [None] * len(groups) if self._policy_entropies is None else self._policy_entropies(groups)
        joined = list(zip(groups, judged, reference, entropies, strict=True))
        refs = {name: self._actors[name].label.remote(share) for name, share in self._shares(joined).items()}
        results = gather(
            refs,
            timeout_s=self._config.batch_timeout_s + GRACE_S,
            stage="verify",
            doing=f"labelling the token roles of {len(joined)} groups",
        )
        labelled = self._in_order(results, len(joined))
        _check_order("roles", [g.prompt.prompt_id for g in groups], [g.rollout.prompt.prompt_id for g in labelled])
        return labelled

    def metrics(self) -> dict[str, float]:
        """Totals over all graders since the start: ``verify/grader_judged|timeouts|crashes|kills|recycled|started``."""
        refs = {name: remote.ping.remote() for name, remote in self._actors.items()}
        results = gather(refs, timeout_s=self._config.batch_timeout_s + GRACE_S, stage="verify", doing="counting")
        total = collections.Counter()
        for counters in results.values():
            total.update(counters)
        return {f"verify/grader_{name}": count for name, count in total.items()}

    def close(self) -> None:
        """Let the supervisors end their graders, within a limit, then end them; the kernel ends what is left."""
        refs = [remote.close.remote() for remote in self._actors.values()]
        ray.wait(refs, num_returns=len(refs), timeout=CLOSE_TIMEOUT_S)
        for remote in self._actors.values():
            ray.kill(remote)

    def _shares(self, rows: Sequence[Any]) -> dict[str, list[Any]]:
        names = list(self._actors)
        shares = {name: list(rows[index :: len(names)]) for index, name in enumerate(names)}
        return {name: share for name, share in shares.items() if share}

    def _in_order(self, results: Mapping[str, list[Any]], count: int) -> list[Any]:
        names = list(self._actors)
        rows = {name: iter(result) for name, result in results.items()}
        return [next(rows[names[index % len(names)]]) for index in range(count)]


def check_faults(judged: Sequence[JudgedGroup], max_fraction: float) -> None:
    """Raise VerifierFault if more than ``max_fraction`` of the responses have no verdict."""
    verdicts = [(group.prompt_id, verdict) for group in judged for verdict in group.verdicts]
    faulty = [(prompt_id, verdict) for prompt_id, verdict in verdicts if not verdict.status.trains]
    if len(faulty) > max_fraction * len(verdicts):
        counts = collections.Counter(verdict.status.value for _, verdict in faulty)
        prompt_id, first = faulty[0]
        raise VerifierFault(
            "verifier",
            got=f"{len(faulty)} of {len(verdicts)} responses without a verdict ({dict(counts)}), "
            f"the first for prompt {prompt_id}: {first.status.value}, {first.reason}",
            expected=f"at most {max_fraction:.0%} (verify.max_faulty_fraction)",
            stage="verify",
            remedy="invalid_gold: mend or drop these rows of the data; timeout: raise verify.timeout_s; error: see the reason.",
        )


def _check_order(stage: str, expected: Sequence[str], got: Sequence[str]) -> None:
    if list(expected) != list(got):
        raise RunError(
            f"{stage} results",
            got=f"prompts {list(got)[:3]}...",
            expected=f"{list(expected)[:3]}...",
            remedy="Results of different prompts were joined; this is a bug in the verify stage.",
            stage="verify",
        )
