"""Judges for tests of the grader pool: they hang, crash, fail and leave children behind on command of the response."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from akl_dist.contract.records import Status, Verdict


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
    if command == "pid":
        return Verdict(Status.OK, str(os.getpid()), (0, 1))
    return Verdict(Status.OK if response_text == gold else Status.WRONG, response_text)


def distrusted(*, gold: str, response_text: str, truncated: bool, think_open: bool = False) -> Verdict:
    del gold, response_text, truncated, think_open
    return Verdict(Status.OK)
