"""Judges for tests of the grader pool: they hang, crash, fail and leave children behind on command of the response.

How they start is a plan in the environment: ``FAKE_STARTS`` is a file to which each start adds a line when it begins and another
when it is through; ``FAKE_PLAN`` says what the first, the second, ... start does (the last one's word holds for all after it):
``ok``, ``slow`` (takes ``SLOW_S``), ``fail`` (its process ends), ``wrong`` (its judge takes every answer).
"""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

from akl_dist.contract.records import Status, Verdict
from akl_dist.sandbox.inside import codec

SLOW_S = 4.0
_behaviour = "ok"


def warm_up() -> None:
    global _behaviour
    if "FAKE_STARTS" not in os.environ:
        return
    record, plan = Path(os.environ["FAKE_STARTS"]), os.environ["FAKE_PLAN"].split()
    with record.open("a") as stream:
        stream.write(f"began {os.getpid()}\n")
    number = record.read_text().count("began")
    _behaviour = plan[min(number, len(plan)) - 1]
    if _behaviour == "slow":
        time.sleep(SLOW_S)
    if _behaviour == "fail":
        raise OSError("this start fails")
    with record.open("a") as stream:
        stream.write(f"up {os.getpid()}\n")


def judge(*, gold: str, response_text: str, truncated: bool, think_open: bool = False) -> Verdict:
    del truncated, think_open
    command, _, argument = response_text.partition(" ")
    if command == "hang":
        while True:
            time.sleep(0.01)
    if command == "spawn-and-hang":
        child = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(300)"
        subprocess.Popen([sys.executable, "-c", child, argument])
        while True:
            time.sleep(0.01)
    if command == "sleep":
        time.sleep(float(argument))
    if command == "crash":
        sys.stderr.write("the reason\n")
        os._exit(7)
    if command == "raise":
        raise KeyError("inside the grader")
    if command == "print":
        print("noise on stdout", flush=True)
    if command == "twice":
        pipes = (fd for fd in range(3, 20) if os.path.exists(f"/proc/self/fd/{fd}") and stat.S_ISFIFO(os.fstat(fd).st_mode))
        (replies,) = (fd for fd in pipes if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY)
        forged = {"status": "ok", "extracted": "forged", "span": None, "reason": "", "score": None, "terms": []}
        codec.write_message(replies, forged)
    if command == "pid":
        return Verdict(Status.OK, str(os.getpid()), (0, 1))
    return Verdict(Status.OK if response_text == gold or _behaviour == "wrong" else Status.WRONG, response_text)


def distrusted(*, gold: str, response_text: str, truncated: bool, think_open: bool = False) -> Verdict:
    del gold, response_text, truncated, think_open
    return Verdict(Status.OK)
