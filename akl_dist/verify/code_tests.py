"""Splits tests into what the program computes and what is expected of it. Pure: nothing is executed here.

``assert f(1, [2]) == 5`` becomes the call ``f(1, [2])``, which goes to the program's sandbox, and the comparison ``value == 5``,
which stays with the judge. Test code that is more than such asserts becomes the source of a test run, with the calls replaced.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from akl_dist.verify.code_extract import free_names, parse, segment, statement_names
from akl_dist.verify.code_values import supported

_BUILTINS = frozenset(dir(builtins))
VALUE = "__akl_{}__"  # name of the n-th value in a comparison
_CUSTOMARY = {
    **{name: f"import {name}" for name in (
        "bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools", "json",
        "math", "numpy", "operator", "re", "statistics", "string", "sys")},
    **{name: f"from collections import {name}" for name in ("Counter", "OrderedDict", "defaultdict", "deque")},
    "np": "import numpy as np", "isclose": "from math import isclose", "Decimal": "from decimal import Decimal",
    "Fraction": "from fractions import Fraction", "reduce": "from functools import reduce", "deepcopy": "from copy import deepcopy",
}
"""What tests use without importing it, as MBPP's do: theirs, or a program could define its own ``math.isclose`` and be asked."""


class BadTests(ValueError):
    """Tests that cannot judge anything: empty, not Python, or without a call of the program."""


@dataclass(frozen=True)
class Check:
    """One assert: ``calls`` (source text of expressions for the program) and ``condition`` over their values.

    ``source`` is the same as test code, for conditions that turn out to cost more than the judge computes itself.
    """

    calls: tuple[str, ...]
    condition: ast.expr
    text: str

    @property
    def source(self) -> str:
        values = {VALUE.format(number): f"__akl_call__({number})" for number in range(len(self.calls))}
        lines = [f"{name} = {call}" for name, call in values.items()]
        return "\n".join([*lines, f"assert {ast.unparse(self.condition)}"])


@dataclass(frozen=True)
class TestRun:
    """Test code for a sandbox of its own: ``definitions`` first, then ``tests``, with proxies for ``functions``."""

    definitions: str
    tests: str
    functions: tuple[str, ...]
    calls: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """What to run: ``before`` and ``after`` the program's own code in its module, then the checks or the test run."""

    before: str
    after: str
    checks: tuple[Check, ...] = ()
    test_run: TestRun | None = None


def plan_asserts(asserts: Sequence[str], *, setup: str, entry_point: str, prompt: str, program: str) -> Plan:
    """The plan for MBPP-style tests.

    Args:
        asserts: assert statements, or any test code.
        setup: code the tests need, run after the program; what only the tests need stays out of the program's sandbox.
        entry_point: the name the tests call; "" takes it from them.
        prompt: code whose helpers the tests may use.
        program: the code to be judged; only read for which names it lacks.

    Raises:
        BadTests: as its description says.
    """
    statements = [(node, text) for text in asserts for node in _parsed(text, "test").body]
    if not statements:
        raise BadTests("no tests")
    given = [*_helpers(prompt, entry_point), *((node, setup) for node in _parsed(setup, "setup").body)]
    nodes = [node for node, _ in statements]
    bound = bound_names(nodes)
    given = _customary(nodes, entry_point, {*bound, *(name for node, _ in given for name in statement_names(node))}) + given
    trusted, foreign_setup = _split_setup(given, entry_point)
    known = {name for node, _ in trusted for name in statement_names(node)}
    entries = {entry_point} if entry_point else _entries(nodes, known | bound)
    if entry_point:
        _refuse_foreign_judges(nodes, entry_point, known | bound)
    finder = _Finder(known, entries, bound)
    checks: list[Check] = []
    tree = parse(program)
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)} if tree is not None else set()
    for node in nodes:
        check = finder.check(node) if isinstance(node, ast.Assert) else None
        if check is None or any(constructs(call) and call.split("(")[0] in classes for call in check.calls):  # no value comes back
            break
        checks.append(check)
    foreign = [segment(text, node) for node, text in foreign_setup]
    if len(checks) == len(statements):
        if not any(check.calls for check in checks):
            raise BadTests("the tests never call the program")
        wanted = [ast.parse(call) for check in checks for call in check.calls] + [node for node, _ in foreign_setup]
        before, after = _needed(trusted, wanted, program)
        return Plan(before, "\n".join([after, *foreign]), checks=tuple(checks))
    calls: list[str] = []
    tests = "\n".join(ast.unparse(finder.replace(node, calls)) for node in nodes)
    if not calls and not any(free_names(node) & entries for node in nodes):
        raise BadTests("the tests never call the program")
    wanted = [*(ast.parse(call) for call in calls), *(node for node, _ in foreign_setup)]
    before, after = _needed(trusted, wanted, program)
    definitions = "\n".join(segment(text, node) for node, text in trusted)
    functions = sorted(set().union(*map(free_names, nodes), entries) - known - bound)
    run = TestRun(definitions, tests, tuple(functions), tuple(calls))
    return Plan(before, "\n".join([after, *foreign]), test_run=run)


