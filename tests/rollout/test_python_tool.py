"""The Python tool in its environment processes: what comes back, hostile programs, and that rollouts see nothing of each other."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from akl_dist.contract.errors import UserError
from akl_dist.rollout.environment import Environment, Step, Task
from akl_dist.rollout.environment_pool import EnvironmentPool
from akl_dist.rollout.python_tool import NOTHING, RESTARTED, PythonTool
from akl_dist.sandbox.client import Sandbox, SandboxFault

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sandbox"))
from sandbox_tools import MODES, descendants, gone

TASK = Task("p", "t", "g", "", 0, 0)
BOTH = ("stateless", "persistent")
pytestmark = pytest.mark.skipif(not MODES, reason="this machine allows no isolation")


def tool_pool(interpreter="stateless", num_workers=1, timeout_s=20.0, **params):
    return EnvironmentPool(environment="python", params={"interpreter": interpreter, "program_s": 2.0, **params},
                           num_workers=num_workers, timeout_s=timeout_s)


@pytest.fixture(scope="module", params=BOTH)
def pool(request):
    with tool_pool(request.param, max_output_bytes=200, memory_mib=256) as made:
        made.interpreter = request.param
        yield made


def answer(pool, key):
    """The next reply, which must be this rollout's."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if got := pool.poll(1.0):
            ((name, reply),) = got
            assert name == key
            return reply
    raise AssertionError("no reply")


def turn(program):
    return f"I compute.\n```python\n{program}\n```\n"


def run(pool, key, program):
    pool.step(key, turn(program))
    step = answer(pool, key)
    assert isinstance(step, Step) and step.call and not step.void and step.score is None, step
    return step


@pytest.fixture
def key(pool, request):
    pool.open(request.node.name, TASK)
    yield request.node.name
    pool.close_one(request.node.name)


@pytest.mark.parametrize(("program", "observation", "failed"), [
    ("print(6 * 7)", "42", False),
    ("x = 6\nx * 7", "42", False),
    ("print('a')\nprint('b')\n'c'", "a\nb\n'c'", False),
    ("x = 1", NOTHING, False),
    ("", NOTHING, False),
    ("None", NOTHING, False),
    ("print('before')\n1 / 0", "before\nZeroDivisionError: division by zero", True),
    ("raise ValueError('one line\\nand another')", "ValueError: one line and another", True),
    ("import sys\nsys.exit()", NOTHING, False),
    ("import sys\nprint('aside', file=sys.stderr)", NOTHING, False),
    ("import sys\nsys.exit(4)", "SystemExit: 4", True),
    ("import numpy, sympy\nint(numpy.ones(3).sum()), sympy.factor('x**2-1')", "(3, (x - 1)*(x + 1))", False),
    ("print('é🙂')", "é🙂", False),
    ("import os\nos.write(1, b'\\xff')\nNone", "\ufffd", False),
    ("input()", "EOFError: EOF when reading a line", True),
    ("import socket\nsocket.create_connection(('127.0.0.1', 80), 1)", "OSError: [Errno 101] Network is unreachable", True),
    ("if __name__ == '__main__': print('main')", "main", False),
])
def test_what_comes_back(pool, key, program, observation, failed):
    assert run(pool, key, program) == Step(observation, call=True, failed=failed)


def test_syntax_errors(pool, key):
    step = run(pool, key, "def f(:")
    assert step.failed and step.observation == "SyntaxError: invalid syntax (main.py, line 1)"


def test_a_long_output_loses_its_middle(pool, key):
    step = run(pool, key, "print('a' * 500)\nprint('b' * 500)\n1 / 0")
    head, cut, tail, error = step.observation.split("\n")
    assert set(head) == {"a"} and set(tail) == {"b"} and error == "ZeroDivisionError: division by zero"
    assert cut == f"[... {1002 - len(head) - len(tail) - 1} bytes cut out ...]" and len(head) + len(tail) < 200


@pytest.mark.parametrize(("program", "words"), [
    ("while True: pass", "TimeoutError: the program ran longer than 2 s"),
    ("import os, time\nprint('x', flush=True)\nos.setsid() if os.getpid() != os.getsid(0) else 0\ntime.sleep(99)",
     "TimeoutError: the program ran longer than 2 s"),
    ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "TimeoutError: the program ran longer than 2 s"),
    ("x = []\nwhile True: x.append(bytearray(1 << 20))", "MemoryError"),
    ("x = [0] * 10**10", "MemoryError"),
    ("while True: print('x' * 1000)", "OutputError: the program wrote more than 1024 KiB"),
    ("import os\nos._exit(3)", "SystemExit: 3"),
    ("import os\nos.kill(os.getpid(), 11)", "SystemExit: SIGSEGV"),
])
def test_hostile_programs_do_not_outlive_their_step(pool, key, program, words):
    worker = pool.pids()[0]
    run(pool, key, "1")  # the interpreter is there
    before = set(descendants(worker))
    start = time.monotonic()
    step = run(pool, key, program)
    assert step.failed and words in step.observation and time.monotonic() - start < 15
    left = set(descendants(worker)) - before
    assert all(gone(pid) for pid in left)
    lost = step.observation.endswith(RESTARTED)
    assert lost == (pool.interpreter == "persistent" and words != "MemoryError") or words == "MemoryError"
    assert run(pool, key, "6 * 7").observation == "42"
    assert pool.counters()["started"] == 1 and pool.counters()["faults"] == 0


def test_a_daemon_ends_with_its_step_or_its_rollout(pool):
    worker = pool.pids()[0]
    pool.open("daemon", TASK)
    before = set(descendants(worker))
    assert not run(pool, "daemon", "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(999)").failed
    started = set(descendants(worker)) - before
    pool.close_one("daemon")
    pool.poll(0.5)
    assert all(gone(pid) for pid in started)


