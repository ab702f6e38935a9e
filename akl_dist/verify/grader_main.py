"""The grader process: reads judgements from stdin, writes verdicts to stdout, one length-prefixed JSON message each.

Started by :mod:`akl_dist.verify.grader` as ``python -m akl_dist.verify.grader_main JUDGE PARENT_PID``; it imports neither torch nor
ray. It waits only for its parent's next message; the parent ends it by closing the pipe or by SIGKILL, and the kernel kills it
when the parent's thread that started it ends. A judge finds an empty stdin, and what it prints goes to stderr; each reply repeats
the number of its request, which nobody can guess.
"""

from __future__ import annotations

import importlib
import logging
import os
import resource
import stat
import sys

from akl_dist.contract.process import die_with_parent
from akl_dist.sandbox.inside import codec

MEMORY_LIMIT = 4 << 30  # bytes of address space; a runaway expression ends in MemoryError
LOG_LIMIT = 16 << 20  # bytes of stderr


def main() -> None:
    judge_path, parent_pid = sys.argv[1], int(sys.argv[2])
    die_with_parent(parent_pid)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (LOG_LIMIT, LOG_LIMIT))
    logging.disable(logging.WARNING)  # math-verify warns that the time limit is ours: it is, outside this process
    requests, replies, nothing = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    module_name, _, function_name = judge_path.partition(":")
    module = importlib.import_module(module_name)
    judge = getattr(module, function_name)
    warm_up = getattr(module, "warm_up", None)
    if warm_up:
        warm_up()
    isolation = getattr(module, "isolation", None)
    codec.write_message(replies, {"ready": os.getpid(), "isolation": isolation() if isolation else None})
    process = os.getpid()
    while (message := codec.read_message(requests)) is not None:
        verdict = judge(**message["item"])  # what it raises ends this process: the parent reports it as an error of this judgement
        if os.getpid() != process:  # a child that a reward forked has come back from it: one process answers, not two
            os._exit(0)
        reply = {"nonce": message["nonce"], "status": verdict.status.value, "extracted": verdict.extracted, "span": verdict.span, 
                 "reason": verdict.reason, "score": verdict.score, "terms": verdict.terms}
        codec.write_message(replies, reply)
        _shorten_log()


def _shorten_log() -> None:
    """Empty the log once half its limit is used: a judge that prints a little each time does not run into the limit in the end."""
    sys.stdout.flush()
    log = os.fstat(2)
    if stat.S_ISREG(log.st_mode) and log.st_size > LOG_LIMIT // 2:
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)


if __name__ == "__main__":
    main()
