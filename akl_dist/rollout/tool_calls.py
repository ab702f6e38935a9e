"""How a turn calls the Python tool, and when a turn is void. Pure functions of the turn's text.

Styles of a call:

``fenced``  the last thing in the turn (white space aside) is a closed code block whose language is Python::

                ```python
                print(6 * 7)
                ```

``hermes``  the turn holds one ``<tool_call>{"name": "python", "arguments": {"code": "print(6 * 7)"}}</tool_call>`` (the format
            of Qwen's and Hermes' templates).

What stands inside a think section that was closed again is no call: the model went on without it. A think section that is still
open where the turn ends with a call is a call in the middle of reasoning, and counts.

A turn is *void* where it neither calls nor answers: the model stopped with nothing to go on with. A turn answers when what follows
its last ``</think>`` is not blank, or, without a think section, when it holds a marker: ``\\boxed``, ``<answer>``, ``####``,
"answer is", "Answer:", and for ``hermes``, where it is no call, a closed code block. A think section that is never closed answers
nothing.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from akl_dist.contract.fences import PYTHON_TAGS, blocks

STYLES = ("fenced", "hermes")
TOOL = "python"
OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
THINK, END_THINK = "<think>", "</think>"

_ANSWER = re.compile(
    r"\\(?:boxed|fbox)(?![A-Za-z])|<answer>|(?<!#)####(?!#)|\banswer\b[*_ \t]*(?:is\b|:|=)", re.IGNORECASE
)


@dataclass(frozen=True)
class Call:
    """A call of the tool: the program, or what is wrong with the call (for the model to read)."""

    code: str
    mistake: str = ""


def parse_call(turn: str, *, style: str) -> Call | None:
    """The call of a turn, None where it makes none. Never raises for a turn, however malformed.

    Raises:
        ValueError: unknown style.
    """
    if style not in STYLES:
        raise ValueError(f"rollout.tools.call: got {style!r}; expected one of {', '.join(STYLES)}.")
    return _fenced(turn) if style == "fenced" else _hermes(turn)


def is_void(turn: str, *, style: str, think_open: bool = False) -> bool:
    """Whether a turn neither calls the tool nor answers. ``think_open``: it began inside reasoning."""
    return parse_call(turn, style=style) is None and not _answers(turn, style, think_open)


def _answers(turn: str, style: str, think_open: bool) -> bool:
    _, closed, rest = turn.rpartition(END_THINK)
    if THINK in rest or (think_open and not closed):
        return False
    if closed:
        return bool(rest.strip())
    return bool(_ANSWER.search(rest)) or (style == "hermes" and any(block.closed for block in blocks(rest, (0, len(rest)))))


def _fenced(turn: str) -> Call | None:
    found = blocks(turn, (0, len(turn)))
    if not found or not found[-1].closed or found[-1].tag not in PYTHON_TAGS:
        return None
    _, _, after = turn[found[-1].span[1]:].partition("\n")  # the first line is the fence that closes the block
    return None if after.strip() else Call(found[-1].code)


def _hermes(turn: str) -> Call | None:
    start = turn.rfind(END_THINK)
    rest = turn[start + len(END_THINK):] if start >= 0 else turn
    thinking = rest.find(THINK)
    if thinking >= 0:
        if not rest.rstrip().endswith(CLOSE_CALL):
            rest = rest[:thinking]
        else:
            rest = rest[max(thinking, rest.rfind(OPEN_CALL)):]
    opened = rest.count(OPEN_CALL)
    if not opened:
        return None
    if opened > 1:
        return Call("", f"CallError: {opened} tool calls in one turn; expected one. Put everything into one program.")
    body, closed, _ = rest.partition(OPEN_CALL)[2].partition(CLOSE_CALL)
    if not closed:
        return Call("", f"CallError: the tool call is not closed; expected {CLOSE_CALL}.")
    return _read(body)


def _read(body: str) -> Call:
    """The program of a call's JSON."""
    expected = f'expected {{"name": "{TOOL}", "arguments": {{"code": "..."}}}}.'
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        return Call("", f"CallError: the tool call is no JSON ({error}); {expected}")
    if not isinstance(call, dict):
        return Call("", f"CallError: the tool call is no JSON object; {expected}")
    if call.get("name") != TOOL:
        return Call("", f"CallError: there is no tool {str(call.get('name'))[:80]!r}; {expected}")
    arguments = call.get("arguments")
    code = arguments.get("code") if isinstance(arguments, dict) else None
    if not isinstance(code, str):
        return Call("", f"CallError: the tool call has no program under arguments.code; {expected}")
    return Call(code)
