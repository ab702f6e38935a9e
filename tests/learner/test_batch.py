"""Planning by lengths and packing into rows."""

from __future__ import annotations

import learner_world as world
import numpy as np
import pytest
import torch

from akl_dist.contract.errors import UserError
from akl_dist.contract.packing import deal, first_fit_decreasing, pack_row
from akl_dist.learner.batch import Sample, pack
from akl_dist.zero3.planning import GroupLengths, plan_updates


def group(*responses, prompt=3, trains=None, answer=1):
    return GroupLengths(prompt, tuple(responses), (answer,) * len(responses), trains or (True,) * len(responses))


def test_deal_by_hand():
    # 8 -> hand 0; 7 -> 1; 6 -> 1 (7 < 8); 5 -> 0; 4 -> 0 (13 = 13, lower hand): sums 17 and 13.
    assert deal([5, 8, 4, 7, 6], 2) == [[0, 1, 2], [3, 4]]
    assert deal([3], 3) == [[0], [], []]


def test_first_fit_decreasing_by_hand():
    # 7 | 5 (12 > 10) | 4 fits beside 5 | 3 fits beside 7.
    assert first_fit_decreasing([4, 7, 3, 5], 10) == [[1, 2], [0, 3]]
    with pytest.raises(UserError, match="11 tokens"):
        first_fit_decreasing([11], 10)


def test_pack_row_by_hand():
    row = pack_row([([7, 8], [1, 2, 3]), ([9], [4])])
    # The last token of a response is predicted but never an input.
    assert row.input_ids.tolist() == [7, 8, 1, 2, 9]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 0]
    assert row.predict_index.tolist() == [1, 2, 3, 4]  # the prompt's last position predicts the first response token
    assert row.targets.tolist() == [1, 2, 3, 4]
    assert row.sequence_index.tolist() == [0, 0, 0, 1] and row.token_index.tolist() == [0, 1, 2, 0]


def test_plan_counts_only_what_trains():
    groups = [group(4, 6, trains=(True, False)), group(5, 5), group(2, trains=(False,))]
    (plan,) = plan_updates(groups, num_ranks=2, updates_per_step=1, max_tokens_per_micro_batch=100)
    assert (plan.totals.tokens, plan.totals.sequences, plan.totals.answer_tokens) == (14, 3, 3)
    assert plan.totals.reasoning_tokens == 11
    assert plan.groups == ((1,), (0,))  # a fully masked group is sent nowhere
    assert plan.micro_batches == ((((1, 0), (1, 1)),), (((0, 0),),))


def test_updates_are_cut_in_prompt_order_before_dealing():
    groups = [group(n) for n in (1, 9, 2, 8)]
    plans = plan_updates(groups, num_ranks=1, updates_per_step=2, max_tokens_per_micro_batch=100)
    assert [sorted(g for g in plan.groups[0]) for plan in plans] == [[0, 1], [2, 3]]
    assert [plan.totals.tokens for plan in plans] == [10, 10]


@pytest.mark.parametrize("seed", range(5))
def test_every_sample_lands_once_within_the_budget(seed):
    rng = np.random.default_rng(seed)
    groups = [GroupLengths(int(rng.integers(1, 9)), tuple(int(x) for x in rng.integers(1, 30, 4)), (0,) * 4,
                           tuple(bool(x) for x in rng.random(4) < 0.8)) for _ in range(11)]
    plans = plan_updates(groups, num_ranks=3, updates_per_step=2, max_tokens_per_micro_batch=50)
    assert plans == plan_updates(groups, num_ranks=3, updates_per_step=2, max_tokens_per_micro_batch=50)
    seen = []
    for plan in plans:
        assert len({len(rank) for rank in plan.micro_batches}) == 1  # same number of collectives on every rank
        for rank in range(3):
            for row in plan.micro_batches[rank]:
                assert sum(groups[g].prompt_tokens + groups[g].response_tokens[s] - 1 for g, s in row) <= 50
                assert {g for g, _ in row} <= set(plan.groups[rank])
                seen += row
        dealt = [g for rank in plan.groups for g in rank]
        assert len(dealt) == len(set(dealt))  # whole groups
    assert sorted(seen) == [(g, s) for g, one in enumerate(groups) for s, trains in enumerate(one.trains) if trains]


