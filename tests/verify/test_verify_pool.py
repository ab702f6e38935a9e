from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from verify_examples import group_of, reference_of, tiny_tokenizer

from akl_dist.config.schema import RolesConfig, VerifyConfig
from akl_dist.contract.errors import ModelError, VerifierFault
from akl_dist.contract.records import JudgedGroup, Status, Verdict
from akl_dist.verify.pool import VerifyPool, VerifySettings, check_faults

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
    judged = pool.collect(pool.submit(groups))
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
    assert counted == {"judged": 10, "timeouts": 0, "crashes": 0, "kills": 0, "recycled": 0, "started": 2}
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
