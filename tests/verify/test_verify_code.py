"""Verdicts on programs: the cases, every style of tests, and the attacks that must fail. One sandbox for the whole module."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from code_programs import ARGUMENT, ATTACKS, RIGHT, SECRET

from akl_dist.contract.records import Status
from akl_dist.sandbox.client import Sandbox, SandboxFault
from akl_dist.sandbox.limits import MIB, Limits
from akl_dist.sandbox.session import Session
from akl_dist.verify import code
from akl_dist.verify.code import CodeJudge, CodeSettings, CodeTask, gold_text, pool_options
from akl_dist.verify.code_rows import CodeJudges
from akl_dist.verify.grader import GraderPool, Item

CASES = [json.loads(line) for line in (Path(__file__).parent / "data" / "code_cases.jsonl").read_text().splitlines()]
LIMITS = Limits(wall_s=1.0, cpu_s=2, memory_bytes=512 * MIB)


def isolated() -> bool:
    try:
        Sandbox().close()
    except SandboxFault:
        return False
    return True


pytestmark = pytest.mark.skipif(not isolated(), reason="this machine allows no isolation")


@pytest.fixture(scope="module")
def judge():
    made = CodeJudge(CodeSettings(limits=LIMITS))
    yield made
    made.close()


def verdict(judge, source, tests, style="instruct_function", fence=True):
    return judge.judge(CodeTask(style, f"```python\n{source}\n```" if fence else source, tests))


ADD = {"entry_point": "add", "asserts": ["assert add(2, 3) == 5", "assert add(-1, 1) == 0", "assert add(10, 20) == 30"]}
HIDDEN = {"entry_point": "f", "asserts": [f"assert f({ARGUMENT}) == {SECRET}"]}
CHECK = {
    "entry_point": "f",
    "prompt": "def f(x):\n",
    "test": f"WANTED = {SECRET}\ndef check(candidate):\n    assert candidate({ARGUMENT}) == WANTED\n",
}


@pytest.mark.parametrize("row", CASES, ids=[row["id"] for row in CASES])
def test_cases(judge, row):
    made = judge.judge(CodeTask(row["prompt_style"], row["completion"], row["tests"]))
    assert made.correct is row["expected"], (row["why"], made)


@pytest.mark.parametrize(("tests", "source"), RIGHT)
def test_right_programs_of_every_kind(judge, tests, source):
    assert verdict(judge, source, tests).status is Status.OK
    name = tests.get("entry_point") or tests["asserts"][0].split("(")[0].split()[-1]
    broken = f"{source}\nclass _Never: pass\n{name.split('(')[0]} = lambda *a, **k: _Never()"
    assert verdict(judge, broken, tests).status is Status.WRONG, "its broken twin"


@pytest.mark.parametrize("tests", [HIDDEN, CHECK], ids=["asserts", "check"])
@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_fail(judge, name, tests):
    """Every attack is wrong (a null byte is no code at all), promptly, and the next program is judged as ever."""
    made = verdict(judge, ATTACKS[name], tests)
    assert made.correct is False, made
    assert verdict(judge, f"def f(x): return {SECRET}", tests).status is Status.OK


def test_reasons(judge):
    """The words of the verdict table."""
    reasons = {
        name: verdict(judge, ATTACKS[name], HIDDEN).reason
        for name in ("endless loop", "memory bomb", "flood", "segmentation fault", "hard exit 0", "exit 0", "long reply")
    }
    assert reasons.pop("segmentation fault") == "crash: SIGSEGV"
    assert reasons.pop("hard exit 0").startswith("exit: status 0") and reasons.pop("exit 0").startswith("exit: SystemExit")
    assert reasons == {"endless loop": "time_limit", "memory bomb": "memory", "flood": "output", "long reply": "output"}


SEARCH = """
import os, sys

LOW, HIGH = {low}, {high}  # of the number, apart, so that this program does not hold what it looks for
LEFT, RIGHT = {left!r}.encode(), {right!r}.encode()  # of its digits

