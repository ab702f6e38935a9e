"""Waiting on Ray: limits, names, and which of several failures is reported."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from akl_dist.cluster.gather import SHARED_OBJECT_BYTES, answered, arrivals, fetch, fetch_all, gather, store, store_all
from akl_dist.contract.errors import ActorDied, DeadlineExceeded, NonFiniteLoss, RunError

pytestmark = pytest.mark.stack


class TwoArguments(Exception):
    """Pickles, and does not unpickle: a usual mistake of exceptions with arguments of their own."""

    def __init__(self, message, number):
        super().__init__(message)


class Unreadable:
    def __reduce__(self):
        return int, ("no number",)


@pytest.fixture(scope="module")
def workers(local_ray):
    local_ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

    @local_ray.remote(num_cpus=0)
    class Worker:
        def answer(self, value, delay_s=0.0):
            time.sleep(delay_s)
            return value

        def fail_on_purpose(self):
            raise NonFiniteLoss("loss", got="nan", expected="a finite number", remedy="Lower the learning rate.", stage="learner")

        def fail_by_accident(self, delay_s=0.0):
            time.sleep(delay_s)
            raise ZeroDivisionError("echo of a lost peer")

        def die(self, delay_s=0.0):
            time.sleep(delay_s)
            os._exit(1)

        def fail_as_libraries_do(self):
            raise TwoArguments("cause", 2)

        def answer_what_no_other_process_reads(self):
            return Unreadable()

        def put(self):
            return [local_ray.put(np.zeros(10))]

    class Maker:
        def __call__(self, count):
            made = [Worker.remote() for _ in range(count)]
            local_ray.get([worker.answer.remote(0) for worker in made], timeout=120)  # a started process answers at once
            return made

    return Maker()


def test_results_keep_the_order_of_the_names(workers):
    a, b = workers(2)
    got = gather({"slow": a.answer.remote(1, 0.3), "fast": b.answer.remote(2)}, timeout_s=30, stage="rollout", doing="answering")
    assert list(got.items()) == [("slow", 1), ("fast", 2)]


def test_results_come_as_they_are_ready_and_further_calls_are_waited_for(workers):
    a, b = workers(2)
    further = {1: 2, 2: 3, 3: None}

    def again(name, value):
        return a.answer.remote(further[value], 0.4) if name == "a" and further[value] is not None else None

    calls = {a.answer.remote(1, 0.4): "a", b.answer.remote("x", 0.2): "b"}
    came = list(arrivals(calls, timeout_s=30, stage="rollout", doing="counting", again=again))
    assert [value for name, value in came if name == "a"] == [1, 2, 3] and came.index(("b", "x")) < came.index(("a", 2))


def test_what_came_before_an_error_is_delivered(workers):
    for end, kind in (("fail_on_purpose", NonFiniteLoss), ("die", ActorDied)):
        a, b = workers(2)
        calls, seen = {a.answer.remote(number): "rollout/run/0" for number in range(2)}, []
        calls |= {b.answer.remote("x"): "b"}
        with pytest.raises(kind) as caught:
            again = lambda name, value: getattr(a, end).remote() if value == 1 else None  # noqa: B023, E731
            for _, value in arrivals(calls, timeout_s=30, stage="rollout", doing="counting", again=again):
                seen.append(value)
        assert seen.count(0) == seen.count(1) == 1 and caught.value.actor == "rollout/run/0"


def test_the_consumers_own_time_does_not_count(workers):
    (a,) = workers(1)
    for _ in arrivals({a.answer.remote(n, 0.5): "a" for n in range(3)}, timeout_s=3.0, stage="rollout", doing="counting"):
        time.sleep(1.5)
    longer = {a.answer.remote(n, 0.5): "a" for n in range(9)}
    with pytest.raises(DeadlineExceeded, match=r"no answer within 1\.2 s while counting"):
        list(arrivals(longer, timeout_s=1.2, stage="rollout", doing="counting"))


def test_answered_waits_only_when_it_may(workers):
    (a,) = workers(1)
    calls = {a.answer.remote(1, 0.5): "a", a.answer.remote(2): "a"}
    assert answered(calls, timeout_s=0.0, stage="verify", doing="judging") == {} == answered({}, timeout_s=9, stage="x", doing="y")
    first, second = calls
    got = answered(calls, timeout_s=30.0, stage="verify", doing="judging")
    assert got[first] == 1 and set(got) <= set(calls)
    del calls[first]
    got = answered(calls, timeout_s=30.0, stage="verify", doing="judging")
    assert got == {second: 2}
    with pytest.raises(NonFiniteLoss):
        answered({a.fail_on_purpose.remote(): "a"}, timeout_s=30.0, stage="verify", doing="judging")


def test_a_long_wait_says_whom_it_waits_for(workers, monkeypatch, caplog):
    module = sys.modules["akl_dist.cluster.gather"]
    for name, value in (("LIVENESS_INTERVAL_S", 0.1), ("LOG_AFTER_S", 0.3), ("LOG_EVERY_S", 0.6)):
        monkeypatch.setattr(module, name, value)
    a, b = workers(2)
    gather({"quick": a.answer.remote(1), "slow/0": b.answer.remote(2, 1.2)}, timeout_s=30, stage="verify", doing="judging 5 groups")
    said = [record.getMessage() for record in caplog.records if record.name == module.__name__]
    assert len(said) == 2 and all("slow/0" in text and "quick" not in text and "judging 5 groups" in text for text in said)
    caplog.clear()
    gather({"quick": a.answer.remote(1)}, timeout_s=30, stage="verify", doing="judging 5 groups")
    assert not caplog.records


def test_a_deadline_names_whom_it_waited_for(workers):
    a, b = workers(2)
    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="rollout/run/1") as caught:
        gather({"rollout/run/0": a.answer.remote(1), "rollout/run/1": b.answer.remote(2, 20)},
               timeout_s=1.0, stage="rollout", doing="sampling")
    assert "rollout/run/0" not in str(caught.value) and time.monotonic() - begin < 15


def test_an_error_raised_on_purpose_arrives_as_it_was_raised(workers):
    (a,) = workers(1)
    with pytest.raises(NonFiniteLoss) as caught:
        gather({"learner/run/0": a.fail_on_purpose.remote()}, timeout_s=30, stage="learner", doing="updating")
    assert caught.value.got == "nan" and caught.value.actor == "learner/run/0"


def test_an_accident_carries_its_traceback(workers):
    (a,) = workers(1)
    with pytest.raises(RunError, match="ZeroDivisionError") as caught:
        gather({"x": a.fail_by_accident.remote()}, timeout_s=30, stage="learner", doing="updating")
    assert "fail_by_accident" in caught.value.remedy


def test_the_cause_is_reported_and_not_its_echo(workers):
    """A peer's accident arrives first; the dead actor half a second later is the cause."""
    a, b = workers(2)
    with pytest.raises(ActorDied, match="learner/run/1"):
        gather({"learner/run/0": a.fail_by_accident.remote(), "learner/run/1": b.die.remote(0.5)},
               timeout_s=30, stage="learner", doing="updating")


