"""Rows of data/loss_cases.jsonl that need a model: the embedded one, as learner and reference run it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from akl_dist.config import models
from akl_dist.contract.packing import pack_row
from akl_dist.learner.model import PolicyModel, unstack
from akl_dist.reference.worker import ReferenceWorker, Responses

ROWS = {row["id"]: row for row in map(json.loads, (Path(__file__).parent / "data" / "loss_cases.jsonl").read_text().splitlines())}
FOLDER = models.resolve("tiny")
PROMPT, RESPONSE = [3, 4, 5], [11, 12, 13]


@pytest.fixture(scope="module")
def causal_lm():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(FOLDER).float()


@torch.no_grad()
def learner_logp(causal_lm, sequences, *, positions=True) -> list[np.ndarray]:
    """Log-probs of the responses of one packed row; without ``positions`` as if the row were one sequence."""
    row = pack_row([(np.asarray(p), np.asarray(r)) for p, r in sequences])
    position_ids = row.position_ids if positions else np.arange(len(row.input_ids))
    tensors = [torch.from_numpy(a) for a in (row.input_ids[None], position_ids[None], row.predict_index, row.targets)]
    logp = unstack(PolicyModel(causal_lm, 2)(*tensors, None, 1.0), has_reference=False).logp.numpy()
    return np.split(logp, np.cumsum(row.response_lengths)[:-1])


def test_policy_and_reference_agree_at_step_0(causal_lm):
    reference = ReferenceWorker(
        model_path=str(FOLDER), dtype="float32", attention="sdpa", temperature=1.0, num_threads=1, max_tokens_per_batch=64,
        logprob_chunk_tokens=3, kl_estimator="sampled", topk=4, device="cpu")
    response = np.asarray(RESPONSE, np.int32)
    (scored,) = reference.score([Responses(PROMPT, [response], np.zeros(3, np.float32))])
    bound = ROWS["L019"]["expected"]["mean_abs_logp_gap_at_most"]
    (policy,) = learner_logp(causal_lm, [(PROMPT, RESPONSE)])
    assert np.abs(policy - scored.arrays.logp).mean() <= bound
    other = np.abs(learner_logp(causal_lm, [(PROMPT[::-1], RESPONSE)])[0] - scored.arrays.logp).mean()
    assert other > 100 * bound, "negative control: another prompt"


@pytest.mark.parametrize("place", [0, 1, 2])
def test_batch_mates_change_no_log_prob(causal_lm, place):
    """Rows are packed, not padded: the same tokens alone, and first, between and last among others."""
    row = ROWS["L026"]
    sequence, bound = (PROMPT, row["inputs"]["tokens"]), row["expected"]["max_logp_gap_between_paddings_at_most"]
    others = [(PROMPT[:1], [9] * (1 + n)) for n in row["inputs"]["pads_left"] + row["inputs"]["pads_right"]][:2]
    mates = [*others[:place], sequence, *others[place:]]
    (alone,) = learner_logp(causal_lm, [sequence])
    assert np.abs(learner_logp(causal_lm, mates)[place] - alone).max() <= bound
    if place:  # negative control: nothing tells the sequences apart
        assert np.abs(learner_logp(causal_lm, mates, positions=False)[place] - alone).max() > bound
