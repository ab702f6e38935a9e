from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from akl_dist.contract.errors import VerifierFault
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
