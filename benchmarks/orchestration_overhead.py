"""Wall time of a ``+exp=tiny`` step over the sum of its stages run bare; where the difference goes.

*Step*: what a run needs from the end of one step to the end of the next: ``akl_dist.loop.train`` on a local Ray cluster with
its real stages, the journal, TensorBoard and rollout dump included. *Bare*: the engine drawing the same responses, the reference
scoring them, and the learner's forward, backward and optimizer step on them; each in a plain process of its own without Ray,
one stage after the other, with the settings, environment variables and thread counts of the actors. The learner stage of the
tiny run is two ZeRO-3 ranks on two cores, so its bare stage is the same two ranks as two plain processes: what is compared is
the cost of orchestration, not of ZeRO. Verdicts, token roles and weight sync have no bare counterpart and count as
overhead in full.

Step and bare take turns in one run, block by block, so that a slow minute of the machine meets both; the processes of the
side that waits are idle. The first block warms up. Ratios are per step; the median over the quiet steps is reported: those
during which other programs used at most --quiet of the machine's CPU time, on either side (all steps where fewer than five
were quiet, and the report says so). Two ranks that wait for each other on two cores stretch as soon as a third program runs.
``learner.lr=0`` keeps the policy at the shipped weights, so that the bare engine can draw the same tokens; that they are the same,
that the reference's log-probs and the learner's loss agree too, is checked.

    python -m benchmarks.orchestration_overhead [--steps 24 --block 3 --quiet 0.05 --max-ratio 1.15 --override seed=1]

Prints a table and one JSON line. Exits 1 if the ratio is above --max-ratio or the two sides did different work.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.bare_stages import Answer, BareStages, Task, niceness_of_actors
from benchmarks.in_process import Running, running

if TYPE_CHECKING:
    from akl_dist.contract.records import JudgedGroup, LabelledGroup, ReferenceGroup, RolloutGroup, TrainingGroup
    from akl_dist.contract.stages import VerdictStream, VerifyStage
    from akl_dist.loop import Progress
    from akl_dist.recorder import StepRecorder

STAGES = ("rollout", "reference", "learner")
DEADLINE_S = 900
MIN_QUIET = 5
LOSS_TOLERANCE = 1e-4
LOGP_TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class StepTime:
    """One step, seconds. ``wall``: from the end of the step before. ``spans``: the loop's own times by part, which do not
    overlap. ``bare``: by stage. ``others``: share of the machine's CPU time that other programs used, the larger of both sides."""

    wall: float
    spans: Mapping[str, float]
    bare: Mapping[str, float]
    others: float

    @property
    def ratio(self) -> float:
        return self.wall / sum(self.bare.values())


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--block", type=int, default=3, help="steps in a row before the bare stages repeat them")
    parser.add_argument("--quiet", type=float, default=0.05, help="largest CPU share of other programs in a quiet step")
    parser.add_argument("--max-ratio", type=float, default=1.15)
    parser.add_argument("--override", action="append", default=[], help="key=value of the configuration, over +exp=tiny")
    options = parser.parse_args(argv)
    if options.block < 1 or options.steps % options.block or options.steps < 2 * options.block:
        parser.error("--steps must be a multiple of --block, at least twice as large")
    return options


# --- measuring ---------------------------------------------------------------------------------------------------


class Interleaver:
    """The loop's recorder: notes the wall time of each step and lets the bare stages repeat every finished block."""

    def __init__(self, inner: StepRecorder, run: Running, bare: BareStages, folder: Path, block: int) -> None:
        self._inner, self._run, self._bare, self._folder, self._block = inner, run, bare, folder, block
        self._pending: list[tuple[int, float, dict[str, float], float]] = []
        self.times: list[StepTime] = []
        self.problems: list[str] = []
        self.roles_s = 0.0
        self._cpu = OtherPrograms()
        self._mark = time.perf_counter()

    def step_done(self, progress: Progress, metrics: dict[str, float], groups: Sequence[TrainingGroup]) -> None:
        self._inner.step_done(progress, metrics, groups)
        wall = time.perf_counter() - self._mark
        self._pending.append((progress.step, wall, {**metrics, "time/roles_s": self.roles_s}, self._cpu.share()))
        if progress.step % self._block == 0:
            self._run.assembly.flush()  # the last dump of a block; the others are written while the next step runs
            for step, seconds, of_step, others in self._pending:
                self._repeat(step, seconds, of_step, others)
            self._pending.clear()
        self._cpu = OtherPrograms()
        self._mark = time.perf_counter()

    def evaluation_done(self, progress: Progress, rollouts: Sequence[RolloutGroup], judged: Sequence[JudgedGroup]) -> None:
        self._inner.evaluation_done(progress, rollouts, judged)

    def _repeat(self, step: int, wall: float, metrics: Mapping[str, float], others: float) -> None:
        from akl_dist.bookkeeping.rollout_dump import dump_path
        from akl_dist.contract.records import Sampling

        rollout = self._run.config.rollout
        sampling = Sampling(rollout.group_size, rollout.temperature, rollout.max_response_tokens, self._run.assembly.end_ids,
                            ("train", self._run.config.seed, step))
        cpu = OtherPrograms()
        answers = self._bare.run(Task(step, dump_path(self._run.directory.rollouts, step), sampling, self._folder / "scores.npz"))
        self.problems += differences(step, metrics, answers)
        self.times.append(StepTime(wall, spans(metrics, wall), {stage: answers[stage]["seconds"] for stage in STAGES},
                                   max(others, cpu.share())))


