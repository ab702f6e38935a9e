"""Hand-made responses over a vocabulary of three, and the loss of one micro-batch of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from akl_dist.config.schema import KLConfig, ObjectiveConfig
from akl_dist.learner.batch import Sample, pack
from akl_dist.learner.step import micro_batch_loss
from akl_dist.learner.step_metrics import MAXIMA, SUMS, metrics_from_sums
from akl_dist.objective import token_statistics
from akl_dist.zero3.planning import Totals

VOCAB = 3
NO_KL = ObjectiveConfig(kl=KLConfig(beta_reasoning=0.0, beta_answer=0.0, estimator="sampled"))


class Step(NamedTuple):
    loss: float
    gradient: torch.Tensor
    """[n, V], in the logits."""
    sums: dict[str, float]
    maxima: dict[str, float]

    def metrics(self, *, exact: bool = False) -> dict[str, float]:
        return metrics_from_sums(self.sums, self.maxima, updates=1, exact=exact)


def sample(n=2, *, advantage=1.0, trains=True, rollout=-1.0, ref=-1.0, answer=None, full=None):
    """``rollout`` and ``ref`` are one log-prob for all tokens or one each."""
    rows = {} if full is None else {"hidden": full}  # as if the reference's head were the identity

    def floats(value):
        return np.broadcast_to(np.float32(value), n).copy()

    return Sample(np.array([0]), np.arange(n) % VOCAB, floats(rollout), floats(ref), rows,
                  np.zeros(n, bool) if answer is None else np.array(answer), advantage, trains)


def totals_of(samples) -> Totals:
    trained = [s for s in samples if s.trains]
    return Totals(sum(len(s.response_ids) for s in trained), len(trained), int(sum(s.answer_mask.sum() for s in trained)))


def run(samples, *, objective=NO_KL, totals=None, old=None, logits=None, kl_coefficient=1.0) -> Step:
    """``logits`` [n, V], uniform by default."""
    batch = pack([(0, i) for i in range(len(samples))], samples)
    logits = torch.zeros(len(batch.targets), VOCAB) if logits is None else logits
    logits = logits.clone().requires_grad_(True)
    statistics = token_statistics(logits, batch.targets, temperature=1.0, ref_logprobs=batch.ref_hidden, with_gradient_norms=True)
    result = micro_batch_loss(batch, statistics, objective=objective, totals=totals or totals_of(samples), old_logp=old,
                              kl_coefficient=kl_coefficient)
    result.loss.backward()
    assert logits.grad is not None
    return Step(float(result.loss.detach()), logits.grad, dict(zip(SUMS, result.sums.tolist(), strict=True)),
                dict(zip(MAXIMA, result.maxima.tolist(), strict=True)))
