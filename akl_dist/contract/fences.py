"""Fenced code blocks of Markdown text: the one parser, used by the verifiers and by tool calls. Pure; standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass

PYTHON_TAGS = frozenset({"python", "py", "python3", "py3", "python2", "ipython", "python3.11", "python3.12", "sage"})
OPENS = re.compile(r"^(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<info>[^`\n]*)$")

_TAG = re.compile(r"[\w+.#-]+")
_MAX_JOINS = 5  # closing fences that may turn out to be text inside the code

Span = tuple[int, int]


@dataclass(frozen=True)
class Block:
    """A fenced block: its language ("" if none is named), its text without the fence's own indent, its place in the text.

    ``span`` covers the lines between the fences; ``closed`` is False where the block reaches to the end unclosed.
    """

    tag: str
    code: str
    span: Span
    closed: bool = True


def blocks(text: str, section: Span) -> list[Block]:
    """The fenced blocks of a section, line by line. A block that is never closed reaches to the end."""
    found: list[Block] = []
    lines = text[section[0]:section[1]].splitlines(keepends=True)
    offset, index = section[0], 0
    while index < len(lines):
        opened = OPENS.match(lines[index].rstrip("\r\n"))
        offset += len(lines[index])
        index += 1
        if not opened:
            continue
        start, body, joined = offset, [], 0
        while index < len(lines):
            closes = _closes(lines[index], opened["fence"])
            if closes and not (joined < _MAX_JOINS and _inside_string(body) and _closed_later(lines[index + 1:], opened["fence"])):
                break
            joined += closes
            body.append(lines[index])
            offset += len(lines[index])
            index += 1
        tag = _TAG.search(opened["info"].strip("{}. \t"))
        code = "".join(_unindent(line, len(opened["indent"])) for line in body)
        found.append(Block(tag.group().lower() if tag else "", code, (start, offset), closed=index < len(lines)))
        if index < len(lines):
            offset += len(lines[index])
            index += 1
    return found


def _closes(line: str, fence: str) -> bool:
    stripped = line.strip()
    return len(stripped) >= len(fence) and set(stripped) == {fence[0]}


def _closed_later(lines: list[str], fence: str) -> bool:
    return any(_closes(line, fence) for line in lines)


def _inside_string(body: list[str]) -> bool:
    """Whether the code so far ends inside a triple-quoted string, so that a fence belongs to it."""
    text = re.sub(r"\\.", "", "".join(body), flags=re.DOTALL)
    quote = None
    for token in re.findall(r"\"\"\"|'''|#[^\n]*", text):
        if quote is None:
            quote = token if token[0] != "#" else None
        elif token == quote or (token[0] == "#" and quote in token):
            quote = None
    return quote is not None


def _unindent(line: str, indent: int) -> str:
    return line[min(indent, len(line) - len(line.lstrip(" \t"))):]
