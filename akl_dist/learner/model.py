"""The trainable model under ZeRO-3: built already sharded, filled tensor by tensor from safetensors, called packed.

No rank ever holds all weights: construction runs under ``deepspeed.zero.Init`` and rank 0 reads one tensor at a time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from akl_dist.contract.errors import ModelError
from akl_dist.learner.gathering import full_shape, named_parameters, tied_names
from akl_dist.objective import TokenStatistics, chunked_token_statistics

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SCALED_HEADS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Config keys of models whose logits are more than ``lm_head(hidden)``."""


class HeadStatistics(torch.nn.Module):
    """LM head and token statistics, chunk by chunk, as one module with one output.

    It is marked as a ZeRO-3 leaf: its weights are gathered once around all chunks, so ranks may run different numbers
    of chunks without their collectives going out of step. It returns a single tensor because DeepSpeed counts one
    backward event per output that has a gradient: with several outputs a rank whose loss uses fewer of them (a dummy
    micro-batch) would record another sequence of gathers than its peers, and hang.
    """

    def __init__(self, lm_head: torch.nn.Module, chunk_tokens: int) -> None:
        super().__init__()
        self.lm_head = lm_head
        self.chunk_tokens = chunk_tokens

    def forward(
        self, hidden: torch.Tensor, targets: torch.Tensor, ref_logprobs: torch.Tensor | None, temperature: float
    ) -> torch.Tensor:
        statistics = chunked_token_statistics(
            self.lm_head, hidden, targets, chunk_tokens=self.chunk_tokens, temperature=temperature,
            ref_logprobs=ref_logprobs, with_gradient_norms=torch.is_grad_enabled(),
        )
        return torch.stack([torch.zeros_like(statistics.logp) if field is None else field for field in statistics])


class PolicyModel(torch.nn.Module):
    """Decoder once over a packed row, then the chunked head on the positions that predict response tokens only.

    The decoder and head are those of ``causal_lm``, which itself is not a submodule: each parameter is reached by one path.
    """

    def __init__(self, causal_lm: Any, chunk_tokens: int) -> None:
        super().__init__()
        self.decoder = causal_lm.base_model
        self.head = HeadStatistics(causal_lm.get_output_embeddings(), chunk_tokens)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, predict_index: torch.Tensor, targets: torch.Tensor,
        ref_logprobs: torch.Tensor | None, temperature: float,
    ) -> torch.Tensor:
        """input_ids, position_ids [1, T]; predict_index, targets [n]; ref_logprobs [n, V] or None.

        Returns [number of fields of TokenStatistics, n]; see :func:`unstack`.
        """
        # use_cache=False is what isolates packed sequences: with a cache the second attends to the first.
        hidden = self.decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        return self.head(hidden[0, predict_index], targets, ref_logprobs, temperature)


def unstack(stacked: torch.Tensor, *, has_reference: bool) -> TokenStatistics:
    """The fields out of :class:`PolicyModel`'s output; without a reference those that need one are None."""
    fields = TokenStatistics(*stacked)
    if has_reference:
        return fields
    return TokenStatistics(fields.logp, fields.entropy, score_norm2=fields.score_norm2)


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