def pairs():
    return [(LOW.to_bytes(4, "little"), HIGH.to_bytes(4, "little")), (LEFT, RIGHT)]

def holds(data):
    for first, second in pairs():
        place = data.find(first)
        while place >= 0:
            if data[place + len(first):place + len(first) + len(second)] == second:
                return True
            place = data.find(first, place + 1)
    return False

def f(x):
    texts = [repr(dict(os.environ)).encode()]
    for folder, folders, files in os.walk("/"):
        folders[:] = [one for one in folders if os.path.join(folder, one) not in ("/usr", "/dev", "/proc", sys.base_prefix)]
        for name in files:
            try: texts.append(open(os.path.join(folder, name), "rb").read(1 << 20))
            except OSError: pass
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps.read().splitlines():
            words = line.split()
            start, end = (int(n, 16) for n in words[0].split("-"))
            if words[1][0] == "r" and "/" not in line and end - start < 1 << 25:
                try:
                    memory.seek(start)
                    texts.append(memory.read(end - start))
                except (OSError, ValueError, OverflowError): pass
    return [holds(text) for text in texts].count(True)
"""


def _search(number):
    return SEARCH.format(low=number & (1 << 30) - 1, high=number >> 30 & (1 << 30) - 1, left=str(number)[:9], right=str(number)[9:])


@pytest.mark.parametrize("tests", [HIDDEN, CHECK], ids=["asserts", "check"])
def test_nothing_in_the_sandbox_holds_an_expected_value(tests):
    """Everything a program can read is searched: memory, files, environment. The argument of its call is there (so the search
    works), the value expected of it is not."""
    if not Path("/proc/self/mem").exists():
        pytest.skip("no /proc")
    found = {}
    with Sandbox() as sandbox:
        for name, number in (("argument", ARGUMENT), ("expected", SECRET)):
            source = _search(number)
            plan = code.make_plan(CodeTask("instruct_function", "", tests), source)
            session = Session(sandbox, "program_stage", replace(LIMITS, wall_s=30.0, cpu_s=30))
            session.ask({"kind": "load", "parts": [plan.before, source, plan.after]})
            call = plan.checks[0].calls[0] if plan.checks else f"f({ARGUMENT})"
            reply = session.ask({"kind": "evaluate", "expression": call, "may_hold": False})
            session.end()
            assert reply is not None and "value" in reply, reply
            found[name] = int(reply["value"][1], 16)
    assert found["argument"] > 0 and found["expected"] == 0


def test_a_right_program_may_write_all_that_is_expected(judge):
    """Above the output limit, if what is expected is; endless output ends it all the same."""
    tests = {"cases": [{"input": "", "output": "\n".join(map(str, range(400_000)))}]}
    assert len(tests["cases"][0]["output"]) > LIMITS.output_bytes
    assert verdict(judge, "print(*range(400000), sep='\\n')", tests, "stdin_program").status is Status.OK
    assert verdict(judge, "while True: print('x' * 10 ** 6)", tests, "stdin_program").reason == "output"


@pytest.mark.parametrize("test", ["candidate(lambda x: x)", "candidate(1) == 1\n    assert candidate([object()]) == 1"])
def test_arguments_that_no_message_holds_are_the_tests_fault(judge, test):
    made = verdict(judge, "def f(x): return 1", {"entry_point": "f", "test": f"def check(candidate):\n    assert {test}\n"})
    assert made.status is Status.INVALID_GOLD and "cannot be sent" in made.reason


def test_objects_learn_nothing_of_what_is_expected(judge):
    """Comparisons with an object of the program stay here; an object that claims to equal everything is wrong."""
    always = ATTACKS["always equal"].replace("class Y:", "class Y:\n    __contains__ = __lt__ = lambda s, o: True")
    for test in ("Box() == 77", "77 in Box()", "Box().v == 77", "Box().get() == 77", "sorted(Box()) == [77]", "Box()[0] == 77",
                 "len(Box()) == 77", "Box() < 77", "Box().ok", "not Box().bad", "str(Box()) == '77'"):
        made = verdict(judge, f"{always}\nclass Box(Y): pass", {"entry_point": "Box", "asserts": [f"assert {test}"]})
        assert made.status is Status.WRONG, test


def test_states_that_are_nobodys_answer(judge):
    def status(tests, source="def f(x): return 1", style="instruct_function"):
        return verdict(judge, source, tests, style).status

    assert status({"entry_point": "f", "asserts": []}) is Status.INVALID_GOLD
    assert status({"entry_point": "f", "asserts": ["assert f(1 =="]}) is Status.INVALID_GOLD
    assert status({"entry_point": "f", "asserts": ["assert 1 == 1"]}) is Status.INVALID_GOLD
    assert status({"entry_point": "f", "test": "def check(candidate):\n    pass"}) is Status.INVALID_GOLD
    assert (
        status({"entry_point": "f", "test": "import nothing_here\ndef check(candidate):\n    assert candidate(1) == 1"})
        is Status.INVALID_GOLD
    )
    assert status({"cases": []}, style="stdin_program") is Status.INVALID_GOLD
    assert status({"cases": [{"input": "", "output": 5}]}, style="stdin_program") is Status.INVALID_GOLD
    assert status(HIDDEN, style="unknown") is Status.INVALID_GOLD
    assert status({"entry_point": "f", "test": "def check(candidate):\n    candidate(1)\n    while True: pass"}) is Status.TIMEOUT
    assert status(HIDDEN, source="") is Status.NO_ANSWER
    truncated = CodeTask("instruct_function", "```python\ndef f(x): return 1", HIDDEN, truncated=True)
    assert judge.judge(truncated).status is Status.NO_ANSWER and judge.judge(truncated).reason == "truncated"
    thinking = CodeTask("instruct_function", "```python\ndef f(x): return 1\n```", HIDDEN, think_open=True)
    assert judge.judge(thinking).status is Status.NO_ANSWER


def test_a_broken_sandbox_is_an_error_and_mends_itself():
    made = CodeJudge(CodeSettings(limits=LIMITS))
    try:
        os.kill(made._programs.pid, 9)
        assert verdict(made, "def add(a, b): return a + b", ADD).status is Status.ERROR
        assert verdict(made, "def add(a, b): return a + b", ADD).status is Status.OK
    finally:
        made.close()


def test_in_the_grader_pool():
    """The pool starts, proves, judges right and wrong programs in order, and leaves nothing."""
    settings = CodeSettings(limits=LIMITS)
    gold = gold_text("instruct_function", ADD)
    right, wrong = "```python\ndef add(a, b): return a + b\n```", "```python\ndef add(a, b): return a * b\n```"
    with GraderPool(num_workers=1, **pool_options(settings)) as pool:
        made = pool.judge_many([Item(gold, text, False) for text in (right, wrong, "no code", right)] + [Item("{", right, False)])
    assert [v.status.value for v in made] == ["ok", "wrong", "no_answer", "ok", "invalid_gold"]
    assert made[0].extracted == "def add(a, b): return a + b\n" and right[slice(*made[0].span)] == made[0].extracted


def test_limits_are_nested():
    settings = CodeSettings()
    assert settings.limits.wall_s < settings.total_s < settings.timeout_s
    assert CodeSettings.from_json(settings.to_json()) == settings


def test_rows():
    judges = CodeJudges(workers=1, settings=CodeSettings(limits=LIMITS))
    try:
        rows = [*CASES[:3], {"id": "x"}, {**CASES[0], "tests": "none"}, CASES[5]]
        made = judges.judge(rows)
    finally:
        judges.close()
    assert [v.status.value for v in made] == ["ok", "ok", "ok", "error", "error", "no_answer"]


def test_the_example_of_the_documentation():
    page = (Path(__file__).resolve().parents[2] / "docs" / "sandbox.md").read_text()
    example = page.split("```python\nfrom", 1)[1].split("\n```\n", 1)[0]
    lines: list[str] = []
    exec("from" + example, {"print": lambda value: lines.append(repr(value))})  # noqa: S102 (our own page)
    assert len(lines) == 1 and "Status.OK" in lines[0]
