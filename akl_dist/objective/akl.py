"""Asymmetric KL (AKL): one direction and strength on reasoning tokens, another on answer tokens.

    loss_t = m_t [ (1 - a_t) beta_reasoning D_reasoning(s_t) + a_t beta_answer D_answer(s_t) ]

The method's own setting is forward and weak on reasoning (keep its modes), reverse and stronger on answers. Uniform
reverse, forward or symmetric KL are equal settings of both roles.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from akl_dist.objective._checks import require, require_shape
from akl_dist.objective.kl import full_kl_loss, kl_loss
from akl_dist.objective.masking import as_bool, select


def combine_roles(
    *,
    reasoning: Tensor,
    answer: Tensor,
    answer_mask: Tensor,
    mask: Tensor,
    beta_reasoning: float,
    beta_answer: float,
) -> Tensor:
    """The AKL formula: each unmasked token takes its own role's divergence times that role's beta; 0 elsewhere."""
    for name, beta in (("beta_reasoning", beta_reasoning), ("beta_answer", beta_answer)):
        require(
            math.isfinite(beta) and beta >= 0,
            name,
            got=beta,
            expected="a finite number >= 0",
            remedy="the KL term is added to a minimised loss, so a penalty has a positive sign",
        )
    require_shape("answer_mask", answer_mask, mask.shape)
    return select(torch.where(as_bool(answer_mask), beta_answer * answer, beta_reasoning * reasoning), mask)


def akl_loss(
    *,
    logp: Tensor,
    ref_logp: Tensor,
    behaviour_logp: Tensor,
    answer_mask: Tensor,
    mask: Tensor,
    beta_reasoning: float,
    beta_answer: float,
    direction_reasoning: str = "forward",
    direction_answer: str = "reverse",
    state_weight: str = "token",
    max_weight: float | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """Sampled AKL loss per token, betas included, not divided by N. Shapes, layouts and weights as in `kl.kl_loss`.

    Args:
        answer_mask: same shape as `logp`, non-zero on answer tokens; tokens with mask 0 have no role.
        beta_reasoning, beta_answer: coefficients of the roles, >= 0.
        direction_reasoning, direction_answer: "forward", "reverse" or "symmetric".
    """

    def divergence(direction: str) -> Tensor:
        return kl_loss(
            direction,
            logp=logp,
            ref_logp=ref_logp,
            behaviour_logp=behaviour_logp,
            mask=mask,
            state_weight=state_weight,
            max_weight=max_weight,
            segment_ids=segment_ids,
        )

    return combine_roles(
        reasoning=divergence(direction_reasoning),
        answer=divergence(direction_answer),
        answer_mask=answer_mask,
        mask=mask,
        beta_reasoning=beta_reasoning,
        beta_answer=beta_answer,
    )


def akl_full_loss(
    *,
    kl_forward: Tensor,
    kl_reverse: Tensor,
    logp: Tensor,
    behaviour_logp: Tensor,
    answer_mask: Tensor,
    mask: Tensor,
    beta_reasoning: float,
    beta_answer: float,
    direction_reasoning: str = "forward",
    direction_answer: str = "reverse",
    state_weight: str = "token",
    max_weight: float | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """AKL loss from exact per-token divergences (`logprobs.token_statistics`); otherwise as `akl_loss`.

    State weights exclude the current token (see `kl.full_kl_loss`), so with `token` they are 1.
    """

    def divergence(direction: str) -> Tensor:
        return full_kl_loss(
            direction,
            kl_forward=kl_forward,
            kl_reverse=kl_reverse,
            logp=logp,
            behaviour_logp=behaviour_logp,
            mask=mask,
            state_weight=state_weight,
            max_weight=max_weight,
            segment_ids=segment_ids,
        )

    return combine_roles(
        reasoning=divergence(direction_reasoning),
        answer=divergence(direction_answer),
        answer_mask=answer_mask,
        mask=mask,
        beta_reasoning=beta_reasoning,
        beta_answer=beta_answer,
    )
