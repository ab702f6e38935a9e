"""Metric sums of one micro-batch, and the metrics they add up to. Pure torch.

Every metric leaves a micro-batch as a sum (or a maximum), so that micro-batches and ranks only have to be added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from akl_dist.objective import PolicyStatistics, activity_ratio, direction_cosine

SUMS = (
    "loss", "policy_loss", "kl_loss_reasoning", "kl_loss_answer", "tokens", "answer_tokens", "entropy", "kl_k1", "kl_k3",
    "kl_forward", "kl_reverse", "kl_reward_reasoning", "kl_reward_answer", "ratio", "clipped", "clamped", "mismatch", "weight",
    "weight_squared", "kl_weighted", "truncated", "correction_weight", "correction_weight_squared", "correction_rejected",
    "trust_tokens", "trust_deviation", "trust_negative",
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


def stacked(values: Mapping[str, Tensor], names: tuple[str, ...], device: torch.device) -> Tensor:
    """The named 0-d values in order, detached float64; 0 for a name without a value."""
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([values.get(name, zero).detach().double() for name in names])


def policy_sums(policy: PolicyStatistics) -> dict[str, Tensor]:
    return {"tokens": policy.tokens, "ratio": policy.ratio_sum, "clipped": policy.clipped, "clamped": policy.clamped}


def metrics_from_sums(sums: Mapping[str, float], maxima: Mapping[str, float], *, updates: int, exact: bool) -> dict[str, float]:
    """Flat metrics from globally added sums of ``updates`` optimizer steps. What is undefined is absent, never NaN.

    Losses are means over the optimizer steps; the others means over tokens. ``objective/ratio_*`` and ``clamped_fraction`` are
    of the ratio that the policy loss clips (:func:`~akl_dist.objective.loss_log_ratio`). ``objective/ess`` is the effective sample
    size of the weights pi/mu over the number of tokens, 1 where the two policies agree; pi is the policy of the update
    at hand, so with several updates it also falls as the policy moves.
    ``objective/rollout_mismatch_*`` is |log old - log mu|, old being the learner's policy at the start of the step: what
    learner and engine disagree on for the same weights. Where no old log-probs were computed (a single update, where they
    are the current ones; or anchor ``rollout`` without a rollout correction) the current policy stands for it, so with
    anchor ``rollout`` and several updates the mismatch contains the policy's own movement.

    Args:
        exact: the KL estimator gives divergences over the vocabulary (``full``, ``topk``), not sampled ones.
    """
    tokens = sums["tokens"]
    if not tokens or not updates:
        return {}
    out = {"learner/loss": sums["loss"] / updates, "learner/tokens": tokens}
    for name in ("policy_loss", "kl_loss_reasoning", "kl_loss_answer"):
        out[f"objective/{name}"] = sums[name] / updates
    per_token = {"entropy": "entropy", "kl_value_k1": "kl_k1", "kl_value_k3": "kl_k3", "ratio_mean": "ratio",
                 "clip_fraction": "clipped", "clamped_fraction": "clamped", "rollout_mismatch_mean": "mismatch"}
    if exact:
        per_token |= {"kl_value_forward": "kl_forward", "kl_value_reverse": "kl_reverse"}
    out |= {f"objective/{name}": sums[key] / tokens for name, key in per_token.items()}
    out["objective/ratio_max"], out["objective/rollout_mismatch_max"] = maxima["ratio"], maxima["mismatch"]
    if sums["kl_weighted"]:  # absent where the KL term has no importance weights: placement reward, or state_weight none
        out["objective/kl_truncated_fraction"] = sums["truncated"] / sums["kl_weighted"]
    if sums["weight_squared"] > 0:
        out["objective/ess"] = _effective_share(sums["weight"], sums["weight_squared"], tokens)
    out |= _reward_metrics(sums) | _correction_metrics(sums) | _trust_metrics(sums)
    for role in ("reasoning", "answer"):
        activity = activity_ratio(sums[f"activity_kl_{role}"], sums[f"activity_policy_{role}"])
        cosine = direction_cosine(sums[f"forward_{role}"], sums[f"reverse_{role}"], sums[f"dot_{role}"])
        optional = {f"objective/kl_activity_{role}": activity, f"objective/kl_direction_cosine_{role}": cosine}
        out |= {name: value for name, value in optional.items() if value is not None and math.isfinite(value)}
    return out


def _effective_share(weight: float, squared: float, tokens: float) -> float:
    """Effective sample size of weights over their number, from their sum and the sum of their squares; 0 where all are 0."""
    return weight**2 / (tokens * squared) if squared else 0.0


def _reward_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Mean over all tokens of what placement ``reward`` takes off the reward per role, beta times k1; absent with placement
    ``loss``."""
    names = ("kl_reward_reasoning", "kl_reward_answer")
    return {f"objective/{name}": sums[name] / sums["tokens"] for name in names} if any(sums[name] for name in names) else {}


def _correction_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Of the weights old/mu on the policy loss: their mean, their effective sample size over the number of tokens, and the
    share of tokens whose policy loss was dropped; absent without a correction."""
    tokens, squared = sums["tokens"], sums["correction_weight_squared"]
    if not squared and not sums["correction_rejected"]:
        return {}
    return {"objective/correction_weight_mean": sums["correction_weight"] / tokens,
            "objective/correction_rejected_fraction": sums["correction_rejected"] / tokens,
            "objective/correction_ess": _effective_share(sums["correction_weight"], squared, tokens)}


def _trust_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Of the trust-region weight that drpo and spo put on the policy gradient, over tokens with an advantage: mean |weight - 1|
    and the share of negative weights; absent with other losses."""
    if not sums["trust_tokens"]:
        return {}
    return {"objective/trust_weight_deviation": sums["trust_deviation"] / sums["trust_tokens"],
            "objective/trust_weight_negative_fraction": sums["trust_negative"] / sums["trust_tokens"]}
