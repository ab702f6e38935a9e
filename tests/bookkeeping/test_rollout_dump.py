from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from akl_dist.bookkeeping.rollout_dump import ReplayOrder, ReplayReader, dump_path, read_rollouts, rows_of_group, write_rollouts
from akl_dist.contract.errors import DataError
from akl_dist.contract.records import (
    JudgedArrays,
    JudgedGroup,
    LabelledGroup,
    Prompt,
    ReferenceArrays,
    ReferenceGroup,
    RoleArrays,
    RolloutArrays,
    RolloutGroup,
    Status,
    TrainingGroup,
    Turns,
    Verdict,
)

F32 = np.float32


def group_of(prompt_id: str, lengths: tuple[int, ...], *, seed: int, version: int = 4):
    """A group with arrays from a generator: no float among them has a short decimal form."""
    rng = np.random.default_rng(seed)
    n, size = sum(lengths), len(lengths)
    prompt = Prompt(prompt_id, "s", f"text of {prompt_id} – é", tuple(int(t) for t in rng.integers(0, 50000, 5)), "18")
    rollout = RolloutArrays(rng.integers(0, 150_000, n).astype(np.int32), -rng.exponential(size=n).astype(F32))
    reference = ReferenceArrays(-rng.exponential(size=n).astype(F32), rng.exponential(size=n).astype(F32), None)
    roles = RoleArrays(rng.random(n) < 0.5)
    judged = JudgedArrays(tuple(f"text {i}" for i in range(size)), tuple("18" if i % 3 == 0 else None for i in range(size)),
                          roles.answer_mask, roles.answer_mask)
    verdicts = tuple(
        [Verdict(Status.OK), Verdict(Status.TIMEOUT, reason="no answer within 5 s"), Verdict(Status.NO_ANSWER)][i % 3]
        for i in range(size)
    )
    header = RolloutGroup(prompt, lengths, ("stop", *["length"] * (size - 1)), version, "rollout-0", None)
    labelled = LabelledGroup(
        header, JudgedGroup(prompt_id, verdicts, tuple(range(size)), None),
        ReferenceGroup(prompt_id, (0.0,) * size, (0.0,) * size, None), (0,) * size, (0,) * 8, None,
    )
    training = TrainingGroup(labelled, tuple(i / 3 for i in range(size)), tuple(v.status.trains for v in verdicts))
    return training, rollout, judged, reference, roles


GROUPS = [group_of("s/1", (3, 1, 4), seed=0), group_of("s/2", (1,), seed=1), group_of("s/3", (2, 2), seed=2)]


@pytest.fixture
def dump(tmp_path):
    path = dump_path(tmp_path / "rollouts", 12)
    rows = [row for group in GROUPS for row in rows_of_group(12, *group)]
    assert write_rollouts(path, rows) == 6
    return path


def test_names_and_columns(dump):
    assert dump.name == "step_000012.parquet"
    assert [p.name for p in dump.parent.iterdir()] == [dump.name], "no temporary file stays"
    first, second, third, *_ = pq.read_table(dump).to_pylist()
    assert first["prompt_text"] == "text of s/1 – é"
    assert (first["reward"], second["reward"], third["reward"]) == (1.0, None, 0.0), "no verdict is no zero reward"
    assert (first["status"], second["status"], third["status"]) == ("ok", "timeout", "no_answer")
    assert (first["reason"], second["reason"]) == ("", "no answer within 5 s"), "why there is no verdict is on file"
    assert (first["extracted"], second["extracted"]) == ("18", None)
    assert [len(row["logp"]) for row in (first, second, third)] == [3, 1, 4]
    assert third["advantage"] == 2 / 3
    assert {row["policy_version"] for row in (first, second, third)} == {4}
    _, rollout, judged, reference, roles = GROUPS[0]  # responses of 3, 1 and 4 tokens
    for row, part, text in ((first, slice(0, 3), 0), (second, slice(3, 4), 1), (third, slice(4, 8), 2)):
        assert row["text"] == judged.texts[text]
        for column, array in (("response_token_ids", rollout.token_ids), ("role", roles.answer_mask), ("logp", rollout.logp),
                              ("ref_logp", reference.logp), ("entropy", reference.entropy)):
            np.testing.assert_array_equal(np.asarray(row[column], array.dtype), array[part], err_msg=column)


def test_replay_is_bit_exact(dump):
    replayed = read_rollouts(dump)
    assert len(replayed) == 3
    for got, (training, rollout, *_) in zip(replayed, GROUPS, strict=True):
        header = training.labelled.rollout
        assert got.prompt == header.prompt
        assert (got.response_lengths, got.finish_reasons) == (header.response_lengths, header.finish_reasons)
        assert got.policy_version == 4
        assert got.arrays.token_ids.dtype == np.int32 and got.arrays.logp.dtype == F32
        np.testing.assert_array_equal(got.arrays.token_ids, rollout.token_ids)
        np.testing.assert_array_equal(got.arrays.logp.view(np.int32), rollout.logp.view(np.int32))


