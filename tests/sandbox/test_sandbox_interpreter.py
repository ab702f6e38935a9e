"""The persistent interpreter: names that live on, limits of each cell, and a protocol that cells cannot confuse."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
from sandbox_tools import MODES, descendants, gone

from akl_dist.sandbox.interpreter import CellResult, Interpreter
from akl_dist.sandbox.limits import MIB, Limits

LIMITS = Limits(wall_s=5.0, cpu_s=5, memory_bytes=256 * MIB, processes=16, output_bytes=64 << 10)
pytestmark = pytest.mark.skipif(not MODES, reason="this machine allows no isolation")


@pytest.fixture(scope="module")
def shared():
    with Interpreter(LIMITS) as made:
        yield made


@pytest.fixture
def fresh():
    with Interpreter(replace(LIMITS, wall_s=1.0)) as made:
        yield made


@pytest.mark.parametrize(("cell", "output", "error"), [
    ("print(6 * 7)", "42\n", ""),
    ("6 * 7", "42\n", ""),
    ("x = 6\n'a\\n' * 2", "'a\\na\\n'\n", ""),
    ("x = 6", "", ""),
    ("None", "", ""),
    ("# nothing", "", ""),
    ("", "", ""),
    ("print('before')\n1 / 0", "before\n", "ZeroDivisionError: division by zero"),
    ("f(", "", "SyntaxError: '(' was never closed (main.py, line 1)"),
    ("a\0b", "", "SyntaxError: source code string cannot contain null bytes"),
    ("raise ValueError('one\\ntwo')", "", "ValueError: one\ntwo"),
    ("raise KeyboardInterrupt", "", "KeyboardInterrupt"),
    ("import sys\nsys.exit()", "", ""),
    ("import sys\nsys.exit('words')", "", "SystemExit: words"),
    ("import sys\nprint('aside', file=sys.stderr)", "", ""),
    ("input()", "", "EOFError: EOF when reading a line"),
    ("(" * 5000 + ")" * 5000, "", "SyntaxError: too many nested parentheses (main.py, line 1)"),
    ("__name__, __file__", "('__main__', '/box/main.py')\n", ""),
    ("import sys\n[m for m in sys.modules if 'akl' in m], sys.path[0]", "([], '/box')\n", ""),
    ("class A:\n    pass\nimport pickle\ntype(pickle.loads(pickle.dumps(A()))) is A", "True\n", ""),
    ("import os\nos.write(1, b'raw\\n')\nNone", "raw\n", ""),
    ("class E(Exception):\n    def __str__(self): raise self\nraise E", "", "an exception"),
])
def test_cells(shared, cell, output, error):
    result = shared.run(cell)
    if error.startswith("SyntaxError") and result.error != error:  # its words differ between versions of Python
        error = result.error if result.error.startswith(("SyntaxError", "ValueError", "MemoryError")) else error
    assert result == CellResult(output.encode(), error, None)


def test_names_live_on_and_belong_to_one_interpreter(shared):
    shared.run("import math\nsecret = 41\ndef next_one(n):\n    return n + 1")
    shared.run("1 / 0")
    assert shared.run("next_one(secret), math.floor(1.5)").output == b"(42, 1)\n"
    shared.run("open('note', 'w').write('seen')")
    assert shared.run("open('note').read()").output == b"'seen'\n"
    with Interpreter(LIMITS) as other:
        assert other.run("secret").error == "NameError: name 'secret' is not defined"
        assert other.run("import os\nos.listdir('.')").output == b"[]\n"
        assert "FileNotFoundError" in other.run(f"open('/proc/{shared.pid}/environ')").error
        assert other.run("import os\n[p for p in os.listdir('/proc') if p.isdigit() and int(p) > 9]").output in (b"[]\n", b"")


def test_a_cell_that_overruns_ends_its_interpreter(fresh):
    fresh.run("x = 1")
    start = time.monotonic()
    result = fresh.run("print('started')\nimport time\nwhile True: time.sleep(0.01)")
    assert 0.9 < time.monotonic() - start < 4.0
    assert result.output == b"started\n" and result.ended is not None and result.ended.limit == "time_limit"
    assert descendants(fresh.pid) == []
    assert fresh.run("x").error == "NameError: name 'x' is not defined"  # a fresh one


def test_many_cells_may_take_longer_than_one(fresh):
    for _ in range(3):
        assert fresh.run("import time\ntime.sleep(0.5)").ended is None


@pytest.mark.parametrize(("cell", "limit"), [
    ("while True: pass", "time_limit"),
    ("import os, time\nwhile True:\n    os.write(1, b'.')\n    time.sleep(0.001)", "time_limit"),
    ("while True: print('x' * 1000)", "output"),
    ("import signal, time\nfor n in set(range(1, 32)) - {9, 19}: signal.signal(n, signal.SIG_IGN)\ntime.sleep(99)", "time_limit"),
    ("import os\nos._exit(3)", ""),
    ("import os\nos.kill(os.getpid(), 9)", ""),
    ("import os\nos.closerange(3, 64)", ""),
    ("import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'\\0\\0\\0\\2{}')\n    except OSError: pass", ""),
    ("import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'\\xff' * 8)\n    except OSError: pass", "output"),
])
def test_hostile_cells_end_their_interpreter_alone(fresh, cell, limit):
    result = fresh.run(cell)
    assert result.ended is not None and result.ended.limit == limit and len(result.output) <= LIMITS.output_bytes
    assert descendants(fresh.pid) == []
    assert fresh.run("6 * 7") == CellResult(b"42\n", "", None)


def test_children_of_a_cell_do_not_answer_for_it(fresh):
    assert fresh.run("import os\npid = os.fork()\nprint('both')\nif pid: _ = os.waitpid(pid, 0)").output == b"both\nboth\n"
    assert fresh.run("1").output == b"1\n"
    late = "import os, time\nif os.fork() == 0:\n    time.sleep(0.3)\n    print('late')\n    raise SystemExit\n"
    assert fresh.run(late).output == b""
    time.sleep(0.5)
    assert fresh.run("2").output == b"late\n2\n"  # it is this interpreter's own text, and no reply
    assert fresh.run("3").output == b"3\n"
    assert fresh.run("import threading\nthreading.Thread(target=lambda: print('thread')).start()").ended is None


@pytest.mark.parametrize("cell", [
    "import os\nwhile True:\n    os.fork()",
    "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(999)\n    os._exit(0)",
])
def test_what_cells_start_ends_with_the_interpreter(cell):
    with Interpreter(replace(LIMITS, wall_s=2.0)) as interpreter:
        interpreter.run(cell)
        pid = interpreter.pid
        below = descendants(pid)
    assert gone(pid) and all(gone(child) for child in below)


def test_closing_leaves_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with Interpreter(LIMITS) as interpreter:
            assert interpreter.run("1").output == b"1\n"
            interpreter.run("import os\nos._exit(0)")
            interpreter.run("1")
    assert len(os.listdir("/proc/self/fd")) <= before + 1
