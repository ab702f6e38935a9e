"""Whose time it was: a program is held to its limit, and neither a loaded machine nor a slow grader counts towards it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
from sandbox_tools import MODES

from akl_dist.contract.records import Status
from akl_dist.sandbox import client, clock
from akl_dist.sandbox.client import Ended, Sandbox, SandboxFault
from akl_dist.sandbox.clock import STARVED, STRETCH, Clock, Usage, usage
from akl_dist.sandbox.limits import Limits
from akl_dist.sandbox.session import Session
from akl_dist.verify import code
from akl_dist.verify.code import CodeJudge, CodeSettings, CodeTask

needs_isolation = pytest.mark.skipif(not MODES, reason="this machine allows no isolation")
LIMITS = Limits(wall_s=0.5, cpu_s=5)
ADD = {"entry_point": "add", "asserts": ["assert add(2, 3) == 5"]}


def test_used_by_hand():
    assert Usage(10.0, 0.0, 0.1).used_s() == 10.0, "asleep: all of it is its own"
    assert Usage(10.0, 7.0, 3.0).used_s() == 3.0, "it was ready throughout, and got 3 s"
    assert Usage(10.0, 0.0, 1.0).used_s(paused_s=4.0) == 6.0
    assert Usage(10.0, 30.0, 9.5).used_s() == 9.5, "four threads that keep one another waiting"
    assert Usage(10.0, 30.0, 19.0).used_s() == 10.0
    assert Usage().used_s(paused_s=1.0) == 0.0


@pytest.fixture
def made_of(monkeypatch):
    """A clock with limit 1 s on a hand-moved time, and what its program has used at each look."""
    now = [100.0]
    uses = []
    monkeypatch.setattr(clock.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(clock, "usage", lambda proc: Usage(uses[0], 0.0, 0.0) if len(uses) == 1 else Usage(uses.pop(0), 0.0, 0.0))

    def move(seconds):
        now[0] += seconds

    return Clock(1.0, "/proc"), move, uses


def test_limit_is_looked_at_again_when_it_may_have_passed(made_of):
    one, move, uses = made_of
    assert one.next_look_s() == 1.0 and one.passed() == ""
    uses += [0.25, 0.999, 1.0]
    move(1.0)
    assert one.passed() == "" and one.next_look_s() == pytest.approx(0.75)
    move(0.75)
    assert one.passed() == "" and one.next_look_s() == pytest.approx(clock.STEP_S)
    move(0.02)
    assert one.passed() == "wall"


def test_starved_at_the_end_of_patience(made_of):
    one, move, uses = made_of
    uses += [0.1]
    for _ in range(100):
        move(max(one.next_look_s(), 1e-9))
        if cause := one.passed():
            break
    assert cause == STARVED and clock.time.monotonic() == pytest.approx(100.0 + STRETCH, rel=1e-6)


def test_a_paused_clock_stands_still(made_of):
    one, move, uses = made_of
    uses += [50.0]
    move(0.5)
    one.pause()
    move(60.0)
    assert one.next_look_s() is None and one.passed() == "" and one.paused_s == 60.0
    one.pause()  # twice is once
    one.resume()
    move(0.4)
    assert one.passed() == "" and one.next_look_s() == pytest.approx(0.1)
    move(0.1)
    assert one.passed() == "", "50 s since it began, less 60: the pause is not its own"
    one.resume()
    uses[:] = [61.0]
    move(1.0)
    assert one.passed() == "wall"


def _task(folder, *, children=(), state="S", ticks=(0, 0, 0, 0), began=0, delay_ns=None):
    task = folder / "task" / folder.name
    task.mkdir(parents=True)
    fields = [state, "1", *["0"] * 9, *map(str, ticks), *["0"] * 4, str(began), "0"]
    for place in (folder, task):
        (place / "stat").write_text(f"{folder.name} (a ) name) {' '.join(fields)}\n")
    (task / "children").write_text(" ".join(children))
    if delay_ns is not None:
        (task / "schedstat").write_text(f"123 {delay_ns} 4\n")


def test_usage_is_read_from_the_tree_below_init(tmp_path, monkeypatch):
    """supervisor 5 - init 6 - program 7 (began 3 s ago) - child 8; process 9 is an orphan of the program."""
    hz = clock.TICKS
    monkeypatch.setattr(clock.time, "clock_gettime", lambda which: 50.0)
    _task(tmp_path / "5", children=("6",))
    _task(tmp_path / "6", children=("7", "9"), ticks=(900 * hz,) * 4, delay_ns=10**12)
    _task(tmp_path / "7", children=("8",), ticks=(hz // 2, hz // 4, 0, hz // 4), began=47 * hz, delay_ns=250_000_000)
    _task(tmp_path / "8", ticks=(hz // 10, 0, 0, 0), began=49 * hz, delay_ns=500_000_000)
    _task(tmp_path / "9", ticks=(0, hz // 10, 0, 0), began=49 * hz)
    found = usage(str(tmp_path), "5")
    assert (found.lifetime_s, found.waited_s, found.cpu_s) == (3.0, 0.5, pytest.approx(1.2)), "the longest wait, all processor time"
    assert usage(str(tmp_path), "9") == Usage(), "no init yet"
    assert usage(str(tmp_path), "7") == Usage(), "no program yet"


@pytest.mark.parametrize(("state", "waited"), [("R", 2.5), ("S", 0.0)])
def test_without_figures_of_the_kernel_the_state_says_whether_it_waits(tmp_path, monkeypatch, state, waited):
    monkeypatch.setattr(clock.time, "clock_gettime", lambda which: 50.0)
    _task(tmp_path / "5", children=("6",))
    _task(tmp_path / "6", children=("7",))
    _task(tmp_path / "7", state=state, ticks=(clock.TICKS // 2, 0, 0, 0), began=47 * clock.TICKS)
    assert usage(str(tmp_path), "5").waited_s == waited


# --- with programs ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox() as made:
        yield made


@pytest.fixture(scope="module")
def judge():
    made = CodeJudge(CodeSettings(limits=LIMITS, total_s=1.0))
    yield made
    made.close()


def judged(judge, source, tests=ADD, style="instruct_function"):
    return judge.judge(CodeTask(style, f"```python\n{source}\n```", tests))


@contextmanager
def crowded(pid, rivals=3):
    """One processor for a supervisor, what it starts, and ``rivals`` endless loops, each a scheduling group of its own."""
    cpu = min(os.sched_getaffinity(0))
    loop = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\nwhile True: pass"
    busy = [subprocess.Popen([sys.executable, "-S", "-c", loop, str(cpu)], stdout=subprocess.PIPE, start_new_session=True)
            for _ in range(rivals)]
    allowed = os.sched_getaffinity(pid)
    try:
        for one in busy:
            one.stdout.readline()
        os.sched_setaffinity(pid, {cpu})
        yield
    finally:
        os.sched_setaffinity(pid, allowed)
        for one in busy:
            one.kill()
            one.wait(timeout=10)
            one.stdout.close()


BUSY_FOR = "import time\nwhile time.process_time() < {}: pass\n"


@needs_isolation
def test_a_right_program_on_a_loaded_machine_is_right(sandbox, judge):
    """0.3 s of processor time within a limit of 0.5 s; three others share its processor, so that they take longer than that."""
    with crowded(sandbox.pid):
        finished = sandbox.run_script(BUSY_FOR.format(0.3) + "print(5)", limits=LIMITS)
    assert finished.ended.limit == "" and finished.stdout == b"5\n"
    assert finished.ended.seconds > LIMITS.wall_s > finished.ended.used_s
    with crowded(judge._programs.pid):
        assert judged(judge, f"{BUSY_FOR.format(0.3)}def add(a, b): return a + b").status is Status.OK


@needs_isolation
@pytest.mark.parametrize("source", ["while True: pass", "import os\nos.fork()\nos.fork()\nwhile True: pass",
                                    "import time\ntime.sleep(30)"])
def test_a_wrong_one_is_held_to_its_limit_all_the_same(sandbox, source):
    with crowded(sandbox.pid, rivals=1):
        ended = sandbox.run_script(source, limits=LIMITS).ended
    assert ended.limit == "time_limit" and LIMITS.wall_s <= ended.seconds < STRETCH * LIMITS.wall_s


BURSTS = """
import os, time
start, turn = time.monotonic(), 0
for _ in range(29):
    if os.fork() == 0: break
