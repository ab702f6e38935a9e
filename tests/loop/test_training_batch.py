"""Rewards to advantages on the driver, by hand: overlong penalty, leave-one-out, whitening over the batch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from akl_dist.config.schema import ObjectiveConfig
from akl_dist.contract.records import Turns
from akl_dist.summaries import objective_metrics, verify_metrics
from akl_dist.training_batch import overlong_metrics, shaped_rewards, training_groups
from tests.loop.test_summaries import LATE, NONE, OK, WRONG, group


def advantages(groups, *, max_tokens=10, **objective):
    made = training_groups(groups, ObjectiveConfig(**objective), max_tokens=max_tokens)
    return [list(g.advantages) for g in made]


def test_overlong_penalty():
    """Limit 10, buffer 4: nothing up to 6 tokens, half at 8, all at 10. Responses of 4, 8, 10 tokens and one without verdict."""
    groups = [group("a", (OK, OK, WRONG, LATE), lengths=(4, 8, 10, 10))]
    objective = ObjectiveConfig(overlong_buffer_tokens=4, overlong_penalty=1.0)
    rewards = shaped_rewards(groups, objective, max_tokens=10)
    assert rewards.rewards.tolist() == [1.0, 0.5, -1.0, 0.0] and rewards.valid.tolist() == [True, True, True, False]
    assert overlong_metrics(groups, objective, max_tokens=10) == {"objective/overlong_penalty_mean": pytest.approx(1.5 / 3)}
    assert verify_metrics([g.judged for g in groups])["verify/accuracy"] == pytest.approx(2 / 3), "accuracy stays raw"
    assert advantages(groups, normalize_std=False, overlong_buffer_tokens=4) == [pytest.approx([5 / 6, 2 / 6, -7 / 6, 0.0])]
    assert overlong_metrics(groups, ObjectiveConfig(), max_tokens=10) == {}


def test_zero_spread_is_counted_by_the_raw_outcome():
    """Nobody solved it; the length penalty spreads the rewards, and the group still counts as one without spread."""
    shaped = training_groups([group("a", (WRONG, NONE), lengths=(5, 10))], ObjectiveConfig(overlong_buffer_tokens=4), max_tokens=10)
    assert any(shaped[0].advantages)
    assert objective_metrics(shaped)["objective/zero_spread_group_fraction"] == 1.0


def test_rloo():
    """Rewards 1, 0, 0: each against the mean of the two others."""
    assert advantages([group("a", (OK, WRONG, WRONG))], advantage="rloo", normalize_std=False) == [pytest.approx([1, -0.5, -0.5])]


def test_reinforce_pp_counts_tokens():
    """Two responses of 1 and 3 tokens with rewards 1 and 0: mean 1/4, unbiased variance of the four tokens 1/4."""
    rows = [group("a", (OK,), lengths=(1,)), group("b", (WRONG,), lengths=(3,))]
    assert advantages(rows, advantage="reinforce_pp") == [pytest.approx([1.5]), pytest.approx([-0.5])]
    by_response = [0.5 / math.sqrt(0.5), -0.5 / math.sqrt(0.5)]
    assert advantages(rows, advantage="reinforce_pp")[0] != pytest.approx(by_response[:1]), "control: weights by response differ"


def test_reinforce_pp_baseline_subtracts_the_group_first():
    rows = [group("a", (OK, WRONG), lengths=(2, 2)), group("b", (OK, OK), lengths=(2, 2))]
    (first, second) = advantages(rows, advantage="reinforce_pp_baseline")
    scale = math.sqrt(4 * 0.25 / 7)  # eight tokens: +-1/2 on four, 0 on four
    assert first == pytest.approx([0.5 / scale, -0.5 / scale]) and second == pytest.approx([0.0, 0.0])
    alone = advantages(rows, advantage="reinforce_pp")
    assert alone[1][0] > 0, "control: without the baseline the solved group is pushed up"


def test_no_verdict_has_no_advantage():
    for advantage in ("grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"):
        (row,) = advantages([group("a", (OK, WRONG, LATE))], advantage=advantage)
        (without,) = advantages([group("a", (OK, WRONG))], advantage=advantage)
        assert row[2] == 0.0 and row[:2] == pytest.approx(without), advantage


def test_unknown_name():
    with pytest.raises(ValueError, match="expected grpo, rloo"):
        advantages([group("a", (OK, WRONG))], advantage="grp")


def test_a_response_without_a_trained_token_counts_in_its_group_and_trains_nothing():
    """Void turns left out (mask_response): the verdict is real, so the others are compared with it."""
    one = group("a", (OK, WRONG), lengths=(3, 4))
    turns = (Turns((1, 1, 1)), Turns((2, 1, 1), void=(0, 1), left_out=(0, 1)))
    one = replace(one, rollout=replace(one.rollout, turns=turns))
    (made,) = training_groups([one], ObjectiveConfig(normalize_std=False), max_tokens=10)
    assert made.trains == (True, False) and made.advantages == pytest.approx((0.5, -0.5))
    batch = shaped_rewards([one], ObjectiveConfig(), max_tokens=10)
    assert batch.trained_lengths.tolist() == [2, 0] and batch.lengths.tolist() == [3, 4]
