"""How tests are split: what the program is sent, and what stays with the judge."""

from __future__ import annotations

import ast
import math

import pytest

from akl_dist.verify.code_output import same_output
from akl_dist.verify.code_tests import BadTests, function_cases, plan_asserts, plan_check
from akl_dist.verify.code_values import TooMuch, evaluate, literal, same_value, supported


def plan(*asserts, setup="", entry_point="f", prompt="", program="def f(*a): pass\n"):
    return plan_asserts(asserts, setup=setup, entry_point=entry_point, prompt=prompt, program=program)


@pytest.mark.parametrize(
    ("text", "calls", "values", "holds"),
    [
        ("assert f(1, [2]) == 5", ["f(1, [2])"], [5], True),
        ("assert f(1) == 5", ["f(1)"], [6], False),
        ("assert 5 == f(1)", ["f(1)"], [5], True),
        ("assert f(1) == 5, 'message'", ["f(1)"], [5], True),
        ("assert f(1) != 5", ["f(1)"], [5], False),
        ("assert f(1) is True", ["f(1)"], [True], True),
        ("assert f(1) is True", ["f(1)"], [1], False),
        ("assert f(1) is None", ["f(1)"], [None], True),
        ("assert not f(1)", ["f(1)"], [[]], True),
        ("assert f(1)", ["f(1)"], [0], False),
        ("assert f(1) in (4, 5)", ["f(1)"], [5], True),
        ("assert 3 <= f(1) < 6", ["f(1)"], [5], True),
        ("assert set(f(1)) == set((4, 5))", ["f(1)"], [[5, 4, 4]], True),
        ("assert sorted(f(1)) == [4, 5]", ["f(1)"], [(5, 4)], True),
        ("assert abs(f(1) - 0.1) < 1e-6", ["f(1)"], [0.1000001], True),
        ("assert math.isclose(f(1), 0.5, rel_tol=1e-3)", ["f(1)"], [0.50001], True),
        ("assert round(f(1), 2) == 0.33", ["f(1)"], [1 / 3], True),
        ("assert len(f(1)) == 2 and f(2)[0] == 'a'", ["f(1)", "f(2)"], ["ab", ["a"]], True),
        ("assert f(f(1)) == 2", ["f(f(1))"], [2], True),
        ("assert f(1) == f(2)", ["f(1)", "f(2)"], [3, 3], True),
        ("assert f(2)(3) == 6", ["f(2)(3)"], [6], True),
        ("assert Box(2).get(1) == 6", ["Box(2).get(1)"], [6], True),
        ("assert f(1) == (1.5, {'a': [None]})", ["f(1)"], [(1.5, {"a": [None]})], True),
        ("assert f(1)[1:] == [2]", ["f(1)"], [[1, 2]], True),
        ("assert isinstance(f(1), list)", ["f(1)"], [[]], True),
        ("assert f(1) == 5 if True else False", ["f(1)"], [5], True),
        ("assert f(1) == -2 ** 3", ["f(1)"], [-8], True),
        ("assert dict(zip(f(1), f(2))) == {1: 2}", ["f(1)", "f(2)"], [iter([1]), (2,)], True),
        ("assert dict(f(1)) == {1: 2}", ["f(1)"], [iter([(1, 2)])], True),
    ],
)
def test_asserts_are_split(text, calls, values, holds):
    (check,) = plan(text, setup="import math").checks
    assert list(check.calls) == calls
    names = {f"__akl_{k}__": value for k, value in enumerate(values)}
    assert bool(evaluate(check.condition, names)) is holds


@pytest.mark.parametrize(
    "text",
    [
        "assert f(1) == 918273645",
        "assert set(f(1)) == {918273645}",
        "assert 918273645 in f(1)",
        "assert abs(f(1) - 918273645) < 1",
        "assert f(1).startswith('918273645')",
        "assert f(1).equals(918273645)",
        "assert f(1).__eq__(918273645)",
        "for x in [1]:\n    assert f(x) == 918273645",
        "assert all(f(x) == 918273645 for x in range(3))",
        "x = f(1)\nassert x == 918273645",
        "assert f(1) == EXPECTED",
        "assert f(1) == expected()",
        "assert close(f(1), 918273645)",
        "assert math.isclose(f(1), 918273645)",
        "assert f(1) == sys.getsizeof(918273645)",
        "assert np.allclose(f(1), np.array([918273645]))",
        "assert Counter(f(1)) == Counter([918273645])",
    ],
)
def test_expected_values_are_in_nothing_the_program_gets(text):
    setup = "EXPECTED = 918273645\ndef expected():\n    return EXPECTED\ndef close(a, b):\n    return abs(a - b) < 1\n"
    made = plan(text, setup=setup, program="def f(x): return EXPECTED or expected() or close(1, 2)\n")
    sent = [made.before, made.after, *(call for check in made.checks for call in check.calls)]
    sent += list(made.test_run.calls) if made.test_run else []
    assert "918273645" not in "\n".join(sent)
    everything = ast.unparse(ast.parse(text)) + setup
    assert "918273645" in everything, "the search can find it"


