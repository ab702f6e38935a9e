"""Saving and resuming as the assembly does it, without its actors."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace

import pytest

from akl_dist.assembly import Assembly, needed_bytes, prompt_source
from akl_dist.bookkeeping import checkpoint
from akl_dist.bookkeeping.checkpoint import Checkpoint, CheckpointState
from akl_dist.config.models import sizes
from akl_dist.config.schema import Config, DataConfig, ModelConfig, RolloutConfig
from akl_dist.contract.errors import CheckpointError
from akl_dist.contract.records import Prompt
from akl_dist.data.report import DataReport, SplitReport
from akl_dist.data.source import LoadedData, PromptSource
from akl_dist.loop import Progress

EMPTY = SplitReport(0, 0, (), (), 0)
PROMPTS = [Prompt(f"s/{i}", "s", "", (1, 2), "1") for i in range(8)]


def resumed(folder, state) -> Checkpoint:
    return Checkpoint(folder, 1, CheckpointState(1, "", {"policy_version": 1, "optimizer_steps": 1}, state, {}))


LOADED = LoadedData(PROMPTS, [], DataReport("s", "none", EMPTY, EMPTY))
CONFIG = Config(seed=3)


def test_prompts_of_a_resumed_run(tmp_path):
    before = prompt_source(LOADED, None, CONFIG)
    assert isinstance(before, PromptSource) and before.seed == 3
    before.take(3)
    after = prompt_source(LOADED, resumed(tmp_path, before.state()), CONFIG)
    assert [p.prompt_id for p in after.take(3)] == [p.prompt_id for p in before.take(3)]


def test_a_replays_checkpoint_without_its_replay(tmp_path):
    with pytest.raises(CheckpointError, match=r"replay.*expected .*prompt.*rollout\.replay"):
        prompt_source(LOADED, resumed(tmp_path, {"replayed_steps": 1, "last_dump": 1}), CONFIG)


def test_prompts_of_a_mixture_go_by_weight(tmp_path):
    """Three of four places for the source with weight 3, also after a resume; weights are part of what a checkpoint holds."""
    sources = [Prompt(f"{name}/{i}", name, "", (1, 2), "1") for name in ("a", "b") for i in range(8)]
    loaded = LoadedData(sources, [], DataReport("mixture", "none", EMPTY, EMPTY))

    def config(weight):
        mixture = {"a": {"recipe": "tiny", "weight": weight}, "b": {"recipe": "tiny"}}
        return Config(data=DataConfig(recipe="mixture", mixture=mixture), rollout=RolloutConfig(prompts_per_step=8))

    before = prompt_source(loaded, None, config(3))
    assert sorted(prompt.source for prompt in before.take(8)) == ["a"] * 6 + ["b"] * 2
    after = prompt_source(loaded, resumed(tmp_path, before.state()), config(3))
    assert [p.prompt_id for p in after.take(8)] == [p.prompt_id for p in before.take(8)]
    with pytest.raises(CheckpointError, match="shares"):
        prompt_source(loaded, resumed(tmp_path, before.state()), config(2))


def saver(root, *, fails: OSError | None = None) -> Assembly:
    def save(folder):
        (folder / "rank_0.bin").write_text("weights")
        if fails is not None:
            raise fails

    assembly = Assembly.__new__(Assembly)  # its constructor starts actors
    assembly._config, assembly._directory = Config(), SimpleNamespace(root=root)
    assembly._learner, assembly._critic = SimpleNamespace(save=save), None
    assembly.prompts = PromptSource(PROMPTS, seed=0)
    return assembly


def test_needed_bytes(tmp_path):
    tiny = Config(model=ModelConfig(path="tiny", dtype="float32"))
    half = Config(model=ModelConfig(path="tiny", dtype="bfloat16"))
    parameters = sizes("tiny").num_parameters
    # fp32 master weights 4, Adam's two moments 8, and the weights themselves: 16 or 14 bytes a parameter
    assert (needed_bytes(tiny, tmp_path), needed_bytes(half, tmp_path)) == (16 * parameters, 14 * parameters)
    assert needed_bytes(Config(model=ModelConfig(path="org/unknown-model")), tmp_path) == 0
    saver(tmp_path).save(Progress(step=1))
    assert needed_bytes(tiny, tmp_path) == checkpoint.newest_size(tmp_path), "what the last one took is known exactly"


def test_progress_survives_a_checkpoint(tmp_path):
    """The adaptive KL coefficient too, to the last bit."""
    progress = Progress(step=3, policy_version=4, optimizer_steps=6, kl_coefficient=1.1 * 0.97)
    saver(tmp_path).save(progress)
    found = checkpoint.find(tmp_path, "auto", num_ranks=Config().learner.num_ranks)
    assembly = saver(tmp_path)
    assembly._resumed, assembly._learner = found.checkpoint, SimpleNamespace(load=lambda folder: None)
    assert assembly.restore() == progress


def test_too_little_space_is_said_before_anything_is_written(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")(100, 99, 1)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match="free space"):
        saver(tmp_path).save(Progress(step=1))
    assert not list(tmp_path.rglob("rank_0.bin"))


def test_a_failed_save(tmp_path):
    saver(tmp_path).save(Progress(step=1))
    with pytest.raises(CheckpointError, match="No space left"):
        saver(tmp_path, fails=OSError(28, "No space left on device")).save(Progress(step=2))
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_000001"]


def test_one_that_does_not_close_keeps_nothing_from_being_closed():
    closed = []

    def closes(name, error=None):
        def close():
            closed.append(name)
            if error is not None:
                raise error

        return SimpleNamespace(close=close, release=close)

    assembly = Assembly.__new__(Assembly)
    assembly._engines, assembly._replay, assembly.dump, assembly._buffer = closes("engines", OSError("gone")), None, None, None
    assembly._verify, assembly._reference, assembly._critic = closes("verify"), closes("reference"), None
    assembly._learner, assembly._reservation = closes("learner"), closes("bundles")
    with pytest.raises(OSError, match="gone"):
        assembly.close()
    assert closed == ["engines", "verify", "reference", "learner", "bundles"]
