"""What an evaluation reports, from one record per sample: avg@k, pass@k, maj@k, standard errors, shares. Pure, stdlib only.

Records are keyed by (benchmark, problem id, sample index). Benchmarks are never pooled, problems are told apart by id, the
counts must be those asked for, and a sample without a verdict is counted and shown, never averaged as 0.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from akl_dist.contract.errors import RunError
from akl_dist.contract.records import Status
from akl_dist.verify.votes import majority

LISTED = 5
COLUMNS = 100  # of a terminal, for what is printed


@dataclass(frozen=True)
class SampleRecord:
    """One judged response. ``tokens`` counts its end token; ``answer_span_tokens`` is 0 where nothing was extracted;
    ``votes`` False: answers of this benchmark have no majority (programs). ``turns_used_up``: truncated because it wanted one more
    answer of its environment."""

    benchmark: str
    problem_id: str
    sample: int
    status: Status
    extracted: str | None
    tokens: int
    truncated: bool
    answer_span_tokens: int
    votes: bool = True
    turns_used_up: bool = False

    @property
    def key(self) -> tuple[str, str, int]:
        return self.benchmark, self.problem_id, self.sample


@dataclass(frozen=True)
class Estimate:
    """A mean over problems with its standard error (None where fewer than two problems have a value); ``problems`` had one."""

    mean: float | None
    standard_error: float | None
    problems: int


@dataclass(frozen=True)
class BenchmarkResult:
    """One benchmark's figures.

    ``avg_at_k`` is the mean over problems of the share of right samples, of those with a verdict. ``pass_at_k`` has an entry per
    k: problems with fewer than k verdicts have no unbiased estimate and are left out of it (``problems`` says how many count);
    None for a k that no problem reaches. ``maj_at_k`` is None where answers do not vote. ``undecided`` counts samples without a
    verdict by status.
    """

    benchmark: str
    problems: int
    samples: int
    avg_at_k: Estimate
    pass_at_k: Mapping[int, Estimate]
    maj_at_k: Estimate | None
    undecided: Mapping[str, int]
    no_answer_fraction: float
    truncated_fraction: float
    response_tokens: float
    answer_span_tokens: float

    def to_dict(self) -> dict[str, Any]:
        """Plain containers for JSON."""
        fields = asdict(self)
        fields["pass_at_k"] = {str(k): value for k, value in fields["pass_at_k"].items()}
        return fields


def pass_at_k(*, n: int, c: int, k: int) -> float | None:
    """Unbiased estimate of the probability that one of k samples is right, from c right ones of n: 1 - C(n-c, k) / C(n, k)
    (Chen et al. 2021, arXiv 2107.03374, eq. 1). None when k > n: no unbiased estimate exists."""
    if not (0 <= c <= n and k >= 1):
        raise ValueError(f"pass_at_k: n={n}, c={c}, k={k}; expected 0 <= c <= n and k >= 1")
    if k > n:
        return None
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def maj_at_k(samples: Sequence[SampleRecord]) -> float | None:
    """:func:`akl_dist.verify.votes.majority` of one problem's samples."""
    return majority([(sample.status, sample.extracted) for sample in samples])


def estimate(values: Sequence[float | None]) -> Estimate:
    """Mean and standard error over problems (the clusters: samples of one problem are not independent). None values are left
    out."""
    found = [value for value in values if value is not None]
    if not found:
        return Estimate(None, None, 0)
    mean = math.fsum(found) / len(found)
    if len(found) < 2:
        return Estimate(mean, None, len(found))
    variance = math.fsum((value - mean) ** 2 for value in found) / (len(found) - 1)
    return Estimate(mean, math.sqrt(variance / len(found)), len(found))


def default_ks(samples: int) -> tuple[int, ...]:
    """The powers of two below ``samples``, and ``samples``."""
    return (*(2**power for power in range(samples.bit_length()) if 2**power < samples), samples)


def check_complete(records: Sequence[SampleRecord], expected: Mapping[str, Sequence[str]], *, samples: int) -> None:
    """Raise RunError unless there is exactly one record per (benchmark, problem id, sample index) asked for.

    Args:
        expected: benchmark -> ids of its problems.
        samples: per problem.
    """
    wanted = {(name, problem, index) for name, problems in expected.items() for problem in problems for index in range(samples)}
    if len(wanted) != samples * sum(len(problems) for problems in expected.values()):
        raise _incomplete("problem ids asked for that repeat", "unique ids in each benchmark")
    counted = collections.Counter(record.key for record in records)
    for what, keys in (("missing", wanted - counted.keys()), ("unasked", counted.keys() - wanted),
                       ("repeated", {key for key, count in counted.items() if count > 1})):
        if keys:
            shown = "; ".join(f"{name} {problem} sample {index}" for name, problem, index in sorted(keys)[:LISTED])
            raise _incomplete(f"{len(keys)} {what}, e.g. {shown}", f"each of {len(wanted)} samples once")


