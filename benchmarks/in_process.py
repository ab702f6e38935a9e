"""A run's cluster and stages, set up inside the measuring process, so that a benchmark can look at every step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from akl_dist.assembly import Assembly
    from akl_dist.bookkeeping.journal import RunDirectory
    from akl_dist.config.schema import Config
    from akl_dist.data.source import LoadedData
    from akl_dist.loop import Progress, Recorder, Run

POOLS = {"rollout": "RolloutPool", "verify": "VerifyPool", "reference": "ReferencePool", "learner": "LearnerPool"}


@dataclass(frozen=True)
class Made:
    """What the pool of one role was made with: settings, and the Ray options of each of its actors."""

    settings: Any
    actor_options: list[dict[str, Any]]


@dataclass(frozen=True)
class Running:
    """Stages that are up, and what they were made with, by role."""

    config: Config
    assembly: Assembly
    loaded: LoadedData
    directory: RunDirectory
    made: dict[str, Made]

    def run(self, recorder: Recorder, **changes: Any) -> Run:
        """The loop's Run without evaluation and checkpoints; ``changes`` replace fields of it."""
        from akl_dist.loop import Run

        return dataclasses.replace(
            Run(config=self.config, stages=self.assembly.stages, prompts=self.assembly.prompts, evaluation_prompts=(),
                probe_prompts=self.assembly.probe_prompts, end_ids=self.assembly.end_ids, recorder=recorder,
                save=_keep_nothing, stop_requested=lambda: False),
            **changes)


def _keep_nothing(progress: Progress) -> None:
    """A benchmark leaves no checkpoint."""


@contextmanager
def running(overrides: Sequence[str], folder: Path, *, say: Callable[[str], None]) -> Iterator[Running]:
    """A local cluster with the stages of the configuration ``overrides``, as ``akl_dist.main`` would set it up.

    Args:
        overrides: as on the command line; no evaluation, local address and ``folder`` for outputs are added.
        say: takes progress lines.
    """
    from akl_dist.cluster import environment
    from akl_dist.config import typed
    from akl_dist.config.compose import compose

    config = compose([*overrides, "cluster.address=local", "evaluate.num_problems=0", "run_id=benchmark", f"output_dir='{folder}'"])
    environment.prepare(config.cluster.address)  # before Ray is imported
    from akl_dist import assembly as module
    from akl_dist.bookkeeping.journal import RunDirectory
    from akl_dist.cluster.connect import connect
    from akl_dist.job import check, load_data

    check(config)
    loaded = load_data(config)
    directory = RunDirectory.create(config.output_dir, config.experiment, str(config.run_id), typed.plain(config))
    with ExitStack() as shutdown:
        connection = connect(config.cluster.address, num_cpus=config.cluster.num_cpus,
                             object_store_mib=config.cluster.object_store_mib, say=say)
        shutdown.callback(connection.close)
        with ExitStack() as patches:
            spies = {role: patches.enter_context(mock.patch.object(module, name, wraps=getattr(module, name)))
                     for role, name in POOLS.items()}
            assembly = module.Assembly(config, directory=directory, loaded=loaded, resumed=None)
        shutdown.callback(assembly.close)
        made = {role: Made(spy.call_args.kwargs["settings"], [dict(o) for o in spy.call_args.kwargs["actor_options"]])
                for role, spy in spies.items()}
        assembly.wait_until_ready(say)
        yield Running(config, assembly, loaded, directory, made)
