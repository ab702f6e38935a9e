"""Every benchmark still runs: its help, and where that is cheap a whole run on toy sizes, whose figures mean nothing."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import __main__ as everything

ROOT = Path(everything.__file__).parents[1]
TOY = {
    "roles": ["--prompts", "2", "--group-size", "2", "--repeats", "1"],
    "logprob_memory": ["--vocabulary", "4096", "--tokens", "4096", "--hidden", "64"],
    "verify_throughput": ["--answers", "20", "--programs", "0", "--block", "10"],
    "verify_leaks": ["--answers", "32", "--programs", "0"],
}


def test_all_benchmarks_are_listed():
    programs = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if '"benchmark": "' in path.read_text()}
    assert programs == set(everything.BENCHMARKS)
    text = (ROOT / "benchmarks" / "README.md").read_text()
    assert [name for name in everything.BENCHMARKS if name not in text] == []


@pytest.mark.parametrize("name", ["__main__", *everything.BENCHMARKS])
def test_help(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.delitem(sys.modules, f"benchmarks.{name}", raising=False)
    with pytest.raises(SystemExit) as end:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    said = capsys.readouterr().out
    assert end.value.code == 0 and said.startswith("usage:") and "python -m benchmarks" in said
    assert name != "__main__" or all(one in said for one in everything.BENCHMARKS)


def test_an_unknown_benchmark_is_named(capsys):
    with pytest.raises(SystemExit) as end:
        everything.main(["roles", "rules"])
    assert end.value.code == 2 and "no benchmark rules; there are roles" in capsys.readouterr().err


@pytest.mark.parametrize("name", TOY)
def test_a_toy_run(name):
    done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *TOY[name]], cwd=ROOT, capture_output=True, text=True,
                          timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    result, text = everything.split(done.stdout)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr[-3000:]
    assert result is not None and result["benchmark"] == name and text, "a table, then one JSON line"
    assert "met" in everything.summary([everything.Outcome(name, {**result, "ratio": 0.0}, text, 0)])


def test_every_way_of_the_fused_head_computes_the_same():
    import torch

    from benchmarks import fused_head as fused

    torch.manual_seed(0)
    weight, states, targets = torch.randn(64, 8).requires_grad_(True), torch.randn(32, 8).requires_grad_(True), torch.arange(32)
    for estimator in fused.ESTIMATORS:
        reference = fused.reference_of(estimator, (states.detach() + 0.1, weight.detach()), targets)
        losses = [fused.compute(way, states, weight, targets, estimator, reference, 10) for way in fused.WAYS]
        assert [loss.item() for loss in losses] == pytest.approx([losses[0].item()] * len(losses), rel=1e-5)
        for loss in losses:
            loss.backward()


def test_one_that_does_not_end_is_ended_with_what_it_started(tmp_path, monkeypatch):
    """It ignores the request to end, and its child keeps the output open for longer than anybody waits."""
    stubborn = tmp_path / "python"
    stubborn.write_text("#!/bin/sh\ntrap '' INT\nsleep 12 &\nwait\nwait\n")
    stubborn.chmod(0o755)
    monkeypatch.setattr(everything.sys, "executable", str(stubborn))
    monkeypatch.setattr(everything, "DEADLINE_S", 0.3)
    monkeypatch.setattr(everything, "GRACE_S", 0.3)
    begin = time.monotonic()
    outcome = everything.run("roles")
    assert time.monotonic() - begin < 8 and not outcome.met and outcome.exit_code != 0
    assert outcome.result is None and "keeps its output open" in outcome.text


def test_what_a_benchmark_said_last_is_shown(tmp_path, monkeypatch):
    speaking = tmp_path / "python"
    speaking.write_text("#!/bin/sh\necho table\necho '{\"ratio\": 2.0, \"max_ratio\": 1.0}'\necho why >&2\nexit 1\n")
    speaking.chmod(0o755)
    monkeypatch.setattr(everything.sys, "executable", str(speaking))
    monkeypatch.delenv("LD_PRELOAD", raising=False)  # an engine in this process sets it; the loader speaks of what it lacks
    outcome = everything.run("roles")
    assert (outcome.result, outcome.text, outcome.exit_code) == ({"ratio": 2.0, "max_ratio": 1.0}, "table\nwhy", 1)
