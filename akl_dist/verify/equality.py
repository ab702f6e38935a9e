"""The one equality of answers. Symmetric and reflexive; what does not parse equals only identical text.

``compare`` works on canonical text (:mod:`akl_dist.verify.normalize`) from the outside in: identical text, lists, unions,
equations and assignments, ratios, tuples and intervals, matrices, then single values, exactly first and symbolically last.

Conventions: a tolerance is relative and applies only when a decimal literal is present (equal up to 1e-8, different from 1e-4,
"near" and hence wrong between); a percent sign or unit may be missing on one side, a contradicting one is wrong (not so a word
of scale, as million: it is part of the value); bare comma lists and sets are unordered, parenthesised tuples ordered; a name
before "=" may be missing on one side; a chain of numbers counts when all of it agrees ("2^3 = 8"), of an exact and a rounded value
the exact one.
"""

from __future__ import annotations

import enum
import re

from akl_dist.verify import symbolic
from akl_dist.verify.inequalities import inequality, joined
from akl_dist.verify.normalize import RELATION, closing, closing_set, identity_key, is_words, split_top, three_digit_items
from akl_dist.verify.quantity import Quantity, TooLarge, parse_quantity
from akl_dist.verify.units import split_unit

MAX_ITEMS = 50
ROUNDED_GAP = 0.05  # relative, of a rounded value that follows the exact one
MAX_NESTING = 12  # of lists in tuples in lists ...


class Outcome(enum.Enum):
    """Result of one comparison. UNPARSED: at least one side is no value known here, and the texts differ."""

    EQUAL = "equal"
    NEAR = "near"
    DIFFERENT = "different"
    UNPARSED = "unparsed"


_NAME = re.compile(
    r"(?P<name>(?:[A-Za-z]|\\vec\{[A-Za-z]+\}|\\(?!frac|sqrt|text|pm|neg|sin|cos|tan|log|ln)[a-z]+)(?:_(?:\{[^{}]*\}|\w))?'*"
    r"(?:\^\{?-1\}?(?=\())?(?:\([A-Za-z](?:,\s*[A-Za-z])*\))?"
    r"|\((?:[A-Za-z](?:_\{?\w\}?)?,\s*)+[A-Za-z](?:_\{?\w\}?)?\)"  # (x, y) = ...
    r"|(?!(?:\\text\{)?[^={}]*\b(?:not|or|never)\b)(?:\\text\{[^{}]*\}|[A-Za-z]{2,}(?: [A-Za-z]+)*))\s*"
    r"(?P<op>=|\\in(?![A-Za-z])|\\approx(?![A-Za-z])|\\equiv(?![A-Za-z]))\s*"
)
_PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])")
_OTHER_NAMING = re.compile(r"\\in|\\approx|\\equiv")
_BASE = re.compile(r"(?P<sign>-?)(?P<round>\()?(?P<digits>[0-9A-Fa-f]+)(?(round)\))_\{?(?P<base>\d{1,2})\}?")
_MATRIX = re.compile(r"\\begin\{([pbvVB]?matrix|smallmatrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{\1\}", re.DOTALL)
_DETERMINANTS = ("vmatrix", "Vmatrix")
_ANGLE_FUNCTION = re.compile(r"(?<![A-Za-z])(?:sin|cos|tan|sec|csc|cot)(?![A-Za-z])")


def compare(a: str, b: str, depth: int = 0) -> Outcome:
    """Compare two canonical answer strings. Raises TooLarge where a side is beyond the limits of evaluation."""
    if identity_key(a) == identity_key(b):
        return Outcome.EQUAL
    if depth > MAX_NESTING or not a or not b:
        return Outcome.UNPARSED
    if "\\ldots" in a or "\\ldots" in b:
        return Outcome.DIFFERENT
    reduced = _values_of(a, b, depth)
    if reduced != (a, b):
        return compare(*reduced, depth + 1)
    whole = (a, b)
    name_a, name_b, a, b = _without_names(a, b)
    if name_a and name_b and name_a != name_b:
        crossed = name_a in b and name_b in a and _as_equations(*whole, depth) is Outcome.EQUAL  # y = 2x and x = y/2
        return Outcome.EQUAL if crossed else Outcome.DIFFERENT
    if name_a or name_b:
        return compare(a, b, depth + 1)
    for compare_as in (_as_lists, _as_unions, _as_intervals, _as_equations, _as_ratios, _as_groups, _as_matrices):
        outcome = compare_as(a, b, depth + 1)
        if outcome is not None:
            return outcome
    return _as_values(a, b)


