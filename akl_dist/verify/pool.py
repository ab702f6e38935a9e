"""Verify on Ray: supervisor actors, each with grader processes of its own. Text and masks stay behind handles."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from akl_dist.cluster import actor
from akl_dist.cluster.gather import fetch_all, gather, store_all
from akl_dist.cluster.reserve import with_environment
from akl_dist.config.schema import RolesConfig, VerifyConfig
from akl_dist.contract.errors import RunError, VerifierFault
from akl_dist.contract.records import JudgedGroup, LabelledGroup, ReferenceGroup, RolloutGroup
from akl_dist.verify.worker import LabelParts, VerifyWorker

CLOSE_TIMEOUT_S = 10.0
FETCH_TIMEOUT_S = 120.0
GRACE_S = 60.0  # beyond the batch's own limit: decoding, queueing and replacing graders


@dataclass(frozen=True)
class VerifySettings:
    """What each supervisor is made with. ``tokenizer_path`` is a folder with ``tokenizer.json`` on every node."""

    tokenizer_path: str
    end_ids: tuple[int, ...]
    verify: VerifyConfig
    roles: RolesConfig
    seed: int = 0


class VerifyActor:
    """One supervisor. Calls run one after another; the driver is the only caller.

    The graders are started by :meth:`start` and not by the constructor, so that its errors reach the driver as raised.
    """

    def __init__(self, settings: VerifySettings, num_graders: int) -> None:
        actor.enter()
        self._settings, self._num_graders = settings, num_graders
        self._worker: VerifyWorker | None = None

    def start(self) -> dict[str, Any]:
        """Start the graders and run their probes; returns their process ids."""
        if self._worker is None:
            settings = self._settings
            self._worker = VerifyWorker(
                settings.tokenizer_path,
                end_ids=settings.end_ids,
                config=settings.verify,
                roles=settings.roles,
                seed=settings.seed,
                num_workers=self._num_graders,
            )
        return {"grader_pids": self.worker.grader_pids()}

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

    def label(self, groups: Sequence[tuple[RolloutGroup, JudgedGroup, ReferenceGroup]]) -> list[LabelledGroup]:
        rollout, judgement, scores = (
            _fetched([row[i].arrays for row in groups], stage) for i, stage in enumerate(("rollout", "verify", "reference"))
        )
        parts = [
            LabelParts(group, rollout[i], judged, judgement[i], reference, scores[i])
            for i, (group, judged, reference) in enumerate(groups)
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
    """A batch under judgement: the references of its shares, and the prompts it was submitted with."""

    refs: Mapping[str, Any]
    prompt_ids: tuple[str, ...]


class VerifyPool:
    """The verify stage: supervisors named ``verify/<run id>/<i>``, one per entry of ``actor_options``.

    Group i goes to supervisor i modulo their number. Consumes rollout and reference groups, produces judged and labelled ones;
    waits for the supervisors alone, within ``verify.batch_timeout_s``. Graders work between :meth:`submit` and
    :meth:`collect` while other stages run.

    Args:
        run_id: part of the actors' names.
        settings: what each supervisor is made with; ``verify.num_workers`` graders are shared out among the supervisors.
        actor_options: Ray options of each actor (placement bundle, num_cpus, runtime_env).
    """

    def __init__(self, *, run_id: str, settings: VerifySettings, actor_options: Sequence[Mapping[str, Any]]) -> None:
        assert actor_options, "a verify pool needs at least one supervisor"
        self._config = settings.verify
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

    def submit(self, groups: Sequence[RolloutGroup]) -> Ticket:
        refs = {name: self._actors[name].judge.remote(share) for name, share in self._shares(groups).items()}
        return Ticket(refs, tuple(group.prompt.prompt_id for group in groups))

    def collect(self, ticket: Ticket, earlier: Sequence[JudgedGroup] = ()) -> list[JudgedGroup]:
        """Judged groups in the order submitted.

        Raises:
            VerifierFault: the share of responses without a verdict passes ``verify.max_faulty_fraction``, those of
                ``earlier`` groups of the same step counted in.
        """
        results = gather(
            ticket.refs,
            timeout_s=self._config.batch_timeout_s + GRACE_S,
            stage="verify",
            doing=f"judging the responses to {len(ticket.prompt_ids)} prompts",
        )
        judged = self._in_order(results, len(ticket.prompt_ids))
        _check_order("verify", ticket.prompt_ids, [group.prompt_id for group in judged])
        check_faults([*earlier, *judged], self._config.max_faulty_fraction)
        return judged

    def label(
        self, groups: Sequence[RolloutGroup], judged: Sequence[JudgedGroup], reference: Sequence[ReferenceGroup]
    ) -> list[LabelledGroup]:
        joined = list(zip(groups, judged, reference, strict=True))
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
