"""What this machine has, without Ray: for dry runs and for messages before anything is started. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path

from akl_dist.cluster.environment import resolve_address
from akl_dist.cluster.placement import Layout, lacks
from akl_dist.config import models
from akl_dist.config.mixture import from_hub
from akl_dist.config.schema import Config

NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


def machine_resources(config: Config) -> dict[str, float]:
    """CPUs (``cluster.num_cpus`` where set) and NVIDIA GPUs of this machine."""
    gpus = len(list(NVIDIA_GPUS.iterdir())) if NVIDIA_GPUS.is_dir() else 0
    return {"CPU": float(config.cluster.num_cpus or os.cpu_count() or 1), "GPU": float(gpus)}


def lacking(config: Config, wanted: Layout) -> list[str]:
    """What a run of this configuration would miss here, one sentence each; empty when nothing was found missing.

    A remote cluster is not contacted: a dry run holds nothing and waits for nothing.
    """
    out = []
    address = resolve_address(config.cluster.address)
    if address is None:
        out += [f"this machine alone: {item}" for item in lacks(wanted, [machine_resources(config)])]
    else:
        out.append(f"cluster: the one at {address} was not asked (a dry run does not connect)")
    critic = config.critic.path if config.objective.advantage == "gae" else None
    for what, path in (("model", config.model.path), ("critic's model", critic)):
        if path is not None and not models.looks_local(path) and (what == "model" or path != config.model.path):
            out.append(f"hub: {what} {path} is fetched when the run starts, unless it is in the cache")
    if config.rollout.replay is None:
        out += [f"hub: data set {label} is fetched when the run starts (or set data.path=FILE)" for label in from_hub(config.data)]
    return out
