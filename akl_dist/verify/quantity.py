"""Exact numbers: a grammar that consumes the whole string or fails, with limits checked before each operation.

Grammar (on canonical text)::

    expression = ["+" | "-"] term {("+" | "-") term}
    term       = power {["\\cdot" | "/"] power}           juxtaposition multiplies, except number after number
    power      = atom {"!" | "!!"} ["^" exponent]         n!! is the double factorial
    atom       = number | "(" expression ")" | "{" expression "}" | "\\frac" group group | "\\sqrt" ["[" n "]"] group
    (exact roots only) number     = integer | grouped (d{1,3}(,ddd)+, no 0 first) | decimal | scientific | repeating decimal |
    mixed (integer \\frac{}{})

Nothing is ever evaluated as code. Values are ``Fraction``: no rounding anywhere.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

MAX_LENGTH = 2000  # characters
MAX_DEPTH = 40  # nested groups
MAX_BITS = 100_000  # of any intermediate numerator or denominator
MAX_FACTORIAL = 5000


@dataclass(frozen=True)
class Quantity:
    """An exact value; ``decimal`` tells whether a decimal literal took part (only then may a tolerance be used)."""

    value: Fraction
    decimal: bool


class TooLarge(Exception):
    """A number or expression beyond the limits above: it is not evaluated."""


class _NotANumber(Exception):
    """The text is not of this grammar."""


_NUMBER = re.compile(
    r"(?P<repeating>\d*\.\d*)\\overline\{(?P<period>\d+)\}"
    r"|(?P<plain>[1-9]\d{0,2}(?:,\d{3})+(?![\d,])(?:\.\d+)?|\d+\.\d+|\.\d+|\d+)(?:[eE](?P<exponent>[+-]?\d{1,6})(?![A-Za-z0-9]))?"
)
_MIXED_TEXT = re.compile(r"(?P<sign>-?)\s*(?P<whole>\d+)\s+(?P<top>\d+)\s*/\s*(?P<bottom>\d+)")
_MIXED_FRACTION = re.compile(r"\s*\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}")


def parse_quantity(text: str) -> Quantity | None:
    """The exact value of the whole string, or None where it is not of the grammar. Raises TooLarge."""
    text = text.strip()
    if not text or not re.search(r"\d", text):
        return None
    if len(text) > MAX_LENGTH:
        raise TooLarge(f"more than {MAX_LENGTH} characters")
    mixed = _MIXED_TEXT.fullmatch(text)
    if mixed:
        if int(mixed["bottom"]) == 0:
            return None
        value = int(mixed["whole"]) + Fraction(int(mixed["top"]), int(mixed["bottom"]))
        return Quantity(-value if mixed["sign"] else value, False)
    parser = _Parser(text)
    try:
        value = parser.expression(0)
    except (_NotANumber, ZeroDivisionError):
        return None
    parser.skip()
    return Quantity(value, parser.decimal) if parser.at == len(text) else None


def _checked(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise TooLarge(f"a number of more than {MAX_BITS} bits")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise _NotANumber
    if base in (0, 1, -1):
        if base == 0 and exponent <= 0:
            raise _NotANumber
        return base if exponent % 2 else base * base
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) * bits > MAX_BITS:
        raise TooLarge(f"a power of more than {MAX_BITS} bits")
    return base ** int(exponent)


def _root(value: Fraction, degree: int) -> Fraction:
    """The exact root, or _NotANumber where it is irrational or not real."""
    if degree < 2 or degree > 64 or (value < 0 and degree % 2 == 0):
        raise _NotANumber
    sign = -1 if value < 0 else 1
    parts = []
    for number in (abs(value.numerator), value.denominator):
        guess = math.isqrt(number) if degree == 2 else _integer_root(number, degree)
        if guess**degree != number:
            raise _NotANumber
        parts.append(guess)
    return sign * Fraction(parts[0], parts[1])


def _integer_root(number: int, degree: int) -> int:
    low, high = 0, 1 << (number.bit_length() // degree + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**degree <= number else (low, middle - 1)
    return low


class _Parser:
    """Recursive descent over one string; ``at`` is the next character, ``decimal`` whether a decimal literal was read."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.decimal = text, 0, False

    def skip(self) -> None:
        while self.at < len(self.text) and self.text[self.at] == " ":
            self.at += 1

    def take(self, *words: str) -> str | None:
        self.skip()
        for word in words:
            if self.text.startswith(word, self.at):
                self.at += len(word)
                return word
        return None

    def expression(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise TooLarge(f"more than {MAX_DEPTH} nested groups")
        sign = self.take("+", "-")
        value = self.term(depth)
        value = -value if sign == "-" else value
        while operator := self.take("+", "-"):
            right = self.term(depth)
            value = _checked(value + right if operator == "+" else value - right)
        return value

    def term(self, depth: int) -> Fraction:
        value = self.power(depth)
        while True:
            operator = self.take("\\cdot", "/")
            if operator is None:
                self.skip()
                if not self.text.startswith(("(", "\\frac", "\\sqrt"), self.at):
                    return value
            sign = self.take("-") if operator else None
            right = self.power(depth)
            right = -right if sign else right
            value = _checked(value / right if operator == "/" else value * right)

    def power(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise TooLarge(f"more than {MAX_DEPTH} nested groups")
        value = self.atom(depth)
        while marks := self.take("!!", "!"):
            if value.denominator != 1 or value < 0 or self.text.startswith("!", self.at):
                raise _NotANumber
            if value > MAX_FACTORIAL:
                raise TooLarge(f"a factorial above {MAX_FACTORIAL}!")
            value = Fraction(math.prod(range(int(value), 1, -len(marks))))
        if self.take("^"):
            sign = self.take("-")
            exponent = self.group(depth) if self.text.startswith("{", self.at) else self.power(depth + 1)
            value = _checked(_power(value, -exponent if sign else exponent))
        return value

    def atom(self, depth: int) -> Fraction:
        self.skip()
        if self.text.startswith(("(", "{"), self.at):
            return self.group(depth)
        if self.take("\\frac"):
            top, bottom = self.group(depth), self.group(depth)
            return _checked(top / bottom)
        if self.take("\\sqrt"):
            degree = Fraction(2)
            if self.take("["):
                degree = self.expression(depth + 1)
                if not self.take("]") or degree.denominator != 1:
                    raise _NotANumber
            return _root(self.group(depth), int(degree))
        return self.number()

    def group(self, depth: int) -> Fraction:
        opener = self.take("(", "{")
        if opener is None:
            raise _NotANumber
        value = self.expression(depth + 1)
        if not self.take(")" if opener == "(" else "}"):
            raise _NotANumber
        return value

    def number(self) -> Fraction:
        match = _NUMBER.match(self.text, self.at)
        if match is None:
            raise _NotANumber
        self.at = match.end()
        if match["repeating"] is not None:
            whole, _, fraction = match["repeating"].partition(".")
            period = Fraction(int(match["period"]), 10 ** len(match["period"]) - 1)
            return Fraction(int(whole or 0)) + (int(fraction or 0) + period) / 10 ** len(fraction)
        plain = match["plain"].replace(",", "")
        whole, point, fraction = plain.partition(".")
        value = Fraction(int((whole or "0") + fraction), 10 ** len(fraction))
        self.decimal |= bool(point) or match["exponent"] is not None
        if match["exponent"] is not None:
            value *= _power(Fraction(10), Fraction(int(match["exponent"])))
        mixed = None if point else _MIXED_FRACTION.match(self.text, self.at)
        if mixed and int(mixed[2]):
            self.at = mixed.end()
            value += Fraction(int(mixed[1]), int(mixed[2]))
        return _checked(value)
