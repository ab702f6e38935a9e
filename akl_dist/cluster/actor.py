"""What every actor does first: its own log file, thread count, and stack dumps on a crash."""

from __future__ import annotations

import faulthandler
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ActorSpec:
    """Where one actor runs and how: made by main from the layout, opaque to pools.

    Attributes:
        name: unique actor name, ``"<stage>/<run id>/<index>"``.
        options: keyword arguments of ``ActorClass.options`` (resources, placement, environment).
        log_path: file that takes the actor's stdout and stderr, empty for Ray's own.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    log_path: str = ""


def enter(log_path: str) -> None:
    """Redirect this process's stdout and stderr to ``log_path`` (appending) and enable stack dumps.

    On a node without the run directory's file system the folder cannot be made; output then stays in Ray's own logs.
    """
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
