"""The CoKL terms of a step's updates on one rank, update after update: what has to be computed when, and the metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from akl_dist.config.schema import CoKLConfig
from akl_dist.learner.batch import MicroBatch
from akl_dist.learner.cokl import SUMS, CoklSamples, CoklTerm, CoklUpdate, LogProbs, scored


class CoklUpdates:
    """Consumes a rank's plan and members; every method is a collective over the learner's ranks.

    Args:
        plans: this rank's part of each update, in order.
        trained: which updates are carried out; the others are skipped on all ranks.
        old: log-probs of the policy's members at the start of the step, update by update; None where the caller has none.
        forward: log-probs [n] of a row's response tokens under the present weights.
    """

    def __init__(
        self, plans: Sequence[CoklUpdate], members: CoklSamples, cokl: CoKLConfig, *, trained: Sequence[bool],
        old: Sequence[LogProbs | None], forward: Callable[[MicroBatch], Tensor], device: torch.device | str,
    ) -> None:
        self._plans, self._members, self._cokl, self._forward, self._device = plans, members, cokl, forward, device
        self._sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self._largest = torch.zeros(1, dtype=torch.float64, device=device)
        self._done: list[CoklUpdate] = []
        self._old = list(old)
        if cokl.estimator == "paper" and sum(trained) > 1:  # in the first update the present policy is the old one
            self._old = [self._scored(plan) if due and known is None else known
                         for plan, due, known in zip(plans, trained, old, strict=True)]

    def _scored(self, plan: CoklUpdate) -> LogProbs:
        return scored(plan.score_rows, self._members.samples, self._forward, self._device)

    def term(self, index: int) -> CoklTerm:
        """The term of update ``index``, whose coefficients rest on the weights as they are now."""
        plan = self._plans[index]
        term = CoklTerm(plan, self._members, self._cokl, seq_logp=self._scored(plan), old_logp=self._old[index])
        self._sums += torch.tensor(term.sums(), dtype=torch.float64, device=self._device)
        self._largest = torch.maximum(self._largest, torch.full_like(self._largest, term.largest_weight()))
        self._done.append(plan)
        return term

    def metrics(self) -> dict[str, float]:
        """Global ones of the updates so far."""
        torch.distributed.all_reduce(self._sums)
        torch.distributed.all_reduce(self._largest, op=torch.distributed.ReduceOp.MAX)
        return cokl_metrics(self._sums.tolist(), self._largest.item(), self._done, has_divergence=self._cokl.estimator != "paper")


def cokl_metrics(
    sums: Sequence[float], largest_weight: float, plans: Sequence[CoklUpdate], *, has_divergence: bool
) -> dict[str, float]:
    """Flat metrics from sums added over ranks and updates. Means are over prompts with a term; counts over the step's updates."""
    total = dict(zip(SUMS, sums, strict=True))
    prompts = total["prompts"]
    out = {
        "objective/cokl_loss": total["loss"] / max(len(plans), 1), "objective/cokl_prompts": prompts,
        "objective/cokl_skipped_prompts": float(sum(plan.skipped_prompts for plan in plans)),
        "objective/cokl_duplicates": total["duplicates"],
    }
    if prompts:
        out |= {"objective/cokl_ess": total["ess"] / prompts, "objective/cokl_largest_weight": largest_weight,
                "objective/cokl_tempering": total["exponent"] / prompts}
        if has_divergence:
            out["objective/cokl_divergence"] = total["divergence"] / prompts
    return out
