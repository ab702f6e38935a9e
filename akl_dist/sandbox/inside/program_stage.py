"""Runs a program's module and answers calls of its functions. Runs inside the sandbox, in the program's own process.

The program can do anything to this process, so nothing here is trusted: what is answered is only ever what the program could
have returned. Each request carries a number that nobody can guess and that its reply repeats, so replies written in advance are
no replies. Requests (descriptor 3) hold calls and their arguments, never what is expected of them.
"""

from __future__ import annotations

import fcntl
import os
import sys
import types

from akl_dist.sandbox.inside import codec

TYPE_CHECKING = False
if TYPE_CHECKING:  # not at run time: every program's start would pay for it
    from collections.abc import Callable
    from typing import Any

RAISED = (BaseException,)  # a program may raise anything, SystemExit included; it ends as an answer, not as this process


class Program:
    """The module of one program and the objects that tests hold on to."""

    def __init__(self) -> None:
        self.module = types.ModuleType("solution")
        sys.modules["solution"] = self.module
        self.names = self.module.__dict__
        self.names["__file__"] = "/box/solution.py"
        self.objects: list[Any] = []

    def load(self, request: dict) -> dict:
        for part in request["parts"]:
            exec(compile(part, "/box/solution.py", "exec", dont_inherit=True), self.names)  # noqa: S102 (what this sandbox is for)
        return {"value": codec.encode(None)}

    def evaluate(self, request: dict) -> dict:
        value = eval(compile(request["expression"], "<test>", "eval", dont_inherit=True), self.names)  # noqa: S307
        return self._reply(value, request["may_hold"])

    def apply(self, request: dict) -> dict:
        """Call a function (or a method of an object made before) on decoded arguments."""
        if request["object"] is None:
            function = self.names[request["name"]]
        else:
            function = getattr(self.objects[request["object"]], request["name"])
        arguments, keywords = codec.decode(request["arguments"]), codec.decode(request["keywords"])
        for place, number in request["objects"].items():
            arguments[int(place)] = self.objects[number]
        return self._reply(function(*arguments, **keywords), request["may_hold"])

    def _reply(self, value: Any, may_hold: bool) -> dict:
        """The value, or for an object of a class of the program, where the test may hold one, its number."""
        try:
            return {"value": codec.encode(value)}
        except codec.Unsupported:
            if not may_hold:
                raise
        self.objects.append(value)
        return {"object": len(self.objects) - 1}


def answer(handler: Callable[[dict], dict], request: dict) -> dict:
    """The reply to one request, whatever the program does short of ending the process."""
    try:
        return handler(request)
    except codec.Unsupported as error:
        return {"unsupported": str(error)[:200]}
    except RAISED as error:
        try:
            kinds = [kind.__name__ for kind in type(error).__mro__[:20]]
            return {"raised": type(error).__name__, "kinds": kinds, "message": str(error)[:200]}
        except RAISED:
            return {"raised": "an exception", "message": ""}


def look_like(script: str) -> None:
    """Have this process look to its program as if Python had been started with a script of the private folder."""
    stages = os.environ.get("AKL_STAGES", "/akl")
    sys.path[:] = [path for path in sys.path if path != stages and not path.startswith(f"{stages}/akl_dist")]
    sys.path.insert(0, os.getcwd())
    os.environ.pop("AKL_STAGES", None)
    os.environ.pop("PYTHONPATH", None)
    sys.argv = [script]
    for name in [name for name in sys.modules if name.split(".")[0] == "akl_dist"]:
        del sys.modules[name]


def main() -> None:
    requests = fcntl.fcntl(3, fcntl.F_DUPFD_CLOEXEC, 10)
    replies = fcntl.fcntl(4, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(3)
    os.close(4)
    program = Program()
    handlers = {"load": program.load, "evaluate": program.evaluate, "apply": program.apply}
    look_like("/box/solution.py")
    read_message, write_message = codec.read_message, codec.write_message
    while (request := read_message(requests)) is not None:
        reply = answer(handlers[request["kind"]], request)
        reply["nonce"] = request["nonce"]
        write_message(replies, reply)


if __name__ == "__main__":
    main()
    os._exit(0)  # what the program left behind (atexit, __del__, threads) has nothing to say any more