def test_every_float_pattern_survives(tmp_path):
    """Negative zero, denormals, NaN and infinities: bits are kept, whatever they mean."""
    odd = np.array([-0.0, 1e-45, np.nan, -np.inf, np.nextafter(F32(-1), F32(0))], dtype=F32)
    training, rollout, judged, reference, roles = group_of("s/1", (2, 3), seed=0)
    rows = rows_of_group(1, training, dataclasses.replace(rollout, logp=odd), judged, reference, roles)
    write_rollouts(tmp_path / "step_000001.parquet", rows)
    got = read_rollouts(tmp_path / "step_000001.parquet")[0].arrays.logp
    np.testing.assert_array_equal(got.view(np.int32), odd.view(np.int32))


def test_consecutive_groups_of_one_prompt_stay_apart(tmp_path):
    twice = [*rows_of_group(1, *GROUPS[2]), *rows_of_group(1, *GROUPS[2])]
    write_rollouts(tmp_path / "step_000001.parquet", twice)
    assert [g.response_lengths for g in read_rollouts(tmp_path / "step_000001.parquet")] == [(2, 2), (2, 2)]


def test_text_that_is_no_unicode_is_escaped(tmp_path):
    row = dataclasses.replace(rows_of_group(1, *GROUPS[1])[0], text="broken \ud800 half")
    write_rollouts(tmp_path / "step_000001.parquet", [row])
    assert pq.read_table(tmp_path / "step_000001.parquet").column("text").to_pylist() == ["broken \\ud800 half"]


def test_misaligned_arrays_are_refused():
    training, rollout, judged, reference, roles = GROUPS[0]
    short = ReferenceArrays(reference.logp[:-1], reference.entropy[:-1], None)
    with pytest.raises(ValueError, match="prompt s/1: arrays do not hold the 8 tokens"):
        rows_of_group(1, training, rollout, judged, short, roles)
    with pytest.raises(ValueError, match="sample 0: arrays do not align"):
        dataclasses.replace(rows_of_group(1, *GROUPS[0])[0], role=np.zeros(2, bool))


def test_a_failed_write_leaves_the_old_dump(dump):
    before = dump.read_bytes()

    def rows():
        yield from rows_of_group(12, *GROUPS[0])
        raise OSError("the arrays could not be fetched")

    with pytest.raises(OSError, match="fetched"):
        write_rollouts(dump, rows())
    assert dump.read_bytes() == before and len(list(dump.parent.iterdir())) == 1


# --- replay ------------------------------------------------------------------------------------------------------


def test_reader(dump):
    for folder in (dump.parent, dump.parent.parent):  # rollouts/ or the run directory
        reader = ReplayReader(folder)
        assert list(reader.steps) == [12]
        assert reader.read(12)[1].prompt.prompt_id == "s/2"
    with pytest.raises(DataError, match=r"step 13: got no dump in .*its 1 steps, 12 to 12.*steps=12"):
        ReplayReader(dump.parent).read(13)


def taken(order: ReplayOrder, count: int) -> list[int]:
    return [order.take() for _ in range(count)]


def test_order_of_a_fresh_replay():
    """Step N takes dump N; the N-th where the numbers do not start at 1."""
    assert taken(ReplayOrder([1, 2, 3]), 3) == [1, 2, 3]
    assert taken(ReplayOrder([12, 15]), 2) == [12, 15]
    order = ReplayOrder([1, 2, 4])
    assert taken(order, 2) == [1, 2]
    with pytest.raises(DataError, match=r"no dump of step 3"):
        order.take()
    order = ReplayOrder([7])
    order.take()
    with pytest.raises(DataError, match=r"got 1 dumped steps, 7 to 7; expected a dump after step 7"):
        order.take()


def test_dumps_are_held_against_the_batch_by_their_footers(tmp_path):
    """Two prompts of three responses in dumps 3 and 4; nothing but footers is read."""
    for step in (3, 4):
        groups = [group_of(f"s/{n}", (3, 1, 2), seed=n) for n in range(2)]
        write_rollouts(dump_path(tmp_path, step), [row for group in groups for row in rows_of_group(step, *group)])
    reader = ReplayReader(tmp_path)

    def check(steps: int, prompts: int, group_size: int) -> None:
        reader.check(ReplayOrder(reader.steps), steps=steps, prompts=prompts, group_size=group_size)

    check(2, 2, 3)
    with pytest.raises(DataError, match=r"2 dumped steps, 3 to 4; expected a dump after step 4"):
        check(3, 2, 3)
    for prompts, size in ((3, 3), (2, 4), (3, 2), (1, 6)):  # also six rows in other groups
        with pytest.raises(DataError, match=r"step 3: got 2 prompts of 3 responses.*prompts_per_step=2 rollout.group_size=3"):
            check(2, prompts, size)
    dump_path(tmp_path, 4).write_bytes(b"PAR1")
    check(1, 2, 3)
    with pytest.raises(DataError, match=r"step_000004.parquet: got an unreadable file"):
        check(2, 2, 3)
    pq.write_table(pa.table({"a": [1]}), dump_path(tmp_path, 4))
    with pytest.raises(DataError, match="columns a; expected columns step"):
        check(2, 2, 3)
    write_rollouts(dump_path(tmp_path, 4), [])
    with pytest.raises(DataError, match="got 0 prompts of 0 responses"):
        check(2, 2, 3)


