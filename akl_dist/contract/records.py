"""Frozen records that cross processes: small headers plus opaque handles to bulk arrays.

The unit is the *group*: one prompt and its ``G`` sampled responses. Bulk arrays of a group (token ids, log-probs, masks,
text) live behind a ``Handle`` that a pool made and a worker resolves; the driver only ever moves headers. Each later stage has
a later type that contains the earlier one, so that fields of different samples cannot be mixed up.

Flat layout of every per-token array of a group: the responses' tokens one after another, ``n = sum(response_lengths)``.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from akl_dist.contract.turns import Turns

Handle = Any
"""An opaque reference to a record of arrays (a Ray object reference on a cluster, the record itself in unit tests)."""


MAIN_TERM = "verdict"
"""Name of the verifier's own term in a reward that is a sum of several."""


class Status(str, enum.Enum):
    """Typed verdict. Only OK, WRONG and NO_ANSWER train; the others are masked out and counted."""

    OK = "ok"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    TIMEOUT = "timeout"
    ERROR = "error"
    INVALID_GOLD = "invalid_gold"

    @property
    def trains(self) -> bool:
        return self in (Status.OK, Status.WRONG, Status.NO_ANSWER)


@dataclass(frozen=True)
class Verdict:
    """What a verifier says of one response.

    ``extracted`` is the raw answer string, ``span`` its character range in the text. ``score`` is the reward of a verifier that
    gives more than right or wrong (None: 1 or 0); ``terms`` are the named terms it is a sum of, before their weights.
    """

    status: Status
    extracted: str | None = None
    span: tuple[int, int] | None = None
    reason: str = ""
    score: float | None = None
    terms: tuple[tuple[str, float], ...] = ()

    @property
    def correct(self) -> bool | None:
        if not self.status.trains:
            return None
        return self.status is Status.OK

    @property
    def outcome(self) -> float | None:
        """What the verifier itself says, without other terms: its score, else 1.0 or 0.0; None where there is no verdict."""
        own = dict(self.terms).get(MAIN_TERM, self.score)
        return own if own is not None and self.status.trains else None if self.correct is None else float(self.correct)

    @property
    def reward(self) -> float | None:
        """The score, else 1.0 for ok and 0.0 for wrong and no_answer; None (never 0) where the grader gave no verdict."""
        if not self.status.trains:
            return None
        if self.score is not None:
            return self.score
        return 1.0 if self.status is Status.OK else 0.0


@dataclass(frozen=True)
class Prompt:
    """One problem, tokenised once. ``prompt_id`` is unique in its source: ``"<source>/<row id>"``.

    ``think_open``: the template has opened ``<think>`` at the end of ``token_ids``, so a response begins inside its reasoning.
    ``verifier`` and ``max_response_tokens`` are those of the prompt's source in a mixture (empty and None: the run's own).
    ``extra`` is JSON text of what else the row brings for a reward of one's own.
    """

    prompt_id: str
    source: str
    text: str
    token_ids: tuple[int, ...]
    gold: str
    think_open: bool = False
    verifier: str = ""
    max_response_tokens: int | None = None
    extra: str = ""

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError(f"prompt {self.prompt_id}: no token ids")


@dataclass(frozen=True)
class Sampling:
    """What an engine needs to draw a batch; every field is always sent explicitly.

    ``seed_key`` is hashed with the prompt id and the sample index into the request's own seed, so samples do not
    depend on which engine draws them or in what order.
    """

    group_size: int
    temperature: float
    max_response_tokens: int
    end_ids: tuple[int, ...]
    seed_key: tuple[int | str, ...]


# --- rollout -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RolloutArrays:
    """token_ids int32 [n], logp float32 [n] (of the distribution actually sampled: after temperature; 0 on tokens that an
    environment wrote), entropy float32 [n] in nats where the engine was asked for it (roles.entropy_source=rollout_topk)."""

    token_ids: np.ndarray
    logp: np.ndarray
    entropy: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.token_ids.shape != self.logp.shape or self.token_ids.ndim != 1:
            raise ValueError(f"token ids {self.token_ids.shape} and log-probs {self.logp.shape} do not align")
        if self.entropy is not None and self.entropy.shape != self.logp.shape:
            raise ValueError(f"entropies {self.entropy.shape} and log-probs {self.logp.shape} do not align")


