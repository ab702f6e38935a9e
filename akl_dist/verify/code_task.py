"""A programming problem as the code verifier takes it, the limits it is judged under, and the plan its tests make."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from akl_dist.sandbox.client import DEFAULT_PACKAGES, MARGIN_S
from akl_dist.sandbox.clock import STRETCH
from akl_dist.sandbox.limits import Limits
from akl_dist.verify.code_extract import STYLES
from akl_dist.verify.code_tests import BadTests, Plan, function_cases, plan_asserts, plan_check

TEST_EXTRA_S = 1.0  # test code may take this much longer than the program it tests


@dataclass(frozen=True)
class CodeTask:
    """One judgement. ``tests`` holds the columns of a data set:

    ``asserts`` (list of statements) or ``test`` (code with ``check(candidate)``), with ``entry_point``, ``setup``, ``prompt``;
    ``inputs``/``expected`` or ``cases`` (lists of arguments and values) with ``entry_point``; for programs ``cases`` of
    ``input`` and ``output`` text.
    """

    prompt_style: str
    completion: str
    tests: Mapping[str, Any]
    truncated: bool = False
    think_open: bool = False


@dataclass(frozen=True)
class CodeSettings:
    """How programs are judged. ``total_s`` bounds all runs of one judgement together, as ``limits.wall_s`` bounds each."""

    limits: Limits = field(default_factory=Limits)
    total_s: float = 30.0
    packages: tuple[str, ...] = DEFAULT_PACKAGES
    allow_unsandboxed: bool = False

    @property
    def timeout_s(self) -> float:
        """Wall clock for the grader of one judgement: above every limit nested in it."""
        return STRETCH * (self.total_s + self.limits.wall_s + TEST_EXTRA_S) + 2 * MARGIN_S

    @classmethod
    def from_json(cls, text: str) -> CodeSettings:
        values = json.loads(text)
        limits, packages = Limits(**values.pop("limits", {})), tuple(values.pop("packages", DEFAULT_PACKAGES))
        return cls(limits=limits, packages=packages, **values)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def make_plan(task: CodeTask, program: str) -> Plan | None:
    """What to run for a task; None for programs that read standard input, whose cases are only checked here.

    Raises:
        BadTests: the task cannot judge any program.
    """
    if task.prompt_style not in STYLES:
        raise BadTests(f"prompt_style {task.prompt_style!r}, expected one of {', '.join(STYLES)}")
    tests = task.tests
    if not isinstance(tests, Mapping) or not isinstance(task.completion, str):
        raise BadTests("tests that are no object, or a completion that is no text")
    entry, prompt, setup, test = (text_of(tests, name) for name in ("entry_point", "prompt", "setup", "test"))
    if task.prompt_style == "stdin_program":
        cases = tests.get("cases")
        if not isinstance(cases, list) or not cases or not all(
            isinstance(case, dict) and isinstance(case.get("input"), str) and isinstance(case.get("output"), str) for case in cases
        ):
            raise BadTests("cases that are not a list of input and output texts")
        return None
    if test:
        return plan_check(test, entry_point=entry, prompt=prompt, setup=setup, program=program)
    asserts = tests.get("asserts")
    if asserts:
        if not isinstance(asserts, list):
            raise BadTests("asserts that are no list")
        return plan_asserts(asserts, setup=setup, entry_point=entry, prompt=prompt, program=program)
    function_cases(tests)
    if not entry:
        raise BadTests("cases without an entry_point")
    return Plan("", "")


def text_of(tests: Mapping[str, Any], name: str) -> str:
    """A column that is text or absent.

    Raises:
        BadTests: it is something else.
    """
    value = tests.get(name) or ""
    if not isinstance(value, str):
        raise BadTests(f"{name} that is no text")
    return value
