"""The policy under ZeRO-3, called on packed rows: decoder once, head chunk by chunk where a response token is predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from akl_dist.objective import HeadReference, TokenStatistics, TopkReference, chunked_token_statistics
from akl_dist.zero3.build import checkpoint_files
from akl_dist.zero3.gathering import named_parameters

Reference = TopkReference | HeadReference | None


class HeadStatistics(torch.nn.Module):
    """LM head and token statistics, chunk by chunk, as one module with one output.

    It is marked as a ZeRO-3 leaf: its weights are gathered once around all chunks, so ranks may run different numbers
    of chunks without their collectives going out of step. It returns a single tensor because DeepSpeed counts one
    backward event per output that has a gradient: with several outputs a rank whose loss uses fewer of them (a dummy
    micro-batch) would record another sequence of gathers than its peers, and hang.
    The backward pass of the chunks runs between that event and the one on ``hidden``, so the weights are whole in it, too.
    """

    def __init__(self, lm_head: torch.nn.Linear, chunk_tokens: int) -> None:
        super().__init__()
        self.lm_head = lm_head
        self.chunk_tokens = chunk_tokens

    def forward(
        self, hidden: torch.Tensor, targets: torch.Tensor, reference: Reference, temperature: float
    ) -> torch.Tensor:
        statistics = chunked_token_statistics(
            hidden, self.lm_head.weight, self.lm_head.bias, targets, chunk_tokens=self.chunk_tokens, temperature=temperature,
            reference=reference, with_gradient_norms=torch.is_grad_enabled(),
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
        reference: Reference, temperature: float,
    ) -> torch.Tensor:
        """input_ids, position_ids [1, T]; predict_index, targets [n]; reference of n states, see the head's function.

        Returns [number of fields of TokenStatistics, n]; see :func:`unstack`.
        """
        # use_cache=False is what isolates packed sequences: with a cache the second attends to the first.
        hidden = self.decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        return self.head(hidden[0, predict_index], targets, reference, temperature)


def unstack(stacked: torch.Tensor, *, has_reference: bool) -> TokenStatistics:
    """The fields out of :class:`PolicyModel`'s output; without a reference those that need one are None."""
    fields = TokenStatistics(*stacked)
    if has_reference:
        return fields
    return TokenStatistics(fields.logp, fields.entropy, score_norm2=fields.score_norm2)


def frozen_head(
    causal_lm: Any, folder: Path, *, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight [V, H] and bias [V] or None of the LM head as the checkpoint in ``folder`` has them, whole on every rank.

    ``causal_lm`` is the sharded model made from that folder; it only says what the checkpoint calls its head (the input
    embeddings where the two are tied).
    """
    from safetensors import safe_open

    files, names = checkpoint_files(folder), named_parameters(causal_lm)
    head = causal_lm.get_output_embeddings()

    def read(parameter: torch.Tensor) -> torch.Tensor:
        name = next(name for name, one in names.items() if one is parameter and name in files)
        with safe_open(files[name], framework="pt") as reader:
            return reader.get_tensor(name).to(device=device, dtype=dtype)

    return read(head.weight), None if head.bias is None else read(head.bias)
