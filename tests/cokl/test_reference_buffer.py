"""Reference samples on disk: what is kept, what a resumed run reuses, and what it must not."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest

from akl_dist.cokl.buffer import DrawnGroup, ReferenceBuffer
from akl_dist.contract.errors import RunError
from akl_dist.contract.records import (
    JudgedArrays,
    JudgedGroup,
    Prompt,
    ReferenceArrays,
    RolloutArrays,
    RolloutGroup,
    Status,
    Verdict,
)

DRAWN_WITH = {"model": "m", "temperature": 1.0, "samples": 3}
STATUSES = (Status.OK, Status.WRONG, Status.OK)


def drawn(name: str, *, statuses=STATUSES, offset: int = 0) -> DrawnGroup:
    """Three responses of 2, 1 and 3 tokens; tokens 10 to 15 and log-probs -0.1 to -0.6."""
    lengths, n = (2, 1, 3), 6
    rollout = RolloutGroup(Prompt(name, "s", "text", (7, 8), "1"), lengths, ("stop",) * 3, 0, "e", None)
    zeros = np.zeros(n, np.float32)
    flags = np.zeros(n, bool)
    judged = JudgedGroup(name, tuple(Verdict(status) for status in statuses), (1, 1, 1), None)
    return DrawnGroup(
        rollout, RolloutArrays(np.arange(10 + offset, 16 + offset, dtype=np.int32), zeros), judged,
        JudgedArrays(("a", "b", "half \ud800"), ("1", None, "1"), flags, flags),
        ReferenceArrays(-np.arange(1, 7, dtype=np.float32) / 10, zeros))


def test_only_correct_responses_come_back(tmp_path):
    buffer = ReferenceBuffer(tmp_path, DRAWN_WITH)
    assert buffer.add([drawn("s/0"), drawn("s/1", statuses=(Status.WRONG, Status.TIMEOUT, Status.NO_ANSWER))]) == 2
    first, second = buffer.correct(["s/0", "s/1"])
    assert (first.prompt_id, first.prompt_ids, first.response_lengths, first.drawn) == ("s/0", (7, 8), (2, 3), 3)
    assert first.arrays.token_ids.tolist() == [10, 11, 13, 14, 15]
    assert first.arrays.seq_logp == pytest.approx([-0.3, -1.5], rel=1e-6)  # .1 + .2 and .4 + .5 + .6
    assert first.arrays.token_ids.dtype == np.int32 and first.arrays.seq_logp.dtype == np.float64
    assert (second.response_lengths, second.drawn, len(second.arrays.token_ids)) == ((), 3, 0)
    assert [s.prompt_id for s in buffer.correct(["s/1", "unknown", "s/0"])] == ["s/1", "s/0"]


def test_every_response_is_kept_with_its_verdict(tmp_path):
    ReferenceBuffer(tmp_path, DRAWN_WITH).add([drawn("s/0")])
    (part,) = tmp_path.iterdir()
    rows = pq.read_table(part).to_pylist()
    assert [row["status"] for row in rows] == ["ok", "wrong", "ok"]
    assert [row["sample_index"] for row in rows] == [0, 1, 2] and rows[1]["extracted"] is None
    assert rows[2]["text"] == "half \\ud800"  # half a character cannot be written as UTF-8


def test_a_resumed_run_reuses_what_is_there(tmp_path):
    first = ReferenceBuffer(tmp_path, DRAWN_WITH)
    first.add([drawn("s/0")])
    first.add([drawn("s/1", offset=5)])
    again = ReferenceBuffer(tmp_path, dict(DRAWN_WITH))
    assert again.prompt_ids() == {"s/0", "s/1"}
    assert again.correct(["s/1"])[0].arrays.token_ids.tolist() == [15, 16, 18, 19, 20]
    again.add([drawn("s/2")])
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"part_{n:06d}.parquet" for n in range(3)]


def test_samples_of_other_settings_are_not_reused(tmp_path):
    ReferenceBuffer(tmp_path, DRAWN_WITH).add([drawn("s/0")])
    other = ReferenceBuffer(tmp_path, {**DRAWN_WITH, "temperature": 0.7})
    assert other.prompt_ids() == set() and list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    buffer = ReferenceBuffer(tmp_path, DRAWN_WITH)
    buffer.add([drawn("s/0")])

    def fail(table, path):
        path.write_bytes(b"half a file")
        raise OSError("disk full")

    monkeypatch.setattr(pq, "write_table", fail)
    with pytest.raises(OSError, match="disk full"):
        buffer.add([drawn("s/1")])
    assert [p.name for p in tmp_path.iterdir()] == ["part_000000.parquet"]
    assert ReferenceBuffer(tmp_path, DRAWN_WITH).prompt_ids() == {"s/0"} == buffer.prompt_ids()


def test_arrays_of_another_prompt_are_refused(tmp_path):
    one = drawn("s/0")
    short = DrawnGroup(one.rollout, RolloutArrays(one.arrays.token_ids[:5], one.arrays.logp[:5]), one.judged, one.judged_arrays,
                       one.reference)
    with pytest.raises(RunError, match="5 tokens and 6 log-probs"):
        ReferenceBuffer(tmp_path, DRAWN_WITH).add([short])
    assert list(tmp_path.iterdir()) == []
