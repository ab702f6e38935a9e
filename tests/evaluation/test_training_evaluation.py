"""What an evaluation in training takes from the verify stage: majority votes, and in which sandbox programs ran."""

from __future__ import annotations

import io
import sys

import pytest

from akl_dist import job
from akl_dist.bookkeeping.console import write_alarm
from akl_dist.bookkeeping.journal import RunDirectory
from akl_dist.config.schema import RolesConfig, VerifyConfig
from akl_dist.evaluation import SampleRecord, maj_at_k
from akl_dist.rollout.environment_pool import EnvironmentPool
from akl_dist.sandbox.client import Sandbox, SandboxFault
from akl_dist.verify.worker import VerifyWorker
from tests.verify.verify_examples import byte_level_tokenizer, group_of


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_majority_is_that_of_the_evaluation_command(tmp_path):
    """16 is right; 15 is given twice in two spellings: no majority for 16 among three, a tie among four (1/2), and 1 among five."""
    tokenizer = byte_level_tokenizer(tmp_path / "t")
    answers = ["\\boxed{16}", "\\boxed{15}", "\\boxed{15.0}", "\\boxed{32/2}", "\\boxed{16}"]
    groups = [group_of(tokenizer, answers[:size], gold="16") for size in (3, 4, 5)] + [group_of(tokenizer, ["none"], gold="16")]
    worker = VerifyWorker(str(tmp_path / "t"), end_ids=(0,), config=VerifyConfig(), roles=RolesConfig())
    try:
        judged = worker.judge(groups, [group.arrays for group in groups])
        assert worker.isolation is None, "no programs are run"
    finally:
        worker.close()
    assert [one.majority for one in judged] == [0.0, 0.5, 1.0, 0.0]
    for one in judged:
        records = [SampleRecord("b", "p", index, verdict.status, extracted, 5, False, 1)
                   for index, (verdict, extracted) in enumerate(zip(one.verdicts, one.arrays.extracted, strict=True))]
        assert maj_at_k(records) == one.majority


def test_programs_do_not_vote_and_name_their_sandbox(tmp_path):
    try:
        with Sandbox() as sandbox:
            expected = sandbox.isolation
    except SandboxFault:
        pytest.skip("this machine allows no isolation")
    tokenizer = byte_level_tokenizer(tmp_path / "t")
    group = group_of(tokenizer, ["no code", "none"], gold='{"prompt_style": "stdin_program", "tests": {"cases": []}}')
    worker = VerifyWorker(str(tmp_path / "t"), end_ids=(0,), config=VerifyConfig(kind="code"), roles=RolesConfig())
    try:
        assert worker.isolation == expected
        assert worker.judge([group], [group.arrays])[0].majority is None
    finally:
        worker.close()


def test_the_python_tool_names_its_sandbox():
    try:
        with Sandbox() as sandbox:
            expected = sandbox.isolation
    except SandboxFault:
        pytest.skip("this machine allows no isolation")
    pool = EnvironmentPool(environment="python", params={}, num_workers=1, timeout_s=10.0)
    try:
        assert pool.isolation == expected
    finally:
        pool.close()


@pytest.mark.parametrize(("replies", "form", "said"), [
    ([{"grader_pids": [1], "isolation": None}, None, "ready"], None, False),
    ([{"isolation": "root"}, {"isolation": "user_namespace"}], "user_namespace", False),
    ([{"isolation": "none"}, {"isolation": "root"}], "none", True),
    ([{"isolation": "a user's own word"}], None, False),
])
def test_the_weakest_form_counts(replies, form, said, capsys):
    assert job.sandbox_of(replies) == form
    assert ("UNSANDBOXED" in capsys.readouterr().out) == said


def test_red_on_a_terminal_alone(monkeypatch):
    terminal, file = Terminal(), io.StringIO()
    write_alarm("UNSANDBOXED", terminal)
    write_alarm("UNSANDBOXED", file)
    assert (terminal.getvalue(), file.getvalue()) == ("\x1b[1;31mUNSANDBOXED\x1b[0m\n", "UNSANDBOXED\n")
    monkeypatch.setattr(sys, "stdout", terminal)
    job.sandbox_of([{"isolation": "none"}])
    assert terminal.getvalue().count("\x1b[1;31mUNSANDBOXED:") == 1


def test_result_names_the_sandbox(tmp_path):
    run = RunDirectory(tmp_path)
    for sandbox in ("none", None):
        run.write_result("finished", steps=1, first_failure=None, evaluation=dict.fromkeys(("initial", "best", "last")),
                         sandbox=sandbox)
        result = run.read_result()
        assert result is not None and result["sandbox"] == sandbox