def test_what_cannot_be_read_names_its_actor(workers):
    for method, word in (("fail_as_libraries_do", "cause"), ("answer_what_no_other_process_reads", "no number")):
        (a,) = workers(1)
        with pytest.raises(RunError, match=r"rollout/run/0: got .* while sampling") as caught:
            gather({"rollout/run/0": getattr(a, method).remote()}, timeout_s=30, stage="rollout", doing="sampling")
        assert word in caught.value.remedy and caught.value.actor == "rollout/run/0" and type(caught.value) is RunError
    a, b = workers(2)
    with pytest.raises(ActorDied, match="learner/run/1"):  # an echo like any other
        gather({"learner/run/0": a.fail_as_libraries_do.remote(), "learner/run/1": b.die.remote(0.5)},
               timeout_s=30, stage="learner", doing="updating")


def test_an_argument_whose_owner_died_is_no_fault_of_the_one_it_was_given_to(workers, local_ray):
    a, b = workers(2)
    (ref,) = local_ray.get(a.put.remote(), timeout=30)
    local_ray.kill(a)
    with pytest.raises(ActorDied, match="owner of what rollout/run/0 was given"):
        for _ in range(50):  # until the death is known
            gather({"rollout/run/0": b.answer.remote(ref)}, timeout_s=30, stage="weight_sync", doing="loading bucket 1 of 1")
            time.sleep(0.1)


def test_a_result_that_is_not_delivered_is_late_and_not_a_death(workers, monkeypatch):
    (a,) = workers(1)
    module = sys.modules["akl_dist.cluster.gather"]

    def late(ref, timeout):
        raise module.GetTimeoutError(f"after {timeout}")

    monkeypatch.setattr(module.ray, "get", late)
    with pytest.raises(DeadlineExceeded, match="rollout/run/0: got a result of sampling that is not delivered within 60 s"):
        gather({"rollout/run/0": a.answer.remote(1)}, timeout_s=30, stage="rollout", doing="sampling")


def test_arrays_that_cannot_be_read_are_not_said_to_be_lost(workers):
    with pytest.raises(RunError, match="arrays of 2 groups: got RaySystemError") as caught:
        fetch_all([store(Unreadable())], timeout_s=10, stage="learner", what="arrays of 2 groups")
    assert not isinstance(caught.value, ActorDied) and "no number" in caught.value.remedy


def test_handles(workers):
    assert fetch(store([1, 2]), timeout_s=10, stage="learner", what="arrays") == [1, 2]
    assert fetch("already here", timeout_s=1, stage="learner", what="arrays") == "already here"


def test_records_at_hand_start_no_cluster():
    code = ("import ray; from akl_dist.cluster.gather import fetch_all; "
            "print(fetch_all(['here'], timeout_s=1, stage='learner', what='x'), ray.is_initialized())")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["['here']", "False"]


@dataclasses.dataclass(frozen=True)
class Record:
    values: np.ndarray
    texts: tuple[str, ...] = ()


def test_small_records_share_an_object_and_large_ones_do_not(workers):
    sizes = [10, 10, SHARED_OBJECT_BYTES // 8, 10, SHARED_OBJECT_BYTES]
    records = [Record(np.full(n, float(i))) for i, n in enumerate(sizes)]  # 8 bytes a value
    handles = store_all(records)
    assert [handles.index(next(h for h in handles if h.ref == handle.ref)) for handle in handles] == [0, 0, 2, 3, 4]
    fetched = fetch_all(handles[::-1], timeout_s=10, stage="learner", what="arrays")
    assert [one.values.tolist() == record.values.tolist() for one, record in zip(fetched, records[::-1], strict=True)] == [True] * 5
    assert len({handle.ref for handle in store_all([Record(np.zeros(1), ("x" * SHARED_OBJECT_BYTES,))] * 3)}) == 3, "texts count"
    assert store_all([]) == []
