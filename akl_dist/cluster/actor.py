"""What every actor does first: an end with its node, its own log file, and stack dumps on a crash."""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path

from akl_dist.contract.process import die_with_parent

LOG_PATH = "AKL_ACTOR_LOG"
"""Environment variable of an actor: the file that takes its stdout and stderr; unset or empty for Ray's own."""


def enter() -> None:
    """End with the node's Ray process even in the middle of a computation, redirect this process's stdout and stderr
    (appending) and enable stack dumps.

    On a node without the run directory's file system the folder cannot be made; output then stays in Ray's own logs.
    """
    die_with_parent(os.getppid())
    log_path = os.environ.get(LOG_PATH, "")
    if log_path:
        try:
            Path(log_path).parent.mkdir(parents=True, exist_ok=True)
            target = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            print(f"logs stay with Ray: cannot write {log_path}: {error}", file=sys.stderr)
        else:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(target, 1)
            os.dup2(target, 2)
            os.close(target)
    faulthandler.enable()
