"""What many judgements leave behind: processes, zombies, descriptors, control groups and memory. All of it must be nothing.

    python -m benchmarks.verify_leaks [--answers 10000 --programs 1000]

Answers with 1 % hostile ones among them through a pool of two graders, programs with 1 % hostile ones through a pool of one.
Counted are, from /proc: processes below this one and those that run as a sandbox's user, wherever they went; descriptors of this
process; control groups of the supervisors there were; and the resident memory of this process, between the end of the first tenth
and the end. Exits 1 where something is left, or memory has grown by more than --max-growth-mib.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from akl_dist.contract.records import Status
from akl_dist.sandbox.cgroups import PREFIX, ROOT
from akl_dist.sandbox.isolation import FIRST_SPARE_USER
from akl_dist.sandbox.limits import Limits
from akl_dist.verify.code import CodeSettings, pool_options
from akl_dist.verify.grader import GraderPool, Item
from benchmarks import verify_inputs as inputs

LIMIT_S = 2.0
PROGRAM_LIMIT_S = 1.0
BATCH = 16
SETTLE_S = 5.0  # for what is on its way out
MIB = 1 << 20


@dataclass(frozen=True)
class Leftovers:
    """What is there that was not there before; numbers of each, and bytes of memory."""

    processes: int
    zombies: int
    descriptors: int
    control_groups: int
    grown_bytes: int

    @property
    def total(self) -> int:
        return self.processes + self.zombies + self.descriptors + self.control_groups


@dataclass
class Watch:
    """What belongs to this process; ``supervisors`` are the sandboxes' that were seen while judging."""

    before_children: frozenset[int] = field(default_factory=lambda: frozenset(_children()))
    before_descriptors: int = field(default_factory=lambda: _descriptors())
    supervisors: set[int] = field(default_factory=set)
    warm_bytes: int = 0

    def see(self) -> None:
        """Remember the supervisors that run now: their users and control groups carry their process ids."""
        for child in psutil.Process().children(recursive=True):
            try:
                if "akl_dist.sandbox.supervisor" in child.cmdline():
                    self.supervisors.add(child.pid)
            except psutil.Error:  # it has just ended
                continue

    def warm(self) -> None:
        gc.collect()
        self.warm_bytes = psutil.Process().memory_info().rss

    def left(self) -> Leftovers:
        """What is left now; looks again until nothing is, for a few seconds."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            gc.collect()
            grown = psutil.Process().memory_info().rss - self.warm_bytes
            children = {pid: state for pid, state in _children().items() if pid not in self.before_children}
            users = {FIRST_SPARE_USER + pid for pid in self.supervisors}
            strays = {p.pid for p in psutil.process_iter(["uids"]) if p.info["uids"] and p.info["uids"].real in users}
            zombies = sum(state == psutil.STATUS_ZOMBIE for state in children.values())
            found = Leftovers(len(strays | set(children)), zombies, max(0, _descriptors() - self.before_descriptors),
                              len(control_groups(self.supervisors)), grown)
            if found.total == 0 or time.monotonic() > deadline:
                return found
            time.sleep(0.05)


def _children() -> dict[int, str]:
    found = {}
    for child in psutil.Process().children(recursive=True):
        try:
            found[child.pid] = child.status()
        except psutil.NoSuchProcess:
            continue
    return found


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def control_groups(supervisors: Iterable[int], root: Path = ROOT) -> list[Path]:
    """The sandboxes' control groups of supervisors with these process ids, from this pid namespace."""
    endings = {f"-{pid}" for pid in supervisors}
    return [Path(folder) for folder, _, _ in os.walk(root)
            if PREFIX in os.path.basename(folder) and any(folder.endswith(ending) for ending in endings)]