while True:
    turn += 1
    time.sleep(max(0, start + turn * 0.01 - time.monotonic()))
    until = time.perf_counter() + 0.00004
    while time.perf_counter() < until: pass
"""


def test_processes_that_keep_one_another_waiting_are_not_starved(judge):
    """Thirty that sleep and wake at once wait for one another longer, taken together, than time passes."""
    made = judge.judge(CodeTask("stdin_program", f"```python\n{BURSTS}```", {"cases": [{"input": "", "output": "1"}]}))
    assert (made.status, made.reason) == (Status.WRONG, "time_limit")


@needs_isolation
def test_a_program_that_sleeps_longer_than_its_limit_is_wrong(judge):
    made = judged(judge, "import time\ndef add(a, b):\n    time.sleep(0.7)\n    return a + b")
    assert (made.status, made.reason) == (Status.WRONG, "time_limit")
    assert judged(judge, "import time\ndef add(a, b):\n    time.sleep(0.2)\n    return a + b").status is Status.OK


@needs_isolation
def test_a_stopped_supervisor_is_not_the_programs_fault(judge):
    pid = judge._programs.pid
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(1.0, os.kill, (pid, signal.SIGCONT))
    timer.start()
    try:
        assert judged(judge, "def add(a, b): return a + b").status is Status.OK
    finally:
        timer.join()


@needs_isolation
def test_the_clock_stands_still_between_a_reply_and_the_next_request(sandbox):
    session = Session(sandbox, "program_stage", LIMITS)
    load = {"kind": "load", "parts": ["import time\ndef f(s):\n    time.sleep(s)\n    return 7"]}
    ask = {"kind": "evaluate", "expression": "f(0.1)", "may_hold": False}
    assert "value" in session.ask(load)
    for _ in range(2):
        time.sleep(0.4)
        assert session.ask(ask)["value"] == ["i", "0x7"]
    assert session.ask(ask | {"expression": "f(2)"}) is None
    ended = session.end()
    assert ended.limit == "time_limit" and ended.seconds > 0.8 + LIMITS.wall_s


@needs_isolation
def test_slow_test_code_does_not_use_up_the_programs_limit(judge):
    tests = {"entry_point": "f", "prompt": "def f(x):\n",
             "test": "import time\ndef check(candidate):\n    time.sleep(0.8)\n    assert candidate(1) == 2\n"}
    assert judged(judge, "def f(x): return x + 1", tests).status is Status.OK
    endless = judged(judge, "def f(x):\n    while True: pass", tests)
    assert (endless.status, endless.reason) == (Status.WRONG, "time_limit")


@needs_isolation
def test_total_of_a_programs_cases_counts_what_it_used(judge):
    """Five cases of 0.3 s exceed the total of 1 s; the time between them would not."""
    cases = {"cases": [{"input": "", "output": "5"}] * 5}
    made = judged(judge, "import time\ntime.sleep(0.3)\nprint(5)", cases, "stdin_program")
    assert (made.status, made.reason) == (Status.WRONG, "time_limit")
    assert judged(judge, "print(5)", cases, "stdin_program").status is Status.OK


@needs_isolation
@pytest.mark.parametrize("style", ["instruct_function", "stdin_program"])
def test_a_starved_program_has_no_verdict(judge, monkeypatch, style):
    wait = judge._programs.wait
    monkeypatch.setattr(judge._programs, "wait", lambda limits, **options: replace(wait(limits, **options), limit=STARVED))
    tests = ADD if style == "instruct_function" else {"cases": [{"input": "", "output": "5"}]}
    source = "import os\nos._exit(0)"  # a session that ends where an answer was due
    made = judged(judge, source, tests, style)
    assert made.status is Status.TIMEOUT and made.correct is None and STARVED in made.reason
    with pytest.raises(code._Overrun):
        code.ending(Ended(None, STARVED, 1.0), "")


@needs_isolation
def test_a_supervisor_that_never_answers_is_a_fault(monkeypatch):
    """It is stopped for good: its user gives up after its patience, with no verdict, and kills it."""
    from akl_dist.sandbox import session as module

    monkeypatch.setattr(module, "patience_s", lambda limits: 0.5)
    with Sandbox() as fresh:
        session = Session(fresh, "program_stage", LIMITS)
        os.kill(fresh.pid, signal.SIGSTOP)
        with pytest.raises(SandboxFault, match="no answer"):
            for _ in range(3):  # the program itself may have been started before the stop, and answer
                session.ask({"kind": "evaluate", "expression": "__import__('time').sleep(9)", "may_hold": False})
        with pytest.raises(SandboxFault):
            session.end()
    monkeypatch.setattr(client, "patience_s", lambda limits: 0.5)
    with Sandbox() as fresh:
        os.kill(fresh.pid, signal.SIGSTOP)
        with pytest.raises(SandboxFault, match="no answer"):
            fresh.run_script("print(1)", limits=LIMITS)
