"""Rules on the objective: which KL terms, corrections and losses go together. Each refusal says why. Stdlib only."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from akl_dist.config.choices import ROLLOUT_ANCHORED
from akl_dist.config.problems import Problems, Unread, problem
from akl_dist.config.resolve import carries_rollout_ratio, kl_max_weight, kl_roles
from akl_dist.config.schema import Config, CriticConfig, KLConfig
from akl_dist.config.validate_cokl import cokl_problems, cokl_unread, cokl_warnings

CORRECTING = ("tis", "icepop", "mis")
WITHIN_GROUP = ("grpo", "rloo", "reinforce_pp_baseline")  # advantages that compare a response with others of its group
CRITIC_KEYS = tuple(f"critic.{field.name}" for field in dataclasses.fields(CriticConfig))


def objective_problems(config: Config) -> Problems:
    """Every rule of this module."""
    yield from _kl(config)
    if config.objective.kl.placement == "reward":
        yield from _kl_in_reward(config)
    yield from _correction(config)
    yield from _length_penalty(config)
    yield from _dynamic_sampling(config)
    yield from _critic(config)
    yield from cokl_problems(config)


def unread_keys(config: Config) -> Iterator[Unread]:
    """Keys of the objective that only some variants read."""
    objective, kl, correction = config.objective, config.objective.kl, config.objective.correction
    yield ("objective.aggregation_norm", objective.aggregation == "seq_mean_token_sum_norm",
           "objective.aggregation=seq_mean_token_sum_norm")
    weighted = kl.placement == "loss" and kl.state_weight != "none" and (
        kl.estimator == "sampled" or kl.state_weight == "cumulative")
    yield ("objective.kl.max_weight", weighted,
           "objective.kl.estimator=sampled and state_weight=token, or state_weight=cumulative, with placement=loss")
    yield ("objective.kl.topk", kl.estimator == "topk", "objective.kl.estimator=topk")
    yield ("objective.kl.adaptive_horizon", kl.adaptive_target is not None, "objective.kl.adaptive_target")
    corrected = correction.kind in CORRECTING
    yield ("objective.correction.level", corrected, f"objective.correction.kind={', '.join(CORRECTING)}")
    yield ("objective.correction.high", corrected, f"objective.correction.kind={', '.join(CORRECTING)}")
    for key in ("objective.gamma", "objective.gae_lambda", *CRITIC_KEYS):
        yield (key, objective.advantage == "gae", "objective.advantage=gae")
    yield ("objective.normalize_std", objective.advantage in ("grpo", "rloo"), "objective.advantage=grpo or rloo")
    yield ("objective.overlong_penalty", objective.overlong_buffer_tokens > 0, "objective.overlong_buffer_tokens")
    yield ("objective.correction.low", correction.kind in ("icepop", "mis"), "objective.correction.kind=icepop or mis")
    yield from cokl_unread(config)


def objective_warnings(config: Config) -> Iterator[str]:
    """Settings of the objective that are allowed and probably not meant, one sentence each."""
    objective = config.objective
    if config.rollout.group_size == 1 and objective.advantage in WITHIN_GROUP:
        yield (f"rollout.group_size=1: objective.advantage={objective.advantage} of a group of one is 0, so nothing but the KL "
               "term trains.")
    unweighted = objective.policy_loss == "reinforce" and objective.policy_loss_params.get("max_weight") is None
    if unweighted and config.learner.updates_per_step > 1:
        yield (f"learner.updates_per_step={config.learner.updates_per_step} with an unweighted objective.policy_loss=reinforce: "
               "from the second update on the samples are another policy's, and nothing corrects for it.")
    if objective.policy_loss in ROLLOUT_ANCHORED and objective.anchor == "old":
        yield (f"objective.anchor=old with objective.policy_loss={objective.policy_loss}: its trust region is then a distance to "
               "the learner's policy at the start of the step; the paper measures it to the policy that sampled (anchor=rollout).")
    kl, rollout = config.objective.kl, config.rollout
    one_strength = kl.strength == "equal"
    if not kl_roles(kl):
        yield "objective.kl.beta_answer=0: no KL term." if one_strength else "both betas of objective.kl are 0: no KL term."
    if one_strength and kl.beta_reasoning not in (KLConfig.beta_reasoning, kl.beta_answer):
        yield (f"both roles take objective.kl.beta_answer={kl.beta_answer:g}: objective.kl.strength=equal does not read "
               f"objective.kl.beta_reasoning={kl.beta_reasoning:g}.")
    if kl.max_weight is None and kl.estimator == "sampled" and kl.placement == "loss" and kl.state_weight != "none":
        yield "objective.kl.max_weight=null: importance weights of the KL term are unbounded."
    if kl.state_weight == "none":
        reasons = [f"learner.updates_per_step={config.learner.updates_per_step}"] * (config.learner.updates_per_step > 1)
        reasons += [f"rollout.max_staleness={rollout.max_staleness}"] * (rollout.max_staleness > 0)
        reasons += ["rollout.replay"] * (rollout.replay is not None)
        reasons += ["rollout.dtype differs from model.dtype"] * (rollout.dtype != config.model.dtype)
        here = f"as it is here ({', '.join(reasons)})" if reasons else "as it is not here"
        yield ("objective.kl.state_weight=none: on-policy the unweighted k3 has the gradient of the forward KL and k2 that of the "
               f"reverse; off-policy, {here}, it is that of no stated divergence.")
    yield from cokl_warnings(config)


def _kl(config: Config) -> Problems:
    kl, weight = config.objective.kl, kl_max_weight(config.objective.kl)
    if isinstance(weight, str) or (weight is not None and not 1 <= weight < math.inf):
        yield problem("objective.kl.max_weight", kl.max_weight, "a number of at least 1 (on-policy weights are 1), auto, or null "
                      "for untruncated", "auto is 2 for weights of one token and 5 for cumulative ones.")
    if kl.state_weight == "none" and kl.estimator != "sampled":
        yield problem("objective.kl.state_weight", "none", f"token or cumulative with objective.kl.estimator={kl.estimator}: "
                      "its divergences are not sampled, so there is no weight of the current token to leave out",
                      "Write objective.kl.estimator=sampled for the unweighted surrogate.")
    if kl.strength == "matched" and kl.kl_denominator == "role":
        yield problem("objective.kl.strength", "matched", "roles or equal with objective.kl.kl_denominator=role: the match is by "
                      "shares of one token count, which that denominator divides out", "Write objective.kl.kl_denominator=tokens.")
    if kl.adaptive_target is not None and not kl_roles(kl):
        betas = "objective.kl.beta_answer=0 (and strength=equal)" if kl.strength == "equal" else "both betas 0"
        yield problem("objective.kl.adaptive_target", kl.adaptive_target, f"null with {betas}: there is nothing to adapt",
                      "Give a beta, or leave objective.kl.adaptive_target out.")


def _kl_in_reward(config: Config) -> Problems:
    """A return of k1 is, on-policy, the reverse KL of the whole sequence, and only that."""
    kl = config.objective.kl
    for role in kl_roles(kl):
        direction = getattr(kl, f"direction_{role}")
        if direction != "reverse":
            yield problem(f"objective.kl.direction_{role}", direction, "reverse with objective.kl.placement=reward: k1 summed is "
                          "the reverse KL; no return has the forward KL's gradient, and k3 in the reward has that of none",
                          f"Write objective.kl.direction_{role}=reverse, or objective.kl.placement=loss.")
    if kl.estimator != "sampled":
        yield problem("objective.kl.estimator", kl.estimator, "sampled with objective.kl.placement=reward, which is k1 of the "
                      "tokens that were sampled", "Write objective.kl.estimator=sampled.")
    if kl.kl_denominator != "tokens":
        yield problem("objective.kl.kl_denominator", kl.kl_denominator, "tokens with objective.kl.placement=reward: what is in the "
                      "reward is divided as the policy loss is", "Write objective.kl.kl_denominator=tokens.")
    if kl.state_weight != "token":
        yield problem("objective.kl.state_weight", kl.state_weight, "token with objective.kl.placement=reward: it already is the "
                      "full-sequence KL, and nothing is weighted", "Write objective.kl.state_weight=token.")


def _correction(config: Config) -> Problems:
    objective, correction = config.objective, config.objective.correction
    if correction.kind not in CORRECTING:
        return
    if correction.high < 1:
        yield problem("objective.correction.high", correction.high, "at least 1 (where engine and learner agree the ratio is 1)",
                      "2 is usual for tokens, 5 for sequences.")
    elif correction.low is not None and correction.low > 1:
        yield problem("objective.correction.low", correction.low, "at most 1 (where engine and learner agree the ratio is 1), or "
                      "null", "0.5 is usual.")
    if carries_rollout_ratio(objective):
        yield problem("objective.correction.kind", correction.kind, "none or auto with objective.anchor=rollout: the ratio pi/mu "
                      f"of {objective.policy_loss} holds old/mu already, which would count twice",
                      "Write objective.correction.kind=none, or objective.anchor=old.")


def _length_penalty(config: Config) -> Problems:
    buffer, longest = config.objective.overlong_buffer_tokens, config.rollout.max_response_tokens
    if buffer > longest:
        yield problem("objective.overlong_buffer_tokens", buffer, f"at most rollout.max_response_tokens={longest}: it is the last "
                      "part of the longest response", f"Write objective.overlong_buffer_tokens={max(longest // 4, 1)}.")


def _critic(config: Config) -> Problems:
    warmup = config.critic.warmup_steps
    if config.objective.advantage == "gae" and warmup >= config.steps:
        yield problem("critic.warmup_steps", warmup, f"below steps={config.steps}: in those steps the critic alone trains, so the "
                      "policy never would", f"Write critic.warmup_steps={config.steps // 10}, or more steps.")


def _dynamic_sampling(config: Config) -> Problems:
    rounds, rollout, advantage = config.rollout.dynamic_sampling_rounds, config.rollout, config.objective.advantage
    if rounds == 0:
        return
    key, remedy = "rollout.dynamic_sampling_rounds", "Write rollout.dynamic_sampling_rounds=0."
    if rollout.replay is not None:
        yield problem(key, rounds, "0 with rollout.replay: a dump holds the groups that were kept, and no others can be drawn",
                      remedy)
    elif rollout.group_size == 1:
        yield problem(key, rounds, "0 with rollout.group_size=1: a group of one never has a right and a wrong response", remedy)
    elif advantage not in WITHIN_GROUP:
        yield problem(key, rounds, f"0 with objective.advantage={advantage}: its baseline is not the group's, so groups whose "
                      "responses are all right or all wrong train, too", remedy)
