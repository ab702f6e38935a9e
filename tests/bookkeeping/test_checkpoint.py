from __future__ import annotations

import errno
import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akl_dist.bookkeeping import checkpoint as cp
from akl_dist.contract.errors import CheckpointError, ResumeMismatch


def state(num_ranks: int = 2, best_step: int | None = None) -> cp.CheckpointState:
    return cp.CheckpointState(
        num_ranks=num_ranks, config_hash="abc", counters={"policy_version": 4, "optimizer_steps": 8},
        prompt_source={"seed": 0, "epoch": 1, "position": 3}, evaluation={"best": {"accuracy": 0.5}}, best_step=best_step,
    )


def save(run_dir: Path, step: int, *, content: str = "weights", **changes) -> cp.Checkpoint:
    temporary = cp.begin(run_dir, step)
    (temporary / "learner").mkdir()
    (temporary / "learner" / "rank_0.bin").write_text(content)
    (temporary / "learner" / "rank_1.bin").write_text("optimizer")
    return cp.commit(temporary, step, state(**changes))


def names(run_dir: Path) -> list[str]:
    return sorted(p.name for p in (run_dir / "checkpoints").iterdir())


def test_round_trip(tmp_path):
    saved = save(tmp_path, 12, best_step=8)
    assert saved.folder == tmp_path / "checkpoints" / "step_000012" == cp.folder_of(tmp_path, 12)
    found = cp.find(tmp_path, "auto", num_ranks=2)
    assert (found.outcome, found.checkpoint) == ("resumed", saved)
    assert saved.state == state(best_step=8)
    manifest = json.loads((saved.folder / "manifest.json").read_text())
    # sha256 of the seven bytes "weights"
    assert manifest["files"]["learner/rank_0.bin"] == {
        "size": 7, "sha256": "9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c",
    }
    assert names(tmp_path) == ["step_000012"]


# --- the three outcomes ------------------------------------------------------------------------------------------


def test_nothing_found(tmp_path):
    assert cp.find(tmp_path, "auto", num_ranks=2).outcome == "nothing"
    save(tmp_path, 1)
    assert cp.find(tmp_path, "never", num_ranks=2) == cp.Found("nothing", None, "resume=never")


def test_newest_by_the_step_inside(tmp_path):
    for step in (9, 1_000_000, 10):
        save(tmp_path, step)
    found = cp.find(tmp_path, "auto", num_ranks=2)  # by name, step_1000000 would sort before step_000009
    assert found.checkpoint is not None and found.checkpoint.step == 1_000_000


def test_resume_from_a_path(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    found = cp.find(tmp_path / "elsewhere", str(cp.folder_of(tmp_path, 1)), num_ranks=2)
    assert found.checkpoint is not None and found.checkpoint.step == 1
    with pytest.raises(ResumeMismatch, match=r"resume: got .*no folder; expected auto, never or the path"):
        cp.find(tmp_path, str(tmp_path / "absent"), num_ranks=2)


@pytest.mark.parametrize("moment", ["before commit", "manifest written"])
def test_killed_in_between(tmp_path, moment: str):
    """A save that was killed leaves its temporary folder; the checkpoint before it is found, the next save succeeds."""
    save(tmp_path, 1)
    temporary = cp.begin(tmp_path, 2)
    (temporary / "rank_0.bin").write_text("half")
    if moment == "manifest written":
        shutil.copy(cp.folder_of(tmp_path, 1) / "manifest.json", temporary / "manifest.json")
    found = cp.find(tmp_path, "auto", num_ranks=2)
    assert found.checkpoint is not None and found.checkpoint.step == 1
    again = save(tmp_path, 2)
    assert sorted(p.name for p in again.folder.rglob("*") if p.is_file()) == ["manifest.json", "rank_0.bin", "rank_1.bin"]
    assert names(tmp_path) == ["step_000001", "step_000002"]


def test_only_a_killed_first_save(tmp_path):
    (cp.begin(tmp_path, 1) / "rank_0.bin").write_text("half")
    assert cp.find(tmp_path, "auto", num_ranks=2).outcome == "nothing"


def break_content(folder: Path):
    (folder / "learner" / "rank_0.bin").write_text("weightz")


def break_size(folder: Path):
    (folder / "learner" / "rank_0.bin").write_text("weight")


def break_missing(folder: Path):
    (folder / "learner" / "rank_1.bin").unlink()


def break_extra(folder: Path):
    (folder / "learner" / "rank_2.bin").write_text("foreign")


def break_manifest(folder: Path):
    (folder / "manifest.json").write_text((folder / "manifest.json").read_text()[:-40])


def break_format(folder: Path):
    (folder / "manifest.json").write_text((folder / "manifest.json").read_text().replace('"format": 1', '"format": 2'))


def break_state(folder: Path):
    (folder / "manifest.json").write_text((folder / "manifest.json").read_text().replace("prompt_source", "prompts"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_content, r"learner/rank_0\.bin has another content"),
        (break_size, r"learner/rank_0\.bin has 6 bytes instead of 7"),
        (break_missing, r"learner/rank_1\.bin missing"),
        (break_extra, r"learner/rank_2\.bin not in the manifest"),
        (break_manifest, "a damaged manifest"),
        (break_format, "format 2"),
        (break_state, "a damaged manifest"),
    ],
)
def test_found_but_unusable(tmp_path, damage, message: str):
    """The newest is damaged: an error, not a silent fall back to the older one."""
    save(tmp_path, 1)
    damage(save(tmp_path, 2).folder)
    with pytest.raises(CheckpointError, match=rf"{message}.*resume=PATH"):
        cp.find(tmp_path, "auto", num_ranks=2)


