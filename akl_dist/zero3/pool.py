"""Ray actors around the ranks of a model under ZeRO-3: what the pools of learner and critic share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from akl_dist.cluster import actor as process
from akl_dist.cluster.gather import gather
from akl_dist.cluster.reserve import with_environment
from akl_dist.config.schema import LearnerConfig
from akl_dist.zero3.rank import listen

CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class RankSettings:
    """What every rank is made with. Plain values, so that they cross processes.

    Attributes:
        model_path: local Hugging Face folder with safetensors weights.
        dtype: "float32" | "bfloat16".
        attention: attention implementation name of transformers.
        device: "cpu" | "cuda".
        learner: optimizer, batch and ZeRO settings of this role; its timeout_s limits every wait.
        failures: folder for the batches of failed updates.
    """

    model_path: str
    dtype: str
    attention: str
    device: str
    learner: LearnerConfig
    seed: int
    failures: str

    @property
    def environment(self) -> dict[str, str]:
        """What DeepSpeed (its accelerator) and OpenMP (its threads) read when they are loaded."""
        threads = str(self.learner.num_threads)
        return {"DS_ACCELERATOR": self.device, "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}


class RankActor:
    """One rank in a process of its own. The worker is made by :meth:`start`, so that its errors reach the driver as raised.

    Every method but :meth:`rendezvous` and :meth:`ping` is a collective: it waits for the other ranks, and the limit on one
    collective unblocks it when one of them is gone.
    """

    def __init__(self, settings: Any, name: str, rank: int, world_size: int) -> None:
        process.enter()
        self._settings, self._name, self._rank, self._world_size = settings, name, rank, world_size
        self._store: Any = None
        self._worker: Any = None

    def make_worker(self, rendezvous: tuple[str, int]) -> Any:
        """The :class:`~akl_dist.zero3.rank.Zero3Rank` of this actor."""
        raise TypeError(f"{type(self).__name__} does not say which worker it runs")

    @property
    def worker(self) -> Any:
        assert self._worker is not None, f"{self._name}: start() comes first"
        return self._worker

    def rendezvous(self) -> tuple[str, int]:
        """Rank 0 only: listen on a port the system chooses and return where."""
        address = ray.util.get_node_ip_address()
        self._store = listen(address)
        return address, self._store.port

    def start(self, rendezvous: tuple[str, int]) -> str:
        self._worker = self.make_worker(rendezvous)
        return self._name

    def ping(self) -> int:
        """Optimizer steps taken; answers only when the rank is up and idle."""
        return self.worker.optimizer_steps

    def parameters_checksum(self) -> str:
        return self.worker.parameters_checksum()

    def save(self, folder: str) -> None:
        self.worker.save(Path(folder))

    def load(self, folder: str) -> None:
        self.worker.load(Path(folder))

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()


class RankPool:
    """``len(actor_options)`` ranks named ``<role>/<run id>/<rank>``. Waits for the ranks alone; each call has their deadline.

    Args:
        role: "learner" | "critic".
        run_id: part of the actors' names.
        actor: class of the actors.
        settings: what each rank is made with.
        actor_options: Ray options of each rank (placement bundle, num_cpus, num_gpus, runtime_env), rank 0 first.
    """

    def __init__(
        self, *, role: str, run_id: str, actor: type[RankActor], settings: RankSettings,
        actor_options: Sequence[Mapping[str, Any]],
    ) -> None:
        assert actor_options, f"a {role} needs at least one rank"
        self._role, self._timeout_s = role, settings.learner.timeout_s
        self.ranks: dict[str, Any] = {}
        """Actor name -> handle, rank 0 first."""
        for rank, options in enumerate(actor_options):
            name = f"{role}/{run_id}/{rank}"
            remote = ray.remote(actor).options(**with_environment(options, settings.environment), name=name, max_restarts=0)
            self.ranks[name] = remote.remote(settings, name, rank, len(actor_options))
        rendezvous = next(iter(self.ranks.values())).rendezvous.remote()
        self._started = {name: rank.start.remote(rendezvous) for name, rank in self.ranks.items()}

    def ready(self) -> dict[str, Any]:
        """Actor name -> reference that resolves once the rank is up (all ranks start together)."""
        return dict(self._started)

    def ping(self) -> dict[str, int]:
        """Optimizer steps taken by each rank."""
        return self.all(lambda rank: rank.ping.remote(), "answering a ping")

    def save(self, folder: Path) -> None:
        """Every rank writes its part of the checkpoint into the existing folder, which all nodes must see."""
        self.all(lambda rank: rank.save.remote(str(folder)), f"saving to {folder}")

    def load(self, folder: Path) -> None:
        self.all(lambda rank: rank.load.remote(str(folder)), f"loading {folder}")

    def parameters_checksum(self) -> str:
        return next(iter(self.all(lambda rank: rank.parameters_checksum.remote(), "hashing parameters").values()))

    def close(self) -> None:
        """Leave the process group within a limit, then end the processes."""
        refs = [rank.close.remote() for rank in self.ranks.values()]
        ray.wait(refs, num_returns=len(refs), timeout=CLOSE_TIMEOUT_S)
        for rank in self.ranks.values():
            ray.kill(rank)

    def all(self, call: Callable[[Any], Any], doing: str) -> dict[str, Any]:
        """What ``call`` gives on every rank, by actor name."""
        return self.wait({name: call(rank) for name, rank in self.ranks.items()}, doing)

    def wait(self, refs: Mapping[str, Any], doing: str) -> dict[str, Any]:
        return gather(refs, timeout_s=self._timeout_s, stage=self._role, doing=doing)