@dataclass(frozen=True)
class RolloutGroup:
    """Responses to one prompt.

    ``finish_reasons`` come from the engine ("stop" or "length") or say that the turns were used up ("turns"); lengths count end
    tokens. ``turns`` has one :class:`Turns` per response of a conversation with an environment, and is empty where every response
    was sampled in one piece.
    """

    prompt: Prompt
    response_lengths: tuple[int, ...]
    finish_reasons: tuple[str, ...]
    policy_version: int
    engine: str
    arrays: Handle  # -> RolloutArrays
    turns: tuple[Turns, ...] = ()

    def __post_init__(self) -> None:
        if len(self.response_lengths) != len(self.finish_reasons):
            raise ValueError(f"prompt {self.prompt.prompt_id}: {len(self.response_lengths)} lengths, "
                             f"{len(self.finish_reasons)} finish reasons")
        if any(n < 1 for n in self.response_lengths):
            raise ValueError(f"prompt {self.prompt.prompt_id}: empty response")
        if self.turns and tuple(one.num_tokens for one in self.turns) != self.response_lengths:
            raise ValueError(f"prompt {self.prompt.prompt_id}: turns of {[one.num_tokens for one in self.turns]} tokens for "
                             f"responses of {list(self.response_lengths)}")

    @property
    def num_tokens(self) -> int:
        return sum(self.response_lengths)

    @property
    def truncated(self) -> tuple[bool, ...]:
        """Per response: it did not end by itself."""
        return tuple(reason != "stop" for reason in self.finish_reasons)

    @property
    def sampled_lengths(self) -> tuple[int, ...]:
        """Tokens of each response that the policy sampled, end tokens included."""
        return tuple(one.sampled_tokens for one in self.turns) if self.turns else self.response_lengths

    @property
    def trained_lengths(self) -> tuple[int, ...]:
        """Tokens of each response that may train: sampled by the policy, in a turn that is not left out."""
        return tuple(one.trained_tokens for one in self.turns) if self.turns else self.response_lengths

    def trained_mask(self) -> np.ndarray:
        """bool [n]: True on tokens that may train. From lengths alone."""
        if not self.turns:
            return np.ones(self.num_tokens, np.bool_)
        return np.concatenate([one.trained_mask() for one in self.turns])


# --- verify ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JudgedArrays:
    """texts [G] and extracted [G] (what a response's verdict was read from); position_mask bool [n] and verifier_mask bool
    [n]: two of the three votes on token roles."""

    texts: tuple[str, ...]
    extracted: tuple[str | None, ...]
    position_mask: np.ndarray
    verifier_mask: np.ndarray


@dataclass(frozen=True)
class JudgedGroup:
    """Verdicts of one group, without the text they were read from (it is among the arrays). ``answer_span_tokens`` [G]:
    tokens overlapping the verifier's answer span (0 if none). ``distinct_correct``: different answers among the right ones.
    ``majority``: maj@k of the group, None where its answers do not vote (programs) or none has a verdict."""

    prompt_id: str
    verdicts: tuple[Verdict, ...]
    answer_span_tokens: tuple[int, ...]
    arrays: Handle  # -> JudgedArrays
    distinct_correct: int = 0
    majority: float | None = None


# --- reference ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReferenceArrays:
    """logp float32 [n], entropy float32 [n], and what the KL estimator needs of the distribution at each state, else None.

    ``full``: hidden [n, H], final hidden states in the model's dtype (bfloat16 as its uint16 bits, because numpy lacks it);
    the reader has the LM head. ``topk``: topk_ids int32 [n, k] and topk_logp float32 [n, k], the most probable tokens, and
    topk_rest float32 [n], the log of the mass of the tokens that are neither among them nor sampled.
    """

    logp: np.ndarray
    entropy: np.ndarray
    hidden: np.ndarray | None = None
    topk_ids: np.ndarray | None = None
    topk_logp: np.ndarray | None = None
    topk_rest: np.ndarray | None = None

    @property
    def rows(self) -> dict[str, np.ndarray]:
        """The arrays beyond logp and entropy that are there, by name."""
        found = {name: getattr(self, name) for name in ("hidden", "topk_ids", "topk_logp", "topk_rest")}
        return {name: array for name, array in found.items() if array is not None}


