"""Reward functions for tests: each does on command of the response what functions of one's own do in the wild."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import sys
import time

from akl_dist.contract.records import Status, Verdict
from akl_dist.sandbox.inside import codec

FORGED = {"nonce": "probe", "status": "ok", "extracted": None, "span": None, "reason": "", "score": 99.0, "terms": []}
FRAMES = {"forged": codec.frame(FORGED), "other": codec.frame(["no reply"]), "no-json": b"\0\0\0\2{]", "huge": b"\xff" * 64}


class Odd(Exception):
    """Of no family that a grader outlives."""


def commanded(response: str, gold: str) -> object:
    command, _, argument = response.partition(" ")
    if command == "hang":
        while True:
            time.sleep(0.01)
    if command == "crash":
        os._exit(7)
    if command == "exit":
        sys.exit(0)
    if command == "raise":
        return int("no number")
    if command == "odd":
        raise Odd("the reason")
    if command == "print":
        print("x" * 100_000)
    if command == "write":  # into whatever pipe there is, before the reply
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                if stat.S_ISFIFO(os.fstat(fd).st_mode):
                    os.write(fd, FRAMES[argument])
        return 1.0
    if command == "read":
        return {"score": 0.5, "extracted": sys.stdin.read() + "."}
    if command == "fork":
        os.fork()  # and both come back
        return argument == gold
    if command == "pid":
        return Verdict(Status.OK, str(os.getpid()))
    if command == "environment":
        return {"score": 0.5, "extracted": os.environ.get(argument, "none")}
    if command == "number":
        return float(argument)
    return response == gold


async def awaited(response: str, gold: str) -> float:
    await asyncio.sleep(0.01)
    return 1.0 if response == gold else 0.25


def everything(*, response: str, gold: str, prompt: str, extra: dict, truncated: bool, source: str, transcript: str) -> dict:
    said = "|".join([response, gold, prompt, str(sorted(extra.items())), str(truncated), source, transcript])
    return {"score": 1, "extracted": "b", "reason": said}


def share_of_a(response: str) -> float:
    return response.count("a") / len(response)


def thousands(response: str) -> float:
    return len(response) / 1000


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = solution_str == ground_truth
    return {"score": 0.75 if right else -1.0, "acc": right, "other": data_source, "reason": f"{data_source} {extra_info}"}


def reward_func(queries, prompts, labels):
    assert len(queries) == len(prompts) == len(labels) == 1 and queries[0].startswith(prompts[0])
    right = queries[0][len(prompts[0]) :] == labels[0]
    return {"rewards": Tensor([2.0 if right else -2.0]), "scores": Tensor([float(right)]), "extra_logs": {}}


class Tensor:
    """What the package sees of a torch tensor."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def tolist(self) -> list[float]:
        return self.values


def needs_more(response: str, tokenizer: object) -> float:
    del response, tokenizer
    return 0.0


def takes_none(text: str = "") -> float:
    del text
    return 0.0


def by_position(response: str, /) -> float:
    del response
    return 0.0
