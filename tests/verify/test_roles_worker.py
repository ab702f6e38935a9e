"""Roles through the worker: the sources of entropies, code prompts, and the position of a tail."""

from __future__ import annotations

import dataclasses
import json
from contextlib import closing

import numpy as np
import pytest
from verify_examples import byte_level_tokenizer, group_of, reference_of, tiny_tokenizer

from akl_dist.config.schema import RolesConfig, VerifyConfig
from akl_dist.contract.errors import RunError
from akl_dist.contract.records import Status, Verdict
from akl_dist.verify.worker import LabelParts, VerifyWorker

RIGHT = "<think>7+3=10;10+6=16</think>\\boxed{16}<eos>"


class Verdicts:
    """Graders that give the verdicts they were made with."""

    def __init__(self, *verdicts):
        self._verdicts = verdicts

    def judge_many(self, items, *, batch_deadline):
        return list(self._verdicts)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = tiny_tokenizer(folder)
    with closing(VerifyWorker(str(folder), end_ids=[tokenizer.token_to_id("<eos>")], config=VerifyConfig(),
                              roles=RolesConfig())) as worker:
        yield tokenizer, worker


def test_entropies_come_from_the_configured_source(tiny, monkeypatch):
    """Three sources that vote differently; a source that gave nothing is named, not replaced."""
    tokenizer, worker = tiny
    group = group_of(tokenizer, [RIGHT])
    n = group.num_tokens
    up, down, flat = (np.asarray(v, np.float32) for v in (np.arange(n), np.arange(n)[::-1], np.ones(n)))
    group = dataclasses.replace(group, arrays=dataclasses.replace(group.arrays, entropy=flat))
    (judged,) = worker.judge([group], [group.arrays])
    reference = reference_of(group, up)
    whole = LabelParts(group, group.arrays, judged, judged.arrays, reference, reference.arrays, down)

    def entropy_votes(source, part=whole):
        monkeypatch.setattr(worker, "_roles", RolesConfig(rule="entropy", entropy_source=source, entropy_window=1))
        (record,) = worker.label([part])
        return record.roles.answer_mask

    assert entropy_votes("reference")[:3].all() and not entropy_votes("reference")[-3:].any()
    assert np.array_equal(entropy_votes("policy_forward"), entropy_votes("reference")[::-1])
    assert entropy_votes("rollout_topk").all()
    without = dataclasses.replace(whole, policy_entropy=None, arrays=dataclasses.replace(group.arrays, entropy=None))
    for source in ("policy_forward", "rollout_topk"):
        with pytest.raises(RunError, match=f"tiny/0.*\n?.*entropy_source={source}"):
            entropy_votes(source, without)
    with pytest.raises(RunError, match="learner"):
        entropy_votes("policy_forward", dataclasses.replace(whole, policy_entropy=down[1:]))


def test_a_tail_instead_of_a_marker(tiny, monkeypatch):
    tokenizer, worker = tiny
    texts = ["<think>1+1=2</think>\\boxed{2}<eos>", "1" * 25 + "<eos>", "<think>1"]
    group = group_of(tokenizer, texts, finish=["stop", "stop", "length"])
    monkeypatch.setattr(worker, "_roles", RolesConfig(position="tail"))
    (judged,) = worker.judge([group], [group.arrays])
    lengths = np.cumsum(group.response_lengths)[:-1]
    first, second, third = np.split(judged.arrays.position_mask, lengths)
    assert np.flatnonzero(first).tolist() == [len(first) - 2], "one token of the four in the final section; not the end token"
    assert np.flatnonzero(second).tolist() == [22, 23, 24] and not third.any()


def test_code_prompts_of_a_mixture(tmp_path):
    """The prompt's own verifier decides how its answer is bounded; the same response to another prompt is marked by its fence."""
    tokenizer = byte_level_tokenizer(tmp_path / "t")
    program = "def add(a, b):\n    c = a\n    return c + b\n"
    text = f"so 🙂\n```python\n{program}```\n"
    gold = json.dumps({"prompt_style": "instruct_function", "tests": {"entry_point": "add"}})
    group = group_of(tokenizer, [text], gold=gold)
    at = text.index(program)
    with closing(VerifyWorker(str(tmp_path / "t"), end_ids=(0,), config=VerifyConfig(), roles=RolesConfig())) as worker:
        graders, worker._graders = worker._graders, Verdicts(Verdict(Status.WRONG, program, (at, at + len(program))))
        code = dataclasses.replace(group, prompt=dataclasses.replace(group.prompt, verifier="code"))
        (coded,), (plain,) = (worker.judge([one], [one.arrays]) for one in (code, group))
        worker._graders = graders
    def marked(mask):
        _, spans = worker._token_text.decode(group.arrays.token_ids.tolist())
        return "".join(text[a:b] for (a, b), flag in zip(spans, mask, strict=True) if flag)
    for mask in (coded.arrays.position_mask, coded.arrays.verifier_mask):
        assert "def add(a, b):" in marked(mask) and "return c + b" in marked(mask) and "c = a" not in marked(mask)
    assert "```python" in marked(plain.arrays.position_mask) and "c = a" in marked(plain.arrays.verifier_mask)
    assert coded.answer_span_tokens == (int(coded.arrays.verifier_mask.sum()),)
