"""Conversations from verdicts to the learner: every stage counts the same tokens, and what the environment wrote is judged nowhere.

Random conversations are labelled, turned into training groups, planned, packed, dumped and read back.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from verify_examples import group_of, reference_of, tiny_tokenizer

from akl_dist.bookkeeping.rollout_dump import read_rollouts, rows_of_group, write_rollouts
from akl_dist.config.schema import ObjectiveConfig, RolesConfig, VerifyConfig
from akl_dist.contract.records import RolloutArrays, RolloutGroup, Status, Turns
from akl_dist.critic.batch import pack as critic_pack
from akl_dist.critic.batch import samples_of as critic_samples
from akl_dist.learner.batch import pack, samples_of
from akl_dist.summaries import objective_metrics, roles_metrics, rollout_metrics
from akl_dist.training_batch import shaped_rewards, training_groups
from akl_dist.verify.worker import LabelParts, VerifyWorker
from akl_dist.zero3.planning import lengths_of, plan_updates

CALL, WRITTEN = "```p\n1+1\n```<eos>", "<user>{}<assistant>"
RIGHT, WRONG, VOID = "<think></think>\\boxed{16}<eos>", "<think></think>\\boxed{15}<eos>", "<think>7<eos>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return folder, tiny_tokenizer(folder)


@pytest.fixture(scope="module")
def worker(tokenizer):
    folder, core = tokenizer
    made = VerifyWorker(str(folder), end_ids=[core.token_to_id("<eos>")], config=VerifyConfig(num_workers=1), roles=RolesConfig(),
                        num_workers=1)
    yield made
    made.close()


def conversation(core, pieces, **fields):
    """Token ids and turns from texts, sampled and written by turns."""
    ids = [core.encode(text, add_special_tokens=False).ids for text in pieces]
    return [i for piece in ids for i in piece], Turns(tuple(map(len, ids)), **fields)


def group_of_turns(core, conversations, *, finish, prompt_id="p/0", prompt="<user>7+3+6=<assistant>"):
    ids, turns = zip(*conversations, strict=True)
    plain = group_of(core, ["1"], prompt=prompt, prompt_id=prompt_id)
    flat = np.asarray([i for row in ids for i in row], np.int32)
    sampled = np.concatenate([one.sampled_mask() for one in turns])
    logp = np.where(sampled, -0.5, 0).astype(np.float32)
    return RolloutGroup(plain.prompt, tuple(map(len, ids)), tuple(finish), 0, "e", RolloutArrays(flat, logp), turns)


@pytest.mark.parametrize("said", ["\\boxed{16}", "<think></think>\\boxed{16}", "</think>16", "<eos>\\boxed{16}", "16"])
def test_what_the_tool_printed_is_never_the_answer(worker, tokenizer, said):
    _, core = tokenizer
    cases = [  # pieces, finish, status
        ([CALL, WRITTEN.format(said), WRONG], "stop", Status.WRONG),
        ([CALL, WRITTEN.format(said), VOID], "stop", Status.NO_ANSWER),
        ([CALL, WRITTEN.format(said), "<eos>"], "stop", Status.NO_ANSWER),
        ([CALL, WRITTEN.format(said), CALL], "turns", Status.NO_ANSWER),
        ([CALL, WRITTEN.format(said), "7"], "length", Status.NO_ANSWER),
        (["<think>" + CALL, WRITTEN.format(said), "\\boxed{16}<eos>"], "stop", Status.NO_ANSWER),
        ([WRONG, WRITTEN.format(said)], "stop", Status.WRONG),
        ([CALL, WRITTEN.format(said), RIGHT], "stop", Status.OK),
    ]
    group = group_of_turns(core, [conversation(core, pieces) for pieces, _, _ in cases], finish=[finish for _, finish, _ in cases])
    (judged,) = worker.judge([group], [group.arrays])
    assert [v.status for v in judged.verdicts] == [status for _, _, status in cases]
    sampled = np.concatenate([one.sampled_mask() for one in group.turns])
    assert not judged.arrays.position_mask[~sampled].any() and not judged.arrays.verifier_mask[~sampled].any()


@pytest.mark.parametrize("seed", range(6))
def test_every_stage_counts_the_same_tokens(worker, tokenizer, tmp_path, seed):
    _, core = tokenizer
    dice = random.Random(seed)

    def one():
        pieces, void = [], []
        for turn in range(dice.randint(1, 3)):
            pieces += [dice.choice([CALL, "<eos>"]), WRITTEN.format(dice.choice(["", "42", "\\boxed{16}" * 3]))]
            void += [turn] if dice.random() < 0.3 else []
        if dice.random() < 0.8:  # else the response ends with what the environment wrote
            pieces.append(dice.choice([RIGHT, WRONG, VOID, "<eos>"]))
        left_out = tuple(void) if dice.random() < 0.7 else tuple(range((len(pieces) + 1) // 2))
        return conversation(core, pieces, void=tuple(void), left_out=left_out, calls=1, score=dice.choice([None, 0.5]),
                            fault="gone" if dice.random() < 0.15 else "")

    groups = [group_of_turns(core, [one() for _ in range(4)], finish=["stop"] * 4, prompt_id=f"p/{index}") for index in range(3)]
    judged = worker.judge(groups, [group.arrays for group in groups])
    assert all((v.reward is None) == bool(t.fault) for j, g in zip(judged, groups, strict=True)
               for v, t in zip(j.verdicts, g.turns, strict=True))
    rng = np.random.default_rng(seed)
    references = [reference_of(g, np.where(np.concatenate([t.sampled_mask() for t in g.turns]), rng.random(g.num_tokens), np.nan))
                  for g in groups]
    labelled = worker.label([LabelParts(g, g.arrays, j, j.arrays, r, r.arrays)
                             for g, j, r in zip(groups, judged, references, strict=True)])
    objective = ObjectiveConfig(overlong_buffer_tokens=8)
    training = training_groups(labelled, objective, max_tokens=60)
    counted = [g.trained_mask() for g in groups]
    (plan,) = plan_updates([lengths_of(g) for g in training], num_ranks=1, updates_per_step=1, max_tokens_per_micro_batch=400)
    samples, values = {}, {}
    for index, (group, mask) in enumerate(zip(training, counted, strict=True)):
        rollout, reference, roles = groups[index].arrays, references[index].arrays, labelled[index].roles
        assert not roles.answer_mask[~mask].any() and sum(labelled[index].vote_counts) == mask.sum()
        assert labelled[index].answer_tokens == tuple(int(p.sum()) for p in
                                                      np.split(roles.answer_mask, np.cumsum(groups[index].response_lengths)[:-1]))
        samples |= {(index, s): sample for s, sample in enumerate(samples_of(group, rollout, reference, roles))}
        values |= critic_samples(index, group, rollout)
        path = tmp_path / f"step_{index + 1:06d}.parquet"
        write_rollouts(path, rows_of_group(1, group, rollout, judged[index].arrays, reference, roles))
        (again,) = read_rollouts(path)
        assert again.turns == groups[index].turns and again.response_lengths == groups[index].response_lengths
        assert (again.arrays.token_ids == rollout.token_ids).all() and (again.arrays.logp == rollout.logp).all()
    rows = [pack(keys, [samples[key] for key in keys]) for keys in plan.micro_batches[0]]
    assert sum(int(row.mask.sum()) for row in rows) == plan.totals.tokens
    assert sum(int((row.answer_mask & row.mask).sum()) for row in rows) == plan.totals.answer_tokens
    assert all((row.rollout_logp[row.mask] == -0.5).all() for row in rows), "only sampled tokens count"
    assert set(values) == {key for keys in plan.micro_batches[0] for key in keys}
    critic = critic_pack(list(values), list(values.values()))
    assert int(critic.mask.sum()) == plan.totals.tokens and not critic.rewards[~critic.mask].any()
    shaped = shaped_rewards(labelled, objective, max_tokens=60)
    assert critic.rewards.sum(1).tolist() == pytest.approx([training[g].advantages[s] for g, s in values])
    assert shaped.lengths.tolist() == [n for g in groups for n in g.response_lengths]
    metrics = rollout_metrics(groups, seconds=1.0, discarded={}) | roles_metrics(labelled) | objective_metrics(training)
    written = sum(sum(t.segments[1::2]) for g in groups for t in g.turns)
    assert metrics["rollout/tokens"] + written == sum(g.num_tokens for g in groups)
    assert metrics["rollout/observation_tokens_mean"] * 12 == pytest.approx(written)
    assert sum(metrics[f"roles/votes_{code:03b}"] for code in range(8)) == sum(mask.sum() for mask in counted)
