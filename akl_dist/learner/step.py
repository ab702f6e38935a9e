"""Loss of one micro-batch, from its token statistics. Pure torch; the metrics are of ``step_metrics``.

    loss = ( sum over tokens of  policy_loss_t + kl_loss_t - entropy_coef * H_t ) / N
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from akl_dist.config.resolve import kl_max_weight
from akl_dist.config.schema import KLConfig, ObjectiveConfig
from akl_dist.learner.batch import MicroBatch
from akl_dist.learner.step_metrics import MAXIMA, SUMS, StepResult, policy_sums, stacked
from akl_dist.objective import (
    Correction,
    DirectionSums,
    StateWeights,
    TokenStatistics,
    aggregation_weights,
    akl_full_loss,
    akl_loss,
    bounded_log_ratio,
    direction_sums,
    full_kl_norm2,
    kl_activity,
    kl_to_go,
    kl_value_k1,
    kl_value_k3,
    loss_log_ratio,
    masked_log_ratio,
    policy_loss,
    policy_statistics,
    role_sums,
    rollout_correction,
    sampled_direction_products,
    sampled_norm2,
    select,
    state_weights,
    token_gradient,
    trust_region_weights,
    weighted_sum,
)
from akl_dist.zero3.planning import Totals

NO_CORRECTION = ("none", "auto")  # what reaches the learner as auto has no dtypes that differ: see config.resolve
TRUST_WEIGHTED = ("drpo", "spo")  # losses whose gradient is the plain one times a weight


class RoleBetas(NamedTuple):
    reasoning: float
    answer: float


def role_betas(kl: KLConfig, totals: Totals, coefficient: float = 1.0) -> RoleBetas:
    """The betas of one update: those of the config times the adaptive ``coefficient``. With ``strength`` equal both are
    beta_answer; matched, both are f beta_answer + (1 - f) beta_reasoning, f the update's global share of answer tokens (so
    that a uniform arm has the total strength of AKL)."""
    if kl.strength == "roles":
        return RoleBetas(coefficient * kl.beta_reasoning, coefficient * kl.beta_answer)
    if kl.strength == "equal":
        return RoleBetas(coefficient * kl.beta_answer, coefficient * kl.beta_answer)
    share = totals.answer_tokens / totals.tokens if totals.tokens else 0.0
    matched = coefficient * (share * kl.beta_answer + (1 - share) * kl.beta_reasoning)
    return RoleBetas(matched, matched)


def strength_metrics(kl: KLConfig, updates: Sequence[Totals], coefficient: float) -> dict[str, float]:
    """The adaptive coefficient and the matched beta (mean over the updates), where the configuration has them."""
    out = {"objective/kl_coefficient": coefficient} if kl.adaptive_target is not None else {}
    betas = [role_betas(kl, totals, coefficient).answer for totals in updates if totals.tokens]
    if kl.strength == "matched" and betas:
        out["objective/kl_beta_matched"] = sum(betas) / len(betas)
    return out


def micro_batch_loss(
    batch: MicroBatch, statistics: TokenStatistics, *, objective: ObjectiveConfig, totals: Totals, old_logp: Tensor | None,
    kl_coefficient: float = 1.0,
) -> StepResult:
    """This micro-batch's share of the update's loss, with metric sums.

    Args:
        statistics: flat [n], of the current weights, with gradient norms; divergences where the estimator is ``full`` or
            ``topk``.
        totals: global counts of the update (the denominators).
        old_logp: flat [n] log-probs at the start of the step. None: the current ones, detached, which is exact (ratio 1)
            before the first optimizer step on the batch. As an anchor not used with anchor ``rollout``.
        kl_coefficient: adaptive factor of both betas.

    Raises:
        ValueError: an estimator that needs the reference's distribution without it, or a name that the objective does not know.
    """
    mask = batch.grid(batch.mask, False)
    logp = batch.grid(statistics.logp)
    if not batch.keys:  # a dummy: connected to every parameter, so that all ranks run the same backward collectives
        zeros = torch.zeros(len(SUMS), dtype=torch.float64, device=logp.device)
        return StepResult(select(logp, mask).sum(), zeros, zeros[: len(MAXIMA)])
    terms = _Terms(batch, statistics, objective, role_betas(objective.kl, totals, kl_coefficient), logp, mask, old_logp)
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
    return StepResult(loss, stacked(sums, SUMS, loss.device), stacked(maxima, MAXIMA, loss.device))


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
        self, batch: MicroBatch, statistics: TokenStatistics, objective: ObjectiveConfig, betas: RoleBetas, logp: Tensor,
        mask: Tensor, old_logp: Tensor | None,
    ) -> None:
        self.objective, self.betas, self.logp, self.mask = objective, betas, logp, mask
        self.rollout_logp, self.ref_logp = batch.grid(batch.rollout_logp), batch.grid(batch.ref_logp)
        self.answer = batch.grid(batch.answer_mask, False)
        self.old_logp = self.logp.detach() if old_logp is None else batch.grid(old_logp)
        self.anchor = self._anchor()
        self.outcome = batch.grid(batch.advantages)
        self.advantages = self._advantages()
        self.max_weight = kl_max_weight(objective.kl)
        self.correction = self._correction()
        self.exact = objective.kl.estimator != "sampled"
        if self.exact and statistics.kl_forward is None:
            raise ValueError(f"objective.kl.estimator is {objective.kl.estimator!r} but the samples carry no distribution of the "
                             "reference")
        self.fields = {name: batch.grid(value) for name, value in statistics._asdict().items() if value is not None}

    def _anchor(self) -> Tensor:
        if self.objective.anchor == "rollout":
            return self.rollout_logp
        if self.objective.anchor != "old":
            raise ValueError(f"objective.anchor is {self.objective.anchor!r}, expected 'old' or 'rollout'")
        return self.old_logp

    @property
    def in_reward(self) -> bool:
        return self.objective.kl.placement == "reward"

    def _advantages(self) -> Tensor:
        """Per token. With placement ``reward`` less the KL to go, k1 = log(pi/ref) at the policy in training: at the anchor's,
        its distance to pi (the engine's gap) would count as KL."""
        if self.objective.kl.placement not in ("loss", "reward"):
            raise ValueError(f"objective.kl.placement is {self.objective.kl.placement!r}, expected 'loss' or 'reward'")
        if not self.in_reward:
            return self.outcome
        to_go = kl_to_go(logp=self.logp.detach(), ref_logp=self.ref_logp, answer_mask=self.answer, mask=self.mask,
                         beta_reasoning=self.betas.reasoning, beta_answer=self.betas.answer)
        return self.outcome - to_go

    def _correction(self) -> Correction | None:
        """Weights old/mu of the policy loss, or None without a correction."""
        correction = self.objective.correction
        if correction.kind in NO_CORRECTION:
            return None
        return rollout_correction(correction.kind, old_logp=self.old_logp, rollout_logp=self.rollout_logp, mask=self.mask,
                                  level=correction.level, low=correction.low, high=correction.high)

    def policy(self, logp: Tensor) -> Tensor:
        return self._corrected(self._uncorrected(logp, self.advantages))

    def _uncorrected(self, logp: Tensor, advantages: Tensor) -> Tensor:
        return policy_loss(
            self.objective.policy_loss, logp=logp, anchor_logp=self.anchor, advantages=advantages, mask=self.mask,
            **self.objective.policy_loss_params,
        )

    def _corrected(self, values: Tensor) -> Tensor:
        return values if self.correction is None else values * self.correction.weight

    def kl(self) -> Tensor:
        """KL loss per token, betas included; zeros with placement ``reward``."""
        if self.in_reward:
            return torch.zeros_like(self.logp.detach())
        if not self.exact:
            return self._sampled_kl(self.logp)
        kl = self.objective.kl
        return akl_full_loss(
            kl_forward=self.fields["kl_forward"], kl_reverse=self.fields["kl_reverse"], logp=self.logp,
            behaviour_logp=self.rollout_logp, answer_mask=self.answer, mask=self.mask, beta_reasoning=self.betas.reasoning,
            beta_answer=self.betas.answer, direction_reasoning=kl.direction_reasoning, direction_answer=kl.direction_answer,
            state_weight=kl.state_weight, max_weight=self.max_weight,
        )

    def _sampled_kl(self, logp: Tensor) -> Tensor:
        kl = self.objective.kl
        # The importance weight is a constant of the current policy, also where ``logp`` is a leaf of its own.
        return akl_loss(
            logp=logp, ref_logp=self.ref_logp, behaviour_logp=self.rollout_logp, answer_mask=self.answer, mask=self.mask,
            beta_reasoning=self.betas.reasoning, beta_answer=self.betas.answer, direction_reasoning=kl.direction_reasoning,
            direction_answer=kl.direction_answer, state_weight=kl.state_weight, max_weight=self.max_weight,
        )

    def _state_weights(self) -> StateWeights:
        kl = self.objective.kl
        return state_weights(
            logp=self.logp, behaviour_logp=self.rollout_logp, mask=self.mask, state_weight=kl.state_weight,
            max_weight=self.max_weight, include_current=not self.exact,
        )

    # --- metrics -------------------------------------------------------------------------------------------------

    def add_metrics(self, sums: dict[str, Tensor], weights: Tensor, kl_weights: Tensor) -> dict[str, Tensor]:
        """Add the sums of this micro-batch to ``sums``; returns the maxima."""
        mask, logp, fields = self.mask, self.logp.detach(), self.fields
        gradient = token_gradient(lambda x: self._uncorrected(x, self.advantages), logp)
        policy = policy_statistics(
            log_ratio=loss_log_ratio(self.objective.policy_loss, logp=logp, anchor_logp=self.anchor, mask=mask),
            advantages=self.advantages, mask=mask, gradient=gradient)
        mismatch = masked_log_ratio(self.old_logp, self.rollout_logp, mask)  # the engine's, so before the policy has moved
        weight = select(bounded_log_ratio(masked_log_ratio(logp, self.rollout_logp, mask)).exp(), mask).double()
        outcome = gradient if not self.in_reward else token_gradient(lambda x: self._uncorrected(x, self.outcome), logp)
        activity = kl_activity(
            kl_norm2=self._kl_norm2(gradient - outcome) * kl_weights**2,
            policy_norm2=sampled_norm2(self._corrected(outcome), fields["score_norm2"]) * weights**2,
            answer_mask=self.answer, mask=mask,
        )
        direction = self._direction_sums()
        sums |= policy_sums(policy) | {
            "answer_tokens": (self.answer & mask).sum(), "entropy": select(fields["entropy"].double(), mask).sum(),
            "kl_k1": kl_value_k1(logp=logp, ref_logp=self.ref_logp, mask=mask).double().sum(),
            "kl_k3": kl_value_k3(logp=logp, ref_logp=self.ref_logp, mask=mask).double().sum(),
            "mismatch": mismatch.abs().double().sum(), "weight": weight.sum(), "weight_squared": (weight**2).sum(),
        }
        if not self.in_reward and self.objective.kl.state_weight != "none":
            sums |= {"kl_weighted": mask.sum(), "truncated": self._state_weights().truncated.sum()}
        if self.exact:
            sums |= {name: select(fields[name].double(), mask).sum() for name in ("kl_forward", "kl_reverse")}
        sums |= self._correction_sums() | self._reward_sums() | self._trust_sums(gradient)
        groups = (("activity_kl", activity.kl), ("activity_policy", activity.policy), ("forward", direction.forward),
                  ("reverse", direction.reverse), ("dot", direction.dot))
        for name, roles in groups:
            sums |= {f"{name}_reasoning": roles.reasoning, f"{name}_answer": roles.answer}
        return {"ratio": policy.ratio_max, "mismatch": mismatch.abs().max()}

    def _kl_norm2(self, reward_gradient: Tensor) -> Tensor:
        """Squared logit-gradient norm of the KL term; with placement ``reward`` that of its part of the policy gradient."""
        if self.in_reward:
            return sampled_norm2(self._corrected(reward_gradient), self.fields["score_norm2"])
        if not self.exact:
            return sampled_norm2(token_gradient(self._sampled_kl, self.logp), self.fields["score_norm2"])
        kl, weight = self.objective.kl, self._state_weights().weight
        norms = {name: self.fields[name] for name in ("forward_norm2", "reverse_norm2", "forward_reverse_dot")}
        reasoning = full_kl_norm2(kl.direction_reasoning, coefficient=self.betas.reasoning * weight, **norms)
        answer = full_kl_norm2(kl.direction_answer, coefficient=self.betas.answer * weight, **norms)
        return torch.where(self.answer, answer, reasoning)

    def _direction_sums(self) -> DirectionSums:
        fields = self.fields
        if self.exact:
            products = (fields["forward_norm2"], fields["reverse_norm2"], fields["forward_reverse_dot"])
        else:
            products = sampled_direction_products(logp=self.logp.detach(), ref_logp=self.ref_logp,
                                                  score_norm2=fields["score_norm2"], mask=self.mask)
        return direction_sums(forward_norm2=products[0], reverse_norm2=products[1], forward_reverse_dot=products[2],
                              answer_mask=self.answer, mask=self.mask)

    def _correction_sums(self) -> dict[str, Tensor]:
        if self.correction is None:
            return {}
        weight = self.correction.weight.double()
        return {"correction_weight": weight.sum(), "correction_weight_squared": (weight**2).sum(),
                "correction_rejected": self.correction.rejected.sum()}

    def _reward_sums(self) -> dict[str, Tensor]:
        if not self.in_reward:
            return {}
        k1 = kl_value_k1(logp=self.logp, ref_logp=self.ref_logp, mask=self.mask)
        roles = role_sums(k1, answer_mask=self.answer, mask=self.mask)
        return {"kl_reward_reasoning": self.betas.reasoning * roles.reasoning, "kl_reward_answer": self.betas.answer * roles.answer}

    def _trust_sums(self, gradient: Tensor) -> dict[str, Tensor]:
        if self.objective.policy_loss not in TRUST_WEIGHTED:
            return {}
        weight = trust_region_weights(gradient=gradient, logp=self.logp.detach(), anchor_logp=self.anchor,
                                      advantages=self.advantages, mask=self.mask).double()
        counted = self.mask & (self.advantages != 0)
        return {"trust_tokens": counted.sum(), "trust_deviation": select((weight - 1).abs(), counted).sum(),
                "trust_negative": (select(weight, counted) < 0).sum()}
