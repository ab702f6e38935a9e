"""The one extractor: finds the answer's marker in the final section and returns its content with character offsets.

Locating and stripping are one function, so the answer string is always ``text[start:end]`` of its span (a list of boxes
excepted, whose span covers all of them). Standard library only.

Classes in order of precedence (the most specific class present wins; within a class the last occurrence counts):
``box`` (``\\boxed{}``, ``\\fbox{}``, ``<answer></answer>``), ``line`` (``####``, "final answer is", "Answer:"),
``code`` (fenced block). There is no last-number guess.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from akl_dist.verify.normalize import canonical
from akl_dist.verify.quantity import MAX_LENGTH, TooLarge, parse_quantity
from akl_dist.verify.segments import final_section

Span = tuple[int, int]
MAX_LINE_MARKERS = 50  # of the last ones, how many may be tried for one with content
MAX_NESTED_BOXES = 8  # deeper boxes stay in the content, so that the cost stays linear in the text


@dataclass(frozen=True)
class Marker:
    """An answer marker. ``outer`` covers its delimiters, ``span`` the stripped content, ``kind`` is box, line or code."""

    kind: str
    answer: str
    span: Span
    outer: Span


@dataclass(frozen=True)
class _Candidate:
    """``content`` is None when the marker was opened and never closed."""

    outer: Span
    content: Span | None


_BRACES = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])|\\.|[{}]", re.DOTALL)
_BOX_WORDS = ("\\boxed", "\\fbox", "<answer>")
_BARE_BOX = re.compile(r"[ \t]*([+-]?\d(?:[\d.,/]*\d)?|(?<=[ \t])[A-Z]\b)")
_ANSWER_TAG = re.compile(r"<answer>|</answer>")
_OPEN_BRACE = re.compile(r"\s*\{")
_SENTENCE_END = re.compile(r"[.!?](?=\s|\*|$)")
_CONTENT = re.compile(r"[0-9A-Za-z\\]|[^\x00-\x7f]")
_BETWEEN_BOXES = re.compile(
    r"(?:[\s$,&]|\\[()\[\],;:! ]|\\q?quad|\\(?:text|mbox)\{\s*(?:and|or)?,?\s*\}|\band\b|\bor\b)*"
)
_JOINS = re.compile(r",|\band\b|\bor\b")
_LINE = re.compile(
    r"(?<!\#)\#\#\#\#(?!\#|[ \t]*[A-Za-z]{2,})[ \t]*"
    r"|\banswer\b[*_ \t]*(?:is\b[ \t]*:?|:|=)[*_ \t]*(?:\n\s*)?",
    re.IGNORECASE,
)
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[^\n`]*$", re.MULTILINE)
_NEXT_QUESTION = re.compile(r"^[ \t#*]*(?:Question|Problem|Human|User|Q)\b[ \t\d.]*\**:", re.MULTILINE)
_OPENERS = {"$$": "$$", "$": "$", "\\(": "\\)", "\\[": "\\]", "**": "**"}


def extract(text: str, *, think_open: bool = False) -> Marker | None:
    """The answer of a response, or None: nothing marked, an unfinished reasoning, or a last box that never closed."""
    marker = locate(text, think_open=think_open)
    return None if marker is None or marker.kind == "code" else marker


def locate(text: str, *, think_open: bool = False) -> Marker | None:
    """As :func:`extract`, but fenced code counts as a marker as well (the position vote and code tasks need it)."""
    section = final_section(text, think_open=think_open)
    if section is None:
        return None
    section = _cut_next_question(text, section)
    boxes = [c for c in _boxes(text, section) if c.content is None or _strip(text, c.content) is not None]
    if boxes:
        return _from_boxes(text, boxes)
    for line in reversed(list(_LINE.finditer(text, *section))[-MAX_LINE_MARKERS:]):
        marker = _from_line(text, line, section[1])
        if marker is not None:
            return marker
    return _last_fence(text, section)


def _cut_next_question(text: str, section: Span) -> Span:
    """End the section where, after a first answer, the model writes itself a next question."""
    start, end = section
    if _NEXT_QUESTION.search(text, start, end) is None:
        return section
    firsts = [c.outer[1] for c in _boxes(text, section)[:1]] + [m.end() for m in (_LINE.search(text, start, end),) if m]
    if not firsts:
        return section
    cut = _NEXT_QUESTION.search(text, min(firsts), end)
    return (start, cut.start()) if cut else section


def _strip(text: str, span: Span) -> Span | None:
    """The span without surrounding white space; None if nothing is left."""
    body = text[span[0] : span[1]]
    left = len(body) - len(body.lstrip())
    stripped = body.strip()
    return (span[0] + left, span[0] + left + len(stripped)) if stripped else None


def _boxes(text: str, section: Span) -> list[_Candidate]:
    """Outermost boxes and answer tags in the order of their openings, found in one pass with a brace stack."""
    start, end = section
    if all(text.find(word, start, end) < 0 for word in _BOX_WORDS):
        return []
    found: list[_Candidate] = []
    stack: list[Span | None] = []  # per open brace: (start of \boxed, start of its content), or None for a plain brace
    position = start
    while token := _BRACES.search(text, position, end):
        position = token.end()
        word = token.group()
        if word in ("\\boxed", "\\fbox"):
            brace = _OPEN_BRACE.match(text, position, end)
            if brace:
                stack.append((token.start(), brace.end()))
                position = brace.end()
            elif bare := _BARE_BOX.match(text, position, end):
                found.append(_Candidate((token.start(), bare.end()), bare.span(1)))
        elif word == "{":
            stack.append(None)
        elif word == "}" and stack:
            opened = stack.pop()
            if opened:
                found.append(_Candidate((opened[0], token.end()), (opened[1], token.start())))
    found += [_Candidate((opened[0], end), None) for opened in stack if opened]
    found += _answer_tags(text, section)
    return _outermost(found)


def _answer_tags(text: str, section: Span) -> list[_Candidate]:
    found: list[_Candidate] = []
    opened: re.Match[str] | None = None
    for tag in _ANSWER_TAG.finditer(text, *section):
        if tag.group() == "<answer>":
            opened = tag
        elif opened:
            found.append(_Candidate((opened.start(), tag.end()), (opened.end(), tag.start())))
            opened = None
    if opened:
        found.append(_Candidate((opened.start(), section[1]), None))
    return found


def _outermost(found: list[_Candidate]) -> list[_Candidate]:
    """Drop what lies inside a closed candidate. An unclosed one does not swallow what follows it."""
    kept: list[_Candidate] = []
    reach = -1
    for candidate in sorted(found, key=lambda c: (c.outer[0], -c.outer[1])):
        if candidate.outer[0] < reach:
            continue
        kept.append(candidate)
        if candidate.content is not None:
            reach = candidate.outer[1]
    return kept


def _from_boxes(text: str, boxes: list[_Candidate]) -> Marker | None:
    last = boxes[-1]
    if last.content is None:
        return None
    joined = [_innermost(text, last.content)]
    first = last
    for earlier in reversed(boxes[:-1]):
        gap = text[earlier.outer[1] : first.outer[0]]
        if earlier.content is None or not (_BETWEEN_BOXES.fullmatch(gap) and _JOINS.search(gap)):
            break
        joined.insert(0, _innermost(text, earlier.content))
        first = earlier
    if any(span is None for span in joined):
        return None
    spans = [span for span in joined if span is not None]
    answers = list(dict.fromkeys(text[a:b] for a, b in spans))
    if len(answers) == 1 or _one_number(answers):
        return Marker("box", answers[-1], spans[-1], last.outer)
    return Marker("box", ", ".join(answers), (spans[0][0], spans[-1][1]), (first.outer[0], last.outer[1]))


def _one_number(answers: list[str]) -> bool:
    """Whether all are one number in several spellings ("15 39/40 or 639/40"): then it is one answer and no list."""
    if any(len(answer) > MAX_LENGTH for answer in answers):
        return False
    try:
        quantities = [parse_quantity(canonical(answer)) for answer in answers]
    except TooLarge:
        return False
    return len({None if quantity is None else quantity.value for quantity in quantities} - {None}) == 1 and None not in quantities


def _innermost(text: str, content: Span) -> Span | None:
    """Content of a box; of the last box inside it, if there is one (a box in a box, a box in answer tags)."""
    for _ in range(MAX_NESTED_BOXES):
        inner = [c for c in _boxes(text, content) if c.content is not None and _strip(text, c.content)]
        if not inner:
            break
        content = inner[-1].content or content
    return _strip(text, content)


def _from_line(text: str, line: re.Match[str], end: int) -> Marker | None:
    """Content after ``####`` or "answer is", up to the end of the sentence, without wrapping delimiters.

    The marker's outer range goes to the end of the line.
    """
    stop = text.find("\n", line.end(), end)
    stop = end if stop < 0 else stop
    start = line.end()
    outer_end = start + len(text[start:stop].rstrip())
    for opener, closer in _OPENERS.items():
        if text.startswith(opener, start):
            body = start + len(opener)
            close = text.find(closer, body, end if opener in ("$$", "\\[") else stop)
            if close > body:
                span = _strip(text, (body, close))
                outer = (line.start(), max(outer_end, close + len(closer)))
                return Marker("line", text[span[0] : span[1]], span, outer) if span else None
    sentence = _SENTENCE_END.search(text, start, stop)
    if sentence and not text.startswith("...", sentence.start()):
        stop = sentence.start()
    span = _strip(text, (start, stop))
    if span is None:
        return None
    body = text[span[0] : span[1]].rstrip("*_ \t")
    span = (span[0], span[0] + len(body))
    if not _CONTENT.search(body):
        return None
    return Marker("line", body, span, (line.start(), outer_end))


def _last_fence(text: str, section: Span) -> Marker | None:
    """The last closed fenced block; the fence that closes has at least as many marks as the one that opens."""
    opened: re.Match[str] | None = None
    last: Marker | None = None
    for fence in _FENCE.finditer(text, *section):
        if opened is None:
            opened = fence
        elif fence.group(1).startswith(opened.group(1)) and fence.group().strip() == fence.group(1):
            span = (min(opened.end() + 1, fence.start()), fence.start())
            last = Marker("code", text[span[0] : span[1]], span, (opened.start(), fence.end()))
            opened = None
    return last
