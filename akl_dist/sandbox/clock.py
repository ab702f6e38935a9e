"""A program's own clock: how much of its wall-clock limit it has used, and how much the machine has kept from it.

The limit is the program's. What counts is the time since its process began (namespaces and mounts come first) during which it
had the floor, less the time its threads stood ready to run and got no processor (``run_delay`` of the kernel's schedstat). A
program that sleeps or computes uses its limit up; one that waits for a loaded machine, or for its user, does not. Where the machine
gives it so little that :data:`STRETCH` times the limit passes first, it ends as :data:`STARVED`: no verdict about it follows.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field

STRETCH = 5.0  # times its limit: then a program is ended, however little of that it could use
STARVED = "starved"
STEP_S = 0.01  # the shortest time between two looks at a program
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Usage:
    """What a program and everything below it has had so far, in seconds.

    ``waited_s`` is what the thread waited for a processor that waited longest (what all waited together would be a program's to
    make: many that sleep and wake at once); ``cpu_s`` what they computed, all together. Zeros before it begins.
    """

    lifetime_s: float = 0.0
    waited_s: float = 0.0
    cpu_s: float = 0.0

    def used_s(self, paused_s: float = 0.0) -> float:
        """How much of its limit that is: threads that keep one another waiting are not let off, hence the processor time."""
        lifetime = max(0.0, self.lifetime_s - paused_s)
        return min(lifetime, max(self.cpu_s, lifetime - self.waited_s))


@dataclass
class Clock:
    """The clock of one program with limit ``wall_s``, running from construction on; ``proc`` is a /proc that shows the program."""

    wall_s: float
    proc: str
    _started: float = field(default_factory=lambda: time.monotonic())
    _paused_s: float = 0.0
    _since: float | None = None  # when it was stopped
    _look_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._look_at = self.wall_s

    @property
    def paused_s(self) -> float:
        """How long the user has had the floor."""
        return self._paused_s + (0.0 if self._since is None else time.monotonic() - self._since)

    def pause(self) -> None:
        self._since = time.monotonic() if self._since is None else self._since

    def resume(self) -> None:
        self._paused_s, self._since = self.paused_s, None

    def next_look_s(self) -> float | None:
        """Seconds until the limit may have passed; None while the clock stands still."""
        return None if self._since is not None else max(0.0, self._look_at - self._active_s())

    def passed(self) -> str:
        """``wall`` if the limit has passed, STARVED if the program cannot be waited for any longer, else ""."""
        active = self._active_s()
        if self._since is not None or active < self._look_at:
            return ""
        used = usage(self.proc).used_s(self.paused_s)
        if used >= self.wall_s:
            return "wall"
        if active >= STRETCH * self.wall_s:
            return STARVED
        self._look_at = min(active + max(self.wall_s - used, STEP_S), STRETCH * self.wall_s)
        return ""

    def _active_s(self) -> float:
        return time.monotonic() - self._started - self.paused_s


def usage(proc: str, supervisor: str = "self") -> Usage:
    """What the program below a supervisor has had: the first child of its first child, and all below them."""
    init, *orphans = _children(proc, supervisor) or [""]
    tree = _children(proc, init) if init else []
    if not tree:
        return Usage()
    try:
        began = int(_stat(proc, tree[0])[19]) / TICKS
    except OSError:  # it has just ended
        return Usage()
    lifetime = max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    tree += orphans
    cpu, waited, ready, told = 0.0, 0.0, False, False
    for pid in tree:  # grows meanwhile
        with contextlib.suppress(OSError):  # gone
            cpu += sum(map(int, _stat(proc, pid)[11:15])) / TICKS
            for task in os.listdir(f"{proc}/{pid}/task"):
                ready |= _stat(proc, f"{pid}/task/{task}")[0] == "R"
                delay = waited_s(f"{proc}/{pid}/task/{task}")
                told |= delay is not None
                waited = max(waited, delay or 0.0)
            tree += [child for child in _children(proc, pid) if child not in tree]
    if not told and ready:  # a kernel that does not say: then what is ready now has waited whenever it did not compute
        waited = max(0.0, lifetime - cpu)
    return Usage(lifetime, waited, cpu)


def waited_s(folder: str) -> float | None:
    """Seconds a task stood ready without a processor; None where the kernel does not say."""
    try:
        with open(f"{folder}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return None


def _stat(proc: str, task: str) -> list[str]:
    """The fields of a stat file behind the name: state, parent, ..."""
    with open(f"{proc}/{task}/stat") as file:
        return file.read().rpartition(")")[2].split()


def _children(proc: str, pid: str) -> list[str]:
    """Oldest first for each thread of the process."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"{proc}/{pid}/task"):
            with open(f"{proc}/{pid}/task/{task}/children") as file:
                found += file.read().split()
    return found
