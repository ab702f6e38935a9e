"""What tests of the sandbox look at from outside: its processes and its control groups."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from akl_dist.sandbox.client import Sandbox, SandboxFault


def available(mode: str) -> bool:
    """Whether this machine allows a form of isolation."""
    try:
        Sandbox(modes=(mode,)).close()
    except SandboxFault:
        return False
    return True


MODES = [mode for mode in ("root", "user_namespace") if available(mode)]


def descendants(pid: int) -> list[int]:
    """Every process below a process, as the machine sees them."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found, queue = [], [pid]
    while queue:
        queue = [child for child, parent in parents.items() if parent in queue]
        found += queue
    return found


def gone(pid: int, within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def control_groups(pid: int) -> list[Path]:
    """The control groups of the sandbox whose supervisor has this id."""
    return [Path(folder) for folder, _, _ in os.walk("/sys/fs/cgroup") if folder.endswith(f"-{pid}") and "akl-sandbox" in folder]


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    """A client in a process of its own."""
    root = str(Path(__file__).resolve().parents[2])
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], env={**os.environ, "PYTHONPATH": root}, text=True, stdout=subprocess.PIPE
    )
