"""A Python interpreter that keeps its names from one cell to the next. Runs inside the sandbox, in the cells' own process.

As in ``program_stage`` nothing here is trusted: a cell can do anything to this process, and its reply says no more than what the
cell could have written itself. Requests (descriptor 3) carry a number that nobody can guess and that the reply (descriptor 4)
repeats. What cells print goes to descriptor 1, outside the replies.
"""

from __future__ import annotations

import ast
import fcntl
import io
import os
import sys
import types

from akl_dist.sandbox.inside import codec
from akl_dist.sandbox.inside.program_stage import look_like

TYPE_CHECKING = False
if TYPE_CHECKING:  # not at run time: every program's start would pay for it
    from typing import Any

RAISED = (BaseException,)  # a cell may raise anything; it ends as an answer, not as this process
SCRIPT = "/box/main.py"
MAX_ERROR = 1000  # characters


def start() -> None:
    """Look like a script whose lines leave at once, so that a program that is killed has shown what it printed."""
    look_like(SCRIPT)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def fresh_names() -> dict[str, Any]:
    """The names of a new ``__main__`` module."""
    module = types.ModuleType("__main__")
    module.__dict__["__file__"] = SCRIPT
    sys.modules["__main__"] = module
    return module.__dict__


def execute(source: str, names: dict[str, Any]) -> None:
    """Run a cell as an interactive interpreter does: the value of an expression that comes last is shown, unless it is None."""
    tree = ast.parse(source, "main.py")
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    exec(compile(tree, "main.py", "exec", dont_inherit=True), names)  # noqa: S102 (what this sandbox is for)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "main.py", "eval", dont_inherit=True), names)  # noqa: S307
        sys.displayhook(value)


def described(error: BaseException) -> str:
    """The line a traceback ends with."""
    try:
        message = str(error)[:MAX_ERROR]
        return f"{type(error).__name__}: {message}" if message else str(type(error).__name__)
    except RAISED:
        return "an exception"


def _run(source: str, names: dict[str, Any]) -> str:
    """Run a cell to its end; the error that ended it, or ""."""
    try:
        execute(source, names)
        return ""
    except SystemExit as error:  # the cell ends, not the interpreter
        return "" if error.code in (None, 0) else described(error)
    except RAISED as error:
        return described(error)


def _flush() -> None:
    for stream in (sys.stdout, sys.__stdout__):
        try:
            if stream is not None:
                stream.flush()
        except RAISED:  # a cell may have put anything there
            continue


def main() -> None:
    requests = fcntl.fcntl(3, fcntl.F_DUPFD_CLOEXEC, 10)
    replies = fcntl.fcntl(4, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(3)
    os.close(4)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    start()
    names = fresh_names()
    read_message, write_message, process, getpid, leave = codec.read_message, codec.write_message, os.getpid(), os.getpid, os._exit
    while (request := read_message(requests)) is not None:
        error = _run(request["source"], names)
        _flush()
        if getpid() != process:  # a child that the cell forked has come to the cell's end
            leave(0)
        write_message(replies, {"error": error, "nonce": request["nonce"]})


if __name__ == "__main__":
    main()
    os._exit(0)
