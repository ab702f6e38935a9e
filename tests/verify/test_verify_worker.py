from __future__ import annotations

import random
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from verify_examples import byte_level_tokenizer, group_of, reference_of, tiny_tokenizer

from akl_dist.config.schema import RolesConfig, VerifyConfig
from akl_dist.contract.errors import ModelError, RunError
from akl_dist.contract.records import Status, Turns
from akl_dist.verify.token_text import TokenText
from akl_dist.verify.worker import LabelParts, VerifyWorker

RIGHT = "<think>7+3=10;10+6=16</think>\\boxed{16}<eos>"
WRONG = "<think></think>\\boxed{15}<eos>"
UNFINISHED = "<think>7+3=10;\\boxed{16}"
UNMARKED = "<think></think>16<eos>"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return folder, tiny_tokenizer(folder)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    folder = tmp_path_factory.mktemp("byte-level")
    return folder, byte_level_tokenizer(folder)


@pytest.fixture(scope="module")
def worker(tiny):
    folder, tokenizer = tiny
    made = VerifyWorker(str(folder), end_ids=[tokenizer.token_to_id("<eos>")], config=VerifyConfig(), roles=RolesConfig())
    yield made
    made.close()


def chosen(tokenizer, group, flags):
    """Token strings with the flag, per response."""
    rows, start = [], 0
    for length in group.response_lengths:
        ids = group.arrays.token_ids[start:start + length]
        rows.append([tokenizer.id_to_token(int(i)) for i, flag in zip(ids, flags[start:start + length], strict=True) if flag])
        start += length
    return rows


def labelled_alone(worker, group, judged, reference):
    (record,) = worker.label([LabelParts(group, group.arrays, judged, judged.arrays, reference, reference.arrays)])
    return record


def test_judge_and_votes(worker, tiny):
    _, tokenizer = tiny
    group = group_of(tokenizer, [RIGHT, WRONG, UNFINISHED, UNMARKED], finish=["stop", "stop", "length", "stop"])
    (judged,) = worker.judge([group], [group.arrays])
    assert [v.status for v in judged.verdicts] == [Status.OK, Status.WRONG, Status.NO_ANSWER, Status.NO_ANSWER]
    assert judged.answer_span_tokens == (2, 2, 0, 0)
    assert judged.arrays.texts == (RIGHT, WRONG, UNFINISHED, UNMARKED)
    box = ["\\boxed", "{", "1", "6", "}"]
    assert chosen(tokenizer, group, judged.arrays.position_mask) == [box, [*box[:3], "5", "}"], [], ["1", "6"]]
    assert chosen(tokenizer, group, judged.arrays.verifier_mask) == [["1", "6"], ["1", "5"], [], []]


def test_labels(worker, tiny):
    _, tokenizer = tiny
    group = group_of(tokenizer, [RIGHT, UNMARKED, UNFINISHED], finish=["stop", "stop", "length"])
    (judged,) = worker.judge([group], [group.arrays])
    n = len(RIGHT.replace("<think>", "t").replace("</think>", "T").replace("\\boxed", "b").replace("<eos>", "e"))
    assert group.response_lengths[0] == n
    entropies = [1.0] * (n - 6) + [0.0] * 6 + [0.0] * (group.num_tokens - n)
    reference = reference_of(group, entropies)
    labelled = labelled_alone(worker, group, judged, reference)
    answer = chosen(tokenizer, group, labelled.roles.answer_mask)
    assert answer[0] == ["\\boxed", "{", "1", "6", "}", "<eos>"]  # the end token is adjacent and low in entropy
    assert answer[1] == ["1", "6", "<eos>"]  # last line, by position and entropy
    assert answer[2] == []
    assert labelled.answer_tokens == (6, 3, 0)
    assert sum(labelled.vote_counts) == group.num_tokens
    assert labelled.vote_counts[0b111] == 2 and labelled.vote_counts[0b110] == 4 + 3


def test_labels_do_not_depend_on_the_gold(worker, tiny):
    _, tokenizer = tiny
    masks = []
    for gold in ("16", "15", "\\frac{1}{2}"):
        group = group_of(tokenizer, [RIGHT, WRONG, UNMARKED], gold=gold)
        (judged,) = worker.judge([group], [group.arrays])
        reference = reference_of(group, np.random.default_rng(0).random(group.num_tokens))
        masks.append(labelled_alone(worker, group, judged, reference).roles.answer_mask)
    assert np.array_equal(masks[0], masks[1]) and np.array_equal(masks[0], masks[2])


