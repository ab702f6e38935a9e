"""A causal LM with ZeRO-3 sharded weights: built already sharded, filled tensor by tensor from safetensors.

No rank ever holds all weights: construction runs under ``deepspeed.zero.Init`` and rank 0 reads one tensor at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from akl_dist.contract.errors import ModelError
from akl_dist.zero3.gathering import full_shape, named_parameters, tied_names

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SCALED_HEADS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Config keys of models whose logits are more than ``lm_head(hidden)``."""


def checkpoint_files(folder: Path) -> dict[str, Path]:
    """Parameter name -> safetensors file of a Hugging Face checkpoint folder.

    Raises:
        ModelError: not a folder, no config or no safetensors weights.
    """
    def bad(got: str) -> ModelError:
        return ModelError(
            f"model.path {folder}", got=got, expected=f"a folder with config.json and {WEIGHTS} or {INDEX}", stage="learner",
            remedy="Give a local Hugging Face checkpoint with safetensors weights (pickled weights are not loaded).",
        )

    from safetensors import safe_open

    if not (folder / "config.json").is_file():
        raise bad("no config.json")
    if (folder / INDEX).is_file():
        return {name: folder / file for name, file in json.loads((folder / INDEX).read_text())["weight_map"].items()}
    if not (folder / WEIGHTS).is_file():
        raise bad("no safetensors weights")
    with safe_open(folder / WEIGHTS, framework="pt") as reader:
        return dict.fromkeys(reader.keys(), folder / WEIGHTS)


def read_config(folder: Path) -> Any:
    """The model's config; refuses models whose logits are more than their LM head, and switches dropout off.

    Dropout would make the ratio of the first step differ from 1, and old and new log-probs come from two distributions.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    scaled = [key for key in SCALED_HEADS if getattr(config, key, None) not in (None, 1, 1.0)]
    if scaled:
        raise ModelError(
            f"model.path {folder}", got=f"{config.model_type} with {', '.join(scaled)}", stage="learner",
            expected="logits that are the LM head's output alone", remedy="Use a model without logit scaling or capping.",
        )
    for key in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout"):
        if getattr(config, key, None):
            setattr(config, key, 0.0)
    return config


def build_sharded(folder: Path, *, dtype: torch.dtype, attention: str, ds_config: dict[str, Any]) -> Any:
    """The causal LM of ``folder`` with ZeRO-3 sharded weights. A collective.

    Raises:
        ModelError: a parameter that the checkpoint lacks, or of another shape.
    """
    import deepspeed
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    files = checkpoint_files(folder)
    config = read_config(folder)
    # The dtype comes from ds_config alone: given as an argument too, DeepSpeed ignores it on devices without fp16 and
    # silently makes every weight bfloat16.
    with no_init_weights(), deepspeed.zero.Init(config_dict_or_path=ds_config):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    model.tie_weights()
    wrong = {name: p.dtype for name, p in named_parameters(model).items() if p.dtype != dtype}
    assert not wrong, f"expected {dtype} weights, got {wrong}"
    _fill(model, folder, files)
    return model


def _fill(model: Any, folder: Path, files: dict[str, Path]) -> None:
    import deepspeed
    from safetensors import safe_open

    tied = tied_names(model)
    own = {name: p for name, p in named_parameters(model).items() if name not in tied}
    readers = {file: safe_open(file, framework="pt") for file in sorted(set(files.values()))}
    shapes = {name: tuple(readers[files[name]].get_slice(name).get_shape()) for name in own if name in files}
    wrong = [f"{name}: {shapes.get(name)}" for name, p in own.items() if shapes.get(name) != full_shape(p)]
    if wrong:  # every rank checks the headers, so every rank raises
        raise ModelError(
            f"model.path {folder}", got=f"{len(wrong)} parameters missing or of another shape ({'; '.join(wrong[:3])})",
            expected="the parameters of its config.json", remedy="Use a complete checkpoint.", stage="learner",
        )
    for name, parameter in own.items():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if torch.distributed.get_rank() == 0:
                with torch.no_grad():
                    parameter.copy_(readers[files[name]].get_tensor(name).to(parameter.dtype))


def sharded(make: Callable[[], torch.nn.Module], ds_config: dict[str, Any]) -> torch.nn.Module:
    """A further module whose parameters are made in memory, with ZeRO-3 sharded weights (rank 0's values count). A collective."""
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=ds_config):
        return make()
