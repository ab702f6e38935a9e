from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from akl_dist.contract import message_process
from akl_dist.contract.errors import DeadlineExceeded, VerifierFault
from akl_dist.contract.message_process import MessageProcess
from akl_dist.contract.records import Status
from akl_dist.verify.grader import GraderPool, Item

FAKE = {"judge": "grader_fakes:judge", "probes": ((Item("a", "a", False), Status.OK), (Item("a", "b", False), Status.WRONG))}
ROOT = Path(__file__).resolve().parents[2]
PATH = {"PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"}


def fake_pool(**options):
    return GraderPool(**({"num_workers": 1, "timeout_s": 20.0, "environment": PATH, **FAKE} | options))


def items(*texts, gold="a"):
    return [Item(gold, text, False) for text in texts]


def statuses(verdicts):
    return [verdict.status.value for verdict in verdicts]


class Starts:
    """A pool of fake graders whose starts follow a plan (grader_fakes), and the record of these starts."""

    def __init__(self, folder, plan, **options):
        self.record = folder / "starts"
        environment = PATH | {"FAKE_STARTS": str(self.record), "FAKE_PLAN": plan}
        self.pool = fake_pool(**({"environment": environment} | options))

    def count(self, word):
        return self.record.read_text().split().count(word)


def gone(pid, within_s=5.0):
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_order_and_real_judge():
    with GraderPool(num_workers=2) as pool:
        texts = [f"<think>7+3=10;10+6=16</think>\\boxed{{{k % 20}}}" for k in range(200)]
        verdicts = pool.judge_many([Item("16", text, False) for text in texts])
        assert [v.extracted for v in verdicts] == [str(k % 20) for k in range(200)]
        assert [v.correct for v in verdicts] == [k % 20 == 16 for k in range(200)]
        assert verdicts[16].span == (36, 38)
        texts = ["x" * 200_000 + f"\\boxed{{\\sqrt{{{k}}}}} \ud800 🙂" for k in (8, 7)] * 4
        long = pool.judge_many([Item("2\\sqrt{2}", text, False) for text in texts])
        assert statuses(long) == ["ok", "wrong"] * 4
        assert pool.counters() == {"judged": 208, "timeouts": 0, "crashes": 0, "kills": 0, "recycled": 0, "started": 2}
        pids = pool.pids()
    assert all(gone(pid) for pid in pids)


def test_hang_is_killed_counted_and_replaced():
    with fake_pool(timeout_s=0.5) as pool:
        (before,) = pool.pids()
        start = time.monotonic()
        verdicts = pool.judge_many(items("a", "hang", "a", "b", "a"))
        assert time.monotonic() - start < 10
        assert statuses(verdicts) == ["ok", "timeout", "ok", "wrong", "ok"]
        assert verdicts[1].correct is None and verdicts[1].reward is None
        (after,) = pool.pids()
        assert after != before and gone(before)
        counters = pool.counters()
        assert (counters["timeouts"], counters["kills"], counters["started"]) == (1, 1, 2)
        assert statuses(pool.judge_many(items("a", "b"))) == ["ok", "wrong"]


def test_each_judgement_has_its_own_clock():
    """Five judgements of .3 s on one grader take longer than the limit of 1 s together; none is blamed for another."""
    with fake_pool(timeout_s=1.0) as pool:
        verdicts = pool.judge_many(items(*["sleep 0.3"] * 5, "hang", *["a"] * 3))
        assert statuses(verdicts) == ["wrong"] * 5 + ["timeout"] + ["ok"] * 3


def test_group_of_the_grader_is_killed(tmp_path):
    marker = tmp_path / "pid"
    with fake_pool(timeout_s=2.0) as pool:
        assert statuses(pool.judge_many(items(f"spawn-and-hang {marker}"))) == ["timeout"]
    assert marker.exists(), "the grader's child did not start"
    assert gone(int(marker.read_text()))


def test_crash_is_an_error_of_one_item():
    with fake_pool(num_workers=2) as pool:
        verdicts = pool.judge_many(items("a", "b", "crash", "a", "b", "raise", "print", "a"))
        assert statuses(verdicts) == ["ok", "wrong", "error", "ok", "wrong", "error", "wrong", "ok"]
        assert "the reason" in verdicts[2].reason and "exit code 7" in verdicts[2].reason
        assert "KeyError" in verdicts[5].reason
        assert all(v.correct is None for v in (verdicts[2], verdicts[5]))
        assert pool.counters()["crashes"] == 2 and len(pool.pids()) == 2


def test_death_while_idle_blames_nobody():
    with fake_pool() as pool:
        os.kill(pool.pids()[0], signal.SIGKILL)
        time.sleep(0.1)
        assert statuses(pool.judge_many(items("a"))) == ["ok"]


def test_recycled_after_its_tasks():
    with fake_pool(tasks_per_worker=3) as pool:
        verdicts = pool.judge_many(items(*["pid"] * 7))
        seen = [v.extracted for v in verdicts]
        assert seen[:3] == [seen[0]] * 3 and seen[3:6] == [seen[3]] * 3
        assert len(set(seen)) == 3
        assert pool.counters()["recycled"] == 2 and len(pool.pids()) == 1
        assert gone(int(seen[0]))


