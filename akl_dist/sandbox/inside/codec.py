"""Values and messages between the sandbox and its user: JSON in length-prefixed frames, never pickle, nothing evaluated.

A value is a tree of exact built-in types (``type(x) is int``, not ``isinstance``): a closed list. What decodes is built from
that list alone, so an object that claims to equal everything cannot come out of a sandbox. Sizes are bounded on both sides.
"""

from __future__ import annotations

import binascii
import collections
import json
import os
import re
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # a program's start does not pay for it, nor for the modules of rare types
    from typing import Any

HEADER = struct.Struct(">I")
MAX_DEPTH = 150
MAX_NODES = 200_000
MAX_DECIMAL_EXPONENT = 5000  # int() of a larger one would cost its digits
MAX_FRACTION_BITS = 100_000  # of each part: reducing one costs their square
MAX_ODD_KEYS = 4000  # keys whose hashes a program can choose: big integers, floats, tuples
MAX_BIG = 4000  # integers beyond 60 bits, wherever they stand: a test may make a set of them
TUPLE_COST = 10  # nodes: as for big integers, but hashes of tuples are harder to choose

_BIG = 1 << 60
TIMES = ("date", "datetime", "time")
_ITERATORS = frozenset(
    type(example)
    for example in (
        iter([]), iter(()), iter(""), iter(b""), iter({}), iter(set()), iter({}.values()), iter({}.items()), iter(range(0)),
        reversed([]), reversed({}), map(len, []), filter(None, []), zip(), enumerate([]), (None for _ in ()),
    )
)
_VIEWS: dict[type, str] = {type({}.keys()): "keys", type({}.values()): "values", type({}.items()): "items"}
_SEQUENCES: dict[type, str] = {list: "l", tuple: "t", set: "s", frozenset: "z", collections.deque: "q"}
_MAPPINGS: dict[type, str] = {
    dict: "d", collections.OrderedDict: "o", collections.Counter: "c", collections.defaultdict: "d",
}


class Unsupported(Exception):
    """A value outside the closed list of types, or beyond its bounds; ``str`` says which."""


class _Budget:
    def __init__(self) -> None:
        self.nodes, self.odd_keys, self.big = MAX_NODES, MAX_ODD_KEYS, MAX_BIG

    def node(self, depth: int, cost: int = 1) -> None:
        self.nodes -= cost
        if self.nodes < 0:
            raise Unsupported(f"more than {MAX_NODES} values")
        if depth > MAX_DEPTH:
            raise Unsupported(f"more than {MAX_DEPTH} nested values")


def encode(value: Any) -> list:
    """The value as a tree of JSON lists ``[tag, ...]``.

    Raises:
        Unsupported: a type outside the list (subclasses included), a cycle, or too large a value.
    """
    return _encode(value, 0, _Budget())


def _encode(value: Any, depth: int, budget: _Budget) -> list:
    budget.node(depth)
    kind = type(value)
    if value is None:
        return ["n"]
    if kind is bool:
        return ["b", int(value)]
    if kind is int:
        return ["i", hex(value)]
    if kind is str:
        return ["u", value]
    if kind is float:
        return ["f", value.hex()]
    if kind in _SEQUENCES:
        return [_SEQUENCES[kind], [_encode(one, depth + 1, budget) for one in value]]
    if kind in _MAPPINGS:
        pairs = [[_encode(key, depth + 1, budget), _encode(one, depth + 1, budget)] for key, one in kind.items(value)]
        return [_MAPPINGS[kind], pairs]
    return _encode_rare(value, kind, depth, budget)


def _encode_rare(value: Any, kind: type, depth: int, budget: _Budget) -> list:
    if kind is complex:
        return ["x", value.real.hex(), value.imag.hex()]
    if kind in (bytes, bytearray):
        return ["y" if kind is bytes else "a", binascii.b2a_base64(bytes(value), newline=False).decode()]
    if kind is range:
        return ["r", hex(value.start), hex(value.stop), hex(value.step)]
    if kind is _loaded("fractions", "Fraction"):
        return ["q/", hex(value.numerator), hex(value.denominator)]
    if kind is _loaded("decimal", "Decimal"):
        return ["q.", str(value)]
    if kind in [_loaded("datetime", name) for name in TIMES] and getattr(value, "tzinfo", None) is None:
        return [f"T{kind.__name__}", value.isoformat()]
    if kind is re.Match:
        return ["m"]  # tests ask no more of it than whether it is one
    if kind is _loaded("datetime", "timedelta"):
        return ["Td", value.days, value.seconds, value.microseconds]
    if kind in _VIEWS:
        return ["v", _VIEWS[kind], [_encode(one, depth + 1, budget) for one in value]]
    if kind in _ITERATORS or kind is _loaded("itertools", kind.__name__):
        items = []
        for one in value:
            items.append(_encode(one, depth + 1, budget))
        return ["I", items]
    plain = _plain(value)
    if type(plain) in (bool, int, float, complex, str):
        return _encode(plain, depth, budget)
    raise Unsupported(f"a {kind.__name__}" if type(kind.__name__) is str else "an object")


def _plain(value: Any) -> Any:
    """The value that a scalar of numpy or an integer of sympy stands for, else None. Tests see no difference, and where a program
    lies about it, it is a plain value all the same."""
    scalar, integer = _loaded("numpy", "generic"), _loaded("sympy", "Integer")
    if scalar is not None and isinstance(value, scalar):
        return value.item()
    return int(value) if integer is not None and isinstance(value, integer) else None


