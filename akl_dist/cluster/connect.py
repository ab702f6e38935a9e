"""Joining or starting a Ray cluster, and leaving it as it was found. A cluster that this process did not start is never
stopped. The rules for ``cluster.address`` stand in ``cluster.environment``, which must have prepared the process before."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import ray

from akl_dist.cluster.environment import reachable, resolve_address
from akl_dist.cluster.gather import unwatch, watch
from akl_dist.contract.errors import ClusterError


@dataclass(frozen=True)
class Connection:
    """``own`` is True when this process started the cluster; then ``guard`` ends what is left of it, should this process die."""

    address: str
    own: bool
    guard: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        """Leave the cluster; ``ray.shutdown`` ends exactly what ``ray.init`` started here."""
        unwatch()
        ray.shutdown()
        if self.guard is not None:
            self.guard.kill()
            self.guard.communicate()


def connect(address: str, *, num_cpus: int | None, object_store_mib: int, say: Callable[[str], None]) -> Connection:
    """Connect to or start the cluster.

    Raises:
        ClusterError: the named cluster does not answer or wants a token.
    """
    target = resolve_address(address)
    if target is None:
        with _group_of_its_own() as guard:
            ray.init(
                address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False,
                object_store_memory=object_store_mib * 2**20, logging_level=logging.WARNING,
            )
        for child in psutil.Process().children(recursive=True):
            if child.name() == "raylet":
                watch(child)
        return Connection("local", own=True, guard=guard)
    if not reachable(target):
        raise ClusterError(
            "cluster.address", got=f"nothing answers at {target}", expected="a Ray cluster, as host:port", stage="cluster",
            remedy="Start it (ray start --head), correct the address or RAY_ADDRESS, or use cluster.address=local.",
        )
    try:
        ray.init(address=target, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        words = str(error).strip().splitlines() or [type(error).__name__]
        raise ClusterError(
            "cluster.address", got=f"{target}: {words[0]}", expected="a Ray cluster that answers",
            remedy="Start it (ray start --head), or use cluster.address=local. With token authentication set "
                   "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN as on the head.", stage="cluster",
        ) from error
    say(f"connected to the Ray cluster at {target} (it will not be stopped)")
    return Connection(target, own=False)


GUARD = "cat; sleep 3; kill -KILL 0"
"""Until its input closes, which is when the driver is gone; then, after a while to end in peace, its whole group."""


@contextmanager
def _group_of_its_own() -> Iterator[subprocess.Popen[bytes] | None]:
    """Processes started inside belong to another process group than ours, which the yielded guard leads.

    Schedulers and `timeout` send SIGTERM to the whole group of a job. It is for the driver, which then finishes its step and
    saves; Ray's processes would end at once and take the step with them. A process leaves its group by joining another one,
    so the guard opens a group and this process starts the cluster from inside it. Ray's agents outlive a killed driver by
    a minute or more, trying to report to servers that are gone; the guard ends them.
    """
    if os.getsid(0) == os.getpid():  # a session leader cannot leave its group; then a signal to all ends the run with an error
        yield None
        return
    before = os.getpgrp()
    guard = subprocess.Popen(["sh", "-c", GUARD], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, process_group=0)
    try:
        os.setpgid(0, guard.pid)
        yield guard
    except BaseException:
        guard.kill()
        guard.communicate()
        raise
    finally:
        os.setpgid(0, before)
