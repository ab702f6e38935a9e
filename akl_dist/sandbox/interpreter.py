"""A Python interpreter in a sandbox of its own that keeps its names from one cell to the next."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace

from akl_dist.sandbox.client import START_S, Ended, Sandbox
from akl_dist.sandbox.clock import STARVED
from akl_dist.sandbox.limits import Limits
from akl_dist.sandbox.session import Session

LIFETIME_S = 24 * 3600.0  # of an interpreter, idle time included: its user closes it long before


@dataclass(frozen=True)
class CellResult:
    """What came of one cell.

    Args:
        output: what it printed, at most the limit's ``output_bytes``.
        error: the line a traceback ends with, "" where it ended well.
        ended: how the interpreter ended, with all its names; None where it lives on.
    """

    output: bytes
    error: str
    ended: Ended | None


class Interpreter:
    """One sandbox and, from the first cell on, one interpreter in it. Where a cell ends it, the next cell gets a fresh one.

    Args:
        limits: of the interpreter; ``wall_s`` and ``output_bytes`` of each cell.
        allow_unsandboxed: as for :class:`Sandbox`.

    Raises:
        SandboxFault: no isolation here.
    """

    def __init__(self, limits: Limits, *, allow_unsandboxed: bool = False) -> None:
        self._limits = limits
        self._sandbox = Sandbox(allow_unsandboxed=allow_unsandboxed)
        self._cells: _Cells | None = None

    @property
    def pid(self) -> int:
        """The supervisor's process id."""
        return self._sandbox.pid

    def run(self, source: str) -> CellResult:
        """Run one cell, at most ``limits.wall_s``.

        Raises:
            SandboxFault: the sandbox failed; close it and open another one.
        """
        if self._cells is None:
            self._cells = _Cells(self._sandbox, self._limits)
            self._cells.run("", START_S)  # its start is not the first cell's time
        result = self._cells.run(source, self._limits.wall_s)
        if result.ended is not None:
            self._cells = None
        return result

    def close(self) -> None:
        """End it and everything its cells have started. May be called more than once."""
        if self._cells is not None:
            self._cells.leave()
            self._cells = None
        self._sandbox.close()

    def __enter__(self) -> Interpreter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Cells(Session):
    """A conversation in which every request has a deadline and keeps what the program prints."""

    def __init__(self, sandbox: Sandbox, limits: Limits) -> None:
        self._output, self._result = bytearray(), None
        super().__init__(sandbox, "interpreter_stage", replace(limits, wall_s=LIFETIME_S, cpu_s=int(LIFETIME_S)))

    def run(self, source: str, within_s: float) -> CellResult:
        if self._result is not None:  # it did not even start
            return self._result
        self._deadline = time.monotonic() + within_s
        if self._paused_at is not None:
            self._paused_at = time.monotonic()  # the time between cells counts for nobody
        self._output.clear()
        reply = self.ask({"source": source})
        while not self._over and self._take_in(self._printed):
            pass
        output = bytes(self._output[: self._limits.output_bytes])
        error = reply.get("error") if reply is not None else None
        if isinstance(error, str) and not self._over:
            return CellResult(output, error, None)
        late = time.monotonic() >= self._deadline
        self._ended &= not late  # end it at once
        ended = self.end()
        if late and ended.limit in ("", STARVED):
            ended = replace(ended, limit="time_limit")
        self._result = CellResult(output, "", ended)
        return self._result

    def leave(self) -> None:
        """Give up the pipes; the sandbox's end ends the rest."""
        self._pipes.close()

    def _overrun(self) -> None:
        self._ended = True

    def _take_in(self, source: int) -> bool:
        if time.monotonic() >= self._deadline:  # one that prints without end is never silent
            self._overrun()
        if source != self._printed:
            return super()._take_in(source)
        try:
            data = os.read(source, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._sources.discard(source)
        self._output += data
        self._over |= len(self._output) > self._limits.output_bytes
        return bool(data)
