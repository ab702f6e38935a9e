"""Proof, before a sandbox is used, that each of its restrictions holds. Run at every start: machines and kernels differ."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

from akl_dist.sandbox import seccomp
from akl_dist.sandbox.client import Sandbox, SandboxFault
from akl_dist.sandbox.layout import BOX
from akl_dist.sandbox.limits import MIB, Limits

LIMITS = Limits(wall_s=20.0, cpu_s=20, memory_bytes=256 * MIB, processes=12, file_bytes=8 * MIB, folder_bytes=16 * MIB,
                open_files=32, output_bytes=64 << 10)
HIDDEN = ("/etc/passwd", "/etc/shadow", "/etc/hostname", "/home", "/var", "/opt", "/sys/fs", "/proc/kcore",
          "/proc/sys", "/usr/bin/env", "/bin/sh", "/dev/mem", "/run")

DAEMON = """
import os, signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM, signal.SIGXCPU):
    signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
print("started", flush=True)
while True:
    time.sleep(1000)
"""


def prove(sandbox: Sandbox) -> None:
    """Run the probes.

    Raises:
        SandboxFault: a restriction that the sandbox claims does not hold; its name is in the message.
    """
    failures = _from_inside(sandbox)
    ended = sandbox.run_script(DAEMON, limits=replace(LIMITS, wall_s=0.7))
    if ended.ended.limit != "time_limit":
        failures.append(f"wall clock (a program that ignores signals ended with {ended.ended})")
    flood = sandbox.run_script("while True: print('x' * 1000)", limits=LIMITS)
    if flood.ended.limit != "output" or len(flood.stdout) > LIMITS.output_bytes:
        failures.append(f"output (a program that floods it ended with {flood.ended})")
    if sandbox.run_script("import os; os.write(1, input().encode())", stdin=b"one line\n", limits=LIMITS).stdout != b"one line":
        failures.append("a right program does not run")
    if sandbox.run_script("raise ValueError", limits=LIMITS).ended.status == 0:
        failures.append("a failing program is not seen to fail")
    if failures:
        raise SandboxFault(
            f"sandbox ({sandbox.isolation})", got="; ".join(failures), expected="every restriction to hold",
            remedy="Generated code is not run on this machine as it is (docs/sandbox.md).", stage="verify",
        )


def _from_inside(sandbox: Sandbox) -> list[str]:
    isolated = sandbox.isolation != "none"
    given = asdict(LIMITS) | {
        "isolated": isolated, "pid": sandbox.pid, "user": sandbox.user, "filter": sandbox.filter,
        "denied_calls": seccomp.refusals() if sandbox.filter else {},
        "hidden": [*HIDDEN, str(Path(__file__).resolve()), os.path.expanduser("~/.ssh"), os.path.expanduser("~/.bashrc")],
        "read_only": ["/written", "/usr/lib/written", "/dev/written", "/proc/sys/kernel/hostname"],
        "root_only": sandbox.root_only_file, "environment": [*sandbox.environment(stages=True), "HOME", "TMPDIR", "LC_CTYPE"],
        "bounds_processes": isolated, "bounds_folder": isolated, "box": BOX,
    }
    finished = sandbox.run_stage("probe_stage", stdin=json.dumps(given).encode(), limits=LIMITS)
    try:
        failed = json.loads(finished.stdout)
    except ValueError:
        failed = None
    if finished.ended.status != 0 or not isinstance(failed, list):
        words = finished.stderr.decode("utf-8", "replace").strip()[-300:]
        return [f"the probe did not finish ({finished.ended}: {words})"]
    return [str(name) for name in failed]
