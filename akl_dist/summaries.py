"""Flat metrics of one step, or of one evaluation, from group headers. Pure; standard library only."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from akl_dist.contract.errors import VerifierFault
from akl_dist.contract.records import JudgedGroup, LabelledGroup, ReferenceGroup, RolloutGroup, Status, TrainingGroup


def rollout_metrics(groups: Sequence[RolloutGroup], *, seconds: float) -> dict[str, float]:
    lengths = [n for g in groups for n in g.response_lengths]
    truncated = sum(reason == "length" for g in groups for reason in g.finish_reasons)
    return {
        "rollout/tokens": sum(lengths),
        "rollout/response_tokens_mean": sum(lengths) / len(lengths),
        "rollout/truncated_fraction": truncated / len(lengths),
        "rollout/tokens_per_s": sum(lengths) / seconds if seconds > 0 else 0.0,
    }


def verify_metrics(judged: Sequence[JudgedGroup]) -> dict[str, float]:
    """Shares of each status; accuracy is over responses that have a verdict (absent when none has)."""
    verdicts = [v for g in judged for v in g.verdicts]
    decided = [v for v in verdicts if v.status.trains]
    out = {
        f"verify/{status.value}_fraction": sum(v.status is status for v in verdicts) / len(verdicts)
        for status in (Status.NO_ANSWER, Status.TIMEOUT, Status.ERROR, Status.INVALID_GOLD)
    }
    if decided:
        out["verify/accuracy"] = sum(v.status is Status.OK for v in decided) / len(decided)
    return out


def roles_metrics(groups: Sequence[LabelledGroup]) -> dict[str, float]:
    """Share of answer tokens, mean verifier-span tokens of responses with an answer, share of unanimous votes."""
    tokens = sum(g.rollout.num_tokens for g in groups)
    spans = [n for g in groups for n in g.judged.answer_span_tokens if n > 0]
    votes = [sum(column) for column in zip(*(g.vote_counts for g in groups), strict=True)]
    out = {
        "roles/answer_fraction": sum(sum(g.answer_tokens) for g in groups) / tokens,
        "roles/vote_agreement": (votes[0] + votes[7]) / sum(votes) if sum(votes) else 0.0,
        "roles/answer_span_tokens": sum(spans) / len(spans) if spans else 0.0,
    }
    for index, count in enumerate(votes):
        out[f"roles/votes_{index:03b}"] = count  # (position, entropy, verifier)
    return out


def objective_metrics(groups: Sequence[TrainingGroup]) -> dict[str, float]:
    """Group statistics that explain how much of the batch carries a learning signal."""
    flat = [a for g in groups for a, t in zip(g.advantages, g.trains, strict=True) if t]
    zero = sum(all(a == 0.0 for a in g.advantages) for g in groups)
    return {
        "objective/zero_spread_group_fraction": zero / len(groups),
        "objective/masked_sample_fraction": 1 - len(flat) / sum(len(g.trains) for g in groups),
        "objective/advantage_max_abs": max((abs(a) for a in flat), default=0.0),
    }


@dataclass(frozen=True)
class Evaluation:
    """avg@k over held-out problems. Standard errors are clustered by problem (samples of one problem are not independent).

    ``kl_per_token`` is the mean of k3 under the sampling policy: an estimate of KL(policy || reference) in nats a token.
    """

    step: int
    policy_version: int
    data_set: str
    seed: int
    samples: int
    problems: int
    undecided: int
    accuracy: float
    accuracy_standard_error: float
    answer_span_tokens: float
    response_tokens: float
    truncated_fraction: float
    no_answer_fraction: float
    kl_per_token: float

    def metrics(self) -> dict[str, float]:
        prefix = f"evaluate/{self.data_set}/"
        return {
            f"{prefix}avg_at_{self.samples}": self.accuracy,
            f"{prefix}avg_at_k": self.accuracy,
            f"{prefix}standard_error": self.accuracy_standard_error,
            f"{prefix}problems": self.problems,
            f"{prefix}answer_span_tokens": self.answer_span_tokens,
            f"{prefix}response_tokens": self.response_tokens,
            f"{prefix}truncated_fraction": self.truncated_fraction,
            f"{prefix}no_answer_fraction": self.no_answer_fraction,
            f"{prefix}kl_per_token": self.kl_per_token,
        }

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(fields: Mapping[str, object]) -> Evaluation:
        return Evaluation(**fields)  # type: ignore[arg-type]


def summarise_evaluation(
    rollouts: Sequence[RolloutGroup], judged: Sequence[JudgedGroup], reference: Sequence[ReferenceGroup], *,
    step: int, policy_version: int, data_set: str, seed: int,
) -> Evaluation:
    """One :class:`Evaluation` from the three records of each problem (joined by prompt id, counts asserted)."""
    for r, j, s in zip(rollouts, judged, reference, strict=True):
        assert r.prompt.prompt_id == j.prompt_id == s.prompt_id, "evaluation records out of order"
        assert len(r.response_lengths) == len(j.verdicts) == len(s.kl_k3), "evaluation records of different sizes"
    means = []
    for group in judged:
        decided = [v for v in group.verdicts if v.status.trains]
        if decided:
            means.append(sum(v.status is Status.OK for v in decided) / len(decided))
    if not means:
        raise VerifierFault("evaluation", got=f"no verdict on any of {len(judged)} problems", expected="at least one",
                            stage="verify", remedy="Look at the reasons in the verify logs; verify.timeout_s may be too short.")
    verdicts = [v for g in judged for v in g.verdicts]
    lengths = [n for g in rollouts for n in g.response_lengths]
    spans = [n for g in judged for n in g.answer_span_tokens if n > 0]
    mean = sum(means) / len(means)
    spread = math.sqrt(sum((m - mean) ** 2 for m in means) / (len(means) - 1)) if len(means) > 1 else 0.0
    return Evaluation(
        step=step, policy_version=policy_version, data_set=data_set, seed=seed,
        samples=len(judged[0].verdicts), problems=len(judged), undecided=sum(not v.status.trains for v in verdicts),
        accuracy=mean, accuracy_standard_error=spread / math.sqrt(len(means)),
        answer_span_tokens=sum(spans) / len(spans) if spans else 0.0,
        response_tokens=sum(lengths) / len(lengths),
        truncated_fraction=sum(f == "length" for g in rollouts for f in g.finish_reasons) / len(lengths),
        no_answer_fraction=sum(v.status is Status.NO_ANSWER for v in verdicts) / len(verdicts),
        kl_per_token=sum(sum(g.kl_k3) for g in reference) / sum(lengths),
    )


def activity_summary(rows: Sequence[Mapping[str, float]]) -> str:
    """One line on how strongly the KL term pulled: medians over the steps of ``objective/kl_activity_*``; empty without."""
    parts = []
    for role in ("reasoning", "answer"):
        values = [row[f"objective/kl_activity_{role}"] for row in rows if f"objective/kl_activity_{role}" in row]
        if values:
            parts.append(f"{role} {100 * statistics.median(values):.1f} %")
    return f"KL gradient over policy gradient, median over steps: {', '.join(parts)}" if parts else ""