class TimedVerify:
    """The verify stage, with the seconds of its labelling noted in ``note.roles_s``."""

    def __init__(self, inner: VerifyStage, note: Interleaver) -> None:
        self._inner, self._note = inner, note

    def stream(self) -> VerdictStream:
        return self._inner.stream()

    def submit(self, groups: Sequence[RolloutGroup]) -> Any:
        return self._inner.submit(groups)

    def collect(self, ticket: Any, earlier: Sequence[JudgedGroup] = ()) -> list[JudgedGroup]:
        return self._inner.collect(ticket, earlier)

    def label(self, groups: Sequence[RolloutGroup], judged: Sequence[JudgedGroup],
              reference: Sequence[ReferenceGroup]) -> list[LabelledGroup]:
        begin = time.perf_counter()
        labelled = self._inner.label(groups, judged, reference)
        self._note.roles_s = time.perf_counter() - begin
        return labelled


def spans(metrics: Mapping[str, float], wall: float) -> dict[str, float]:
    """Parts of one step that add up to ``wall``: the stages, the wait for verdicts, roles, weight sync, and the rest."""
    parts = {stage: metrics[f"time/{stage}_s"] for stage in STAGES}
    parts["verdicts"] = metrics["time/verify_s"] - metrics["time/roles_s"]
    parts["roles"] = metrics["time/roles_s"]
    parts["weight sync"] = metrics["time/weight_sync_s"]
    parts["between stages"] = metrics["time/step_s"] - sum(parts.values())
    parts["recording"] = wall - metrics["time/step_s"]
    return parts


def differences(step: int, metrics: Mapping[str, float], answers: Mapping[str, Answer]) -> list[str]:
    """What shows that the bare stages did other work than the step did."""
    found = []
    rollout, gap = answers["rollout"], answers["reference"]["largest_logp_gap"]
    if rollout["groups_equal"] != rollout["groups"]:
        found.append(f"step {step}: bare engine drew {rollout['groups_equal']} of {rollout['groups']} groups alike")
    if not gap <= LOGP_TOLERANCE:
        found.append(f"step {step}: reference log-probs differ by up to {gap:.2g}")
    for name in ("loss", "grad_norm"):
        mine, theirs = answers["learner"][name], metrics[f"learner/{name}"]
        if not abs(mine - theirs) <= LOSS_TOLERANCE * max(1.0, abs(theirs)):
            found.append(f"step {step}: learner {name} {mine:.6g} instead of {theirs:.6g}")
    return found


class OtherPrograms:
    """CPU time since its creation of processes that are not this one's or its descendants'; a hypervisor's share included."""

    def __init__(self) -> None:
        self._ours, self._all = _cpu_seconds(), psutil.cpu_times()

    def share(self) -> float:
        """As a part of all CPU time of the machine, 0 to 1."""
        used, now = _cpu_seconds() - self._ours, psutil.cpu_times()
        elapsed = sum(now[:8]) - sum(self._all[:8])  # guest time, the rest of the tuple, is also counted as user time
        idle = (now.idle + now.iowait) - (self._all.idle + self._all.iowait)
        return max(0.0, (elapsed - idle - used) / elapsed) if elapsed > 0 else 0.0


def _cpu_seconds() -> float:
    me = psutil.Process()
    seconds = 0.0
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        seconds += sum(times[:4])  # user and system, of the process and of its children that have ended (recycled graders)
    return seconds


