"""Verdict on one response to a programming problem: extract, run isolated, compare out here.

The program runs in a sandbox (:mod:`akl_dist.sandbox`) that never holds an expected value: it is sent calls and inputs, and
what it returns comes back as exact built-in values, which this process compares. Meant to run inside a killable grader process
(:mod:`akl_dist.verify.grader`): ``judge`` names it there, :func:`pool_options` makes the pool's arguments.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from akl_dist.contract.records import Status, Verdict
from akl_dist.sandbox.client import Ended, Sandbox, SandboxFault
from akl_dist.sandbox.clock import STARVED, STRETCH
from akl_dist.sandbox.inside import codec
from akl_dist.sandbox.probe import prove
from akl_dist.sandbox.session import Session
from akl_dist.verify.code_extract import MAX_SOURCE, Source, extract_program
from akl_dist.verify.code_output import same_output
from akl_dist.verify.code_task import TEST_EXTRA_S, CodeSettings, CodeTask, make_plan, text_of
from akl_dist.verify.code_tests import VALUE, BadTests, Plan, TestRun, constructs, function_cases
from akl_dist.verify.code_values import TooMuch, evaluate, literal, same_value
from akl_dist.verify.grader import Item

CODE_JUDGE = "akl_dist.verify.code:judge"
SETTINGS_VARIABLE = "AKL_CODE_SETTINGS"
BUSY = f"the machine is too busy to tell: {STARVED}"
DOES_NOT_FIT = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError, MemoryError)
"""What comparing raises where the values are not of the kind the test expects."""


class _Wrong(Exception):
    """The program fails a test: the reason of its verdict."""


class _Ended(Exception):
    """The program ended, or broke the protocol, where an answer was due."""


class _Overrun(Exception):
    """The test code, not the program, ran past its limit or failed, or the machine is too busy to tell."""


class CodeJudge:
    """Judges programs, one after another. Owns one sandbox for programs and, once it is needed, one for test code.

    Raises:
        SandboxFault: this machine allows no isolation (and ``allow_unsandboxed`` is off), or a restriction does not hold.
    """

    def __init__(self, settings: CodeSettings | None = None) -> None:
        self.settings = settings or CodeSettings()
        self._programs = self._sandbox()
        self._tests: Sandbox | None = None
        self._tests_left_s = 0.0  # of all runs of test code in one judgement
        prove(self._programs)
        self.isolation = self._programs.isolation

    def _sandbox(self) -> Sandbox:
        return Sandbox(allow_unsandboxed=self.settings.allow_unsandboxed, packages=self.settings.packages)

    def close(self) -> None:
        for sandbox in (self._programs, self._tests):
            if sandbox is not None:
                sandbox.close()

    def judge(self, task: CodeTask) -> Verdict:
        """The verdict; never raises for a program or a task, however hostile.

        ``wrong`` carries as reason what ended the program (time_limit, memory, output, crash, exit) or the test it fails.
        ``error`` and ``timeout`` are this side's own faults, ``invalid_gold`` the tests'.
        """
        try:
            make_plan(task, "")  # before anything is read from tests that may not be usable
            entry, prompt = (text_of(task.tests, name) for name in ("entry_point", "prompt"))
            source = extract_program(task.completion, style=task.prompt_style, entry_point=entry.split("(")[0].split(".")[0],
                                     prompt=prompt, think_open=task.think_open)
            plan = make_plan(task, source.code if source else "")
        except BadTests as error:
            return Verdict(Status.INVALID_GOLD, reason=str(error)[:300])
        if source is None:
            return Verdict(Status.NO_ANSWER, reason="truncated" if task.truncated else "no code")
        if task.truncated or len(source.code) > MAX_SOURCE or not source.code.strip():
            reason = "truncated" if task.truncated else "no code" if not source.code.strip() else "unparseable: too long"
            return Verdict(Status.NO_ANSWER, source.code[:MAX_SOURCE], source.span, reason)
        try:
            status, reason = self._run(plan, task, source)
        except SandboxFault as error:
            self._restart()
            status, reason = Status.ERROR, str(error)
        return Verdict(status, source.code, source.span, reason[:300])

    def _restart(self) -> None:
        """After a fault of the sandbox: fresh ones. Where that fails too, the grader ends and its pool reports it."""
        self.close()
        self._programs, self._tests = self._sandbox(), None

    def _run(self, plan: Plan | None, task: CodeTask, source: Source) -> tuple[Status, str]:
        try:
            if task.prompt_style == "stdin_program":
                self._run_program(task, source)
            else:
                assert plan is not None
                self._run_functions(plan, task, source)
        except _Wrong as wrong:
            return Status.WRONG, str(wrong)
        except _Overrun as overrun:
            return Status.TIMEOUT if str(overrun).endswith(("time_limit", STARVED)) else Status.ERROR, str(overrun)
        except BadTests as error:
            return Status.INVALID_GOLD, str(error)
        return Status.OK, ""

    # --- programs that read standard input ----------------------------------------------------------------------------

    def _run_program(self, task: CodeTask, source: Source) -> None:
        remaining, patience = self.settings.total_s, time.monotonic() + STRETCH * self.settings.total_s
        for number, case in enumerate(task.tests["cases"]):
            limits = self.settings.limits
            if remaining <= 0:
                raise _Wrong("time_limit")
            if time.monotonic() > patience:
                raise _Overrun(BUSY)
            wanted = 2 * len(case["output"].encode("utf-8", "surrogatepass"))  # a right program may write what is expected of it
            limits = replace(limits, wall_s=min(limits.wall_s, remaining), output_bytes=max(limits.output_bytes, wanted))
            given = case["input"].encode("utf-8", "surrogatepass")
            finished = self._programs.run_script(source.code, stdin=given, limits=limits)
            remaining -= finished.ended.used_s
            if finished.ended.limit or finished.ended.status != 0:
                last = finished.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
                raise _Wrong(ending(finished.ended, last))
            if not same_output(finished.stdout.decode("utf-8", "replace"), case["output"]):
                raise _Wrong(f"failed: case {number}")

    # --- functions ---------------------------------------------------------------------------------------------------

    def _run_functions(self, plan: Plan, task: CodeTask, source: Source) -> None:
        session = Session(self._programs, "program_stage", self.settings.limits)
        self._tests_left_s = self.settings.limits.wall_s + TEST_EXTRA_S
        broken = False
        try:
            _value(session.ask({"kind": "load", "parts": [plan.before, source.code, plan.after]}))
            if plan.test_run is not None:
                self._run_tests(session, plan.test_run)
            elif plan.checks:
                self._run_checks(session, plan)
            else:
                _run_cases(session, task)
        except _Ended:
            broken = True
        finally:
            ended = session.end()
        if broken:
            raise _Wrong(ending(ended, "no answer to a test"))

    def _run_checks(self, session: Session, plan: Plan) -> None:
        for check in plan.checks:
            values = {}
            for number, call in enumerate(check.calls):
                values[VALUE.format(number)] = _value(session.ask({"kind": "evaluate", "expression": call, "may_hold": False}))
            try:
                _hold(lambda condition=check.condition, values=values: evaluate(condition, values), check.text)
            except TooMuch:  # more than this process computes: in the tests' sandbox it costs nobody anything
                try:
                    self._run_tests(session, TestRun(plan.before, check.source, (), check.calls))
                except _Overrun as overrun:
                    if str(overrun).endswith(STARVED):
                        raise
                    raise _Wrong(f"failed: {check.text}: {overrun}") from None

    def _run_tests(self, program: Session, run: TestRun) -> None:
        """Execute test code in the second sandbox and pass its calls on to the program's."""
        if self._tests is None:
            self._tests = self._sandbox()
        if self._tests_left_s <= 0:
            raise _Overrun("the test code: time_limit")
        limits = replace(self.settings.limits, wall_s=self._tests_left_s, cpu_s=self.settings.limits.cpu_s + int(TEST_EXTRA_S))
        tests = Session(self._tests, "test_stage", limits)
        result: dict[str, Any] | None = None
        try:
            nonce = tests.open({"definitions": run.definitions, "tests": run.tests, "functions": list(run.functions)})
            while (message := tests.receive()) is not None:
                if message.get("nonce") == nonce:
                    result = message
                    break
                tests.send(_pass_on(program, message, run))
        finally:
            ended = tests.end()
            self._tests_left_s -= ended.used_s
        if result is None:
            raise _Overrun("the test code: " + (ended.limit or f"ended with status {ended.status}"))
        if "broken" in result:
            raise BadTests(result["broken"])
        if result["calls"] == 0:
            raise BadTests(f"the tests never call the program ({result.get('failed', 'they end')})")
        if "failed" in result:
            raise _Wrong(f"failed: {result['failed']} {result['message']}".strip())