def _items(text: str) -> list[str] | None:
    """Elements of a set, a list or a plus-minus pair; None for a single value."""
    explicit = text.startswith("\\{") and closing_set(text, 0) == len(text) - 1
    body = text[2:-2] if explicit else text
    parts = [part for part in split_top(body, (",", ";")) if part]
    parts = three_digit_items(parts[0]) if explicit and len(parts) == 1 else parts
    if _PLUS_MINUS.search(body):
        parts = [
            sided
            for part in parts
            for sided in (
                [part.replace("\\pm", "+", 1), part.replace("\\pm", "-", 1)] if part.count("\\pm") == 1 else [part]
            )
        ]
        parts = [part.strip()[1:].strip() if part.strip().startswith("+") else part for part in parts]
    return parts if explicit or len(parts) > 1 else None


def _without_names(a: str, b: str) -> tuple[str, str, str, str]:
    """Split leading "x =" / "x \\in" off both sides: (name of a, name of b, rest of a, rest of b); names may be empty."""
    split = []
    for text in (a, b):
        match = _NAME.match(text)
        rest = text[match.end() :].strip() if match else text
        plain = bool(match) and bool(rest) and len(split_top(rest, ("=",))) == 1 and not RELATION.search(rest)
        split.append((re.sub(r"\s", "", match["name"]), rest) if match and plain else ("", text))
    (name_a, rest_a), (name_b, rest_b) = split
    if bool(name_a) != bool(name_b) and ("=" in a) == ("=" in b) and not _OTHER_NAMING.search(a + b):
        return "", "", a, b  # an equation against an assignment: compare both as equations
    return name_a, name_b, rest_a, rest_b


# --- chains of equal values ---------------------------------------------------------------------------------------


_WRITTEN_NUMBER = re.compile(
    r"\\text\{[^{}]*\}|\\(?:frac|sqrt|cdot|pi|binom|log|ln|sin|cos|tan|infty)(?![A-Za-z])|(?<=\d) ?[A-Za-z]+$"
)
_LABEL = re.compile(  # what a question may ask for, other than a name: 10m+n, f(2), P(A|B), |AB|, [ABC], m\angle A, \sin\theta
    r"\d*\s*[a-wA-W](?:\s*[+-]\s*\d*\s*[a-wA-W])+|(?P<function>[A-Za-z])(?:\^\{?-1\}?)?'*\((?P<argument>[^=]+)\)"
    r"|\|[A-Z]{2}\||\[[A-Z]{3,}\]|\\overline\{[A-Z]+\}|m?\s*\\angle\s*[A-Z]+|\\text\{[^{}]*\}\s*[A-Z]+"
    r"|\\(?:sin|cos|tan|cot|sec|csc)\s*(?:[A-W]|\\theta|\\alpha|\\beta|\\angle\s*[A-Z]+)"
)


def _values_of(a: str, b: str, depth: int) -> tuple[str, str]:
    """Both sides, a chain of equal numbers as its value: "2^3 = 8" is 8, "x = 3+5 = 8" is x = 8, "\\frac23 \\approx 0.67" is 2/3.

    Before a number also a label is left out that the question asked for, where the other side is a number alone.
    """
    left, right = _value_of_chain(a, depth), _value_of_chain(b, depth)
    return _without_label(left, right), _without_label(right, left)


