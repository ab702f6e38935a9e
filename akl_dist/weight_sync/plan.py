"""Pure parts of a weight sync: which parameters travel together, and what the comparison of log-probs says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from akl_dist.contract.errors import WeightSyncError
from akl_dist.contract.records import ParameterInfo

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element of the dtypes that a manifest may name."""

Bucket = dict[str, tuple[str, np.ndarray]]
"""What travels: parameter name -> (dtype name, array). bfloat16, which numpy lacks, travels as its uint16 bits."""


class GapStatistics(NamedTuple):
    """|learner - engine| log-prob gaps over the probe's tokens, in nats."""

    mean: float
    p99: float
    max: float


def parameter_bytes(parameter: ParameterInfo) -> int:
    """Size of one full parameter in bytes."""
    if parameter.dtype not in DTYPE_BYTES:
        raise WeightSyncError(
            f"parameter {parameter.name}",
            got=f"dtype {parameter.dtype}",
            expected=f"one of {', '.join(DTYPE_BYTES)}",
            remedy="Use model.dtype float32 or bfloat16.",
            stage="weight_sync",
        )
    return parameter.numel * DTYPE_BYTES[parameter.dtype]


def plan_buckets(parameters: Sequence[ParameterInfo], bucket_bytes: int) -> list[list[ParameterInfo]]:
    """Cut the manifest, in its order, into buckets of at most ``bucket_bytes``.

    A parameter that is larger than a bucket travels alone in a bucket of its own, so the memory a sync needs is
    bounded by the larger of ``bucket_bytes`` and the largest parameter.
    """
    if bucket_bytes < 1:
        raise WeightSyncError(
            "weight_sync.bucket_mib",
            got=f"{bucket_bytes} bytes",
            expected="at least 1 byte",
            remedy="Use a positive bucket size.",
            stage="weight_sync",
        )
    buckets: list[list[ParameterInfo]] = []
    used = 0
    for parameter in parameters:
        size = parameter_bytes(parameter)
        if not buckets or used + size > bucket_bytes:
            buckets.append([])
            used = 0
        buckets[-1].append(parameter)
        used += size
    return buckets


def check_manifest(sent: Sequence[ParameterInfo], expected: Sequence[ParameterInfo], *, engine: str) -> None:
    """Names and full shapes of the learner's manifest against the engine's, before anything is transferred.

    dtypes may differ: the engine casts to its own.

    Raises:
        WeightSyncError: naming missing, unexpected, repeated and misshapen entries.
    """
    names = [parameter.name for parameter in sent]
    wanted = {parameter.name: parameter.shape for parameter in expected}
    shapes = {parameter.name: parameter.shape for parameter in sent}
    problems = [f"missing {name}" for name in wanted if name not in shapes]
    problems += [f"unexpected {name}" for name in shapes if name not in wanted]
    problems += [f"repeated {name}" for name in sorted({name for name in names if names.count(name) > 1})]
    problems += [
        f"{name} has shape {shapes[name]} instead of {wanted[name]}"
        for name in wanted
        if name in shapes and shapes[name] != wanted[name]
    ]
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise WeightSyncError(
            f"manifest for {engine}",
            got=shown,
            expected=f"the engine's {len(wanted)} parameters",
            remedy="Learner and engine must load the same architecture; tied models send lm_head.weight explicitly.",
            stage="weight_sync",
            actor=engine,
        )


def gap_statistics(learner_logp: Sequence[np.ndarray], engine_logp: Sequence[np.ndarray]) -> GapStatistics:
    """Gaps of two sets of per-token log-probs, pairwise of equal length.

    Returns infinities as soon as one value on either side is not finite: a NaN must never look like a small gap.

    Raises:
        WeightSyncError: nothing to compare, or arrays that do not align.
    """
    pairs = list(zip(learner_logp, engine_logp, strict=False))
    if len(learner_logp) != len(engine_logp) or any(a.shape != b.shape for a, b in pairs):
        raise WeightSyncError(
            "probe log-probs",
            got=f"lengths {[len(a) for a in learner_logp]} and {[len(b) for b in engine_logp]}",
            expected="the same tokens scored by learner and engine",
            remedy="Report this as a bug.",
            stage="weight_sync",
        )
    if not sum(len(a) for a in learner_logp):
        raise WeightSyncError(
            "probe log-probs",
            got="no token",
            expected="at least one probe sequence of two tokens",
            remedy="Set weight_sync.probe_sequences to 1 or more.",
            stage="weight_sync",
        )
    learner = np.concatenate([np.asarray(a, dtype=np.float64) for a in learner_logp])
    engine = np.concatenate([np.asarray(b, dtype=np.float64) for b in engine_logp])
    if not (np.isfinite(learner).all() and np.isfinite(engine).all()):
        return GapStatistics(math.inf, math.inf, math.inf)
    gap = np.abs(learner - engine)
    return GapStatistics(float(gap.mean()), float(np.quantile(gap, 0.99)), float(gap.max()))


def check_gap(gap: GapStatistics, *, mean_bound: float, max_bound: float | None, engine: str) -> None:
    """Raise WeightSyncError, naming engine, gap and bound, unless the gap is finite and within its bounds."""
    if not math.isfinite(gap.mean) or not math.isfinite(gap.max):
        raise WeightSyncError(
            f"log-probs of {engine}",
            got="NaN or infinity on the probe",
            expected="finite values",
            remedy="The engine's or the learner's weights are damaged; restart from the last checkpoint.",
            stage="weight_sync",
            actor=engine,
        )
    bounds = (
        ("mean", gap.mean, mean_bound, "weight_sync.mean_gap"),
        ("largest", gap.max, max_bound, "weight_sync.max_gap"),
    )
    for word, value, bound, key in bounds:
        if bound is not None and not value <= bound:
            raise WeightSyncError(
                f"{word} log-prob gap between learner and {engine}",
                got=f"{value:.3g} nats",
                expected=f"at most {bound:.3g} ({key})",
                remedy="The engine does not hold the learner's weights, or the two compute in different precision: "
                "then raise the bound.",
                stage="weight_sync",
                actor=engine,
            )