def ending(ended: Ended, what: str) -> str:
    """The reason of a program that ended by itself or at a limit.

    Raises:
        _Overrun: it was ended because the machine gave it too little time.
    """
    if ended.limit == STARVED:
        raise _Overrun(BUSY)
    if ended.limit:
        return ended.limit
    if "MemoryError" in what:
        return "memory"
    if ended.status is None:
        return f"protocol: {what}"
    if ended.status < 0:
        return f"crash: {signal.Signals(-ended.status).name}"
    return f"{'exit' if ended.status == 0 else 'crash'}: status {ended.status}, {what}"


def _value(reply: dict[str, Any] | None) -> Any:
    """The value of a reply, in exact built-in types."""
    if reply is None or "malformed" in reply:
        raise _Ended
    if isinstance(reply.get("raised"), str):
        kind = reply["raised"][:60]
        if kind == "MemoryError":
            raise _Wrong("memory")
        raise _Wrong(f"{'exit' if kind == 'SystemExit' else 'crash'}: {kind} {str(reply.get('message', ''))[:200]}".strip())
    if "value" not in reply:
        raise _Wrong(f"unsupported result: {str(reply.get('unsupported', ''))[:200]}")
    try:
        return codec.decode(reply["value"])
    except codec.Unsupported as error:
        raise _Wrong(f"unsupported result: {error}") from None


