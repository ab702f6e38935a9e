"""Irrational and symbolic expressions, through math-verify's LaTeX parser and high-precision numerics.

The last resort of the equality: exact arithmetic has already failed on one side. sympy and the parser are imported on first use.
Only whole-string parses count. Text is never evaluated as code (sympy's own string parser would): the ANTLR grammar
builds the expression, after limits on length, depth, exponents and factorials.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

from akl_dist.verify.quantity import TooLarge

MAX_LENGTH = 400
MAX_DEPTH = 20
MAX_SYMBOLS = 8
DIGITS = 60
EXACT_GAP = 1e-50  # relative, at 60 digits: ratios of equations
MAX_CANCELLATION = 400  # digits that may cancel in the difference of two expressions without a decimal literal
ACCEPT_GAP, REJECT_GAP = 1e-8, 1e-4  # relative, where a decimal literal is present; between them lies "near"

_HUGE = re.compile(
    r"\d{300}|\^\s*\{?\s*-?\s*\d{5}|\d{4,}\s*!|\^[^+\-]{0,12}\^|\^\s*\{[^{}]*\^[^{}]*\^|!\s*!|\^\s*\{?[^{}]*!"
)
_EXPANDED = re.compile(
    r"\\[dt]?binom|\\choose|\\sum|\\prod|\\int|\\zeta|\\Gamma|\\lim"
)  # evaluated while parsing, or term by term
_LARGE = re.compile(r"\d{4}|\d\s*\}?\s*(?:\^|!)")
_FOREIGN = re.compile(
    r"\\text|'|%|°|\\ldots|\\begin|[=<>;,:#&@\"?\\]{2,}|(?<!\\)[=<>;:#&@\"?]|\\[lg]e(?![A-Za-z])|\\in(?![A-Za-z])|\\pm|\d\s+\d|\\angle|\\[pb]?mod(?![A-Za-z])|\\approx|\d\s*_"
)
_WORD = re.compile(r"(?<!\\)(?<![A-Za-z])[A-Za-z]{4,}")
_FUNCTIONS = ("sin", "cos", "tan", "sec", "csc", "cot", "arcsin", "arccos", "arctan", "ln", "log", "exp")


class NotSymbolic(Exception):
    """The text is not one whole expression."""


def guard(text: str) -> None:
    """Refuse text that is no expression (NotSymbolic) or whose evaluation could explode (TooLarge), by looking only."""
    if len(text) > MAX_LENGTH:
        raise TooLarge(f"more than {MAX_LENGTH} characters")
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise TooLarge(f"more than {MAX_DEPTH} nested groups")
    if depth != 0 or _FOREIGN.search(text) or _WORD.search(text):
        raise NotSymbolic
    if _HUGE.search(text) or (_EXPANDED.search(text) and _LARGE.search(text)):
        raise TooLarge("an exponent, factorial or range beyond the limits")


@functools.lru_cache(maxsize=512)
def _parse(text: str) -> Any:
    import sympy
    from latex2sympy2_extended import latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    latex = re.sub(rf"(?<![\\A-Za-z])({'|'.join(_FUNCTIONS)})(?=[\s(^])", r"\\\1", text)
    try:
        parsed = latex2sympy(
            latex,
            is_real=None,
            convert_degrees=False,
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    except Exception as error:  # the parser raises bare Exception on a syntax error
        raise NotSymbolic(str(error).splitlines()[0] if str(error) else type(error).__name__) from error
    if not isinstance(parsed, sympy.Expr):
        raise NotSymbolic(f"a {type(parsed).__name__}")
    imaginary = sympy.Symbol("i")
    if imaginary in parsed.free_symbols and not parsed.has(sympy.Sum, sympy.Product, sympy.Integral):
        try:
            parsed = parsed.subs(imaginary, sympy.I)
        except ZeroDivisionError as error:  # an undefined value, as a logarithm to the base 1
            raise NotSymbolic("an undefined value") from error
    return parsed


def parse(text: str) -> Any:
    """The sympy expression of the whole text. Raises NotSymbolic or TooLarge."""
    guard(text)
    return _parse(text)


def gap(a: str, b: str) -> float | None:
    """Largest relative difference of two expressions over fixed sample points; None where they cannot be compared.

    Without variables one point decides. With variables: rational points, positive and negative; a negative point counts only
    where both sides are real (so sqrt(1/n) equals 1/sqrt(n), and sqrt(x^2) does not equal x).
    """
    left, right, symbols = _parsed_pair(a, b)
    gaps = [_relative(x, y) for _, x, y in _valued_points(left, right, symbols)]
    return max(gaps) if len(gaps) >= (3 if symbols else 1) else None


def same(a: str, b: str) -> bool | None:
    """Whether two expressions without a decimal literal agree exactly at the points of :func:`gap`; None as there.

    Their difference is taken before it is evaluated, and evaluated to enough digits to tell it from zero: however large the two
    are, (x+y)^{200} is not (x+y)^{200}+1.
    """
    left, right, symbols = _parsed_pair(a, b)
    outcomes = [_vanishes(left - right, x, y, point) for point, x, y in _valued_points(left, right, symbols)]
    return all(outcomes) if len(outcomes) >= (3 if symbols else 1) else None


def less(a: str, b: str) -> bool:
    """Whether both are real numbers and the first is the smaller one."""
    left, right, symbols = _parsed_pair(a, b)
    x, y = (None, None) if symbols else (_value(left, {}), _value(right, {}))
    return x is not None and y is not None and bool(x.is_real and y.is_real and x < y)


def _parsed_pair(a: str, b: str) -> tuple[Any, Any, list[Any]]:
    left, right = parse(a), parse(b)
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    if len(symbols) > MAX_SYMBOLS:
        raise TooLarge(f"more than {MAX_SYMBOLS} variables")
    return left, right, symbols


def _valued_points(left: Any, right: Any, symbols: list[Any]) -> Iterator[tuple[dict[Any, Any], Any, Any]]:
    """The points that count, with both values."""
    for point in _points(symbols):
        x, y = _value(left, point), _value(right, point)
        if x is None or y is None:
            continue
        if any(v < 0 for v in point.values()) and not (x.is_real and y.is_real):
            continue
        yield point, x, y


def _vanishes(difference: Any, x: Any, y: Any, point: dict[Any, Any]) -> bool:
    import sympy

    if x.is_infinite or y.is_infinite:
        return x == y
    value = difference.subs(point) if point else difference
    if value.is_Rational:
        return value == 0
    scale = max(abs(x), abs(y))
    if scale != 0 and abs(float(sympy.log(scale, 10).evalf(15))) > MAX_CANCELLATION - DIGITS:
        raise TooLarge(f"irrational values beyond 10^{MAX_CANCELLATION - DIGITS}")
    number = sympy.N(value, 20, maxn=MAX_CANCELLATION)
    return all(part == 0 or part._prec == 1 for part in number.as_real_imag())  # precision 1: not to be told from zero


def proportional(a: tuple[str, str], b: tuple[str, str]) -> bool:
    """Whether two equations (left side, right side) are non-zero constant multiples of each other, at the sample points."""
    first, second = (parse(left) - parse(right) for left, right in (a, b))
    symbols = sorted(first.free_symbols | second.free_symbols, key=str)
    if not symbols or len(symbols) > MAX_SYMBOLS or first.free_symbols != second.free_symbols:
        return False
    ratios = []
    for point in _points(symbols):
        x, y = _value(first, point), _value(second, point)
        if x is None or y is None:
            continue
        if _tiny(x) or _tiny(y):
            return False  # a tautology, or a root of one that the points hit by chance: never called equal
        ratios.append(x / y)
    return len(ratios) >= 3 and all(_relative(ratio, ratios[0]) < EXACT_GAP for ratio in ratios)


def _points(symbols: list[Any]) -> list[dict[Any, Any]]:
    import sympy

    if not symbols:
        return [{}]
    points = []
    for shift, sign in ((0, 1), (5, 1), (11, 1), (17, 1), (200, 1), (3, -1), (13, -1)):  # the fifth: sums of few below 1
        points.append(
            {s: sign * sympy.Rational(37 + 10 * k + shift, 29 + 4 * shift + 6 * k) for k, s in enumerate(symbols)}
        )
    return points


def _value(expression: Any, point: dict[Any, Any]) -> Any | None:
    """The number at a point (possibly infinite), or None where there is none."""
    import sympy

    try:
        value = expression.subs(point) if point else expression
        number = value if value in (sympy.oo, -sympy.oo) else sympy.N(value, DIGITS)
    except ZeroDivisionError:  # an undefined value, as 0/(1/oo)
        return None
    if number in (sympy.oo, -sympy.oo):
        return number
    if (
        not number.is_number
        or number.has(sympy.nan, sympy.zoo, sympy.oo)
        or not number.is_finite
        or number.free_symbols
    ):
        return None
    return number


def _tiny(value: Any) -> bool:
    return bool(abs(value) < 1e-40)


def _relative(x: Any, y: Any) -> float:
    if x == y:
        return 0.0
    if x.is_infinite or y.is_infinite:
        return float("inf")
    return float(abs(x - y) / max(abs(x), abs(y)))
