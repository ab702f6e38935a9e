"""Values between the sandbox and its user: exact types, bounded sizes, nothing that decodes is anything else."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import itertools
import json
import math
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akl_dist.sandbox.inside.codec import MAX_NODES, Unsupported, decode, encode


def through(value):
    return decode(json.loads(json.dumps(encode(value))))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(10**5000),
        1.5,
        -0.0,
        math.inf,
        "text \ud800 🙂",
        b"\x00\xff",
        [1, [2]],
        (1, (2,)),
        {1, 2},
        frozenset({3}),
        {"a": [1], 2: None},
        1 + 2j,
        range(3, 9, 2),
        fractions.Fraction(1, 3),
        decimal.Decimal("1.10"),
        datetime.date(2024, 2, 29),
        datetime.datetime(2024, 2, 29, 1, 2),
        datetime.timedelta(days=1),
        collections.Counter("aab"),
        collections.deque([1, 2]),
        collections.OrderedDict([("b", 1), ("a", 2)]),
        bytearray(b"x"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_exact_types_survive(value):
    assert through(value) == value and type(through(value)) is type(value)


def test_iterators_views_and_defaults():
    assert list(through(iter([1, 2]))) == [1, 2] and list(through(n for n in (1, 2))) == [1, 2]
    assert through({"a": 1}.keys()) == {"a"} and through({"a": 1}.items()) == {("a", 1)} and list(through({"a": 1}.values())) == [1]
    assert through(collections.defaultdict(list, {1: [2]})) == {1: [2]}
    assert through(map(str, [1])) != ["1"], "an iterator does not equal a list, as in Python"
    assert bool(through(re.match("a", "ab")))
    assert math.isnan(through(math.nan)) and through(-0.0).hex() == "-0x0.0p+0"


def test_numbers_of_packages_are_the_values_they_stand_for():
    numpy, sympy = pytest.importorskip("numpy"), pytest.importorskip("sympy")
    scalars = [numpy.int64(7), numpy.float32(0.5), numpy.bool_(True), numpy.str_("a")]
    row = [*scalars, sympy.Integer(3), sympy.Integer(0), numpy.uint8(2)]
    made = through(row)
    assert made == [7, 0.5, True, "a", 3, 0, 2]
    assert [type(one) for one in made] == [int, float, bool, str, int, int, int]
    for other in (numpy.array([1]), numpy.datetime64("2020-01-01"), sympy.Symbol("x"), sympy.Rational(1, 2)):
        with pytest.raises(Unsupported):
            encode(other)


def test_iterators_of_itertools():
    assert list(through(itertools.permutations([1, 2]))) == [(1, 2), (2, 1)]
    assert list(through(itertools.chain([1], [2]))) == [1, 2] and list(through(itertools.accumulate([1, 2]))) == [1, 3]
    with pytest.raises(Unsupported):
        encode(itertools.count())


class _Equal:
    def __eq__(self, other):
        return True

    __hash__ = None


class _Int(int):
    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0


class _List(list):
    pass


def _cycle():
    value = []
    value.append(value)
    return value


def _shared():
    value = [0]
    for _ in range(60):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    "make",
    [
        lambda: _Equal(),
        lambda: _Int(7),
        lambda: _List(),
        lambda: [_Equal()],
        lambda: {"a": _Int(1)},
        lambda: {_Int(1): 1},
        lambda: print,
        lambda: int,
        lambda: object(),
        _cycle,
        _shared,
        lambda: [0] * (MAX_NODES + 1),
        lambda: iter(int, 1),
        lambda: collections.namedtuple("P", "x")(1),
        lambda: Exception("x"),
    ],
)
def test_everything_else_is_refused(make):
    with pytest.raises(Unsupported):
        encode(make())


@pytest.mark.parametrize(
    "tree",
    [
        [],
        None,
        5,
        "i",
        ["?"],
        ["i", "zz"],
        ["i"],
        ["u", 5],
        ["u", ["u", "x"]],
        ["l", 5],
        ["d", [[["i", "0x1"]]]],
        ["s", [["l", []]]],
        ["f", "x"],
        ["q/", "0x1", "0x0"],
        ["q.", "1e999999999"],
        ["y", "*"],
        ["Tdate", "today"],
        ["r", "0x1", "0x2", "0x0"],
        ["v", "items", [["i", "0x1"]]],
        {"i": 1},
        ["i", 7],
        [["i"]],
    ],
)
def test_malformed_trees_are_refused(tree):
    with pytest.raises(Unsupported):
        decode(tree)


def test_colliding_keys_are_bounded():
    """Keys whose hashes can be chosen: building the set would take the square of their number."""
    tree = ["s", [["t", [["i", hex(k)]]] for k in range(6000)]]
    with pytest.raises(Unsupported, match="unusual keys"):
        decode(tree)


def test_lists_of_what_may_collide_are_bounded():
    """A test may make a set of a list; tuples of -1 and -2 all have one hash as well."""
    with pytest.raises(Unsupported, match="60 bits"):
        decode(["l", [["i", hex(k << 61)] for k in range(1, 20_000)]])
    pairs = [["t", [["i", hex(-1 - (k >> bit & 1))] for bit in range(15)]] for k in range(1 << 15)]
    with pytest.raises(Unsupported, match="values"):
        decode(["l", pairs])


def test_fractions_are_bounded():
    """Reducing one costs the square of its length: 4 million bits took 8 s."""
    number = ["q/", hex((1 << 4_000_000) - 1), hex((1 << 3_900_000) + 1)]
    start = time.monotonic()
    with pytest.raises(Unsupported, match="fraction"):
        decode(number)
    assert time.monotonic() - start < 1.0
    assert decode(["q/", hex(3 << 90_000), hex(1 << 90_000)]) == 3


def test_deep_trees_are_bounded():
    tree = ["n"]
    for _ in range(5000):
        tree = ["l", [tree]]
    with pytest.raises(Unsupported):
        decode(tree)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.sampled_from(list("nbiuflstzqdocxyavrI")),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(json_values)
def test_decoding_anything_gives_a_plain_value_or_refuses(tree):
    try:
        value = decode(tree)
    except Unsupported:
        return
    assert type(value).__module__ in ("builtins", "collections", "re", "decimal", "fractions", "datetime")


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(plain)
def test_round_trip(value):
    assert through(value) == value
