"""The environment process: reads requests from stdin, answers each in order on stdout, one length-prefixed JSON message each.

Started by :mod:`akl_dist.rollout.environment_pool` as ``python -m akl_dist.rollout.environment_main SPEC PARENT_PID`` (SPEC: JSON
with ``environment`` and ``params``); it imports neither torch nor ray. It waits only for its parent's next message; the parent ends
it by SIGKILL or by closing the pipe, and the kernel kills it when the parent's thread that started it ends. What environments print
goes to stderr, and their stdin is empty, so that both streams carry messages only.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import math
import os
import resource
import sys
from collections.abc import Mapping
from typing import Any

from akl_dist.contract.errors import AklError, UserError
from akl_dist.contract.process import die_with_parent
from akl_dist.rollout.environment import PYTHON, Environment, Step, Task
from akl_dist.sandbox.inside import codec

RAISED = (Exception, SystemExit)  # a class of the user's may raise anything: it fails one response, not this process
METHODS = ("reset", "step", "close")


def load(environment: str) -> type[Environment]:
    """The class that ``rollout.tools.environment`` names.

    Raises:
        UserError: no such module or class, or a class without the methods of an environment.
    """
    path = PYTHON if environment == "python" else environment
    module_name, _, class_name = path.partition(":")
    if not module_name or not class_name:
        raise _refusal(environment, f"{environment!r}", "python, or module:Class", "Write the class after a colon.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        remedy = "Start the command in the folder that holds the module, or put that folder on PYTHONPATH."
        raise _refusal(environment, f"no module named {error.name!r}", "a module that can be imported", remedy) from error
    except RAISED as error:
        raise _refusal(environment, f"{_described(error)} on import", "a module without errors", "Mend the module.") from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        raise _refusal(environment, f"no class {class_name!r} in {module_name}", "a class of that module", "Mend its name.")
    missing = [name for name in METHODS if not callable(getattr(found, name, None))]
    if missing:
        raise _refusal(environment, f"a class without {', '.join(missing)}", f"the methods {', '.join(METHODS)}",
                       "See docs/tools.md for the protocol.")
    return found


def check_params(environment: str, kind: type[Environment], params: Mapping[str, Any]) -> None:
    """Hold the class's signature against ``rollout.tools.params`` without making one. Raises UserError where they do not fit."""
    with contextlib.suppress(ValueError):  # a class without a signature is left to :func:`make`
        try:
            inspect.signature(kind).bind(**params)
        except TypeError as error:
            expected = f"a class that takes {dict(params)}"
            raise _refusal(environment, f"{error}", expected, "Correct rollout.tools.params.") from error


def make(environment: str, kind: type[Environment], params: dict[str, Any]) -> Environment:
    """An environment, made with ``rollout.tools.params``.

    Raises:
        UserError: the class refuses the parameters, or raises while it is made.
    """
    try:
        return kind(**params)
    except AklError:
        raise
    except TypeError as error:
        raise _refusal(environment, f"{error}", f"a class that takes {params}", "Correct rollout.tools.params.") from error
    except RAISED as error:
        raise _refusal(environment, f"{_described(error)} when it was made", "a working class", "Mend the class.") from error


def _refusal(environment: str, got: str, expected: str, remedy: str) -> UserError:
    return UserError(f"rollout.tools.environment={environment}", got=got, expected=expected, remedy=remedy, stage="rollout")


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:1000]


def step_fields(step: Any) -> dict[str, Any]:
    """The fields of a step as JSON holds them.

    Raises:
        TypeError, ValueError: it is no :class:`Step`, or holds a field of another type, or a score that is no finite number.
    """
    if not isinstance(step, Step):
        raise TypeError(f"step() returned {type(step).__name__}; expected akl_dist.rollout.environment.Step")
    if not isinstance(step.observation, str | None):
        raise TypeError(f"Step.observation is {type(step.observation).__name__}; expected text or None")
    score = None if step.score is None else float(step.score)
    if score is not None and not math.isfinite(score):
        raise ValueError(f"Step.score is {score}; expected a finite number or None")
    flags = {name: bool(getattr(step, name)) for name in ("call", "failed", "void")}
    return {"observation": step.observation, "score": score, **flags}


class Worker:
    """The environments of this process, by the key of their rollout."""

    def __init__(self, environment: str, params: dict[str, Any]) -> None:
        self._environment, self._params = environment, params
        self._kind = load(environment)
        self._spare: Environment | None = make(environment, self._kind, params)  # proves the parameters; the first rollout's
        isolation = getattr(self._spare, "isolation", None)
        self.isolation = isolation if isinstance(isolation, str) else None  # in which it runs programs, if it does
        self._live: dict[str, Environment] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what is asked; what an environment raises is its own rollout's fault."""
        try:
            return getattr(self, "_" + request["do"])(request)
        except RAISED as error:
            return {"fault": _described(error)}

    def _open(self, request: dict[str, Any]) -> dict[str, Any]:
        made, self._spare = self._spare, None
        made = made or make(self._environment, self._kind, self._params)
        self._live[request["key"]] = made
        made.reset(Task(**request["task"]))
        return {}

    def _step(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"step": step_fields(self._live[request["key"]].step(request["turn"]))}

    def _close(self, request: dict[str, Any]) -> dict[str, Any]:
        live = self._live.pop(request["key"], None)
        if live is not None:
            live.close()
        return {}


def main() -> None:
    spec, parent_pid = json.loads(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent_pid)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    try:
        worker = Worker(spec["environment"], spec["params"])
    except AklError as error:
        refused = {name: getattr(error, name) for name in ("subject", "got", "expected", "remedy")}
        codec.write_message(replies, {"refused": refused})
        return
    process = os.getpid()
    codec.write_message(replies, {"ready": process, "isolation": worker.isolation})
    while (request := codec.read_message(requests)) is not None:
        answer = worker.answer(request)
        if os.getpid() != process:  # a child that an environment forked has come back from its method: one process answers, not two
            os._exit(0)
        codec.write_message(replies, answer)


if __name__ == "__main__":
    main()
