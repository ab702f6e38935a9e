"""Reference solutions of the published benchmarks are judged ok, their broken twins wrong. A sample; AKL_TEST_ALL=1 takes all."""

from __future__ import annotations

import ast
import json
import os

import pytest

from akl_dist.sandbox.client import Sandbox, SandboxFault
from akl_dist.sandbox.limits import Limits
from akl_dist.verify.code import CodeJudge, CodeSettings, CodeTask

STEP = 1 if os.environ.get("AKL_TEST_ALL") else 60


@pytest.fixture(scope="module")
def judge():
    try:
        made = CodeJudge(CodeSettings(limits=Limits(wall_s=20.0, cpu_s=15)))
    except SandboxFault as fault:
        pytest.skip(str(fault))
    yield made
    made.close()


def tasks(name, rows):
    for row in rows[::STEP]:
        if name == "humaneval":
            tests = {"entry_point": row["entry_point"], "prompt": row["prompt"], "test": row["test"]}
            yield row["task_id"], "humaneval_completion", row["canonical_solution"], "    return 'no such value'\n", tests
            continue
        setup = "\n".join([row.get("test_setup_code", ""), *row.get("test_imports", [])])
        tests = {"asserts": [*row["test_list"], *row.get("challenge_test_list", [])], "setup": setup}
        functions = [node.name for node in ast.parse(row["code"]).body if isinstance(node, ast.FunctionDef)]
        twin = row["code"] + "".join(f"\ndef {function}(*a, **k):\n    return 'no such value'" for function in functions)
        yield row["task_id"], "instruct_function", f"```python\n{row['code']}\n```", f"```python\n{twin}\n```", tests


@pytest.mark.parametrize("name", ["humaneval", "mbpp", "mbpp_sanitized"])
def test_references_and_twins(judge, published, name):
    path = published / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"no {path.name} among the published data")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    failed = []
    for task_id, style, right, wrong, tests in tasks(name, rows):
        made = judge.judge(CodeTask(style, right, tests))
        twin = judge.judge(CodeTask(style, wrong, tests))
        if (made.status.value, twin.status.value) != ("ok", "wrong"):
            failed.append((task_id, made.status.value, made.reason, twin.status.value, twin.reason))
    assert not failed


def test_the_sandbox_is_closed_after_use():
    try:
        with Sandbox() as sandbox:
            pid = sandbox.pid
    except SandboxFault as fault:
        pytest.skip(str(fault))
    assert not os.path.exists(f"/proc/{pid}")
