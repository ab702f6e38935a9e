from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from verify_examples import group_of, reference_of, tiny_tokenizer

import akl_dist.verify.pool as pool_module
from akl_dist.config.schema import RolesConfig, VerifyConfig
from akl_dist.contract.errors import ModelError, RunError, VerifierFault
from akl_dist.contract.records import JudgedGroup, Prompt, RolloutGroup, Status, Verdict
from akl_dist.verify.pool import VerdictStream, VerifyPool, VerifySettings, check_faults

ROOT = str(Path(__file__).resolve().parents[2])
RIGHT = "<think>7+3=10;10+6=16</think>\\boxed{16}<eos>"
WRONG = "<think></think>\\boxed{15}<eos>"


def judged_of(*statuses):
    return JudgedGroup("p", tuple(Verdict(Status(s), reason="why") for s in statuses), (0,) * len(statuses), None)


def test_share_of_faulty_verdicts_by_hand():
    check_faults([judged_of("ok", "wrong", "no_answer", "timeout", "ok")], 0.2)  # 1 of 5
    with pytest.raises(VerifierFault, match=r"2 of 5 .*timeout.*why"):
        check_faults([judged_of("ok", "error", "no_answer"), judged_of("timeout", "ok")], 0.2)
    with pytest.raises(VerifierFault):
        check_faults([judged_of("invalid_gold", *["ok"] * 99)], 0.0)
    check_faults([judged_of("no_answer", "wrong")], 0.0)


class Supervisors:
    """Two supervisors that answer when told, and what they were sent; stands for the pool's actors and for the wait on them."""

    def __init__(self, count=2):
        self.calls, self.refs, self.waits = [], {}, []
        self.actors = {f"verify/t/{index}": self._actor(f"verify/t/{index}") for index in range(count)}

    def _actor(self, name):
        return SimpleNamespace(judge=SimpleNamespace(remote=lambda share: self._send(name, list(share))))

    def _send(self, name, share):
        ref = len(self.calls)
        self.calls.append((name, [group.prompt.prompt_id for group in share]))
        self.refs[ref] = (name, share)
        return ref

    def answered(self, calls, *, timeout_s, stage, doing):
        """Nothing comes by itself; a wait ends with the oldest call's answer."""
        assert set(calls) <= set(self.refs) and all(self.refs[ref][0] == name for ref, name in calls.items())
        per_supervisor = [list(calls.values()).count(name) for name in self.actors]
        assert max(per_supervisor) <= 3
        if timeout_s == 0:
            return {}
        self.waits.append(sorted(calls))
        oldest = min(calls)
        _, share = self.refs[oldest]
        return {oldest: [JudgedGroup(g.prompt.prompt_id, (Verdict(Status.OK, reason=g.engine),), (0,), None) for g in share]}


def groups_named(*numbers):
    found = [Prompt(f"p/{number}", "p", "", (1,), "") for number in numbers]
    return [RolloutGroup(prompt, (1,), ("stop",), 0, f"group {place}", None) for place, prompt in enumerate(found)]


@pytest.fixture
def supervisors(monkeypatch):
    made = Supervisors()
    monkeypatch.setattr(pool_module, "answered", made.answered)
    return made


def test_work_goes_to_the_least_loaded_and_verdicts_keep_the_order(supervisors):
    stream = VerdictStream(supervisors.actors, VerifyConfig())
    groups = groups_named(*range(9))
    stream.add(groups[4:9])
    assert supervisors.calls == [("verify/t/0", ["p/4", "p/6", "p/8"]), ("verify/t/1", ["p/5", "p/7"])]
    stream.add(groups[2:4])
    assert supervisors.calls[2:] == [("verify/t/0", ["p/3"]), ("verify/t/1", ["p/2"])], "p/2 to the one with 2 groups, not 3"
    stream.add(groups[:2])
    assert len(supervisors.calls) == 4, "each has two calls: the rest waits"
    ticket = stream.ticket(groups)
    assert [len(names) for _, names in supervisors.calls[4:]] == [1, 1], "at the end of a batch nothing is held back"
    judged = stream.judged(ticket.groups)
    assert [one.prompt_id for one in judged] == [f"p/{n}" for n in range(9)]


def test_a_call_takes_what_waits(supervisors):
    stream = VerdictStream(supervisors.actors, VerifyConfig(queue_groups=100))
    groups = groups_named(*range(12))
    for group in groups:
        stream.add([group])
    assert [len(names) for _, names in supervisors.calls] == [1, 1, 1, 1]
    stream.ticket(groups)
    assert [len(names) for _, names in supervisors.calls] == [1, 1, 1, 1, 4, 4]


def test_the_queue_is_bounded(supervisors):
    stream = VerdictStream(supervisors.actors, VerifyConfig(queue_groups=3))
    groups = groups_named(*range(12))
    for group in groups:
        stream.add([group])
        assert len(stream._queue) <= 3
        assert bool(supervisors.waits) == (int(group.prompt.prompt_id[2:]) >= 7), "4 calls in flight, 3 in the queue, the 8th waits"
    stream.add(more := groups_named(*range(12, 30)))
    assert len(stream._queue) <= 3
    judged = stream.judged(stream.ticket([*more, *groups]).groups)
    assert [one.prompt_id for one in judged] == [g.prompt.prompt_id for g in [*more, *groups]]


