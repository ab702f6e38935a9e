"""All benchmarks, one after another: each one's table, then measured values against targets, then one JSON line each.

    python -m benchmarks [NAME ...]

Exits 1 if one of them missed its target or gave no result. Run it on a machine with nothing else to do.
"""

from __future__ import annotations

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
    try:
        out, errors = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            out, errors = process.communicate(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            out, errors = process.communicate()
        errors += f"\nended after {DEADLINE_S} s"
    result, text = split(out)
    if result is None or process.returncode != 0:
        text = "\n".join([text, *errors.splitlines()[-LAST_LINES:]]).strip()
    return Outcome(name, result, text, process.returncode)


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
        ratio, target = ("-", "-") if one.result is None else (f"{one.result['ratio']:.3f}", f"<= {one.result['max_ratio']:g}")
        word = "met" if one.met else "no result" if one.result is None else "missed"
        busy = " (other programs were running: measure again)" if one.result and one.result.get("quiet") is False else ""
        lines.append(f"{one.name:<24}{ratio:>8}{target:>9}  {word:<9} {BENCHMARKS[one.name]}{busy}")
    return "\n".join(lines)


def main(names: Sequence[str]) -> int:
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
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
