"""A child process that speaks length-prefixed JSON over its standard streams, with a group of its own to kill.

Nothing here waits: the user polls the descriptors, and owns every deadline. The child is a fresh interpreter, never a fork.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from akl_dist.contract.errors import DeadlineExceeded
from akl_dist.sandbox.inside import codec

CHUNK = 1 << 16
BURST = 4 << 20  # bytes taken at a time: a child that writes without end would keep its reader from looking at any clock
MAX_MESSAGE = 64 << 20
LOG_LIMIT = 16 << 20  # bytes of stderr kept for the cause of a death
REAP_S = 30.0


class MessageProcess:
    """``python -m MODULE ARGUMENTS... PARENT_PID`` in a session of its own, its standard error in an unnamed file.

    Args:
        module: what to run; it reads messages from stdin and writes messages to stdout (``codec.frame``).
        arguments: before the parent's process id.
        environment: all of the child's environment.
        cwd: its working directory.
    """

    def __init__(self, module: str, arguments: Sequence[str], *, environment: Mapping[str, str], cwd: str) -> None:
        self._module = module
        self._log = tempfile.TemporaryFile(prefix="child-stderr-")  # noqa: SIM115 (lives as long as the child)
        fcntl.fcntl(self._log, fcntl.F_SETFL, fcntl.fcntl(self._log, fcntl.F_GETFL) | os.O_APPEND)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=self._log, env=dict(environment), cwd=cwd, start_new_session=True, bufsize=0,
            )
        except BaseException:
            self._log.close()
            raise
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.reads_from, self.writes_to = self._stdout.fileno(), self._stdin.fileno()
        """Our descriptors: to poll for reading, and (while :attr:`outgoing` holds something) for writing."""
        os.set_blocking(self.reads_from, False)
        os.set_blocking(self.writes_to, False)
        self.outgoing, self._incoming = bytearray(), bytearray()
        self.received = 0
        """Bytes that have come so far."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def in_part(self) -> bool:
        """Whether a message has begun to come and is not complete."""
        return bool(self._incoming)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def send(self, message: Any) -> None:
        """Queue a message; :meth:`flush` moves it."""
        self.outgoing += codec.frame(message)

    def flush(self) -> bool:
        """Write what the pipe takes; False if the other end is closed."""
        while self.outgoing:
            try:
                written = os.write(self.writes_to, self.outgoing[:CHUNK])
            except BlockingIOError:
                return True
            except BrokenPipeError:
                return False
            del self.outgoing[:written]
        return True

    def receive(self) -> bool:
        """Read what is there, up to ``BURST`` (a poll finds the rest); False at the end of the stream."""
        if os.fstat(self._log.fileno()).st_size > LOG_LIMIT:
            os.ftruncate(self._log.fileno(), 0)
        until = self.received + BURST
        while self.received < until:
            try:
                data = os.read(self.reads_from, CHUNK)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._incoming += data
            self.received += len(data)
        return True

    def messages(self) -> list[Any]:
        """Take the complete messages that have come, oldest first.

        Raises:
            ValueError: the oldest is no message. One behind others is left for the next call.
        """
        taken, at = [], 0
        while len(self._incoming) >= at + codec.HEADER.size:
            (size,) = codec.HEADER.unpack_from(self._incoming, at)
            end = at + codec.HEADER.size + size
            if size <= MAX_MESSAGE and len(self._incoming) < end:
                break
            try:
                taken.append(_message(self._incoming, at + codec.HEADER.size, size))
            except ValueError:
                if not taken:
                    raise
                break
            at = end
        del self._incoming[:at]
        return taken

    def cause_of_death(self, within_s: float = 5.0) -> str:
        """How a child whose stream has ended came to its end, with the last line it wrote to stderr; waits for the end."""
        try:
            code = self._process.wait(timeout=within_s)
        except subprocess.TimeoutExpired:
            return "closed its output"
        self._log.seek(max(0, os.fstat(self._log.fileno()).st_size - 8192))
        last = self._log.read().decode("utf-8", "replace").strip().splitlines()
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"{cause}: {last[-1][:300]}" if last else cause

    def end(self) -> None:
        """SIGKILL the whole group, then reap. A leader that was reaped leaves the group's id to what it started, if anything.

        Raises:
            DeadlineExceeded: it is still there after ``REAP_S``. Its pipes are closed all the same.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(timeout=REAP_S)
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(
                f"process {self._process.pid} ({self._module})", got=f"one that is still there {REAP_S:g} s after SIGKILL",
                expected="its end", remedy="It hangs in the kernel (state D in ps): see to the disk or network file system "
                "that it waits for.",
            ) from None
        finally:
            self._stdin.close()
            self._stdout.close()
            self._log.close()


def _message(incoming: bytearray, start: int, size: int) -> Any:
    if size > MAX_MESSAGE:
        raise ValueError(f"a message of {size} bytes")
    return json.loads(bytes(incoming[start : start + size]))
