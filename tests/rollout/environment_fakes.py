"""Environments for tests of their pool: they hang, crash, raise and leave children behind on command of the turn."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import time

from akl_dist.rollout.environment import Step, Task


class Obedient:
    """Does what a turn says; every answer names the process and how many turns there were."""

    def __init__(self, *, greeting: str = "hello", broken_while: str = "") -> None:
        if broken_while and os.path.exists(broken_while):
            os._exit(5)
        self.greeting = greeting

    def reset(self, task: Task) -> None:
        self.task, self.turns = task, 0
        if task.text == "raise":
            raise KeyError("in reset")
        if task.text == "hang":
            time.sleep(300)

    def step(self, turn: str) -> Step:
        self.turns += 1
        command, _, argument = turn.partition(" ")
        if command == "hang":
            time.sleep(300)
        if command == "spawn-and-hang":
            child = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(300)"
            subprocess.Popen([sys.executable, "-c", child, argument])
            time.sleep(300)
        if command == "sleep":
            time.sleep(float(argument))
        if command == "crash":
            sys.stderr.write("the last words\n")
            sys.stderr.flush()
            os._exit(7)
        if command == "raise":
            raise RuntimeError(argument)
        if command == "exit":
            sys.exit(argument)
        if command == "noise":
            print("noise on stdout", flush=True)
            os.write(1, b"\0\0\0\1x")
            return Step(f"read {sys.stdin.read()!r}")
        if command == "trickle":
            _trickle()
        if command == "fork":
            os.fork()  # and both come back
        if command == "no-step":
            return "a text"  # type: ignore[return-value]
        if command == "not-finite":
            return Step(None, score=float("nan"))
        if command == "pid":
            return Step(str(os.getpid()))
        if command == "environment":
            return Step(" ".join(sorted(os.environ)))
        if command == "stop":
            return Step(None, score=self.turns)
        text = f"{self.greeting} {self.task.prompt_id}/{self.task.sample_index} {self.turns} {turn}"
        return Step(text, call=True, failed=command == "failed", void=command == "void")

    def close(self) -> None:
        if self.task.text == "close raises":
            raise RuntimeError("in close")


def _trickle() -> None:
    """A byte of a long reply every 0.3 s, on whatever leads out of this process."""
    def leads_out(fd: int) -> bool:
        try:
            return stat.S_ISFIFO(os.fstat(fd).st_mode) and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
        except OSError:
            return False

    (fd,) = [fd for fd in range(3, 64) if leads_out(fd)]
    for byte in b"\0\0\1\0" + b"x" * 252:
        os.write(fd, bytes([byte]))
        time.sleep(0.3)


class Unfinished:
    def reset(self, task: Task) -> None: ...


class Refusing:
    def __init__(self) -> None:
        raise OSError("no such index")

    def reset(self, task: Task) -> None: ...

    def step(self, turn: str) -> Step: ...

    def close(self) -> None: ...
