"""One learner rank: DeepSpeed ZeRO-3 around the policy. A plain class; every public method is a collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from akl_dist.config.schema import LearnerConfig, ObjectiveConfig
from akl_dist.contract.packing import first_fit_decreasing, pack_row
from akl_dist.contract.records import Update
from akl_dist.learner.batch import MicroBatch, Sample, pack
from akl_dist.learner.cokl import CoklSamples, CoklTerm, CoklUpdate, by_response
from akl_dist.learner.cokl_updates import CoklUpdates
from akl_dist.learner.export import export_checkpoint
from akl_dist.learner.model import HeadStatistics, PolicyModel, Reference, frozen_head, unstack
from akl_dist.learner.step import NO_CORRECTION, micro_batch_loss, strength_metrics
from akl_dist.learner.step_metrics import MAXIMA, SUMS, StepResult, metrics_from_sums
from akl_dist.objective import HeadReference, TokenStatistics, load_policy_loss_module
from akl_dist.zero3 import gathering
from akl_dist.zero3.planning import RankUpdate, SampleKey
from akl_dist.zero3.rank import Zero3Rank
from akl_dist.zero3.rows import row_tensors


class LearnerWorker(Zero3Rank):
    """The policy on one rank. Arguments as of :class:`~akl_dist.zero3.rank.Zero3Rank`, and

    Args:
        objective: what is optimised.
        temperature: sampling temperature of the rollouts; log-probs are taken at it.
    """

    def __init__(
        self, *, model_path: str, dtype: str, attention: str, rank: int, world_size: int, master_addr: str,
        master_port: int, device: str, num_threads: int, learner: LearnerConfig, objective: ObjectiveConfig, seed: int,
        temperature: float, timeout_s: float, failures: Path, local_rank: int = 0, store: torch.distributed.Store | None = None,
    ) -> None:
        self.objective, self.temperature = objective, temperature
        if objective.policy_loss_module is not None:
            load_policy_loss_module(objective.policy_loss_module)
        super().__init__(
            role="learner", model_path=model_path, dtype=dtype, attention=attention, rank=rank, world_size=world_size,
            master_addr=master_addr, master_port=master_port, device=device, num_threads=num_threads, learner=learner, seed=seed,
            timeout_s=timeout_s, failures=failures, local_rank=local_rank, store=store)
        # No part of the engine: the reference's head is never trained, sharded, synced or saved.
        self._frozen_head = None if objective.kl.estimator != "full" else frozen_head(
            self.model, self.model_path, dtype=getattr(torch, dtype), device=self.device)

    def wrapped(self, causal_lm: Any, ds_config: dict[str, Any]) -> tuple[Any, torch.nn.Module, list[type]]:
        return causal_lm, PolicyModel(causal_lm, self.learner.logprob_chunk_tokens), [HeadStatistics]

    # --- update --------------------------------------------------------------------------------------------------

    def update(
        self, samples: Mapping[SampleKey, Sample], plans: Sequence[RankUpdate], *, step: int, kl_coefficient: float = 1.0,
        cokl: tuple[Sequence[CoklUpdate], CoklSamples] | None = None,
    ) -> Update:
        """All optimizer steps of loop iteration ``step``; ``plans`` are this rank's parts, in order.

        ``kl_coefficient`` is the adaptive factor of both betas. An update with neither a trainable token nor a prompt of the CoKL
        term is skipped on all ranks together and counted. Metrics are global. ``cokl`` is this rank's part of the CoKL term, update
        by update, and its members.

        Raises:
            NonFiniteLoss: on every rank, weights unchanged by the update concerned; its batch is dumped.
        """
        with_term = [False] * len(plans) if cokl is None else [part.total_prompts > 0 for part in cokl[0]]
        trained = [plan.totals.tokens > 0 or term for plan, term in zip(plans, with_term, strict=True)]
        old = self._old_logp(samples, plans, needed=sum(trained) > 1)
        terms = None if cokl is None else CoklUpdates(
            *cokl, self.objective.cokl, trained=trained, device=self.device,
            old=[by_response(plan.micro_batches, logp, samples) for plan, logp in zip(plans, old, strict=True)],
            forward=lambda batch: self._forward(batch).logp)
        sums, maxima = np.zeros(len(SUMS)), np.zeros(len(MAXIMA))
        norms, taken, lr = [], 0, self.next_learning_rate()
        for index, (plan, old_logp) in enumerate(zip(plans, old, strict=True)):
            if not trained[index]:
                self.skipped_steps += 1
                continue
            local_sums, local_maxima = self.accumulate_gradients(
                samples, plan, old_logp=old_logp, step=step, kl_coefficient=kl_coefficient,
                term=None if terms is None else terms.term(index))
            norm, lr = self.optimizer_step(samples, plan, step)
            torch.distributed.all_reduce(local_sums)
            torch.distributed.all_reduce(local_maxima, op=torch.distributed.ReduceOp.MAX)
            sums += local_sums.cpu().numpy()
            maxima = np.maximum(maxima, local_maxima.cpu().numpy())
            norms.append(norm)
            taken += 1
        metrics = metrics_from_sums(dict(zip(SUMS, sums.tolist(), strict=True)), dict(zip(MAXIMA, maxima.tolist(), strict=True)),
                                    updates=taken, exact=self.objective.kl.estimator != "sampled")
        metrics |= strength_metrics(self.objective.kl, [plan.totals for plan in plans], kl_coefficient)
        metrics |= {"learner/lr": lr, "learner/padding_fraction": float(np.mean([plan.padding_fraction for plan in plans]))}
        if norms:
            metrics["learner/grad_norm"] = float(np.mean(norms))
        if terms is not None and taken:
            metrics |= terms.metrics()
            metrics["learner/loss"] = metrics.get("learner/loss", 0.0) + metrics["objective/cokl_loss"]
        return Update(taken, len(plans) - taken, metrics)

    def accumulate_gradients(
        self, samples: Mapping[SampleKey, Sample], plan: RankUpdate, *, old_logp: Sequence[torch.Tensor | None], step: int,
        kl_coefficient: float = 1.0, term: CoklTerm | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward and backward over this rank's micro-batches; the optimizer step is left to the caller. A CoKL ``term`` is added
        where its members are, those of the reference in rows of their own before the others (the only ones, where no response of
        the update trains).

        Returns local metric sums and maxima. All ranks agree that a micro-batch's loss is finite before its backward pass.
        """
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self.device)
        maxima = torch.zeros(len(MAXIMA), dtype=torch.float64, device=self.device)
        last = len(plan.micro_batches) - 1
        self.begin_accumulation()
        if term is not None:
            self._reference_rows(term, step, are_last=last < 0)
        for index, keys in enumerate(plan.micro_batches):
            batch = pack(keys, [samples[key] for key in keys], device=self.device)
            self.engine.set_gradient_accumulation_boundary(index == last)
            statistics = self._forward(batch)
            result = self._loss(batch, statistics, plan, old_logp[index], kl_coefficient)
            loss = result.loss if term is None else result.loss + term.share(batch, statistics.logp)
            self.backward(loss, f"loss of micro-batch {index} at step {step}", keys, samples)
            sums += result.sums
            maxima = torch.maximum(maxima, result.maxima)
        return sums, maxima

    def _reference_rows(self, term: CoklTerm, step: int, *, are_last: bool) -> None:
        """Backward passes over correct responses of the reference, which take part in the CoKL term alone."""
        rows = term.plan.reference_rows
        for index, keys in enumerate(rows):
            batch = pack(keys, [term.samples[key] for key in keys], device=self.device)
            self.engine.set_gradient_accumulation_boundary(are_last and index == len(rows) - 1)
            loss = term.share(batch, self._forward(batch).logp)
            self.backward(loss, f"CoKL term of reference row {index} at step {step}", keys, term.samples)

    def _forward(self, batch: MicroBatch) -> TokenStatistics:
        reference = self._reference(batch)
        stacked = self.engine(batch.input_ids, batch.position_ids, batch.predict_index, batch.targets, reference, self.temperature)
        return unstack(stacked, has_reference=reference is not None)

    def _reference(self, batch: MicroBatch) -> Reference:
        """What the estimator needs at this batch's states. Not the vocabulary where only log-probs are asked for."""
        if batch.ref_hidden is None or not torch.is_grad_enabled():
            return batch.ref_topk
        if self._frozen_head is None:
            raise ValueError(f"the samples carry hidden states of the reference, which objective.kl.estimator="
                             f"{self.objective.kl.estimator} does not read")
        return HeadReference(batch.ref_hidden, *self._frozen_head)

    def _loss(
        self, batch: MicroBatch, statistics: TokenStatistics, plan: RankUpdate, old: torch.Tensor | None, kl_coefficient: float
    ) -> StepResult:
        return micro_batch_loss(batch, statistics, objective=self.objective, totals=plan.totals, old_logp=old,
                                kl_coefficient=kl_coefficient)

    @torch.no_grad()
    def _old_logp(
        self, samples: Mapping[SampleKey, Sample], plans: Sequence[RankUpdate], *, needed: bool
    ) -> list[list[torch.Tensor | None]]:
        """Log-probs of all micro-batches under the weights at the start of the step, by the code path of the update.

        None where not ``needed``: a single update, whose own log-probs are the old ones, or anchor ``rollout`` without a rollout
        correction.
        """
        wanted = self.objective.anchor == "old" or self.objective.correction.kind not in NO_CORRECTION
        if not (wanted and needed):
            return [[None] * len(plan.micro_batches) for plan in plans]
        return [[self._forward(pack(keys, [samples[key] for key in keys], device=self.device)).logp for keys in plan.micro_batches]
                for plan in plans]

    @torch.no_grad()
    def entropies(
        self, sequences: Mapping[SampleKey, tuple[np.ndarray, np.ndarray]], plan: RankUpdate
    ) -> dict[SampleKey, np.ndarray]:
        """Entropy at every response token under the present weights, at the sampling temperature: float32 [length], nats.

        Args:
            sequences: (prompt ids, response ids) of this rank's part.
            plan: this rank's micro-batches; every rank has as many.
        """
        out: dict[SampleKey, np.ndarray] = {}
        for keys in plan.micro_batches:
            row = row_tensors([sequences[key] for key in keys], self.device)
            stacked = self.engine(row.input_ids, row.position_ids, row.predict_index, row.targets, None, self.temperature)
            values = unstack(stacked, has_reference=False).entropy.float().cpu().numpy()
            if keys:  # else a dummy, for the other ranks' sake
                cuts = np.cumsum([len(sequences[key][1]) for key in keys])[:-1]
                out |= dict(zip(keys, np.split(values, cuts), strict=True))
        return out

    # --- weights out ---------------------------------------------------------------------------------------------

    def gather_bucket(self, names: Sequence[str]) -> dict[str, torch.Tensor] | None:
        return gathering.gather_bucket(self.model, names)

    @torch.no_grad()
    def probe_logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Log-probs at temperature 1 of every token but the first of each sequence (float32 [length - 1]), on every rank."""
        out: list[np.ndarray] = [np.zeros(0, np.float32)] * len(token_ids)
        rows = first_fit_decreasing([max(len(ids) - 1, 0) for ids in token_ids], self.learner.max_tokens_per_micro_batch)
        for row in rows:
            members = [index for index in row if len(token_ids[index]) > 1]
            if not members:
                continue
            packed = pack_row([(token_ids[index][:1], token_ids[index][1:]) for index in members])
            tensors = [torch.from_numpy(a).to(self.device) for a in (packed.input_ids, packed.position_ids,
                                                                    packed.predict_index, packed.targets)]
            stacked = self.engine(tensors[0][None], tensors[1][None], tensors[2], tensors[3], None, 1.0)
            logp = unstack(stacked, has_reference=False).logp.float().cpu().numpy()
            ends = np.cumsum(packed.response_lengths)
            for index, piece in zip(members, np.split(logp, ends[:-1]), strict=True):
                out[index] = piece
        return out

    def export(self, folder: Path) -> None:
        export_checkpoint(self.model, source=self.model_path, folder=Path(folder))