def plan_check(test: str, *, entry_point: str, prompt: str, setup: str, program: str) -> Plan:
    """The plan for HumanEval-style tests: code that defines ``check(candidate)``, executed where no program's code is."""
    tree = _parsed(test, "test")
    if not entry_point:
        raise BadTests("check(candidate) without an entry_point")
    if not any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body):
        raise BadTests("test code without a function check")
    given = [*_helpers(prompt, entry_point), *((node, setup) for node in _parsed(setup, "setup").body)]
    have = {name for node in [*tree.body, *(node for node, _ in given)] for name in statement_names(node)}
    helpers, _ = _split_setup(_customary(tree.body, entry_point, have) + given, entry_point)
    before, _ = _needed(helpers, [], program)
    definitions = "\n".join([*(segment(text, node) for node, text in helpers), test])
    return Plan(before, "", test_run=TestRun(definitions, f"check({entry_point})", (entry_point,), ()))


def _parsed(code: str, what: str) -> ast.Module:
    tree = parse(code) if isinstance(code, str) else None
    if tree is None:
        raise BadTests(f"{what} code that is not Python: {str(code)[:80]!r}")
    return tree


Located = tuple[ast.stmt, str]


def _helpers(prompt: str, entry_point: str) -> list[Located]:
    """Definitions of the prompt other than the function that is asked for: tests may use them in their own version."""
    text = prompt if parse(prompt) is not None else prompt + "\n    pass\n"
    tree = parse(text)
    if tree is None:
        return []
    kinds = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign)
    return [(node, text) for node in tree.body if isinstance(node, kinds) and entry_point not in statement_names(node)]


def _split_setup(statements: list[Located], entry_point: str) -> tuple[list[Located], list[Located]]:
    """Statements that stand alone (the test author's), and those that use the program."""
    trusted: list[Located] = []
    foreign: list[Located] = []
    known: set[str] = set()
    for node, text in statements:
        alone = isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign)
        lacks = free_names(node) - known
        if alone and not lacks and entry_point not in statement_names(node) and statement_names(node):
            trusted.append((node, text))
            known |= statement_names(node)
        else:
            foreign.append((node, text))
    return trusted, foreign


def _customary(nodes: list[ast.stmt], entry_point: str, have: set[str]) -> list[Located]:
    """Imports of the customary names that tests lack; none where these may be what they test: nothing else is undefined."""
    lacks = set().union(*map(free_names, nodes)) - have - {entry_point}
    lines = [_CUSTOMARY[name] for name in sorted(lacks & _CUSTOMARY.keys())] if entry_point or lacks - _CUSTOMARY.keys() else []
    return [(ast.parse(line).body[0], line) for line in lines]


def _refuse_foreign_judges(nodes: list[ast.stmt], entry_point: str, have: set[str]) -> None:
    """Refuse ``assert close(f(1), 2)`` where nobody defines ``close``: the program's own would judge, and learn what is expected.

    Raises:
        BadTests: there is such an assert.
    """
    for node in nodes:
        test = node.test if isinstance(node, ast.Assert) else None
        while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test = test.operand
        if not (isinstance(test, ast.Call) and isinstance(test.func, ast.Name)):
            continue
        judge, given = test.func.id, ast.Tuple([*test.args, *(keyword.value for keyword in test.keywords)], ast.Load())
        if judge not in have | _BUILTINS | {entry_point} and entry_point in free_names(given):
            raise BadTests(f"the tests leave the judgement to {judge}(), which they do not define")


def _needed(trusted: list[Located], wanted: Iterable[ast.AST], program: str) -> tuple[str, str]:
    """Of the trusted statements, what the program's module gets: imports and missing classes before its code, and after it what
    the calls use. Constants and helpers that only expectations use stay out."""
    tree = parse(program)
    missing = free_names(tree) if tree is not None else set()
    before = [(node, text) for node, text in trusted if isinstance(node, ast.Import | ast.ImportFrom)
              or (isinstance(node, ast.ClassDef) and node.name in missing)]
    names: set[str] = set().union(*(free_names(node) for node in wanted)) if wanted else set()
    after: list[Located] = []
    for node, text in reversed(trusted):
        if statement_names(node) & names and (node, text) not in before:
            after.insert(0, (node, text))
            names |= free_names(node)
    return tuple("\n".join(segment(text, node) for node, text in part) for part in (before, after))  # type: ignore[return-value]