def test_groups_labelled_together_equal_each_alone(worker, tiny):
    """One padded grid for all groups: longer neighbours change nothing."""
    _, tokenizer = tiny
    groups = [group_of(tokenizer, [RIGHT, "\\boxed{16}"]), group_of(tokenizer, ["16<eos>"]), group_of(tokenizer, [RIGHT])]
    judged = worker.judge(groups, [group.arrays for group in groups])
    references = [reference_of(group, np.linspace(1, 0, group.num_tokens).tolist()) for group in groups]
    together = worker.label([LabelParts(g, g.arrays, j, j.arrays, r, r.arrays)
                             for g, j, r in zip(groups, judged, references, strict=True)])
    for record, group, one, reference in zip(together, groups, judged, references, strict=True):
        alone = labelled_alone(worker, group, one, reference)
        assert np.array_equal(record.roles.answer_mask, alone.roles.answer_mask)
        assert record.vote_counts == alone.vote_counts and record.answer_tokens == alone.answer_tokens


def test_random_roles_are_the_runs_and_the_responses_own(worker, tiny, monkeypatch):
    """As many as the majority has, of the same seed wherever a group is labelled, and another run's are others."""
    folder, tokenizer = tiny
    group = group_of(tokenizer, [RIGHT] * 4)
    (judged,) = worker.judge([group], [group.arrays])
    reference = reference_of(group, np.linspace(1, 0, group.num_tokens).tolist())
    part = LabelParts(group, group.arrays, judged, judged.arrays, reference, reference.arrays)

    def labels(one):
        first, again = (record.roles.answer_mask for record in one.label([part, part]))
        assert np.array_equal(first, again)
        return first.reshape(4, -1)

    majority, masks = labels(worker), []
    for rule in ("random_span", "random_tokens"):
        monkeypatch.setattr(worker, "_roles", RolesConfig(rule=rule))
        masks.append(labels(worker))
    end, span = tokenizer.token_to_id("<eos>"), RolesConfig(rule="random_span")
    with closing(VerifyWorker(str(folder), end_ids=[end], config=VerifyConfig(), roles=span, seed=1)) as other_run:
        masks.append(labels(other_run))
    for mask in masks:
        assert np.array_equal(mask.sum(1), majority.sum(1)) and len(np.unique(mask, axis=0)) > 1
    assert len({mask.tobytes() for mask in masks}) == 3


def test_misaligned_arrays_are_refused(worker, tiny):
    _, tokenizer = tiny
    group = group_of(tokenizer, [RIGHT])
    other = group_of(tokenizer, [RIGHT, RIGHT])
    with pytest.raises(RunError, match="tiny/0"):
        worker.judge([group], [other.arrays])
    (judged,) = worker.judge([group], [group.arrays])
    reference = reference_of(other, [0.0] * other.num_tokens)
    with pytest.raises(RunError, match="reference"):
        labelled_alone(worker, group, judged, reference)


def test_only_ends_at_the_end_token(worker, tiny):
    _, tokenizer = tiny
    group = group_of(tokenizer, ["\\boxed{15}<eos>\\boxed{16}"])
    (judged,) = worker.judge([group], [group.arrays])
    assert judged.arrays.extracted == ("15",)
    assert judged.verdicts[0].extracted is None, "model text stays out of the header"


def test_multibyte_characters_and_merged_tokens(byte_level):
    folder, tokenizer = byte_level
    text = "是½ so \\boxed{16}🙂<|im_end|>"
    ids = tokenizer.encode(text).ids
    decoded, spans = TokenText(folder).decode(ids)
    assert decoded == text
    assert spans[:3] == [(0, 1)] * 3  # three bytes of one character
    emoji = text.index("🙂")
    assert spans.count((emoji, emoji + 1)) == 4
    covered = {position for start, end in spans for position in range(start, end)}
    assert covered == set(range(len(text)))
    end = tokenizer.token_to_id("<|im_end|>")
    with closing(VerifyWorker(str(folder), end_ids=[end], config=VerifyConfig(), roles=RolesConfig())) as worker:
        group = group_of(tokenizer, [text], prompt="x")
        (judged,) = worker.judge([group], [group.arrays])
        assert judged.verdicts[0].status is Status.OK
        texts = ["".join(decoded[a:b] for (a, b), flag in zip(spans, mask, strict=True) if flag)
                 for mask in (judged.arrays.position_mask, judged.arrays.verifier_mask)]
        assert "\\boxed{16}" in texts[0] and "16" in texts[1] and "🙂" not in "".join(texts)
        merged = [t for t in tokenizer.encode(text).tokens if "16" in t]
        assert merged and merged[0] != "16", "the example needs a token merged over the border of the span"