def _value_of_chain(text: str, depth: int) -> str:
    """A chain that does not agree with itself stays as it is, and equals nothing but its own text."""
    if "=" not in text and "\\approx" not in text:
        return text
    members = [split_top(member, ("\\approx",)) for member in split_top(text, ("=",))]
    named = members[0] if len(members[0]) == 1 and not _is_number(members[0][0]) else []
    numbers = members[1:] if named else members
    if sum(map(len, numbers)) < 2 or not all(_is_number(number) for member in numbers for number in member):
        return text
    exact = [member[0] for member in numbers]
    agree = all(compare(exact[-1], number, depth + 1) is Outcome.EQUAL for number in exact[:-1])
    if not agree or not all(_is_near(member[0], other) for member in numbers for other in member[1:]):
        return text
    return f"{named[0]}={exact[-1]}" if named else exact[-1]


def _is_number(text: str) -> bool:
    return bool(re.search(r"\d|\\pi|\\infty", text)) and not re.search(r"[A-Za-z=<>,;:]", _WRITTEN_NUMBER.sub("", text))


def _is_near(exact: str, rounded: str) -> bool:
    try:
        gap = symbolic.gap(split_unit(exact)[0], split_unit(rounded)[0])
    except symbolic.NotSymbolic:
        return False
    return gap is not None and gap < ROUNDED_GAP


def _without_label(text: str, other: str) -> str:
    sides = split_top(text, ("=",))
    label = _LABEL.fullmatch(sides[0]) if len(sides) == 2 else None
    if label is None or not (_is_number(sides[1]) and _is_number(other)):
        return text
    argument = re.sub(r"\\[a-z]+", "", label["argument"] or "")
    product = label["function"] and re.search(rf"{label['function']}(?!\()", argument)  # x(x+1) is no function's value
    return text if product else sides[1]


# --- structures: each returns None where neither side has that structure ----------------------------------------------


def _as_lists(a: str, b: str, depth: int) -> Outcome | None:
    items_a, items_b = _items(a), _items(b)
    if items_a is None and items_b is None:
        return None
    if "\\cup" in a + b or _all_intervals(items_a) or _all_intervals(items_b):
        return None  # "x < 1, x > 3" is a union
    point = _as_point(a, items_b, depth) or _as_point(b, items_a, depth)
    if point is not None:
        return point
    left, right = (three_digit_items(text) if items is None else items for text, items in ((a, items_a), (b, items_b)))
    if len(left) != len(right):
        left, right = items_a or [a], items_b or [b]
    return _pair_up(left, right, depth)


def _as_point(point: str, items: list[str] | None, depth: int) -> Outcome | None:
    """(1,2) against the solution of a system, "y=2, x=1": the coordinates in the order of the names' alphabet."""
    group = _group(point)
    named = [re.fullmatch(r"([A-Za-z](?:_\{?\d\}?)?)\s*=([^=]+)", item) for item in items or ()]
    if group is None or group[0] != "()" or not named or not all(named):
        return None
    values = {match[1]: match[2].strip() for match in named if match}
    if len(values) != len(named):
        return Outcome.DIFFERENT
    return _in_order(group[1], [values[name] for name in sorted(values)], depth)


def _pair_up(left: list[str], right: list[str], depth: int) -> Outcome:
    """One-to-one pairing of all elements, in any order."""
    if len(left) != len(right):
        return Outcome.DIFFERENT
    if len(left) > MAX_ITEMS:
        raise TooLarge(f"a list of more than {MAX_ITEMS} elements")
    rest = list(right)
    worst = Outcome.EQUAL
    for item in left:
        outcomes = [compare(item, other, depth) for other in rest]
        if Outcome.EQUAL in outcomes:
            rest.pop(outcomes.index(Outcome.EQUAL))
        else:
            worst = Outcome.UNPARSED if Outcome.UNPARSED in outcomes else Outcome.DIFFERENT
            break
    return worst


def _all_intervals(items: list[str] | None) -> bool:
    return bool(items) and all(inequality(item) is not None for item in items or ())


