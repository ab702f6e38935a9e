"""Evaluates what remains of a test once the program's values are in: comparisons of built-in values, in the judge's process.

A small interpreter over a closed list of syntax, functions and sizes; nothing is passed to Python's own evaluation. Tests that need
more run in a sandbox of their own (:mod:`akl_dist.sandbox.inside.test_stage`).
"""

from __future__ import annotations

import ast
import decimal
import fractions
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

MAX_NUMBER_BITS = 4096
MAX_EXPONENT = 512
MAX_ITEMS = 200_000


class TooMuch(Exception):
    """A test that would cost more than a test may, on the values it was given."""


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "all": all, "any": any, "bool": bool, "complex": complex, "dict": dict, "enumerate": enumerate, "float": float,
    "frozenset": frozenset, "int": int, "len": len, "list": list, "max": max, "min": min, "reversed": reversed, "round": round,
    "set": set, "sorted": sorted, "str": str, "sum": sum, "tuple": tuple, "zip": zip, "isinstance": isinstance, "type": type,
}
CONSTANTS: dict[str, Any] = {"bytes": bytes, "NoneType": type(None), **FUNCTIONS}
MATH = frozenset({"isclose", "isnan", "isinf", "floor", "ceil", "sqrt", "fabs", "pi", "e", "inf", "nan"})

_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda a, b: _contains(b, a), ast.NotIn: lambda a, b: not _contains(b, a),
}
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Pow: operator.pow,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_UNARY: dict[type, Callable[[Any], Any]] = {
    ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert,
}
def _contains(container: Any, item: Any) -> bool:
    if isinstance(container, range) and not isinstance(item, int) and len(container) > MAX_ITEMS:
        raise TooMuch(f"a search through a range of more than {MAX_ITEMS}")
    return item in container


_NUMBERS = (int, float, complex, decimal.Decimal, fractions.Fraction)


def supported(node: ast.AST, names: frozenset[str]) -> bool:
    """Whether :func:`evaluate` knows every construct of an expression; ``names`` are the ones it will be given values for."""
    if isinstance(node, ast.Constant):
        return node.value is not Ellipsis
    if isinstance(node, ast.Name):
        return node.id in names or node.id in CONSTANTS
    if isinstance(node, ast.Call):
        known = (isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and node.func.id not in names) or _math(node.func)
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        named = all(keyword.arg is not None for keyword in node.keywords)
        return known and named and all(supported(one, names) for one in arguments)
    if isinstance(node, ast.Attribute):
        return _math(node)
    if isinstance(node, ast.Compare):
        return all(supported(one, names) for one in (node.left, *node.comparators))
    if isinstance(node, ast.BinOp):
        return type(node.op) in _BINARY and supported(node.left, names) and supported(node.right, names)
    if isinstance(node, ast.Dict):
        return all(one is not None and supported(one, names) for one in (*node.keys, *node.values))
    if isinstance(node, ast.Slice):
        return all(one is None or supported(one, names) for one in (node.lower, node.upper, node.step))
    if isinstance(node, ast.UnaryOp | ast.BoolOp | ast.Tuple | ast.List | ast.Set | ast.IfExp | ast.Subscript):
        children = (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))
        return all(supported(child, names) for child in children)
    return False


