"""Programs on the real stack: a model that writes bytes at random, MBPP's schema, graders in the sandbox."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from akl_dist.sandbox.client import Sandbox, SandboxFault
from tests.verify.verify_examples import byte_level_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"


def random_model(folder: Path) -> None:
    """One layer of 64, random weights, a byte-level tokenizer: it writes anything but programs."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_level_tokenizer(folder)
    end = tokenizer.token_to_id("<|im_end|>")
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=tokenizer.get_vocab_size(), hidden_size=64, intermediate_size=64, num_hidden_layers=1,
                         num_attention_heads=2, max_position_embeddings=1024, eos_token_id=end, bos_token_id=end,
                         tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}))


@pytest.mark.stack
def test_programs_are_evaluated(tmp_path):
    try:
        with Sandbox() as sandbox:
            isolation = sandbox.isolation
    except SandboxFault:
        pytest.skip("this machine allows no isolation")
    random_model(tmp_path / "model")
    rows = [{"task_id": number, "text": "Write a function to add.", "code": "", "test_list": ["assert add(1, 2) == 3"],
             "test_setup_code": ""} for number in (11, 12, 13)]
    (tmp_path / "mbpp.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dropped = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS")
    done = subprocess.run(
        [sys.executable, "-m", "akl_dist.evaluate", "data=mbpp", "verify.kind=code", f"data.eval_path={tmp_path}/mbpp.jsonl",
         f"model.path={tmp_path}/model", "evaluate.samples=2", "rollout.max_response_tokens=16", "rollout.kv_cache_gib=0.1",
         "cluster.address=local", "cluster.object_store_mib=200", f"output_dir={tmp_path}", "run_id=r"],
        cwd=tmp_path, env={**{k: v for k, v in os.environ.items() if k not in dropped}, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "evaluate/r/evaluation.json").read_text())
    one = result["benchmarks"]["mbpp"]
    assert (one["problems"], one["samples"], one["undecided"], one["maj_at_k"]) == (3, 2, {}, None)
    assert one["avg_at_k"]["mean"] == 0.0, "random bytes are no program"
    assert result["sandbox"] == isolation and "UNSANDBOXED" not in done.stdout
