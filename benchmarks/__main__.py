"""All benchmarks, one after another: each one's table, then measured values against targets, then one JSON line each.

    python -m benchmarks [NAME ...]

Exits 1 if one of them missed its target or gave no result. Run it on a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCHMARKS = {
    "roles": "CPU time of token roles over the model's passes on the same batch",
    "logprob_memory": "peak memory of the chunked head over whole logits",
    "fused_head": "time of the fused head (log-probs, entropy, KL) over whole logits",
    "driver_bytes": "driver bytes of a step, responses 10 times as long over short",
    "orchestration_overhead": "wall time of a tiny step over its bare stages",
    "verify_throughput": "time of the verifier over bare math-verify; latencies among hostile inputs",
    "verify_leaks": "what 10,000 answers and 1,000 programs leave behind (a count)",
}
DEADLINE_S = 1200
GRACE_S = 60
LAST_LINES = 15


@dataclass(frozen=True)
class Outcome:
    """One benchmark's end. ``result`` is None where it printed no JSON line."""

    name: str
    result: dict[str, Any] | None
    text: str
    exit_code: int

    @property
    def met(self) -> bool:
        return self.result is not None and self.exit_code == 0


def run(name: str) -> Outcome:
    """Run one benchmark in a process of its own, within a limit; it is asked to clean up before it is ended."""
    process = subprocess.Popen([sys.executable, "-m", f"benchmarks.{name}"], cwd=Path(__file__).resolve().parents[1],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "PYTHONWARNINGS": "ignore::FutureWarning"})
    out, errors = "", f"{name}: what it started keeps its output open"
    for end, limit_s in ((None, DEADLINE_S), (signal.SIGINT, GRACE_S), (signal.SIGKILL, GRACE_S)):
        if end is not None:
            process.send_signal(end)
        try:
            out, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            continue
        errors += f"\nended after {DEADLINE_S:g} s" if end is not None else ""
        break
    result, text = split(out)
    exit_code = -signal.SIGKILL if process.returncode is None else process.returncode
    if result is None or exit_code != 0:
        text = "\n".join([text, *errors.splitlines()[-LAST_LINES:]]).strip()
    return Outcome(name, result, text, exit_code)


def split(output: str) -> tuple[dict[str, Any] | None, str]:
    """The result on the last line and the text before it; None where the last line is no JSON object."""
    lines = output.strip().splitlines()
    try:
        result = json.loads(lines[-1]) if lines else None
    except ValueError:
        result = None
    return (result, "\n".join(lines[:-1])) if isinstance(result, dict) else (None, "\n".join(lines))


def summary(outcomes: Sequence[Outcome]) -> str:
    """Measured ratios against their targets."""
    lines = [f"{'benchmark':<24}{'ratio':>8}{'target':>9}  {'':<8}what"]
    for one in outcomes:
        measured = None if one.result is None else one.result["ratio"]  # None, too, where a machine cannot hold what it takes
        ratio = "-" if measured is None else f"{measured:.3f}"
        target = "-" if one.result is None else f"<= {one.result['max_ratio']:g}"
        word = "met" if one.met else "no result" if measured is None else "missed"
        busy = " (other programs were running: measure again)" if one.result and one.result.get("quiet") is False else ""
        lines.append(f"{one.name:<24}{ratio:>8}{target:>9}  {word:<9} {BENCHMARKS[one.name]}{busy}")
    return "\n".join(lines)


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    listed = "\n".join(f"  {name:<24}{what}" for name, what in BENCHMARKS.items())
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, epilog=f"benchmarks:\n{listed}",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; all where none is named")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.names if name not in BENCHMARKS]:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    return options


def main(argv: Sequence[str]) -> int:
    names = arguments(argv).names
    outcomes = []
    for name in names or BENCHMARKS:
        print(f"--- {name}: {BENCHMARKS[name]}", flush=True)
        outcomes.append(run(name))
        print(outcomes[-1].text, flush=True)
    print(f"\n{summary(outcomes)}\n")
    for one in outcomes:
        print(json.dumps(one.result or {"benchmark": one.name, "ratio": None, "exit_code": one.exit_code}))
    return int(not all(one.met for one in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
