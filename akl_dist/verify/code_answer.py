"""Which part of a program counts as its answer: character ranges of signatures and return statements. Never executes anything.

Standard library only. The tree is used where the text is Python (as it stands, or as an indented body); prefixes of lines else, so
that a program with a syntax error is treated alike as far as its lines go.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise

from akl_dist.verify.code_extract import parse

Span = tuple[int, int]
MAX_CHARACTERS = 20_000  # of a program that is parsed here; a longer one is read line by line
MAX_NESTING = 40  # brackets, likewise

_NAME = re.compile(r"[^\W\d]\w*")
_LINE_END = re.compile(r"\r\n|\r|\n")
_HEADER = re.compile(r"[ \t]*(?:async[ \t]+def|def|class)[ \t]+([^\W\d]\w*)")
_DECORATOR = re.compile(r"[ \t]*@")
_RETURN = re.compile(r"[ \t]*return(?!\w)")
_PRINT = re.compile(r"[ \t]*(?:print|sys\.stdout\.write)[ \t]*\(")
_COLON = re.compile(r"\#[^\r\n]*|:")
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def entry_names(gold: str) -> frozenset[str]:
    """Names that the tests of a code gold call: those of its entry point, else every name in its assertions. Empty for a program
    that reads standard input, and for a gold that is no code task."""
    try:
        tests = json.loads(gold)["tests"]
        entry, asserts = tests.get("entry_point"), tests.get("asserts")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return frozenset()
    if isinstance(entry, str) and entry:
        return frozenset(_NAME.findall(entry))
    asserts = asserts if isinstance(asserts, list) else []
    return frozenset(name for text in asserts if isinstance(text, str) for name in _NAME.findall(text))


def signature_and_return(text: str, program: Span, names: Iterable[str]) -> list[Span]:
    """Ranges of ``text``: the signatures of the definitions called ``names`` (decorators included, up to the colon) and every
    return statement of the program. Without a definition of that name those of all top-level definitions. A program with neither
    (a script) answers by what it prints: its output statements.

    Args:
        text: the response.
        program: range of the program in it.
        names: see :func:`entry_names`.
    """
    start, end = program
    code, wanted = text[start:end], frozenset(names)
    tree, prefix = _tree(code)
    found = _by_lines(code, wanted) if tree is None else _by_tree(prefix + code, tree, wanted)
    shift = start - len(prefix) if tree is not None else start
    return sorted({(max(a + shift, start), min(b + shift, end)) for a, b in found})


def _tree(code: str) -> tuple[ast.Module | None, str]:
    """The tree of the code, and what was put in front of it: a completion or a block of a list is indented as a whole."""
    if len(code) > MAX_CHARACTERS or _nesting(code) > MAX_NESTING:
        return None, ""
    for prefix in ("", "if 1:\n"):
        tree = parse(prefix + code)
        if tree is not None:
            return tree, prefix
    return None, ""


def _nesting(code: str) -> int:
    depth = deepest = 0
    for bracket in re.findall(r"[()\[\]{}]", code):
        depth += 1 if bracket in "([{" else -1
        deepest = max(deepest, depth)
    return deepest


def _by_tree(code: str, tree: ast.Module, names: frozenset[str]) -> list[Span]:
    place = _Places(code)
    nodes = list(ast.walk(tree))
    definitions = [node for node in nodes if isinstance(node, _Definition)]
    called = [node for node in definitions if node.name in names]
    top = [node for node in _top_level(tree) if isinstance(node, _Definition)]
    found = [_header(code, node, place) for node in called or top]
    found += [place.of(node) for node in nodes if isinstance(node, ast.Return)]
    return found or [place.of(node) for node in nodes if isinstance(node, ast.Expr) and _prints(node.value)]


def _top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in tree.body:
        yield from node.body if isinstance(node, ast.If) else [node]


def _prints(value: ast.expr) -> bool:
    """Whether it is print(...) or sys.stdout.write(...)."""
    match value:
        case ast.Call(func=ast.Name(id="print")):
            return True
        case ast.Call(func=ast.Attribute(attr="write", value=ast.Attribute(attr="stdout", value=ast.Name(id="sys")))):
            return True
    return False


class _Places:
    """Character offsets of a tree's (line, UTF-8 byte column) pairs."""

    def __init__(self, code: str) -> None:
        self._code = code
        self._starts = [0, *(match.end() for match in _LINE_END.finditer(code))]

    def offset(self, line: int, column: int) -> int:
        start = self._starts[line - 1]
        head = self._code[start : start + column]  # at least as many characters as it has bytes
        return start + (column if head.isascii() else len(head.encode("utf-8", "replace")[:column].decode("utf-8", "ignore")))

    def of(self, node: ast.stmt | ast.expr | ast.arg) -> Span:
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno or node.lineno, node.end_col_offset or 0)


def _header(code: str, node: _Definition, place: _Places) -> Span:
    """From the first decorator, or the definition itself, to the colon before the body."""
    start = place.offset(node.lineno, node.col_offset)
    if node.decorator_list:
        start = code.rindex("@", 0, place.of(node.decorator_list[0])[0])
    colon = place.offset(node.lineno, node.col_offset)
    ends = [place.of(part)[1] for part in _parts(node) if part is not None]  # behind these the first colon is the body's
    for match in _COLON.finditer(code, max([colon, *ends])):
        if match.group() == ":":
            return start, match.end()
    return start, colon


def _parts(node: _Definition) -> list[ast.expr | ast.arg | None]:
    if isinstance(node, ast.ClassDef):
        return [*node.bases, *(keyword.value for keyword in node.keywords)]
    args = node.args
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg, *args.defaults, *args.kw_defaults,
            node.returns]


def _by_lines(code: str, names: frozenset[str]) -> list[Span]:
    """The same from prefixes of lines: single lines, with the decorators right above a signature."""
    bounds = [0, *(match.end() for match in _LINE_END.finditer(code)), len(code)]
    lines = [(start, code[start:end]) for start, end in pairwise(bounds)]
    headers = [(index, match.group(1)) for index, (_, line) in enumerate(lines) if (match := _HEADER.match(line))]
    top = [index for index, _ in headers if lines[index][1][:1] not in (" ", "\t")]
    chosen = [index for index, name in headers if name in names] or top or [index for index, _ in headers]
    for index in list(chosen):
        while index and _DECORATOR.match(lines[index - 1][1]):
            index -= 1
            chosen.append(index)
    chosen += [index for index, (_, line) in enumerate(lines) if _RETURN.match(line)]
    chosen = chosen or [index for index, (_, line) in enumerate(lines) if _PRINT.match(line)]
    return [_stripped(*lines[index]) for index in chosen]


def _stripped(start: int, line: str) -> Span:
    start += len(line) - len(line.lstrip())
    return start, start + len(line.strip())
