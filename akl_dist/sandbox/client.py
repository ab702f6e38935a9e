"""The user's side of a sandbox: start programs, talk to them over private pipes, get a typed end. One program at a time.

Every wait has a deadline: the program's wall-clock limit is the supervisor's to enforce (:mod:`akl_dist.sandbox.clock`), and where
the supervisor does not answer within a margin after that, it is killed and the call raises :class:`SandboxFault` (the grader's
fault, never the program's).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from akl_dist.contract.errors import VerifierFault
from akl_dist.sandbox.clock import STARVED, STRETCH
from akl_dist.sandbox.isolation import MODES
from akl_dist.sandbox.layout import INSIDE, PACKAGES, ROOT_ONLY, STAGES, machine_layout
from akl_dist.sandbox.limits import Limits
from akl_dist.sandbox.pipes import Pipes
from akl_dist.sandbox.supervisor import KILL_S, PAUSE, RESUME, receive, send

START_S = 30.0  # for a supervisor to start
MARGIN_S = KILL_S + 5.0  # for a supervisor to end a program after its limit
CONSTANTS = {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
DEFAULT_PACKAGES = ("numpy", "sympy", "mpmath")


class SandboxFault(VerifierFault):
    """The sandbox itself failed: no verdict about the program follows from it."""


@dataclass(frozen=True)
class Ended:
    """How a program ended.

    ``limit`` names the limit that ended it (time_limit, memory, output) or is empty; ``starved`` is the machine's fault, which gave
    the program too little time to tell. ``status`` is its exit status, negative for a signal, None if it was killed from outside.
    ``used_s`` is what counts of ``seconds`` towards its wall-clock limit.
    """

    status: int | None
    limit: str
    seconds: float
    used_s: float = 0.0


@dataclass(frozen=True)
class Finished:
    """A script's end and what it wrote, cut at the output limit."""

    ended: Ended
    stdout: bytes
    stderr: bytes


def patience_s(limits: Limits) -> float:
    """How long a supervisor is waited for that runs a program with these limits, while its clock runs."""
    return STRETCH * limits.wall_s + MARGIN_S


def _fault(got: str, remedy: str = "See docs/sandbox.md for what a machine must allow.") -> SandboxFault:
    return SandboxFault("sandbox", got=got, expected="a working supervisor", remedy=remedy, stage="verify")


def unanswered(sandbox: Sandbox) -> SandboxFault:
    """The fault of a supervisor that does not end a program in time; it is killed."""
    sandbox.close()
    return _fault("no answer from the supervisor after its program's limit")


