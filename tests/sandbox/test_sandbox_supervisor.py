"""Start, refusal, faults and ends of the sandbox itself."""

from __future__ import annotations

import errno
import os
import signal
import time
from dataclasses import replace

import pytest
from sandbox_tools import MODES, control_groups, descendants, gone, python

from akl_dist.sandbox import client, seccomp
from akl_dist.sandbox.client import Sandbox, SandboxFault
from akl_dist.sandbox.layout import machine_layout
from akl_dist.sandbox.limits import Limits
from akl_dist.sandbox.probe import prove

needs_isolation = pytest.mark.skipif(not MODES, reason="this machine allows no isolation")


def test_limits_are_positive():
    for name in ("wall_s", "processes", "output_bytes"):
        with pytest.raises(ValueError, match=name):
            Limits(**{name: 0})


def test_refuses_without_isolation(monkeypatch):
    """Where no form of isolation works the sandbox says why and how to go on; only the explicit option runs programs anyway."""
    layout = machine_layout()
    broken = replace(layout, binds=(*layout.binds, ("/not/there", "/not/there")))  # mounting fails, as where it is forbidden
    monkeypatch.setattr(client, "machine_layout", lambda packages: broken)
    with pytest.raises(SandboxFault, match=r"allow_unsandboxed=true") as caught:
        Sandbox()
    assert "user_namespace: FileNotFoundError" in caught.value.got
    with Sandbox(allow_unsandboxed=True) as sandbox:
        assert sandbox.isolation == "none" and sandbox.controllers == ()
        assert sandbox.run_script("print(6 * 7)").stdout == b"42\n"
        assert sandbox.run_script("while True: pass", limits=Limits(wall_s=0.5)).ended.limit == "time_limit"


def test_without_isolation_limits_and_processes_are_still_kept():
    with Sandbox(allow_unsandboxed=True, modes=("none",)) as sandbox:
        prove(sandbox)
        daemon = (
            "import os, time\nfor _ in range(3):\n    if os.fork() == 0:\n        os.setsid()\n"
            "        if os.fork() == 0: time.sleep(600)\n"
            "        os._exit(0)\nprint(os.getcwd())"
        )
        folder = sandbox.run_script(daemon).stdout.decode().strip()
        assert descendants(sandbox.pid) == []
        assert folder and not os.path.exists(folder)


@needs_isolation
@pytest.mark.parametrize(
    ("breach", "name"),
    [
        ("bind", "the machine's files are not there"),
        ("secret", "the environment is empty"),
        ("user", "the user is the sandbox's"),
        ("limit", "processes"),
        ("call", "the system call getppid is refused"),
    ],
)
def test_a_restriction_that_does_not_hold_is_named(monkeypatch, breach, name):
    """Known-broken sandboxes: the proof finds each breach."""
    layout = machine_layout()
    if breach == "bind":
        shown = replace(layout, binds=(*layout.binds, ("/etc/passwd", "/etc/passwd")))
        monkeypatch.setattr(client, "machine_layout", lambda packages: shown)
    with Sandbox(modes=(MODES[0],)) as sandbox:
        if breach == "secret":
            run = sandbox._run
            monkeypatch.setattr(sandbox, "_run", lambda a, f, i, li, env, _=None: run(a, f, i, li, env | {"AKL_TEST_SECRET": "x"}))
        elif breach == "user":
            sandbox.user += 1
        elif breach == "call":
            if not sandbox.filter:
                pytest.skip("no system-call filter for this architecture")
            number = {"x86_64": 110, "aarch64": 173}[os.uname().machine]
            monkeypatch.setattr(seccomp, "refusals", lambda: {"getppid": (number, errno.EPERM)})
        elif breach == "limit":
            run = sandbox._run
            monkeypatch.setattr(sandbox, "_run", lambda a, f, i, li, env, _=None: run(a, f, i, replace(li, processes=60), env))
        with pytest.raises(SandboxFault) as caught:
            prove(sandbox)
    assert name in caught.value.got


@needs_isolation
def test_a_supervisor_that_dies_is_a_fault_not_a_verdict():
    with Sandbox() as sandbox:
        pid = sandbox.pid
        with pytest.raises(SandboxFault, match="supervisor"):
            killer = python("import os, sys, time; time.sleep(0.7); os.kill(int(sys.argv[1]), 9)", str(pid))
            sandbox.run_script("import time; time.sleep(100)", limits=Limits(wall_s=20.0))
        killer.wait(timeout=10)
        killer.stdout.close()
        with pytest.raises(SandboxFault, match="closed"):
            sandbox.run_script("print(1)")


CLIENT = """
import sys, time
from akl_dist.sandbox.client import Sandbox
from akl_dist.sandbox.limits import Limits
sandbox = Sandbox()
print(sandbox.pid, flush=True)
if sys.argv[1] == "busy":
    sandbox.run_script("import os, time\\nos.fork()\\ntime.sleep(1000)", limits=Limits(wall_s=1000.0))
time.sleep(1000)
"""


@needs_isolation
@pytest.mark.parametrize("state", ["idle", "busy"])
def test_nothing_survives_the_client(state):
    """The client is killed: its supervisor, the program and the control groups go too."""
    process = python(CLIENT, state)
    supervisor = int(process.stdout.readline())
    deadline = time.monotonic() + 10
    while state == "busy" and len(descendants(supervisor)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    below = descendants(supervisor)
    assert len(below) == (3 if state == "busy" else 0)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=10)
    process.stdout.close()
    assert all(gone(pid) for pid in (supervisor, *below))
    deadline = time.monotonic() + 5
    while control_groups(supervisor) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert control_groups(supervisor) == []


def test_start_up_imports_nothing_heavy():
    code = (
        "import sys, akl_dist.sandbox.client, akl_dist.sandbox.session, akl_dist.sandbox.supervisor; "
        "print([m for m in ('torch', 'ray', 'numpy') if m in sys.modules]); import akl_dist.verify.code; "
        "print([m for m in ('torch', 'ray', 'sympy') if m in sys.modules])"
    )
    process = python(code)
    assert process.stdout.read().split() == ["[]", "[]"]
    process.wait(timeout=60)
    process.stdout.close()
