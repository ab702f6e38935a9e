"""Runs test code against proxies of a program's functions. Runs inside a sandbox of its own, where no program's code runs.

Test code that is more than plain asserts (HumanEval's ``check(candidate)``, loops, helpers) is executed here, with expected
values; each call of a proxy goes to the judge, which passes it on to the program's sandbox and returns the value it answered.
Requests come on descriptor 3, calls and the result leave on descriptor 4.
"""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable
from typing import Any

from akl_dist.sandbox.inside import codec

_STOPS = ("StopIteration", "StopAsyncIteration", "GeneratorExit")  # would end a loop of the test early and silently


class ProgramRaised(Exception):
    """The program raised something that is no ordinary built-in exception."""


class ProgramValue(Exception):
    """The program returned something that cannot be compared."""


class NotSendable(BaseException):
    """The tests pass what no message can hold: their fault, whatever they catch."""


class Judge:
    """The other end: makes calls and counts them."""

    def __init__(self) -> None:
        self.calls = 0

    def ask(self, message: dict) -> Any:
        self.calls += 1
        codec.write_message(4, message)
        reply = codec.read_message(3)
        if reply is None:
            os._exit(0)  # the judge has its verdict already
        if "object" in reply:
            return Held(self, reply["object"])
        if "value" in reply:
            return codec.decode(reply["value"])
        if "unsupported" in reply:
            raise ProgramValue(reply["unsupported"])
        kind = _built_in([reply["raised"], *reply["kinds"]])
        if kind is not None:
            raise kind(reply["message"])
        raise ProgramRaised(f"{reply['raised']}: {reply['message']}")

    def evaluate(self, number: int) -> Any:
        """The value of a call expression that the judge holds."""
        return self.ask({"call": "evaluate", "number": number})

    def apply(self, held: int | None, name: str, arguments: tuple, keywords: dict) -> Any:
        objects = {str(place): one._number for place, one in enumerate(arguments) if type(one) is Held}
        try:
            sent = codec.encode([None if type(one) is Held else one for one in arguments]), codec.encode(keywords)
        except codec.Unsupported as error:
            raise NotSendable(f"the tests pass {error} to {name}(), which cannot be sent") from None
        return self.ask({"call": "apply", "object": held, "name": name, "arguments": sent[0], "keywords": sent[1],
                         "objects": objects, "may_hold": held is not None or name[:1].isupper()})


def _built_in(names: list[str]) -> type[Exception] | None:
    """The built-in exception that the program's is, or derives from: its own classes are not known here."""
    for name in names:
        kind = getattr(builtins, name, None)
        if name in _STOPS or (kind is Exception and name != names[0]):
            return None
        if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError | ExceptionGroup):
            return kind
    return None


def function(judge: Judge, name: str) -> Callable[..., Any]:
    """Proxy of a function of the program."""
    return lambda *arguments, **keywords: judge.apply(None, name, arguments, keywords)


class Held:
    """Proxy of an object made by one of the program's classes: what the program answers for it are values, or objects again.

    It is asked for nothing that would tell the program what is expected: comparisons are not passed on.
    """

    def __init__(self, judge: Judge, number: int) -> None:
        self.__dict__.update(_judge=judge, _number=number)

    def _pass_on(self, name: str, *arguments: Any) -> Any:
        return self._judge.apply(self._number, name, arguments, {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._pass_on("__getattribute__", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._pass_on("__setattr__", name, value)

    @property
    def __call__(self) -> Callable[..., Any]:
        return lambda *arguments, **keywords: self._judge.apply(self._number, "__call__", arguments, keywords)

    def __getitem__(self, key: Any) -> Any:
        return self._pass_on("__getitem__", key)

    def __len__(self) -> int:
        return self._pass_on("__len__")

    def __iter__(self) -> Any:
        return self._pass_on("__iter__")

    def __repr__(self) -> str:
        return self._pass_on("__repr__")

    def __str__(self) -> str:
        return self._pass_on("__str__")

    def __bool__(self) -> bool:
        raise ProgramValue("an object has no truth value here")


def run(request: dict) -> dict:
    """Execute the test code; the result says which exception failed it, if any."""
    judge = Judge()
    names: dict[str, Any] = {"__name__": "tests", "__akl_call__": judge.evaluate}
    try:
        code = compile(request["definitions"], "<test definitions>", "exec", dont_inherit=True)
        tests = compile(request["tests"], "<tests>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return {"broken": f"the tests do not compile ({type(error).__name__})"}
    try:
        exec(code, names)  # noqa: S102
    except (Exception, SystemExit) as error:  # noqa: BLE001 (test code raises what it likes)
        return {"broken": f"the tests' definitions raise {type(error).__name__}: {str(error)[:200]}"}
    for name in request["functions"]:
        names[name] = function(judge, name)
    try:
        exec(tests, names)  # noqa: S102
    except NotSendable as error:
        return {"broken": str(error)}
    except (Exception, SystemExit) as error:  # noqa: BLE001 (test code raises what it likes)
        return {"failed": type(error).__name__, "message": str(error)[:200], "calls": judge.calls}
    return {"calls": judge.calls}


def main() -> None:
    request = codec.read_message(3)
    if request is None:
        return
    sys.argv = ["tests"]
    codec.write_message(4, run(request) | {"nonce": request["nonce"]})


if __name__ == "__main__":
    main()
    os._exit(0)