def _entries(nodes: list[ast.stmt], known: set[str]) -> set[str]:
    """The names the tests call: the ones that are nobody else's, else the builtins that every test calls on its left."""
    names = set().union(*(free_names(node) for node in nodes)) - known
    if names:
        return names
    first = []
    for node in nodes:
        called = [n.func.id for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
        first.append(set(called[:1]) - known)
    return set.intersection(*first) if first else set()


class _Finder(ast.NodeTransformer):
    """Finds the smallest expressions that only the program can evaluate, and puts names in their place."""

    def __init__(self, known: set[str], entries: set[str], bound: frozenset[str]) -> None:
        self.known, self.entries, self._bound = known, entries, bound
        self._calls: list[str] = []
        self._named: dict[str, str] = {}
        self._as_call = False

    def check(self, node: ast.Assert) -> Check | None:
        """The assert as calls and condition, None if the condition is more than the judge evaluates itself."""
        calls: list[str] = []
        self._as_call = False
        condition = self._visit_copy(node.test, calls)
        names = frozenset(VALUE.format(k) for k in range(len(calls)))
        return Check(tuple(calls), condition, ast.unparse(node)[:200]) if supported(condition, names) else None

    def replace(self, node: ast.stmt, calls: list[str]) -> ast.stmt:
        """The statement with ``__akl_call__(n)`` for the n-th call. Calls that depend on the test's own variables stay."""
        self._as_call = True
        return ast.fix_missing_locations(self._visit_copy(node, calls))

    def _visit_copy(self, node: Any, calls: list[str]) -> Any:
        self._calls = calls
        self._named = {}
        copy = ast.parse(ast.unparse(node)).body[0]
        return self.visit(copy if isinstance(node, ast.stmt) else copy.value)  # type: ignore[attr-defined]

    def foreign(self, name: str) -> bool:
        return name in self.entries or (name not in _BUILTINS and name not in self.known)

    def _root(self, node: ast.expr) -> ast.expr:
        """What is called or looked into, at the very left."""
        while isinstance(node, ast.Attribute | ast.Call):
            node = node.value if isinstance(node, ast.Attribute) else node.func
        return node

    def _is_program_call(self, node: ast.Call) -> bool:
        """``f(...)``, ``module_object.f(...)``, ``f(...)(...)`` or ``Class(...).method(...)``; not ``f(...).method(...)``, where a
        returned object would be asked about what is expected of it."""
        root = self._root(node)
        if not (isinstance(root, ast.Name) and self.foreign(root.id)):
            return False
        inner = node.func
        while isinstance(inner, ast.Attribute):
            inner = inner.value
        if isinstance(inner, ast.Call):
            direct = inner is node.func
            return self._is_program_call(inner) and (direct or root.id[:1].isupper())
        return isinstance(inner, ast.Name)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        if self._is_program_call(node) and not names & self._bound:
            return self._value(node)
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        plain = isinstance(node.ctx, ast.Load) and self.foreign(node.id) and node.id not in self._bound
        return self._value(node) if plain and not self._as_call else node

    def _value(self, node: ast.expr) -> ast.expr:
        text = ast.unparse(node)
        if not self._as_call and text in self._named and not isinstance(node, ast.Call):
            return ast.Name(self._named[text], ast.Load())
        number = len(self._calls)
        self._calls.append(text)
        if self._as_call:
            return ast.Call(ast.Name("__akl_call__", ast.Load()), [ast.Constant(number)], [])
        self._named[text] = VALUE.format(number)
        return ast.Name(VALUE.format(number), ast.Load())


def constructs(call: str) -> bool:
    """Whether a call makes an object of a class, by the naming custom: tests may hold on to such an object."""
    node = ast.parse(call, mode="eval").body
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id[:1].isupper()


def bound_names(nodes: Iterable[ast.AST]) -> frozenset[str]:
    """Names that test code assigns, loops over or takes as arguments."""
    names: set[str] = set()
    for top in nodes:
        for node in ast.walk(top):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                names.add(node.id)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.alias):
                names.add((node.asname or node.name).split(".")[0])
            elif isinstance(node, ast.ExceptHandler) and node.name:
                names.add(node.name)
    return frozenset(names)


def function_cases(tests: Mapping[str, Any]) -> list[tuple[list, dict, Any]]:
    """(arguments, keywords, expected) of function tests, from parallel lists or from a list of cases.

    Raises:
        BadTests: a case without arguments or expected value, or lists of different lengths.
    """
    expected = tests.get("expected", tests.get("outputs"))
    if "inputs" in tests:
        if not isinstance(tests["inputs"], list) or not isinstance(expected, list) or len(tests["inputs"]) != len(expected):
            raise BadTests("inputs and expected are not lists of one length")
        cases = [{"input": given, "expected": right} for given, right in zip(tests["inputs"], expected, strict=True)]
    else:
        cases = tests.get("cases", [])
    found = []
    for case in cases:
        given = case.get("args", case.get("input")) if isinstance(case, dict) else None
        if not isinstance(given, list) or not ("expected" in case or "output" in case):
            raise BadTests("a case without a list of arguments and an expected value")
        keywords = case.get("kwargs", {})
        if not isinstance(keywords, dict):
            raise BadTests("kwargs that are no object")
        found.append((given, keywords, case.get("expected", case.get("output"))))
    if not found:
        raise BadTests("no tests")
    return found
