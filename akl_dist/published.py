"""Published scores of the shipped recipes' models, and how an evaluation of ours stands against them.

The figures are data (``published_scores.toml``), each with the table it is printed in and the protocol as far as its source states
one. A difference says something only as far as the protocols agree, so every way in which they do not is named. Pure, stdlib only.
"""

from __future__ import annotations

import functools
import math
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib import resources
from pathlib import PurePath
from typing import Any

from akl_dist.evaluation import COLUMNS, BenchmarkResult

DATA = "published_scores.toml"
OURS_ALONE, BOTH = "ours, clustered by problem", "ours, clustered by problem, and the published score's, binomial"


@dataclass(frozen=True)
class Protocol:
    """How a score was measured. None: the source does not say.

    mode: "thinking" or "non-thinking", of models that have both. shots: worked examples in the prompt. samples: per problem.
    temperature 0 is greedy decoding; top_k 0 is off. max_tokens: of a response. problems: how many were asked. prompt: the words
    that go with each problem. tools: the environment that answered the model's calls (None in ours: none).
    """

    mode: str | None = None
    problems: int | None = None
    shots: int | None = None
    samples: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    presence_penalty: float | None = None
    max_tokens: int | None = None
    prompt: str | None = None
    tools: str | None = None


@dataclass(frozen=True)
class PublishedScore:
    """``score`` in per cent; ``metric`` as its source names it (accuracy, avg@64, pass@1); ``source`` with its table."""

    model: str
    benchmark: str
    score: float
    metric: str
    source: str
    protocol: Protocol


@dataclass(frozen=True)
class Comparison:
    """Ours against a published score, in per cent and percentage points.

    ``z`` is the difference in standard errors (None without a standard error); ``standard_error_of`` says whose. ``differs`` names
    the fields of the protocol that are not equal, as (field, here, there); ``not_stated`` those that the source leaves open.
    """

    published: PublishedScore
    ours: float
    metric: str
    difference: float
    standard_error: float | None
    standard_error_of: str
    z: float | None
    differs: tuple[tuple[str, Any, Any], ...]
    not_stated: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain containers for JSON."""
        out = asdict(self)
        out["differs"] = {name: {"here": here, "there": there} for name, here, there in self.differs}
        out["not_stated"] = list(self.not_stated)
        return out

    def text(self) -> str:
        """For people: two or three lines."""
        one, error = self.published, self.standard_error
        ours_alone = self.standard_error_of == OURS_ALONE
        spread = "" if error is None else f" +- {error:.1f}"  # of ours, or with the published score's of the difference
        ours = f"ours {self.ours:.1f} %{spread if ours_alone else ''} ({self.metric})"
        away = "no standard error" if self.z is None else f"{self.z:+.1f} standard errors ({self.standard_error_of})"
        lines = [f"{one.benchmark}: published {one.score:.1f} % ({one.metric}; {one.source}), {ours}: difference "
                 f"{self.difference:+.1f}{'' if ours_alone else spread} points, {away}"]
        if self.differs:
            lines.append("  protocols differ: " + "; ".join(
                f"{name} {_shown(here)} here, {_shown(there)} there" for name, here, there in self.differs))
        if self.not_stated:
            lines.append(f"  not stated by the source: {', '.join(self.not_stated)}")
        return "\n".join(lines)


def _shown(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else f"{value:g}"


@functools.cache
def published_scores() -> tuple[PublishedScore, ...]:
    """Everything on file. Raises KeyError, TypeError or ValueError for a data file that breaks its own rules."""
    data = tomllib.loads(resources.files("akl_dist").joinpath(DATA).read_text(encoding="utf-8"))
    protocols = {name: Protocol(**values) for name, values in data["protocols"].items()}
    scores = tuple(
        PublishedScore(model["name"], row["benchmark"], float(row["score"]), row["metric"],
                       f"{data['sources'][row['source']]}, {row['table']}", protocols[row["protocol"]])
        for model in data["models"] for row in model["scores"])
    if len({(one.model, one.benchmark, one.protocol.mode) for one in scores}) != len(scores):
        raise ValueError(f"{DATA}: a model, benchmark and mode with two scores")
    return scores


def known_model(path: str, scores: Sequence[PublishedScore] | None = None) -> str | None:
    """The published name of the model at ``path``: a hub name as it is, a folder of the hub's cache, or a folder that is named like
    the model (``/models/Qwen2.5-7B-Instruct``). None for any other."""
    names = {one.model for one in (published_scores() if scores is None else scores)}
    if path in names:
        return path
    parts = PurePath(path).parts
    cached = {part.removeprefix("models--").replace("--", "/") for part in parts if part.startswith("models--")}
    last = parts[-1].lower() if parts else ""
    return next((name for name in sorted(names) if name in cached or name.rpartition("/")[2].lower() == last), None)


def find(model: str, benchmark: str, mode: str | None, scores: Sequence[PublishedScore] | None = None) -> PublishedScore | None:
    """The score of a model on a benchmark; of a model with two modes that of ``mode``."""
    for one in published_scores() if scores is None else scores:
        if (one.model, one.benchmark) == (model, benchmark) and one.protocol.mode in (None, mode):
            return one
    return None


def compare(published: PublishedScore, result: BenchmarkResult, ours: Protocol) -> Comparison | None:
    """Our avg@k (of which accuracy and pass@1 are the case k = 1) against ``published``; None where ours has no value.

    Where the published score is one greedy answer to a known number of problems, its binomial error sqrt(p (1 - p) / n) is added to
    ours. Both are over problems drawn anew: on the same problems the true error of the difference is smaller.
    """
    mean, error = result.avg_at_k.mean, result.avg_at_k.standard_error
    if mean is None:
        return None
    whose, there = OURS_ALONE, published.protocol
    if error is not None and there.samples == 1 and there.temperature == 0 and there.problems:
        p = published.score / 100
        error, whose = math.hypot(error, math.sqrt(p * (1 - p) / there.problems)), BOTH
    difference = 100 * mean - published.score
    pairs = [(one.name, getattr(ours, one.name), getattr(there, one.name)) for one in fields(Protocol)]
    return Comparison(
        published=published, ours=100 * mean, metric=f"avg@{result.samples}", difference=difference,
        standard_error=None if error is None else 100 * error, standard_error_of=whose,
        z=difference / (100 * error) if error else None,
        differs=tuple((name, here, its) for name, here, its in pairs if its is not None and here is not None and its != here),
        not_stated=tuple(name for name, here, its in pairs if its is None and here is not None and name != "mode"))


def compared(
    path: str, results: Mapping[str, BenchmarkResult], protocols: Mapping[str, Protocol]
) -> tuple[str | None, dict[str, Comparison | None]]:
    """The model's published name (None: none is known), and for each benchmark ours against the score on file, if there is one."""
    model, found = known_model(path), {}
    for name, result in results.items():
        score = None if model is None else find(model, name, protocols[name].mode)
        found[name] = None if score is None else compare(score, result, protocols[name])
    return model, found


def report(model: str | None, path: str, comparisons: Mapping[str, Comparison | None]) -> str:
    """The comparisons for people."""
    if model is None:
        return f"published scores: none on file for {path}"
    lines = [f"published scores of {model}" + ("" if model == path else f" (which {path} is taken for, by its name)")]
    lines += [f"{name}: no published score on file" if one is None else one.text() for name, one in comparisons.items()]
    return "\n".join(_wrapped(line) for line in "\n".join(lines).splitlines())


def _wrapped(line: str) -> str:
    """``line`` in at most ``COLUMNS``; what follows its first row is indented below it."""
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(line, COLUMNS, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False)
