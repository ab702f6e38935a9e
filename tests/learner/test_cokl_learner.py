"""The CoKL term in the ZeRO-3 learner: plans by hand, and gradients in real processes against plain torch."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import cokl_world
import learner_world as world
import numpy as np
import pytest
import torch

from akl_dist.contract.records import Status
from akl_dist.learner.batch import pack
from akl_dist.learner.cokl import by_response, cokl_samples, plan_cokl, sequence_logp
from akl_dist.objective import cokl_terms
from akl_dist.zero3.planning import plan_updates

TOLERANCE = 1e-5  # of the largest entry: a difference of two float32 gradients, summed in another order

# --- planning ------------------------------------------------------------------------------------------------------

# Correct responses per prompt, policy 2 2 3 1 0 2 and reference 2 1 3 2 2 0.
TERMS = {"paper": {0, 1, 2, 3}, "group": {0, 1, 2, 5}, "reference_buffer": {0, 2, 3, 4}}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("estimator", cokl_world.ESTIMATORS)
def test_which_prompts_have_a_term_and_where(estimator, num_ranks):
    cokl = dataclasses.replace(cokl_world.COKL, estimator=estimator)
    plans, plan = cokl_world.planned(cokl, num_ranks=num_ranks)
    (ranks,) = plan.updates
    assert [(r.total_prompts, r.skipped_prompts) for r in ranks] == [(4, 2)] * num_ranks
    assert {p.number for r in ranks for p in r.prompts} == TERMS[estimator]
    for rank, update in enumerate(ranks):
        if estimator != "reference_buffer":  # which needs nothing of the group
            assert {p.number for p in update.prompts} <= set(plans[0].groups[rank])
        scored = [key for row in update.score_rows for key in row]
        assert sorted(scored) == sorted(update.keys) and len(set(scored)) == len(scored)
        own_rows = [key for row in update.reference_rows for key in row]
        assert sorted(own_rows) == sorted(key for p in update.prompts for key in p.reference)
        assert all(key in cokl_world.CORRECT for p in update.prompts for key in p.current)
        policy_rows = {key for row in plans[0].micro_batches[rank] for key in row}
        assert {key for p in update.prompts for key in p.current} <= policy_rows
        assert set(plan.reference[rank]) == {p.number for p in update.prompts if p.reference}
    for rows in ("score_rows", "reference_rows"):  # forward passes are collectives
        assert len({len(getattr(update, rows)) for update in ranks}) == 1


def test_updates_share_out_prompts_and_anchors():
    cokl = dataclasses.replace(cokl_world.COKL, estimator="group")
    _, plan = cokl_world.planned(cokl, num_ranks=2, updates=2)
    assert [(u[0].total_prompts, u[0].skipped_prompts) for u in plan.updates] == [(3, 0), (1, 2)]
    anchored = dataclasses.replace(cokl, estimator="reference_buffer", prompts="anchor_dataset")
    _, plan = cokl_world.planned(anchored, num_ranks=2, updates=2)
    assert [(u[0].total_prompts, u[0].skipped_prompts) for u in plan.updates] == [(2, 1), (2, 1)]
    numbers = [p.number for update in plan.updates for rank in update for p in rank.prompts]
    assert sorted(numbers) == [-5, -4, -3, -1]  # anchors 0, 2, 3 and 4, numbered from -1
    for rank in range(2):
        own = {p.number for update in plan.updates for p in update[rank].prompts}
        assert set(plan.reference[rank]) == own
        assert all(plan.reference[rank][n].prompt_id == f"anchor/{-1 - n}" for n in own)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_reference_responses_have_a_term_where_none_of_the_group_trains(num_ranks):
    """Groups 0 (no verdict) and 3 to 5 (a whole update): prompts 0 and 2, 3 and 4 have two reference responses or more."""
    own = cokl_world.untrained(cokl_world.samples(), {0, 3, 4, 5})
    cokl = dataclasses.replace(cokl_world.COKL, estimator="reference_buffer")
    plans, plan = cokl_world.planned(cokl, num_ranks=num_ranks, updates=2, own=own)
    assert [p.totals.tokens > 0 for p in plans] == [True, False]
    assert [(u[0].total_prompts, u[0].skipped_prompts) for u in plan.updates] == [(2, 1), (2, 1)]
    assert [{p.number for rank in u for p in rank.prompts} for u in plan.updates] == [{0, 2}, {3, 4}]
    for rank in range(num_ranks):
        assert set(plan.reference[rank]) == {p.number for u in plan.updates for p in u[rank].prompts}
    for estimator in ("paper", "group"):  # the policy's own responses are members only where they train
        _, plan = cokl_world.planned(dataclasses.replace(cokl, estimator=estimator), num_ranks=num_ranks, updates=2, own=own)
        assert [(u[0].total_prompts, u[0].skipped_prompts) for u in plan.updates] == [(2, 1), (0, 3)]


def test_rows_hold_no_more_than_their_capacity():
    cokl = dataclasses.replace(cokl_world.COKL, estimator="paper")
    _, plan = cokl_world.planned(cokl, num_ranks=1, capacity=26)
    (update,) = plan.updates[0]
    sizes = {key: size for prompt in update.prompts for key, size in prompt.sizes.items()}
    assert len(update.score_rows) > 2
    assert all(sum(sizes[key] for key in row) <= 26 for row in (*update.score_rows, *update.reference_rows))


def test_responses_without_a_verdict_are_no_members():
    own = cokl_world.samples()
    groups = cokl_world.training_groups(own)
    assert groups[0].labelled.judged.verdicts[2].status is Status.TIMEOUT and not groups[0].trains[2]
    plans = plan_updates(world.lengths(own), num_ranks=1, updates_per_step=1, max_tokens_per_micro_batch=64)
    cokl = dataclasses.replace(cokl_world.COKL, estimator="group")
    (update,) = plan_cokl(plans, groups, [], cokl=cokl, num_ranks=1, capacity=64).updates[0]
    assert (0, 2) not in update.keys


def test_reference_samples_are_cut_into_responses():
    own = cokl_world.samples()
    references = cokl_world.reference_samples(cokl_world.training_groups(own))
    members = cokl_samples(own, {2: references[2]}, [references[2].arrays])
    assert [len(members.samples[2, -1 - j].response_ids) for j in range(3)] == [2, 7, 4]
    assert members.samples[2, -2].response_ids.tolist() == references[2].arrays.token_ids[2:9].tolist()
    assert members.reference_logp == {(2, -1 - j): references[2].arrays.seq_logp[j] for j in range(3)}
    assert pack([(2, -1)], [members.samples[2, -1]]).mask.all()
    broken = dataclasses.replace(references[2].arrays, seq_logp=references[2].arrays.seq_logp[:2])
    with pytest.raises(ValueError, match="p/2"):
        cokl_samples(own, {2: references[2]}, [broken])


def test_log_probs_of_whole_responses():
    own = cokl_world.samples()
    lengths = [len(own[key].response_ids) for key in ((1, 0), (1, 1))]
    flat = torch.arange(1.0, 1 + sum(lengths))
    first, both = sum(range(1, 1 + lengths[0])), sum(range(1, 1 + sum(lengths)))
    assert by_response([((1, 0), (1, 1)), ()], [flat, torch.zeros(1)], own) == {(1, 0): first, (1, 1): both - first}
    assert by_response([((1, 0),)], [None], own) is None
    batch = pack([(1, 0), (1, 1)], [own[1, 0], own[1, 1]])
    assert sequence_logp(batch, flat).tolist() == [first, both - first]


# --- gradients in real processes -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cokl")
    world.build_model(folder / "model")
    program = str(Path(__file__).with_name("cokl_world.py"))
    out: dict = {"folder": folder}
    for ranks in (1, 2):
        out[ranks] = world.finish(world.start("cokl", ranks, folder / f"ranks_{ranks}", folder, program), folder / f"ranks_{ranks}")
    return out


def plain_term(folder: Path, cokl) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of beta / P * sum c log pi(y), one response at a time, and P. No packing, no plan."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    own = cokl_world.samples()
    groups = cokl_world.training_groups(own)
    anchored = cokl.prompts == "anchor_dataset"
    rows = []  # (prompt, is_reference, logp of the response, under ref, under mu, tokens)

    def logp_of(prompt, response) -> torch.Tensor:
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        logprobs = (model(ids[None]).logits[0, len(prompt) - 1 : -1] / world.TEMPERATURE).log_softmax(-1)
        return logprobs.gather(-1, torch.from_numpy(response.astype(np.int64))[:, None]).sum().double()

    if not anchored:
        for key, s in own.items():
            if key in cokl_world.CORRECT:
                rows.append((key[0], False, logp_of(s.prompt_ids, s.response_ids), s.ref_logp.sum(), s.rollout_logp.sum(),
                             len(s.response_ids)))
    if cokl.estimator != "group":
        for number, one in enumerate(cokl_world.reference_samples(groups, anchors=anchored)):
            pieces = np.split(one.arrays.token_ids, np.cumsum(one.response_lengths)[:-1]) if one.response_lengths else []
            for tokens, ref in zip(pieces, one.arrays.seq_logp, strict=True):
                rows.append((number, True, logp_of(np.asarray(one.prompt_ids), tokens), ref, 0.0, len(tokens)))
    prompts, is_reference, logps, ref, mu, lengths = zip(*rows, strict=True)
    logp = torch.stack(logps)

    def reals(values) -> torch.Tensor:
        return torch.tensor([float(v) for v in values], dtype=torch.float64)

    terms = cokl_terms(
        cokl.estimator, seq_logp=logp, seq_ref_logp=reals(ref), correct=torch.ones(len(rows)), group_index=torch.tensor(prompts),
        seq_behaviour_logp=logp.detach() if cokl.estimator == "paper" else reals(mu), is_reference=torch.tensor(is_reference),
        clip=cokl.clip, min_ess_fraction=cokl.min_ess_fraction, length_normalize=cokl.length_normalize,
        lengths=torch.tensor(lengths),
    )
    count = int(terms.has_term.sum())
    (cokl.beta / count * (terms.coefficients * logp).sum()).backward()
    return {name: p.grad for name, p in model.named_parameters()}, count


def largest_gap(a, b) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.stack
@pytest.mark.parametrize("name", list(cokl_world.variants()))
def test_gradient_equals_plain_torch_for_every_rank_count_and_cut(runs, name):
    expected, count = plain_term(runs["folder"] / "model", cokl_world.variants()[name])
    largest = max(float(g.abs().max()) for g in expected.values())
    assert largest > 0.3
    for ranks, cut in itertools.product((1, 2), (40, 4096)):
        for rank in runs[ranks]:
            found, metrics = rank[name][cut]
            term = {key: value - rank["without"][key] for key, value in found.items()}
            assert largest_gap(term, expected) < TOLERANCE * largest
            assert metrics["objective/cokl_prompts"] == count


@pytest.mark.stack
def test_a_denominator_of_one_rank_would_show(runs):
    """Negative control: two ranks with half the prompts each, dividing by their own number, would double the term."""
    expected, _ = plain_term(runs["folder"] / "model", cokl_world.variants()["group"])
    doubled = {name: 2 * value for name, value in expected.items()}
    found, _ = runs[2][0]["group"][40]
    term = {key: value - runs[2][0]["without"][key] for key, value in found.items()}
    assert largest_gap(term, doubled) > 100 * TOLERANCE


@pytest.mark.stack
@pytest.mark.parametrize("prompts", ["same", "anchor_dataset"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_update_of_the_term_alone(runs, ranks, prompts):
    """Nothing of the step trains: the gradient is the term's, and the update is carried out and not skipped."""
    cokl = dataclasses.replace(cokl_world.COKL, estimator="reference_buffer", prompts=prompts)
    expected, count = plain_term(runs["folder"] / "model", cokl)
    largest = max(float(g.abs().max()) for g in expected.values())
    for rank in runs[ranks]:
        found = rank["alone"][prompts]
        assert (count, found["steps"]) == (4, (2, 0))  # half of the prompts are each update's
        assert found["metrics"]["objective/cokl_prompts"] == 4 and "learner/tokens" not in found["metrics"]
        assert found["metrics"]["learner/loss"] == pytest.approx(found["metrics"]["objective/cokl_loss"])
        assert found["metrics"]["learner/grad_norm"] > 0
        assert largest_gap(found["gradients"], expected) < TOLERANCE * largest


@pytest.mark.stack
def test_metrics_and_two_updates(runs):
    for ranks in (1, 2):
        assert len({rank["checksum"] for rank in runs[ranks]}) == 1
        for rank in runs[ranks]:
            steps, metrics = rank["update"]
            assert steps == 2 and all(np.isfinite(value) for value in metrics.values())
            assert (metrics["objective/cokl_prompts"], metrics["objective/cokl_skipped_prompts"]) == (4, 2)
            assert metrics["objective/cokl_duplicates"] == 1
            assert 0 < metrics["objective/cokl_largest_weight"] <= 1 and 1 <= metrics["objective/cokl_ess"] <= 3
            assert "objective/cokl_divergence" not in metrics  # the paper's weights are of two different sets
            alone = {k: v for k, v in runs[1][0]["update"][1].items() if k != "learner/padding_fraction"}
            assert {k: metrics[k] for k in alone} == pytest.approx(alone, rel=1e-3, abs=1e-5)
    _, metrics = runs[1][0]["group"][40]
    assert metrics["objective/cokl_divergence"] > 0 and 0 < metrics["objective/cokl_tempering"] <= 1
