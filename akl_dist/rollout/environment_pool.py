"""A pool of killable processes in which the environments of the rollouts live. Standard library only; used inside the engine.

Nothing but construction waits: requests are queued, :meth:`EnvironmentPool.poll` moves bytes, returns the replies that have come
and enforces the limits. A rollout's environment lives in the process it was opened in (the one with the fewest rollouts then) until
it is closed. A process handles its requests one after another. One that overruns is ended with SIGKILL (its whole group) and
replaced, and every rollout that lived in it gets a :class:`Fault`; the same where one ends by itself.
"""

from __future__ import annotations

import collections
import json
import os
import select
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from akl_dist.contract.errors import RunError, UserError
from akl_dist.contract.message_process import MessageProcess
from akl_dist.rollout.environment import Step, Task

MAX_START_FAILURES = 3  # in a row
PASSED_ON = ("PATH", "HOME", "TMPDIR", "TZ", "PYTHONDONTWRITEBYTECODE")  # of our environment; the rest may hold secrets


@dataclass(frozen=True)
class Fault:
    """The environment of a rollout failed: nothing follows about the response, and no verdict."""

    reason: str


@dataclass
class _Rollout:
    """One open rollout. ``closed``: its user wants to hear no more of it."""

    key: str
    worker: _Worker
    closed: bool = False


@dataclass(eq=False)
class _Worker:
    """One process. ``inflight`` holds what was asked and not answered, oldest first; ``began`` when the oldest could begin."""

    process: MessageProcess
    began: float
    ready: bool = False
    inflight: collections.deque[tuple[str, _Rollout]] = field(default_factory=collections.deque)
    rollouts: dict[str, _Rollout] = field(default_factory=dict)


