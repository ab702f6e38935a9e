"""Flat metrics of one step, or of one evaluation, from group headers. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from akl_dist.contract.errors import VerifierFault
from akl_dist.contract.golds import alternatives
from akl_dist.contract.records import JudgedGroup, LabelledGroup, ReferenceGroup, RolloutGroup, Status, SyncReport, TrainingGroup
from akl_dist.evaluation import default_ks, estimate, pass_at_k
from akl_dist.objective.shaping import keep_group


def rollout_metrics(groups: Sequence[RolloutGroup], *, seconds: float, discarded: Mapping[str, float]) -> dict[str, float]:
    """Of the groups that train; the speed counts what was drawn and left out, too (``discarded``: metrics of the drawing)."""
    drawn = sum(g.num_tokens for g in groups) + discarded.get("rollout/discarded_tokens", 0)
    lengths = [n for g in groups for n in g.response_lengths]
    truncated = sum(reason == "length" for g in groups for reason in g.finish_reasons)
    return {
        "rollout/tokens": sum(lengths),
        "rollout/response_tokens_mean": sum(lengths) / len(lengths),
        "rollout/truncated_fraction": truncated / len(lengths),
        "rollout/tokens_per_s": drawn / seconds if seconds > 0 else 0.0,
        **discarded,
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
    zero = sum(not keep_group([v.correct for v in g.labelled.judged.verdicts]) for g in groups)
    return {
        "objective/zero_spread_group_fraction": zero / len(groups),
        "objective/masked_sample_fraction": 1 - len(flat) / sum(len(g.trains) for g in groups),
        "objective/advantage_max_abs": max((abs(a) for a in flat), default=0.0),
    }


def weight_sync_metrics(report: SyncReport) -> dict[str, float]:
    """Cost and remaining log-prob gap of a sync; empty where nothing was transferred (a run without engines)."""
    if report.buckets == 0:
        return {}
    return {"weight_sync/seconds": report.seconds, "weight_sync/bytes": report.bytes, "weight_sync/logprob_gap": report.gap_mean,
            "weight_sync/logprob_gap_p99": report.gap_p99, "weight_sync/logprob_gap_max": report.gap_max}


@dataclass(frozen=True)
class Evaluation:
    """avg@k over held-out problems. Standard errors are clustered by problem (samples of one problem are not independent).

    The fields are over all problems (``accuracy`` judges which evaluation is best); ``data_set`` joins the names of the
    sources with ``+``, and ``by_source`` holds the same figures of each source (itself without a ``by_source``). A source
    without any verdict is absent from it.
    ``distinct_correct`` is the mean number of different right answers among the samples of a problem, over the problems that accept
    several; None where none does. ``kl_per_token`` is the mean of k3 under the sampling policy: an estimate of KL(policy ||
    reference) in nats a token.
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
    distinct_correct: float | None = None
    pass_at_k: Mapping[str, float] = field(default_factory=dict)  # k as text, above 1 -> unbiased estimate
    by_source: Mapping[str, Evaluation] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """``evaluate/<source>/...`` of every source; sources differ too much for a metric of their mixture."""
        if self.by_source:
            return {name: value for one in self.by_source.values() for name, value in one.metrics().items()}
        prefix = f"evaluate/{self.data_set}/"
        several = {} if self.distinct_correct is None else {f"{prefix}distinct_correct": self.distinct_correct}
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
            **several,
            **{f"{prefix}pass_at_{k}": value for k, value in self.pass_at_k.items()},
        }

    def text(self) -> str:
        """For people: one line, and with several sources one more for each."""
        first = f"evaluation after step {self.step} on {self.data_set}: {self._figures()}"
        if not self.by_source or set(self.by_source) == {self.data_set}:
            return first
        return "\n".join([first, *(f"  {name}: {one._figures()}" for name, one in self.by_source.items())])

    def _figures(self) -> str:
        return (f"avg@{self.samples} {100 * self.accuracy:.1f} % +- {100 * self.accuracy_standard_error:.1f} "
                f"({self.problems} held-out problems, sampling seed {self.seed}), "
                f"response {self.response_tokens:.1f} tokens, KL {self.kl_per_token:.4f}"
                + ("" if self.distinct_correct is None else f", {self.distinct_correct:.2f} different right answers a problem"))

    def to_dict(self) -> dict[str, Any]:
        """Plain containers for JSON; the entries of ``by_source`` have the same fields."""
        fields = asdict(self)
        for one in fields["by_source"].values():
            del one["by_source"]
        return fields

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> Evaluation:
        """Inverse of :meth:`to_dict`."""
        by_source = {name: Evaluation.from_dict(one) for name, one in fields.get("by_source", {}).items()}
        return Evaluation(**{**fields, "by_source": by_source})


