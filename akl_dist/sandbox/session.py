"""A conversation with one of the sandbox's own stages over private pipes."""

from __future__ import annotations

import json
import os
import secrets
import select
import time
from dataclasses import replace
from typing import Any

from akl_dist.sandbox.client import Ended, Sandbox, patience_s, unanswered
from akl_dist.sandbox.inside import codec
from akl_dist.sandbox.limits import Limits
from akl_dist.sandbox.pipes import Pipes

LAST_WORDS_S = 0.5  # for a program that has closed its replies to end by itself, since its own status says more than a kill


class Session:
    """A conversation with one stage in a sandbox: requests in, replies out, with a number in each that nobody can guess.

    The stage is ``program_stage`` (a program's functions) or ``test_stage`` (test code). What it prints is thrown away but counted
    against the output limit. The program's wall clock stands still from each of its replies to the next message for it.
    """

    def __init__(self, sandbox: Sandbox, stage: str, limits: Limits) -> None:
        self._sandbox, self._limits = sandbox, limits
        self._deadline = time.monotonic() + patience_s(limits)
        self._paused_at: float | None = None
        self._pipes = Pipes()
        self._requests, self._replies, self._printed = self._pipes.write_end(3), self._pipes.read_end(4), self._pipes.read_end(1)
        self._sources = {self._replies, self._printed, sandbox.fileno()}
        self._incoming, self._prints, self._ended, self._over = bytearray(), 0, False, False
        try:
            sandbox.start(sandbox.argv(f"stage:{stage}"), targets={**self._pipes.theirs, 2: self._pipes.theirs[1]}, limits=limits,
                          environment=sandbox.environment(stages=True))
        except BaseException:
            self._pipes.close()
            raise
        self._pipes.close_theirs()

    def send(self, message: dict[str, Any]) -> None:
        """Send one message; returns early where the program has ended."""
        pending = memoryview(codec.frame(message))
        if self._paused_at is not None:
            self._deadline += time.monotonic() - self._paused_at
            self._paused_at = None
            self._sandbox.has_floor(True)
        while pending:
            self._wait_for(self._requests, select.POLLOUT)
            if self._ended or self._over:
                return
            try:
                pending = pending[os.write(self._requests, pending[: 1 << 16]):]
            except BrokenPipeError:
                return

    def receive(self) -> dict[str, Any] | None:
        """The next message; None if the program ended, or broke the protocol or the output limit, before there was one."""
        while True:
            message = self._take()
            if message is not None:
                if self._paused_at is None:
                    self._paused_at = time.monotonic()
                    self._sandbox.has_floor(False)
                return message
            if self._over or self._ended:
                return None
            self._wait_for(self._replies, select.POLLIN)

    def _take(self) -> dict[str, Any] | None:
        if len(self._incoming) < codec.HEADER.size:
            return None
        size = codec.HEADER.unpack(self._incoming[: codec.HEADER.size])[0]
        if size > self._limits.output_bytes:
            self._over = True
            return None
        end = codec.HEADER.size + size
        if len(self._incoming) < end:
            return None
        body = bytes(self._incoming[codec.HEADER.size : end])
        del self._incoming[:end]
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):
            message = None
        return message if isinstance(message, dict) else {"malformed": True}

    def open(self, message: dict[str, Any]) -> str:
        """Send a request that is answered last, after messages of the stage's own; returns the number its answer will carry."""
        nonce = secrets.token_hex(16)
        self.send(message | {"nonce": nonce})
        return nonce

    def ask(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """Send a request and wait for its reply; None as in :meth:`receive`. A reply that is not to this request is malformed."""
        nonce = self.open(message)
        reply = self.receive()
        return reply if reply is None or reply.get("nonce") == nonce else {"malformed": True}

    def _wait_for(self, fd: int, event: int) -> None:
        """Until ``fd`` is ready or the program has ended; takes in what it writes meanwhile."""
        while not (self._ended or self._over):
            poll = select.poll()
            for source in self._sources:
                poll.register(source, select.POLLIN)
            if event == select.POLLOUT:
                poll.register(fd, event)
            ready = {fd for fd, _ in poll.poll(max(0.0, self._deadline - time.monotonic()) * 1000)}
            for source in ready & {self._replies, self._printed}:
                self._take_in(source)
            if not ready:
                self._overrun()
            if self._sandbox.fileno() in ready:
                self._ended = True
                while self._take_in(self._replies):
                    pass
            if fd in ready:
                return

    def _overrun(self) -> None:
        """The deadline has passed in silence: the supervisor should have ended the program long before."""
        raise unanswered(self._sandbox)

    def _take_in(self, source: int) -> bool:
        """Read once; the replies' end is the program's end, as far as a conversation goes."""
        try:
            data = os.read(source, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._sources.discard(source)
            self._ended |= source == self._replies
        elif source == self._replies:
            self._incoming += data
        else:
            self._prints += len(data)
        self._over |= max(self._prints, len(self._incoming) - codec.HEADER.size) > self._limits.output_bytes
        return bool(data)

    def end(self) -> Ended:
        """End the program, whatever it does, and say how it ended."""
        self._pipes.close()
        kill = True
        if self._ended:
            poll = select.poll()
            poll.register(self._sandbox.fileno(), select.POLLIN)
            kill = not poll.poll(LAST_WORDS_S * 1000)
        ended = self._sandbox.wait(self._limits, kill=kill)
        return replace(ended, limit=ended.limit or "output") if self._over else ended
