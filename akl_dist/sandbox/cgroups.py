"""Control groups for one sandbox: memory and processes of a program and its descendants together. Versions 1 and 2.

The groups are made once, beside the supervisor's own, and used by one program after another. Where the machine lets nobody make
groups, per-process limits alone remain, and the sandbox says so.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")  # where this process is
PREFIX = "akl-sandbox"


@dataclass
class Group:
    """One directory of a control-group file system, held open because the supervisor leaves the machine's root."""

    path: Path
    parent_fd: int
    fd: int
    version: int
    controllers: frozenset[str]

    def write(self, name: str, value: str) -> None:
        fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            os.write(fd, value.encode())
        finally:
            os.close(fd)

    def read(self, name: str) -> str:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            return os.read(fd, 4096).decode()
        finally:
            os.close(fd)

    def remove(self) -> None:
        with contextlib.suppress(OSError):  # still busy, or gone: the next start of a sandbox clears it
            os.rmdir(self.path.name, dir_fd=self.parent_fd)


class Groups:
    """The control groups of one sandbox; empty where none can be made. ``controllers`` names what they bound."""

    def __init__(self, groups: list[Group]) -> None:
        self._groups = groups
        self.controllers = frozenset(name for group in groups for name in group.controllers)

    def limit(self, *, memory_bytes: int, processes: int) -> None:
        """Set the limits for the next program."""
        for group in self._groups:
            if "memory" in group.controllers:
                _limit_memory(group, memory_bytes)
            if "pids" in group.controllers:
                group.write("pids.max", str(processes))

    def enter(self) -> None:
        """Move the calling process in."""
        for group in self._groups:
            group.write("cgroup.procs", "0")

    def out_of_memory_kills(self) -> int:
        """How often the kernel has killed for memory in these groups so far."""
        for group in self._groups:
            if "memory" in group.controllers:
                text = group.read("memory.events" if group.version == 2 else "memory.oom_control")
                counts = dict(line.split()[:2] for line in text.splitlines())
                return int(counts.get("oom_kill", 0))
        return 0

    def remove(self) -> None:
        for group in self._groups:
            group.remove()


def _limit_memory(group: Group, limit: int) -> None:
    if group.version == 2:
        group.write("memory.max", str(limit))
        with contextlib.suppress(OSError):  # no swap accounting
            group.write("memory.swap.max", "0")
        return
    with contextlib.suppress(OSError):  # pages left from an earlier program that cannot be freed at once
        group.write("memory.force_empty", "0")
    for _ in range(2):  # memory+swap may never be below memory: which must be set first depends on the last value
        for name in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"):
            with contextlib.suppress(OSError):
                group.write(name, str(limit))


def make() -> Groups:
    """The groups this machine allows, for this process's sandbox."""
    groups: list[Group] = []
    for line in OWN.read_text().splitlines():
        _, names, own = line.split(":", 2)
        if names == "":
            groups += _make_version_2(own)
    have = {name for group in groups for name in group.controllers}
    for line in OWN.read_text().splitlines():
        _, names, own = line.split(":", 2)
        wanted = ({"memory", "pids"} - have) & set(names.split(","))
        if wanted:
            groups += _make_version_1(names, own, frozenset(wanted))
    return Groups(groups)


def _make_version_1(names: str, own: str, wanted: frozenset[str]) -> list[Group]:
    for mounted in (ROOT / names, ROOT / sorted(wanted)[0]):
        for parent in (mounted / own.strip("/"), mounted):
            group = _make_in(parent, 1, wanted)
            if group is not None:
                return [group]
    return []


def _make_version_2(own: str) -> list[Group]:
    for mounted in (ROOT, ROOT / "unified"):
        parent = mounted / own.strip("/")
        if not (parent / "cgroup.controllers").exists():
            continue
        here = {"memory", "pids"} & set((parent / "cgroup.controllers").read_text().split())
        if not here:
            continue
        for name in here - set((parent / "cgroup.subtree_control").read_text().split()):
            with contextlib.suppress(OSError):  # processes in the parent, or not delegated to us
                (parent / "cgroup.subtree_control").write_text(f"+{name}")
        enabled = here & set((parent / "cgroup.subtree_control").read_text().split())
        group = _make_in(parent, 2, frozenset(enabled)) if enabled else None
        if group is not None:
            return [group]
    return []


def _make_in(parent: Path, version: int, controllers: frozenset[str]) -> Group | None:
    space = os.stat("/proc/self/ns/pid").st_ino
    path = parent / f"{PREFIX}-{space}-{os.getpid()}"
    try:
        _clear_stale(parent, f"{PREFIX}-{space}-")
        path.mkdir(exist_ok=True)
        fds = [os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) for folder in (parent, path)]
        group = Group(path, fds[0], fds[1], version, controllers)
        Groups([group]).limit(memory_bytes=1 << 30, processes=64)
        return group
    except OSError:
        return None


def _clear_stale(parent: Path, prefix: str) -> None:
    """Remove the groups of supervisors that were killed; only those of this pid namespace, where a pid means something."""
    for folder in parent.glob(f"{prefix}*"):
        pid = folder.name.removeprefix(prefix)
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with contextlib.suppress(OSError):
                folder.rmdir()
