"""From a response to the program to be judged: one fence parser and one assembly of prompt and completion, used everywhere.

Nothing is executed. Standard library only. Prompt styles:

``instruct_function``   the response holds a function, in a fence or bare
``humaneval_completion`` the response continues the prompt (or repeats or fences it)
``stdin_program``       the response holds a program that reads standard input
"""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
import warnings
from dataclasses import dataclass

from akl_dist.contract.fences import OPENS, PYTHON_TAGS, Block, Span, blocks
from akl_dist.verify.segments import final_section

STYLES = ("instruct_function", "humaneval_completion", "stdin_program")
MAX_PARSED = 1_500_000  # characters parsed in all while looking for the longest piece that is Python
MAX_SOURCE = 100_000  # characters; no program for these tasks is longer

_READS_INPUT = re.compile(r"\binput\s*\(|\bstdin\b|\bopen\s*\(\s*0\b")
_STARTS_CODE = re.compile(r"^(?:def|class|async def|import|from|@)\b", re.MULTILINE)
_CLOSES_LATE = re.compile(r"(?<=\S)(?:```|~~~)[ \t\r]*$", re.MULTILINE)  # a block that is closed behind its last line of code
_BUILTINS = frozenset(dir(builtins))


@dataclass(frozen=True)
class Source:
    """A program to be judged, and which part of the response it was taken from."""

    code: str
    span: Span


def parse(code: str) -> ast.Module | None:
    """The syntax tree, None if the text is no Python. Never executes anything and never raises."""
    if len(code) > MAX_SOURCE or "\0" in code:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def defined(tree: ast.Module) -> set[str]:
    """Names that top-level statements bind."""
    names: set[str] = set()
    for node in tree.body:
        names |= statement_names(node)
    return names