class EnvironmentPool:
    """``num_workers`` environment processes, alive from construction to :meth:`close`.

    Construct and poll it in one thread that lives as long as the pool: a process dies with the thread that started it.

    Args:
        environment: ``python`` (the tool in the sandbox) or ``module:Class`` of one's own, importable from the working directory
            or this process's ``sys.path``.
        params: keyword arguments of the class; JSON values.
        num_workers: processes. Environments in one process wait for each other, those in several do not.
        timeout_s: wall clock of one request (reset, step or close), from when its process could begin on it: from the reply before
            it, or from its sending where the process was idle.
        start_timeout_s: limit for a process to start and make its first environment.

    Raises:
        UserError: the class cannot be imported, lacks a method, or refuses its parameters; the sandbox of ``python`` is refused.
        RunError: a process does not start.
    """

    def __init__(
        self, *, environment: str, params: Mapping[str, Any], num_workers: int, timeout_s: float, start_timeout_s: float = 60.0
    ) -> None:
        if num_workers < 1 or not timeout_s > 0:
            raise UserError("rollout.tools", got=f"num_workers={num_workers}, timeout_s={timeout_s}", stage="rollout",
                            expected="at least 1 worker and a positive limit", remedy="Mend rollout.tools.* in the configuration.")
        self._environment, self._timeout_s, self._start_timeout_s = environment, timeout_s, start_timeout_s
        try:
            self._spec = json.dumps({"environment": environment, "params": dict(params)})
        except (TypeError, ValueError) as error:
            raise UserError("rollout.tools.params", got=f"{error}", expected="values that JSON can hold", stage="rollout",
                            remedy="Pass numbers, text, lists and mappings alone.") from error
        self._workers: list[_Worker] = []
        self._rollouts: dict[str, _Rollout] = {}
        self._replies: list[tuple[str, Step | Fault]] = []
        self._lost: set[str] = set()  # rollouts whose fault waits for the next poll
        self._failed_starts = 0
        self.isolation: str | None = None  # in which the environments run programs (Sandbox.isolation); None: they run none
        self._counters = collections.Counter(
            opened=0, steps=0, calls=0, failed_calls=0, void_turns=0, faults=0, timeouts=0, crashes=0, started=0
        )
        try:
            self._workers += [self._spawn() for _ in range(num_workers)]
            while not all(worker.ready for worker in self._workers):
                self._pump(time.monotonic() + start_timeout_s)
        except BaseException:
            self.close()
            raise

    # --- the rollouts ------------------------------------------------------------------------------------------------

    def open(self, key: str, task: Task) -> None:
        """Make an environment for a rollout and reset it. Does not wait; a failure comes as a :class:`Fault`.

        Raises:
            RunError: a process that died while it was idle could not be replaced.
        """
        if key in self._rollouts or key in self._lost:
            raise ValueError(f"rollout {key!r} is open already; close_one() it first.")
        if not self._workers:
            raise ValueError("the environment pool is closed; make a new one.")
        for idle in [one for one in self._workers if not one.rollouts]:
            self._attend(idle)  # one that has died meanwhile costs no rollout
        worker = min(self._workers, key=lambda one: len(one.rollouts))
        self._rollouts[key] = worker.rollouts[key] = rollout = _Rollout(key, worker)
        self._counters["opened"] += 1
        self._ask(rollout, {"do": "open", "key": key, "task": asdict(task)})

    def step(self, key: str, turn: str) -> None:
        """Pass on a turn. Does not wait; the reply comes from :meth:`poll`. Steps of one rollout are answered in order.

        A rollout that has been lost and whose fault has not been polled yet takes it in silence.
        """
        if key in self._lost:
            return
        if key not in self._rollouts:
            raise ValueError(f"rollout {key!r} is not open; open() it first.")
        self._ask(self._rollouts[key], {"do": "step", "key": key, "turn": turn})

    def close_one(self, key: str) -> None:
        """Close a rollout's environment; no reply for it comes from here on. Does not wait. One that is lost needs no closing."""
        self._replies = [reply for reply in self._replies if reply[0] != key]
        self._lost.discard(key)
        rollout = self._rollouts.pop(key, None)
        if rollout is not None:
            rollout.closed = True
            rollout.worker.rollouts.pop(key)
            self._ask(rollout, {"do": "close", "key": key})

    def poll(self, timeout_s: float) -> list[tuple[str, Step | Fault]]:
        """Replies that have come, oldest first; waits at most ``timeout_s`` for the first one (0: does not wait).

        Raises:
            RunError: a process could not be replaced.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._pump(time.monotonic() if self._replies else deadline)
            if self._replies or time.monotonic() >= deadline:
                replies, self._replies = self._replies, []
                self._lost.clear()
                return replies

    def close(self) -> None:
        """Kill and reap every process. May be called more than once."""
        for worker in self._workers:
            worker.process.end()
        self._workers.clear()
        self._rollouts.clear()

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def pids(self) -> list[int]:
        """Process ids of the workers, for tests and metrics."""
        return [worker.process.pid for worker in self._workers]

    def counters(self) -> dict[str, int]:
        """opened, steps, calls, failed_calls, void_turns, faults (rollouts), timeouts, crashes, started (processes): totals."""
        return dict(self._counters)

    # --- the processes -----------------------------------------------------------------------------------------------

    def _spawn(self) -> _Worker:
        root = str(Path(__file__).resolve().parents[2])
        paths = dict.fromkeys([os.getcwd(), *(os.path.abspath(path) for path in sys.path), root])
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        environment |= {"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        self._counters["started"] += 1
        process = MessageProcess("akl_dist.rollout.environment_main", [self._spec], environment=environment, cwd=os.getcwd())
        return _Worker(process, time.monotonic())

    def _ask(self, rollout: _Rollout, message: dict[str, Any]) -> None:
        worker = rollout.worker
        if worker.ready and not worker.inflight:
            worker.began = time.monotonic()
        self._flush(worker)
        worker.inflight.append((message["do"], rollout))
        worker.process.send(message)
        worker.process.flush()  # that its other end is closed is seen by the next poll

    def _flush(self, worker: _Worker) -> bool:
        """Write what the pipe takes. What had to wait for room goes on only where the process reads, so that it had nothing
        whole to work on until now, however long nobody has polled."""
        waited = len(worker.process.outgoing)
        alive = worker.process.flush()
        if len(worker.process.outgoing) < waited:
            worker.began = time.monotonic()
        return alive

    def _limit(self, worker: _Worker) -> float:
        """When a worker must have answered next; never for one that has nothing to do."""
        if not worker.ready:
            return worker.began + self._start_timeout_s
        return worker.began + self._timeout_s if worker.inflight else float("inf")

    def _pump(self, until: float) -> None:
        """Move bytes once: wait for a ready pipe, the nearest limit or ``until``, then attend to every worker."""
        poll = select.poll()
        for worker in self._workers:
            poll.register(worker.process.reads_from, select.POLLIN)
            if worker.process.outgoing:
                poll.register(worker.process.writes_to, select.POLLOUT)
        until = min([until, *map(self._limit, self._workers)])
        poll.poll(max(0.0, until - time.monotonic()) * 1000)
        for worker in tuple(self._workers):
            self._attend(worker)

    def _attend(self, worker: _Worker) -> None:
        before, in_part = worker.process.received, worker.process.in_part
        alive = self._flush(worker) & worker.process.receive()
        begun = worker.process.received > before and not in_part
        try:
            messages = worker.process.messages()
        except ValueError:
            self._counters["crashes"] += 1
            self._lose(worker, "wrote what is no reply")
            return
        if begun or messages:  # what is left of a reply that has begun must come within one limit, however it trickles
            worker.began = time.monotonic()
        for message in messages:
            if worker.ready and not worker.inflight:
                self._counters["crashes"] += 1
                self._lose(worker, "wrote a reply that nobody asked for")
                return
            if worker.ready:
                self._take(worker, message)
            elif "ready" in message:
                worker.ready, self._failed_starts, self.isolation = True, 0, message["isolation"]
            else:
                raise UserError(**message["refused"], stage="rollout")
        if not alive:
            self._counters["crashes"] += 1
            self._lose(worker, f"ended by itself ({worker.process.cause_of_death()})")
        elif time.monotonic() >= self._limit(worker):
            self._counters["timeouts"] += 1
            if worker.ready:
                self._lose(worker, f"gave no reply within {self._timeout_s:g} s")
            else:
                self._lose(worker, f"did not start within {self._start_timeout_s:g} s")

    def _take(self, worker: _Worker, message: dict[str, Any]) -> None:
        """One answer: to the oldest request of this worker."""
        asked, rollout = worker.inflight.popleft()
        if rollout.closed:
            return
        if "fault" in message:
            self._forget(rollout, f"the environment raised in {'reset' if asked == 'open' else asked}: {message['fault']}")
            worker.process.send({"do": "close", "key": rollout.key})
            worker.inflight.append(("close", rollout))
        elif "step" in message:
            step = Step(**message["step"])
            self._counters.update(steps=1, calls=step.call, failed_calls=step.failed, void_turns=step.void)
            self._replies.append((rollout.key, step))

    def _forget(self, rollout: _Rollout, reason: str) -> None:
        """A rollout is lost: say so, and hear no more of it."""
        rollout.closed = True
        del self._rollouts[rollout.key], rollout.worker.rollouts[rollout.key]
        self._lost.add(rollout.key)
        self._counters["faults"] += 1
        self._replies.append((rollout.key, Fault(reason)))

    def _lose(self, worker: _Worker, what: str) -> None:
        """End a worker, lose what lived in it, start another in its place."""
        culprit = ""
        if worker.ready and worker.inflight:
            asked, running = worker.inflight[0]
            culprit = f" in {asked} of rollout {running.key!r}"
        worker.process.end()
        for rollout in tuple(worker.rollouts.values()):
            self._forget(rollout, f"the environment process {what}{culprit}; every rollout in it is lost")
        place = self._workers.index(worker)
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_START_FAILURES or not self._counters["opened"]:
                del self._workers[place]
                raise RunError(
                    f"environment process ({self._environment})", got=f"one that {what}", expected="a started process",
                    remedy="Run the environment by itself (docs/tools.md); see its standard error.", stage="rollout",
                )
        self._workers[place] = self._spawn()
