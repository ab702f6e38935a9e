"""A pool of killable grader processes with a hard wall-clock limit on every judgement.

Consumes (gold, response) pairs, produces verdicts in the same order. One thread (the caller's) waits on all pipes at once, with
a deadline on every wait. A grader that overruns is killed with SIGKILL (its whole process group) and replaced: that judgement
becomes ``timeout``, everything else goes on. A grader that dies by itself makes its judgement an ``error``. Graders are
replaced after ``tasks_per_worker`` judgements. They are fresh interpreters, never forks of the caller.

A replacement starts beside the others: it gets work once it has passed its probes, and nobody waits for it before that. The
probes are in its pipe from the beginning, so that it can go through them while nobody looks, between two batches.
"""

from __future__ import annotations

import collections
import contextlib
import os
import secrets
import select
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from akl_dist.contract.errors import VerifierFault
from akl_dist.contract.message_process import MessageProcess
from akl_dist.contract.records import Status, Verdict

PROBE = "probe"  # number of the requests at the start
WINDOW = 4  # judgements in flight per grader: the next ones are in its pipe while it works
MATH_JUDGE = "akl_dist.verify.math:judge"
MAX_START_FAILURES = 3  # in a row, in one grader's place
DEATH_S = 1.0  # for a grader that closed its output to end, before it is said to live on; the others wait meanwhile
LONGEST_WAIT_S = 3600.0  # of one look at the pipes: the system call takes no more than 24 days


@dataclass(frozen=True)
class Item:
    """One judgement: the arguments of ``akl_dist.verify.math.judge``."""

    gold: str
    response_text: str
    truncated: bool
    think_open: bool = False


PROBES: tuple[tuple[Item, Status], ...] = (
    (Item("\\frac{1}{2}", "<think>0.7?</think>so \\boxed{0.5}", False), Status.OK),
    (Item("2\\sqrt{2}", "\\boxed{\\sqrt{8}}", False), Status.OK),
    (Item("3", "<think>\\boxed{3}</think>\\boxed{4}", False), Status.WRONG),
    (Item("2\\sqrt{2}", "\\boxed{\\sqrt{7}}", False), Status.WRONG),
)
"""Known-right and known-wrong answers that every grader judges before it is used."""


@dataclass(eq=False)
class _Grader:
    """One child process. It starts until it has said ``ready`` and passed its ``probes``; only then it gets work.

    ``inflight`` holds indices of items sent, with the numbers that their replies must repeat, oldest first; ``began`` is when the
    oldest began, or when the process was started.
    ``attempts`` is how often it may be tried to start a grader in this place, this time included.
    """

    process: MessageProcess
    began: float
    attempts: int
    probes: collections.deque[tuple[Any, Status]]
    ready: bool = False
    inflight: collections.deque[tuple[int, str]] = field(default_factory=collections.deque)
    judged: int = 0

    @property
    def starting(self) -> bool:
        return not self.ready or bool(self.probes)

    def overruns_at(self, limit_s: float, start_limit_s: float) -> float:
        """``time.monotonic()`` value by which it must have answered; infinite for one that has nothing to do."""
        if self.starting:
            return self.began + start_limit_s
        return self.began + limit_s if self.inflight else float("inf")


