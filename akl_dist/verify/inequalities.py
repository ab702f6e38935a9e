"""Inequalities in one variable as intervals: ``x < 6`` is (-inf, 6), and ``x > 1 and x < 3`` is (1, 3)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from akl_dist.verify import symbolic
from akl_dist.verify.normalize import RELATION
from akl_dist.verify.quantity import parse_quantity

_VARIABLE = re.compile(r"(?:[A-Za-z]|\\(?:theta|alpha|beta|lambda))(?:_\{?\w\}?)?")
_BELOW, _ABOVE = "-\\infty", "\\infty"


def inequality(text: str) -> tuple[str, str] | None:
    """(variable, interval text) of an inequality in one variable: "x<6" is ("x", "(-\\infty,6)"); None for anything else."""
    operators = RELATION.findall(text)
    sides = [side.strip() for side in RELATION.split(text)]
    if not 1 <= len(operators) <= 2 or not all(sides):
        return None
    greater = [op in (">", "\\ge") for op in operators]
    if len(set(greater)) != 1:
        return None
    if greater[0]:
        sides.reverse()
        operators.reverse()
    strict = [op in ("<", ">") for op in operators]
    if len(operators) == 2:
        low, variable, high = sides
        bounds = (strict[0], low, high, strict[1])
    elif _VARIABLE.fullmatch(sides[0]):
        variable, bounds = sides[0], (True, _BELOW, sides[1], strict[0])
    else:
        variable, bounds = sides[1], (strict[0], sides[0], _ABOVE, True)
    if not _VARIABLE.fullmatch(variable) or variable in (bounds[1], bounds[2]):
        return None
    return variable, f"{'(' if bounds[0] else '['}{bounds[1]},{bounds[2]}{')' if bounds[3] else ']'}"


def joined(items: Sequence[str]) -> list[str]:
    """Inequalities written one after another: two that bound one variable from both sides hold together, where any number fulfils
    both (``x > 1, x < 3``); any others (``x < 1, x > 3``) are the parts of a union."""
    found = [one for one in map(inequality, items) if one is not None]
    if len(items) != 2 or len(found) != 2 or found[0][0] != found[1][0]:
        return list(items)
    variable = found[0][0]
    below, above = sorted((text for _, text in found), key=lambda text: text[1:].startswith(_BELOW), reverse=True)
    low, _, no_bound = above[:-1].rpartition(",")
    first, _, high = below[:-1].partition(",")
    if no_bound != _ABOVE or first[1:] != _BELOW:
        return list(items)
    if not _less(low[1:], high):
        return list(items)
    less = {"(": "<", ")": "<", "[": "\\le ", "]": "\\le "}
    return [f"{low[1:]}{less[low[0]]}{variable}{less[below[-1]]}{high}"]


def _less(low: str, high: str) -> bool:
    left, right = parse_quantity(low), parse_quantity(high)
    if left and right:
        return left.value < right.value
    try:
        return symbolic.less(low, high)
    except symbolic.NotSymbolic:
        return False