def _incomplete(got: str, expected: str) -> RunError:
    return RunError("evaluation records", got=got, expected=expected, stage="run",
                    remedy="A result with missing or repeated samples is no result: evaluate again with another run_id.")


def summarise(
    records: Sequence[SampleRecord], expected: Mapping[str, Sequence[str]], *, samples: int, ks: Sequence[int] | None = None
) -> dict[str, BenchmarkResult]:
    """Figures of each benchmark, in the order of ``expected``.

    Args:
        records: in any order.
        expected: benchmark -> ids of its problems, all of them.
        samples: k of avg@k: records per problem.
        ks: of pass@k; default :func:`default_ks`.

    Raises:
        RunError: a record that is missing, repeated or not asked for.
    """
    check_complete(records, expected, samples=samples)
    of_problem: dict[tuple[str, str], list[SampleRecord]] = collections.defaultdict(list)
    for record in records:
        of_problem[record.benchmark, record.problem_id].append(record)
    return {name: _benchmark(name, [of_problem[name, problem] for problem in problems], samples, ks or default_ks(samples))
            for name, problems in expected.items()}


def _benchmark(name: str, problems: Sequence[Sequence[SampleRecord]], samples: int, ks: Sequence[int]) -> BenchmarkResult:
    flat = [record for problem in problems for record in problem]
    counts = [(sum(r.status.trains for r in problem), sum(r.status is Status.OK for r in problem)) for problem in problems]
    undecided = collections.Counter(r.status.value for r in flat if not r.status.trains)
    spans = [r.answer_span_tokens for r in flat if r.answer_span_tokens > 0]
    return BenchmarkResult(
        benchmark=name, problems=len(problems), samples=samples,
        avg_at_k=estimate([c / n if n else None for n, c in counts]),
        pass_at_k={k: estimate([pass_at_k(n=n, c=c, k=k) for n, c in counts]) for k in ks},
        maj_at_k=estimate([maj_at_k(problem) for problem in problems]) if all(r.votes for r in flat) else None,
        undecided=dict(undecided),
        no_answer_fraction=_share(r.status is Status.NO_ANSWER for r in flat),
        truncated_fraction=_share(r.truncated for r in flat),
        response_tokens=sum(r.tokens for r in flat) / len(flat) if flat else 0.0,
        answer_span_tokens=sum(spans) / len(spans) if spans else 0.0,
    )


def _share(flags: Any) -> float:
    listed = list(flags)
    return sum(listed) / len(listed) if listed else 0.0


def table(results: Mapping[str, BenchmarkResult]) -> str:
    """The figures for people: one column per benchmark, per cent with standard errors; benchmarks that do not fit side by side go
    below each other."""
    labels = ["problems", "samples a problem"]
    ks = sorted({k for one in results.values() for k in one.pass_at_k})
    labels += ["avg@k (%)", *(f"pass@{k} (%)" for k in ks), "maj@k (%)", "truncated (%)", "no answer (%)", "without verdict",
               "response tokens", "answer-span tokens"]
    columns = [["", *labels]]
    for name, one in results.items():
        cells = [name, str(one.problems), str(one.samples), _per_cent(one.avg_at_k)]
        cells += [_per_cent(one.pass_at_k.get(k), of=one.problems) for k in ks]
        cells += [_per_cent(one.maj_at_k), f"{100 * one.truncated_fraction:.1f}", f"{100 * one.no_answer_fraction:.1f}",
                  ", ".join(f"{status} {count}" for status, count in one.undecided.items()) or "0",
                  f"{one.response_tokens:.1f}", f"{one.answer_span_tokens:.1f}"]
        columns.append(cells)
    blocks: list[list[list[str]]] = []
    room = 0
    for column in columns[1:]:
        room -= _width(column) + 2
        if room < 0:
            blocks.append([columns[0]])
            room = COLUMNS - _width(columns[0]) - _width(column) - 2
        blocks[-1].append(column)
    return "\n\n".join(map(_block, blocks))


def _width(column: Sequence[str]) -> int:
    return max(map(len, column))


def _block(columns: Sequence[Sequence[str]]) -> str:
    rows = ["  ".join(cell.ljust(_width(column)) if index == 0 else cell.rjust(_width(column))
                      for index, (cell, column) in enumerate(zip(row, columns, strict=True)))
            for row in zip(*columns, strict=True)]
    return "\n".join([rows[0], "-" * len(rows[0]), *rows[1:]])


def _per_cent(value: Estimate | None, *, of: int | None = None) -> str:
    if value is None or value.mean is None:
        return "-"
    error = "" if value.standard_error is None else f" +- {100 * value.standard_error:.1f}"
    counted = f" ({value.problems} problems)" if of is not None and value.problems != of else ""
    return f"{100 * value.mean:.1f}{error}{counted}"
