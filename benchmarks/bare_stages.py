"""Stages without a cluster: one plain process per engine, reference copy and learner rank, which do again what a dumped
step did and say how long it took.

Every process has the environment (threads included), the settings and the scheduling priority of the actor it stands for (Ray
starts its workers at a lower priority than other programs, which matters on a machine that is shared). Times are of the work
alone: inputs are plain arrays in memory before the clock starts.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from benchmarks.in_process import Made

if TYPE_CHECKING:
    from akl_dist.contract.records import Sampling

START_S = 240.0
STEP_S = 120.0
END_S = 20.0
Answer = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One dumped step: its file, how it was sampled, and where the reference leaves its arrays for the learner (.npz)."""

    step: int
    dump: Path
    sampling: Sampling
    scores: Path


class BareProcess:
    """A spawned process that answers tasks one after another; every wait has a limit and names the process."""

    def __init__(
        self, name: str, body: Callable[..., None], arguments: Sequence[Any], environment: Mapping[str, str], niceness: int
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_enter, args=(body, theirs, os.getpid(), niceness, *arguments), name=name,
                                        daemon=True)
        with _environment(environment):  # read when the child loads OpenMP, vLLM and DeepSpeed
            self._process.start()
        theirs.close()

    def send(self, task: Task | tuple[str, int]) -> None:
        self._pipe.send(task)

    def answer(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise RuntimeError(f"bare {self.name}: no answer within {timeout_s:g} s")
        try:
            return self._pipe.recv()
        except EOFError as error:
            raise RuntimeError(f"bare {self.name}: its process ended, see its output above") from error

    def close(self) -> None:
        self._pipe.close()
        self._process.join(END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(END_S)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def niceness_of_actors() -> int:
    """Scheduling priority of the Ray workers that this process's cluster has started; call it once actors are up."""
    workers = [p for p in psutil.Process().children(recursive=True) if p.name().startswith("ray::")]
    assert workers, "no Ray worker among the descendants of this process"
    return max(worker.nice() for worker in workers)


def _enter(body: Callable[..., None], pipe: Connection, parent: int, niceness: int, *arguments: Any) -> None:
    from akl_dist.contract.process import die_with_parent

    die_with_parent(parent)
    os.nice(max(0, niceness - os.nice(0)))
    os.dup2(2, 1)  # the benchmark's own output stays readable
    try:
        body(pipe, *arguments)
    except (EOFError, KeyboardInterrupt):  # the benchmark is over
        return


class BareStages:
    """The three device stages of a run. ``run(task)`` gives seconds by stage and how the results compare with the dump's."""

    def __init__(self, made: Mapping[str, Made], *, niceness: int) -> None:
        for role in ("rollout", "reference"):
            assert len(made[role].actor_options) == 1, f"{role}: one process is compared, the run has more"
        self._engine = BareProcess("engine", engine_body, (made["rollout"].settings,), _variables(made["rollout"], 0),
                                   niceness)
        self._reference = BareProcess("reference", reference_body, (made["reference"].settings,),
                                      _variables(made["reference"], 0), niceness)
        size = len(made["learner"].actor_options)
        self._ranks = [BareProcess(f"learner rank {rank}", learner_body, (made["learner"].settings, rank, size),
                                   _variables(made["learner"], rank), niceness) for rank in range(size)]
        self._all = [self._engine, self._reference, *self._ranks]

    def start(self) -> None:
        """Wait until all have loaded their models."""
        port = self._ranks[0].answer(START_S)
        for rank in self._ranks:
            rank.send(("127.0.0.1", port))
        for process in self._all:
            process.answer(START_S)

    def run(self, task: Task) -> dict[str, Answer]:
        """One step's three stages in turn; a learner's time is that of its slowest rank."""
        answers: dict[str, Answer] = {}
        for name, process in (("rollout", self._engine), ("reference", self._reference)):
            process.send(task)
            answers[name] = process.answer(STEP_S)
        for rank in self._ranks:
            rank.send(task)
        ranks = [rank.answer(STEP_S) for rank in self._ranks]
        answers["learner"] = {**ranks[0], "seconds": max(rank["seconds"] for rank in ranks)}
        return answers

    def close(self) -> None:
        for process in self._all:
            process.close()


def _variables(made: Made, index: int) -> dict[str, str]:
    """Environment variables of an actor, without its log file."""
    from akl_dist.cluster.actor import LOG_PATH
    from akl_dist.cluster.reserve import with_environment

    variables = dict(with_environment(made.actor_options[index], made.settings.environment)["runtime_env"]["env_vars"])
    variables.pop(LOG_PATH, None)
    return variables


# --- what the processes do ---------------------------------------------------------------------------------------


def engine_body(pipe: Connection, settings: Any) -> None:
    """Sample the step's prompts with the step's seeds."""
    from akl_dist.bookkeeping.rollout_dump import read_rollouts
    from akl_dist.rollout.engine import RolloutEngine

    engine = RolloutEngine(settings)
    pipe.send("ready")
    while True:
        task: Task = pipe.recv()
        dumped = read_rollouts(task.dump)
        prompts = [group.prompt for group in dumped]
        begin = time.perf_counter()
        sampled = engine.sample(prompts, task.sampling)
        seconds = time.perf_counter() - begin
        same = [mine.response_lengths == group.response_lengths and np.array_equal(mine.arrays.token_ids, group.arrays.token_ids)
                for mine, group in zip(sampled, dumped, strict=True)]
        pipe.send({"seconds": seconds, "groups": len(same), "groups_equal": sum(same)})


def reference_body(pipe: Connection, settings: Any) -> None:
    """Score the step's responses."""
    from akl_dist.bookkeeping.rollout_dump import read_rollouts
    from akl_dist.reference.worker import ReferenceWorker, Responses

    worker = ReferenceWorker(
        model_path=settings.model_path, dtype=settings.dtype, attention=settings.attention, temperature=settings.temperature,
        num_threads=settings.num_threads, max_tokens_per_batch=settings.max_tokens_per_batch, device=settings.device,
        logprob_chunk_tokens=settings.logprob_chunk_tokens, kl_estimator=settings.kl_estimator, topk=settings.topk)
    pipe.send("ready")
    while True:
        task: Task = pipe.recv()
        groups = [Responses(g.prompt.token_ids, np.split(g.arrays.token_ids, np.cumsum(g.response_lengths)[:-1]), g.arrays.logp)
                  for g in read_rollouts(task.dump)]
        begin = time.perf_counter()
        scored = worker.score(groups)
        seconds = time.perf_counter() - begin
        logp = np.concatenate([one.arrays.logp for one in scored])
        rows: dict[str, Any] = {name: np.concatenate([one.arrays.rows[name] for one in scored]) for name in scored[0].arrays.rows}
        np.savez(task.scores, **rows)
        gap = np.abs(logp - np.concatenate([np.asarray(row) for row in _columns(task.dump, ["ref_logp"])["ref_logp"]])).max()
        pipe.send({"seconds": seconds, "largest_logp_gap": float(gap)})


def learner_body(pipe: Connection, settings: Any, rank: int, world_size: int) -> None:
    """Forward, backward and optimizer step on the step's samples, as one rank of ZeRO-3."""
    import torch

    from akl_dist.learner.worker import LearnerWorker
    from akl_dist.zero3.planning import plan_updates
    from akl_dist.zero3.rank import listen

    store = listen("127.0.0.1") if rank == 0 else None
    if store is not None:
        pipe.send(store.port)
    host, port = pipe.recv()
    worker = LearnerWorker(
        model_path=settings.model_path, dtype=settings.dtype, attention=settings.attention, rank=rank, world_size=world_size,
        master_addr=host, master_port=port, device=settings.device, num_threads=settings.learner.num_threads,
        learner=settings.learner, objective=settings.objective, seed=settings.seed, temperature=settings.temperature,
        timeout_s=settings.learner.timeout_s, failures=Path(settings.failures), store=store)
    pipe.send("ready")
    while True:
        task: Task = pipe.recv()
        samples, lengths = samples_of_dump(task.dump, task.scores)
        plans = plan_updates(lengths, num_ranks=world_size, updates_per_step=settings.learner.updates_per_step,
                             max_tokens_per_micro_batch=settings.learner.max_tokens_per_micro_batch)
        torch.distributed.barrier()
        begin = time.perf_counter()
        update = worker.update(samples, [plan.for_rank(rank) for plan in plans], step=task.step)
        pipe.send({"seconds": time.perf_counter() - begin, "loss": update.metrics["learner/loss"],
                   "grad_norm": update.metrics["learner/grad_norm"]})


def samples_of_dump(dump: Path, scores: Path) -> tuple[dict[tuple[int, int], Any], list[Any]]:
    """The learner's samples and lengths of a dumped step.

    Args:
        scores: what :func:`reference_body` saved for the same step (the dump has of the reference only log-probs and entropies).
    """
    from akl_dist.learner.batch import Sample
    from akl_dist.zero3.planning import GroupLengths

    table = _columns(dump, ["sample_index", "prompt_token_ids", "response_token_ids", "role", "logp", "ref_logp", "advantage",
                            "reward"])
    with np.load(scores) as saved:
        ref_rows = dict(saved)
    samples, group, start = {}, -1, 0
    rows = len(table["sample_index"])
    for row in range(rows):
        index = table["sample_index"][row]
        group += index == 0
        end = start + len(table["response_token_ids"][row])
        samples[group, index] = Sample(
            np.asarray(table["prompt_token_ids"][row], np.int64), np.asarray(table["response_token_ids"][row], np.int32),
            np.asarray(table["logp"][row], np.float32), np.asarray(table["ref_logp"][row], np.float32),
            {name: array[start:end] for name, array in ref_rows.items()}, np.asarray(table["role"][row], bool),
            table["advantage"][row], table["reward"][row] is not None)
        start = end
    members = [[samples[key] for key in samples if key[0] == g] for g in range(group + 1)]
    lengths = [
        GroupLengths(len(own[0].prompt_ids), tuple(len(s.response_ids) for s in own),
                     tuple(int(s.answer_mask.sum()) for s in own), tuple(s.trains for s in own))
        for own in members
    ]
    return samples, lengths


def _columns(dump: Path, names: Sequence[str]) -> dict[str, list[Any]]:
    import pyarrow.parquet as pq

    return pq.read_table(dump, columns=list(names)).to_pydict()
