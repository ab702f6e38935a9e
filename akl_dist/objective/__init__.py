"""Objectives as pure functions on tensors: advantages, policy losses, KL terms, aggregation. Only torch and stdlib."""

from __future__ import annotations

from akl_dist.objective.activity import (
    ActivitySums,
    DirectionSums,
    PolicyStatistics,
    RoleSums,
    activity_ratio,
    direction_cosine,
    direction_sums,
    full_kl_norm2,
    kl_activity,
    policy_statistics,
    role_sums,
    sampled_direction_products,
    sampled_norm2,
    token_gradient,
)
from akl_dist.objective.advantages import SPREAD_FLOOR, group_advantages, zero_spread_groups
from akl_dist.objective.aggregate import AGGREGATIONS, aggregate, aggregation_weights, weighted_sum
from akl_dist.objective.akl import akl_full_loss, akl_loss, combine_roles
from akl_dist.objective.kl import (
    DIRECTIONS,
    STATE_WEIGHTS,
    StateWeights,
    full_kl,
    full_kl_loss,
    kl_loss,
    kl_value_k1,
    kl_value_k2,
    kl_value_k3,
    state_weights,
)
from akl_dist.objective.logprobs import TokenStatistics, chunked_token_statistics, num_chunks, token_statistics
from akl_dist.objective.masking import as_bool, select
from akl_dist.objective.policy_losses import POLICY_LOSSES, policy_loss, ppo, register_policy_loss
from akl_dist.objective.ratios import LOG_RATIO_BOUND, bounded_log_ratio, clamped_tokens, masked_log_ratio, segment_cumsum

__all__ = [
    "AGGREGATIONS",
    "DIRECTIONS",
    "LOG_RATIO_BOUND",
    "POLICY_LOSSES",
    "SPREAD_FLOOR",
    "STATE_WEIGHTS",
    "ActivitySums",
    "DirectionSums",
    "PolicyStatistics",
    "RoleSums",
    "StateWeights",
    "TokenStatistics",
    "activity_ratio",
    "aggregate",
    "aggregation_weights",
    "akl_full_loss",
    "akl_loss",
    "as_bool",
    "bounded_log_ratio",
    "chunked_token_statistics",
    "clamped_tokens",
    "combine_roles",
    "direction_cosine",
    "direction_sums",
    "full_kl",
    "full_kl_loss",
    "full_kl_norm2",
    "group_advantages",
    "kl_activity",
    "kl_loss",
    "kl_value_k1",
    "kl_value_k2",
    "kl_value_k3",
    "masked_log_ratio",
    "num_chunks",
    "policy_loss",
    "policy_statistics",
    "ppo",
    "register_policy_loss",
    "role_sums",
    "sampled_direction_products",
    "sampled_norm2",
    "segment_cumsum",
    "select",
    "state_weights",
    "token_gradient",
    "token_statistics",
    "weighted_sum",
    "zero_spread_groups",
]