def _run_cases(session: Session, task: CodeTask) -> None:
    entry = task.tests["entry_point"]
    for number, (arguments, keywords, expected) in enumerate(function_cases(task.tests)):
        written = [*map(literal, arguments), *(f"{name}={literal(value)}" for name, value in keywords.items())]
        value = _value(session.ask({"kind": "evaluate", "expression": f"{entry}({', '.join(written)})", "may_hold": False}))
        _hold(lambda value=value, expected=expected: same_value(value, expected), f"case {number}")


def _hold(condition: Callable[[], Any], text: str) -> None:
    try:
        holds = bool(condition())
    except DOES_NOT_FIT as error:
        raise _Wrong(f"failed: {text}: {type(error).__name__}") from None
    if not holds:
        raise _Wrong(f"failed: {text}")


def _pass_on(program: Session, message: dict[str, Any], run: TestRun) -> dict[str, Any]:
    """One call of the test code, answered by the program."""
    if message.get("call") == "evaluate":
        call = run.calls[message["number"]]
        reply = program.ask({"kind": "evaluate", "expression": call, "may_hold": constructs(call)})
    else:
        wanted = {name: message[name] for name in ("object", "name", "arguments", "keywords", "objects", "may_hold")}
        reply = program.ask({"kind": "apply", **wanted})
    if reply is None or "malformed" in reply:
        raise _Ended
    if reply.get("raised") == "MemoryError":
        raise _Wrong("memory")
    if isinstance(reply.get("object"), int):
        return {"object": reply["object"]}
    if isinstance(reply.get("raised"), str):
        kinds = reply.get("kinds")
        kinds = [str(kind)[:60] for kind in kinds[:20]] if isinstance(kinds, list) else []
        return {"raised": reply["raised"][:60], "kinds": kinds, "message": str(reply.get("message", ""))[:200]}
    if "value" not in reply:
        return {"unsupported": str(reply.get("unsupported", ""))[:200]}
    return {"value": codec.encode(_value(reply))}


# --- in a grader process ---------------------------------------------------------------------------------------------

_judge: CodeJudge | None = None


def gold_text(prompt_style: str, tests: Mapping[str, Any]) -> str:
    """A task's tests as the gold of a prompt: JSON text."""
    return json.dumps({"prompt_style": prompt_style, "tests": dict(tests)}, sort_keys=True)


def judge(*, gold: str, response_text: str, truncated: bool, think_open: bool = False) -> Verdict:
    """The verdict on a whole response, in the form the grader pool calls. ``gold`` is :func:`gold_text`'s."""
    try:
        values = json.loads(gold)
        task = CodeTask(values["prompt_style"], response_text, values["tests"], truncated, think_open)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return Verdict(Status.INVALID_GOLD, reason=f"gold that is no task ({type(error).__name__})")
    return shared_judge().judge(task)


def shared_judge() -> CodeJudge:
    """This process's judge, started on first use with the settings of the environment."""
    global _judge
    if _judge is None:
        _judge = CodeJudge(CodeSettings.from_json(os.environ.get(SETTINGS_VARIABLE, "{}")))
    return _judge


def isolation() -> str:
    """The form of isolation in which this process runs programs."""
    return shared_judge().isolation


def warm_up() -> None:
    """Start the sandboxes and prove their restrictions before the first timed judgement."""
    shared_judge()


_ADD = gold_text("instruct_function", {"entry_point": "add", "asserts": ["assert add(2, 3) == 5", "assert add(-1, 1) == 0"]})
PROBES: tuple[tuple[Item, Status], ...] = (
    (Item(_ADD, "```python\ndef add(a, b):\n    return a + b\n```", False), Status.OK),
    (Item(_ADD, "```python\ndef add(a, b):\n    return a - b\n```", False), Status.WRONG),
    (Item(_ADD, "```python\nimport sys\nsys.exit(0)\n```", False), Status.WRONG),
)
"""Known-right and known-wrong programs that every grader judges before it is used."""


def pool_options(settings: CodeSettings | None = None) -> dict[str, Any]:
    """Arguments of :class:`akl_dist.verify.grader.GraderPool` for judging programs."""
    settings = settings or CodeSettings()
    return {"judge": CODE_JUDGE, "probes": PROBES, "timeout_s": settings.timeout_s,
            "environment": {SETTINGS_VARIABLE: settings.to_json()}}
