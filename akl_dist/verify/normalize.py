"""The one normaliser: gold and answer pass through :func:`canonical` before anything is compared. Standard library only.

It removes what does not change meaning (delimiters, spacing commands, spellings of one symbol) and keeps the rest. Words in a
text wrapper all become ``\\text{...}``; "and"/"or" between values become ``;``, a separator that no number contains ("or" between
inequalities becomes ``\\cup``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_UNICODE = {
    "−": "-",
    "–": "-",
    "—": "-",
    "‐": "-",
    "﹣": "-",
    "×": "\\cdot ",
    "·": "\\cdot ",
    "⋅": "\\cdot ",
    "∙": "\\cdot ",
    "÷": "/",
    "∕": "/",
    "⁄": "/",
    "π": "\\pi ",
    "∞": "\\infty ",
    "≤": "\\le ",
    "≥": "\\ge ",
    "⩽": "\\le ",
    "⩾": "\\ge ",
    "≠": "\\ne ",
    "≈": "\\approx ",
    "ℝ": "\\mathbb{R}",
    "∪": "\\cup ",
    "∩": "\\cap ",
    "±": "\\pm ",
    "∈": "\\in ",
    "∅": "\\emptyset ",
    "θ": "\\theta ",
    "α": "\\alpha ",
    "β": "\\beta ",
    "√": "\\sqrt ",
    "…": "\\ldots ",
    "°": "°",
    "\u00a0": " ",
    "\u2009": "\\,",
    "\u202f": "\\,",
    "\u200b": "",
    "，": ",",
    "（": "(",
    "）": ")",
    "½": "\\frac{1}{2}",
    "¼": "\\frac{1}{4}",
    "¾": "\\frac{3}{4}",
    "⅓": "\\frac{1}{3}",
    "⅔": "\\frac{2}{3}",
} | {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F) if code not in (0xFF08, 0xFF09, 0xFF0C)
} | dict.fromkeys("\u00ad\u200c\u200d\u200e\u200f\u2060\ufeff", "")  # invisible
_TRANSLATION = str.maketrans(_UNICODE)
_RAISED, _LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "₀₁₂₃₄₅₆₇₈₉₊₋"
_LEVEL = str.maketrans(_RAISED + _LOWERED, "0123456789+-" * 2)
_SCRIPTS = re.compile(f"[{_RAISED}]+|[{_LOWERED}]+")

USD = "\x03"  # an escaped dollar sign, or one before a number: currency, not a math delimiter
_TEXT = r"\\(?:text|mbox|hbox|textrm|textnormal|textbf|textit|textsf|texttt|textsc|textup|emph|underline|" \
    r"mathrm|mathbf|mathit|mathsf|boldsymbol|bm)"



RELATION = re.compile(r"[<>]|\\[lg]e(?![A-Za-z])")


def _conjunction(word: re.Match[str]) -> str:
    """The separator for "and" or "or"; the numbers of ``x < 1 or x > 3`` are a union, those of ``x > 1 and x < 3`` fulfil both."""
    either = word.group().endswith("or") and RELATION.search(word.string)
    return r" \cup " if either else " ; "


def _connective(sign: re.Match[str]) -> str:
    """The word for a logical sign between inequalities; elsewhere ``p \\lor q`` is a formula."""
    if not RELATION.search(sign.string):
        return sign.group()
    return " and " if sign.group() in ("\\land", "\\wedge") else " or "


_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\\$", USD),
        (r"\\pounds(?![A-Za-z])", "£"),
        (r"\\(?:euro|texteuro)(?![A-Za-z])", "€"),
        (r"(?<=.)\\(?:mathrm|operatorname|mathbf|mathit|boldsymbol|bm|text)\s*\{([ie])\}", r" \1"),  # a constant, no unit
        (r"\\(?:log)\s*_\s*([0-9A-Za-z])", r"\\log_{\1}"),
        (r"\\%", "%"),
        (r"\{,\}", ","),
        (r"(?<=\d),\s*\\!\s*(?=\d{3}(?!\d))", ","),
        (r"(?<=\d)\\[,;:]\s*(?=\d{3}(?!\d))", ","),
        (r"\\(?:text)?color\s*\{[^{}]*\}|\\(?:tiny|small|normalsize|large|Large|LARGE|huge|Huge)(?![A-Za-z])", ""),
        (r"\\!|\\displaystyle|\\textstyle|\\limits|\\(?:left|right)\.", ""),
        (r"\\(?:left|right|[bB]ig+[lr]?)(?![A-Za-z])", ""),
        (r"\\[,;:> ]|~|\\q?quad(?![A-Za-z])|\\hspace\{[^{}]*\}", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (_TEXT + r"\s*\{\s*(and|or),?\s*\}", r" \1 "),
        (_TEXT + r"\s*\{", r"\\text{"),
        (r"\\text\{\s*\(?mod (\d+)\)?\s*\}", r"\\pmod{\1}"),
        (r"\\(?:times|ast)(?![A-Za-z])", r"\\cdot"),
        (r"\\mathbb\s*(?:R|\{\s*R\s*\})(?!\s*\^)|(?:\\text\{\s*|^)(?i:all real(?: number)?s)(?:\s*\}|$)", r"(-\\infty ,\\infty )"),
        (r"^\s*(?:(?:\\(?:approx|therefore|implies|(?:Long)?[rR]ightarrow)(?![A-Za-z])|=)\s*)+", ""),
        (r"\*\*", "^"),
        (r"\*", r"\\cdot "),
        (r"\\div(?![A-Za-z])", "/"),
        (r"\\leq?(?:slant)?(?![A-Za-z])|<=", r"\\le "),
        (r"\\geq?(?:slant)?(?![A-Za-z])|>=", r"\\ge "),
        (r"\\neq?(?![A-Za-z])|\\not\s*=", r"\\ne "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\[lr]brack(?![A-Za-z])", lambda m: "[" if m.group()[1] == "l" else "]"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\(?:infin|varinfty)(?![A-Za-z])|\b[iI]nfinity\b", r"\\infty"),
        (r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\(?:[lc]?dots[cbmio]?|ldots)(?![A-Za-z])|\.\.\.", r"\\ldots "),
        (
            r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])|(?<=\d)\s*(?:\\text\{\s*degrees?\s*\}|degrees?\b)",
            "°",
        ),
        (r"(?<=[\d\s])per ?cent\b|\\text\{\s*per ?cent\s*\}", "%"),
        (r"(\.\d*)\\(?:bar|dot)\s*(?=\{)", r"\1\\overline"),
        (r"\{\s*(\w+)\s*\\choose\s*(\w+)\s*\}", r"\\binom{\1}{\2}"),
        (r"\\(?:land|wedge|lor|vee)(?![A-Za-z])", _connective),
        (r"(?<![A-Za-z\\{])(?:sqrt)(?=\s*[({])", r"\\sqrt"),
        (r"(?<![A-Za-z\\{])pi(?![A-Za-z])", r"\\pi"),
        (r"(?:[,;]\s*)?\b(?:and|or)\b", _conjunction),
        (r"\\sqrt\s*(\[[^\[\]]*\])?\s*([0-9A-Za-z]|\\pi(?![A-Za-z]))", r"\\sqrt\1{\2}"),
        (r"\\frac\{\s*\\text\{([^{}]*)\}\s*\}\{\s*\\text\{([^{}]*)\}\s*\}", r"\\text{ \1/\2}"),  # of units
    )
)  # type: ignore[misc]
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"), ('"', '"'), ("“", "”"))
_ROW_END = "\x04"  # \\\\ inside an environment, where "\\\\ " is no spacing command
_OPEN_BRACKETS = re.compile(r"((?:.*\\in(?![A-Za-z]))?\s*)([\[\](])([^\[\](),;]+)[,;]([^\[\](),;]+)([\[\])])(\s*)", re.DOTALL)
_STRUCTURE = re.compile(r";|\d\s*[:,=<>]|[=<>]\s*[-\d]")  # of an answer that a text wrapper hides
_SET_BUILDER = re.compile(
    r"\\\{\s*[A-Za-z]\s*(?:\\in\s*\(-\\infty ?, ?\\infty ?\)\s*)?(?:\\mid(?![A-Za-z])|\||:)([^|:{}]*)\\\}"
)
_ARGUMENT = re.compile(r"\s*(?:([0-9A-Za-z])|(\\(?:pi|theta|alpha|beta)(?![A-Za-z])))")
_SPACE = re.compile(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])")
_WRAPPER = re.compile(r"\\text\{([^{}]*)\}")


def canonical(text: str) -> str:
    """One spelling of an answer string; idempotent on what the verifier compares. Empty if nothing is left."""
    out = _SCRIPTS.sub(_level, text).translate(_TRANSLATION).strip()
    for _ in range(3):
        out = _unwrap_delimiters(out.strip())
        out = _strip_end(out)
        if out.endswith(".") and not out.endswith(".."):
            out = out[:-1]
    out = re.sub(r"^\$(?=\s*[\d.,])", USD, out)
    rows = "\\begin" in out
    out = re.sub(r"\\\\(?:\[[^\[\]]*\])?", _ROW_END, out) if rows else out
    for pattern, replacement in _REWRITES:
        out = pattern.sub(replacement, out)
    out = _fraction_arguments(_sqrt_parentheses(out.replace("$", ""))).replace(_ROW_END, "\\\\")
    return _outer_groups(_condition(re.sub(r"\s+", " ", out).strip()))


def _level(match: re.Match[str]) -> str:
    """A run of raised or lowered characters as one LaTeX script."""
    run = match.group()
    return f"{'^' if run[0] in _RAISED else '_'}{{{run.translate(_LEVEL)}}}"


def _condition(text: str) -> str:
    """The inequality of ``\\{x : x > 3\\}``, a set of real numbers."""
    builder = _SET_BUILDER.fullmatch(text)
    return builder[1].strip() if builder and RELATION.search(builder[1]) else text


def _outer_groups(text: str) -> str:
    """Without braces (or a text wrapper around LaTeX) that hold everything; half-open intervals written ``[0,1[`` as ``[0,1)``."""
    for opener in ("{", "{", "\\text{"):
        inner = text[len(opener) : -1]
        whole = text.startswith(opener) and closing(text, len(opener) - 1) == len(text) - 1
        if whole and (opener == "{" or "\\" in inner or _STRUCTURE.search(inner)):
            text = inner.strip() if inner.endswith("..") else inner.strip().removesuffix(".")
    if "[" not in text and "]" not in text:
        return text
    pieces = [_OPEN_BRACKETS.fullmatch(piece) for piece in text.split("\\cup")]
    if not all(pieces) or not any(m and (m[2] == "]" or m[5] == "[") for m in pieces):
        return text
    return "\\cup".join(f"{m[1]}{m[2].replace(']', '(')}{m[3]},{m[4]}{m[5].replace('[', ')')}{m[6]}" for m in pieces if m)


def _strip_end(text: str) -> str:
    """Without closing punctuation and spacing commands: the ``;`` of ``7\\;`` goes with its backslash."""
    while True:
        stripped = text.rstrip(",;: \t\n")
        if (len(stripped) - len(stripped.rstrip("\\"))) % 2:
            stripped = stripped[:-1]
        if stripped == text:
            return text
        text = stripped


def _unwrap_delimiters(text: str) -> str:
    for opener, closer in _DELIMITERS:
        if len(text) > len(opener) + len(closer) - 1 and text.startswith(opener) and text.endswith(closer):
            inner = text[len(opener) : -len(closer)]
            escaped = opener == "$" and len(inner) - len(inner.rstrip("\\")) & 1  # the last dollar sign is money
            if opener not in inner.replace("\\$", "") and not escaped:
                return inner.strip()
    return text


def _sqrt_parentheses(text: str) -> str:
    """``\\sqrt(...)`` (calculator spelling) as ``\\sqrt{...}``, where the parenthesis closes."""
    position = 0
    while (found := text.find("\\sqrt", position)) >= 0:
        position = found + 5
        start = position + len(text[position:]) - len(text[position:].lstrip())
        if start < len(text) and text[start] == "(":
            close = closing(text, start)
            if close is not None:
                text = f"{text[:position]}{{{text[start + 1 : close]}}}{text[close + 1 :]}"
    return text


def _fraction_arguments(text: str) -> str:
    """Braces around the arguments of each ``\\frac`` that has none (``\\frac\\pi2``, ``\\frac{\\sqrt{3}}2``), as TeX reads them."""
    position = 0
    while (found := text.find("\\frac", position)) >= 0:
        position = start = found + 5
        arguments: list[str] = []
        bare = ""
        while len(arguments) < 2:
            group = re.compile(r"\s*(?=\{)").match(text, start)
            argument = None if group else _ARGUMENT.match(text, start)
            if group:
                close = closing(text, group.end())
                if close is None:
                    return text
                arguments.append(text[group.end() : close + 1])
                start = close + 1
            elif argument:
                bare += argument.group().strip()
                arguments.append(f"{{{argument.group().strip()}}}")
                start = argument.end()
            else:
                break
        unclear = re.fullmatch(r"\d\d", bare) and text[start : start + 1].isdigit()  # \frac123
        if len(arguments) == 2 and bare and not unclear:
            text = f"{text[:position]}{''.join(arguments)}{text[start:]}"
    return text


def closing(text: str, start: int) -> int | None:
    """Index of the bracket that closes the one at ``start`` (any of ``([{`` with any of ``)]}``), or None."""
    depth = 0
    index = start
    while index < len(text):
        char = text[index]
        if char == "\\" and text[index + 1 : index + 2] in ("{", "}", "\\"):
            index += 2
            continue
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth == 0:
                return index
        index += 1
    return None


def split_top(text: str, separators: Sequence[str]) -> list[str]:
    """Parts between separators outside all brackets. A comma inside a grouped number (1,000) does not separate."""
    parts, start, index = [], 0, 0
    while index < len(text):
        if text[index] in "([{" or text.startswith("\\{", index):
            close = closing(text, index) if text[index] != "\\" else closing_set(text, index)
            index = close + 1 if close is not None else index + 1
            continue
        if text.startswith("\\begin{", index):
            end = text.find("\\end{", index)
            index = end if end > 0 else index + 1
            continue
        found = next((s for s in separators if text.startswith(s, index)), None)
        if found and not (found == "," and _groups_digits(text, index)):
            parts.append(text[start:index])
            start = index = index + len(found)
            continue
        index += 1
    parts.append(text[start:])
    return [part.strip() for part in parts]


def _groups_digits(text: str, comma: int) -> bool:
    """Whether this comma belongs to a number of the full form d{1,3}(,ddd)+, without a leading zero, with no digit or comma run
    around it."""
    grouped = re.finditer(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)", text)
    return any(match.start() < comma < match.end() for match in grouped)


def closing_set(text: str, start: int) -> int | None:
    depth = 0
    for match in re.compile(r"\\[{}]").finditer(text, start):
        depth += 1 if match.group() == "\\{" else -1
        if depth == 0:
            return match.end() - 1
    return None


def three_digit_items(text: str) -> list[str]:
    """The elements where a comma list may be meant by what reads as one grouped number, as (100,200); else the text alone."""
    listed = re.fullmatch(r"-?\d{1,3}(?:,[1-9]\d\d)+", text)
    return text.split(",") if listed else [text]


def identity_key(canonical_text: str) -> str:
    """Text of equal keys is the same answer without any evaluation. Words compare without case, symbols with it."""
    wrapped = "\\text{" in canonical_text
    key = canonical_text
    for _ in range(3):
        key = _WRAPPER.sub(lambda m: f" {m.group(1).strip()} ", key)
    key = re.sub(r"([_^])\{(\w)\}", r"\1\2", key)
    key = re.sub(r"([_])\{(\w+)\}", r"\1\2", key)
    key = _SPACE.sub("", key.strip())
    letter = re.fullmatch(r"\(([A-Za-z])\)", key)
    if letter:
        return letter.group(1).upper()
    if is_words(key) and (wrapped or len(key) > 1):
        return key.casefold() if len(key) > 1 else key.upper()
    return key


def is_words(text: str) -> bool:
    """Natural-language text: letters, spaces and light punctuation only, at least one word of two letters or a lone letter."""
    plain = _WRAPPER.sub(r" \1 ", text).strip()
    return bool(re.fullmatch(r"[A-Za-z][A-Za-z ,.'\-()]*|\([A-Za-z]\)", plain)) and (
        len(plain) == 1 or bool(re.search(r"[A-Za-z]{2}", plain)) or plain.startswith("(")
    )
