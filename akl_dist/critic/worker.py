"""One critic rank: DeepSpeed ZeRO-3 around the value model. A plain class; every public method is a collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from akl_dist.config.schema import LearnerConfig
from akl_dist.critic.batch import (
    MOMENTS,
    SUMS,
    Targets,
    ValueBatch,
    ValueSample,
    metrics_from_sums,
    micro_batch_loss,
    pack,
    target_moments,
    targets_of,
    token_advantages,
)
from akl_dist.critic.model import ValueHead, ValueModel
from akl_dist.objective import advantage_moments
from akl_dist.zero3.build import sharded
from akl_dist.zero3.planning import RankUpdate, SampleKey
from akl_dist.zero3.rank import Zero3Rank


@dataclass(frozen=True)
class RankAppraisal:
    """What one rank makes of its responses. advantages: float32 [n] of each, 0 on tokens that do not train; moments float64 [3]:
    count, sum and sum of squares of those that do, on this rank; metrics: global, equal on all ranks."""

    advantages: dict[SampleKey, np.ndarray]
    moments: np.ndarray
    metrics: dict[str, float]


class CriticWorker(Zero3Rank):
    """The value model on one rank. Arguments as of :class:`~akl_dist.zero3.rank.Zero3Rank`, and

    Args:
        clip: window of the value loss around the old values; None = unclipped.
        gamma, lam: discount a token and lambda of the generalized advantages.
    """

    def __init__(
        self, *, model_path: str, dtype: str, attention: str, rank: int, world_size: int, master_addr: str,
        master_port: int, device: str, num_threads: int, learner: LearnerConfig, clip: float | None, gamma: float, lam: float,
        seed: int, timeout_s: float, failures: Path, local_rank: int = 0, store: torch.distributed.Store | None = None,
    ) -> None:
        self.clip, self.gamma, self.lam = clip, gamma, lam
        super().__init__(
            role="critic", model_path=model_path, dtype=dtype, attention=attention, rank=rank, world_size=world_size,
            master_addr=master_addr, master_port=master_port, device=device, num_threads=num_threads, learner=learner, seed=seed,
            timeout_s=timeout_s, failures=failures, local_rank=local_rank, store=store)

    def wrapped(self, causal_lm: Any, ds_config: dict[str, Any]) -> tuple[Any, torch.nn.Module, list[type]]:
        head = sharded(lambda: ValueHead(causal_lm.config.hidden_size), ds_config)
        model = ValueModel(causal_lm.base_model, head)
        return model, model, []

    def appraise(self, samples: Mapping[SampleKey, ValueSample], plans: Sequence[RankUpdate], *, step: int) -> RankAppraisal:
        """Advantages under the critic as it is, then the critic's own updates of loop iteration ``step`` on the same responses.

        ``plans`` are this rank's parts of the updates, in order; an update without one trainable token is skipped on all ranks
        together.

        Raises:
            NonFiniteLoss: on every rank, weights unchanged by the update concerned; its batch is dumped.
        """
        batches = [[pack(keys, [samples[key] for key in keys], device=self.device) for keys in plan.micro_batches]
                   for plan in plans]
        targets = self._targets(batches)
        moments, advantages = np.zeros(3), {}
        local = torch.zeros(len(MOMENTS), dtype=torch.float64, device=self.device)
        for batch, target in zip(_flat(batches), _flat(targets), strict=True):
            moments += advantage_moments(target.advantages.float(), batch.mask).cpu().numpy()
            local += target_moments(batch, target)
            advantages |= token_advantages(batch, target, samples)
        torch.distributed.all_reduce(local)
        metrics = self._train(samples, plans, batches, targets, step, dict(zip(MOMENTS, local.tolist(), strict=True)))
        return RankAppraisal(advantages, moments, metrics)

    @torch.no_grad()
    def _targets(self, batches: Sequence[Sequence[ValueBatch]]) -> list[list[Targets]]:
        return [[targets_of(batch, self._values(batch), gamma=self.gamma, lam=self.lam) for batch in update] for update in batches]

    def _values(self, batch: ValueBatch) -> torch.Tensor:
        return self.engine(batch.input_ids, batch.position_ids, batch.predict_index)

    def _train(
        self, samples: Mapping[SampleKey, ValueSample], plans: Sequence[RankUpdate], batches: Sequence[Sequence[ValueBatch]],
        targets: Sequence[Sequence[Targets]], step: int, moments: dict[str, float],
    ) -> dict[str, float]:
        sums, norms, lr = np.zeros(len(SUMS)), [], self.next_learning_rate()
        for plan, update, target in zip(plans, batches, targets, strict=True):
            if plan.totals.tokens == 0:
                self.skipped_steps += 1
                continue
            local = self.accumulate_gradients(samples, plan, update, target, step=step)
            norm, lr = self.optimizer_step(samples, plan, step)
            torch.distributed.all_reduce(local)
            sums += local.cpu().numpy()
            norms.append(norm)
        metrics = metrics_from_sums(dict(zip(SUMS, sums.tolist(), strict=True)), moments, updates=len(norms)) | {"critic/lr": lr}
        if norms:
            metrics["critic/grad_norm"] = float(np.mean(norms))
        return metrics

    def accumulate_gradients(
        self, samples: Mapping[SampleKey, ValueSample], plan: RankUpdate, batches: Sequence[ValueBatch],
        targets: Sequence[Targets], *, step: int,
    ) -> torch.Tensor:
        """Forward and backward over this rank's micro-batches; the optimizer step is left to the caller. Local metric sums."""
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self.device)
        self.begin_accumulation()
        for index, (batch, target) in enumerate(zip(batches, targets, strict=True)):
            self.engine.set_gradient_accumulation_boundary(index == len(batches) - 1)
            loss, part = micro_batch_loss(batch, self._values(batch), target, clip=self.clip, total_tokens=plan.totals.tokens)
            self.backward(loss, f"value loss of micro-batch {index} at step {step}", batch.keys, samples)
            sums += part
        return sums


def _flat(nested: Sequence[Sequence[Any]]) -> list[Any]:
    return [one for inner in nested for one in inner]