class GraderPool:
    """``num_workers`` graders, alive from construction to :meth:`close`.

    Args:
        num_workers: grader processes, at all times, those that start included. All have started when the pool is made.
        timeout_s: default wall clock of one judgement.
        tasks_per_worker: a grader is replaced after this many.
        start_timeout_s: limit for one grader to start, import and pass its probes.
        judge: ``module:function`` called in the grader with the fields of :class:`Item` (or of whatever record it is given).
        probes: items with the status they must get; the pool refuses to start otherwise.
        environment: added to the graders' (otherwise minimal) environment.
        working_directory: where the graders run.
        remedy: what to do about a grader that does not start.

    Raises:
        VerifierFault: a grader does not start, or a probe gets another verdict.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        timeout_s: float = 5.0,
        tasks_per_worker: int = 2000,
        start_timeout_s: float = 120.0,
        judge: str = MATH_JUDGE,
        probes: Sequence[tuple[Any, Status]] = PROBES,
        environment: Mapping[str, str] | None = None,
        working_directory: str = "/",
        remedy: str = "The verifier is not to be trusted; check the installation of math-verify and sympy.",
    ) -> None:
        if num_workers < 1 or timeout_s <= 0 or tasks_per_worker < 1:
            raise VerifierFault(
                "grader pool",
                got=f"num_workers={num_workers}, timeout_s={timeout_s}, tasks_per_worker={tasks_per_worker}",
                expected="at least 1 worker and task, and a positive limit",
                remedy="Mend verify.* in the configuration.",
                stage="verify",
            )
        self._timeout_s, self._tasks_per_worker, self._start_timeout_s = timeout_s, tasks_per_worker, start_timeout_s
        self._judge, self._probes, self._environment = judge, tuple(probes), dict(environment or {})
        self._working_directory, self._remedy = working_directory, remedy
        self.isolation: str | None = None  # in which the graders run programs (Sandbox.isolation); None: they run none
        self._lock = threading.Lock()
        self._graders: list[_Grader] = []
        self._counters = collections.Counter(judged=0, timeouts=0, crashes=0, kills=0, recycled=0, started=0)
        try:
            for _ in range(num_workers):
                self._graders.append(self._spawn(attempts=1))
            while any(grader.starting for grader in self._graders):
                self._wait(float("inf"), timeout_s)
                for grader in tuple(self._graders):
                    self._proceed(grader)
        except BaseException:
            self.close()
            raise

    # --- life of the processes ---------------------------------------------------------------------------------------

    def pids(self) -> list[int]:
        """Process ids of the graders, for tests and metrics."""
        return [grader.process.pid for grader in self._graders]

    def counters(self) -> dict[str, int]:
        """judged, timeouts, crashes, kills, recycled, started: totals since construction."""
        return dict(self._counters)

    def close(self) -> None:
        """Kill and reap every grader, those that start included. May be called more than once.

        Raises:
            DeadlineExceeded: one did not end; the others have ended all the same.
        """
        graders, self._graders = self._graders, []
        with contextlib.ExitStack() as stack:  # goes on to the next one where one raises
            for grader in graders:
                stack.callback(grader.process.end)

    def __enter__(self) -> GraderPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _spawn(self, attempts: int) -> _Grader:
        root = str(Path(__file__).resolve().parents[2])
        environment = {
            "PATH": os.environ.get("PATH", ""),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": root,
            "PYTHONDONTWRITEBYTECODE": os.environ.get("PYTHONDONTWRITEBYTECODE", ""),
        } | self._environment
        try:
            process = MessageProcess(
                "akl_dist.verify.grader_main", [self._judge], environment=environment, cwd=self._working_directory
            )
        except OSError as error:
            raise self._fault(f"{error}", "a started grader") from error
        self._counters["started"] += 1
        for item, _ in self._probes:
            process.send({"nonce": PROBE, "item": vars(item)})
        process.flush()
        return _Grader(process, time.monotonic(), attempts, collections.deque(self._probes))

    def _wait(self, until: float, limit_s: float) -> None:
        """Until a pipe is ready, a start or the oldest judgement of a grader overruns, or ``until``: whatever comes first."""
        poll = select.poll()
        for grader in self._graders:
            poll.register(grader.process.reads_from, select.POLLIN)
            if grader.process.outgoing:
                poll.register(grader.process.writes_to, select.POLLOUT)
            until = min(until, grader.overruns_at(limit_s, self._start_timeout_s))
        poll.poll(min(max(0.0, until - time.monotonic()), LONGEST_WAIT_S) * 1000)

    def _proceed(self, grader: _Grader) -> None:
        """Take what a grader that starts has said. One that fails to start is replaced while attempts are left."""
        try:
            self._take_start(grader)
        except VerifierFault:
            if grader.attempts <= 1:
                raise
            self._replace(grader, grader.attempts - 1)

    def _take_start(self, grader: _Grader) -> None:
        alive = grader.process.flush() & grader.process.receive() and grader.process.running
        try:
            messages = grader.process.messages()
        except ValueError as error:
            raise self._fault(f"{error}", "messages") from error
        for message in messages:
            if not grader.ready:
                if "ready" not in message:
                    raise self._fault(f"a first message {message!r}", "ready")
                grader.ready, self.isolation = True, message["isolation"]
                continue
            if not grader.probes:
                raise self._fault(f"a message {message!r} after its probes", "none before it gets work")
            item, expected = grader.probes.popleft()
            verdict = _verdict(message, PROBE)
            if verdict is None or verdict.status is not expected:
                got = f"{message!r}"[:300] if verdict is None else f"{verdict.status.value} ({verdict.reason})"
                raise self._fault(f"{got} for the probe {item}", expected.value)
        if not alive:
            raise self._fault(f"it ended ({grader.process.cause_of_death(DEATH_S)})", "a started grader")
        if grader.starting and time.monotonic() >= grader.began + self._start_timeout_s:
            raise self._fault(f"no answer within {self._start_timeout_s:g} s", "a started grader")

    def _fault(self, got: str, expected: str) -> VerifierFault:
        return VerifierFault(f"grader process ({self._judge})", got=got, expected=expected, remedy=self._remedy, stage="verify")

    def _replace(self, old: _Grader, attempts: int = MAX_START_FAILURES) -> None:
        """End a grader and begin to start another in its place; waits for the end alone, which SIGKILL makes short."""
        place = self._graders.index(old)
        del self._graders[place]
        old.process.end()
        self._graders.insert(place, self._spawn(attempts))

    # --- judging -----------------------------------------------------------------------------------------------------

    def judge_many(
        self, items: Sequence[Any], timeout_s: float | None = None, batch_deadline: float | None = None
    ) -> list[Verdict]:
        """Verdicts in the order of ``items``; never raises for an answer, however hostile. What it raises closes the pool.

        Graders that still start when it returns go on to do so; the next call takes them up.

        Args:
            items: what to judge: :class:`Item`, or the records of the pool's own judge.
            timeout_s: wall clock of one judgement, from the reply before it to its own; default the pool's.
            batch_deadline: ``time.monotonic()`` value after which every item without a verdict becomes ``timeout``, even while
                every grader starts; default: as if every item took its whole limit.

        Raises:
            VerifierFault: a killed or dead grader could not be replaced.
            DeadlineExceeded: a killed grader did not end.
        """
        limit = self._timeout_s if timeout_s is None else timeout_s
        if batch_deadline is None:
            batch_deadline = time.monotonic() + limit * len(items) + self._start_timeout_s
        with self._lock:
            if not self._graders:
                raise VerifierFault("grader pool", got="a batch after close() or a fault", expected="an open pool",
                                    remedy="Make a new GraderPool; a fault before this one says why it closed.", stage="verify")
            try:
                return _Batch(self, items, limit, batch_deadline).run()
            except BaseException:  # graders that work at a batch which is gone have nothing to say to the next one
                self.close()
                raise


class _Batch:
    """One call of ``judge_many``: which items wait, which are in flight, which are done."""

    def __init__(self, pool: GraderPool, items: Sequence[Any], limit: float, deadline: float) -> None:
        self.pool, self.items, self.limit, self.deadline = pool, items, limit, deadline
        self.waiting = collections.deque(range(len(items)))
        self.verdicts: list[Verdict | None] = [None] * len(items)

    def run(self) -> list[Verdict]:
        pool = self.pool
        for grader in tuple(pool._graders):
            if grader.starting and grader.process.outgoing:  # its probes did not fit into the pipe: it could not go on by itself
                grader.began = time.monotonic()
            self._attend(grader)
        while self.waiting or any(grader.inflight for grader in pool._graders):
            if time.monotonic() >= self.deadline:
                self._give_up()
                break
            self._feed()
            pool._wait(self.deadline, self.limit)
            for grader in tuple(pool._graders):
                self._attend(grader)
        pool._counters["judged"] += len(self.items)
        assert all(verdict is not None for verdict in self.verdicts)
        return [verdict for verdict in self.verdicts if verdict is not None]

    def _feed(self) -> None:
        """Share out what waits, one each in turn: none gets a second item while another has nothing to do."""
        now = time.monotonic()
        for depth in range(WINDOW):
            for grader in self.pool._graders:
                spent = grader.judged + len(grader.inflight) >= self.pool._tasks_per_worker
                if not self.waiting or grader.starting or spent or len(grader.inflight) > depth:
                    continue
                if not grader.inflight:
                    grader.began = now
                index, nonce = self.waiting.popleft(), secrets.token_hex(8)
                grader.inflight.append((index, nonce))
                grader.process.send({"nonce": nonce, "item": vars(self.items[index])})

    def _attend(self, grader: _Grader) -> None:
        """Take replies; kill and replace where the limit has passed or the process has died; recycle where it is due."""
        pool = self.pool
        if grader.starting:
            pool._proceed(grader)
            return
        alive = grader.process.flush() & grader.process.receive() and (bool(grader.inflight) or grader.process.running)
        confused = not self._take_replies(grader)
        if confused or not alive:
            pool._counters["crashes"] += 1
            if grader.inflight:  # one that died while idle blames nobody's judgement
                cause = "it wrote what is no reply" if confused else f"it died: {grader.process.cause_of_death(DEATH_S)}"
                self._settle(grader, Verdict(Status.ERROR, reason=f"the grader process failed ({cause})"))
            self._lose(grader)
        elif grader.inflight and time.monotonic() - grader.began >= self.limit:
            pool._counters.update(timeouts=1, kills=1)
            self._settle(grader, Verdict(Status.TIMEOUT, reason=f"no verdict within {self.limit:g} s"))
            self._lose(grader)
        elif grader.judged >= pool._tasks_per_worker:
            pool._counters["recycled"] += 1
            pool._replace(grader)

    def _take_replies(self, grader: _Grader) -> bool:
        """Settle what the grader has answered; False where it wrote anything but the replies it owes: what comes next cannot be
        told apart either."""
        try:
            while replies := grader.process.messages():
                for reply in replies:
                    verdict = _verdict(reply, grader.inflight[0][1]) if grader.inflight else None
                    if verdict is None:
                        return False
                    self._settle(grader, verdict)
                    grader.began = time.monotonic()
                    grader.judged += 1
        except ValueError:  # no frame, or no JSON in it
            return False
        return True

    def _settle(self, grader: _Grader, verdict: Verdict) -> None:
        index, _ = grader.inflight.popleft()
        self.verdicts[index] = verdict

    def _lose(self, grader: _Grader) -> None:
        """Put the judgements behind the one that is to blame back in front, replace the process."""
        self.waiting.extendleft(index for index, _ in reversed(grader.inflight))
        self.pool._replace(grader)

    def _give_up(self) -> None:
        starting = sum(grader.starting for grader in self.pool._graders)
        waited_for = f" while {starting} of {len(self.pool._graders)} graders were starting" if starting else ""
        late = Verdict(Status.TIMEOUT, reason=f"the batch's deadline passed{waited_for}")
        for index, verdict in enumerate(self.verdicts):
            if verdict is None:
                self.verdicts[index] = late
                self.pool._counters["timeouts"] += 1
        self.waiting.clear()
        for grader in [grader for grader in self.pool._graders if grader.inflight]:
            self.pool._counters["kills"] += 1
            self.pool._replace(grader)


def _verdict(reply: Any, nonce: str) -> Verdict | None:
    """The verdict in a reply; None for anything that is not the reply to the request with this number."""
    try:
        if reply["nonce"] != nonce:
            return None
        span, terms = reply["span"], tuple((name, value) for name, value in reply["terms"])
        return Verdict(Status(reply["status"]), reply["extracted"], (span[0], span[1]) if span else None, reply["reason"],
                       reply["score"], terms)
    except (KeyError, TypeError, ValueError, IndexError):
        return None
