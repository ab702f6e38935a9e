"""Covers the learner's side: manifest and gathered buckets, whole and under ZeRO-3 on two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from torch import nn

from akl_dist.contract.errors import WeightSyncError
from akl_dist.contract.records import ParameterInfo
from akl_dist.weight_sync.sender import gather_bucket, manifest, to_wire


class Policy(nn.Module):
    """Named as a checkpoint is: embedding, a layer, output head."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(5, 3)
        self.model.norm = nn.LayerNorm(3, bias=False)
        self.lm_head = nn.Linear(3, 5, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight


class Wrapper(nn.Module):
    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy


@pytest.mark.parametrize("tied", [False, True])
def test_manifest_lists_the_head_whether_tied_or_not(tied):
    module = Wrapper(Policy(tied=tied))
    assert manifest(module, prefix_to_strip="policy.", tied=tied) == [
        ParameterInfo("model.embed_tokens.weight", (5, 3), "float32"),
        ParameterInfo("model.norm.weight", (3,), "float32"),
        ParameterInfo("lm_head.weight", (5, 3), "float32"),
    ]


def test_bucket_holds_copies_of_full_values_on_rank_0_only():
    policy = Policy(tied=True)
    names = ["lm_head.weight", "model.norm.weight"]
    bucket = gather_bucket(policy, names, prefix_to_strip="", tied=True, rank=0)
    assert list(bucket) == names
    embedding = policy.model.embed_tokens.weight.detach().clone()
    with torch.no_grad():
        policy.model.embed_tokens.weight.zero_()
    assert bucket["lm_head.weight"][0] == "float32"
    np.testing.assert_array_equal(bucket["lm_head.weight"][1], embedding.numpy())
    assert gather_bucket(policy, names, prefix_to_strip="", tied=True, rank=1) is None


def test_bfloat16_survives():
    values = torch.tensor([1.0, -2.5, 3.0e38, 1e-40, float("inf")], dtype=torch.bfloat16)
    dtype, array = to_wire("w", values)
    assert (dtype, array.dtype) == ("bfloat16", np.uint16)
    assert array[0] == 0x3F80  # 1.0
    assert torch.equal(torch.from_numpy(array.copy()).view(torch.bfloat16), values)


def test_a_sharded_parameter_is_refused():
    parameter = nn.Parameter(torch.empty(0))
    parameter.ds_shape = (5, 3)  # what ZeRO-3 leaves outside a gather
    with pytest.raises(WeightSyncError, match=r"\(0,\).*\(5, 3\)"):
        to_wire("lm_head.weight", parameter)


def test_names_that_do_not_belong():
    with pytest.raises(WeightSyncError, match="no such prefix"):
        manifest(Policy(tied=False), prefix_to_strip="policy.", tied=False)
    with pytest.raises(WeightSyncError, match="score"):
        gather_bucket(Policy(tied=False), ["score.weight"], prefix_to_strip="", tied=False, rank=0)
    with pytest.raises(WeightSyncError, match="tied output head"):
        manifest(nn.Linear(2, 2), prefix_to_strip="", tied=True)


ZERO3 = """
    import os, sys
    import numpy as np, torch
    import deepspeed
    sys.path.insert(0, os.environ["TEST_FOLDER"])
    from test_sender import Policy
    from akl_dist.weight_sync.sender import gather_bucket, manifest

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", distributed_port=int(os.environ["MASTER_PORT"]))
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    policy = Policy(tied=True)
    values = {name: p.detach().clone() for name, p in policy.named_parameters()}
    values["lm_head.weight"] = values["model.embed_tokens.weight"]
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    engine, *_ = deepspeed.initialize(model=policy, config=config)
    assert all(p.numel() == 0 for p in engine.module.parameters()), "nothing is sharded: the test shows nothing"
    listed = manifest(engine.module, prefix_to_strip="", tied=True)
    assert [p.shape for p in listed] == [(5, 3), (3,), (5, 3)], listed
    for names in (["model.norm.weight"], ["model.embed_tokens.weight", "lm_head.weight"]):
        bucket = gather_bucket(engine.module, names, prefix_to_strip="", tied=True, rank=rank)
        assert (bucket is None) == (rank == 1)
        for name, (dtype, array) in (bucket or {}).items():
            np.testing.assert_array_equal(array, values[name].numpy())
        assert all(p.numel() == 0 for p in engine.module.parameters()), "gathered parameters were not released"
    print("done", rank)
"""


@pytest.mark.stack
def test_zero3_on_two_ranks(tmp_path, free_port):
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(ZERO3), encoding="utf-8")
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port),
        "WORLD_SIZE": "2",
        "TEST_FOLDER": os.path.dirname(__file__),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for rank, (process, output) in enumerate(zip(ranks, outputs, strict=True)):
        assert process.returncode == 0 and f"done {rank}" in output, output[-3000:]
