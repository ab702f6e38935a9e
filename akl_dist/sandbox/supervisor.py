"""The supervisor: a small process that starts one program after another, each in a pid namespace of its own, and ends it.

Started by :mod:`akl_dist.sandbox.client` as ``python -m akl_dist.sandbox.supervisor SOCKET_FD PARENT_PID``. Consumes requests
(JSON, with the program's descriptors) from the socket, produces one ``ended`` message for each. It waits for the program, at
most until its wall-clock limit (:mod:`akl_dist.sandbox.clock`), and for its client, whose end ends it (the end of the socket, or
SIGTERM by the kernel). It never sees an expected value.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from akl_dist.sandbox import cgroups, isolation, linux, seccomp
from akl_dist.sandbox.clock import Clock, waited_s
from akl_dist.sandbox.layout import BOX, Layout
from akl_dist.sandbox.limits import Limits

MAX_MESSAGE = 32 << 20
KILL_S = 10.0  # for a killed program and everything below it to be gone
NOT_STARTED = 120  # exit status; the fault comes beside it
HIGH = 200  # descriptors are kept from here on while the low ones are laid out
PAUSE, RESUME = b"p", b"r"  # what a client sends while a program runs, to stop and start its clock


@dataclass(frozen=True)
class Run:
    """One program to start. ``targets[i]`` is the descriptor that ``fds[i]`` becomes."""

    argv: list[str]
    environment: dict[str, str]
    files: dict[str, str]
    limits: Limits
    targets: list[int]
    fds: list[int]


class Supervisor:
    """Owns the isolation of one sandbox."""

    def __init__(self, sock: socket.socket, mode: str, layout: Layout) -> None:
        self.sock, self.mode = sock, mode
        self.user = isolation.NOBODY if mode == "user_namespace" else isolation.spare_user()
        self.drops_user = mode == "root" or (mode == "none" and os.getuid() == 0 and isolation.open_to_all(layout.python))
        self.proc = "/proc" if mode == "none" else isolation.MACHINE_PROC
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        self.groups = cgroups.make() if mode != "none" else cgroups.Groups([])
        if mode != "none":
            if mode == "user_namespace":
                isolation.enter_user_namespace()
            isolation.build_root(layout)

    def serve(self) -> None:
        """Run what the client asks for, until it goes away."""
        while (received := receive(self.sock)) is not None:
            message, fds = received
            limits = Limits(**message["limits"])
            run = Run(message["argv"], message["environment"], message["files"], limits, message["targets"], fds)
            send(self.sock, self._run(run))
            while (byte := self.sock.recv(1)) in (PAUSE, RESUME):  # too late: it has ended
                pass
            if not byte:  # the client sends one more byte a run: to end it, or to confirm that it has ended
                return

    def _run(self, run: Run) -> dict[str, Any]:
        kills_before = self.groups.out_of_memory_kills()
        self.groups.limit(memory_bytes=run.limits.memory_bytes, processes=run.limits.processes)
        status_read, status_write = os.pipe2(os.O_CLOEXEC)
        gate_read, gate_write = os.pipe2(os.O_CLOEXEC)
        clock, start = Clock(run.limits.wall_s, self.proc), time.monotonic()
        box = BOX if self.mode != "none" else tempfile.mkdtemp(prefix="akl-box-")
        launcher = os.fork()
        if launcher == 0:
            self._launch(run, gate_read, gate_write, status_write, box)
        for fd in (*run.fds, status_write, gate_read):
            os.close(fd)
        os.waitpid(launcher, 0)
        os.write(gate_write, b"go")
        try:
            cause = self._wait(status_read, clock)
        finally:
            self._end(gate_write)
        seconds = time.monotonic() - start
        report = os.read(status_read, 4096).decode().splitlines()
        os.close(status_read)
        if self.mode == "none":
            shutil.rmtree(box, ignore_errors=True)
        ended = {"status": None, "cpu_s": 0.0, "used_s": seconds}
        for line in report:
            ended |= json.loads(line)
        ended["used_s"] = max(0.0, ended["used_s"] - clock.paused_s)
        out_of_memory = self.groups.out_of_memory_kills() > kills_before
        return {"ended": True, "cause": cause, "seconds": seconds, "out_of_memory": out_of_memory} | ended

    def _wait(self, status: int, clock: Clock) -> str:
        """Until init reports, the client asks for the end, or the limit passes: "exit", "asked", "wall" or "starved"."""
        poll = select.poll()
        poll.register(status, select.POLLIN)
        poll.register(self.sock.fileno(), select.POLLIN)
        while True:
            wait_s = clock.next_look_s()
            ready = [fd for fd, _ in poll.poll(None if wait_s is None else wait_s * 1000)]
            if status in ready:
                return "exit"
            if ready:
                byte = self.sock.recv(1, socket.MSG_PEEK)
                if byte not in (PAUSE, RESUME):
                    return "asked"
                self.sock.recv(1)
                (clock.pause if byte == PAUSE else clock.resume)()
            elif cause := clock.passed():
                return cause

    def _launch(self, run: Run, gate_read: int, gate_write: int, status: int, box: str) -> None:
        """In a child: start process 1 of a new pid namespace and leave it to the supervisor, our sub-reaper. Never returns.

        A process that has asked for a pid namespace for its children cannot ask for the next one, hence this short life.
        """
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self.mode != "none":
                linux.unshare(linux.CLONE_NEWPID)
            if os.fork() == 0:
                _init(self, run, gate_read, gate_write, status, box)
        except OSError as error:
            os.write(status, _line({"fault": f"{type(error).__name__}: {error}"[:500]}))
        finally:
            os._exit(0)

    def _end(self, gate: int) -> None:
        """SIGKILL init, our only child, and with it all below; wait until everything has gone, namespaces included."""
        os.close(gate)
        deadline = time.monotonic() + KILL_S
        while time.monotonic() < deadline:
            _kill_children(self.proc)
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                time.sleep(0.0005)
        raise RuntimeError(f"processes of a program are still there {KILL_S:g} s after SIGKILL")


def _kill_children(proc: str) -> None:
    """SIGKILL to every child. Without a pid namespace orphans come to us, their sub-reaper, and are killed the next time."""
    with open(f"{proc}/self/task/{os.getpid()}/children") as children:
        for pid in children.read().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _init(supervisor: Supervisor, run: Run, gate_read: int, gate_write: int, status: int, box: str) -> None:
    """Process 1 of the program's namespace: confine, start the program, reap orphans, report. Never returns."""
    try:
        os.close(gate_write)
        opened = os.read(gate_read, 2)  # from here on the supervisor is our parent
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        linux.prctl(linux.PR_SET_DUMPABLE, 0)
        if opened != b"go" or select.select([gate_read], [], [], 0)[0]:  # it ended before it could take us along
            os._exit(NOT_STARTED)
        os.setsid()
        supervisor.sock.close()
        supervisor.groups.enter()
        if supervisor.mode != "none":
            isolation.private_mounts(run.limits, supervisor.user)
        os.chdir(box)
        for name, text in run.files.items():
            with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
                file.write(text)
        began, late = time.monotonic(), waited_s("/proc/self") or 0.0
        program = os.fork()
        if program == 0:
            _start_program(supervisor, run, status, box)
        for fd in (*run.fds, 0, 1, 2):
            with contextlib.suppress(OSError):
                os.close(fd)
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)) is not None and ended.si_pid != program:
            os.waitpid(ended.si_pid, 0)
        # its main thread and we have waited for a processor, as far as there is a /proc
        used = time.monotonic() - began - (waited_s(f"/proc/{program}") or 0.0) - ((waited_s("/proc/self") or 0.0) - late)
        _, result, usage = os.wait4(program, 0)
        cpu = usage.ru_utime + usage.ru_stime
        os.write(status, _line({"status": os.waitstatus_to_exitcode(result), "cpu_s": cpu, "used_s": max(cpu, used)}))
    except (OSError, ValueError, RuntimeError) as error:
        os.write(status, _line({"fault": f"{type(error).__name__}: {error}"[:500]}))
    finally:
        os._exit(0)