def test_batch_deadline():
    with fake_pool() as pool:
        start = time.monotonic()
        verdicts = pool.judge_many(items("a", "hang", "a"), batch_deadline=time.monotonic() + 0.7)
        assert time.monotonic() - start < 10
        assert statuses(verdicts) == ["ok", "timeout", "timeout"]
        assert statuses(pool.judge_many(items("a"))) == ["ok"]


def test_nobody_waits_for_a_replacement(tmp_path):
    """One of two graders hangs; while its replacement starts, the other one ends the batch. The next batches take it up."""
    starts = Starts(tmp_path, "ok ok slow", num_workers=2, timeout_s=1.0)
    texts = [f"x{k}" for k in range(20)]
    with starts.pool as pool:
        hung, stays = pool.pids()
        verdicts = pool.judge_many(items("hang", *texts))
        assert starts.count("up") == 2, "the batch waited for the replacement"
        assert statuses(verdicts) == ["timeout"] + ["wrong"] * 20
        assert [v.extracted for v in verdicts[1:]] == texts
        fresh = next(pid for pid in pool.pids() if pid not in (hung, stays))
        assert len(pool.pids()) == 2 and gone(hung)
        assert starts.count("up") == 2 and {v.extracted for v in pool.judge_many(items(*["pid"] * 8))} == {str(stays)}
        deadline = time.monotonic() + 20
        seen = set()
        while seen != {str(stays), str(fresh)} and time.monotonic() < deadline:
            time.sleep(0.1)
            seen = {v.extracted for v in pool.judge_many(items(*["pid"] * 4))}
        assert seen == {str(stays), str(fresh)} and pool.counters()["started"] == 3


def test_nobody_waits_for_a_recycled_grader(tmp_path):
    starts = Starts(tmp_path, "ok ok slow", num_workers=2, tasks_per_worker=4)
    with starts.pool as pool:
        verdicts = pool.judge_many(items("pid", "sleep 0.5", *["pid"] * 5))
        assert starts.count("up") == 2, "the batch waited for the replacement"
        assert pool.counters()["recycled"] >= 1 and len(pool.pids()) == 2
        assert statuses(verdicts) == ["ok", "wrong"] + ["ok"] * 5


def test_a_few_items_are_shared_out():
    """Two items for two graders: neither of the graders gets both."""
    with fake_pool(num_workers=2) as pool:
        assert {v.extracted for v in pool.judge_many(items("pid", "pid"))} == {str(pid) for pid in pool.pids()}


@pytest.mark.parametrize("plan", ["ok fail fail ok", "ok wrong wrong ok"])
def test_starts_that_fail_are_tried_again(tmp_path, plan):
    """A replacement that does not start, or that fails a probe, never gets work; the third one does."""
    starts = Starts(tmp_path, plan, timeout_s=0.5)
    with starts.pool as pool:
        assert statuses(pool.judge_many(items("hang", "b", "a"))) == ["timeout", "wrong", "ok"]
        assert starts.count("began") == 4 and len(pool.pids()) == 1


@pytest.mark.parametrize(("plan", "got"), [("ok fail", "this start fails"), ("ok wrong", "for the probe")])
def test_a_grader_that_never_starts_again_is_a_fault(tmp_path, plan, got):
    starts = Starts(tmp_path, plan, timeout_s=0.5)
    with starts.pool as pool:
        with pytest.raises(VerifierFault) as caught:
            pool.judge_many(items("hang", "a"))
        assert got in caught.value.got and starts.count("began") == 4
        with pytest.raises(VerifierFault, match="open pool"):
            pool.judge_many(items("a"))


def test_a_start_that_takes_too_long_is_a_fault(tmp_path):
    starts = Starts(tmp_path, "ok slow", timeout_s=0.3)
    with starts.pool as pool:
        pool._start_timeout_s = 1.0  # not for the first one, which a busy machine may slow down
        with pytest.raises(VerifierFault, match="no answer within 1 s"):
            pool.judge_many(items("hang", "a"), batch_deadline=time.monotonic() + 60)
        assert pool.counters()["started"] == 4 and starts.count("up") == 1


def test_deadline_and_close_while_every_grader_starts(tmp_path):
    starts = Starts(tmp_path, "ok ok slow", num_workers=2, timeout_s=0.3)
    with starts.pool as pool:
        start = time.monotonic()
        verdicts = pool.judge_many(items("hang", "hang", *["a"] * 10), batch_deadline=start + 1.5)
        assert time.monotonic() - start < 3.5 and starts.count("up") == 2
        assert statuses(verdicts) == ["timeout"] * 12
        assert "while 2 of 2 graders were starting" in verdicts[-1].reason
        assert (pool.counters()["timeouts"], pool.counters()["kills"]) == (12, 2)
        pids = pool.pids()
        assert len(pids) == 2
    assert all(gone(pid) for pid in pids) and pool.pids() == []


