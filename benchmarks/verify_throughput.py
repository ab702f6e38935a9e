"""The verifier's speed: answers against bare math-verify, and what hostile inputs among honest ones cost the honest ones.

    python -m benchmarks.verify_throughput [--answers 1500 --programs 300 --data FOLDER]

*Answers*: the same responses in the same order through a pool of one grader process (isolation, extraction, time limits and
all) and through ``math_verify.parse`` and ``verify`` in a process of their own with their default time limits, block after block in
turn. The ratio is time over time, the median over the blocks; at most one core works at a time, so that rates are per core.

*Hostile inputs*: one at a time through a pool of one grader, 5 % of them hostile (answers: towers of exponents, factorials,
nesting, megabytes; programs: endless loops, fork bombs, floods of output) and none of them; latencies are of the honest ones alone,
from the call to its verdict. Exits 1 above --max-ratio, or where hostile inputs make the honest ones' 99th percentile more
than --max-slowdown times what it is without them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from akl_dist.contract.records import Status, Verdict
from akl_dist.sandbox.limits import Limits
from akl_dist.verify.code import CodeSettings, pool_options
from akl_dist.verify.grader import GraderPool, Item
from benchmarks import verify_inputs as inputs

LIMIT_S = 2.0  # of one answer
PROGRAM_LIMIT_S = 1.0
DEADLINE_S = 120.0


class Judges(Protocol):
    def judge_many(self, items: Sequence[Item]) -> Sequence[Verdict]: ...


class BareMathVerify:
    """math-verify alone in a process of its own, since its time limits are signals of the main thread."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-m", "benchmarks.verify_throughput", "--bare"], text=True,
                                         cwd=Path(__file__).resolve().parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def judge(self, items: Sequence[Item]) -> tuple[float, list[bool]]:
        """Seconds that parsing and comparing took, and the answers."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([(item.gold, item.response_text) for item in items]) + "\n")
        self._process.stdin.flush()
        reply = json.loads(self._process.stdout.readline())
        return reply["seconds"], reply["equal"]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=10)


def serve_bare() -> None:
    """Each line of standard input is a block of pairs; each line of the output the time it took and what was equal."""
    import logging

    from math_verify import parse, verify

    logging.disable(logging.WARNING)
    verify(parse("$2\\sqrt{2}$"), parse("$\\sqrt{8}$"))  # what is imported and built on first use
    for line in sys.stdin:
        pairs = json.loads(line)
        start = time.perf_counter()
        equal = [bool(verify(parse(f"${gold}$"), parse(response))) for gold, response in pairs]
        print(json.dumps({"seconds": time.perf_counter() - start, "equal": equal}), flush=True)


@dataclass(frozen=True)
class Block:
    """The same answers through both."""

    count: int
    ours_s: float
    bare_s: float


def compare(pairs: Sequence[tuple[str, str]], size: int) -> tuple[list[Block], int]:
    """Blocks of ``size``, whoever is first taking turns; and in how many answers the two differ."""
    made = inputs.items(pairs)
    blocks, differ = [], 0
    bare = BareMathVerify()
    try:
        with GraderPool(num_workers=1, timeout_s=LIMIT_S) as pool:
            for number, start in enumerate(range(0, len(made) - size + 1, size)):
                part = made[start : start + size]
                if number % 2:
                    bare_s, equal = bare.judge(part)
                began = time.perf_counter()
                verdicts = pool.judge_many(part)
                ours_s = time.perf_counter() - began
                if number % 2 == 0:
                    bare_s, equal = bare.judge(part)
                blocks.append(Block(len(part), ours_s, bare_s))
                differ += sum((one.status is Status.OK) is not other for one, other in zip(verdicts, equal, strict=True))
    finally:
        bare.close()
    return blocks, differ


def summarise(blocks: Sequence[Block]) -> dict[str, Any]:
    """Median and quartiles of the blocks' ratios; rates over all of them."""
    ratios = [block.ours_s / block.bare_s for block in blocks]
    count = sum(block.count for block in blocks)
    return {
        "answers": count, "ratio": round(float(np.median(ratios)), 4),
        "ratio_quartiles": [round(float(q), 4) for q in np.quantile(ratios, (0.25, 0.75))],
        "answers_per_s": round(count / sum(block.ours_s for block in blocks), 1),
        "math_verify_per_s": round(count / sum(block.bare_s for block in blocks), 1),
    }


@dataclass(frozen=True)
class Timed:
    """One judgement."""

    seconds: float
    hostile: bool
    status: Status
    reason: str = ""


def timed(pool: Judges, mixed: Sequence[inputs.Mixed]) -> list[Timed]:
    made = []
    for one in mixed:
        start = time.perf_counter()
        (verdict,) = pool.judge_many([one.item])
        made.append(Timed(time.perf_counter() - start, one.hostile, verdict.status, verdict.reason))
    return made