def test_a_name_that_tests_use_and_import_nowhere_may_be_what_they_test():
    assert plan("assert Counter('aab') == {'a': 2}", entry_point="").checks[0].calls == ("Counter('aab')",)
    assert plan("assert Counter('aab') == {'a': 2}", entry_point="Counter").checks[0].calls == ("Counter('aab')",)
    assert plan("assert math.isclose(f(1), 2)", entry_point="").checks[0].calls == ("f(1)",)
    test = "def check(candidate):\n    assert math.isclose(candidate(1), 2)"
    made = plan_check(test, entry_point="f", prompt="", setup="", program="")
    assert made.test_run.definitions.startswith("import math\n")


@pytest.mark.parametrize("text", ["assert close(f(1), 918273645)", "assert not differ(f(1), 918273645)", "assert ok(x=f(1))"])
def test_the_programs_own_function_is_no_judge(text):
    with pytest.raises(BadTests, match="do not define"):
        plan(text)
    assert plan("assert decode(f(1)) == 2").checks[0].calls == ("decode(f(1))",), "what is expected stays here"


def test_what_calls_need_goes_to_the_program():
    made = plan(
        "assert f(DATA, Pair(1, 2)) == WANTED", setup="import math\nDATA = [1]\nWANTED = 3\nroot = Node(1)\nroot.left = Node(2)"
    )
    assert made.before == "import math" and made.after.strip() == "DATA = [1]\nroot = Node(1)\nroot.left = Node(2)"
    assert list(made.checks[0].calls) == ["f(DATA, Pair(1, 2))"] if made.checks else made.test_run is not None


def test_a_class_of_the_setup_that_the_program_lacks_comes_first():
    made = plan(
        "assert f(Node(1)) == 1",
        setup="class Node:\n    def __init__(self, v):\n        self.v = v\n",
        program="def f(node: Node): return node.v\n",
    )
    assert "class Node" in made.before


def test_the_entry_point_is_read_from_the_tests():
    assert plan("assert sum(10, 15) == 6", entry_point="").checks[0].calls == ("sum(10, 15)",)
    assert plan("assert sum(f(1)) == 6", entry_point="").checks[0].calls == ("f(1)",)
    assert plan("assert int(f(1)) == 6", entry_point="").checks[0].calls == ("f(1)",)


@pytest.mark.parametrize(
    "text",
    [
        "for x in [1, 2]:\n    assert f(x) == x",
        "assert [f(x) for x in (1, 2)] == [1, 2]",
        "y = f(1)\nassert y == 1",
        "assert (lambda g: g(1))(f) == 1",
        "assert f(1).upper() == 'A'",
    ],
)
def test_more_than_asserts_goes_to_a_test_run(text):
    made = plan(text)
    assert made.checks == () and made.test_run is not None and "f" in made.test_run.functions


@pytest.mark.parametrize("asserts", [[], ["assert 1 == 1"], ["assert f(1) =="], ["x = 1"], [""], ["assert True"], [5]])
def test_tests_that_judge_nothing_are_refused(asserts):
    with pytest.raises(BadTests):
        plan(*asserts)


@pytest.mark.parametrize(("test", "entry_point"), [("def check(c): assert c(1) == 1", ""), ("x = 1", "f"), ("def check(", "f")])
def test_check_functions_that_judge_nothing_are_refused(test, entry_point):
    with pytest.raises(BadTests):
        plan_check(test, entry_point=entry_point, prompt="", setup="", program="")


def test_helpers_of_the_prompt_are_the_tests_own():
    prompt = "import math\n\ndef poly(xs, x):\n    return x\n\ndef find_zero(xs):\n    '''Zero.'''\n"
    made = plan_check(
        "def check(candidate):\n    assert poly([1], candidate([1])) == 0",
        entry_point="find_zero",
        prompt=prompt,
        setup="",
        program="def poly(*a): return 0\ndef find_zero(xs): return 5\n",
    )
    assert "def poly(xs, x)" in made.test_run.definitions and "find_zero(xs)" not in made.test_run.definitions


