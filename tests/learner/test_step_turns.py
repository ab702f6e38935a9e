"""What an environment wrote between two turns changes no update: not the loss, not the gradient, not a metric."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from step_batches import VOCAB, run, sample

from akl_dist.config.schema import CorrectionConfig, KLConfig, ObjectiveConfig
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
    Turns,
    Verdict,
)
from akl_dist.learner.batch import samples_of
from akl_dist.zero3.planning import Totals, lengths_of, plan_updates

KEPT = np.array([True, True, False, False, False, True, False, True])
ANSWER = np.array([False, True, False, False, False, False, False, True])
OBJECTIVES = {
    "ctpo": ObjectiveConfig(policy_loss="ctpo", correction=CorrectionConfig(kind="tis", level="sequence", high=5.0)),
    "ppo": ObjectiveConfig(policy_loss="ppo"),
    "gspo": ObjectiveConfig(policy_loss="gspo"),
    "spo": ObjectiveConfig(policy_loss="spo", policy_loss_params={"epsilon": 0.2}, aggregation="seq_mean_token_mean"),
    "drpo": ObjectiveConfig(policy_loss="drpo", policy_loss_params={"delta": 10.0}, anchor="rollout"),
    "reward": ObjectiveConfig(policy_loss="reinforce", kl=KLConfig(placement="reward", estimator="sampled")),
}


def batches(objective: ObjectiveConfig, *, garbage: float):
    """The same response with what the environment wrote in between, and without."""
    rng = np.random.default_rng(3)
    n = len(KEPT)
    rollout, ref, logits = -rng.random(n), -rng.random(n), torch.from_numpy(rng.normal(size=(n, VOCAB)))
    old = torch.from_numpy(-rng.random(n))
    # A response's ids repeat over the vocabulary, so the short one must be cut from the long one.
    long = sample(n, rollout=rollout, ref=np.where(KEPT, ref, garbage), answer=ANSWER & KEPT, advantage=-0.7)
    long = dataclasses.replace(long, token_mask=KEPT)
    cut = {name: getattr(long, name)[KEPT] for name in ("response_ids", "rollout_logp", "ref_logp", "answer_mask")}
    short = dataclasses.replace(long, token_mask=None, **cut)
    objective = dataclasses.replace(objective, kl=dataclasses.replace(objective.kl, estimator="sampled"))
    totals = Totals(tokens=int(KEPT.sum()), sequences=1, answer_tokens=int(ANSWER.sum()))
    kept = torch.from_numpy(KEPT)
    with_turns = run([long], objective=objective, totals=totals, old=torch.where(kept, old, garbage), logits=logits)
    without = run([short], objective=objective, totals=totals, old=old[kept], logits=logits[kept])
    return with_turns, without


@pytest.mark.parametrize("garbage", [0.0, float("nan")])
@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_inserted_tokens_change_nothing(name: str, garbage: float) -> None:
    long, short = batches(OBJECTIVES[name], garbage=garbage)
    kept = torch.from_numpy(KEPT)
    assert long.loss == pytest.approx(short.loss, rel=1e-6)
    torch.testing.assert_close(long.gradient[kept], short.gradient)
    assert not long.gradient[~kept].any(), "what the environment wrote has no gradient"
    assert short.gradient.abs().max() > 1e-3
    assert long.sums == pytest.approx(short.sums, rel=1e-6, nan_ok=False) and long.maxima == pytest.approx(short.maxima)


def test_negative_control_all_tokens_count() -> None:
    """Without the mask the inserted tokens move the loss: the equality above is no accident."""
    rng = np.random.default_rng(3)
    n = len(KEPT)
    one = sample(n, rollout=-rng.random(n), ref=-rng.random(n), answer=ANSWER & KEPT, advantage=-0.7)
    masked = dataclasses.replace(one, token_mask=KEPT)
    logits = torch.from_numpy(rng.normal(size=(n, VOCAB)))
    totals = Totals(tokens=5, sequences=1, answer_tokens=2)
    assert run([one], totals=totals, logits=logits).loss != pytest.approx(run([masked], totals=totals, logits=logits).loss)


def training_group(turns: tuple[Turns, ...], trains: tuple[bool, ...]) -> tuple[TrainingGroup, int]:
    lengths = tuple(one.num_tokens for one in turns)
    rollout = RolloutGroup(Prompt("p", "s", "", (1, 2, 3), ""), lengths, ("stop",) * len(turns), 0, "e", None, turns)
    zeros = (0.0,) * len(turns)
    judged = JudgedGroup("p", (Verdict(Status.OK),) * len(turns), (0,) * len(turns), None)
    labelled = LabelledGroup(rollout, judged, ReferenceGroup("p", zeros, zeros, None), (1,) * len(turns), (0,) * 8, None)
    return TrainingGroup(labelled, zeros, trains), sum(lengths)


def test_the_plan_counts_trained_tokens_and_makes_room_for_all() -> None:
    group, n = training_group((Turns((2, 3, 1)), Turns((4, 1, 1), left_out=(0,))), (True, True))
    (plan,) = plan_updates([lengths_of(group)], num_ranks=1, updates_per_step=1, max_tokens_per_micro_batch=9)
    assert (plan.totals.tokens, plan.totals.sequences) == (3 + 1, 2)
    assert plan.micro_batches == ((((0, 0),), ((0, 1),)),), "3 + 6 - 1 input tokens each: two do not fit in 9"
    floats = np.zeros(n, np.float32)
    samples = samples_of(group, RolloutArrays(np.arange(n, dtype=np.int32), floats), ReferenceArrays(floats, floats),
                         RoleArrays(np.zeros(n, np.bool_)))
    assert [s.mask.astype(int).tolist() for s in samples] == [[1, 1, 0, 0, 0, 1], [0, 0, 0, 0, 0, 1]]
    assert [len(s.response_ids) for s in samples] == [6, 6]