def latency(judgements: Sequence[Timed], limit_s: float) -> dict[str, Any]:
    """Percentiles of the honest ones in milliseconds, honest ones a second of their own time, and what the hostile ones cost."""
    honest = [one.seconds for one in judgements if not one.hostile]
    hostile = [one for one in judgements if one.hostile]
    p50, p99 = np.quantile(honest, (0.5, 0.99)) * 1000
    return {
        "honest": len(honest), "p50_ms": round(float(p50), 2), "p99_ms": round(float(p99), 2),
        "per_s": round(len(honest) / sum(honest), 1), "hostile": len(hostile),
        "hostile_at_limit": sum(one.status is Status.TIMEOUT or one.reason == "time_limit" for one in hostile),
        "hostile_longest_s": round(max((one.seconds for one in hostile), default=0.0), 2),
        "hostile_accepted": sum(one.status is Status.OK for one in hostile),
        "honest_without_verdict": sum(not one.hostile and not one.status.trains for one in judgements), "limit_s": limit_s,
    }


def under_attack(
    options: dict[str, Any], honest: Sequence[Item], hostile: Sequence[Item], *, count: int, limit_s: float
) -> dict[str, Any]:
    """The same honest inputs with and without hostile ones among them, after a first round that warms the grader up."""
    with GraderPool(num_workers=1, **options) as pool:
        timed(pool, list(inputs.mixture(honest, hostile, count // 2, 0.0)))
        found = {name: latency(timed(pool, list(inputs.mixture(honest, hostile, count, share))), limit_s)
                 for name, share in (("alone", 0.0), ("mixed", 0.05))}
        counters = pool.counters()
    slowdown = found["mixed"]["p99_ms"] / found["alone"]["p99_ms"]
    return {**found, "p99_slowdown": round(slowdown, 3), "kills": counters["kills"]}


def table(answers: dict[str, Any], mixes: dict[str, dict[str, Any]]) -> str:
    low, high = answers["ratio_quartiles"]
    lines = [f"{answers['answers']} answers: ours {answers['answers_per_s']:g}/s, bare math-verify "
             f"{answers['math_verify_per_s']:g}/s, time ratio {answers['ratio']:.3f} (quartiles {low:.3f} to {high:.3f}), "
             f"{answers['differ']} judged otherwise",
             f"{'':<22}{'p50 ms':>9}{'p99 ms':>9}{'per s':>8}{'hostile':>9}{'at limit':>10}{'longest s':>11}"]
    for kind, mix in mixes.items():
        for name in ("alone", "mixed"):
            one = mix[name]
            lines.append(f"{kind + ', ' + name:<22}{one['p50_ms']:>9.2f}{one['p99_ms']:>9.2f}{one['per_s']:>8.1f}"
                         f"{one['hostile']:>9}{one['hostile_at_limit']:>10}{one['hostile_longest_s']:>11.2f}")
    return "\n".join(lines)


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=1500, help="for the comparison, and for each latency")
    parser.add_argument("--programs", type=int, default=300, help="for each latency; 0 leaves programs out")
    parser.add_argument("--block", type=int, default=50)
    parser.add_argument("--data", type=Path, default=inputs.published_folder(), help="folder of published files: AKL_SHARED/data")
    parser.add_argument("--max-ratio", type=float, default=1.0)
    parser.add_argument("--max-slowdown", type=float, default=2.0)
    parser.add_argument("--bare", action="store_true", help="be math-verify (used by the benchmark itself)")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options = arguments(argv)
    if options.bare:
        serve_bare()
        return 0
    pairs = inputs.answers(options.data)
    pairs = (pairs * (options.answers // len(pairs) + 1))[: options.answers]
    blocks, differ = compare(pairs, options.block)
    answers = {**summarise(blocks), "differ": differ}
    hostile = inputs.items(inputs.hostile_answers())
    mixes = {"answers": under_attack({"timeout_s": LIMIT_S}, inputs.items(pairs), hostile, count=options.answers, limit_s=LIMIT_S)}
    if options.programs:
        settings = CodeSettings(limits=Limits(wall_s=PROGRAM_LIMIT_S, cpu_s=2), total_s=PROGRAM_LIMIT_S)
        mixes["programs"] = under_attack(pool_options(settings), inputs.programs(options.data), inputs.hostile_programs(),
                                         count=options.programs, limit_s=PROGRAM_LIMIT_S)
    print(table(answers, mixes))
    slow = [kind for kind, mix in mixes.items() if mix["p99_slowdown"] > options.max_slowdown]
    accepted = [kind for kind, mix in mixes.items() if mix["mixed"]["hostile_accepted"]]
    print(json.dumps({"benchmark": "verify_throughput", **answers, "max_ratio": options.max_ratio, "latency": mixes,
                      "max_slowdown": options.max_slowdown}))
    if accepted or slow or answers["ratio"] > options.max_ratio:
        print(f"ratio {answers['ratio']:.3f} (at most {options.max_ratio:g}); slowed down by hostile inputs: {slow}; hostile ones "
              f"accepted: {accepted}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