@dataclass(frozen=True)
class ReferenceGroup:
    """Scores of one group under the frozen reference. ``kl_k1``/``kl_k3`` [G]: per-response sums of the value estimators
    of KL(mu || ref), from the engine's and the reference's log-probs."""

    prompt_id: str
    kl_k1: tuple[float, ...]
    kl_k3: tuple[float, ...]
    arrays: Handle  # -> ReferenceArrays


# --- roles and advantages ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoleArrays:
    """answer_mask bool [n]: True on answer tokens, False on reasoning tokens."""

    answer_mask: np.ndarray


@dataclass(frozen=True)
class LabelledGroup:
    """A group with everything but its advantages. ``answer_tokens`` [G] counts tokens whose role is answer;
    ``vote_counts`` counts tokens by (position, entropy, verifier) votes, in the order of the binary number."""

    rollout: RolloutGroup
    judged: JudgedGroup
    reference: ReferenceGroup
    answer_tokens: tuple[int, ...]
    vote_counts: tuple[int, ...]
    roles: Handle  # -> RoleArrays

    def __post_init__(self) -> None:
        ids = {self.rollout.prompt.prompt_id, self.judged.prompt_id, self.reference.prompt_id}
        if len(ids) != 1:
            raise ValueError(f"records of different prompts joined: {sorted(ids)}")
        size = len(self.rollout.response_lengths)
        if not (len(self.judged.verdicts) == len(self.reference.kl_k1) == len(self.answer_tokens) == size):
            raise ValueError(f"prompt {self.rollout.prompt.prompt_id}: stages disagree on the group size {size}")


@dataclass(frozen=True)
class CriticArrays:
    """advantages float32 [n]: generalized advantages before whitening; 0 for responses that do not train."""

    advantages: np.ndarray


@dataclass(frozen=True)
class TrainingGroup:
    """What a learner rank fetches and trains on. ``trains`` [G] is False where there is no verdict.

    advantages [G]: of each response. Where a critic trains: its (shaped) reward until the critic has looked at it, then the mean
    over its tokens. Per-token advantages of a critic lie behind ``token_advantages``; what trains is (a - ``advantage_mean``) /
    ``advantage_deviation``, with the mean and deviation of the whole step.
    """

    labelled: LabelledGroup
    advantages: tuple[float, ...]
    trains: tuple[bool, ...]
    token_advantages: Handle | None = None  # -> CriticArrays
    advantage_mean: float = 0.0
    advantage_deviation: float = 1.0

    def __post_init__(self) -> None:
        size = len(self.labelled.rollout.response_lengths)
        if not (len(self.advantages) == len(self.trains) == size):
            raise ValueError(f"prompt {self.labelled.rollout.prompt.prompt_id}: {len(self.advantages)} advantages for "
                             f"{size} responses")


@dataclass(frozen=True)
class Appraisal:
    """What a critic makes of a step: the groups with an advantage per token, in the same order, and metrics (flat names)."""

    groups: list[TrainingGroup]
    metrics: Mapping[str, float] = field(default_factory=dict)


# --- learner and weight sync -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Update:
    """Result of one loop iteration's optimizer steps: metrics (flat names), counters."""

    optimizer_steps: int
    skipped_steps: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ParameterInfo:
    """One entry of the sync manifest: name as the engine's checkpoint loader knows it, full shape, dtype name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        out = 1
        for size in self.shape:
            out *= size
        return out


@dataclass(frozen=True)
class SyncReport:
    """One completed and verified sync. Gaps are |learner - engine| log-probs in nats over the probe tokens."""

    policy_version: int
    seconds: float
    bytes: int
    buckets: int
    gap_mean: float
    gap_p99: float
    gap_max: float
