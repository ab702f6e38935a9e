"""Environment of the driver that must stand before ``import ray`` (Ray reads its authentication mode when it is loaded).

Imports no Ray, so that main can call it first.

``cluster.address``:
    auto     RAY_ADDRESS when set (``ray job submit`` sets it), else a running cluster of the same user (announced),
             else a local one of its own.
    local    always a local one of its own.
    other    that address.
"""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
REACHABLE_TIMEOUT_S = 5.0
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
         "TOKENIZERS_PARALLELISM": "false", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
         "DS_ACCELERATOR": "cpu", "TRANSFORMERS_VERBOSITY": "error"}


def resolve_address(address: str) -> str | None:
    """The address to connect to, or None for a local cluster of our own."""
    if address == "local":
        return None
    if address != "auto":
        return address
    named = os.environ.get("RAY_ADDRESS")
    if named:
        return None if named == "local" else named
    try:
        found = CURRENT_CLUSTER.read_text().strip() if CURRENT_CLUSTER.stat().st_uid == os.getuid() else ""
    except OSError:
        return None
    return found if found and reachable(found) else None  # the file outlives its cluster


def reachable(address: str) -> bool:
    """Whether something accepts connections at ``host:port`` within a few seconds (Ray itself would wait for minutes)."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return False
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=REACHABLE_TIMEOUT_S):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def prepare(address: str) -> None:
    """Quiet defaults, and for a local cluster an ephemeral token: nothing else on the machine can join it and no file is
    written. A mode or token that the user set is kept."""
    for key, value in QUIET.items():
        os.environ.setdefault(key, value)
    if resolve_address(address) is None and "RAY_AUTH_MODE" not in os.environ and "RAY_AUTH_TOKEN" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
