"""Covers bucket planning, the manifest check and gap statistics. Not covered: moving tensors (test_sender, test_engine)."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akl_dist.contract.errors import WeightSyncError
from akl_dist.contract.records import ParameterInfo
from akl_dist.weight_sync.plan import (
    GapStatistics,
    check_gap,
    check_manifest,
    gap_statistics,
    parameter_bytes,
    plan_buckets,
)


def info(name: str, *shape: int, dtype: str = "float32") -> ParameterInfo:
    return ParameterInfo(name, shape, dtype)


def names(buckets: list[list[ParameterInfo]]) -> list[list[str]]:
    return [[parameter.name for parameter in bucket] for bucket in buckets]


def test_buckets_by_hand():
    # bytes: a 40, b 60, c 200 (larger than a bucket), d 4, e 96
    parameters = [info("a", 10), info("b", 15), info("c", 10, 10, dtype="bfloat16"), info("d", 1), info("e", 2, 12)]
    assert [parameter_bytes(p) for p in parameters] == [40, 60, 200, 4, 96]
    assert names(plan_buckets(parameters, 100)) == [["a", "b"], ["c"], ["d", "e"]]
    assert names(plan_buckets(parameters, 99)) == [["a"], ["b"], ["c"], ["d"], ["e"]]
    assert names(plan_buckets(parameters, 10**6)) == [["a", "b", "c", "d", "e"]]
    assert plan_buckets([], 100) == []


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 200))
def test_buckets_keep_order_and_bound(sizes, bucket_bytes):
    parameters = [info(str(index), size) for index, size in enumerate(sizes)]
    buckets = plan_buckets(parameters, bucket_bytes)
    assert [p for bucket in buckets for p in bucket] == parameters
    for bucket in buckets:
        assert sum(map(parameter_bytes, bucket)) <= bucket_bytes or len(bucket) == 1
    for left, right in itertools.pairwise(buckets):  # no bucket could have taken the next parameter
        assert sum(map(parameter_bytes, left)) + parameter_bytes(right[0]) > bucket_bytes


@pytest.mark.parametrize(("parameters", "size"), [([info("a", 1, dtype="int8")], 100), ([info("a", 1)], 0)])
def test_what_cannot_be_planned(parameters, size):
    with pytest.raises(WeightSyncError):
        plan_buckets(parameters, size)


def test_manifest_check_names_every_difference():
    expected = [info("embed", 4, 2), info("head", 4, 2), info("norm", 2)]
    check_manifest([info("embed", 4, 2, dtype="bfloat16"), info("head", 4, 2), info("norm", 2)], expected, engine="e")
    with pytest.raises(WeightSyncError) as error:
        check_manifest([info("embed", 0), info("extra", 1), info("norm", 2), info("norm", 2)], expected, engine="rollout/x/0")
    for part in ("missing head", "unexpected extra", "repeated norm", r"embed has shape (0,) instead of (4, 2)", "rollout/x/0"):
        assert part in str(error.value)


def test_gap_by_hand():
    learner = [np.array([-1.0, -2.0]), np.array([-3.0])]
    engine = [np.array([-1.5, -2.0], dtype=np.float32), np.array([-2.0], dtype=np.float32)]
    # gaps .5, 0, 1: mean .5; the 99 % quantile lies 98 % of the way from .5 to 1
    assert gap_statistics(learner, engine) == pytest.approx((0.5, 0.99, 1.0))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_non_finite_values_fail(bad, side):
    rows = [[np.array([-1.0, -2.0])], [np.array([-1.0, -2.0])]]
    rows[side][0] = np.array([bad, -2.0])
    # the known wrong way: a running max() starting at 0 never sees a NaN
    if math.isnan(bad):
        assert max(0.0, float(np.abs(rows[0][0] - rows[1][0])[0])) == 0.0
    gap = gap_statistics(*rows)
    assert gap == (math.inf, math.inf, math.inf)
    with pytest.raises(WeightSyncError, match="rollout/x/1"):
        check_gap(gap, mean_bound=1e9, max_bound=None, engine="rollout/x/1")


def test_two_infinities_are_not_equal():
    gap = gap_statistics([np.array([-math.inf])], [np.array([-math.inf])])
    assert gap.mean == math.inf


@pytest.mark.parametrize(
    ("learner", "engine"),
    [([np.zeros(2)], [np.zeros(3)]), ([np.zeros(2)], []), ([], []), ([np.zeros(0)], [np.zeros(0)])],
)
def test_what_does_not_align_or_is_empty(learner, engine):
    with pytest.raises(WeightSyncError):
        gap_statistics(learner, engine)


def test_bounds():
    gap = GapStatistics(mean=0.001, p99=0.01, max=0.1)
    check_gap(gap, mean_bound=0.001, max_bound=0.1, engine="e")
    check_gap(gap, mean_bound=0.001, max_bound=None, engine="e")
    with pytest.raises(WeightSyncError, match=r"largest log-prob gap .* e: got 0.1 nats; expected at most 0.09"):
        check_gap(gap, mean_bound=0.001, max_bound=0.09, engine="e")
    with pytest.raises(WeightSyncError, match=r"mean log-prob gap .*weight_sync.mean_gap"):
        check_gap(gap, mean_bound=0.0009, max_bound=None, engine="e")
