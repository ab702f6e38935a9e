"""``verify.kind=code`` through the worker that training and evaluation use."""

from __future__ import annotations

import json

import pytest
from verify_examples import byte_level_tokenizer, group_of

from akl_dist.config.schema import RolesConfig, VerifyConfig
from akl_dist.contract.records import Status
from akl_dist.data import composed
from akl_dist.sandbox.client import Sandbox, SandboxFault
from akl_dist.verify.golds import invalid_gold
from akl_dist.verify.worker import VerifyWorker, grader_options

ROW = {"task_id": 11, "text": "Write a function to add.", "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]}


def test_options_of_each_kind():
    assert grader_options(VerifyConfig(timeout_s=3.0)) == {"timeout_s": 3.0}
    code = grader_options(VerifyConfig(kind="code", timeout_s=3.0, allow_unsandboxed=True))
    settings = json.loads(code["environment"]["AKL_CODE_SETTINGS"])
    assert (settings["total_s"], settings["limits"]["wall_s"], settings["allow_unsandboxed"]) == (3.0, 3.0, True)
    assert code["timeout_s"] > settings["total_s"] + settings["limits"]["wall_s"], "nested limits end before the grader's own"
    assert code["judge"] != "akl_dist.verify.math:judge" and code["probes"]


def test_programs_are_judged_by_their_tests(tmp_path):
    try:
        Sandbox().close()
    except SandboxFault:
        pytest.skip("this machine allows no isolation")
    task = composed.mbpp(ROW)
    assert isinstance(task, composed.Composed) and invalid_gold("code")(task.gold) == ""
    tokenizer = byte_level_tokenizer(tmp_path / "t")
    right, wrong = ("so\n```python\ndef add(a, b):\n    return " + value + "\n```" for value in ("a + b", "3"))
    responses = [right, wrong, "no code here"]
    group = group_of(tokenizer, responses, gold=task.gold)
    worker = VerifyWorker(str(tmp_path / "t"), end_ids=(0,), config=VerifyConfig(kind="code", timeout_s=10.0), roles=RolesConfig())
    try:
        judged = worker.judge([group], [group.arrays])[0]
    finally:
        worker.close()
    assert [verdict.status for verdict in judged.verdicts] == [Status.OK, Status.WRONG, Status.NO_ANSWER]
    assert judged.answer_span_tokens[0] > 5, "the answer span of a program is its code"


def test_unusable_tests():
    check = invalid_gold("code")
    assert "no task" in check("7") and check(composed.code_gold("instruct_function", {"asserts": []}))
    assert check(composed.code_gold("instruct_function", {"asserts": ["assert 1 == 1"]}))
    assert invalid_gold("math")("7") == "" and invalid_gold("another")("anything") == ""
