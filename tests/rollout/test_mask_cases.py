"""Rows of data/mask_cases.jsonl: which sampled tokens train, from the engine's reply to the loss mask. Without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from akl_dist.contract.errors import RunError
from akl_dist.contract.records import Prompt, Sampling
from akl_dist.learner.batch import Sample, pack
from akl_dist.rollout.sampler import Sampler

ROWS = {row["id"]: row for row in map(json.loads, (Path(__file__).parent / "data" / "mask_cases.jsonl").read_text().splitlines())}


class OneReply:
    """Stands for vLLM's engine: one reply to one request."""

    def __init__(self, output):
        self.output = output

    def add_request(self, request_id, prompt, params):
        self.reply = SimpleNamespace(
            request_id=request_id, finished=True, prompt_token_ids=prompt["prompt_token_ids"], outputs=[self.output])

    def step(self):
        return [self.reply]

    def has_unfinished_requests(self):
        return False

    def abort_request(self, request_ids):
        pass


def accepted(ids, logps, reason, end_ids, limit):
    """(token ids, log-probs, finish reason) of the engine's reply as it is handed on."""
    from vllm.logprobs import FlatLogprobs

    flat = FlatLogprobs(start_indices=list(range(len(logps))), end_indices=list(range(1, len(logps) + 1)),
                        token_ids=list(ids[:len(logps)]), logprobs=list(logps), ranks=[1] * len(logps),
                        decoded_tokens=[None] * len(logps))
    engine = OneReply(SimpleNamespace(token_ids=list(ids), logprobs=flat, finish_reason=reason))
    sampler = Sampler(SimpleNamespace(llm_engine=engine), name="rollout/test/0", vocab_size=16)
    sampling = Sampling(group_size=1, temperature=1.0, max_response_tokens=limit, end_ids=tuple(end_ids), seed_key=(0,))
    (((_, group),),) = sampler.stream([Prompt("s/0", "s", "", (1,), "1")], sampling)
    return group.arrays.token_ids, group.arrays.logp, group.finish_reasons[0]


def loss_mask(ids, width):
    """Beside a longer response, so that the row is filled up to ``width``."""
    zeros = [Sample(np.array([1]), np.zeros(n, np.int32), np.zeros(n, np.float32), np.zeros(n, np.float32), {}, np.zeros(n, bool),
                    1.0, True) for n in (len(ids), width)]
    batch = pack([(0, 0), (0, 1)], zeros)
    return batch.grid(batch.mask, False)[0].int().tolist()


@pytest.mark.parametrize("name", ["L027", "L028", "L030"])
def test_the_end_token_trains_and_nothing_after_it(name):
    inputs, expected = ROWS[name]["inputs"], ROWS[name]["expected"]
    completion, end_ids = inputs["completion"], inputs["eos_ids"]
    length = inputs.get("real_length") or 1 + min(i for i, token in enumerate(completion) if token in end_ids)
    ids, logp, reason = accepted(completion[:length], [-0.5] * length, "stop", end_ids, limit=9)
    assert loss_mask(ids, len(completion)) == expected["loss_mask"] and len(ids) == len(logp)
    assert (reason == "stop") is expected.get("finished", True)
    with pytest.raises(RunError, match="first end token"):  # negative control: what follows the end never gets in
        accepted(completion, [-0.5] * len(completion), "stop", end_ids, limit=9)


def test_truncated_comes_from_the_finish_reason():
    inputs, expected = ROWS["L029"]["inputs"], ROWS["L029"]["expected"]
    completion = inputs["completion"]
    *_, reason = accepted(completion, [-0.5] * 3, inputs["finish_reason"], inputs["eos_ids"], limit=3)
    assert (reason == "stop") is expected["finished"]
    for wrong, limit in (("stop", 3), ("length", 9)):
        with pytest.raises(RunError, match="finish reason"):
            accepted(completion, [-0.5] * 3, wrong, inputs["eos_ids"], limit=limit)


def test_ids_and_log_probs_keep_one_length():
    inputs, expected = ROWS["L031"]["inputs"], ROWS["L031"]["expected"]
    ids, logp, _ = accepted(inputs["sampled_ids"], inputs["sampled_logps"], "stop", [9], limit=9)
    assert ids.tolist() == expected["trained_ids"] and (len(ids) == len(logp)) is expected["len_ids_equals_len_logps"]
    with pytest.raises(RunError, match="log-probs"):
        accepted(inputs["sampled_ids"], inputs["sampled_logps"][:-1], "stop", [9], limit=9)