def _loaded(module: str, name: str) -> type | None:
    """A type whose values can only exist where its module has been imported."""
    return getattr(sys.modules.get(module), name, None)


def decode(tree: Any) -> Any:
    """The value of a tree that came from the other side, which is not trusted.

    Raises:
        Unsupported: the tree is malformed or beyond the bounds.
    """
    try:
        return _decode(tree, 0, _Budget())
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise Unsupported(f"a malformed value ({type(error).__name__})") from None


def _decode(tree: Any, depth: int, budget: _Budget) -> Any:
    budget.node(depth)
    tag = tree[0]
    if tag == "n":
        return None
    if tag == "b":
        return bool(tree[1])
    if tag == "i":
        value = int(tree[1], 16)
        budget.big -= not -_BIG < value < _BIG
        if budget.big < 0:
            raise Unsupported(f"more than {MAX_BIG} integers beyond 60 bits")
        return value
    if tag == "u":
        return _text(tree[1])
    if tag == "f":
        return float.fromhex(tree[1])
    if tag in ("l", "t", "s", "z", "q"):
        items = [_decode(one, depth + 1, budget) for one in tree[1]]
        if tag in ("t", "z"):
            budget.node(depth, TUPLE_COST)
        if tag in ("s", "z"):
            _check_keys(items, budget)
        return {"l": list, "t": tuple, "s": set, "z": frozenset, "q": collections.deque}[tag](items)
    if tag in ("d", "o", "c"):
        keys = [_decode(pair[0], depth + 1, budget) for pair in tree[1]]
        _check_keys(keys, budget)
        pairs = zip(keys, [_decode(pair[1], depth + 1, budget) for pair in tree[1]], strict=True)
        made = {"d": dict, "o": collections.OrderedDict, "c": collections.Counter}[tag]()
        made.update(dict(pairs))
        return made
    return _decode_rare(tag, tree, depth, budget)


def _decode_rare(tag: str, tree: list, depth: int, budget: _Budget) -> Any:
    if tag == "x":
        return complex(float.fromhex(tree[1]), float.fromhex(tree[2]))
    if tag == "y":
        return binascii.a2b_base64(_text(tree[1]), strict_mode=True)
    if tag == "a":
        return bytearray(binascii.a2b_base64(_text(tree[1]), strict_mode=True))
    if tag == "r":
        return range(*(int(one, 16) for one in tree[1:4]))
    if tag == "q/":
        import fractions

        parts = int(tree[1], 16), int(tree[2], 16)
        if max(part.bit_length() for part in parts) > MAX_FRACTION_BITS:
            raise Unsupported(f"a fraction of more than {MAX_FRACTION_BITS} bits")
        return fractions.Fraction(*parts)
    if tag == "q.":
        import decimal

        number = decimal.Decimal(_text(tree[1]))
        if number.is_finite() and abs(number.adjusted()) > MAX_DECIMAL_EXPONENT:
            raise Unsupported(f"a decimal with an exponent beyond {MAX_DECIMAL_EXPONENT}")
        return number
    if tag == "m":
        return re.match("", "")
    if tag == "Td":
        import datetime

        return datetime.timedelta(int(tree[1]), int(tree[2]), int(tree[3]))
    if tag[1:] in TIMES:
        import datetime

        return getattr(datetime, tag[1:]).fromisoformat(_text(tree[1]))
    if tag in ("I", "v"):
        items = [_decode(one, depth + 1, budget) for one in tree[-1]]
        if tag == "I":
            return iter(items)
        return _view(tree[1], items, budget)
    raise Unsupported("a malformed value (unknown tag)")


def _view(kind: str, items: list, budget: _Budget) -> Any:
    if kind == "values":
        return dict(enumerate(items)).values()
    _check_keys([item[0] for item in items] if kind == "items" else items, budget)
    return dict(items).items() if kind == "items" else dict.fromkeys(items).keys()


def _text(value: Any) -> str:
    if type(value) is not str:
        raise Unsupported("a malformed value (no text)")
    return value


def _check_keys(keys: list, budget: _Budget) -> None:
    """Bound the keys whose hashes can be made to collide, which would make building a table quadratic."""
    budget.odd_keys -= sum(not (type(k) is str or k is None or (isinstance(k, int) and -_BIG < k < _BIG)) for k in keys)
    if budget.odd_keys < 0:
        raise Unsupported(f"more than {MAX_ODD_KEYS} unusual keys")


def frame(message: Any) -> bytes:
    """A message as length prefix and JSON. Lone surrogates survive: JSON escapes them."""
    body = json.dumps(message).encode("ascii")
    return HEADER.pack(len(body)) + body


def write_message(fd: int, message: Any) -> None:
    """Write one message to a blocking descriptor."""
    data = memoryview(frame(message))
    while data:
        data = data[os.write(fd, data):]


def read_message(fd: int) -> Any | None:
    """The next message of a blocking descriptor, None at its end."""
    header = _read_exactly(fd, HEADER.size)
    if header is None:
        return None
    body = _read_exactly(fd, HEADER.unpack(header)[0])
    return None if body is None else json.loads(body)


def _read_exactly(fd: int, size: int) -> bytes | None:
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