def _start_program(supervisor: Supervisor, run: Run, status: int, box: str) -> None:
    """Become the program: descriptors, limits, rights, exec. Never returns."""
    try:
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        high = [os.dup2(fd, HIGH + index, inheritable=False) for index, fd in enumerate(run.fds)]
        status = os.dup2(status, HIGH + len(high), inheritable=False)
        os.dup2(os.open("/dev/null", os.O_RDWR), 0)
        os.dup2(0, 1)
        os.dup2(0, 2)
        owned = (supervisor.user, supervisor.user)
        if supervisor.drops_user:
            os.chown(box, *owned)
            for name in run.files:
                os.chown(name, *owned)
            for fd in high:
                if stat.S_ISFIFO(os.fstat(fd).st_mode):
                    os.fchown(fd, *owned)  # so that /dev/stdin can be opened again
        for fd, target in zip(high, run.targets, strict=True):
            os.dup2(fd, target)
        os.closerange(max([2, *run.targets]) + 1, HIGH)
        os.closerange(status + 1, 4096)
        isolation.set_limits(run.limits)
        isolation.drop_rights(supervisor.user if supervisor.drops_user else None, isolated=supervisor.mode != "none")
        os.execve(run.argv[0], run.argv, run.environment | {"HOME": box, "TMPDIR": box})
    except (OSError, ValueError, RuntimeError) as error:
        os.write(status, _line({"fault": f"{type(error).__name__}: {error}"[:500]}))
    finally:
        os._exit(NOT_STARTED)


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def send(sock: socket.socket, message: dict[str, Any], fds: list[int] | None = None) -> None:
    """One message, length first; the descriptors travel with its first byte."""
    body = json.dumps(message).encode("ascii")
    header = len(body).to_bytes(4, "big")
    if fds:
        socket.send_fds(sock, [header], fds)
    else:
        sock.sendall(header)
    sock.sendall(body)


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and its descriptors, None when the other end is closed."""
    header, fds, _, _ = socket.recv_fds(sock, 4, 8, socket.MSG_WAITALL)
    for fd in fds:
        os.set_inheritable(fd, False)
    if len(header) < 4:
        return None
    size = int.from_bytes(header, "big")
    if size > MAX_MESSAGE:
        raise RuntimeError(f"a message of {size} bytes")
    body = bytearray()
    while len(body) < size:
        part = sock.recv(min(1 << 20, size - len(body)))
        if not part:
            return None
        body += part
    return json.loads(body), fds


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGTERM, lambda signum, frame: _hang_up(sock))
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(sys.argv[2]):
        return
    received = receive(sock)
    if received is None:
        return
    message, _ = received
    layout = Layout(message["python"], *(tuple(map(_frozen, message[name])) for name in ("binds", "links", "masks")))
    try:
        supervisor = Supervisor(sock, message["mode"], layout)
    except (OSError, RuntimeError) as error:
        send(sock, {"refused": f"{type(error).__name__}: {error}"})
        return
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    send(sock, {"ready": os.getpid(), "controllers": sorted(supervisor.groups.controllers), "filter": seccomp.available(),
                "user": supervisor.user})
    try:
        supervisor.serve()
    except ConnectionError:  # the client went away while its program ran
        return
    finally:
        supervisor.groups.remove()


def _hang_up(sock: socket.socket) -> None:
    """On SIGTERM, which the kernel sends when the client dies: go on as at the end of the socket, in good order."""
    with contextlib.suppress(OSError):  # it has ended already
        sock.shutdown(socket.SHUT_RDWR)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


if __name__ == "__main__":
    main()