def measure(options: argparse.Namespace, folder: Path) -> tuple[list[StepTime], list[str]]:
    """Times of all steps, and where the two sides did different work."""
    overrides = ["+exp=tiny", f"steps={options.steps}", "learner.lr=0", "journal.dump_rollouts=true", *options.override]
    with running(overrides, folder, say=_say) as run:
        from akl_dist.bookkeeping.console import Console
        from akl_dist.bookkeeping.journal import Journal
        from akl_dist.config.resolve import kl_roles
        from akl_dist.loop import Progress, train
        from akl_dist.recorder import Alarms, StepRecorder

        with (closing(BareStages(run.made, niceness=niceness_of_actors())) as bare,
              closing(Journal(run.directory, tensorboard=run.config.journal.tensorboard)) as journal):
            bare.start()
            console = Console(options.steps, first_step=1)
            alarms = Alarms(_say, kl_roles=kl_roles(run.config.objective.kl))
            recorder = Interleaver(StepRecorder(journal, console, run.assembly.dump, alarms), run, bare, folder, options.block)
            stages = dataclasses.replace(run.assembly.stages, verify=TimedVerify(run.assembly.stages.verify, recorder))
            train(run.run(recorder, stages=stages), Progress())
    return recorder.times, recorder.problems


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


# --- reporting ---------------------------------------------------------------------------------------------------


def quiet_steps(times: Sequence[StepTime], limit: float) -> list[StepTime]:
    """Those during which other programs used at most ``limit`` of the CPU time; all of them if fewer than five did."""
    quiet = [one for one in times if one.others <= limit]
    return quiet if len(quiet) >= MIN_QUIET else list(times)


def summarise(times: Sequence[StepTime]) -> dict[str, Any]:
    """Medians over the steps. ``ratio``: wall over bare, per step; ``excess_s``: by part, what the step takes beyond bare."""
    ratios = [one.ratio for one in times]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    bare = {stage: statistics.median(one.bare[stage] for one in times) for stage in STAGES}
    parts = {name: statistics.median(one.spans[name] for one in times) for name in times[0].spans}
    excess = {name: statistics.median(one.spans[name] - one.bare.get(name, 0.0) for one in times) for name in times[0].spans}
    return {"ratio": middle, "ratio_quartiles": [low, high], "step_s": statistics.median(one.wall for one in times),
            "bare_s": statistics.median(sum(one.bare.values()) for one in times), "bare_by_stage_s": bare,
            "step_by_part_s": parts, "excess_s": excess}


def table(summary: Mapping[str, Any]) -> str:
    def row(name: str, seconds: float, bare: float | None, beyond: float) -> str:
        return f"{name:<16}{seconds:>10.3f} s{'' if bare is None else f'{bare:.3f} s':>11}{beyond:>11.3f} s"

    bare, excess, (low, high) = summary["bare_by_stage_s"], summary["excess_s"], summary["ratio_quartiles"]
    lines = [f"{'part of a step':<16}{'in the run':>12}{'bare':>11}{'beyond bare':>13}"]
    lines += [row(name, seconds, bare.get(name), excess[name]) for name, seconds in summary["step_by_part_s"].items()]
    lines.append(row("whole step", summary["step_s"], summary["bare_s"], summary["step_s"] - summary["bare_s"])
                 + f"   ratio {summary['ratio']:.3f} (quartiles {low:.3f} to {high:.3f})")
    return "\n".join(lines)


def rounded(value: Any) -> Any:
    """Numbers to four decimals, through lists and dictionaries."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    with tempfile.TemporaryDirectory(prefix="akl_overhead_") as folder, redirect_stdout(sys.stderr):
        times, problems = measure(options, Path(folder))
    times = times[options.block:]
    chosen = quiet_steps(times, options.quiet)
    summary = summarise(chosen)
    quiet = sum(one.others <= options.quiet for one in times)
    print(f"{table(summary)}\nmedians of {len(chosen)} of {len(times)} steps; {quiet} were quiet")
    for problem in problems:
        print(f"not the same work: {problem}", file=sys.stderr)
    print(json.dumps({
        "benchmark": "orchestration_overhead", **rounded(summary), "max_ratio": options.max_ratio, "steps": len(chosen),
        "quiet": quiet == len(chosen), "ratio_all_steps": round(summarise(times)["ratio"], 4),
        "same_work": not problems, "cpus": os.cpu_count(), "overrides": options.override,
        "by_step": rounded([{"wall_s": one.wall, "bare_s": sum(one.bare.values()), "cpu_share_of_others": one.others}
                            for one in times])}))
    if summary["ratio"] > options.max_ratio:
        print(f"ratio {summary['ratio']:.3f} is above {options.max_ratio}", file=sys.stderr)
    return int(bool(problems) or summary["ratio"] > options.max_ratio)


if __name__ == "__main__":
    sys.exit(main())
