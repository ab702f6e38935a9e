"""Loss and metric sums of one micro-batch, from its token statistics. Pure torch.

    loss = ( sum over tokens of  policy_loss_t + kl_loss_t - entropy_coef * H_t ) / N

Every metric leaves here as a sum (or a maximum), so that micro-batches and ranks only have to be added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from akl_dist.config.schema import ObjectiveConfig
from akl_dist.learner.batch import MicroBatch, Totals
from akl_dist.objective import (
    TokenStatistics,
    activity_ratio,
    aggregation_weights,
    akl_full_loss,
    akl_loss,
    bounded_log_ratio,
    direction_cosine,
    direction_sums,
    full_kl_norm2,
    kl_activity,
    kl_value_k1,
    kl_value_k3,
    masked_log_ratio,
    policy_loss,
    policy_statistics,
    role_sums,
    sampled_direction_products,
    sampled_norm2,
    select,
    state_weights,
    token_gradient,
    weighted_sum,
)

SUMS = (
    "loss", "policy_loss", "kl_loss_reasoning", "kl_loss_answer", "tokens", "answer_tokens", "entropy", "kl_k1", "kl_k3",
    "kl_forward", "kl_reverse", "ratio", "clipped", "clamped", "mismatch", "weight", "weight_squared", "truncated",
    "activity_kl_reasoning", "activity_kl_answer", "activity_policy_reasoning", "activity_policy_answer",
    "forward_reasoning", "forward_answer", "reverse_reasoning", "reverse_answer", "dot_reasoning", "dot_answer",
)  # fmt: skip
MAXIMA = ("ratio", "mismatch")


class StepResult(NamedTuple):
    """loss: 0-d, this micro-batch's share of the update's loss. sums, maxima: detached float64 in the order of
    ``SUMS`` and ``MAXIMA``; loss-like sums are shares of the update's loss, the others plain sums over tokens."""

    loss: Tensor
    sums: Tensor
    maxima: Tensor


def micro_batch_loss(
    batch: MicroBatch, statistics: TokenStatistics, *, objective: ObjectiveConfig, totals: Totals, old_logp: Tensor | None
) -> StepResult:
    """This micro-batch's share of the update's loss, with metric sums.

    Args:
        statistics: flat [n], of the current weights, with gradient norms; divergences where the estimator is ``full``.
        totals: global counts of the update (the denominators).
        old_logp: flat [n] log-probs at the start of the step. None: the current ones, detached, which is exact (ratio 1)
            before the first optimizer step on the batch. As an anchor not used with anchor ``rollout``.

    Raises:
        ValueError: estimator ``full`` without the reference's log-probs, or a name that the objective does not know.
    """
    mask = batch.grid(batch.mask, False)
    logp = batch.grid(statistics.logp)
    if not batch.keys:  # a dummy: connected to every parameter, so that all ranks run the same backward collectives
        zeros = torch.zeros(len(SUMS), dtype=torch.float64, device=logp.device)
        return StepResult(select(logp, mask).sum(), zeros, zeros[: len(MAXIMA)])
    if objective.kl.placement != "loss":
        raise ValueError(f"objective.kl.placement is {objective.kl.placement!r}, expected 'loss'")
    terms = _Terms(batch, statistics, objective, logp, mask, old_logp)
    weights = aggregation_weights(
        objective.aggregation, sequence_lengths=mask.sum(-1, keepdim=True).expand(mask.shape), total_tokens=totals.tokens,
        total_sequences=totals.sequences, norm=objective.aggregation_norm,
    )
    kl_weights = _kl_weights(weights, terms.answer, totals, objective.kl.kl_denominator)
    policy, kl = terms.policy(logp), terms.kl()
    policy_total = weighted_sum(policy, mask, weights)
    loss = policy_total + weighted_sum(kl, mask, kl_weights)
    if objective.entropy_coef:
        loss = loss - objective.entropy_coef * weighted_sum(batch.grid(statistics.entropy), mask, weights)
    with torch.no_grad():
        kl_by_role = role_sums(kl * kl_weights, answer_mask=terms.answer, mask=mask)
        sums = {"loss": loss, "policy_loss": policy_total, "kl_loss_reasoning": kl_by_role.reasoning,
                "kl_loss_answer": kl_by_role.answer}
        maxima = terms.add_metrics(sums, weights, kl_weights)
    return StepResult(loss, _stack(sums, SUMS, loss.device), _stack(maxima, MAXIMA, loss.device))


def _stack(values: Mapping[str, Tensor], names: tuple[str, ...], device: torch.device) -> Tensor:
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([values.get(name, zero).detach().double() for name in names])