def _as_unions(a: str, b: str, depth: int) -> Outcome | None:
    parts = []
    for text in (a, b):
        pieces = split_top(text, ("\\cup",))
        items = _items(text)
        if items is not None and len(pieces) == 1 and _all_intervals(items):
            pieces = joined(items)
        elif items is not None and len(pieces) == 1 and "\\cup" in a + b and all(map(_group, items)):
            pieces = items  # the intervals of a union, as a list
        parts.append(pieces)
    if "\\cup" not in a + b and max(map(len, parts)) == 1 and parts != [[a], [b]]:
        return compare(parts[0][0], parts[1][0], depth)
    return _pair_up(parts[0], parts[1], depth) if max(map(len, parts)) > 1 else None


def _as_intervals(a: str, b: str, depth: int) -> Outcome | None:
    left, right = inequality(a), inequality(b)
    if left is None and right is None:
        return Outcome.UNPARSED if RELATION.search(a) or RELATION.search(b) else None
    if left and right and left[0] != right[0]:
        return Outcome.DIFFERENT
    return compare(left[1] if left else a, right[1] if right else b, depth)


def _as_equations(a: str, b: str, depth: int) -> Outcome | None:
    del depth
    sides = [split_top(text, ("=",)) for text in (a, b)]
    if all(len(s) == 1 for s in sides):
        return None
    if not all(len(s) == 2 for s in sides):
        return Outcome.DIFFERENT
    try:
        same = symbolic.proportional((sides[0][0], sides[0][1]), (sides[1][0], sides[1][1]))
    except symbolic.NotSymbolic:
        return Outcome.UNPARSED
    return Outcome.EQUAL if same else Outcome.DIFFERENT


def _as_ratios(a: str, b: str, depth: int) -> Outcome | None:
    left, right = split_top(a, (":",)), split_top(b, (":",))
    return None if len(left) == len(right) == 1 else _in_order(left, right, depth)


def _in_order(left: list[str], right: list[str], depth: int) -> Outcome:
    if len(left) != len(right):
        return Outcome.DIFFERENT
    for x, y in zip(left, right, strict=True):
        outcome = compare(x, y, depth)
        if outcome is not Outcome.EQUAL:
            return outcome
    return Outcome.EQUAL


def _as_groups(a: str, b: str, depth: int) -> Outcome | None:
    """Tuples and intervals: same brackets, elements in order."""
    groups = [_group(text) for text in (a, b)]
    if groups[0] is None and groups[1] is None:
        return None
    left, right = groups
    if left is None or right is None or left[0] != right[0]:
        return Outcome.DIFFERENT
    return _in_order(left[1], right[1], depth)


def _group(text: str) -> tuple[str, list[str]] | None:
    if text[:1] not in ("(", "[") or text[-1:] not in (")", "]") or closing(text, 0) != len(text) - 1:
        return None
    parts = split_top(text[1:-1], (";",))
    parts = split_top(text[1:-1], (",",)) if len(parts) == 1 else parts
    parts = three_digit_items(parts[0]) if len(parts) == 1 else parts
    return (text[0] + text[-1], parts) if len(parts) > 1 else None


def _as_matrices(a: str, b: str, depth: int) -> Outcome | None:
    matches = [_MATRIX.fullmatch(_inside_brackets(text)) for text in (a, b)]
    if not any(matches):
        return None
    if not all(matches) or len({m[1] in _DETERMINANTS for m in matches if m}) > 1:
        return Outcome.DIFFERENT
    rows = [[cell.split("&") for cell in re.split(r"\\\\", m[2].strip().removesuffix("\\\\"))] for m in matches if m]
    if [len(row) for row in rows[0]] != [len(row) for row in rows[1]]:
        return Outcome.DIFFERENT
    cells = [[cell.strip() for row in matrix for cell in row] for matrix in rows]
    return _in_order(cells[0], cells[1], depth)


def _inside_brackets(text: str) -> str:
    """An array in round or square brackets is a matrix: the array alone."""
    inner = text[1:-1].strip()
    array = text[:1] in ("(", "[") and inner.startswith(("\\begin{array}", "\\begin{smallmatrix}"))
    return inner if array and closing(text, 0) == len(text) - 1 else text


