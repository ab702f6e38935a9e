"""The CoKL term of an update: which rank runs which correct responses, the coefficients, and the loss. Pure.

    loss += beta * sum over responses j of  c_j log pi(y_j) / (prompts with a term, over all ranks)

Which prompts have a term follows from verdicts, so the denominator is known on the driver before the first forward pass, and an
update with such prompts is carried out even where none of its own responses trains. The responses of one prompt are on one rank.
Correct responses of the policy are in the update's micro-batches anyhow; those of the reference get micro-batches of their own and
take part in nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from akl_dist.config.schema import CoKLConfig
from akl_dist.contract.packing import deal, first_fit_decreasing, row_tokens
from akl_dist.contract.records import TrainingGroup
from akl_dist.contract.reference_samples import ReferenceSampleArrays, ReferenceSamples
from akl_dist.learner.batch import MicroBatch, Sample, pack
from akl_dist.objective import CoklTerms, cokl_terms, select
from akl_dist.zero3.planning import SampleKey, UpdatePlan

Rows = tuple[tuple[SampleKey, ...], ...]
LogProbs = Mapping[SampleKey, float]
SUMS = ("loss", "prompts", "ess", "divergence", "exponent", "duplicates")


# --- planning ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CoklPrompt:
    """A prompt with a term. ``current`` are correct responses of the policy, ``reference`` those of the reference, keyed
    (number, -1), (number, -2), ...; ``number`` is the group's index in the step, or -1, -2, ... for an anchor prompt."""

    number: int
    current: tuple[SampleKey, ...]
    reference: tuple[SampleKey, ...]
    sizes: Mapping[SampleKey, int]  # input tokens


@dataclass(frozen=True)
class CoklUpdate:
    """One rank's part of the term in one update. ``total_prompts`` with a term and ``skipped_prompts`` are global. Every rank has
    as many ``score_rows`` (all members, forward only) and ``reference_rows`` as the others; an empty one is a dummy."""

    total_prompts: int
    skipped_prompts: int
    prompts: tuple[CoklPrompt, ...]
    score_rows: Rows
    reference_rows: Rows

    @property
    def keys(self) -> list[SampleKey]:
        """Members in order, the policy's before the reference's of each prompt."""
        return [key for prompt in self.prompts for key in (*prompt.current, *prompt.reference)]


@dataclass(frozen=True)
class CoklPlan:
    """``updates[u][r]``: rank r's part of update u. ``reference[r]``: what that rank fetches, by prompt number."""

    updates: tuple[tuple[CoklUpdate, ...], ...]
    reference: tuple[Mapping[int, ReferenceSamples], ...]

    def for_rank(self, rank: int) -> list[CoklUpdate]:
        return [update[rank] for update in self.updates]


def plan_cokl(
    plans: Sequence[UpdatePlan], groups: Sequence[TrainingGroup], reference_samples: Sequence[ReferenceSamples], *,
    cokl: CoKLConfig, num_ranks: int, capacity: int,
) -> CoklPlan:
    """Where each prompt's term is computed: with its group where it needs the policy's responses; else, from reference responses
    alone, dealt by tokens, whether or not a response of its group trains.

    Args:
        plans: of the step's updates, in order.
        groups: of the step; their verdicts say which responses are correct.
        reference_samples: of the step's prompts (``cokl.prompts=same``; a prompt without any has none) or of anchor prompts,
            which are shared out among the updates.
        capacity: most input tokens of a row.
    """
    anchored = cokl.prompts == "anchor_dataset"
    by_id = {} if anchored else {samples.prompt_id: samples for samples in reference_samples}
    anchor_parts = np.array_split(np.arange(len(reference_samples)), len(plans))
    group_parts = np.array_split(np.arange(len(groups)), len(plans))
    needed: list[dict[int, ReferenceSamples]] = [{} for _ in range(num_ranks)]
    updates = []
    for plan, anchors, members in zip(plans, anchor_parts, group_parts, strict=True):
        candidates = len(anchors if anchored else members)
        if anchored:
            dealt = _dealt([_prompt(-1 - int(a), None, reference_samples[a], cokl.estimator) for a in anchors], cokl.estimator,
                           num_ranks)
        elif cokl.estimator == "reference_buffer":
            dealt = _dealt([_prompt(int(g), None, by_id.get(_id(groups[g])), cokl.estimator) for g in members], cokl.estimator,
                           num_ranks)
        else:
            dealt = [[_prompt(g, groups[g], by_id.get(_id(groups[g])), cokl.estimator) for g in own] for own in plan.groups]
        ranks = [[prompt for prompt in own if _has_term(prompt, cokl.estimator)] for own in dealt]
        for rank, own in enumerate(ranks):
            for prompt in own:
                if prompt.reference:
                    number = prompt.number
                    needed[rank][number] = reference_samples[-1 - number] if anchored else by_id[_id(groups[number])]
        updates.append(_rank_updates(ranks, candidates, capacity))
    return CoklPlan(tuple(updates), tuple(needed))


