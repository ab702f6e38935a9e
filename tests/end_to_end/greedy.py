"""Greedy continuations of four prompts by one engine, as one JSON line: ``greedy.py transformers|vllm FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from transformers import PreTrainedTokenizerFast

PROMPTS = ("3+4+5=", "12+1+7=", "9+9+9+9=", "2+11+6=")


def main(engine: str, folder: str) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False)
               for text in PROMPTS]
    ids = by_transformers(folder, prompts) if engine == "transformers" else by_vllm(folder, prompts)
    print(json.dumps([tokenizer.decode(row) for row in ids]))


def by_transformers(folder: str, prompts: list[list[int]]) -> list[list[int]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return [model.generate(torch.tensor([row]), do_sample=False, max_new_tokens=64)[0, len(row):].tolist() for row in prompts]


def by_vllm(folder: str, prompts: list[list[int]]) -> list[list[int]]:
    import os

    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCHDYNAMO_DISABLE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(model=folder, dtype="float32", enforce_eager=True, max_model_len=128, skip_tokenizer_init=True,
              kv_cache_memory_bytes=2**28)
    end = json.loads(Path(folder, "generation_config.json").read_text())["eos_token_id"]
    params = SamplingParams(temperature=0.0, max_tokens=64, stop_token_ids=[end] if isinstance(end, int) else end, detokenize=False)
    return [list(out.outputs[0].token_ids) for out in llm.generate([TokensPrompt(prompt_token_ids=row) for row in prompts], params)]


if __name__ == "__main__":
    main(*sys.argv[1:])