def test_a_dry_run_holds_the_dumps_against_the_configuration(tmp_path, capsys):
    from akl_dist import main

    groups = [group_of(f"s/{n}", (3, 1), seed=n) for n in range(2)]
    write_rollouts(dump_path(tmp_path, 1), [row for group in groups for row in rows_of_group(1, *group)])
    line = [f"rollout.replay={tmp_path}", "steps=1", "rollout.group_size=2", "dry_run=true"]
    assert main.main([*line, "rollout.prompts_per_step=2"]) == 0
    assert main.main([*line, "rollout.prompts_per_step=4"]) == 2
    assert "got 2 prompts of 2 responses" in capsys.readouterr().err


NORMAL = {"seed": 0, "epoch": 0, "position": 4, "skipped": 0, "num_prompts": 8, "fingerprint": "f"}


def test_order_after_the_checkpoint_of_a_normal_run():
    """The weights of step N-1 meet the dump of step N, by its number, wherever the numbers start."""
    for dumped in ([1, 2, 3], [2, 3]):
        assert taken(ReplayOrder.resumed(dumped, step=1, prompt_source=NORMAL), 2) == [2, 3]
    with pytest.raises(DataError, match=r"got 2 dumped steps, 1 to 2; expected a dump of step 3, .*checkpoint of step 2"):
        ReplayOrder.resumed([1, 2], step=2, prompt_source=NORMAL)


def test_order_after_the_checkpoint_of_a_replay():
    """At its own place, which the steps of the run do not tell when the numbers did not start at 1."""
    order = ReplayOrder([12, 13, 15])
    taken(order, 2)
    assert taken(ReplayOrder.resumed([12, 13, 15], step=2, prompt_source=order.state()), 1) == [15]
    after_normal = ReplayOrder.resumed([1, 2, 3], step=1, prompt_source=NORMAL)
    after_normal.take()
    assert taken(ReplayOrder.resumed([1, 2, 3], step=2, prompt_source=after_normal.state()), 1) == [3]
    assert taken(ReplayOrder.resumed([4, 5], step=0, prompt_source=ReplayOrder([4, 5]).state()), 1) == [4]


def test_empty_folder(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(DataError, match=r"rollout\.replay: got no step_.*dump_rollouts=true"):
            ReplayReader(folder)


def test_damaged_and_foreign_files(dump, tmp_path):
    foreign = tmp_path / "step_000001.parquet"
    pq.write_table(pa.table({"prompt": ["p"]}), foreign)
    with pytest.raises(DataError, match="got columns prompt; expected columns step, prompt_id"):
        read_rollouts(foreign)
    dump.write_bytes(dump.read_bytes()[:-10])
    with pytest.raises(DataError, match="unreadable file"):
        read_rollouts(dump)


@pytest.mark.parametrize("lost", [0, 1, 4])
def test_incomplete_groups_are_refused(tmp_path, lost: int):
    rows = [row for group in GROUPS for row in rows_of_group(1, *group)]
    del rows[lost]
    write_rollouts(tmp_path / "step_000001.parquet", rows)
    with pytest.raises(DataError, match=r"first sample|samples \["):
        read_rollouts(tmp_path / "step_000001.parquet")


def test_no_rows(tmp_path):
    write_rollouts(tmp_path / "step_000001.parquet", [])
    with pytest.raises(DataError, match="got 0 rows"):
        read_rollouts(tmp_path / "step_000001.parquet")


def test_conversations_and_prompts_come_back(tmp_path):
    """Turns and what a prompt says of its verifier and template are part of a dump: a replay judges and trains as the run did."""
    training, *arrays = group_of("s/1", (5, 2), seed=0)
    turns = (Turns((2, 2, 1), void=(0,), left_out=(0,), calls=1, failed_calls=1, score=0.5, fault="late"), Turns((2,)))
    prompt = dataclasses.replace(training.labelled.rollout.prompt, think_open=True, verifier="code", max_response_tokens=9,
                                 extra='{"a": 1}')
    rollout = dataclasses.replace(training.labelled.rollout, turns=turns, prompt=prompt)
    training = dataclasses.replace(training, labelled=dataclasses.replace(training.labelled, rollout=rollout))
    path = dump_path(tmp_path, 1)
    write_rollouts(path, rows_of_group(1, training, *arrays))
    (group,) = read_rollouts(path)
    assert group.turns == turns and group.prompt == prompt


def test_one_piece_responses_have_no_turns(dump):
    assert all(group.turns == () for group in read_rollouts(dump))
