"""Flat metrics of one step, or of one evaluation, from group headers. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from akl_dist.contract.errors import VerifierFault
from akl_dist.contract.golds import alternatives
from akl_dist.contract.records import (
    JudgedGroup,
    LabelledGroup,
    ReferenceGroup,
    RolloutGroup,
    Status,
    SyncReport,
    TrainingGroup,
    Verdict,
)
from akl_dist.evaluation import default_ks, estimate, pass_at_k
from akl_dist.objective.shaping import keep_group
from akl_dist.verify.roles import agreement, likelihood_ratios


def rollout_metrics(groups: Sequence[RolloutGroup], *, seconds: float, discarded: Mapping[str, float]) -> dict[str, float]:
    """Of the groups that train; the speed counts what was drawn and left out, too (``discarded``: metrics of the drawing).
    Tokens are those that the policy sampled: what an environment wrote counts in ``rollout/observation_tokens_mean`` alone."""
    lengths = [n for g in groups for n in g.sampled_lengths]
    drawn = sum(lengths) + discarded.get("rollout/discarded_tokens", 0)
    return {
        "rollout/tokens": sum(lengths),
        "rollout/response_tokens_mean": sum(lengths) / len(lengths),
        "rollout/truncated_fraction": sum(sum(g.truncated) for g in groups) / len(lengths),
        "rollout/tokens_per_s": drawn / seconds if seconds > 0 else 0.0,
        **turn_metrics(groups),
        **discarded,
    }


def turn_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """How conversations with an environment went, per response; empty where there are none. ``void_turn_fraction`` is a share of
    turns, ``tool_failed_fraction`` of calls (absent without a call)."""
    found = [one for g in groups for one in g.turns]
    if not found:
        return {}
    turns, calls = sum(one.num_turns for one in found), sum(one.calls for one in found)
    failed = {"rollout/tool_failed_fraction": sum(one.failed_calls for one in found) / calls} if calls else {}
    return {
        "rollout/turns_mean": turns / len(found),
        "rollout/tool_calls_mean": calls / len(found),
        **failed,
        "rollout/void_turn_fraction": sum(len(one.void) for one in found) / turns,
        "rollout/observation_tokens_mean": sum(sum(one.segments[1::2]) for one in found) / len(found),
        "rollout/environment_fault_fraction": sum(bool(one.fault) for one in found) / len(found),
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
    return out | reward_metrics(decided)


def reward_metrics(decided: Sequence[Verdict]) -> dict[str, float]:
    """Means over responses with a verdict, where a verifier gives numbers: ``verify/reward_mean``, and ``verify/term_<name>`` of
    each term before its weight (``verdict`` is the main verifier)."""
    values: dict[str, list[float]] = {}
    for verdict in decided:
        for name, value in verdict.terms:
            values.setdefault(f"verify/term_{name}", []).append(value)
    if any(v.score is not None for v in decided):
        values["verify/reward_mean"] = [v.reward for v in decided if v.reward is not None]
    return {name: sum(found) / len(found) for name, found in values.items()}


def source_metrics(groups: Sequence[RolloutGroup], judged: Sequence[JudgedGroup]) -> dict[str, float]:
    """Of each source of a step's prompts, by name: prompts, mean response length in sampled tokens, and accuracy over the responses
    that have a verdict (absent when none has). Empty for a step of one source, whose figures are the step's own."""
    rows: dict[str, list[tuple[RolloutGroup, JudgedGroup]]] = {}
    for rollout, verdicts in zip(groups, judged, strict=True):
        assert rollout.prompt.prompt_id == verdicts.prompt_id, "verdicts out of order"
        rows.setdefault(rollout.prompt.source, []).append((rollout, verdicts))
    out: dict[str, float] = {}
    for source in sorted(rows) if len(rows) > 1 else ():
        lengths = [n for rollout, _ in rows[source] for n in rollout.sampled_lengths]
        accuracy = verify_metrics([verdicts for _, verdicts in rows[source]]).get("verify/accuracy")
        out[f"rollout/{source}/prompts"] = len(rows[source])
        out[f"rollout/{source}/response_tokens_mean"] = sum(lengths) / len(lengths)
        out |= {} if accuracy is None else {f"verify/{source}/accuracy": accuracy}
    return out


def roles_metrics(groups: Sequence[LabelledGroup]) -> dict[str, float]:
    """Share of answer tokens, mean verifier-span tokens of responses with an answer, share of unanimous votes; of each two signals
    the share of equal votes; each signal's likelihood ratio (absent where undefined)."""
    tokens = sum(sum(g.rollout.trained_lengths) for g in groups)
    spans = [n for g in groups for n in g.judged.answer_span_tokens if n > 0]
    votes = [sum(column) for column in zip(*(g.vote_counts for g in groups), strict=True)]
    out = {
        "roles/answer_fraction": sum(sum(g.answer_tokens) for g in groups) / tokens if tokens else 0.0,
        "roles/vote_agreement": (votes[0] + votes[7]) / sum(votes) if sum(votes) else 0.0,
        "roles/answer_span_tokens": sum(spans) / len(spans) if spans else 0.0,
    }
    for index, count in enumerate(votes):
        out[f"roles/votes_{index:03b}"] = count  # (position, entropy, verifier)
    out |= {f"roles/agreement_{pair}": share for pair, share in agreement(votes).items()}
    out |= {f"roles/likelihood_ratio_{name}": ratio for name, ratio in likelihood_ratios(votes).items() if ratio is not None}
    return out


