"""Whether a program's standard output is the expected one. Pure.

Line by line, trailing blanks and trailing empty lines aside; within a line token by token. Two tokens are equal as text, or, where
at least one is written as a decimal, as numbers: 6.0 equals 6. The tolerance is the mathematics verifier's (relative, 1e-8); where
one is an integer it is at most 1e-6, so that no large integer equals its neighbour written as a decimal.
"""

from __future__ import annotations

import decimal
import re

RELATIVE_TOLERANCE = decimal.Decimal("1e-8")
INTEGER_TOLERANCE = decimal.Decimal("1e-6")
_NUMBER = re.compile(r"[+-]?(?:\d+(\.\d*)?|(\.\d+))([eE][+-]?\d{1,3})?")
_MAX_DIGITS = 400


def same_output(actual: str, expected: str) -> bool:
    """Whether what a program wrote counts as the expected output."""
    got, wanted = _lines(actual), _lines(expected)
    if len(got) != len(wanted):
        return False
    return all(_same_line(one, other) for one, other in zip(got, wanted, strict=True))


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_line(actual: str, expected: str) -> bool:
    if actual == expected:
        return True
    got, wanted = actual.split(), expected.split()
    return len(got) == len(wanted) and all(map(_same_token, got, wanted))


def _same_token(actual: str, expected: str) -> bool:
    if actual == expected:
        return True
    numbers = [_NUMBER.fullmatch(token) for token in (actual, expected)]
    if not all(numbers) or max(len(actual), len(expected)) > _MAX_DIGITS:
        return False
    decimals = [bool(match and (match[1] or match[2] or match[3])) for match in numbers]
    if not any(decimals):
        return False  # two integers, written differently: 007 is not 7
    with decimal.localcontext() as context:
        context.prec = 2 * _MAX_DIGITS
        one, other = decimal.Decimal(actual), decimal.Decimal(expected)
        tolerance = RELATIVE_TOLERANCE * max(abs(one), abs(other))
        return abs(one - other) <= (tolerance if all(decimals) else min(tolerance, INTEGER_TOLERANCE))