def _id(group: TrainingGroup) -> str:
    return group.labelled.rollout.prompt.prompt_id


def _prompt(number: int, group: TrainingGroup | None, samples: ReferenceSamples | None, estimator: str) -> CoklPrompt:
    """``group`` is None where the policy's responses are no members."""
    current, sizes = [], {}
    if group is not None:
        rollout = group.labelled.rollout
        verdicts = zip(group.labelled.judged.verdicts, group.trains, strict=True)
        current = [(number, index) for index, (verdict, trains) in enumerate(verdicts) if trains and verdict.correct]
        prompt_tokens = len(rollout.prompt.token_ids)
        sizes = {key: row_tokens(prompt_tokens, rollout.response_lengths[key[1]]) for key in current}
    own = _reference_sizes(number, samples) if samples is not None and estimator != "group" else {}
    return CoklPrompt(number, tuple(current), tuple(own), {**sizes, **own})


def _reference_sizes(number: int, samples: ReferenceSamples) -> dict[SampleKey, int]:
    prompt_tokens = len(samples.prompt_ids)
    return {(number, -1 - index): row_tokens(prompt_tokens, n) for index, n in enumerate(samples.response_lengths)}


def _dealt(prompts: Sequence[CoklPrompt], estimator: str, num_ranks: int) -> list[list[CoklPrompt]]:
    """Those with a term, dealt to ranks by their tokens."""
    prompts = [prompt for prompt in prompts if _has_term(prompt, estimator)]
    hands = deal([sum(prompt.sizes.values()) for prompt in prompts], num_ranks)
    return [[prompts[i] for i in hand] for hand in hands]


def _has_term(prompt: CoklPrompt, estimator: str) -> bool:
    """The skip rules of :mod:`akl_dist.objective.cokl`."""
    if estimator == "paper":
        return bool(prompt.current and prompt.reference)
    return len(prompt.current if estimator == "group" else prompt.reference) >= 2


def _rank_updates(ranks: Sequence[Sequence[CoklPrompt]], candidates: int, capacity: int) -> tuple[CoklUpdate, ...]:
    def rows(pick: Callable[[CoklPrompt], Sequence[SampleKey]]) -> list[Rows]:
        packed = []
        for own in ranks:
            keys = [(key, prompt.sizes[key]) for prompt in own for key in pick(prompt)]
            bins = first_fit_decreasing([size for _, size in keys], capacity)
            packed.append([tuple(keys[i][0] for i in members) for members in bins])
        most = max(len(own) for own in packed)
        return [tuple(own) + ((),) * (most - len(own)) for own in packed]

    total = sum(len(own) for own in ranks)
    scored, reference = rows(lambda prompt: (*prompt.current, *prompt.reference)), rows(lambda prompt: prompt.reference)
    return tuple(CoklUpdate(total, candidates - total, tuple(own), scored[rank], reference[rank]) for rank, own in enumerate(ranks))


# --- samples -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CoklSamples:
    """Members with their arrays, and log-probs of whole reference responses under the reference."""

    samples: Mapping[SampleKey, Sample]
    reference_logp: LogProbs


def cokl_samples(
    own: Mapping[SampleKey, Sample], reference: Mapping[int, ReferenceSamples], arrays: Sequence[ReferenceSampleArrays]
) -> CoklSamples:
    """A rank's samples and the reference's, keyed as the plan keys them. Per-token fields that the term does not read are 0."""
    samples, totals = dict(own), {}
    for (number, header), record in zip(reference.items(), arrays, strict=True):
        if len(record.token_ids) != sum(header.response_lengths) or len(record.seq_logp) != len(header.response_lengths):
            raise ValueError(f"reference samples of prompt {header.prompt_id}: {len(record.token_ids)} tokens and "
                             f"{len(record.seq_logp)} log-probs, expected {sum(header.response_lengths)} and "
                             f"{len(header.response_lengths)}")
        prompt_ids = np.asarray(header.prompt_ids, np.int64)
        pieces = np.split(record.token_ids, np.cumsum(header.response_lengths)[:-1])
        for index, (tokens, logp) in enumerate(zip(pieces, record.seq_logp, strict=True)):
            zeros = np.zeros(len(tokens), np.float32)
            samples[number, -1 - index] = Sample(prompt_ids, tokens, zeros, zeros, {}, np.zeros(len(tokens), bool), 0.0, True)
            totals[number, -1 - index] = float(logp)
    return CoklSamples(samples, totals)


def sequence_logp(batch: MicroBatch, logp: Tensor) -> Tensor:
    """float64 [B]: log-prob of each response of the row from flat [n] ones: of the tokens that count in it."""
    counted = select(logp.double(), batch.mask)
    return logp.new_zeros(len(batch.keys), dtype=torch.float64).index_add(0, batch.sequence_index, counted)