def _math(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "math" and node.attr in MATH


def evaluate(node: ast.AST, values: Mapping[str, Any]) -> Any:
    """The value of a supported expression.

    Raises:
        TooMuch: numbers or sequences beyond the limits.
        ArithmeticError, LookupError, TypeError, ValueError, ...: as Python would, where a test does not fit the values.
    """
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return values[node.id] if node.id in values else CONSTANTS[node.id]
    if isinstance(node, ast.Attribute):
        return getattr(math, node.attr)
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        items = [evaluate(one, values) for one in node.elts]
        return tuple(items) if isinstance(node, ast.Tuple) else items if isinstance(node, ast.List) else set(items)
    if isinstance(node, ast.Dict):
        return {evaluate(key, values): evaluate(one, values) for key, one in zip(node.keys, node.values, strict=True) if key}
    if isinstance(node, ast.Call):
        function = evaluate(node.func, values)
        arguments = [evaluate(one, values) for one in node.args]
        keywords = {keyword.arg: evaluate(keyword.value, values) for keyword in node.keywords if keyword.arg}
        return _call(function, arguments, keywords)
    if isinstance(node, ast.Compare):
        return _compare(node, values)
    if isinstance(node, ast.BoolOp):
        return _boolean(node, values)
    if isinstance(node, ast.UnaryOp):
        return _UNARY[type(node.op)](evaluate(node.operand, values))
    if isinstance(node, ast.BinOp):
        return _binary(type(node.op), evaluate(node.left, values), evaluate(node.right, values))
    if isinstance(node, ast.IfExp):
        return evaluate(node.body if evaluate(node.test, values) else node.orelse, values)
    if isinstance(node, ast.Subscript):
        return evaluate(node.value, values)[evaluate(node.slice, values)]
    assert isinstance(node, ast.Slice), type(node).__name__
    return slice(*(None if one is None else evaluate(one, values) for one in (node.lower, node.upper, node.step)))


def _call(function: Callable[..., Any], arguments: list[Any], keywords: dict[str, Any]) -> Any:
    for one in arguments:
        if isinstance(one, range) and len(one) > MAX_ITEMS:
            raise TooMuch(f"a range of more than {MAX_ITEMS}")
    if function is type and len(arguments) != 1:
        raise TypeError("type() takes one argument here")
    if function is dict and arguments and not isinstance(arguments[0], dict):
        arguments = [list(arguments[0]), *arguments[1:]]
        if any(isinstance(one, range) for one in arguments[0]):
            raise TooMuch("dict() of ranges")  # it makes a list of each
    if function is sum and not (len(arguments) == 1 and not keywords and _plain_numbers(arguments[0])):
        raise TooMuch("sum() of anything but plain numbers")
    if function is round and any(not (isinstance(digits, int) and abs(digits) <= MAX_EXPONENT) for digits in arguments[1:]):
        raise TooMuch(f"round() beyond {MAX_EXPONENT} digits")
    return function(*arguments, **keywords)


def _plain_numbers(value: Any) -> bool:
    return isinstance(value, list | tuple | set | frozenset) and all(type(item) in (int, float, bool) for item in value)


def _compare(node: ast.Compare, values: Mapping[str, Any]) -> Any:
    left, result = evaluate(node.left, values), True
    for operation, comparator in zip(node.ops, node.comparators, strict=True):
        right = evaluate(comparator, values)
        result = _COMPARE[type(operation)](left, right)
        if not result:
            return result
        left = right
    return result


def _boolean(node: ast.BoolOp, values: Mapping[str, Any]) -> Any:
    result = None
    for one in node.values:
        result = evaluate(one, values)
        if bool(result) is isinstance(node.op, ast.Or):
            return result
    return result


def _binary(operation: type, left: Any, right: Any) -> Any:
    numeric = isinstance(left, _NUMBERS) and isinstance(right, _NUMBERS)
    for one in (left, right):
        parts = (one.numerator, one.denominator) if isinstance(one, int | fractions.Fraction) else ()
        if any(abs(part).bit_length() > MAX_NUMBER_BITS for part in parts):
            raise TooMuch(f"arithmetic on more than {MAX_NUMBER_BITS} bits")
    if operation is ast.Pow and not (numeric and abs(right) <= MAX_EXPONENT):
        raise TooMuch(f"an exponent beyond {MAX_EXPONENT}")
    if operation in (ast.Mult, ast.Mod) and not numeric:
        raise TooMuch("repetition or formatting")
    return _BINARY[operation](left, right)


def literal(value: Any) -> str:
    """A value that was written as JSON, as Python source: ``repr`` has no literal for NaN, infinities and very long integers."""
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(key)}: {literal(one)}" for key, one in value.items()) + "}"
    if isinstance(value, float) and not math.isfinite(value):
        return "(1e999 - 1e999)" if math.isnan(value) else "1e999" if value > 0 else "-1e999"
    return hex(value) if type(value) is int and value.bit_length() > MAX_NUMBER_BITS else repr(value)


def same_value(value: Any, expected: Any) -> bool:
    """Equality with a value that was written as JSON: a tuple is a list there, NaN is itself; floats within a relative 1e-8, and
    where an integer is expected within 1e-6 as well (1000000008.0 is not 1000000007)."""
    if isinstance(expected, float) or (isinstance(value, float) and isinstance(expected, int)):
        if not isinstance(value, int | float) or isinstance(value, bool):
            return False
        if math.isnan(expected):
            return isinstance(value, float) and math.isnan(value)
        exact = isinstance(expected, int)
        return value == expected or (math.isclose(value, expected, rel_tol=1e-8) and not (exact and abs(value - expected) > 1e-6))
    if isinstance(expected, list):
        if not isinstance(value, list | tuple) or len(value) != len(expected):
            return False
        return all(same_value(one, other) for one, other in zip(value, expected, strict=True))
    if isinstance(expected, dict):
        if not isinstance(value, dict) or value.keys() != expected.keys():
            return False
        return all(same_value(value[key], one) for key, one in expected.items())
    return value == expected
