from __future__ import annotations

import matplotlib.image
import numpy as np
import pytest

from akl_dist.bookkeeping.curve import draw, held_out, series
from akl_dist.bookkeeping.journal import Journal, RunDirectory
from akl_dist.contract.errors import DataError

EVALUATION = {"step": 0, "data_set": "tiny", "accuracy": 0.45, "kl_per_token": 0.0, "response_tokens": 20.0}


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "tiny", "r", {})


def record(run: RunDirectory, rising: bool):
    journal = Journal(run, tensorboard=False)
    for step in range(1, 21):
        share = step / 20 if rising else 0.5
        metrics = {"verify/accuracy": share, "objective/kl_value_k3": 0.1 * share,
                   "rollout/response_tokens_mean": 20 + 5 * share, "roles/answer_span_tokens": 3 - share}
        if step % 10 == 0:
            metrics |= {"evaluate/tiny/avg_at_k": share, "evaluate/tiny/avg_at_4": share, "evaluate/tiny/problems": 64}
        journal.record(step, metrics)


def test_series_and_held_out():
    rows = [{"step": 1, "a/b": 0.5}, {"step": 2}, {"step": 3, "a/b": 0.7, "evaluate/tiny/avg_at_k": 0.9}]
    assert series(rows, "a/b") == ([1, 3], [0.5, 0.7])
    result = {"evaluation": {"initial": EVALUATION, "best": None, "last": None}}
    assert held_out(rows, result, "avg_at_k", "accuracy") == {"tiny": {0: 0.45, 3: 0.9}}
    assert held_out(rows, None, "avg_at_k", "accuracy") == {"tiny": {3: 0.9}}
    assert held_out(rows, result, "answer_span_tokens", "answer_span_tokens") == {}


def test_held_out_of_several_sources():
    merged = {**EVALUATION, "data_set": "a+b", "by_source": {n: {**EVALUATION, "data_set": n, "accuracy": v}
                                                           for n, v in (("a", 0.3), ("b", 0.6))}}
    result = {"evaluation": {"initial": merged, "best": None, "last": None}}
    assert held_out([{"step": 2, "evaluate/b/avg_at_k": 0.9}], result, "avg_at_k", "accuracy") == {
        "a": {0: 0.3}, "b": {0: 0.6, 2: 0.9}}


def pixels(path) -> np.ndarray:
    return matplotlib.image.imread(path)[..., :3]


def test_picture_has_content(run):
    record(run, rising=True)
    run.write_result("finished", steps=20, first_failure=None,
                     evaluation={"initial": EVALUATION, "best": None, "last": None})
    path = draw(run.root)
    assert path == run.curve and not list(run.root.glob(".*"))
    image = pixels(path)
    assert image.shape[0] > 500 and image.shape[1] > 800
    height, width = image.shape[0] // 2, image.shape[1] // 2
    for panel in (image[:height, :width], image[:height, width:], image[height:, :width], image[height:, width:]):
        coloured = (panel.max(axis=-1) - panel.min(axis=-1)) > 0.3  # lines are coloured, text and grid grey
        assert coloured.sum() > 300
    assert (image > 0.99).all(axis=-1).mean() > 0.5


def test_picture_shows_the_numbers(run, tmp_path):
    """Negative control: another course of the metrics gives another picture."""
    record(run, rising=True)
    other = RunDirectory.create(tmp_path, "tiny", "other", {})
    record(other, rising=False)
    assert np.abs(pixels(draw(run.root)) - pixels(draw(other.root))).sum() > 100


def test_metrics_that_were_not_recorded(run):
    Journal(run, tensorboard=False).record(1, {"verify/accuracy": 0.5})
    assert draw(run.root).stat().st_size > 5000


def test_no_metrics(run):
    with pytest.raises(DataError, match=r"metrics\.jsonl: got no steps"):
        draw(run.root)