def objective_metrics(groups: Sequence[TrainingGroup]) -> dict[str, float]:
    """Group statistics that explain how much of the batch carries a learning signal."""
    flat = [a for g in groups for a, t in zip(g.advantages, g.trains, strict=True) if t]
    zero = sum(not keep_group([v.outcome for v in g.labelled.judged.verdicts]) for g in groups)
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
    several; None where none does. ``maj_at_k`` is the mean over problems of whether the answer given most is right; None where
    answers do not vote (programs), and over several sources. ``kl_per_token`` is the mean of k3 under the sampling policy: an
    estimate of KL(policy || reference) in nats a token.
    """

    step: int
    policy_version: int
    data_set: str
    seed: int
    samples: int
    problems: int
    undecided: int
    accuracy: float
    accuracy_standard_error: float | None  # None for a single problem
    answer_span_tokens: float
    response_tokens: float
    truncated_fraction: float
    no_answer_fraction: float
    kl_per_token: float
    distinct_correct: float | None = None
    maj_at_k: float | None = None
    pass_at_k: Mapping[str, float] = field(default_factory=dict)  # k as text, above 1 -> unbiased estimate
    by_source: Mapping[str, Evaluation] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """``evaluate/<source>/...`` of every source; sources differ too much for a metric of their mixture."""
        if self.by_source:
            return {name: value for one in self.by_source.values() for name, value in one.metrics().items()}
        prefix = f"evaluate/{self.data_set}/"
        several = {} if self.distinct_correct is None else {f"{prefix}distinct_correct": self.distinct_correct}
        majority = {} if self.maj_at_k is None else {f"{prefix}maj_at_k": self.maj_at_k}
        return {
            f"{prefix}avg_at_{self.samples}": self.accuracy,
            f"{prefix}avg_at_k": self.accuracy,
            f"{prefix}problems": self.problems,
            f"{prefix}undecided": self.undecided,
            f"{prefix}answer_span_tokens": self.answer_span_tokens,
            f"{prefix}response_tokens": self.response_tokens,
            f"{prefix}truncated_fraction": self.truncated_fraction,
            f"{prefix}no_answer_fraction": self.no_answer_fraction,
            f"{prefix}kl_per_token": self.kl_per_token,
            **({} if self.accuracy_standard_error is None else {f"{prefix}standard_error": self.accuracy_standard_error}),
            **several,
            **majority,
            **{f"{prefix}pass_at_{k}": value for k, value in self.pass_at_k.items()},
        }

    def text(self) -> str:
        """For people: one line, and with several sources one more for each."""
        first = f"evaluation after step {self.step} on {self.data_set}: {self._figures()}"
        if not self.by_source or set(self.by_source) == {self.data_set}:
            return first
        return "\n".join([first, *(f"  {name}: {one._figures()}" for name, one in self.by_source.items())])

    def _figures(self) -> str:
        error = "" if self.accuracy_standard_error is None else f" +- {100 * self.accuracy_standard_error:.1f}"
        undecided = f", {self.undecided} of {self.problems * self.samples} responses without a verdict" if self.undecided else ""
        return (f"avg@{self.samples} {100 * self.accuracy:.1f} %{error} "
                f"({self.problems} held-out problems, sampling seed {self.seed}{undecided}), "
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
        assert len({len(j.verdicts) for _, j, _ in of_source}) == 1, f"problems of {source} with different numbers of samples"
        if _problem_means([j for _, j, _ in of_source]):
            by_source[source] = _summary(of_source, source, step=step, policy_version=policy_version, seed=seed)
    sources = sorted({r.prompt.source for r in rollouts})
    whole = _summary(rows, "+".join(sources), step=step, policy_version=policy_version, seed=seed)
    return replace(whole, by_source=by_source, maj_at_k=whole.maj_at_k if len(sources) == 1 else None)


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
    lengths = [n for g in rollouts for n in g.sampled_lengths]
    scored = sum(sum(g.trained_lengths) for g in rollouts)
    spans = [n for g in judged for n in g.answer_span_tokens if n > 0]
    mean = sum(means) / len(means)
    several = [j.distinct_correct for r, j in zip(rollouts, judged, strict=True) if alternatives(r.prompt.gold) is not None]
    return Evaluation(
        step=step, policy_version=policy_version, data_set=data_set, seed=seed,
        samples=len(judged[0].verdicts), problems=len(judged), undecided=sum(not v.status.trains for v in verdicts),
        accuracy=mean, accuracy_standard_error=statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None,
        answer_span_tokens=sum(spans) / len(spans) if spans else 0.0,
        response_tokens=sum(lengths) / len(lengths),
        truncated_fraction=sum(sum(g.truncated) for g in rollouts) / len(lengths),
        no_answer_fraction=sum(v.status is Status.NO_ANSWER for v in verdicts) / len(verdicts),
        kl_per_token=sum(sum(g.kl_k3) for g in reference) / scored if scored else 0.0,
        pass_at_k=_pass_at_k(judged),
        distinct_correct=sum(several) / len(several) if several else None,
        maj_at_k=estimate([g.majority for g in judged]).mean,
    )


def activity_summary(rows: Sequence[Mapping[str, float]]) -> str:
    """One line on how strongly the KL term pulled: medians over the steps of ``objective/kl_activity_*``; empty without."""
    parts = []
    for role in ("reasoning", "answer"):
        values = [row[f"objective/kl_activity_{role}"] for row in rows if f"objective/kl_activity_{role}" in row]
        if values:
            parts.append(f"{role} {100 * statistics.median(values):.1f} %")
    return f"KL gradient over policy gradient, median over steps: {', '.join(parts)}" if parts else ""
