"""Pipes between a program in a sandbox and its user."""

from __future__ import annotations

import os


class Pipes:
    """Pipes between us and a program. All ends are closed on exit."""

    def __init__(self) -> None:
        self.theirs: dict[int, int] = {}
        self._ours: set[int] = set()

    def __enter__(self) -> Pipes:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every end. May be called more than once."""
        self.close_theirs()
        for fd in tuple(self._ours):
            self.close_end(fd)

    def read_end(self, target: int) -> int:
        """Our end of a pipe that the program writes to as descriptor ``target``; never blocks."""
        ours, self.theirs[target] = os.pipe2(os.O_CLOEXEC)
        return self._own(ours)

    def write_end(self, target: int) -> int:
        """Our end of a pipe that the program reads from; never blocks."""
        self.theirs[target], ours = os.pipe2(os.O_CLOEXEC)
        return self._own(ours)

    def _own(self, fd: int) -> int:
        os.set_blocking(fd, False)
        self._ours.add(fd)
        return fd

    def close_end(self, fd: int) -> None:
        """Close one of our ends, to tell the program that there is no more."""
        self._ours.discard(fd)
        os.close(fd)

    def close_theirs(self) -> None:
        for fd in self.theirs.values():
            os.close(fd)
        self.theirs.clear()
