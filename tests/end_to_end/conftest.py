"""Runs the command line as a user does, in a folder of its own, and knows which processes belong to a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SMALL = ("+exp=tiny", "cluster.address=local", "cluster.object_store_mib=200", "rollout.prompts_per_step=8", "rollout.group_size=4",
         "evaluate.num_problems=0")
"""A small run of the real stack: 8 x 4 responses a step, no evaluation."""


@dataclass
class CommandLine:
    """``python -m akl_dist.main`` in ``folder``; every process it starts, however deep, inherits the mark."""

    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def environment(self) -> dict[str, str]:
        dropped = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS")
        return {**{k: v for k, v in os.environ.items() if k not in dropped}, "AKL_TEST_MARK": self.mark}

    def run(self, *arguments: str, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        """Run to the end. On a timeout the process is killed and the test fails."""
        return subprocess.run([sys.executable, "-m", "akl_dist.main", *arguments], cwd=self.folder, env=self.environment(),
                              capture_output=True, text=True, timeout=timeout_s, check=False)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        with (self.folder / "console.log").open("a") as log:
            return subprocess.Popen([sys.executable, "-m", "akl_dist.main", *arguments], cwd=self.folder, env=self.environment(),
                                    stdout=log, stderr=subprocess.STDOUT, text=True)

    def processes(self) -> dict[int, str]:
        """Living processes that carry the mark: pid -> title."""
        found = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit() or int(folder.name) == os.getpid():
                continue
            try:
                if f"AKL_TEST_MARK={self.mark}".encode() in (folder / "environ").read_bytes():
                    title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z":
                        found[int(folder.name)] = title
            except (OSError, ProcessLookupError):
                continue
        return found

    def wait_until_gone(self, timeout_s: float = 30.0) -> dict[int, str]:
        """Processes that are still there after the limit (empty when all went)."""
        wait_for(lambda: not self.processes(), timeout_s=timeout_s)
        return self.processes()

    def run_directory(self, run_id: str, experiment: str = "tiny") -> Path:
        return self.folder / "outputs" / experiment / run_id

    def result(self, run_id: str, experiment: str = "tiny") -> dict:
        return json.loads((self.run_directory(run_id, experiment) / "result.json").read_text())

    def metrics(self, run_id: str) -> list[dict]:
        path = self.run_directory(run_id) / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(condition: Callable[[], object], *, timeout_s: float, every_s: float = 0.2) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(every_s)
    return bool(condition())


def untimed(metrics: list[dict]) -> list[dict]:
    """Metrics without what a clock decides."""
    return [{k: v for k, v in row.items() if not (k.startswith("time/") or k.endswith(("_per_s", "/seconds")))} for row in metrics]


@pytest.fixture
def command_line(tmp_path: Path) -> Iterator[CommandLine]:
    made = CommandLine(tmp_path)
    yield made
    for pid in made.processes():  # only after a failed test: its processes, by id
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
