"""The one place that waits on Ray. Every wait has a limit and names whom it waits for.

When several actors fail together (one dies, its peers then lose their collective), the cause is reported and not the echo:
a dead actor first, then an error raised on purpose, then anything else.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import psutil
import ray
from ray.exceptions import (
    GetTimeoutError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

from akl_dist.contract.errors import ActorDied, AklError, ClusterError, DeadlineExceeded, RunError
from akl_dist.contract.records import Handle

ECHO_WINDOW_S = 3.0
"""After a first failure, how long to look for the failure that caused it."""

LIVENESS_INTERVAL_S = 2.0
"""How often a wait looks whether the processes it depends on are alive."""

DELIVERY_TIMEOUT_S = 60.0
"""From the moment a result is known to be there until it has been read."""

LOG_AFTER_S, LOG_EVERY_S = 30.0, 60.0
"""A wait says whom it waits for after the first of these times, and again every second one."""

_log = logging.getLogger(__name__)
_watched: list[psutil.Process] = []


def watch(process: psutil.Process) -> None:
    """Have every wait fail when this process (a Ray node process started here) is gone: Ray itself would go on waiting."""
    _watched[:] = [process]


def unwatch() -> None:
    """Before a cluster is ended on purpose."""
    _watched.clear()


def _check_watched(stage: str, doing: str) -> None:
    for process in _watched:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            raise ClusterError(
                "local Ray cluster", got=f"its node process {process.pid} ended while {doing}", expected="a living cluster",
                remedy="Something ended it from outside (memory, or a signal to the whole job); resume with the same run_id.",
                stage=stage,
            )


class _Wait:
    """One wait: its limit, what it says while it lasts, and what it raises in the end."""

    def __init__(self, timeout_s: float, stage: str, doing: str) -> None:
        self.stage, self.doing = stage, doing
        self._timeout_s, self._begin = timeout_s, time.monotonic()
        self._deadline, self._next_log = self._begin + timeout_s, self._begin + LOG_AFTER_S

    def ready(self, waiting: Mapping[Any, str]) -> list[Any]:
        """Those of the references (each with its actor's name) that can be read now; at least one.

        Raises:
            DeadlineExceeded: none came within the limit.
            ClusterError: a watched process is gone.
        """
        while True:
            left = max(0.0, self._deadline - time.monotonic())
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=min(left, LIVENESS_INTERVAL_S))
            if ready:
                return ready
            late = ", ".join(dict.fromkeys(waiting.values()))
            if left <= LIVENESS_INTERVAL_S:
                raise DeadlineExceeded(
                    late, got=f"no answer within {self._timeout_s:g} s while {self.doing}", expected="an answer",
                    remedy=f"Look at the logs of these actors; raise {self.stage}.timeout_s if the work is really that long.",
                    stage=self.stage, actor=late,
                )
            _check_watched(self.stage, self.doing)
            if time.monotonic() >= self._next_log:
                self._next_log += LOG_EVERY_S
                _log.warning("%s: waiting for %s since %.0f s: %s", self.stage, late, time.monotonic() - self._begin, self.doing)

    def pause(self, seconds: float) -> None:
        """What the waiter did meanwhile does not count."""
        self._begin += seconds
        self._deadline += seconds
        self._next_log += seconds


def arrivals(
    calls: Mapping[Any, str], *, timeout_s: float, stage: str, doing: str, again: Callable[[str, Any], Any] | None = None
) -> Iterator[tuple[str, Any]]:
    """Actor name and result of remote calls, as they come.

    Args:
        calls: object reference of a call's result -> actor name; an actor may have several.
        timeout_s: limit for all of them together, without the time that the consumer takes between results.
        stage: stage word for errors.
        doing: what the actors were asked to do ("sampling step 3").
        again: called with each actor name and result before they are given out; returns the reference of a further call of that
            actor to wait for, or None.

    Raises:
        ActorDied, DeadlineExceeded: naming the actors.
        AklError: the error an actor raised on purpose, as raised there.
        RunError: any other exception of an actor, with its traceback.
    """
    waiting = dict(calls)
    wait = _Wait(timeout_s, stage, doing)
    while waiting:
        for ref in wait.ready(waiting):
            name = waiting.pop(ref)
            value, error = _result(ref, name, stage, doing)
            if error is not None:
                raise _cause([error, *_echoes(waiting, stage, doing)])
            further = again(name, value) if again is not None else None
            if further is not None:
                waiting[further] = name
            begin = time.monotonic()
            yield name, value
            wait.pause(time.monotonic() - begin)


def gather(refs: Mapping[str, Any], *, timeout_s: float, stage: str, doing: str) -> dict[str, Any]:
    """Results of remote calls, one per actor name, in the order of ``refs``. Other arguments and errors: :func:`arrivals`."""
    calls = {ref: name for name, ref in refs.items()}
    results = dict(arrivals(calls, timeout_s=timeout_s, stage=stage, doing=doing))
    return {name: results[name] for name in refs}


def answered(calls: Mapping[Any, str], *, timeout_s: float, stage: str, doing: str) -> dict[Any, Any]:
    """Results of those calls (reference -> actor name; an actor may have several) that have been answered by now.

    Waits for the first one up to ``timeout_s``; with 0 it does not wait, and the result may be empty. Errors: :func:`arrivals`.
    """
    ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0) if calls else ([], [])
    if not ready and timeout_s > 0 and calls:
        ready = _Wait(timeout_s, stage, doing).ready(calls)
    results = {}
    for ref in ready:
        value, error = _result(ref, calls[ref], stage, doing)
        if error is not None:
            others = {other: name for other, name in calls.items() if other is not ref}
            raise _cause([error, *_echoes(others, stage, doing)])
        results[ref] = value
    return results


def _result(ref: Any, name: str, stage: str, doing: str) -> tuple[Any, AklError | None]:
    try:
        return ray.get(ref, timeout=DELIVERY_TIMEOUT_S), None
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, AklError):
            cause.actor = cause.actor or name
            return None, cause
        if isinstance(cause, ObjectLostError):  # another actor's, given as an argument
            return None, died(f"owner of what {name} was given", stage, f"{name} was {doing}", cause)
        return None, RunError(
            name, got=f"{type(cause).__name__} while {doing}: {cause}", expected="a result",
            remedy=f"Traceback of the actor:\n{error}", stage=stage, actor=name,
        )
    except (RayActorError, OutOfMemoryError) as error:
        return None, died(name, stage, doing, error)
    except ObjectLostError as error:
        return None, died(name, stage, f"fetching its result of {doing}", error)
    except GetTimeoutError:
        return None, DeadlineExceeded(
            name, got=f"a result of {doing} that is not delivered within {DELIVERY_TIMEOUT_S:g} s", expected="its delivery",
            remedy="Check the object store and the network between nodes.", stage=stage, actor=name,
        )
    except RayError as error:  # a value or an exception that cannot be unpickled here, among others
        return None, RunError(name, got=f"{type(error).__name__} while {doing}", expected="a result that can be read",
                              remedy=f"What Ray says:\n{error}", stage=stage, actor=name)


def died(name: str, stage: str, doing: str, error: Exception) -> ActorDied:
    """The error for an actor whose process is gone; Ray's own words (which name memory kills) are kept."""
    first = str(error).strip().splitlines()
    return ActorDied(
        name, got=f"its process ended while {doing} ({type(error).__name__}: {first[0] if first else 'no reason given'})",
        expected="a living actor",
        remedy="See logs/ in the run directory for its last lines; resume with the same run_id to go on from the last checkpoint.",
        stage=stage, actor=name,
    )


def _echoes(waiting: Mapping[Any, str], stage: str, doing: str) -> Iterable[AklError]:
    """Further errors within ``ECHO_WINDOW_S``."""
    names, deadline = dict(waiting), time.monotonic() + ECHO_WINDOW_S
    while names:
        ready, _ = ray.wait(list(names), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            return
        for ref in ready:
            _, error = _result(ref, names.pop(ref), stage, doing)
            if error is not None:
                yield error


def _cause(errors: list[AklError]) -> AklError:
    def rank(error: AklError) -> int:
        if isinstance(error, ActorDied):
            return 0
        return 2 if type(error) is RunError else 1

    return min(errors, key=rank)  # min keeps the first in time among equals


def fetch(handle: Handle, *, timeout_s: float, stage: str, what: str) -> Any:
    """The record behind a handle; a record that never went through a store is returned as it is."""
    return fetch_all([handle], timeout_s=timeout_s, stage=stage, what=what)[0]


@dataclasses.dataclass(frozen=True)
class Part:
    """Handle of one of several records that share an object of the store."""

    ref: Any
    index: int


def fetch_all(handles: Sequence[Handle], *, timeout_s: float, stage: str, what: str) -> list[Any]:
    """The records behind handles, in order, in one request (a request per handle costs more than the arrays of a small one)."""
    wanted = {_ref(handle): None for handle in handles if _ref(handle) is not None}
    try:
        # Without a reference Ray is left alone: asked for nothing, it would start a cluster.
        found = dict(zip(wanted, ray.get(list(wanted), timeout=timeout_s) if wanted else (), strict=True))
    except GetTimeoutError as error:
        raise DeadlineExceeded(
            what, got=f"not delivered within {timeout_s:g} s", expected="the arrays behind a handle",
            remedy="Check the object store and the network between nodes.", stage=stage,
        ) from error
    except (ObjectLostError, RayActorError) as error:
        raise died(f"owner of {what}", stage, f"fetching {what}", error) from error
    except RayError as error:
        raise RunError(what, got=f"{type(error).__name__}", expected="the arrays behind a handle", stage=stage,
                       remedy=f"What Ray says:\n{error}") from error
    return [found[handle.ref][handle.index] if isinstance(handle, Part) else found.get(_ref(handle), handle) for handle in handles]


def _ref(handle: Handle) -> Any:
    if isinstance(handle, Part):
        return handle.ref
    return handle if isinstance(handle, ray.ObjectRef) else None


def store(value: Any) -> Handle:
    """Put a record of arrays into the object store of this node and return its handle."""
    return ray.put(value)


SHARED_OBJECT_BYTES = 2**20
"""Records share an object up to this size: small ones cost a request each, and large ones should move only where needed."""


def store_all(records: Sequence[Any]) -> list[Handle]:
    """Put records (dataclasses of arrays) into the object store, small neighbours together; their handles in order."""
    handles: list[Handle] = []
    members: list[Any] = []
    size = 0
    for record in records:
        if members and size + _nbytes(record) > SHARED_OBJECT_BYTES:
            handles += _store_together(members)
            members, size = [], 0
        members.append(record)
        size += _nbytes(record)
    return handles + _store_together(members)


def _store_together(members: list[Any]) -> list[Handle]:
    if not members:
        return []
    ref = ray.put(members)
    return [Part(ref, index) for index in range(len(members))]


def _nbytes(record: Any) -> int:
    values = [getattr(record, field.name) for field in dataclasses.fields(record)]
    texts = [text for value in values if isinstance(value, tuple) for text in value if isinstance(text, str)]
    return sum(value.nbytes for value in values if isinstance(value, np.ndarray)) + sum(map(len, texts))
