"""The grader process: reads judgements from stdin, writes verdicts to stdout, one length-prefixed JSON message each.

Started by :mod:`akl_dist.verify.grader` as ``python -m akl_dist.verify.grader_main JUDGE PARENT_PID``; it imports neither torch nor
ray. It waits only for its parent's next message; the parent ends it by closing the pipe or by SIGKILL, and the kernel kills it
when the parent's thread that started it ends. Everything printed goes to stderr, so that stdout carries messages only.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import resource
import stat
import struct
import sys
from typing import Any, BinaryIO

from akl_dist.contract.process import die_with_parent

HEADER = struct.Struct(">I")
MAX_MESSAGE = 64 << 20
MEMORY_LIMIT = 4 << 30  # bytes of address space; a runaway expression ends in MemoryError
LOG_LIMIT = 16 << 20  # bytes of stderr


def read_message(stream: BinaryIO) -> Any | None:
    """The next message, or None at the end of the stream."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    assert size <= MAX_MESSAGE, f"a message of {size} bytes"
    body = stream.read(size)
    return json.loads(body) if len(body) == size else None


def encode(message: Any) -> bytes:
    """Length prefix and JSON. Lone surrogates survive: JSON escapes them."""
    body = json.dumps(message).encode("ascii")
    return HEADER.pack(len(body)) + body


def main() -> None:
    judge_path, parent_pid = sys.argv[1], int(sys.argv[2])
    die_with_parent(parent_pid)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (LOG_LIMIT, LOG_LIMIT))
    logging.disable(logging.WARNING)  # math-verify warns that the time limit is ours: it is, outside this process
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    module_name, _, function_name = judge_path.partition(":")
    module = importlib.import_module(module_name)
    judge = getattr(module, function_name)
    warm_up = getattr(module, "warm_up", None)
    if warm_up:
        warm_up()
    isolation = getattr(module, "isolation", None)
    _send(replies, {"ready": os.getpid(), "isolation": isolation() if isolation else None})
    while (message := read_message(sys.stdin.buffer)) is not None:
        verdict = judge(**message)  # what it raises ends this process: the parent reports it as an error of this judgement
        reply = {"status": verdict.status.value, "extracted": verdict.extracted, "span": verdict.span, "reason": verdict.reason,
                 "score": verdict.score, "terms": verdict.terms}
        _send(replies, reply)
        _shorten_log()


def _shorten_log() -> None:
    """Empty the log once half its limit is used: a judge that prints a little each time does not run into the limit in the end."""
    sys.stdout.flush()
    log = os.fstat(2)
    if stat.S_ISREG(log.st_mode) and log.st_size > LOG_LIMIT // 2:
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)


def _send(stream: BinaryIO, message: Any) -> None:
    stream.write(encode(message))
    stream.flush()


if __name__ == "__main__":
    main()
