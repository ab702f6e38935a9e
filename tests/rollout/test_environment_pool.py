"""The pool of environment processes: order, limits, faults, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from akl_dist.config.schema import Config, ToolsConfig
from akl_dist.contract.errors import RunError, UserError
from akl_dist.contract.fences import blocks
from akl_dist.rollout.environment import Step, Task
from akl_dist.rollout.environment_pool import EnvironmentPool, Fault
from akl_dist.rollout.tools import check_environment

ROOT = Path(__file__).resolve().parents[2]


def task(text="t", index=0):
    return Task("p", text, "g", "", index, 0)


def fake_pool(**options):
    given = {"environment": "environment_fakes:Obedient", "params": {}, "num_workers": 1, "timeout_s": 20.0} | options
    return EnvironmentPool(**given)


def replies(pool, count, within_s=20.0):
    """The next ``count`` replies."""
    got, deadline = [], time.monotonic() + within_s
    while len(got) < count:
        assert time.monotonic() < deadline, f"only {got}"
        got += pool.poll(1.0)
    assert len(got) == count
    return got


def ask(pool, key, turn):
    pool.step(key, turn)
    ((name, reply),) = replies(pool, 1)
    assert name == key
    return reply


def gone(pid, within_s=5.0):
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not Path(f"/proc/{pid}").exists():
            return True
        time.sleep(0.02)
    return False


def test_conversations():
    with fake_pool(params={"greeting": "hi"}, num_workers=2) as pool:
        for index in range(4):
            pool.open(f"r{index}", task(index=index))
        for turn in ("a", "failed b", "void c"):
            for index in range(4):
                pool.step(f"r{index}", turn)
        got = replies(pool, 12)
        for index in range(4):  # of one rollout in order; each has a state of its own
            assert [reply.observation for key, reply in got if key == f"r{index}"] == [
                f"hi p/{index} 1 a", f"hi p/{index} 2 failed b", f"hi p/{index} 3 void c"
            ]
        assert ask(pool, "r0", "stop") == Step(None, score=4.0)
        assert pool.counters() == {
            "opened": 4, "steps": 13, "calls": 12, "failed_calls": 4, "void_turns": 4, "faults": 0, "timeouts": 0, "crashes": 0,
            "started": 2,
        }
        pids = pool.pids()
    assert all(gone(pid) for pid in pids)


def test_a_rollout_stays_where_it_was_opened_and_workers_share_the_load():
    with fake_pool(num_workers=2) as pool:
        for key in "abcd":
            pool.open(key, task())
        first = {key: ask(pool, key, "pid").observation for key in "abcd"}
        assert sorted(first.values()) == sorted(str(pid) for pid in pool.pids() for _ in range(2))
        assert {key: ask(pool, key, "pid").observation for key in "abcd"} == first
        for key in "abcd":
            if first[key] == str(pool.pids()[0]):
                pool.close_one(key)
        pool.open("e", task())
        assert ask(pool, "e", "pid").observation == str(pool.pids()[0])


@pytest.mark.parametrize(("environment", "params", "words"), [
    ("no_such_module:Class", {}, "no module named 'no_such_module'.*PYTHONPATH"),
    ("environment_fakes:Nothing", {}, "no class 'Nothing' in environment_fakes"),
    ("environment_fakes", {}, "module:Class"),
    ("environment_fakes:Unfinished", {}, "without step, close.*docs/tools.md"),
    ("environment_fakes:Obedient", {"greting": "x"}, r"unexpected keyword argument 'greting'.*rollout\.tools\.params"),
    ("environment_fakes:Refusing", {}, "OSError: no such index"),
    ("environment_fakes:Obedient", {"greeting": object()}, "not JSON serializable"),
])
def test_a_mistake_is_found_at_the_start(environment, params, words):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UserError, match=words):
        fake_pool(environment=environment, params=params)
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize(("environment", "params", "words"), [
    ("no_such_module:Class", {}, "no module named 'no_such_module'.*PYTHONPATH"),
    ("environment_fakes:Unfinished", {}, "without step, close.*docs/tools.md"),
    ("environment_fakes:Obedient", {"greting": "x"}, r"unexpected keyword argument 'greting'.*rollout\.tools\.params"),
    ("python", {"max_interpreter": 3}, r"unexpected keyword argument 'max_interpreter'.*rollout\.tools\.params"),
])
def test_a_mistake_is_found_before_anything_starts(environment, params, words):
    def config(environment, params):
        return replace(Config(), rollout=replace(Config().rollout, tools=ToolsConfig(environment=environment, params=params)))

    with pytest.raises(UserError, match=words):
        check_environment(config(environment, params))
    for fits in (("python", {}), ("environment_fakes:Obedient", {"greeting": "x"}), ("environment_fakes:Refusing", {}), (None, {})):
        check_environment(config(*fits))
    replayed = config(environment, params)
    check_environment(replace(replayed, rollout=replace(replayed.rollout, replay="somewhere")))


def test_what_an_environment_raises_fails_its_rollout_alone():
    with fake_pool() as pool:
        for key, text in (("a", "t"), ("b", "raise"), ("c", "close raises"), ("d", "t"), ("e", "t"), ("f", "t"), ("g", "t")):
            pool.open(key, task(text))
        ((key, fault),) = replies(pool, 1)
        assert key == "b" and fault == Fault("the environment raised in reset: KeyError: 'in reset'")
        for key, turn, words in (
            ("d", "raise some words", "RuntimeError: some words"), ("e", "exit 3", "SystemExit: 3"),
            ("f", "no-step", "returned str; expected akl_dist.rollout.environment.Step"), ("g", "not-finite", "nan"),
        ):
            reply = ask(pool, key, turn)
            assert isinstance(reply, Fault) and words in reply.reason
        pool.close_one("c")  # what close() raises fails nobody: the response is finished
        assert ask(pool, "a", "x").observation == "hello p/0 1 x"
        assert pool.counters()["faults"] == 5 and pool.counters()["started"] == 1
        with pytest.raises(ValueError, match="not open"):
            pool.step("d", "again")


@pytest.mark.parametrize("how", ["step", "reset"])
def test_an_overrun_costs_its_process_and_nothing_else(how):
    with fake_pool(num_workers=2, timeout_s=1.0) as pool:
        for key in "abc":
            pool.open(key, task())
        home = {key: ask(pool, key, "pid").observation for key in "abc"}
        lost = [key for key in "abc" if home[key] == home["a"]]
        start = time.monotonic()
        if how == "step":
            pool.step("a", "hang")
        else:  # the fourth rollout goes to the process with one
            pool.open("d", task("hang"))
            lost = [key for key in "abc" if home[key] != home["a"]] + ["d"]
        got = replies(pool, len(lost))
        assert 0.9 < time.monotonic() - start < 10
        culprit = "step of rollout 'a'" if how == "step" else "open of rollout 'd'"
        assert sorted(key for key, _ in got) == lost
        assert all(isinstance(fault, Fault) and f"no reply within 1 s in {culprit}" in fault.reason for _, fault in got)
        for key in set("abc") - set(lost):
            assert ask(pool, key, "x").observation == "hello p/0 2 x"
        for key in lost:  # a replacement is there
            pool.open(key, task())
        assert all(ask(pool, key, "x").observation == "hello p/0 1 x" for key in lost)
        assert pool.counters()["timeouts"] == 1 and pool.counters()["started"] == 3
        old = int(home[lost[0]])
        assert gone(old) and old not in pool.pids()


def test_the_limit_counts_from_when_the_process_could_begin():
    """Five steps of 0.4 s in one process: the last one waits 1.6 s for its turn, which is not its fault."""
    with fake_pool(timeout_s=1.5) as pool:
        for key in "abcde":
            pool.open(key, task())
            pool.step(key, "sleep 0.4")
        assert [key for key, reply in replies(pool, 5) if isinstance(reply, Step)] == list("abcde")


def test_a_reply_that_trickles_has_one_limit():
    with fake_pool(timeout_s=1.5) as pool:
        pool.open("a", task())
        assert ask(pool, "a", "x")
        begin = time.monotonic()
        pool.step("a", "trickle")
        ((_, fault),) = replies(pool, 1)
        assert isinstance(fault, Fault) and "no reply within 1.5 s" in fault.reason and time.monotonic() - begin < 10


def test_a_process_that_dies_by_itself():
    with fake_pool() as pool:
        pool.open("a", task())
        pool.open("b", task())
        pool.step("a", "crash")
        pool.step("b", "x")
        got = dict(replies(pool, 2))
        assert set(got) == {"a", "b"}
        for fault in got.values():
            assert isinstance(fault, Fault) and "exit code 7: the last words" in fault.reason and "rollout 'a'" in fault.reason
        pool.open("a", task())
        assert ask(pool, "a", "x").observation == "hello p/0 1 x"
        os.kill(pool.pids()[0], signal.SIGKILL)  # while it has nothing to do
        assert "SIGKILL" in replies(pool, 1)[0][1].reason
        assert pool.counters()["crashes"] == 2


def test_what_an_environment_started_ends_with_it(tmp_path):
    with fake_pool(timeout_s=2.0) as pool:
        pool.open("a", task())
        assert isinstance(ask(pool, "a", f"spawn-and-hang {tmp_path / 'pid'}"), Fault)
        assert gone(int((tmp_path / "pid").read_text()))


def test_closing_while_a_step_runs():
    """Nothing is heard of a rollout that is closed, and its key can be used again at once."""
    with fake_pool() as pool:
        pool.open("a", task())
        pool.step("a", "sleep 0.3")
        pool.close_one("a")
        pool.close_one("a")
        pool.open("a", task(index=1))
        pool.step("a", "new")
        assert replies(pool, 1) == [("a", Step("hello p/1 1 new", call=True))]
        assert pool.poll(0.2) == []
        with pytest.raises(ValueError, match="open already"):
            pool.open("a", task())


def test_a_step_for_a_rollout_that_is_lost_already():
    """The user learns of a fault by polling; until then it may go on asking."""
    with fake_pool(num_workers=1, timeout_s=0.5) as pool:
        pool.open("a", task())
        pool.open("b", task())
        pool.step("a", "hang")
        deadline = time.monotonic() + 5
        while not pool._replies and time.monotonic() < deadline:
            pool._pump(deadline)
        pool.step("b", "x")
        assert [key for key, _ in replies(pool, 2)] == ["a", "b"]


def test_polling_does_not_wait_longer_than_it_is_told():
    with fake_pool() as pool:
        pool.open("a", task())
        pool.step("a", "sleep 1.5")
        start = time.monotonic()
        assert pool.poll(0.0) == []
        assert time.monotonic() - start < 0.3
        assert pool.poll(0.3) == []
        assert 0.29 < time.monotonic() - start < 1.2
        assert len(replies(pool, 1)) == 1


def test_streams_carry_messages_only():
    with fake_pool() as pool:
        pool.open("a", task())
        assert ask(pool, "a", "noise") == Step("read ''")
        text = "x" * 300_000 + " \ud800 🙂"  # more than a pipe holds, and half a character
        assert ask(pool, "a", text).observation == f"hello p/0 2 {text}"


def test_a_child_that_comes_back_from_an_environment_answers_nothing():
    with fake_pool() as pool:
        pool.open("a", task())
        assert ask(pool, "a", "fork").observation == "hello p/0 1 fork"
        assert [ask(pool, "a", turn).observation for turn in ("x", "y")] == ["hello p/0 2 x", "hello p/0 3 y"]
        assert pool.counters()["crashes"] == 0


def test_a_reply_that_nobody_asked_for_costs_its_process():
    with fake_pool() as pool:
        pool.open("a", task())
        assert ask(pool, "a", "x")
        pool._workers[0].inflight.clear()
        pool._workers[0].process.send({"do": "step", "key": "a", "turn": "unasked"})
        ((key, fault),) = replies(pool, 1)
        assert key == "a" and isinstance(fault, Fault) and "nobody asked for" in fault.reason
        pool.open("b", task())
        assert ask(pool, "b", "x")


def test_a_message_that_waited_for_room_is_not_held_against_its_process():
    """A task larger than a pipe is under way while nobody polls: a process that gets the rest only now has its whole limit."""
    with fake_pool(timeout_s=1.0) as pool:
        os.kill(pool.pids()[0], signal.SIGSTOP)
        pool.open("a", Task("p", "t", "g", "x" * 3_000_000, 0, 0))
        time.sleep(1.2)
        os.kill(pool.pids()[0], signal.SIGCONT)
        time.sleep(0.3)
        pool.step("a", "x")
        ((_, reply),) = replies(pool, 1)
        assert reply.observation == "hello p/0 1 x"
        os.kill(pool.pids()[0], signal.SIGSTOP)  # and one that really does not go on is still ended
        pool.step("a", "y" * 3_000_000)
        ((_, fault),) = replies(pool, 1)
        assert isinstance(fault, Fault) and "no reply within 1 s" in fault.reason


def test_a_process_that_died_while_it_had_nothing_to_do_is_replaced_before_it_is_used():
    with fake_pool(num_workers=2) as pool:
        pool.open("a", task())
        assert ask(pool, "a", "x")
        pool.close_one("a")
        for pid in pool.pids():
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.3)
        for key in "bc":
            pool.open(key, task())
            pool.step(key, "x")
        assert sorted(key for key, reply in replies(pool, 2) if isinstance(reply, Step)) == ["b", "c"]
        assert pool.counters() | {"crashes": 2, "faults": 0, "started": 4} == pool.counters()


def test_no_secrets(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    with fake_pool() as pool:
        pool.open("a", task())
        seen = ask(pool, "a", "environment").observation.split()
    assert "HF_TOKEN" not in seen and "PYTHONPATH" in seen


def test_a_module_of_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "here_alone.py").write_text("from environment_fakes import Obedient as Mine\n")
    monkeypatch.chdir(tmp_path)
    with fake_pool(environment="here_alone:Mine") as pool:
        pool.open("a", task())
        assert ask(pool, "a", "x").observation == "hello p/0 1 x"


def test_a_process_that_cannot_be_replaced(tmp_path):
    marker = tmp_path / "broken"
    with fake_pool(params={"broken_while": str(marker)}) as pool:
        pool.open("a", task())
        assert ask(pool, "a", "x")
        marker.touch()
        pool.step("a", "crash")
        with pytest.raises(RunError, match=r"ended by itself \(exit code 5.*expected a started process"):
            replies(pool, 2)


def test_nothing_is_left_of_many_rollouts():
    descriptors = len(os.listdir("/proc/self/fd"))
    with fake_pool(num_workers=2) as pool:
        own = len(os.listdir("/proc/self/fd"))
        memory = None
        for index in range(200):
            key = f"r{index}"
            pool.open(key, task())
            assert ask(pool, key, "x").observation == "hello p/0 1 x"
            pool.close_one(key)
            if index == 20:
                memory = [len(os.listdir(f"/proc/{pid}/fd")) for pid in pool.pids()]
        assert memory == [len(os.listdir(f"/proc/{pid}/fd")) for pid in pool.pids()]
        assert len(os.listdir("/proc/self/fd")) <= own + 1
        assert not pool._rollouts and not any(worker.rollouts for worker in pool._workers)
        pids = pool.pids()
    assert all(gone(pid) for pid in pids)
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 1


def test_processes_end_with_their_parent():
    """One with nothing to do and one in the middle of a step, which reads nothing."""
    code = ("import sys\nfrom akl_dist.rollout.environment import Task\n"
            "from akl_dist.rollout.environment_pool import EnvironmentPool\n"
            "pool = EnvironmentPool(environment='environment_fakes:Obedient', params={}, num_workers=2, timeout_s=60)\n"
            "pool.open('a', Task('p', 't', 'g', '', 0, 0))\npool.step('a', 'hang')\nassert pool.poll(1.0) == []\n"
            "print(*pool.pids(), flush=True)\nsys.stdin.read()")
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
    finally:
        parent.kill()
        parent.communicate(timeout=10)
    assert all(gone(pid) for pid in pids)


def test_the_example_of_the_documentation(tmp_path):
    """docs/tools.md: the class as it stands there, run by the program that stands below it."""
    page = (ROOT / "docs" / "tools.md").read_text(encoding="utf-8")
    example, driver = [block.code for block in blocks(page, (0, len(page))) if block.tag == "python"]
    (tmp_path / "guess.py").write_text(example)
    (tmp_path / "try_it.py").write_text(driver)
    inherited = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # an engine sets it, blanks unquoted
    done = subprocess.run([sys.executable, "try_it.py"], cwd=tmp_path, env={**inherited, "PYTHONPATH": str(ROOT)}, text=True,
                          capture_output=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.stderr) == (driver.rpartition("# ")[2].strip(), "")