# --- single values -----------------------------------------------------------------------------------------------


def _as_values(a: str, b: str) -> Outcome:
    base = _as_based(a, b)
    if base is not None:
        return base
    (body_a, unit_a), (body_b, unit_b) = split_unit(_in_radians(_unwrapped(a))), split_unit(_in_radians(_unwrapped(b)))
    if unit_a and unit_b and unit_a != unit_b:
        return Outcome.DIFFERENT
    outcome = _same_value(body_a, body_b)
    if outcome is not Outcome.EQUAL and "%" in (unit_a, unit_b) and unit_a != unit_b:
        scaled = (f"({body_a})/100", body_b) if unit_a == "%" else (body_a, f"({body_b})/100")
        outcome = max((outcome, _same_value(*scaled)), key=lambda o: (o is Outcome.EQUAL, o is Outcome.NEAR))
    return outcome


def _in_radians(text: str) -> str:
    """Degrees under an angle function are part of the expression: sin 30° is sin(30 pi/180). Elsewhere they are a unit."""
    return re.sub(r"(\d+(?:\.\d+)?)°", r"\\frac{\1\\pi}{180}", text) if _ANGLE_FUNCTION.search(text) else text


def _as_based(a: str, b: str) -> Outcome | None:
    """Numerals with a base as a subscript. A base missing on one side was named by the question."""
    left, right = _BASE.fullmatch(a), _BASE.fullmatch(b)
    if not left and not right:
        return None
    if left and right:
        values = []
        for numeral in (left, right):
            base = int(numeral["base"])
            if not 2 <= base <= 16 or any(int(digit, 16) >= base for digit in numeral["digits"]):
                return Outcome.DIFFERENT
            values.append(int(numeral["sign"] + numeral["digits"], base))
        return Outcome.EQUAL if values[0] == values[1] else Outcome.DIFFERENT
    bare, numeral = (b, left) if left else (a, right)
    assert numeral is not None
    return Outcome.EQUAL if bare.replace(" ", "") == numeral["sign"] + numeral["digits"] else Outcome.DIFFERENT


def _same_value(a: str, b: str) -> Outcome:
    a, b = _unwrapped(a), _unwrapped(b)
    if identity_key(a) == identity_key(b):
        return Outcome.EQUAL
    left, right = parse_quantity(a), parse_quantity(b)
    if left and right:
        return _exact(left, right)
    if is_words(a) and is_words(b):
        return Outcome.DIFFERENT
    if (is_words(a) and len(a) > 1) or (is_words(b) and len(b) > 1):
        return Outcome.DIFFERENT if left or right else Outcome.UNPARSED
    try:
        if not re.search(r"\d\.\d|\.\d", a + " " + b):
            same = symbolic.same(a, b)
            return Outcome.UNPARSED if same is None else Outcome.EQUAL if same else Outcome.DIFFERENT
        gap = symbolic.gap(a, b)
    except symbolic.NotSymbolic:
        return Outcome.UNPARSED
    return Outcome.UNPARSED if gap is None else _by_gap(gap)


def _unwrapped(text: str) -> str:
    """Without a text wrapper around the whole value, and without a leading plus sign."""
    match = re.fullmatch(r"\\text\{([^{}]*)\}", text.strip())
    return (match.group(1) if match else text).strip().removeprefix("+").strip()


def _exact(left: Quantity, right: Quantity) -> Outcome:
    if left.value == right.value:
        return Outcome.EQUAL
    if not (left.decimal or right.decimal):
        return Outcome.DIFFERENT
    gap = abs(left.value - right.value) / max(abs(left.value), abs(right.value))
    return _by_gap(min(float(gap), 2.0))


def _by_gap(gap: float) -> Outcome:
    if gap <= symbolic.ACCEPT_GAP:
        return Outcome.EQUAL
    return Outcome.DIFFERENT if gap >= symbolic.REJECT_GAP else Outcome.NEAR