def test_ranks_without_work_get_dummies():
    (plan,) = plan_updates([group(3, 3)], num_ranks=2, updates_per_step=1, max_tokens_per_micro_batch=5)
    assert plan.micro_batches == ((((0, 0),), ((0, 1),)), ((), ()))
    assert plan.padding_fraction == pytest.approx(2 / 12)  # two dummy tokens beside 2 x 5 real ones
    dummy = pack((), [])
    assert dummy.input_ids.shape == (1, 1) and not dummy.mask.any()


def test_nothing_to_train_is_a_plan_of_zero_micro_batches():
    (plan,) = plan_updates([group(3, trains=(False,))], num_ranks=2, updates_per_step=1, max_tokens_per_micro_batch=9)
    assert plan.totals.tokens == 0 and plan.micro_batches == ((), ()) and plan.padding_fraction == 0.0


def test_grid_and_masks():
    def sample(n, trains):
        floats = np.arange(n, dtype=np.float32)
        return Sample(np.array([1]), np.arange(n), floats, floats, {}, floats > 0, 2.0, trains)

    batch = pack([(0, 0), (0, 1)], [sample(1, True), sample(3, False)])
    assert batch.grid(batch.rollout_logp).tolist() == [[0.0, 0.0, 0.0], [0.0, 1.0, 2.0]]
    assert batch.grid(batch.mask, False).tolist() == [[True, False, False], [False, False, False]]


def with_rows(n, **rows):
    floats = np.arange(n, dtype=np.float32)
    return Sample(np.array([1]), np.arange(n), floats, -floats, rows, floats > 0, 2.0, True)


def test_the_references_arrays_reach_the_micro_batch():
    bits = np.array([[0x3F80, 0xC000]], np.uint16)  # 1 and -2 in bfloat16
    batch = pack([(0, 0), (0, 1)], [with_rows(1, hidden=bits), with_rows(2, hidden=bits.repeat(2, 0))])
    assert batch.ref_hidden is not None and batch.ref_hidden.dtype == torch.bfloat16 and batch.ref_topk is None
    assert batch.ref_hidden.tolist() == [[1.0, -2.0]] * 3
    rows = {"topk_ids": np.array([[7, 8]], np.int32), "topk_logp": np.array([[-1, -2]], np.float32),
            "topk_rest": np.array([-3], np.float32)}
    batch = pack([(0, 0), (0, 1)], [with_rows(1, **rows), with_rows(2, **{k: v.repeat(2, 0) for k, v in rows.items()})])
    assert batch.ref_topk is not None and batch.ref_hidden is None
    assert batch.ref_topk.ids.tolist() == [[7, 8]] * 3 and batch.ref_topk.rest_logp.tolist() == [-3.0] * 3
    assert batch.ref_topk.target_logp.tolist() == batch.ref_logp.tolist() == [0.0, 0.0, -1.0]


def test_misaligned_arrays_are_refused():
    with pytest.raises(ValueError, match="rollout_logp"):
        Sample(np.array([1]), np.arange(3), np.zeros(2), np.zeros(3), {}, np.zeros(3, bool), 0.0, True)
    with pytest.raises(ValueError, match="hidden has 1 rows, expected 3"):
        with_rows(3, hidden=np.zeros((1, 2)))
    with pytest.raises(ValueError, match="different arrays"):
        pack([(0, 0), (0, 1)], [with_rows(1, hidden=np.zeros((1, 2))), with_rows(1)])


# --- isolation of packed sequences ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(world.build_model(tmp_path_factory.mktemp("model"))).eval()


def packing_gap(model, *, use_cache: bool) -> float:
    """Largest difference of log-probs between a packed row and the same sequences one by one."""
    sequences = [([1, 2, 3], [4, 5, 6, 7]), ([8, 9], [10, 11, 12]), ([13], [14, 15])]
    row = pack_row(sequences)
    with torch.no_grad():
        packed = model(input_ids=torch.from_numpy(row.input_ids)[None], position_ids=torch.from_numpy(row.position_ids)[None],
                       use_cache=use_cache).logits[0]
        alone = [model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] for prompt, response in sequences]
    return float((packed[torch.from_numpy(row.predict_index)] - torch.cat(alone)).abs().max())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_sequences_do_not_see_each_other(model, attention):
    model.set_attn_implementation(attention)
    assert packing_gap(model, use_cache=False) < 1e-4
    assert packing_gap(model, use_cache=True) > 0.1  # negative control: with a cache they do