def by_response(
    micro_batches: Rows, logp: Sequence[Tensor | None], samples: Mapping[SampleKey, Sample]
) -> LogProbs | None:
    """Log-probs of whole responses from flat ones [n] of each micro-batch; None where those were not computed."""
    out: dict[SampleKey, float] = {}
    for keys, flat in zip(micro_batches, logp, strict=True):
        if flat is None:
            return None
        if keys:
            pieces = flat.double().split([len(samples[key].response_ids) for key in keys])
            out |= {key: piece[torch.from_numpy(samples[key].mask)].sum().item() for key, piece in zip(keys, pieces, strict=True)}
    return out


@torch.no_grad()
def scored(
    rows: Rows, samples: Mapping[SampleKey, Sample], forward: Callable[[MicroBatch], Tensor], device: torch.device | str
) -> LogProbs:
    """Log-prob of each response of the rows under the present weights. Dummy rows run too: a forward pass is a collective."""
    out: dict[SampleKey, float] = {}
    for keys in rows:
        # What the KL term needs of the reference is left out, so that responses with and without it share a row.
        batch = pack(keys, [replace(samples[key], ref_rows={}) for key in keys], device=device)
        logp = forward(batch)
        if keys:
            out |= dict(zip(keys, sequence_logp(batch, logp).tolist(), strict=True))
    return out


# --- term --------------------------------------------------------------------------------------------------------


class CoklTerm:
    """The term of one update on one rank, with coefficients that hold beta and the denominator.

    Args:
        seq_logp: of all members under the weights before this update (:func:`scored`).
        old_logp: of the policy's members at the start of the step; None where that is the same.
    """

    def __init__(
        self, plan: CoklUpdate, members: CoklSamples, cokl: CoKLConfig, *, seq_logp: LogProbs, old_logp: LogProbs | None
    ) -> None:
        self.plan, self.samples = plan, members.samples
        keys = plan.keys
        self.terms = _terms(keys, members, cokl, seq_logp, old_logp) if keys else None
        scale = cokl.beta / max(plan.total_prompts, 1)
        coefficients = [] if self.terms is None else (self.terms.coefficients * scale).tolist()
        self.coefficients: dict[SampleKey, float] = dict(zip(keys, coefficients, strict=True))
        self.loss = sum(c * seq_logp[key] for key, c in self.coefficients.items())

    def share(self, batch: MicroBatch, logp: Tensor) -> Tensor:
        """0-d: this row's part of the term; ``logp`` flat [n], differentiable. Responses that are no members count nothing."""
        coefficients = torch.tensor([self.coefficients.get(key, 0.0) for key in batch.keys] or [0.0], dtype=logp.dtype,
                                    device=logp.device)
        return (coefficients[batch.sequence_index] * select(logp, batch.mask)).sum()

    def sums(self) -> list[float]:
        """In the order of ``SUMS``: additive over ranks and updates."""
        if self.terms is None:
            return [0.0] * len(SUMS)
        terms = self.terms
        divergence = 0.0 if terms.divergence is None else terms.divergence.sum().item()
        duplicates = 0.0 if terms.duplicates is None else float(terms.duplicates.sum())
        exponents = terms.exponent[terms.has_term].sum().item()
        return [self.loss, float(terms.has_term.sum()), terms.ess.sum().item(), divergence, exponents, duplicates]

    def largest_weight(self) -> float:
        return 0.0 if self.terms is None else self.terms.largest_weight.max().item()


def _terms(
    keys: Sequence[SampleKey], members: CoklSamples, cokl: CoKLConfig, seq_logp: LogProbs, old_logp: LogProbs | None
) -> CoklTerms:
    own = [members.samples[key] for key in keys]
    is_reference = [key in members.reference_logp for key in keys]
    current = [seq_logp[key] for key in keys]
    ref = [members.reference_logp.get(key, _total(s.ref_logp, s)) for key, s in zip(keys, own, strict=True)]
    if cokl.estimator == "paper":
        behaviour = current if old_logp is None else [0.0 if key in members.reference_logp else old_logp[key] for key in keys]
    else:
        behaviour = [_total(sample.rollout_logp, sample) for sample in own]

    def reals(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    return cokl_terms(
        cokl.estimator, seq_logp=reals(current), seq_ref_logp=reals(ref), seq_behaviour_logp=reals(behaviour),
        correct=torch.ones(len(keys), dtype=torch.bool), group_index=torch.tensor([key[0] for key in keys]),
        is_reference=torch.tensor(is_reference), clip=cokl.clip, min_ess_fraction=cokl.min_ess_fraction,
        length_normalize=cokl.length_normalize, lengths=torch.tensor([int(sample.mask.sum()) for sample in own]),
        sequence_ids=torch.tensor([_identity(sample.response_ids) for sample in own]),
    )


def _total(logp: np.ndarray, sample: Sample) -> float:
    """Log-prob of the response's tokens that count."""
    return float(np.sum(logp, where=sample.mask, dtype=np.float64))


def _identity(tokens: np.ndarray) -> int:
    """63 bits of a hash of the tokens."""
    digest = hashlib.blake2b(np.ascontiguousarray(tokens, np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
