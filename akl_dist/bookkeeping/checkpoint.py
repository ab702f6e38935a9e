"""Checkpoints that are whole or absent, verified, and self-describing.

Layout: ``checkpoints/step_000012/`` with the learner's own files and ``manifest.json``. A save goes
:func:`begin` -> the stages write into the temporary folder -> :func:`commit`, inside :func:`saving`, which removes what a failed
save leaves. A checkpoint is complete only when its manifest exists; the folder takes its name last, so a run killed in between
leaves a ``.tmp_`` folder that nobody reads.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from akl_dist.bookkeeping.atomic import fsync, strict_json, write_text
from akl_dist.contract.errors import CheckpointError, ResumeMismatch

MANIFEST = "manifest.json"
FORMAT = 1
_FOLDER = re.compile(r"step_(\d+)")
_STEP_WIDTH = 6


@dataclass(frozen=True)
class CheckpointState:
    """What a manifest says beside the files.

    ``counters`` are absolute (policy_version, optimizer_steps) beside the adaptive kl_coefficient of the next step;
    ``prompt_source`` is ``PromptSource.state()``; ``evaluation`` holds initial, best and last;
    ``best_step`` is the step the best value belongs to, None before one.
    """

    num_ranks: int
    config_hash: str
    counters: Mapping[str, float]
    prompt_source: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    best_step: int | None = None


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    step: int
    state: CheckpointState


@dataclass(frozen=True)
class Found:
    """Outcome of :func:`find`: resumed from a checkpoint, or nothing to resume from (``reason`` says why)."""

    outcome: Literal["resumed", "nothing"]
    checkpoint: Checkpoint | None
    reason: str


def folder_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:0{_STEP_WIDTH}d}"


def begin(run_dir: Path, step: int) -> Path:
    """An empty temporary folder for the stages to write into; leftovers of a killed save are removed."""
    temporary = run_dir / "checkpoints" / f".tmp_step_{step:0{_STEP_WIDTH}d}"
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    return temporary


@contextmanager
def saving(run_dir: Path, step: int) -> Iterator[Path]:
    """:func:`begin`'s folder for the body to fill and commit. When the body fails nothing of it stays.

    Raises CheckpointError for an OSError of the body (a full disk, say); other errors pass unchanged.
    """
    temporary: Path | None = None
    try:
        temporary = begin(run_dir, step)
        yield temporary
    except BaseException as error:  # whatever stopped it, a half-written folder only takes space
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise _error(f"saving the checkpoint of step {step} in {run_dir}", f"{type(error).__name__}: {error}", "a whole save",
                         "Free space or mend the disk; the same run_id goes on from the checkpoint before it.") from error
        raise


def newest_size(run_dir: Path) -> int | None:
    """Bytes of the newest complete checkpoint, None without one: what the next one is going to take."""
    complete = _complete(run_dir)
    if not complete:
        return None
    return sum(p.stat().st_size for p in complete[max(complete)].rglob("*") if p.is_file())


def check_free_space(run_dir: Path, needed_bytes: int) -> None:
    """Raises CheckpointError when the disk cannot take a checkpoint of this size (the old one is still kept then)."""
    run_dir.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(run_dir).free
    if free < needed_bytes:
        raise _error(f"free space for a checkpoint in {run_dir}", f"{free / 2**20:.0f} MiB",
                     f"at least {needed_bytes / 2**20:.0f} MiB",
                     "Free space, lower checkpoint.keep, or set output_dir to a larger disk.")


def commit(temporary: Path, step: int, state: CheckpointState) -> Checkpoint:
    """Hash and flush every file, write the manifest, rename. Returns the checkpoint, read back and verified."""
    files = _files(temporary)
    if not files:
        raise _error(str(temporary), "no files", "the learner's part of the checkpoint", "Save the stages first.")
    with ThreadPoolExecutor(max_workers=4) as pool:
        entries = dict(zip(files, pool.map(lambda name: _entry(temporary / name, flush=True), files), strict=True))
    for folder in [temporary, *(p for p in temporary.rglob("*") if p.is_dir())]:
        fsync(folder)
    manifest = {"format": FORMAT, "step": step, "state": asdict(state), "files": entries}
    write_text(temporary / MANIFEST, strict_json(manifest, indent=1) + "\n")
    final = folder_of(temporary.parent.parent, step)
    if final.exists():  # saved before the run was cut back to an earlier step
        _remove(final)
    os.rename(temporary, final)
    fsync(final.parent)
    return verify(final)


def _files(folder: Path) -> list[str]:
    names = (p for p in folder.rglob("*") if p.is_file() or p.is_symlink())
    return sorted(p.relative_to(folder).as_posix() for p in names if p != folder / MANIFEST)


def _entry(path: Path, *, flush: bool) -> dict[str, Any]:
    if flush:
        fsync(path)
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def verify(folder: Path) -> Checkpoint:
    """Read a checkpoint's manifest and compare every file's size and hash with it.

    Raises CheckpointError saying what is missing, damaged or too many. Nothing of the checkpoint is loaded before that.
    """
    remedy = "Resume from another checkpoint (resume=PATH), or start anew with resume=never."
    path = folder / MANIFEST
    if not path.is_file():
        raise _error(str(folder), f"no {MANIFEST}", "a complete checkpoint", remedy)
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version, step, entries = manifest["format"], manifest["step"], manifest["files"]
        state = CheckpointState(**manifest["state"])
        sizes = {name: (entry["size"], entry["sha256"]) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"a damaged manifest ({type(error).__name__}: {error})"
        raise _error(str(path), what, "a manifest as commit writes it", remedy) from error
    if version != FORMAT or not isinstance(step, int):
        raise _error(str(path), f"format {version}, step {step!r}", f"format {FORMAT}", remedy)
    present = set(_files(folder))
    wrong = [f"{name} missing" for name in sorted(set(sizes) - present)]
    wrong += [f"{name} not in the manifest" for name in sorted(present - set(sizes))]
    with ThreadPoolExecutor(max_workers=4) as pool:
        listed = sorted(present & set(sizes))
        for name, entry in zip(listed, pool.map(lambda n: _entry(folder / n, flush=False), listed), strict=True):
            if entry["size"] != sizes[name][0]:
                wrong.append(f"{name} has {entry['size']} bytes instead of {sizes[name][0]}")
            elif entry["sha256"] != sizes[name][1]:
                wrong.append(f"{name} has another content")
    if wrong:
        raise _error(str(folder), "; ".join(wrong), "the files of the manifest, unchanged", remedy)
    return Checkpoint(folder, step, state)


def find(run_dir: Path, resume: str, *, num_ranks: int) -> Found:
    """What ``resume=`` leads to, one of three outcomes.

    * resumed: a verified checkpoint of the same topology (``auto``: the newest of ``run_dir``, by the step stored
      inside; otherwise the folder named);
    * nothing: ``never``, or ``auto`` without any checkpoint (temporary folders of a killed save do not count);
    * CheckpointError: found but unusable, a ``step_*`` folder without manifest included. It is never skipped
      silently in favour of an older one.
    """
    if resume == "never":
        return Found("nothing", None, "resume=never")
    if resume == "auto":
        folders = _step_folders(run_dir)
        if not folders:
            return Found("nothing", None, f"no checkpoint in {run_dir}")
        folder = max(folders, key=_stored_step)
    else:
        folder = Path(resume)
        if not folder.is_dir():
            raise _error("resume", f"{resume}, which is no folder", "auto, never or the path of a checkpoint",
                         "Name a folder such as .../checkpoints/step_000012.", ResumeMismatch)
    checkpoint = verify(folder)
    if checkpoint.state.num_ranks != num_ranks:
        raise _error(f"{folder}: number of learner ranks", str(num_ranks),
                     f"{checkpoint.state.num_ranks}, with which it was saved",
                     f"Set learner.num_ranks={checkpoint.state.num_ranks}.", ResumeMismatch)
    return Found("resumed", checkpoint, f"resumed from {folder}")


def _step_folders(run_dir: Path) -> list[Path]:
    root = run_dir / "checkpoints"
    return [p for p in root.iterdir() if p.is_dir() and _FOLDER.fullmatch(p.name)] if root.is_dir() else []


def _complete(run_dir: Path) -> dict[int, Path]:
    """Step -> folder of the checkpoints that have a manifest."""
    return {_stored_step(f): f for f in _step_folders(run_dir) if (f / MANIFEST).is_file()}


def _stored_step(folder: Path) -> int:
    """The step inside the manifest; the folder's number where the manifest is damaged, so that the damage is reported
    instead of an older checkpoint being taken."""
    try:
        return int(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return int(folder.name.removeprefix("step_"))


def prune(steps: Iterable[int], keep: int, protected: Collection[int]) -> list[int]:
    """Which steps to remove so that the newest ``keep`` and all protected ones stay (pure). The newest always stays."""
    if keep < 1:
        raise ValueError(f"checkpoint.keep: got {keep}; expected at least 1")
    ordered = sorted(set(steps))
    return [step for step in ordered[: max(0, len(ordered) - keep)] if step not in protected]


def remove_old(run_dir: Path, newest: Checkpoint, keep: int, protected: Collection[int]) -> list[int]:
    """Delete what :func:`prune` names; returns the steps removed.

    ``newest`` must come from :func:`commit` or :func:`verify`, which is the proof that it can be resumed from.
    Protected are the targets of pointers: ``newest``'s own best_step is added.
    """
    best = newest.state.best_step
    stay = {*protected, newest.step, *(() if best is None else (best,))}
    complete = _complete(run_dir)
    removed = prune((step for step in complete if step <= newest.step), keep, stay)
    for step in removed:
        _remove(complete[step])
    return removed


def _remove(folder: Path) -> None:
    """Rename first: a run killed while deleting must not leave a half-empty folder under a checkpoint's name."""
    doomed = folder.with_name(f".old_{folder.name}")
    if doomed.exists():
        shutil.rmtree(doomed)
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


def _error(subject: str, got: str, expected: str, remedy: str, kind: type[CheckpointError] = CheckpointError) -> CheckpointError:
    return kind(subject, got=got, expected=expected, remedy=remedy, stage="checkpoint")
