"""The learning curve of a run as a picture, from its metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from akl_dist.bookkeeping.atomic import replacing
from akl_dist.bookkeeping.journal import RunDirectory, read_metrics
from akl_dist.contract.errors import DataError

PANELS = (  # title, training metric, metric below evaluate/<data set>/, field of an evaluation in result.json
    ("accuracy", "verify/accuracy", "avg_at_k", "accuracy"),
    ("KL to reference, k3 (nats/token)", "objective/kl_value_k3", "kl_per_token", "kl_per_token"),
    ("response length (tokens)", "rollout/response_tokens_mean", "response_tokens", "response_tokens"),
    ("answer-span tokens", "roles/answer_span_tokens", "answer_span_tokens", "answer_span_tokens"),
)


def series(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """(steps, values) of one metric, over the rows that have it."""
    points = [(row["step"], row[key]) for row in rows if key in row]
    return [step for step, _ in points], [value for _, value in points]


def held_out(
    rows: Sequence[Mapping[str, Any]], result: Mapping[str, Any] | None, metric: str, field: str
) -> dict[str, dict[int, float]]:
    """Data set -> step -> value, from the metrics and from result.json (the evaluation before step 1 is only there)."""
    points: dict[str, dict[int, float]] = {}
    for evaluation in (result or {}).get("evaluation", {}).values():
        for one in ((evaluation.get("by_source") or {"": evaluation}).values() if evaluation else ()):
            if field in one:
                points.setdefault(one["data_set"], {})[one["step"]] = one[field]
    for row in rows:
        for key, value in row.items():
            prefix, _, rest = key.partition("/")
            data_set, _, name = rest.rpartition("/")
            if prefix == "evaluate" and name == metric:
                points.setdefault(data_set, {})[row["step"]] = value
    return {name: dict(sorted(values.items())) for name, values in sorted(points.items())}


def draw(run_dir: Path) -> Path:
    """Draw ``learning_curve.png`` into the run directory and return its path; call it after result.json is written.

    Raises DataError without metrics.
    """
    rows = read_metrics(run_dir / "metrics.jsonl")
    if not rows:
        raise DataError(str(run_dir / "metrics.jsonl"), got="no steps", expected="at least one recorded step",
                        remedy="Draw the curve after the first step.")
    # the object interface with its own canvas: neither a display nor pyplot's global state
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    result = RunDirectory(run_dir).read_result()
    for (title, key, metric, field), axes in zip(PANELS, figure.subplots(2, 2).flat, strict=True):
        steps, values = series(rows, key)
        if steps:
            axes.plot(steps, values, marker="." if len(steps) < 30 else "", label="training")
        evaluations = held_out(rows, result, metric, field)
        for name, points in evaluations.items():
            axes.plot(list(points), list(points.values()), "o--", label=f"held-out {name}")
        if steps or evaluations:
            axes.legend()
        else:
            axes.text(0.5, 0.5, "not recorded", ha="center", transform=axes.transAxes)
        if metric == "avg_at_k":
            axes.set_ylim(-0.02, 1.02)
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    path = run_dir / "learning_curve.png"
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
    return path
