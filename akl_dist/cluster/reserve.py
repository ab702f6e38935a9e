"""Reserving the bundles of a layout, and the Ray options of each actor on them.

What is missing is named before anything waits; the wait itself has a limit.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from akl_dist.cluster.actor import LOG_PATH
from akl_dist.cluster.placement import Actor, Layout, lacks
from akl_dist.contract.errors import ClusterError

PASSED_ON = ("HF_HOME", "HF_HUB_OFFLINE", "HF_TOKEN_PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "NCCL_SOCKET_IFNAME",
             "GLOO_SOCKET_IFNAME")
"""Environment variables of the driver that actors need; everything else stays behind (secrets included)."""


class Reservation:
    """A placement group made from a layout.

    Args:
        wanted: the layout.
        run_id: part of the reservation's name.
        log_dir: folder of the actors' log files.
        timeout_s: limit of the wait for the bundles.

    Raises:
        ClusterError: naming what the cluster lacks, or whom the free resources are waiting for.
    """

    def __init__(self, wanted: Layout, *, run_id: str, log_dir: Path, timeout_s: float) -> None:
        self._wanted, self._log_dir = wanted, log_dir.resolve()
        missing = lacks(wanted, node_resources())
        if missing:
            raise ClusterError(
                "cluster", got="; ".join(missing), expected=f"{wanted.demand} over all nodes",
                remedy="Ask for fewer ranks, engines or devices, or add nodes; dry_run=true prints the layout.", stage="cluster",
            )
        bundles = [{"CPU": b.num_cpus, **({"GPU": float(b.num_gpus)} if b.num_gpus else {})} for b in wanted.bundles]
        self._group: PlacementGroup = placement_group(bundles, strategy=wanted.strategy, name=f"akl_dist/{run_id}")
        if not self._group.wait(timeout_s):
            free = ray.available_resources()
            remove_placement_group(self._group)
            raise ClusterError(
                "cluster", got=f"no room for {wanted.demand} within {timeout_s:g} s; free now: "
                               f"{ {k: v for k, v in free.items() if k in ('CPU', 'GPU')} }",
                expected="the bundles of the layout", stage="cluster",
                remedy="Other jobs hold the rest (`ray status` lists them); wait for them or raise cluster.start_timeout_s.",
            )

    def options(self, role: str) -> list[dict[str, Any]]:
        """Ray options of each actor of a role, by index: resources, place, environment."""
        return [self._options(actor) for actor in self._wanted.of(role)]

    def _options(self, actor: Actor) -> dict[str, Any]:
        place = PlacementGroupSchedulingStrategy(placement_group=self._group, placement_group_bundle_index=actor.bundle)
        return {"num_cpus": actor.num_cpus, "num_gpus": actor.num_gpus, "scheduling_strategy": place,
                "runtime_env": self._environment(f"{actor.role}-{actor.index}", actor.num_threads)}

    def beside_driver(self, name: str) -> dict[str, Any]:
        """Options of an actor without resources of its own on the driver's node, where the run directory is."""
        place = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        return {"num_cpus": 0, "scheduling_strategy": place, "runtime_env": self._environment(name, 1)}

    def _environment(self, log_name: str, num_threads: int) -> dict[str, Any]:
        return {"env_vars": {**thread_environment(num_threads), LOG_PATH: str(self._log_dir / f"{log_name}.log")},
                **quoted_interpreter(sys.executable)}

    def release(self) -> None:
        remove_placement_group(self._group)


def quoted_interpreter(executable: str) -> dict[str, str]:
    """Runtime-environment entry for an interpreter whose path a shell would split.

    Ray starts a worker with a runtime environment through ``bash -c "exec PYTHON ..."`` without quoting PYTHON: in a folder with
    a space no such worker ever starts, and nothing says why.
    """
    quoted = shlex.quote(executable)
    return {} if quoted == executable else {"py_executable": quoted}


def with_environment(options: Mapping[str, Any], env_vars: Mapping[str, str]) -> dict[str, Any]:
    """Ray options of an actor with ``env_vars`` in its runtime environment; those already there win.

    For what libraries read when they are loaded: threads of OpenMP, the accelerator of DeepSpeed.
    """
    runtime_env = {**quoted_interpreter(sys.executable), **(options.get("runtime_env") or {})}
    runtime_env["env_vars"] = {**env_vars, **(runtime_env.get("env_vars") or {})}
    return {**options, "runtime_env": runtime_env}


def node_resources() -> list[Mapping[str, float]]:
    """CPUs and GPUs of each living node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def thread_environment(num_threads: int) -> dict[str, str]:
    """Thread counts set on purpose (Ray would derive them from num_cpus), waiting threads that sleep instead of spinning,
    and the few variables of the driver that actors need."""
    passed = {key: os.environ[key] for key in PASSED_ON if key in os.environ}
    return {
        **passed, "OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads), "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0", "TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRANSFORMERS_VERBOSITY": "error", "PYTHONUNBUFFERED": "1",
    }