@pytest.mark.parametrize("length", [1, 200_000])
def test_time_between_batches_is_nobodys_start(tmp_path, length):
    """A replacement starts between two batches, or waits there for probes that its pipe cannot hold. Neither has failed."""
    text = "a" * length
    starts = Starts(tmp_path, "ok", timeout_s=1.0, probes=((Item(text, text, False), Status.OK),) * 2)
    with starts.pool as pool:
        pool._start_timeout_s = 2.0
        assert statuses(pool.judge_many(items("hang"))) == ["timeout"]
        limit = time.monotonic() + 20
        while starts.count("up") < 2 and time.monotonic() < limit:
            time.sleep(0.1)
        time.sleep(2.2)
        assert statuses(pool.judge_many(items("a", "b"))) == ["ok", "wrong"]
        assert pool.counters()["started"] == 2


def test_a_reply_that_nobody_asked_for_is_nobodys_verdict():
    with fake_pool() as pool:
        assert statuses(pool.judge_many(items("twice"))) == ["error"]
        assert [v.extracted for v in pool.judge_many(items("a", "b"))] == ["a", "b"]


def test_a_grader_that_outlives_its_kill_is_named(monkeypatch):
    """It is not waited for without end, and the other one is ended all the same."""
    waited = subprocess.Popen.wait
    pool = fake_pool(num_workers=2)
    stuck, other = pool.pids()

    def wait(self, timeout=None):
        if self.pid == stuck:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return waited(self, timeout)

    with monkeypatch.context() as patched:
        patched.setattr(subprocess.Popen, "wait", wait)
        with pytest.raises(DeadlineExceeded, match=rf"process {stuck} \(akl_dist.verify.grader_main\)"):
            pool.close()
    assert gone(other) and gone(stuck)
    os.waitpid(stuck, 0)


@pytest.mark.parametrize("judge", ["grader_fakes:distrusted", "grader_fakes:missing"])
def test_refuses_a_grader_that_cannot_be_trusted(judge):
    with pytest.raises(VerifierFault) as caught:
        fake_pool(judge=judge)
    assert ("ok" if judge.endswith("distrusted") else "missing") in caught.value.got


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"timeout_s": 0.0}, {"tasks_per_worker": 0}])
def test_refuses_a_pool_without_limits(options):
    with pytest.raises(VerifierFault):
        fake_pool(**options)


def test_nothing_survives_the_parent():
    """The parent is killed while its grader hangs: the kernel ends the grader."""
    code = (
        "import os, sys, threading, time\n"
        "sys.path[:0] = sys.argv[1].split(os.pathsep)\n"
        "from akl_dist.verify.grader import GraderPool, Item\n"
        "environment = {'PYTHONPATH': sys.argv[1]}\n"
        "pool = GraderPool(num_workers=1, timeout_s=60.0, judge='grader_fakes:judge', probes=(), environment=environment)\n"
        "print(pool.pids()[0], flush=True)\n"
        "pool.judge_many([Item('a', 'hang', False)])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, PATH["PYTHONPATH"]], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    grader = int(parent.stdout.readline())
    time.sleep(0.3)
    assert not gone(grader, within_s=0.1)
    parent.kill()
    parent.wait(timeout=10)
    assert gone(grader)
    parent.stdout.close()


def test_real_hostile_answers_cost_at_most_their_limit():
    with GraderPool(num_workers=1, timeout_s=2.0) as pool:
        hostile = ["9**9**9", "(" * 50_000, "\\boxed{" * 2000, "\\sum_{k=1}^{999} \\frac{1}{k^{k}} + \\pi", "x^{x^{x}}" * 20]
        start = time.monotonic()
        verdicts = pool.judge_many([Item("6", f"\\boxed{{{text}}}", False) for text in [*hostile, "6"]])
        assert time.monotonic() - start < 2.0 * len(hostile) + 5
        assert verdicts[-1].status is Status.OK
        assert all(v.correct in (False, None) for v in verdicts[:-1])


def test_graders_import_neither_torch_nor_ray():
    code = (
        "import sys, akl_dist.verify.grader_main, akl_dist.verify.math as m; m.warm_up(); "
        "print('torch' in sys.modules, 'ray' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, cwd=ROOT)
    assert out.stdout.split() == ["False", "False"]


def test_one_that_writes_without_end_does_not_keep_its_reader_from_the_clock(monkeypatch):
    """However fast it writes: here the pipe is never found empty."""
    process = MessageProcess("akl_dist.verify.grader_main", [FAKE["judge"]], environment=PATH | {"PATH": ""}, cwd="/")
    try:
        reads = []

        def never_empty(descriptor, size):
            reads.append(size)
            assert len(reads) <= 2 * message_process.BURST // size, "it reads on and on"
            return bytes(size)

        with monkeypatch.context() as patch:
            patch.setattr(message_process.os, "read", never_empty)
            assert process.receive() and process.received == message_process.BURST
            assert process.receive() and process.received == 2 * message_process.BURST, "the rest comes with the next look"
        with pytest.raises(ValueError):
            process.messages()
    finally:
        process.end()