def _kl_weights(weights: Tensor, answer: Tensor, totals: Totals, denominator: str) -> Tensor:
    if denominator == "tokens":
        return weights
    if denominator != "role":
        raise ValueError(f"objective.kl.kl_denominator is {denominator!r}, expected 'tokens' or 'role'")
    def one(count: int) -> Tensor:
        return aggregation_weights("token_mean", sequence_lengths=torch.ones_like(weights), total_tokens=count)
    return torch.where(answer, one(totals.answer_tokens), one(totals.reasoning_tokens))


class _Terms:
    """The policy and KL terms of one micro-batch on the [B, L] grid, and the metrics that describe them."""

    def __init__(
        self, batch: MicroBatch, statistics: TokenStatistics, objective: ObjectiveConfig, logp: Tensor, mask: Tensor,
        old_logp: Tensor | None,
    ) -> None:
        self.objective, self.logp, self.mask = objective, logp, mask
        self.rollout_logp, self.ref_logp = batch.grid(batch.rollout_logp), batch.grid(batch.ref_logp)
        self.answer = batch.grid(batch.answer_mask, False)
        self.advantages = batch.advantages
        self.old_logp = self.logp.detach() if old_logp is None else batch.grid(old_logp)
        self.anchor = self._anchor()
        self.full = objective.kl.estimator == "full"
        if self.full and statistics.kl_forward is None:
            raise ValueError("objective.kl.estimator is 'full' but the samples carry no reference log-probs over the vocabulary")
        self.fields = {name: batch.grid(value) for name, value in statistics._asdict().items() if value is not None}

    def _anchor(self) -> Tensor:
        if self.objective.anchor == "rollout":
            return self.rollout_logp
        if self.objective.anchor != "old":
            raise ValueError(f"objective.anchor is {self.objective.anchor!r}, expected 'old' or 'rollout'")
        return self.old_logp

    def policy(self, logp: Tensor) -> Tensor:
        return policy_loss(
            self.objective.policy_loss, logp=logp, anchor_logp=self.anchor, advantages=self.advantages, mask=self.mask,
            **self.objective.policy_loss_params,
        )

    def kl(self) -> Tensor:
        if not self.full:
            return self._sampled_kl(self.logp)
        kl = self.objective.kl
        return akl_full_loss(
            kl_forward=self.fields["kl_forward"], kl_reverse=self.fields["kl_reverse"], logp=self.logp,
            behaviour_logp=self.rollout_logp, answer_mask=self.answer, mask=self.mask, beta_reasoning=kl.beta_reasoning,
            beta_answer=kl.beta_answer, direction_reasoning=kl.direction_reasoning, direction_answer=kl.direction_answer,
            state_weight=kl.state_weight, max_weight=kl.max_weight,
        )

    def _sampled_kl(self, logp: Tensor) -> Tensor:
        kl = self.objective.kl
        # The importance weight is a constant of the current policy, also where ``logp`` is a leaf of its own.
        return akl_loss(
            logp=logp, ref_logp=self.ref_logp, behaviour_logp=self.rollout_logp, answer_mask=self.answer, mask=self.mask,
            beta_reasoning=kl.beta_reasoning, beta_answer=kl.beta_answer, direction_reasoning=kl.direction_reasoning,
            direction_answer=kl.direction_answer, state_weight=kl.state_weight, max_weight=kl.max_weight,
        )

    def _state_weights(self):
        kl = self.objective.kl
        return state_weights(
            logp=self.logp, behaviour_logp=self.rollout_logp, mask=self.mask, state_weight=kl.state_weight,
            max_weight=kl.max_weight, include_current=not self.full,
        )

    def _kl_norm2(self) -> Tensor:
        if not self.full:
            return sampled_norm2(token_gradient(self._sampled_kl, self.logp), self.fields["score_norm2"])
        kl, weight = self.objective.kl, self._state_weights().weight
        norms = {name: self.fields[name] for name in ("forward_norm2", "reverse_norm2", "forward_reverse_dot")}
        reasoning = full_kl_norm2(kl.direction_reasoning, coefficient=kl.beta_reasoning * weight, **norms)
        answer = full_kl_norm2(kl.direction_answer, coefficient=kl.beta_answer * weight, **norms)
        return torch.where(self.answer, answer, reasoning)

    def add_metrics(self, sums: dict[str, Tensor], weights: Tensor, kl_weights: Tensor) -> dict[str, Tensor]:
        """Add the sums of this micro-batch to ``sums``; returns the maxima."""
        mask, logp, fields = self.mask, self.logp.detach(), self.fields
        advantages = self.advantages[:, None].expand(mask.shape)
        policy_gradient = token_gradient(self.policy, logp)
        policy = policy_statistics(logp=logp, anchor_logp=self.anchor, advantages=advantages, mask=mask,
                                   gradient=policy_gradient)
        mismatch = masked_log_ratio(self.old_logp, self.rollout_logp, mask)  # the engine's, so before the policy has moved
        weight = select(bounded_log_ratio(masked_log_ratio(logp, self.rollout_logp, mask)).exp(), mask).double()
        activity = kl_activity(
            kl_norm2=self._kl_norm2() * kl_weights**2,
            policy_norm2=sampled_norm2(policy_gradient, fields["score_norm2"]) * weights**2,
            answer_mask=self.answer, mask=mask,
        )
        if self.full:
            products = (fields["forward_norm2"], fields["reverse_norm2"], fields["forward_reverse_dot"])
        else:
            products = sampled_direction_products(logp=logp, ref_logp=self.ref_logp, score_norm2=fields["score_norm2"], mask=mask)
        direction = direction_sums(forward_norm2=products[0], reverse_norm2=products[1], forward_reverse_dot=products[2],
                                   answer_mask=self.answer, mask=mask)
        sums |= {
            "tokens": policy.tokens, "answer_tokens": (self.answer & mask).sum(), "ratio": policy.ratio_sum,
            "clipped": policy.clipped, "clamped": policy.clamped, "entropy": select(fields["entropy"].double(), mask).sum(),
            "kl_k1": kl_value_k1(logp=logp, ref_logp=self.ref_logp, mask=mask).double().sum(),
            "kl_k3": kl_value_k3(logp=logp, ref_logp=self.ref_logp, mask=mask).double().sum(),
            "mismatch": mismatch.abs().double().sum(), "weight": weight.sum(), "weight_squared": (weight**2).sum(),
            "truncated": self._state_weights().truncated.sum(),
        }
        if self.full:
            sums |= {name: select(fields[name].double(), mask).sum() for name in ("kl_forward", "kl_reverse")}
        groups = (("activity_kl", activity.kl), ("activity_policy", activity.policy), ("forward", direction.forward),
                  ("reverse", direction.reverse), ("dot", direction.dot))
        for name, roles in groups:
            sums |= {f"{name}_reasoning": roles.reasoning, f"{name}_answer": roles.answer}
        return {"ratio": policy.ratio_max, "mismatch": mismatch.abs().max()}


