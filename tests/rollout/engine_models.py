"""Small random models for tests with a real engine: no trained weights, no tokenizer (token ids go in and come out)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from akl_dist.contract.records import ParameterInfo, Prompt, Sampling

VOCABULARY = 24
END = 1


def save_model(folder: Path, *, tied: bool, seed: int = 0) -> Qwen2ForCausalLM:
    """A Qwen2 of 0.6M parameters with spread-out logits, saved as safetensors; also returned, in eval mode."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.15,
        eos_token_id=END,
        bos_token_id=None,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # biases and norms start at 0 and 1: nothing would notice them
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def perturb(model: Qwen2ForCausalLM, *, seed: int) -> Qwen2ForCausalLM:
    """Move every parameter, the way a training step would, but far enough to be seen. In place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def reference_logp(model: Qwen2ForCausalLM, ids: Sequence[int], *, temperature: float = 1.0) -> np.ndarray:
    """log_softmax(logits / temperature) of tokens 1 .. n-1, float32 [n - 1]."""
    with torch.no_grad():
        logits = model(torch.tensor([list(ids)])).logits[0, :-1].float()
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(list(ids)[1:])[:, None])[:, 0].numpy()


def manifest_of(model: Qwen2ForCausalLM) -> list[ParameterInfo]:
    """As a learner lists it: every parameter under every name it has, a tied head included."""
    return [
        ParameterInfo(name, tuple(p.shape), str(p.dtype).removeprefix("torch."))
        for name, p in model.named_parameters(remove_duplicate=False)
    ]


def bucket_of(model: Qwen2ForCausalLM, names: Sequence[str]) -> dict[str, tuple[str, np.ndarray]]:
    """As a learner sends it: (dtype name, values), bfloat16 as its bits."""
    table = dict(model.named_parameters(remove_duplicate=False))
    values = {name: table[name].detach().clone() for name in names}
    return {
        name: ("bfloat16", v.view(torch.int16).numpy().view(np.uint16))
        if v.dtype is torch.bfloat16
        else (str(v.dtype).removeprefix("torch."), v.numpy())
        for name, v in values.items()
    }


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"test/{i}", "test", "", (2, 3 + i % 7, 10 + i % 5, 4), "") for i in range(count)]


def sampling(*, temperature: float, group_size: int = 4, end_ids: tuple[int, ...] = (END,)) -> Sampling:
    return Sampling(
        group_size=group_size, temperature=temperature, max_response_tokens=24, end_ids=end_ids, seed_key=(0, "step", 3)
    )
