"""The learner's test world with a CoKL term: verdicts, reference samples, and a program that runs ranks as real processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import learner_world as world
import numpy as np

from akl_dist.config.schema import CoKLConfig
from akl_dist.contract.records import (
    JudgedGroup,
    LabelledGroup,
    Prompt,
    ReferenceArrays,
    ReferenceGroup,
    RoleArrays,
    RolloutArrays,
    RolloutGroup,
    Status,
    TrainingGroup,
    Verdict,
)
from akl_dist.contract.reference_samples import ReferenceSampleArrays, ReferenceSamples
from akl_dist.learner.batch import Sample
from akl_dist.learner.cokl import CoklPlan, cokl_samples, plan_cokl
from akl_dist.zero3.planning import UpdatePlan, plan_updates

ESTIMATORS = ("paper", "group", "reference_buffer")
COKL = CoKLConfig(beta=0.7, min_ess_fraction=0.5)
CORRECT = {(0, 0), (0, 1), (1, 0), (1, 2), (2, 0), (2, 1), (2, 2), (3, 1), (5, 0), (5, 1)}
"""Correct responses of the policy: two, two, three, one, none, two of three."""
REFERENCE_LENGTHS = ((3, 9), (5,), (2, 7, 4), (6, 6), (8, 3), ())
"""Correct responses of the reference to each prompt, in tokens."""


def samples() -> dict[tuple[int, int], Sample]:
    return world.make_samples()


def verdict(key: tuple[int, int], sample: Sample) -> Verdict:
    if not sample.trains:
        return Verdict(Status.TIMEOUT)
    return Verdict(Status.OK if key in CORRECT else Status.WRONG)


def training_groups(own: dict[tuple[int, int], Sample], keep: Callable[[Any], Any] = lambda arrays: None) -> list[TrainingGroup]:
    """The samples as records; ``keep`` makes the handles of their arrays."""

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(member, name) for member in members])

    groups = []
    for number in range(1 + max(g for g, _ in own)):
        keys = [key for key in sorted(own) if key[0] == number]
        members = [own[key] for key in keys]
        lengths = tuple(len(m.response_ids) for m in members)
        prompt = Prompt(f"p/{number}", "p", "", tuple(members[0].prompt_ids.tolist()), "1")
        size, zeros = len(keys), (0,) * len(keys)
        tokens, judgement = RolloutArrays(joined("response_ids"), joined("rollout_logp")), tuple(
            verdict(key, own[key]) for key in keys)
        rollout = RolloutGroup(prompt, lengths, ("stop",) * size, 0, "e", keep(tokens))
        judged = JudgedGroup(prompt.prompt_id, judgement, zeros, None)
        hidden = np.concatenate([m.ref_rows["hidden"] for m in members])
        scores = keep(ReferenceArrays(joined("ref_logp"), joined("ref_logp"), hidden=hidden))
        reference = ReferenceGroup(prompt.prompt_id, (0.0,) * size, (0.0,) * size, scores)
        answers = tuple(int(m.answer_mask.sum()) for m in members)
        labelled = LabelledGroup(rollout, judged, reference, answers, (0,) * 8, keep(RoleArrays(joined("answer_mask"))))
        advantages = tuple(m.advantage if m.trains else 0.0 for m in members)
        groups.append(TrainingGroup(labelled, advantages, tuple(m.trains for m in members)))
    return groups


def reference_samples(groups: list[TrainingGroup], *, anchors: bool = False) -> list[ReferenceSamples]:
    """Random tokens; the two of prompt 3 are the same response. As anchors they bear other ids."""
    rng = np.random.default_rng(8)
    out = []
    for number, lengths in enumerate(REFERENCE_LENGTHS):
        tokens = rng.integers(0, world.VOCAB, sum(lengths)).astype(np.int32)
        logp = -3.0 * np.asarray(lengths, np.float64) - rng.random(len(lengths))
        if number == 3:
            tokens[6:], logp[1] = tokens[:6], logp[0]
        prompt = groups[number].labelled.rollout.prompt
        name = f"anchor/{number}" if anchors else prompt.prompt_id
        out.append(ReferenceSamples(name, prompt.token_ids, lengths, 4, ReferenceSampleArrays(tokens, logp)))
    return out


def planned(
    cokl: CoKLConfig, *, num_ranks: int, updates: int = 1, capacity: int = 64, own: dict | None = None
) -> tuple[list[UpdatePlan], CoklPlan]:
    own = samples() if own is None else own
    groups = training_groups(own)
    plans = plan_updates(world.lengths(own), num_ranks=num_ranks, updates_per_step=updates, max_tokens_per_micro_batch=capacity)
    references = [] if cokl.estimator == "group" else reference_samples(groups, anchors=cokl.prompts == "anchor_dataset")
    return plans, plan_cokl(plans, groups, references, cokl=cokl, num_ranks=num_ranks, capacity=capacity)


def members_of(plan: CoklPlan, rank: int, own: dict[tuple[int, int], Sample]):
    mine = plan.reference[rank]
    return cokl_samples(own, mine, [one.arrays for one in mine.values()])


def gradients(worker, cokl: CoKLConfig, *, capacity: int, own: dict[tuple[int, int], Sample] | None = None) -> tuple[dict, dict]:
    """(gradients of the whole loss, metrics of the term)."""
    from akl_dist.learner.cokl_updates import CoklUpdates

    own = samples() if own is None else own
    plans, cokl_plan = planned(cokl, num_ranks=worker.world_size, capacity=capacity, own=own)
    plan = plans[0].for_rank(worker.rank)
    updates = CoklUpdates(
        cokl_plan.for_rank(worker.rank), members_of(cokl_plan, worker.rank, own), cokl, trained=[True], old=[None],
        device=worker.device, forward=lambda batch: worker._forward(batch).logp)
    term = updates.term(0)
    worker.accumulate_gradients(own, plan, old_logp=[None] * len(plan.micro_batches), step=0, term=term)
    found = world.full_gradients(worker)
    worker.engine.optimizer.zero_grad()
    return found, updates.metrics()


def untrained(own: dict[tuple[int, int], Sample], groups: Container[int]) -> dict[tuple[int, int], Sample]:
    """The samples, those of ``groups`` without a verdict."""
    return {key: dataclasses.replace(s, trains=False) if key[0] in groups else s for key, s in own.items()}


def updated_alone(worker, cokl: CoKLConfig) -> dict:
    """What two updates report of a step of which no response trains."""
    plans, cokl_plan = planned(cokl, num_ranks=worker.world_size, updates=2, own=untrained(samples(), range(6)))
    worker.objective = dataclasses.replace(worker.objective, cokl=cokl)
    update = worker.update({}, [plan.for_rank(worker.rank) for plan in plans], step=1,
                           cokl=(cokl_plan.for_rank(worker.rank), members_of(cokl_plan, worker.rank, {})))
    return {"steps": (update.optimizer_steps, update.skipped_steps), "metrics": dict(update.metrics)}


def variants() -> dict[str, CoKLConfig]:
    named = {name: dataclasses.replace(COKL, estimator=name) for name in ESTIMATORS}
    named["anchor"] = dataclasses.replace(COKL, estimator="reference_buffer", prompts="anchor_dataset")
    named["per_token"] = dataclasses.replace(COKL, estimator="group", length_normalize=True)
    return named


def scenario_cokl(worker, folder: Path) -> dict:
    out: dict = {"without": world.gradients_of(worker, samples(), max_tokens=64)}
    for name, cokl in variants().items():
        out[name] = {cut: gradients(worker, cokl, capacity=cut) for cut in (40, 4096)}
    alone = {"same": variants()["reference_buffer"], "anchor_dataset": variants()["anchor"]}
    nothing = untrained(samples(), range(6))
    out["alone"] = {name: {"gradients": gradients(worker, cokl, capacity=40, own=nothing)[0]} for name, cokl in alone.items()}
    # two updates by the paper's estimator: the second one's ratios are against the weights before the first
    cokl = dataclasses.replace(COKL, estimator="paper")
    own = samples()
    plans, cokl_plan = planned(cokl, num_ranks=worker.world_size, updates=2)
    worker.objective = dataclasses.replace(worker.objective, cokl=cokl)
    update = worker.update(own, [plan.for_rank(worker.rank) for plan in plans], step=1,
                           cokl=(cokl_plan.for_rank(worker.rank), members_of(cokl_plan, worker.rank, own)))
    out["update"] = (update.optimizer_steps, dict(update.metrics))
    for name, cokl in alone.items():
        out["alone"][name] |= updated_alone(worker, cokl)
    out["checksum"] = worker.parameters_checksum()
    return out


if __name__ == "__main__":
    world.scenario_cokl = scenario_cokl
    world.main()