class Sandbox:
    """One supervisor and its isolation, alive until :meth:`close`.

    Args:
        allow_unsandboxed: where the machine allows no isolation, run programs with limits of each process alone instead of
            refusing.
        packages: installed packages that programs may import.
        modes: the forms of isolation to try, in this order; for tests.

    Raises:
        SandboxFault: no form of isolation works here (the message says why each failed).
    """

    def __init__(
        self, *, allow_unsandboxed: bool = False, packages: tuple[str, ...] = DEFAULT_PACKAGES, modes: tuple[str, ...] = MODES
    ) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._layout = machine_layout(packages)
        failures = []
        for mode in modes:
            if (mode == "none" and not allow_unsandboxed) or (mode == "root" and os.geteuid() != 0):
                continue
            reply = self._start(mode)
            if "ready" in reply:
                break
            failures.append(f"{mode}: {reply['refused']}")
            self.close()
        else:
            raise _fault(
                "no isolation on this machine (" + "; ".join(failures or ["nothing to try"]) + ")",
                "Allow user namespaces or run as root in a container that may mount (docs/sandbox.md); "
                "verify.allow_unsandboxed=true runs generated code without isolation.",
            )
        self.isolation: str = mode
        self.controllers = tuple(reply["controllers"])
        """Resources of all processes together that cgroups bound: memory, pids, or nothing."""
        self.user: int = reply["user"]
        self.filter: bool = reply["filter"]
        self.root_only_file = ROOT_ONLY if mode == "root" else ""

    @property
    def pid(self) -> int:
        """The supervisor's process id."""
        assert self._process is not None
        return self._process.pid

    def _start(self, mode: str) -> dict[str, Any]:
        self._socket, theirs = socket.socketpair()
        root = str(Path(__file__).resolve().parents[2])
        self._process = subprocess.Popen(
            [sys.executable, "-s", "-B", "-m", "akl_dist.sandbox.supervisor", str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=None, cwd="/",
            env={"PYTHONPATH": root, "LANG": "C.UTF-8"}, pass_fds=[theirs.fileno()],
            start_new_session=True,  # whoever kills our group leaves it time to remove its control groups
        )
        theirs.close()
        self._socket.settimeout(START_S)
        send(self._socket, {"mode": mode, **asdict(self._layout)})
        return self._receive(START_S)

    def _receive(self, within_s: float) -> dict[str, Any]:
        self._socket.settimeout(within_s)
        try:
            received = receive(self._socket)
        except TimeoutError:
            self.close()
            raise _fault(f"no answer from the supervisor within {within_s:g} s") from None
        except OSError as error:
            self.close()
            raise _fault(f"the supervisor went away ({error})") from None
        if received is None:
            self.close()
            raise _fault("the supervisor ended by itself")
        return received[0]

    def close(self) -> None:
        """End the supervisor, and with it whatever runs. May be called more than once."""
        if self._process is None:
            return
        self._socket.close()
        try:
            self._process.wait(timeout=2.0)  # it ends by itself at the end of its socket, and removes its control groups
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=KILL_S)
        self._process = None

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- running programs --------------------------------------------------------------------------------------------

    def argv(self, script: str) -> list[str]:
        """The command that runs a script of the private folder, or ``stage:NAME``, one of the sandbox's own."""
        inside = INSIDE if self.isolation != "none" else str(Path(__file__).parent / "inside")
        path = f"{inside}/{script.removeprefix('stage:')}.py" if script.startswith("stage:") else script
        return [self._layout.python, "-s", "-B", path]

    def environment(self, *, stages: bool = False) -> dict[str, str]:
        """The program's environment: constants alone, nothing of the user's."""
        isolated = self.isolation != "none"
        packages = PACKAGES if isolated else os.pathsep.join(p for p in sys.path if p.endswith("site-packages"))
        own = (STAGES if isolated else str(Path(__file__).resolve().parents[2])) if stages else ""
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, [own, packages])), **({"AKL_STAGES": own} if own else {})}
        return CONSTANTS | paths

    def start(
        self, argv: list[str], *, targets: Mapping[int, int], limits: Limits, files: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Ask the supervisor to start a program; ``targets`` maps the program's descriptors to ours, which stay ours to close."""
        message = {
            "argv": argv, "environment": dict(self.environment() if environment is None else environment),
            "files": dict(files or {}), "limits": asdict(limits), "targets": list(targets),
        }
        if self._process is None:
            raise _fault("a sandbox that is closed", "Open a new one.")
        self._socket.settimeout(START_S)
        try:
            send(self._socket, message, list(targets.values()))
        except OSError as error:
            self.close()
            raise _fault(f"the supervisor went away ({error})") from None

    def wait(self, limits: Limits, *, kill: bool = False) -> Ended:
        """The end of the program that was started; with ``kill`` it is ended now."""
        try:
            if kill:
                self._socket.sendall(b"k")
            reply = self._receive(patience_s(limits))
            if not kill:
                self._socket.sendall(b"k")
        except OSError as error:
            self.close()
            raise _fault(f"the supervisor went away ({error})") from None
        if "fault" in reply:
            raise _fault(f"a program that could not be started ({reply['fault']})")
        # the kernel holds whole ticks against the limit, and on a busy machine these are far more than the program has had
        out_of_cpu = reply["status"] in (-signal.SIGXCPU, -signal.SIGKILL) and reply["cpu_s"] > 0.5 * limits.cpu_s
        limit = "time_limit" if reply["cause"] == "wall" or out_of_cpu else STARVED if reply["cause"] == STARVED else ""
        return Ended(reply["status"], "memory" if reply["out_of_memory"] else limit, reply["seconds"], reply["used_s"])

    def has_floor(self, program: bool) -> None:
        """Start the running program's clock, or stop it while its user has something to do."""
        with contextlib.suppress(OSError):  # a supervisor that has gone away: the next wait for it says so
            self._socket.sendall(RESUME if program else PAUSE)

    def fileno(self) -> int:
        """The control socket, readable when the running program has ended."""
        return self._socket.fileno()

    def run_script(self, source: str, *, stdin: bytes = b"", limits: Limits | None = None) -> Finished:
        """Run a program as a real script, with real standard streams, to its end.

        Output beyond ``limits.output_bytes`` (both streams together) ends it with the limit ``output``.
        """
        return self._run(self.argv("main.py"), {"main.py": source}, stdin, limits or Limits(), self.environment())

    def run_stage(self, name: str, *, stdin: bytes, limits: Limits, plain_s: float | None = None) -> Finished:
        """Run one of the sandbox's own scripts in the same way; with ``plain_s`` at most that long, however busy the machine is."""
        return self._run(self.argv(f"stage:{name}"), {}, stdin, limits, self.environment(stages=True), plain_s)

    def _run(
        self, argv: list[str], files: dict[str, str], stdin: bytes, limits: Limits, environment: dict[str, str],
        plain_s: float | None = None,
    ) -> Finished:
        with Pipes() as pipes:
            stdin_end, stdout, stderr = pipes.write_end(0), pipes.read_end(1), pipes.read_end(2)
            self.start(argv, targets=pipes.theirs, limits=limits, files=files, environment=environment)
            pipes.close_theirs()
            streams = _Streams(self, {stdout: bytearray(), stderr: bytearray()}, limits)
            cut = streams.pump(stdin_end, stdin, pipes, patience_s(limits) if plain_s is None else plain_s)
            if cut == "time_limit" and plain_s is None:  # the supervisor should have ended it long before
                raise unanswered(self)
            ended = self.wait(limits, kill=bool(cut))
            streams.drain()
            ended = replace(ended, limit=ended.limit or cut or "output") if cut or streams.over else ended
            out, err = streams.buffers.values()
            return Finished(ended, bytes(out[: limits.output_bytes]), bytes(err[: limits.output_bytes]))


class _Streams:
    """Moves bytes while a program runs, and counts what it writes."""

    def __init__(self, sandbox: Sandbox, buffers: dict[int, bytearray], limits: Limits) -> None:
        self.sandbox, self.buffers, self.limits = sandbox, buffers, limits
        self._open = set(buffers)

    @property
    def over(self) -> bool:
        return sum(map(len, self.buffers.values())) > self.limits.output_bytes

    def read(self, fd: int) -> None:
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return
        if data:
            self.buffers[fd] += data
        else:
            self._open.discard(fd)

    def pump(self, stdin: int, data: bytes, pipes: Pipes, within_s: float) -> str:
        """Until the program has ended (""), or until it is to be ended: the limit it has passed, ``output`` or ``time_limit``."""
        pending = memoryview(data)
        deadline = time.monotonic() + within_s
        feeding = True
        while True:
            if feeding and not pending:
                pipes.close_end(stdin)
                feeding = False
            poll = select.poll()
            for fd in self._open:
                poll.register(fd, select.POLLIN)
            poll.register(self.sandbox.fileno(), select.POLLIN)
            if feeding:
                poll.register(stdin, select.POLLOUT)
            ready = [fd for fd, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000)]
            if self.sandbox.fileno() in ready:
                return ""
            if time.monotonic() >= deadline:
                return "time_limit"
            for fd in ready:
                if fd in self.buffers:
                    self.read(fd)
                elif fd == stdin and feeding:
                    try:
                        pending = pending[os.write(stdin, pending[: 1 << 16]):]
                    except BrokenPipeError:  # it does not read its input: its right
                        pending = memoryview(b"")
            if self.over:
                return "output"

    def drain(self) -> None:
        """What was still in the pipes when the program ended."""
        while self._open and not self.over:
            before = sum(map(len, self.buffers.values())), len(self._open)
            for fd in tuple(self._open):
                self.read(fd)
            if before == (sum(map(len, self.buffers.values())), len(self._open)):
                return