def statement_names(node: ast.stmt) -> set[str]:
    """Names one top-level statement binds (definitions, imports, plain assignments, also inside top-level if and try)."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    if isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
        inner = [child for child in ast.walk(node) if isinstance(child, ast.stmt) and child is not node]
        return set().union(*map(statement_names, inner)) if inner else set()
    return set()


def free_names(node: ast.AST) -> set[str]:
    """Names a piece of code loads and does not bind anywhere in itself, builtins left out."""
    loads, binds = set(), set()
    for child in ast.walk(node):
        if isinstance(child, ast.Name):
            (loads if isinstance(child.ctx, ast.Load) else binds).add(child.id)
        elif isinstance(child, ast.arg):
            binds.add(child.arg)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            binds.add(child.name)
        elif isinstance(child, ast.alias):
            binds.add((child.asname or child.name).split(".")[0])
    return loads - binds - _BUILTINS


def extract_program(
    text: str, *, style: str, entry_point: str = "", prompt: str = "", think_open: bool = False
) -> Source | None:
    """The program of a response, None where there is none.

    Args:
        text: the response, think markers included.
        style: one of STYLES.
        entry_point: the function (or class) that the tests call.
        prompt: the code that a completion continues.
        think_open: the prompt ended with an opened think section.

    Raises:
        ValueError: unknown style.
    """
    if style not in STYLES:
        raise ValueError(f"prompt_style: got {style!r}; expected one of {', '.join(STYLES)}.")
    section = final_section(text, think_open=think_open)
    if section is None or not text[section[0]:section[1]].strip():
        return None
    if style == "humaneval_completion":
        return _completion(text, section, entry_point, prompt)
    if style == "stdin_program":
        return _program(text, section)
    return _function(text, section, entry_point, prompt)


def _python_blocks(text: str, section: Span) -> list[Block]:
    """Blocks that may be Python: those that say so, else the ones without a language."""
    found = [block for block in blocks(text, section) if block.code.strip()]
    tagged = [block for block in found if block.tag in PYTHON_TAGS]
    return tagged or [block for block in found if block.tag == ""]


def _readable(code: str) -> tuple[str, ast.Module | None]:
    """The code, without a common indent or what follows a fence at the end of a line, where only that makes it Python."""
    late = _CLOSES_LATE.search(code)
    for text in (code, code[: late.start()] if late else code):
        for readable in dict.fromkeys((text, textwrap.dedent(text))):
            tree = parse(readable)
            if tree is not None:
                return readable, tree
    return code, None


def _function(text: str, section: Span, entry_point: str, prompt: str) -> Source | None:
    """The last block that defines the entry point, with what it needs from the other blocks and the prompt."""
    found = [(block, *_readable(block.code)) for block in _python_blocks(text, section)]
    if not found:
        bare = _bare(text, section, entry_point)
        if bare is None:
            return None
        found = [(Block("", bare.code, bare.span), bare.code, parse(bare.code))]
    mentions = re.compile(rf"\b(?:def|class)\s+{re.escape(entry_point)}\b|^{re.escape(entry_point)}\s*=", re.MULTILINE)
    parsed = [one for one in found if one[2] is not None and (not entry_point or entry_point in defined(one[2]))]
    broken = [one for one in found if one[2] is None and mentions.search(one[1])]
    chosen, code, tree = (parsed or broken or found)[-1]
    if tree is None:
        return Source(code, chosen.span)
    others = [(other, other_tree) for block, other, other_tree in found if block is not chosen and other_tree is not None]
    prompt_tree = parse(prompt) or parse(prompt + "\n    pass\n")
    if prompt_tree is not None:
        others.insert(0, (prompt if parse(prompt) else prompt + "\n    pass\n", prompt_tree))
    return Source(_with_missing(code, tree, others), chosen.span)


def _with_missing(code: str, tree: ast.Module, others: list[tuple[str, ast.Module]]) -> str:
    """The code, preceded by definitions of names it lacks that stand elsewhere in the response."""
    before: list[str] = []
    have, missing = defined(tree), free_names(tree)
    for other, other_tree in reversed(others):
        parts = []
        for node in other_tree.body:
            names = statement_names(node)
            if names & (missing - have) and isinstance(node, DEFINITIONS):
                parts.append(segment(other, node))
                missing |= free_names(node)
        for node in other_tree.body:
            have |= statement_names(node)
        before = parts + before
    return "\n".join([*before, code])


DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)


def segment(source: str, node: ast.stmt) -> str:
    """The text of a statement, decorators included."""
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
    return "\n".join(source.split("\n")[first - 1:node.end_lineno])


def _bare(text: str, section: Span, entry_point: str) -> Source | None:
    """Code without a fence: the whole section, or what of it follows the first line that looks like code."""
    body = text[section[0]:section[1]]
    starts = [0, *(match.start() for match in _STARTS_CODE.finditer(body))][:3]
    work = MAX_PARSED
    for start in starts:
        lines = body[start:].split("\n")
        for end in range(len(lines), max(0, len(lines) - 40), -1):
            code = "\n".join(lines[:end])
            work -= len(code)
            tree = parse(code) if work > 0 else None
            if tree is not None and tree.body and (entry_point in defined(tree) if entry_point else _looks_like_code(tree)):
                return Source(code, (section[0] + start, section[0] + start + len(code)))
    return None


def _looks_like_code(tree: ast.Module) -> bool:
    """More than names and constants: a word or a number alone is Python as well."""
    return any(not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call) for node in tree.body)


def _program(text: str, section: Span) -> Source | None:
    """The last block that reads input, else the last one that is Python."""
    found = [(block, *_readable(block.code)) for block in _python_blocks(text, section)]
    if not found:
        return _bare(text, section, "")
    parsed = [one for one in found if one[2] is not None]
    reading = [one for one in parsed if _READS_INPUT.search(one[1])]
    block, code, _ = (reading or parsed or found)[-1]
    return Source(code, block.span)


def _completion(text: str, section: Span, entry_point: str, prompt: str) -> Source | None:
    """The prompt continued: by the response itself, by a fenced body, or by a fenced repetition of the function."""
    found = _python_blocks(text, section)
    first = text[section[0]:section[1]].lstrip("\r\n")
    continues = first[:1] in (" ", "\t") and not OPENS.match(first.split("\n", 1)[0])
    if found and not continues:
        function = _function(text, section, entry_point, prompt)
        tree = parse(function.code) if function else None
        if function and tree is not None and entry_point in defined(tree):
            return function
        block = found[-1]
        body = block.code if block.code.lstrip("\r\n")[:1] in (" ", "\t") else textwrap.indent(block.code, "    ")
        return Source(prompt + body, block.span) if parse(prompt + body) is not None else function
    start, end = section
    fence = re.search(r"^[ \t]*(?:```|~~~)", text[start:end], re.MULTILINE)
    if fence and continues:
        end = start + fence.start()
    repeated = parse(text[start:end])
    if repeated is not None and entry_point in defined(repeated):
        return _function(text, section, entry_point, prompt)
    return Source(_cut(prompt, text[start:end], entry_point), (start, end))


def _cut(prompt: str, completion: str, entry_point: str) -> str:
    """Prompt and completion up to where the model goes on to something else than definitions."""
    lines = completion.split("\n")
    work = MAX_PARSED
    for end in range(len(lines), 0, -1):
        if end < len(lines) and lines[end][:1] in ("", " ", "\t"):
            continue  # cut in front of a line at the margin only
        work -= len(prompt) + sum(map(len, lines[:end]))
        if work < 0:
            break
        tree = parse(prompt + "\n".join(lines[:end]))
        if tree is not None:
            return _definitions(prompt + "\n".join(lines[:end]), tree, entry_point)
    return prompt + completion


def _definitions(source: str, tree: ast.Module, entry_point: str) -> str:
    """The source without top-level statements that follow the entry point and define nothing, or define it again."""
    place = next((i for i, node in enumerate(tree.body) if entry_point in statement_names(node)), len(tree.body))
    kept = [
        node for i, node in enumerate(tree.body)
        if i <= place or (isinstance(node, DEFINITIONS)
                          and not (isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == entry_point))
    ]
    if len(kept) == len(tree.body):
        return source
    return "\n".join(segment(source, node) for node in kept) + "\n"
