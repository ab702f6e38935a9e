"""A pool of killable grader processes with a hard wall-clock limit on every judgement.

Consumes (gold, response) pairs, produces verdicts in the same order. One thread (the caller's) waits on all pipes at once, with
a deadline on every wait. A grader that overruns is killed with SIGKILL (its whole process group) and replaced: that judgement
becomes ``timeout``, everything else goes on. A grader that dies by itself makes its judgement an ``error``. Graders are
replaced after ``tasks_per_worker`` judgements. They are fresh interpreters, never forks of the caller.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from akl_dist.contract.errors import VerifierFault
from akl_dist.contract.records import Status, Verdict
from akl_dist.verify.grader_main import HEADER, encode

WINDOW = 4  # judgements in flight per grader: the next ones are in its pipe while it works
MATH_JUDGE = "akl_dist.verify.math:judge"
MAX_START_FAILURES = 3  # in a row


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


@dataclass
class _Grader:
    """One child process. ``inflight`` holds indices of items sent, oldest first; ``started`` when the oldest began."""

    process: subprocess.Popen[bytes]
    stderr: tempfile._TemporaryFileWrapper
    inflight: collections.deque[int] = field(default_factory=collections.deque)
    outgoing: bytearray = field(default_factory=bytearray)
    incoming: bytearray = field(default_factory=bytearray)
    started: float = 0.0
    judged: int = 0

    def fd(self, name: str) -> int:
        pipe = getattr(self.process, name)
        assert pipe is not None
        return pipe.fileno()


class GraderPool:
    """``num_workers`` graders, alive from construction to :meth:`close`.

    Args:
        num_workers: grader processes, at all times.
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
            self._fill(num_workers)
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
        """Kill and reap every grader. May be called more than once."""
        for grader in self._graders:
            self._end(grader)
        self._graders.clear()

    def __enter__(self) -> GraderPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _fill(self, count: int) -> None:
        """Start ``count`` graders side by side and wait until each has passed its probes."""
        fresh = [self._spawn() for _ in range(count)]
        self._graders += fresh
        deadline = time.monotonic() + self._start_timeout_s
        for grader in fresh:
            self._probe(grader, deadline)

    def _spawn(self) -> _Grader:
        root = str(Path(__file__).resolve().parents[2])
        environment = {
            "PATH": os.environ.get("PATH", ""),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": root,
            "PYTHONDONTWRITEBYTECODE": os.environ.get("PYTHONDONTWRITEBYTECODE", ""),
        } | self._environment
        stderr = tempfile.TemporaryFile(prefix="grader-stderr-")  # noqa: SIM115 (lives as long as the grader)
        process = subprocess.Popen(
            [sys.executable, "-m", "akl_dist.verify.grader_main", self._judge, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
            cwd=self._working_directory,
            start_new_session=True,
            bufsize=0,
        )
        grader = _Grader(process, stderr)  # type: ignore[arg-type]
        os.set_blocking(grader.fd("stdin"), False)
        os.set_blocking(grader.fd("stdout"), False)
        self._counters["started"] += 1
        return grader

    def _probe(self, grader: _Grader, deadline: float) -> None:
        reply = self._wait_reply(grader, deadline)
        if "ready" not in reply:
            raise self._fault(f"a first message {reply!r}", "ready")
        self.isolation = reply["isolation"]
        for item, expected in self._probes:
            grader.outgoing += encode(vars(item))
            reply = self._wait_reply(grader, deadline)
            if reply["status"] != expected.value:
                raise self._fault(f"{reply['status']} ({reply['reason']}) for the probe {item}", expected.value)

    def _wait_reply(self, grader: _Grader, deadline: float) -> dict:
        """Block until the grader answers, for start-up only."""
        while True:
            replies = _decode(grader.incoming)
            if replies:
                return replies[0]
            with selectors.DefaultSelector() as selector:
                selector.register(grader.fd("stdout"), selectors.EVENT_READ)
                if grader.outgoing:
                    selector.register(grader.fd("stdin"), selectors.EVENT_WRITE)
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise self._fault(f"no answer within {self._start_timeout_s:g} s", "a started grader")
            if not (_flush(grader) and _receive(grader)):
                raise self._fault(f"it ended ({_cause_of_death(grader)})", "a started grader")

    def _fault(self, got: str, expected: str) -> VerifierFault:
        return VerifierFault(f"grader process ({self._judge})", got=got, expected=expected, remedy=self._remedy, stage="verify")

    def _end(self, grader: _Grader) -> None:
        """SIGKILL the whole group (its leader is not reaped yet, so the id is still ours), then reap."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(grader.process.pid, signal.SIGKILL)
        grader.process.wait(timeout=30.0)
        for pipe in (grader.process.stdin, grader.process.stdout):
            if pipe:
                pipe.close()
        grader.stderr.close()

    def _replace(self, old: _Grader) -> None:
        self._end(old)
        self._graders.remove(old)
        for attempt in range(MAX_START_FAILURES):
            try:
                self._fill(1)
                return
            except VerifierFault:
                self._end(self._graders.pop())
                if attempt == MAX_START_FAILURES - 1:
                    raise

    # --- judging -----------------------------------------------------------------------------------------------------

    def judge_many(
        self, items: Sequence[Any], timeout_s: float | None = None, batch_deadline: float | None = None
    ) -> list[Verdict]:
        """Verdicts in the order of ``items``; never raises for an answer, however hostile.

        Args:
            items: what to judge: :class:`Item`, or the records of the pool's own judge.
            timeout_s: wall clock of one judgement, from the reply before it to its own; default the pool's.
            batch_deadline: ``time.monotonic()`` value after which every item without a verdict becomes ``timeout``;
                default: as if every item took its whole limit.

        Raises:
            VerifierFault: a killed or dead grader could not be replaced.
        """
        limit = self._timeout_s if timeout_s is None else timeout_s
        if batch_deadline is None:
            batch_deadline = time.monotonic() + limit * len(items) + self._start_timeout_s
        with self._lock:
            return _Batch(self, items, limit, batch_deadline).run()


class _Batch:
    """One call of ``judge_many``: which items wait, which are in flight, which are done."""

    def __init__(self, pool: GraderPool, items: Sequence[Any], limit: float, deadline: float) -> None:
        self.pool, self.items, self.limit, self.deadline = pool, items, limit, deadline
        self.waiting = collections.deque(range(len(items)))
        self.verdicts: list[Verdict | None] = [None] * len(items)

    def run(self) -> list[Verdict]:
        pool = self.pool
        for grader in list(pool._graders):
            if grader.process.poll() is not None:  # it died while idle: nobody's judgement is to blame
                pool._counters["crashes"] += 1
                pool._replace(grader)
        while self.waiting or any(grader.inflight for grader in pool._graders):
            now = time.monotonic()
            if now >= self.deadline:
                self._give_up()
                break
            for grader in list(pool._graders):
                self._feed(grader, now)
            self._wait(now)
            for grader in list(pool._graders):
                self._attend(grader)
        pool._counters["judged"] += len(self.items)
        assert all(verdict is not None for verdict in self.verdicts)
        return [verdict for verdict in self.verdicts if verdict is not None]

    def _feed(self, grader: _Grader, now: float) -> None:
        room = min(WINDOW - len(grader.inflight), self.pool._tasks_per_worker - grader.judged - len(grader.inflight))
        for _ in range(min(room, len(self.waiting))):
            if not grader.inflight:
                grader.started = now
            index = self.waiting.popleft()
            grader.inflight.append(index)
            grader.outgoing += encode(vars(self.items[index]))

    def _wait(self, now: float) -> None:
        """Until a pipe is ready, the oldest judgement overruns, or the batch ends: whatever comes first."""
        until = min([self.deadline, *(g.started + self.limit for g in self.pool._graders if g.inflight)])
        with selectors.DefaultSelector() as selector:
            for grader in self.pool._graders:
                if grader.inflight:
                    selector.register(grader.fd("stdout"), selectors.EVENT_READ)
                if grader.outgoing:
                    selector.register(grader.fd("stdin"), selectors.EVENT_WRITE)
            selector.select(max(0.0, until - now))

    def _attend(self, grader: _Grader) -> None:
        """Take replies; kill and replace where the limit has passed or the process has died; recycle where it is due."""
        if not grader.inflight:
            return
        pool = self.pool
        alive = _flush(grader) and _receive(grader)
        for reply in _decode(grader.incoming):
            self.verdicts[grader.inflight.popleft()] = _verdict(reply)
            grader.started = time.monotonic()
            grader.judged += 1
        if not alive:
            pool._counters["crashes"] += 1
            self._lose(grader, Verdict(Status.ERROR, reason=f"the grader process died ({_cause_of_death(grader)})"))
        elif grader.inflight and time.monotonic() - grader.started >= self.limit:
            pool._counters.update(timeouts=1, kills=1)
            self._lose(grader, Verdict(Status.TIMEOUT, reason=f"no verdict within {self.limit:g} s"))
        elif grader.judged >= pool._tasks_per_worker:
            pool._counters["recycled"] += 1
            pool._replace(grader)

    def _lose(self, grader: _Grader, verdict: Verdict) -> None:
        """Blame the judgement that was running, put the ones behind it back in front, replace the process."""
        if grader.inflight:
            self.verdicts[grader.inflight.popleft()] = verdict
        self.waiting.extendleft(reversed(grader.inflight))
        grader.inflight.clear()
        self.pool._replace(grader)

    def _give_up(self) -> None:
        late = Verdict(Status.TIMEOUT, reason="the batch's deadline passed")
        busy = [grader for grader in self.pool._graders if grader.inflight]
        for index, verdict in enumerate(self.verdicts):
            if verdict is None:
                self.verdicts[index] = late
                self.pool._counters["timeouts"] += 1
        self.waiting.clear()
        for grader in busy:
            self.pool._counters["kills"] += 1
            self.pool._replace(grader)


def _verdict(reply: dict) -> Verdict:
    span = reply["span"]
    return Verdict(Status(reply["status"]), reply["extracted"], (span[0], span[1]) if span else None, reply["reason"],
                   reply["score"], tuple((name, value) for name, value in reply["terms"]))


def _flush(grader: _Grader) -> bool:
    """Write what the pipe takes; False if the other end is closed."""
    while grader.outgoing:
        try:
            written = os.write(grader.fd("stdin"), grader.outgoing[: 1 << 16])
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False
        del grader.outgoing[:written]
    return True


def _receive(grader: _Grader) -> bool:
    """Read what is there; False at the end of the stream."""
    while True:
        try:
            data = os.read(grader.fd("stdout"), 1 << 16)
        except BlockingIOError:
            return True
        if not data:
            return False
        grader.incoming += data


def _decode(buffer: bytearray) -> list[dict]:
    """Take the complete messages out of the buffer."""
    messages = []
    while len(buffer) >= HEADER.size:
        (size,) = HEADER.unpack(buffer[: HEADER.size])
        if len(buffer) < HEADER.size + size:
            break
        messages.append(json.loads(bytes(buffer[HEADER.size : HEADER.size + size])))
        del buffer[: HEADER.size + size]
    return messages


def _cause_of_death(grader: _Grader) -> str:
    try:
        code = grader.process.wait(timeout=5.0)
    except subprocess.TimeoutExpired:
        return "closed its output"
    grader.stderr.seek(0)
    last = grader.stderr.read().decode("utf-8", "replace").strip().splitlines()
    cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"{cause}: {last[-1][:300]}" if last else cause