def summarise_evaluation(
    rollouts: Sequence[RolloutGroup], judged: Sequence[JudgedGroup], reference: Sequence[ReferenceGroup], *,
    step: int, policy_version: int, seed: int,
) -> Evaluation:
    """One :class:`Evaluation` from the three records of each problem (joined by prompt id, counts asserted).

    Raises:
        VerifierFault: no verdict at all.
    """
    for r, j, s in zip(rollouts, judged, reference, strict=True):
        assert r.prompt.prompt_id == j.prompt_id == s.prompt_id, "evaluation records out of order"
        assert len(r.response_lengths) == len(j.verdicts) == len(s.kl_k3), "evaluation records of different sizes"
    if not _problem_means(judged):
        raise VerifierFault("evaluation", got=f"no verdict on any of {len(judged)} problems", expected="at least one",
                            stage="verify", remedy="Look at the reasons in the verify logs; verify.timeout_s may be too short.")
    rows = list(zip(rollouts, judged, reference, strict=True))
    by_source: dict[str, Evaluation] = {}
    for source in sorted({r.prompt.source for r in rollouts}):
        of_source = [row for row in rows if row[0].prompt.source == source]
        if _problem_means([j for _, j, _ in of_source]):
            by_source[source] = _summary(of_source, source, step=step, policy_version=policy_version, seed=seed)
    data_set = "+".join(sorted({r.prompt.source for r in rollouts}))
    return replace(_summary(rows, data_set, step=step, policy_version=policy_version, seed=seed), by_source=by_source)


def _problem_means(judged: Sequence[JudgedGroup]) -> list[float]:
    """Accuracy of each problem that has a verdict."""
    decided = [[v for v in group.verdicts if v.status.trains] for group in judged]
    return [sum(v.status is Status.OK for v in verdicts) / len(verdicts) for verdicts in decided if verdicts]


def _pass_at_k(judged: Sequence[JudgedGroup]) -> dict[str, float]:
    """Means over the problems with at least k verdicts; a k that no problem reaches is absent."""
    counts = [(sum(v.status.trains for v in g.verdicts), sum(v.status is Status.OK for v in g.verdicts)) for g in judged]
    found = {k: estimate([pass_at_k(n=n, c=c, k=k) for n, c in counts]).mean for k in default_ks(len(judged[0].verdicts)) if k > 1}
    return {str(k): mean for k, mean in found.items() if mean is not None}


def _summary(
    rows: Sequence[tuple[RolloutGroup, JudgedGroup, ReferenceGroup]], data_set: str, *, step: int, policy_version: int, seed: int,
) -> Evaluation:
    rollouts, judged, reference = zip(*rows, strict=True)
    means = _problem_means(judged)
    verdicts = [v for g in judged for v in g.verdicts]
    lengths = [n for g in rollouts for n in g.response_lengths]
    spans = [n for g in judged for n in g.answer_span_tokens if n > 0]
    mean = sum(means) / len(means)
    several = [j.distinct_correct for r, j in zip(rollouts, judged, strict=True) if alternatives(r.prompt.gold) is not None]
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
        pass_at_k=_pass_at_k(judged),
        distinct_correct=sum(several) / len(several) if several else None,
    )


def activity_summary(rows: Sequence[Mapping[str, float]]) -> str:
    """One line on how strongly the KL term pulled: medians over the steps of ``objective/kl_activity_*``; empty without."""
    parts = []
    for role in ("reasoning", "answer"):
        values = [row[f"objective/kl_activity_{role}"] for row in rows if f"objective/kl_activity_{role}" in row]
        if values:
            parts.append(f"{role} {100 * statistics.median(values):.1f} %")
    return f"KL gradient over policy gradient, median over steps: {', '.join(parts)}" if parts else ""
