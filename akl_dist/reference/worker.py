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
from akl_dist.objective import kl_value_k1, kl_value_k3, token_statistics


@dataclass(frozen=True)
class Scored:
    """One group under the reference. kl_k1, kl_k3: per response, sums of the value estimators of KL(mu || ref)."""

    arrays: ReferenceArrays
    kl_k1: tuple[float, ...]
    kl_k3: tuple[float, ...]


class ReferenceWorker:
    """Args:
    model_path: local Hugging Face folder.
    dtype: "float32" | "bfloat16", of weights and activations.
    attention: attention implementation name of transformers.
    temperature: sampling temperature of the rollouts; log-probs are taken at it.
    max_tokens_per_batch: input tokens of one forward pass.
    logprob_chunk_tokens: tokens whose logits [chunk, vocabulary] exist at once.
    full_vocabulary: keep log-probs of the whole vocabulary (KL estimator ``full``).
    device: "cpu" | "cuda".
    """

    def __init__(
        self, *, model_path: str, dtype: str, attention: str, temperature: float, num_threads: int, max_tokens_per_batch: int,
        logprob_chunk_tokens: int, full_vocabulary: bool, device: str,
    ) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(num_threads)
        self.temperature, self.max_tokens_per_batch = temperature, max_tokens_per_batch
        self.logprob_chunk_tokens, self.full_vocabulary = logprob_chunk_tokens, full_vocabulary
        self.device = torch.device(device)
        model: Any = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=getattr(torch, dtype), attn_implementation=attention, use_safetensors=True)
        self.model = model.to(self.device).eval().requires_grad_(False)

    def score(self, prompt_ids: Sequence[int], responses: Sequence[np.ndarray], rollout_logp: np.ndarray) -> Scored:
        """Score the responses to one prompt.

        Args:
            prompt_ids: the prompt's token ids.
            responses: token ids of each response.
            rollout_logp: float32 [n], the engine's log-probs, flat over the responses.

        Returns: flat arrays in the responses' order.
        Raises:
            UserError: one sequence is longer than ``max_tokens_per_batch``.
            ValueError: log-probs and responses do not align.
        """
        sizes = [len(response) for response in responses]
        if rollout_logp.shape != (sum(sizes),):
            raise ValueError(f"rollout log-probs have shape {rollout_logp.shape}, expected ({sum(sizes)},)")
        scored: list[dict[str, np.ndarray]] = [{} for _ in responses]
        rows = first_fit_decreasing([row_tokens(len(prompt_ids), size) for size in sizes], self.max_tokens_per_batch)
        for row in rows:
            packed = pack_row([(prompt_ids, responses[index]) for index in row])
            fields = self._forward(packed)
            cuts = np.cumsum(packed.response_lengths)[:-1]
            for name, values in fields.items():
                for index, piece in zip(row, np.split(values, cuts), strict=True):
                    scored[index][name] = piece
        flat = {name: np.concatenate([fields[name] for fields in scored]) for name in scored[0]}
        k1, k3 = _value_estimates(rollout_logp, flat["logp"], sizes)
        return Scored(ReferenceArrays(flat["logp"], flat["entropy"], flat.get("logprobs")), k1, k3)

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
            if self.full_vocabulary:
                piece["logprobs"] = torch.log_softmax(logits.float() / self.temperature, dim=-1)
            pieces.append({name: value.float().cpu().numpy() for name, value in piece.items()})
        return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def _value_estimates(
    rollout_logp: np.ndarray, ref_logp: np.ndarray, sizes: list[int]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    mu, ref = torch.from_numpy(np.asarray(rollout_logp, np.float32)), torch.from_numpy(ref_logp)
    mask = torch.ones_like(mu, dtype=torch.bool)
    estimates = (kl_value_k1(logp=mu, ref_logp=ref, mask=mask), kl_value_k3(logp=mu, ref_logp=ref, mask=mask))
    k1, k3 = (tuple(float(piece.double().sum()) for piece in estimate.split(sizes)) for estimate in estimates)
    return k1, k3