def test_folder_without_manifest(tmp_path):
    shutil.move(cp.begin(tmp_path, 3), cp.folder_of(tmp_path, 3))
    with pytest.raises(CheckpointError, match=r"step_000003: got no manifest\.json.*resume=PATH"):
        cp.find(tmp_path, "auto", num_ranks=2)
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        cp.find(tmp_path, str(cp.folder_of(tmp_path, 3)), num_ranks=2)


def test_newest_folder_without_manifest_is_not_skipped(tmp_path):
    save(tmp_path, 2)
    shutil.move(cp.begin(tmp_path, 3), cp.folder_of(tmp_path, 3))
    with pytest.raises(CheckpointError, match=r"step_000003: got no manifest\.json"):
        cp.find(tmp_path, "auto", num_ranks=2)
    save(tmp_path, 4)  # an older one does not stand in the way of a newer complete one
    found = cp.find(tmp_path, "auto", num_ranks=2)
    assert found.checkpoint is not None and found.checkpoint.step == 4


def test_other_topology(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(ResumeMismatch, match=r"number of learner ranks: got 4; expected 2.*learner\.num_ranks=2") as caught:
        cp.find(tmp_path, "auto", num_ranks=4)
    assert caught.value.exit_code == 2, "a mistake in the command, not a run that failed"


# --- saving ------------------------------------------------------------------------------------------------------


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 1)
    assert (save(tmp_path, 1, content="new weights").folder / "learner" / "rank_0.bin").read_text() == "new weights"
    assert names(tmp_path) == ["step_000001"]


def test_nothing_to_commit(tmp_path):
    with pytest.raises(CheckpointError, match="no files"):
        cp.commit(cp.begin(tmp_path, 1), 1, state())


def test_free_space(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")(100 * 2**20, 70 * 2**20, 30 * 2**20)
    monkeypatch.setattr(cp.shutil, "disk_usage", lambda _: usage)
    cp.check_free_space(tmp_path, 30 * 2**20)
    with pytest.raises(CheckpointError, match=r"got 30 MiB; expected at least 31 MiB.*checkpoint\.keep"):
        cp.check_free_space(tmp_path, 31 * 2**20)


def test_size_of_the_newest(tmp_path):
    assert cp.newest_size(tmp_path) is None
    save(tmp_path, 1, content="long " * 1000)
    newest = save(tmp_path, 2)
    # the seven bytes "weights", the nine of "optimizer", and the manifest
    assert cp.newest_size(tmp_path) == 7 + 9 + (newest.folder / "manifest.json").stat().st_size


def test_a_failed_save_leaves_nothing(tmp_path):
    save(tmp_path, 1)
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(CheckpointError, match=r"step 2 .*No space left on device") as caught, cp.saving(tmp_path, 2) as temporary:
        (temporary / "rank_0.bin").write_text("half")
        raise full
    assert caught.value.__cause__ is full and names(tmp_path) == ["step_000001"]
    with pytest.raises(KeyError, match="other"), cp.saving(tmp_path, 2) as temporary:  # no disguise for other errors
        (temporary / "rank_0.bin").write_text("half")
        raise KeyError("other")
    assert names(tmp_path) == ["step_000001"]
    with cp.saving(tmp_path, 2) as temporary:
        (temporary / "rank_0.bin").write_text("whole")
        cp.commit(temporary, 2, state())
    assert names(tmp_path) == ["step_000001", "step_000002"]


# --- pruning -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "keep", "protected", "removed"),
    [
        ([1, 2, 3], 2, [], [1]),
        ([3, 1, 2], 1, [1], [2]),
        ([2, 10, 9], 2, [], [2]),
        ([1], 5, [], []),
        ([], 1, [], []),
    ],
)
def test_prune_by_hand(steps, keep, protected, removed):
    assert cp.prune(steps, keep, protected) == removed


@given(st.sets(st.integers(0, 50)), st.integers(1, 6), st.sets(st.integers(0, 50)))
def test_prune_invariants(steps, keep, protected):
    removed = set(cp.prune(steps, keep, protected))
    left = steps - removed
    assert removed <= steps and not removed & protected
    assert sorted(left)[-keep:] == sorted(steps)[-keep:], "the newest ones stay, so one complete checkpoint always does"
    assert left <= set(sorted(steps)[-keep:]) | protected


def test_prune_keeps_at_least_one():
    with pytest.raises(ValueError, match="at least 1"):
        cp.prune([1], 0, [])


def test_remove_old_keeps_newest_and_best(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    newest = save(tmp_path, 5, best_step=2)
    assert cp.remove_old(tmp_path, newest, 1, ()) == [1, 3, 4]
    assert names(tmp_path) == ["step_000002", "step_000005"]
    assert cp.verify(cp.folder_of(tmp_path, 2)).step == 2


def test_remove_old_leaves_later_ones(tmp_path):
    """A run resumed from an older step by path must not delete what came after it."""
    for step in (1, 2, 9):
        save(tmp_path, step)
    assert cp.remove_old(tmp_path, cp.verify(cp.folder_of(tmp_path, 2)), 1, ()) == [1]
    assert names(tmp_path) == ["step_000002", "step_000009"]
