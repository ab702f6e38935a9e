"""Many judgements leave nothing: processes, zombies, descriptors, control groups, memory. The benchmark of this name takes more."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from akl_dist.sandbox.client import Sandbox, SandboxFault
from akl_dist.verify.grader import GraderPool, Item
from benchmarks import verify_inputs as inputs
from benchmarks import verify_leaks as leaks
from benchmarks.verify_leaks import Leftovers, Watch

GROWTH_MIB = 8.0
ROOT = Path(__file__).resolve().parents[2]
PATH = {"PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"}


def nothing(result):
    assert leaks.leftovers(result) == 0, result
    assert result["grown_mib"] < GROWTH_MIB and result["hostile_accepted"] == result["honest_unjudged"] == 0, result


def test_answers_leave_nothing():
    result = leaks.answers(600)
    nothing(result)
    assert result["recycled"] > 0 and sum(result["statuses"].values()) == 600
    assert result["statuses"]["ok"] > 200 and result["statuses"]["wrong"] > 50


def test_programs_leave_nothing():
    try:
        Sandbox().close()
    except SandboxFault:
        pytest.skip("this machine allows no isolation")
    options = leaks.program_options(30) | {"tasks_per_worker": 16}
    result = leaks.judge_all(options, inputs.programs(), inputs.hostile_programs(), count=30, share=0.1)
    nothing(result)
    assert result["supervisors_seen"] >= 1 and result["statuses"]["ok"] > 20 and result["statuses"]["wrong"] >= 3


def test_killed_and_crashed_graders_leave_nothing(tmp_path):
    """Graders that hang, that hang with a child, and that crash."""
    hostile = [Item("a", text, False) for text in ("hang", "crash", f"spawn-and-hang {tmp_path / 'pid'}")]
    options = {"num_workers": 2, "timeout_s": 1.0, "judge": "grader_fakes:judge", "probes": (), "environment": PATH}
    result = leaks.judge_all(options, [Item("a", "a", False)], hostile, count=60, share=0.1)
    nothing(result)
    assert result["kills"] == 4 and result["statuses"] == {"ok": 54, "timeout": 4, "error": 2}


def test_graders_killed_while_they_start_leave_nothing():
    """Closed at several stages of a start: the interpreter's, the imports', the sandbox's."""
    try:
        Sandbox().close()
    except SandboxFault:
        pytest.skip("this machine allows no isolation")
    watch = Watch()
    options: dict[str, Any] = leaks.program_options(1) | {"tasks_per_worker": 1}
    for share in (0.0, 0.3, 0.6, 0.9):
        begun = time.monotonic()
        with GraderPool(**options) as pool:
            took = time.monotonic() - begun
            pool.judge_many([inputs.programs()[0]])  # recycled after it: the next grader begins to start
            time.sleep(share * took)
            watch.see()
            assert pool.counters()["started"] == 2
    left = watch.left()
    assert left.total == 0, left


def test_what_is_left_is_seen(monkeypatch):
    """The control: a child, a zombie, a descriptor and memory that stay are counted."""
    monkeypatch.setattr(leaks, "SETTLE_S", 0.0)
    watch = Watch()
    watch.warm()
    assert watch.left().total == 0
    sleeper = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    dead = subprocess.Popen([sys.executable, "-S", "-c", ""])
    opened = os.open("/dev/null", os.O_RDONLY)
    kept = bytearray(os.urandom(1 << 20)) * 24
    try:
        os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
        found = watch.left()
        assert (found.processes, found.zombies, found.descriptors) == (2, 1, 1) and found.total == 4
        assert found.grown_bytes > len(kept) // 2
    finally:
        os.close(opened)
        sleeper.kill()
        sleeper.wait(timeout=10)
        dead.wait(timeout=10)
    assert watch.left().total == 0


def test_control_groups_are_found_by_their_supervisor(tmp_path):
    for name in ("a/akl-sandbox-7-31", "akl-sandbox-7-32", "akl-sandbox-7-131", "other-7-31"):
        (tmp_path / name).mkdir(parents=True)
    assert [path.name for path in leaks.control_groups({31}, tmp_path)] == ["akl-sandbox-7-31"]
    assert leaks.control_groups(set(), tmp_path) == []
    assert Leftovers(1, 2, 3, 4, 10**9).total == 10