def test_what_calls_nothing_ends_the_response(pool, key):
    for text, void in (("\\boxed{3}", False), ("I am not sure.", True), ("```\nprint(1)\n```", True)):
        pool.step(key, text)
        assert answer(pool, key) == Step(None, void=void)


def test_state():
    """Names live on in a persistent interpreter alone, and no rollout sees another's."""
    for interpreter in BOTH:
        with tool_pool(interpreter) as pool:
            for key in "ab":
                pool.open(key, TASK)
            run(pool, "a", "secret = 41\nopen('note', 'w').write('mine')\nimport math\nmath.pi = 3")
            kept = run(pool, "a", "secret + 1")
            assert kept.observation == ("42" if interpreter == "persistent" else "NameError: name 'secret' is not defined")
            assert run(pool, "b", "secret").observation == "NameError: name 'secret' is not defined"
            assert run(pool, "b", "import math, os\nos.listdir('.'), math.pi").observation.startswith("([], 3.14")
            seen = run(pool, "b", "import os\n[p for p in os.listdir('/proc') if p.isdigit() and int(p) > 9]")
            assert seen.observation in ("[]", "FileNotFoundError: [Errno 2] No such file or directory: '/proc'")
            assert "HOME" in run(pool, "b", "import os\nsorted(os.environ)").observation
            pool.close_one("a")
            pool.open("a", TASK)  # the same key again is another rollout
            assert run(pool, "a", "secret").failed


def test_hermes_calls():
    with tool_pool(call="hermes") as pool:
        pool.open("a", TASK)
        for text, step in (
            ('<tool_call>{"name": "python", "arguments": {"code": "6*7"}}</tool_call>', Step("42", call=True)),
            (turn("print(1)"), Step(None)),
        ):
            pool.step("a", text)
            assert answer(pool, "a") == step
        pool.step("a", "<tool_call>{</tool_call>")
        step = answer(pool, "a")
        assert step.call and step.failed and "no JSON" in step.observation


def test_no_more_interpreters_than_allowed():
    with tool_pool("persistent", max_interpreters=1) as pool:
        for key in "ab":
            pool.open(key, TASK)
        assert run(pool, "a", "1").observation == "1"
        refused = run(pool, "b", "1")
        assert refused.failed and "no interpreter is free" in refused.observation
        pool.close_one("a")
        assert run(pool, "b", "1").observation == "1"


def test_a_killed_process_takes_its_programs_along():
    """The step's limit is shorter than the program's: the pool ends the process, and the sandbox ends with it."""
    with tool_pool("persistent", timeout_s=1.5, program_s=60.0) as pool:
        pool.open("a", TASK)
        run(pool, "a", "1")
        below = descendants(pool.pids()[0])
        assert len(below) >= 2
        pool.step("a", turn("while True: pass"))
        reply = answer(pool, "a")
        assert "no reply within 1.5 s" in reply.reason
        assert all(gone(pid, within_s=15) for pid in below)


@pytest.mark.parametrize("interpreter", BOTH)
def test_nothing_is_left_of_many_rollouts(interpreter):
    count = 200 if interpreter == "stateless" else 20
    with tool_pool(interpreter) as pool:
        (worker,) = pool.pids()
        processes = len(descendants(worker))
        descriptors = len(os.listdir(f"/proc/{worker}/fd"))
        for index in range(count):
            pool.open(f"r{index}", TASK)
            if index % 10 == 0:
                assert run(pool, f"r{index}", "6 * 7").observation == "42"
            pool.close_one(f"r{index}")
        pool.open("last", TASK)
        run(pool, "last", "1")
        pool.close_one("last")
        pool.poll(0.3)
        assert len(descendants(worker)) == processes
        assert len(os.listdir(f"/proc/{worker}/fd")) == descriptors


def test_it_is_an_environment_and_says_what_is_wrong_with_its_parameters():
    with pytest.raises(UserError, match=r"python, interpreter|rollout\.tools\.interpreter"):
        PythonTool(interpreter="jupyter")
    with pytest.raises(UserError, match="program_s"):
        PythonTool(program_s=0)
    with pytest.raises(UserError, match=r"rollout\.tools\.call=?.*fenced or hermes"), tool_pool(call="xml"):
        pass
    assert all(hasattr(PythonTool, name) for name in ("reset", "step", "close")) and issubclass(PythonTool, Environment)


def test_no_isolation_is_refused(monkeypatch):
    """Not even tried: the tool refuses where the sandbox refuses, unless that is waived."""
    from akl_dist.rollout import python_tool

    asked = []

    def refuse(*, allow_unsandboxed):
        asked.append(allow_unsandboxed)
        if not allow_unsandboxed:
            raise SandboxFault("sandbox", got="no isolation", expected="isolation", remedy="allow_unsandboxed", stage="verify")
        return Sandbox()

    monkeypatch.setattr(python_tool, "Sandbox", refuse)
    monkeypatch.setattr(python_tool, "workshop", lambda allow: python_tool.Workshop(allow_unsandboxed=allow))
    with pytest.raises(SandboxFault, match="allow_unsandboxed"):
        PythonTool()
    tool = PythonTool(allow_unsandboxed=True)
    tool._workshop.close()
    assert asked == [False, True]


def test_a_box_in_reasoning_that_the_template_opened_is_a_void_turn(pool):
    for key, task in (("open", replace(TASK, think_open=True)), ("plain", TASK)):
        pool.open(key, task)
        pool.step(key, r"it may be \boxed{4}")
        assert answer(pool, key) == Step(None, void=task.think_open)
        pool.close_one(key)