def judge_all(
    options: dict[str, Any], honest: Sequence[Item], hostile: Sequence[Item], *, count: int, share: float
) -> dict[str, Any]:
    """``count`` judgements in batches through one pool, which is closed; what was judged, and what is left."""
    watch = Watch()
    statuses: dict[str, int] = {}
    mixed = list(inputs.mixture(honest, hostile, count, share))
    accepted = unjudged = 0
    start = time.monotonic()
    with GraderPool(**options) as pool:
        for number in range(0, count, BATCH):
            batch = mixed[number : number + BATCH]
            for one, verdict in zip(batch, pool.judge_many([one.item for one in batch]), strict=True):
                statuses[verdict.status.value] = statuses.get(verdict.status.value, 0) + 1
                accepted += one.hostile and verdict.status is Status.OK
                unjudged += not one.hostile and verdict.status in (Status.TIMEOUT, Status.ERROR)
            watch.see()
            if number <= count // 10:
                watch.warm()
        counters = pool.counters()
    left = watch.left()
    return {"judgements": count, "seconds": round(time.monotonic() - start, 1), "statuses": statuses, "hostile_accepted": accepted,
            "honest_unjudged": unjudged,
            "graders_started": counters["started"], "kills": counters["kills"], "recycled": counters["recycled"],
            "supervisors_seen": len(watch.supervisors), "processes": left.processes, "zombies": left.zombies,
            "descriptors": left.descriptors, "control_groups": left.control_groups, "grown_mib": round(left.grown_bytes / MIB, 2)}


def answers(count: int, *, workers: int = 2, folder: Path | None = None) -> dict[str, Any]:
    """Answers with 1 % hostile ones; graders are recycled often, so that their ends are part of it."""
    options = {"num_workers": workers, "timeout_s": LIMIT_S, "tasks_per_worker": max(150, count // 10)}
    honest, hostile = inputs.items(inputs.answers(folder)), inputs.items(inputs.hostile_answers())
    return judge_all(options, honest, hostile, count=count, share=0.01)


def program_options(count: int) -> dict[str, Any]:
    """Arguments of a pool that judges ``count`` programs and recycles its grader now and then."""
    settings = CodeSettings(limits=Limits(wall_s=PROGRAM_LIMIT_S, cpu_s=2), total_s=PROGRAM_LIMIT_S)
    return {"num_workers": 1, "tasks_per_worker": max(10, count // 4), **pool_options(settings)}


def programs(count: int, *, folder: Path | None = None) -> dict[str, Any]:
    """Programs with 1 % hostile ones."""
    return judge_all(program_options(count), inputs.programs(folder), inputs.hostile_programs(), count=count, share=0.01)


def leftovers(result: dict[str, Any]) -> int:
    return sum(result[name] for name in ("processes", "zombies", "descriptors", "control_groups"))


def line(kind: str, one: dict[str, Any]) -> str:
    return (f"{one['judgements']} {kind} in {one['seconds']:g} s ({one['statuses']}; {one['graders_started']} graders, "
            f"{one['kills']} killed, {one['recycled']} recycled): left {one['processes']} processes, {one['zombies']} zombies, "
            f"{one['descriptors']} descriptors, {one['control_groups']} control groups; memory {one['grown_mib']:+.2f} MiB")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--data", type=Path, default=inputs.published_folder(), help="folder of published files: AKL_SHARED/data")
    parser.add_argument("--max-growth-mib", type=float, default=8.0)
    options = parser.parse_args(argv)
    found = {}
    if options.answers:
        found["answers"] = answers(options.answers, folder=options.data)
        print(line("answers", found["answers"]), flush=True)
    if options.programs:
        found["programs"] = programs(options.programs, folder=options.data)
        print(line("programs", found["programs"]), flush=True)
    left = sum(map(leftovers, found.values()))
    grown = max(one["grown_mib"] for one in found.values())
    accepted = sum(one["hostile_accepted"] for one in found.values())
    result = {"benchmark": "verify_leaks", "ratio": left, "max_ratio": 0, "max_growth_mib": options.max_growth_mib}
    print(json.dumps(result | found))
    if left or accepted or grown > options.max_growth_mib:
        print(f"{left} left behind, memory grown by {grown:g} MiB, {accepted} hostile inputs accepted", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