def test_text_is_what_the_tokenizer_decodes(byte_level):
    folder, tokenizer = byte_level
    rng, token_text = random.Random(0), TokenText(folder)
    for _ in range(200):
        ids = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(rng.randrange(40))]
        text, spans = token_text.decode(ids)
        assert text == tokenizer.decode(ids, skip_special_tokens=False)
        assert all(0 <= a <= b <= len(text) for a, b in spans)
        assert [a for a, _ in spans] == sorted(a for a, _ in spans)
    assert token_text.decode([10**6]) == ("", [(0, 0)])  # a padded embedding row


def test_unknown_tokenizers_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        TokenText(tmp_path)
    (tmp_path / "tokenizer.json").write_text(
        '{"version":"1.0","added_tokens":[],"model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"},'
        '"decoder":{"type":"WordPiece","prefix":"##","cleanup":true}}')
    with pytest.raises(ModelError, match="WordPiece"):
        TokenText(tmp_path)


TOOL = "<user>\\boxed{16}</think><assistant>"  # what an environment and the template write between two turns


def conversation(tokenizer, texts, segments, *, finish="stop", **prompt):
    """One response made of ``texts`` as segments, sampled and written in turn."""
    group = group_of(tokenizer, ["".join(texts)], finish=[finish])
    turns = Turns(tuple(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in segments))
    return replace(group, turns=(turns,), prompt=replace(group.prompt, **prompt))


def test_only_the_last_turn_is_judged(worker, tiny):
    """An answer that the environment prints, or that an earlier turn gives, is no answer; spans lie in the whole response."""
    _, tokenizer = tiny
    last = "<think>6</think>\\boxed{15}<eos>"
    group = conversation(tokenizer, texts := ["\\boxed{16}<eos>", TOOL, last], texts)
    (judged,) = worker.judge([group], [group.arrays])
    assert judged.verdicts[0].status is Status.WRONG and judged.arrays.extracted == ("15",)
    assert judged.arrays.texts == ("".join(texts),)
    assert chosen(tokenizer, group, judged.arrays.position_mask) == [["\\boxed", "{", "1", "5", "}"]]
    first = np.flatnonzero(judged.arrays.position_mask)[0]
    assert first == group.turns[0].last_turn + len(tokenizer.encode("<think>6</think>").ids)


def test_a_conversation_without_a_last_answer_has_none(worker, tiny):
    _, tokenizer = tiny
    group = conversation(tokenizer, texts := ["\\boxed{16}<eos>", TOOL, "7+3<eos>"], texts)
    (judged,) = worker.judge([group], [group.arrays])
    assert judged.verdicts[0].status is Status.NO_ANSWER


@pytest.mark.parametrize(("earlier", "written", "opened"), [
    ("<think>7<eos>", TOOL, True),  # the program's own </think> closes nothing
    ("<think>7</think>8<eos>", TOOL, False),
    ("7<eos>", "<user>8<assistant><think>", True),  # the template opens it
    ("7<eos>", "<user><think>8<assistant>", False),
])
def test_reasoning_that_an_earlier_turn_left_open(worker, tiny, earlier, written, opened):
    _, tokenizer = tiny
    for last, status in (("\\boxed{16}<eos>", Status.NO_ANSWER if opened else Status.OK), ("</think>\\boxed{16}<eos>", Status.OK)):
        group = conversation(tokenizer, texts := [earlier, written, last], texts)
        assert worker.judge([group], [group.arrays])[0].verdicts[0].status is status


def test_a_prompt_that_opens_the_reasoning(worker, tiny):
    _, tokenizer = tiny
    group = group_of(tokenizer, ["\\boxed{16}<eos>", "7</think>\\boxed{16}<eos>"])
    group = replace(group, prompt=replace(group.prompt, think_open=True))
    (judged,) = worker.judge([group], [group.arrays])
    assert [v.status for v in judged.verdicts] == [Status.NO_ANSWER, Status.OK]


def test_tokens_of_the_environment_have_no_role(worker, tiny):
    _, tokenizer = tiny
    group = conversation(tokenizer, texts := ["7<eos>", TOOL, "\\boxed{16}<eos>"], texts)
    (judged,) = worker.judge([group], [group.arrays])
    labelled = labelled_alone(worker, group, judged, reference_of(group, [0.0] * group.num_tokens))
    written = ~group.turns[0].sampled_mask()
    assert not labelled.roles.answer_mask[written].any() and labelled.answer_tokens == (6,)
    assert sum(labelled.vote_counts) == group.num_tokens - written.sum()
