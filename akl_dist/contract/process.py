"""Ties the life of a process to its parent's. Linux; standard library only."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel send SIGKILL to this process when its parent ends, however the parent ends.

    The kernel follows the parent's *thread* that started this process. A parent that is gone already ends this process now.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(3)
