"""The value model: the decoder of a language model and a linear head of one output that starts at 0."""

from __future__ import annotations

from typing import Any

import torch


class ValueHead(torch.nn.Module):
    """hidden [n, H] -> values float32 [n]. Weights start at 0, so every value does: the first advantages are the rewards to go."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size))
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        # In float32 whatever the weights' dtype: bfloat16 values would have three digits.
        return torch.nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float()).squeeze(-1)


class ValueModel(torch.nn.Module):
    """Value of the state before each response token of a packed row."""

    def __init__(self, decoder: Any, head: torch.nn.Module) -> None:
        super().__init__()
        self.decoder = decoder
        self.head = head

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, predict_index: torch.Tensor) -> torch.Tensor:
        """input_ids, position_ids [1, T]; predict_index [n]. Returns float32 [n]."""
        # use_cache=False is what isolates packed sequences: with a cache the second attends to the first.
        hidden = self.decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        return self.head(hidden[0, predict_index])
