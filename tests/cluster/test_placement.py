"""Layout arithmetic with numbers a reader can redo, and what a cluster lacks for it."""

from __future__ import annotations

import functools
from collections import Counter

import pytest

from akl_dist.cluster.placement import DEVICE_ROLES, Layout, lacks, layout
from akl_dist.cluster.plan_text import batch_rows, plan_text, table
from akl_dist.config.command_line import check_command_line
from akl_dist.config.compose import compose, group_choices
from akl_dist.config.schema import Config


@functools.cache
def composed(*overrides: str) -> Config:
    return compose(check_command_line(overrides).overrides)


def planned(*overrides: str) -> Layout:
    return layout(composed(*overrides))


def assert_shares_fit(plan: Layout) -> None:
    for index, bundle in enumerate(plan.bundles):
        on = plan.on(index)
        assert sum(actor.num_cpus for actor in on) <= bundle.num_cpus + 1e-9
        assert sum(actor.num_gpus for actor in on) <= bundle.num_gpus + 1e-9
        assert all(actor.num_cpus > 0 for actor in on)


@pytest.mark.parametrize("exp", group_choices()["exp"])
def test_shares_fit_in_every_experiment(exp: str) -> None:
    plan = planned(f"+exp={exp}")
    assert_shares_fit(plan)
    names = [(actor.role, actor.index) for actor in plan.actors]
    assert len(names) == len(set(names))


def test_the_default_fits_two_cpus() -> None:
    plan = planned("+exp=tiny")
    assert [(b.num_cpus, b.num_gpus) for b in plan.bundles] == [(1.0, 0), (1.0, 0)]
    seats = {(a.role, a.index): (a.bundle, a.num_cpus) for a in plan.actors}
    assert seats == {("rollout", 0): (0, 0.25), ("verify", 0): (0, 0.25), ("reference", 0): (0, 0.25),
                     ("learner", 0): (0, 0.25), ("learner", 1): (1, 1.0)}
    assert plan.demand == {"CPU": 2.0, "GPU": 0.0}  # the maximum over phases: two ranks, not 2 + 1 + 1
    assert plan.phase_threads() == {"rollout": 1, "verify, reference": 2, "learner": 2, "weight_sync": 3}
    assert lacks(plan, [{"CPU": 2}]) == []
    assert lacks(plan, [{"CPU": 1}, {"CPU": 1}]) == []  # each bundle fits a node of its own


def test_more_ranks_than_cpus_is_named() -> None:
    plan = planned("+exp=tiny", "learner.num_ranks=4")
    assert lacks(plan, [{"CPU": 2}]) == ["learner: needs 4 CPUs, the cluster has 2"]
    assert lacks(planned("+exp=tiny", "cluster.cpus_per_actor=0.5", "learner.num_ranks=4"), [{"CPU": 2}]) == []


def test_colocated_gpus_are_shared_in_thirds() -> None:
    plan = planned("+exp=akl_7b")
    assert plan.demand == {"CPU": 64.0, "GPU": 8.0}
    for index in range(8):
        roles = Counter(actor.role for actor in plan.on(index))
        assert roles == {"rollout": 1, "reference": 1, "learner": 1, "verify": 2}
        assert [actor.num_gpus for actor in plan.on(index) if actor.role in DEVICE_ROLES] == [0.3333] * 3
        assert [actor.num_cpus for actor in plan.on(index)] == [1.6] * 5
    assert lacks(plan, [{"CPU": 128, "GPU": 8}]) == []
    assert lacks(plan, [{"CPU": 128}]) == [f"{role}: needs 8 GPUs, the cluster has 0" for role in DEVICE_ROLES if plan.of(role)]


def test_a_critic_shares_the_learners_bundles_and_raises_no_demand() -> None:
    plan = planned("+exp=tiny", "objective.advantage=gae")
    assert plan.demand == planned("+exp=tiny").demand == {"CPU": 2.0, "GPU": 0.0}
    assert [(actor.bundle, actor.num_threads) for actor in plan.of("critic")] == [(0, 1), (1, 1)]
    assert plan.phase_threads()["critic"] == 2
    assert_shares_fit(plan)
    assert planned("+exp=tiny").of("critic") == () and "critic" not in planned("+exp=tiny").phase_threads()
    apart = planned("+exp=tiny", "objective.advantage=gae", "cluster.layout=separate")
    assert_shares_fit(apart)
    homes = {role: {actor.bundle for actor in apart.of(role)} for role in ("critic", "learner")}
    assert len(homes["critic"]) == 2 and not homes["critic"] & homes["learner"]


