"""What is added to or taken from rewards and advantages: length penalty, KL in the reward, adaptive KL coefficient."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from akl_dist.objective._checks import require, require_shape
from akl_dist.objective.akl import combine_roles
from akl_dist.objective.masking import select
from akl_dist.objective.ratios import masked_log_ratio, segment_cumsum

LARGEST_ADAPTATION_ERROR = 0.2


def keep_group(outcomes: Sequence[float | None]) -> bool:
    """Whether a group carries a signal: its raw outcomes (right or wrong, or a verifier's own number) are not all alike. None (no
    verdict) counts as nothing.

    Dynamic sampling (DAPO, arXiv 2503.14476, eq. 11) filters by the raw outcome, never by the shaped reward: a length penalty
    spreads the rewards of groups that nobody solved.
    """
    return len({outcome for outcome in outcomes if outcome is not None}) > 1


def overlong_penalty(
    lengths: Tensor | Sequence[int], *, max_tokens: int | Sequence[int], buffer_tokens: int, penalty: float = 1.0
) -> Tensor:
    """Amount >= 0 to subtract from the reward of each response (DAPO, arXiv 2503.14476, eq. 13, with the sign turned).

    0 up to max_tokens - buffer_tokens, then linear up to `penalty` at max_tokens, and no more beyond.

    Args:
        lengths: [N] tokens of each response.
        max_tokens: longest response that the engine draws; one for all, or [N].
        buffer_tokens: length of the penalised interval, 1 to max_tokens.
        penalty: amount at max_tokens, in units of reward.

    Returns: float64, shape of `lengths`.
    """
    limits = torch.as_tensor(max_tokens).double()
    shortest = int(limits.min()) if limits.numel() else buffer_tokens
    require(1 <= buffer_tokens <= shortest, "overlong buffer", got=f"{buffer_tokens} tokens",
            expected=f"1 to {shortest} tokens", remedy="it lies inside the longest response")  # fmt: skip
    require(math.isfinite(penalty) and penalty >= 0, "overlong penalty", got=penalty, expected="a finite number >= 0",
            remedy="it is subtracted from the reward")  # fmt: skip
    excess = torch.as_tensor(lengths).double() - (limits - buffer_tokens)
    return penalty * (excess / buffer_tokens).clamp(0, 1)


def kl_to_go(
    *,
    logp: Tensor,
    ref_logp: Tensor,
    answer_mask: Tensor,
    mask: Tensor,
    beta_reasoning: float,
    beta_answer: float,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """KL in the reward: sum over s >= t of m_s beta_s k1_s, the amount to subtract from each token's advantage.

    With y drawn from pi and one beta, the policy gradient of what is subtracted is exactly that of beta times the full
    sequence's reverse KL(pi || ref). k1 = log(pi/ref) is the only estimator that is right here: k3 in the reward is not
    an estimate of this gradient. With a beta per role this holds for roles that are known before their token is drawn.
    Subtract after any normalisation, or the coefficient would be normalised too.

    Args:
        logp: log pi of the sampled tokens (at the start of the update), [B, T] or packed [n].
        ref_logp, answer_mask, mask: same shape; masked entries may hold NaN.
        beta_reasoning, beta_answer: coefficients of the roles, >= 0.
        segment_ids: sequences of a packed row, as in `segment_cumsum`.

    Returns: detached, shape of `logp`, 0 where masked; summed in float64.
    """
    require_shape("answer_mask", answer_mask, logp.shape)
    k1 = masked_log_ratio(logp.detach(), ref_logp, mask)
    cost = combine_roles(reasoning=k1, answer=k1, answer_mask=answer_mask, mask=mask, beta_reasoning=beta_reasoning,
                         beta_answer=beta_answer)  # fmt: skip
    backwards = None if segment_ids is None else segment_ids.flip(-1)
    return select(segment_cumsum(cost.flip(-1), backwards).flip(-1).to(k1.dtype), mask)


def adapted_coefficient(coefficient: float, *, kl: float, target: float, horizon: float) -> float:
    """Proportional controller of the KL coefficient (Ziegler et al., arXiv 1909.08593, section 2.2).

        e = clip(kl / target - 1, -0.2, 0.2);    coefficient <- coefficient (1 + e / horizon)

    Args:
        coefficient: current beta, >= 0.
        kl: KL of the last step, nats per token; may be negative where it is an estimate.
        target: wanted KL, nats per token.
        horizon: steps; 1 / horizon is the paper's K_beta (0.1 there).

    Raises: `ValueError` on a non-finite KL, or a target or horizon that is not positive.
    """
    require(math.isfinite(kl), "kl", got=kl, expected="a finite number", remedy="skip the step: nothing was measured")
    require(target > 0, "KL target", got=target, expected="a positive number of nats", remedy="switch the controller off")
    require(horizon >= 1, "KL horizon", got=horizon, expected="1 step or more", remedy="10 is the paper's")
    error = min(max(kl / target - 1.0, -LARGEST_ADAPTATION_ERROR), LARGEST_ADAPTATION_ERROR)
    return coefficient * (1.0 + error / horizon)
