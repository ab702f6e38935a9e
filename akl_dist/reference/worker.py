"""The frozen reference model: log-probs and entropies of sampled tokens. A plain class.

Same packing and same chunked statistics as the learner, so that both see one distribution at one temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from akl_dist.contract.packing import PackedRow, first_fit_decreasing, pack_row, row_tokens
from akl_dist.contract.records import ReferenceArrays
from akl_dist.objective import kl_value_k1, kl_value_k3, token_statistics, topk_reference


@dataclass(frozen=True)
class Scored:
    """One group under the reference. kl_k1, kl_k3: per response, sums of the value estimators of KL(mu || ref)."""

    arrays: ReferenceArrays
    kl_k1: tuple[float, ...]
    kl_k3: tuple[float, ...]


@dataclass(frozen=True)
class Responses:
    """The responses to one prompt. responses: int32 [T_i] each; rollout_logp: float32 [n], flat, the engine's log-probs; mask: bool
    [n], tokens that the KL estimates count (None: all)."""

    prompt_ids: Sequence[int]
    responses: Sequence[np.ndarray]
    rollout_logp: np.ndarray
    mask: np.ndarray | None = None

    @property
    def sizes(self) -> list[int]:
        return [len(response) for response in self.responses]


class ReferenceWorker:
    """Args:
    model_path: local Hugging Face folder.
    dtype: "float32" | "bfloat16", of weights and activations.
    attention: attention implementation name of transformers.
    temperature: sampling temperature of the rollouts; log-probs are taken at it.
    max_tokens_per_batch: input tokens of one forward pass.
    logprob_chunk_tokens: tokens whose logits [chunk, vocabulary] exist at once.
    kl_estimator: "sampled" | "topk" | "full": what is kept of each state's distribution, see ReferenceArrays.
    topk: most probable tokens kept for ``topk``.
    device: "cpu" | "cuda".
    """

    def __init__(
        self, *, model_path: str, dtype: str, attention: str, temperature: float, num_threads: int, max_tokens_per_batch: int,
        logprob_chunk_tokens: int, kl_estimator: str, topk: int, device: str,
    ) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(num_threads)
        self.temperature, self.max_tokens_per_batch = temperature, max_tokens_per_batch
        self.logprob_chunk_tokens, self.kl_estimator, self.topk = logprob_chunk_tokens, kl_estimator, topk
        self.device = torch.device(device)
        model: Any = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=getattr(torch, dtype), attn_implementation=attention, use_safetensors=True)
        self.model = model.to(self.device).eval().requires_grad_(False)

    def score(self, groups: Sequence[Responses]) -> list[Scored]:
        """Score groups of responses; sequences of all groups are packed together, so that no row is half empty.

        Returns: one record per group, flat arrays in the responses' order.
        Raises:
            UserError: one sequence is longer than ``max_tokens_per_batch``.
            ValueError: log-probs and responses do not align.
        """
        for group in groups:
            if group.rollout_logp.shape != (sum(group.sizes),):
                raise ValueError(f"rollout log-probs have shape {group.rollout_logp.shape}, expected ({sum(group.sizes)},)")
        sequences = [(group.prompt_ids, response) for group in groups for response in group.responses]
        scored: list[dict[str, np.ndarray]] = [{} for _ in sequences]
        lengths = [row_tokens(len(prompt), len(response)) for prompt, response in sequences]
        for row in first_fit_decreasing(lengths, self.max_tokens_per_batch):
            packed = pack_row([sequences[index] for index in row])
            cuts = np.cumsum(packed.response_lengths)[:-1]
            for name, values in self._forward(packed).items():
                for index, piece in zip(row, np.split(values, cuts), strict=True):
                    scored[index][name] = piece
        fields = iter(scored)
        return [_record(group, [next(fields) for _ in group.responses]) for group in groups]

    @torch.no_grad()
    def _forward(self, row: PackedRow) -> dict[str, np.ndarray]:
        ids, positions, predict, targets = (
            torch.from_numpy(array).to(self.device) for array in (row.input_ids, row.position_ids, row.predict_index, row.targets))
        # use_cache=False is what isolates packed sequences: with a cache the second attends to the first.
        hidden = self.model.base_model(input_ids=ids[None], position_ids=positions[None], use_cache=False).last_hidden_state[0]
        head = self.model.get_output_embeddings()
        pieces: list[dict[str, np.ndarray]] = []
        for index, target in zip(predict.split(self.logprob_chunk_tokens), targets.split(self.logprob_chunk_tokens), strict=True):
            logits = head(hidden[index])
            statistics = token_statistics(logits, target, temperature=self.temperature)
            piece = {"logp": statistics.logp, "entropy": statistics.entropy}
            if self.kl_estimator == "topk":
                kept = topk_reference(logits, target, k=self.topk, temperature=self.temperature)
                piece |= {"topk_ids": kept.ids, "topk_logp": kept.logp, "topk_rest": kept.rest_logp}
            elif self.kl_estimator == "full":
                piece["hidden"] = hidden[index]
            pieces.append({name: _array(value) for name, value in piece.items()})
        return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def _array(values: torch.Tensor) -> np.ndarray:
    """On the host; bfloat16 as its uint16 bits."""
    values = values.cpu()
    return values.view(torch.int16).numpy().view(np.uint16) if values.dtype is torch.bfloat16 else values.numpy()


def _record(group: Responses, fields: list[dict[str, np.ndarray]]) -> Scored:
    flat = {name: np.concatenate([field[name] for field in fields]) for name in fields[0]}
    mu, ref = torch.tensor(group.rollout_logp, dtype=torch.float32), torch.from_numpy(flat["logp"])
    mask = torch.ones_like(mu, dtype=torch.bool) if group.mask is None else torch.from_numpy(group.mask)
    estimates = (kl_value_k1(logp=mu, ref_logp=ref, mask=mask), kl_value_k3(logp=mu, ref_logp=ref, mask=mask))
    k1, k3 = (tuple(float(piece.double().sum()) for piece in estimate.split(group.sizes)) for estimate in estimates)
    return Scored(ReferenceArrays(**flat), k1, k3)