def test_separate_72b() -> None:
    """12 engines x 4 + 2 reference servers x 8 + 64 ranks = 128 GPUs = 16 nodes x 8."""
    plan = planned("+exp=akl_72b")
    gpus = {role: sum(actor.num_gpus for actor in plan.of(role)) for role in DEVICE_ROLES if plan.of(role)}
    assert gpus == {"rollout": 48, "reference": 16, "learner": 64}
    assert plan.demand == {"CPU": 1024.0, "GPU": 128.0}
    assert [bundle.num_gpus for bundle in plan.bundles] == [8] * 2 + [4] * 12 + [1] * 64
    assert len({actor.bundle for actor in plan.of("reference")}) == 2  # each server on one node
    assert [actor.index for actor in plan.of("reference")] == list(range(16))
    for role in DEVICE_ROLES:  # no device is shared
        others = {actor.bundle for other in DEVICE_ROLES if other != role for actor in plan.of(other)}
        assert not others & {actor.bundle for actor in plan.of(role)}
    assert lacks(plan, [{"CPU": 96, "GPU": 8}] * 16) == []


def test_what_a_cluster_lacks_for_72b() -> None:
    plan = planned("+exp=akl_72b")
    assert "learner: needs 64 GPUs, the cluster has 0" in lacks(plan, [{"CPU": 2}])
    assert "learner: needs 64 GPUs, the cluster has 0" in lacks(plan, [])
    (message,) = lacks(plan, [{"CPU": 200, "GPU": 8}] * 15)
    assert message == ("all roles together: need 128 GPUs (rollout 48, reference 16, learner 64), the cluster has 120")
    # Totals suffice, but no node is large enough: negative control for a check of totals alone.
    found = lacks(plan, [{"CPU": 96, "GPU": 2}] * 64)
    assert any(text.startswith("rollout: 12 bundles of 4 GPUs") for text in found)
    assert any(text.startswith("reference: 2 bundles of 8 GPUs") for text in found)


def test_separate_on_cpu_owns_bundles() -> None:
    plan = planned("+exp=akl_tiny_72b")
    assert len(plan.bundles) == 5 and plan.demand["CPU"] == pytest.approx(2.0)
    assert lacks(plan, [{"CPU": 2}]) == []
    assert len({actor.bundle for role in DEVICE_ROLES for actor in plan.of(role)}) == 5


def test_replay_has_no_engines() -> None:
    plan = planned("rollout.replay=some/folder")
    assert plan.of("rollout") == () and len(plan.of("learner")) == 2
    assert "none" in plan_text(composed("rollout.replay=some/folder", "model.path=org/name"), plan)


def test_threads_come_from_the_configuration() -> None:
    plan = planned("rollout.num_threads=3", "learner.num_threads=2", "reference.num_threads=5")
    assert {actor.role: actor.num_threads for actor in plan.actors} == {"rollout": 3, "learner": 2, "reference": 5, "verify": 1}


def test_batch_arithmetic() -> None:
    rows = dict(batch_rows(composed("+exp=akl_7b")))
    assert rows["samples"] == "128 prompts x group of 8 = 1,024"
    assert rows["tokens, at most"] == "1,024 x (1024 prompt + 3072 response) = 4,194,304"
    assert rows["optimizer updates"] == "2 of 512 samples (64 prompts)"
    assert rows["samples per rank and update"] == "64 on 8 ranks"
    assert rows["micro-batch budget"] == "16,384 tokens: at least 4 of the longest sequences"


def test_plan_text_shows_roles_and_lacks() -> None:
    config = composed("+exp=akl_72b")
    plan = layout(config)
    text = plan_text(config, plan, lacking=lacks(plan, [{"CPU": 2}]), notes=["a note"])
    for part in ("72.71 B parameters", "64 ZeRO-3 ranks", "12 engines", "this machine lacks", "learner: needs 64 GPUs",
                 "- a note", "forward, beta 0.001", "reverse, beta 0.04"):
        assert part in text
    assert "lacks nothing" in plan_text(config, plan)


def test_table_is_aligned() -> None:
    assert table(["a", "b"], [("xx", "1"), ("y", "22")]) == "  a   b\n  --  --\n  xx  1\n  y   22"
