"""Rules on the CoKL term. Each refusal says why. Stdlib only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from akl_dist.config.problems import Problems, Unread, problem
from akl_dist.config.resolve import kl_roles
from akl_dist.config.schema import CoKLConfig, Config

FROM_REFERENCE = ("paper", "reference_buffer")  # estimators that need responses drawn from the reference
RETAINING = ("continual",)  # recipes with a task that is evaluated and not trained on


def cokl_problems(config: Config) -> Problems:
    """Combinations that cannot give a term, or that nothing could carry out."""
    cokl, rollout = config.objective.cokl, config.rollout
    if cokl.beta == 0:
        return
    if cokl.estimator == "group" and rollout.group_size < 2:
        yield problem("objective.cokl.estimator", "group", f"another one with rollout.group_size={rollout.group_size}: it compares "
                      "the correct responses of a group with each other", "Raise rollout.group_size to 2 or more.")
    if cokl.estimator == "reference_buffer" and cokl.reference_samples < 2:
        yield problem("objective.cokl.reference_samples", cokl.reference_samples, "at least 2 with objective.cokl.estimator="
                      "reference_buffer: it compares a prompt's reference responses with each other",
                      "Write objective.cokl.reference_samples=4.")
    if cokl.estimator in FROM_REFERENCE and rollout.replay is not None:
        yield problem("objective.cokl.estimator", cokl.estimator, "group with rollout.replay: there are no engines to draw from "
                      "the reference", "Write objective.cokl.estimator=group.")
    if cokl.estimator in FROM_REFERENCE and rollout.tools.environment is not None:
        yield problem("objective.cokl.estimator", cokl.estimator, "group with rollout.tools.environment: the reference's own "
                      "conversations are not drawn", "Write objective.cokl.estimator=group.")
    if cokl.prompts == "anchor_dataset":
        yield from _anchor(config)


def _anchor(config: Config) -> Problems:
    cokl, data = config.objective.cokl, config.data
    if cokl.estimator != "reference_buffer":
        yield problem("objective.cokl.estimator", cokl.estimator, "reference_buffer with objective.cokl.prompts=anchor_dataset: "
                      "the others need the present policy's responses to the anchor prompts, which no step samples",
                      "Write objective.cokl.estimator=reference_buffer.")
    if data.anchor_path is None and data.recipe not in RETAINING:
        yield problem("data.anchor_path", None, f"a file with objective.cokl.prompts=anchor_dataset: data.recipe={data.recipe} has "
                      "no retained task", "Write data.anchor_path=FILE, or objective.cokl.prompts=same.")


def cokl_unread(config: Config) -> Iterator[Unread]:
    """Keys of the term that the chosen variant does not read."""
    cokl = config.objective.cokl
    for key in (f"objective.cokl.{field.name}" for field in dataclasses.fields(CoKLConfig) if field.name != "beta"):
        if cokl.beta == 0:
            yield (key, False, "objective.cokl.beta above 0")
    if cokl.beta > 0:
        yield ("objective.cokl.clip", cokl.estimator == "paper", "objective.cokl.estimator=paper")
        yield ("objective.cokl.min_ess_fraction", cokl.estimator != "paper", "objective.cokl.estimator=group or reference_buffer")
        yield ("objective.cokl.reference_samples", cokl.estimator in FROM_REFERENCE,
               f"objective.cokl.estimator={' or '.join(FROM_REFERENCE)}")
    yield ("data.anchor_path", cokl.beta > 0 and cokl.prompts == "anchor_dataset",
           "objective.cokl.prompts=anchor_dataset and objective.cokl.beta above 0")


def cokl_warnings(config: Config) -> Iterator[str]:
    """Settings of the term that are allowed and probably not meant, one sentence each."""
    cokl = config.objective.cokl
    if cokl.beta > 0 and kl_roles(config.objective.kl):
        yield (f"objective.cokl.beta={cokl.beta:g} beside a full KL term: that one anchors wrong responses and the probability of "
               "being correct, which CoKL is there to leave free (objective.kl.beta_reasoning=0 objective.kl.beta_answer=0).")
