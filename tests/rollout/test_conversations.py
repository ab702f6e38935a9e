"""Conversations end to end: a Ray actor with a real engine, the embedded tiny model, and environments in processes of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

pytestmark = pytest.mark.stack

from akl_dist.cluster.gather import fetch, gather  # noqa: E402
from akl_dist.contract.records import Prompt, Sampling  # noqa: E402
from akl_dist.rollout.launch import EngineSettings  # noqa: E402
from akl_dist.rollout.pool import RolloutPool  # noqa: E402
from akl_dist.rollout.tools import ToolSettings  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "akl_dist" / "tiny" / "model"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def pool(local_ray):
    tools = ToolSettings(environment="turn_environments:Counting", params={"enough": 2}, role="user", max_turns=3,
                         max_turn_tokens=32, num_workers=2)
    settings = EngineSettings(
        model_path=str(MODEL), dtype="float32", max_model_len=112, kv_cache_gib=0.1, entropy_topk=20, tools=tools)
    paths = f"{ROOT}:{Path(__file__).parent}"
    options = {"num_cpus": 1, "runtime_env": {"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}}}
    made = RolloutPool(run_id="talk", settings=settings, actor_options=[options], timeout_s=120.0)
    gather(made.ready(), timeout_s=200, stage="rollout", doing="starting")
    yield made
    made.close()


def prompts(tokenizer, *golds):
    text = "<user>7+3+6=<assistant>"
    ids = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
    return [Prompt(f"p/{index}", "p", text, ids, gold) for index, gold in enumerate(golds)]


def test_turns_of_a_real_model_with_a_users_environment(pool, tokenizer):
    end = tokenizer.token_to_id("<eos>")
    sampling = Sampling(group_size=4, temperature=1.0, max_response_tokens=80, end_ids=(end,), seed_key=(0, "step", 1))
    came = []
    groups = pool.sample(prompts(tokenizer, "16", "refused", "16"), sampling, came.extend)
    assert [group.prompt.prompt_id for group in groups] == ["p/0", "p/1", "p/2"] and len(came) == 3
    talked = 0
    for group in groups:
        arrays = fetch(group.arrays, timeout_s=30, stage="rollout", what="arrays")
        assert arrays.entropy is not None and len(arrays.entropy) == group.num_tokens
        sampled = np.concatenate([one.sampled_mask() for one in group.turns])
        assert (arrays.logp[~sampled] == 0).all() and (arrays.entropy[~sampled] == 0).all()
        assert (arrays.logp[sampled] < 0).any() and (arrays.entropy[sampled] > 0).any()
        borders = np.cumsum(group.response_lengths)[:-1]
        for ids, turns, reason in zip(np.split(arrays.token_ids, borders), group.turns, group.finish_reasons, strict=True):
            pieces = np.split(ids, np.cumsum(turns.segments)[:-1])
            if group.prompt.gold == "refused":
                assert "cannot set up" in turns.fault and turns.num_turns == 1
                continue
            assert not turns.fault
            if reason == "stop":
                assert turns.num_turns == 2 and turns.calls == 1 and turns.score == 0.5
                turn = tokenizer.decode(pieces[0][:-1].tolist(), skip_special_tokens=False)
                answer = tokenizer.decode(pieces[1].tolist(), skip_special_tokens=False)
                assert answer == f"<user>{len(turn)}<assistant>", "the template's own frame around what the environment said"
                talked += 1
    assert talked >= 4
    again = pool.sample(prompts(tokenizer, "16", "refused", "16"), sampling)
    assert [group.response_lengths for group in again] == [group.response_lengths for group in groups], "reproducible"