def metrics_from_sums(sums: Mapping[str, float], maxima: Mapping[str, float], *, updates: int, full: bool) -> dict[str, float]:
    """Flat metrics from globally added sums of ``updates`` optimizer steps. What is undefined is absent, never NaN.

    Losses are means over the optimizer steps; the others means over tokens. ``objective/ess`` is the effective sample
    size of the weights pi/mu over the number of tokens, 1 where the two policies agree; pi is the policy of the update
    at hand, so with several updates it also falls as the policy moves.
    ``objective/rollout_mismatch_*`` is |log old - log mu|, old being the learner's policy at the start of the step: what
    learner and engine disagree on for the same weights. Where no old log-probs were computed (a single update, where they
    are the current ones; or anchor ``rollout``) the current policy stands for it, so with anchor ``rollout`` and several
    updates the mismatch contains the policy's own movement.
    """
    tokens = sums["tokens"]
    if not tokens or not updates:
        return {}
    out = {"learner/loss": sums["loss"] / updates, "learner/tokens": tokens}
    for name in ("policy_loss", "kl_loss_reasoning", "kl_loss_answer"):
        out[f"objective/{name}"] = sums[name] / updates
    per_token = {"entropy": "entropy", "kl_value_k1": "kl_k1", "kl_value_k3": "kl_k3", "ratio_mean": "ratio",
                 "clip_fraction": "clipped", "clamped_fraction": "clamped", "rollout_mismatch_mean": "mismatch",
                 "kl_truncated_fraction": "truncated"}
    if full:
        per_token |= {"kl_value_forward": "kl_forward", "kl_value_reverse": "kl_reverse"}
    out |= {f"objective/{name}": sums[key] / tokens for name, key in per_token.items()}
    out["objective/ratio_max"], out["objective/rollout_mismatch_max"] = maxima["ratio"], maxima["mismatch"]
    if sums["weight_squared"] > 0:
        out["objective/ess"] = sums["weight"] ** 2 / (tokens * sums["weight_squared"])
    for role in ("reasoning", "answer"):
        activity = activity_ratio(sums[f"activity_kl_{role}"], sums[f"activity_policy_{role}"])
        cosine = direction_cosine(sums[f"forward_{role}"], sums[f"reverse_{role}"], sums[f"dot_{role}"])
        optional = {f"objective/kl_activity_{role}": activity, f"objective/kl_direction_cosine_{role}": cosine}
        out |= {name: value for name, value in optional.items() if value is not None and math.isfinite(value)}
    return out


def learning_rate(step: int, *, lr: float, warmup_steps: int) -> float:
    """Learning rate of optimizer step ``step`` (from 0): linear from lr/warmup_steps up to lr, then constant."""
    return lr if warmup_steps <= 0 else lr * min(1.0, (step + 1) / warmup_steps)