@pytest.mark.parametrize(
    "text",
    [
        "x.y",
        "open('f')",
        "__import__('os')",
        "(lambda: 1)()",
        "[x for x in (1,)]",
        "f'{x}'",
        "getattr(x, 'y')",
        "x()",
        "math.factorial(9)",
        "eval('1')",
        "x.__class__",
        "str.format('')",
        "dict(**x)",
        "...",
        "x @ x",
    ],
)
def test_the_evaluator_knows_a_closed_list(text):
    assert not supported(ast.parse(text, mode="eval").body, frozenset({"x"}))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("x ** 10 ** 6", 2),
        ("x ** x", 10**5),
        ("x * 3", "a" * 10),
        ("'%99999999d' % x", 1),
        ("sum(x, [])", [[1]]),
        ("list(x)", range(10**12)),
        ("dict(x)", [range(2), range(10**12)]),
        ("x + 1", 2**5000), ("0.5 in x", range(10**12)), ("round(1, x)", -(10**9)),
    ],
)
def test_costly_arithmetic_is_refused(text, value):
    node = ast.parse(text, mode="eval").body
    assert supported(node, frozenset({"x"}))
    with pytest.raises(TooMuch):
        evaluate(node, {"x": value})


@pytest.mark.parametrize(
    ("actual", "expected", "same"),
    [
        ("6\n", "6", True),
        ("6  \n\n", "6\n", True),
        ("6.0", "6", True),
        ("6.00000000001", "6", True),
        ("6.001", "6.0", False),
        ("1 2\n3", "1  2\n3\n", True),
        ("1\n2", "2\n1", False),
        ("1 2", "1\n2", False),
        ("", "", True),
        ("", "0", False),
        ("007", "7", False),
        ("+7", "7", False),
        ("1e3", "1000", True),
        ("nan", "nan", True),
        ("yes", "YES", False),
        ("\n6", "6", False),
        ("a\r\nb\r\n", "a\nb\n", True),
        ("1,5", "1.5", False),
        ("1e999 ", "1e998", False),
        ("1000000008.0", "1000000007", False),
        ("1000000007.0", "1000000007", True),
        ("4.99999999e17", "499999999500000000", False),
        ("4.999999995e17", "499999999500000000", True),
        ("1000000008.5", "1000000007.5", True),
        ("0.0", "0", True),
        ("6 6", "6", False),
    ],
)
def test_same_output(actual, expected, same):
    assert same_output(actual, expected) is same and same_output(expected, actual) is same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        ((1, [2]), [1, [2]], True),
        ([1], [1, 1], False),
        (1.0000000001, 1.0, True),
        (1.001, 1.0, False),
        (1, 1.0, True),
        ("1", 1, False),
        ({"a": (1,)}, {"a": [1]}, True),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        (None, None, True),
        (True, 1.0, False),
        (float("nan"), 1.0, False),
        (iter([1]), [1], False),
        (1000000008.0, 1000000007, False),
        (1000000007.0, 1000000007, True),
        (0.9999999999999999, 1, True),
        (1000000008.5, 1000000007.5, True),
        (float("nan"), float("nan"), True),
        ([float("nan")], [float("nan")], True),
        (0, float("nan"), False),
        (float("inf"), float("inf"), True),
        (float("inf"), 10**9, False),
    ],
)
def test_same_value(value, expected, same):
    assert same_value(value, expected) is same


def test_function_cases():
    assert function_cases({"inputs": [[1], [2]], "expected": [3, 4]}) == [([1], {}, 3), ([2], {}, 4)]
    assert function_cases({"cases": [{"args": [1], "kwargs": {"k": 2}, "expected": None}]}) == [([1], {"k": 2}, None)]
    for bad in (
        {},
        {"cases": []},
        {"inputs": [[1]], "expected": []},
        {"cases": [{"args": [1]}]},
        {"cases": [{"args": 1, "expected": 1}]},
    ):
        with pytest.raises(BadTests):
            function_cases(bad)


def test_arguments_as_source():
    for value in (1, -5, 10**5000, -(10**5000), 0.1, -0.0, math.inf, -math.inf, True, None, "a'\n\ud800", [[1, math.inf]],
                  {"a": [math.inf, {"b": 10**5000}]}, [], {}):
        made = eval(literal(value), {"__builtins__": {}})  # noqa: S307 (the test's own values)
        assert made == value and type(made) is type(value)


def test_nan_as_source():
    assert math.isnan(eval(literal(math.nan), {"__builtins__": {}}))  # noqa: S307