def test_a_prompt_may_be_in_a_batch_twice(supervisors):
    stream = VerdictStream(supervisors.actors, VerifyConfig())
    groups = groups_named(3, 4, 3)
    stream.add(groups[2:])
    stream.add(groups[:1])
    judged = stream.judged(stream.ticket(groups).groups)
    assert [one.verdicts[0].reason for one in judged] == ["group 0", "group 1", "group 2"]


def test_groups_of_another_batch_are_refused(supervisors):
    stream = VerdictStream(supervisors.actors, VerifyConfig())
    groups = groups_named(1, 2)
    stream.add(groups)
    with pytest.raises(RunError, match="2 added, 1 in the batch"):
        stream.ticket(groups[:1])


def test_an_answer_for_other_prompts_is_refused(supervisors, monkeypatch):
    stream = VerdictStream(supervisors.actors, VerifyConfig())
    groups = groups_named(1, 2)
    ticket = stream.ticket(groups)
    monkeypatch.setattr(pool_module, "answered", lambda calls, **how: {min(calls): [JudgedGroup("p/9", (), (), None)]})
    with pytest.raises(RunError, match="p/9"):
        stream.judged(ticket.groups)


@pytest.mark.stack
def test_two_supervisors(local_ray, tmp_path):
    from akl_dist.cluster.gather import Part, fetch, gather, store

    tokenizer = tiny_tokenizer(tmp_path)
    settings = VerifySettings(str(tmp_path), (tokenizer.token_to_id("<eos>"),), VerifyConfig(num_workers=2), RolesConfig())
    environment = {"env_vars": {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}}
    pool = VerifyPool(run_id="test", settings=settings, actor_options=[{"num_cpus": 0.5, "runtime_env": environment}] * 2)
    started = gather(pool.ready(), timeout_s=120, stage="verify", doing="starting")
    assert list(started) == ["verify/test/0", "verify/test/1"]
    groups = []
    for index in range(5):
        group = group_of(tokenizer, [RIGHT, WRONG], gold="16" if index % 2 else "15", prompt_id=f"tiny/{index}")
        groups.append(group.__class__(**{**vars(group), "arrays": store(group.arrays)}))
    streamed = pool.stream()
    for group in reversed(groups):
        streamed.add([group])
    in_pieces = pool.collect(streamed.ticket(groups))
    judged = pool.collect(pool.submit(groups))
    assert [(g.prompt_id, g.verdicts, g.answer_span_tokens) for g in in_pieces] == [
        (g.prompt_id, g.verdicts, g.answer_span_tokens) for g in judged]
    assert [[v.correct for v in g.verdicts] for g in judged] == [[bool(i % 2), not i % 2] for i in range(5)]
    assert isinstance(judged[0].arrays, Part)
    references = []
    for group in groups:
        reference = reference_of(group, [0.0] * group.num_tokens)
        references.append(reference.__class__(**{**vars(reference), "arrays": store(reference.arrays)}))
    labelled = pool.label(groups, judged, references)
    assert [g.answer_tokens for g in labelled] == [(6, 6)] * 5  # equal entropies: position and entropy agree on box and end
    mask = fetch(labelled[4].roles, timeout_s=10, stage="verify", what="roles").answer_mask
    assert mask.sum() == 12 and len(mask) == groups[4].num_tokens
    counted = {name.removeprefix("verify/grader_"): count for name, count in pool.metrics().items()}
    assert counted == {"judged": 20, "timeouts": 0, "crashes": 0, "kills": 0, "recycled": 0, "started": 2}
    bad = group_of(tokenizer, [RIGHT, WRONG], gold="", prompt_id="tiny/bad")
    with pytest.raises(VerifierFault, match="invalid_gold"):
        pool.collect(pool.submit([bad]))
    assert len(pool.collect(pool.submit([bad]), earlier=judged)) == 1, "2 of 12 in the step as a whole"
    pids = [pid for start in started.values() for pid in start["grader_pids"]]
    assert len(pids) == 2 and all(os.path.exists(f"/proc/{pid}") for pid in pids)
    pool.close()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(os.path.exists(f"/proc/{pid}") for pid in pids):
        time.sleep(0.05)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.stack
def test_errors_of_the_start_reach_the_driver(local_ray, tmp_path):
    from akl_dist.cluster.gather import gather

    settings = VerifySettings(str(tmp_path), (1,), VerifyConfig(), RolesConfig())
    environment = {"env_vars": {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}}
    pool = VerifyPool(run_id="broken", settings=settings, actor_options=[{"num_cpus": 0.5, "runtime_env": environment}])
    with pytest.raises(ModelError, match="tokenizer"):
        gather(pool.ready(), timeout_s=120, stage="verify", doing="starting")
    pool.close()
