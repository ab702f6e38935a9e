"""The fence parser and the assembly of programs from responses."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akl_dist.verify.code_extract import STYLES, blocks, extract_program, parse

ADD = "def add(a, b):\n    return a + b\n"
PROMPT = (
    'import math\n\ndef helper(x):\n    return x\n\ndef inc(x: int) -> int:\n    """Plus one.\n    >>> inc(1)\n    2\n    """\n'
)


def function(text, **options):
    source = extract_program(text, style="instruct_function", entry_point="add", **options)
    return None if source is None else source.code


def completion(text, prompt=PROMPT):
    source = extract_program(text, style="humaneval_completion", entry_point="inc", prompt=prompt)
    return None if source is None else source.code


@pytest.mark.parametrize(
    "text",
    [
        f"```python\n{ADD}```",
        f"```py\n{ADD}```",
        f"```Python\n{ADD}```",
        f"~~~python\n{ADD}~~~",
        f"````python\n{ADD}````",
        f"``` python\n{ADD}```",
        f"```{{.python}}\n{ADD}```",
        f'```python title="a.py"\n{ADD}```',
        f"```\n{ADD}```",
        ADD,
        f"Here:\n\n{ADD}",
        f"Sure.\n```python\n{ADD}",
        f"```bash\npip install x\n```\n```python\n{ADD}```\n```text\n5\n```",
        f"```python\n{ADD}```\nExample:\n```python\nprint(add(1, 2))\n```",
        f"```text\ndef add(a, b):\n    return 0\n```\n```python\n{ADD}```",
        f"<think>\n```python\ndef add(a, b):\n    return 0\n```\n</think>\n```python\n{ADD}```",
        f"```python\ndef add(a, b):\n    return 0\n```\nBetter:\n```python\n{ADD}```",
        "1. Code:\n   ```python\n   def add(a, b):\n       return a + b\n   ```",
        "* Code:\n\t```python\n\tdef add(a, b):\n\t    return a + b\n\t```",
        "```python\n    def add(a, b):\n        return a + b\n```",
        f"```python\r\n{ADD}```\r\n",
        f"```python\n{ADD}```<|im_end|>\n```python\ndef add(a, b):\n    return 0\n```",
        f"I define it below.\n\n{ADD}\nThis adds them.",
        f"```python\n{ADD.rstrip()}```",
        f"```python\n{ADD.rstrip()}```\nThat is it.",
        f"1. So:\n   ~~~py\n   {ADD.rstrip().replace(chr(10), chr(10) + '   ')}~~~\n   Done.",
    ],
)
def test_the_function_is_found(text):
    code = function(text)
    names: dict = {}
    exec(code, names)  # noqa: S102 (the test's own text)
    assert names["add"](2, 3) == 5


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   \n",
        "I cannot solve this.",
        "add",
        "```text\nhello\n```",
        "<think>\n```python\ndef add(a, b): ...",
        "```\n\n```",
        "5",
    ],
)
def test_no_code(text):
    assert function(text) is None


def test_a_fence_inside_a_string_does_not_close_the_block():
    code = 'def add(a, b):\n    """Sum.\n    ```\n    add(1, 2)\n    ```\n    """\n    return a + b\n'
    assert function(f"```python\n{code}```\nDone.") == code


def test_pieces_over_several_blocks_are_joined():
    first, second = "import math\ndef half(x):\n    return x / 2\n", "def add(a, b):\n    return half(a) + half(b)\n"
    text = f"```python\n{first}```\nthen\n```python\n{second}```"
    assert "def half" in function(text) and "import math" not in function(text)
    assert function(text).index("def half") < function(text).index("def add")


def test_a_broken_function_is_judged_as_it_is():
    assert function("```python\ndef add(a, b):\n    retrun a + b\n```") == "def add(a, b):\n    retrun a + b\n"


def test_the_span_is_where_the_code_stands():
    text = f"So:\n```python\n{ADD}```\n"
    source = extract_program(text, style="instruct_function", entry_point="add")
    assert text[slice(*source.span)] == ADD


@pytest.mark.parametrize(
    ("text", "body"),
    [
        ("    return x + 1\n", "    return x + 1\n"),
        ("    return x + 1\n\nprint(inc(3))\nassert False\n", "    return x + 1\n"),
        ("    return x + 1\n\n\n# a test\nif __name__ == '__main__':\n    input()\n", "    return x + 1\n"),
        ("    return x + 1\n```\nThat is all.", "    return x + 1\n"),
        ("    return x + 1\n\ndef inc(x):\n    return 0\n", "    return x + 1\n"),
        ("    return x + 1\n\ndef unfinished(", "    return x + 1\n"),
        (
            "    return twice(x) - x + 1\n\ndef twice(x):\n    return 2 * x\n\nprint(twice(2))\n",
            "    return twice(x) - x + 1\n\ndef twice(x):\n    return 2 * x\n",
        ),
        ("```python\n    return x + 1\n```", "    return x + 1\n"),
        ("```python\nreturn x + 1\n```", "    return x + 1\n"),
        ('    text = """\nprint(1)\n"""\n    return x + 1\n', '    text = """\nprint(1)\n"""\n    return x + 1\n'),
    ],
)
def test_completions_continue_the_prompt(text, body):
    assert parse(completion(text)) is not None
    joined = "\n".join(line for line in completion(text).split("\n") if line.strip())
    assert joined == "\n".join(line for line in (PROMPT + body).split("\n") if line.strip())


@pytest.mark.parametrize(
    "text",
    [
        "Here it is:\n```python\ndef inc(x: int) -> int:\n    return helper(x) + math.floor(1.5)\n```",
        "def inc(x: int) -> int:\n    return helper(x) + math.floor(1.5)\n",
    ],
)
def test_a_repeated_function_keeps_the_prompts_definitions(text):
    names: dict = {}
    exec(completion(text), names)  # noqa: S102
    assert names["inc"](4) == 5


def test_programs():
    def program(text):
        source = extract_program(text, style="stdin_program")
        return None if source is None else source.code

    assert program("```python\nprint(input())\n```\nFor example\n```python\nprint(5)\n```") == "print(input())\n"
    assert program("```python\nprint(5)\n```") == "print(5)\n"
    assert program("n = int(input())\nprint(n)") == "n = int(input())\nprint(n)"
    assert program("The answer is 5.") is None


def test_unknown_style():
    with pytest.raises(ValueError, match="prompt_style"):
        extract_program("x", style="other")


pieces = st.sampled_from(
    [
        "```",
        "~~~",
        "```python",
        "````",
        "\n",
        "    ",
        "\t",
        ADD,
        "print(input())",
        '"""',
        "#",
        "def ",
        "(",
        "text ",
        "<think>",
        "</think>",
        "\r\n",
        "```python\n",
        "\n```\n",
        "\0",
        "\ud800",
        "class add:",
        "\\",
    ]
)


@settings(max_examples=400, deadline=None)
@given(st.lists(pieces, max_size=30).map("".join), st.sampled_from(STYLES), st.booleans())
def test_any_text_gives_code_of_the_text_or_nothing(text, style, think_open):
    """No crash; the span lies in the text; blocks do not overlap."""
    source = extract_program(text, style=style, entry_point="add", prompt=PROMPT, think_open=think_open)
    assert source is None or (0 <= source.span[0] <= source.span[1] <= len(text) and isinstance(source.code, str))
    spans = [block.span for block in blocks(text, (0, len(text)))]
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


@pytest.mark.parametrize(
    "text",
    [
        "```python\n" * 8000,
        '```python\n"""\n' * 4000,
        "(" * 100_000,
        "def f():\n" * 10_000,
        "    x\n" * 15_000,
        "x = 1\nprint(\n" * 6000,
        "-" * 90_000 + "1",
        "a" + ".b" * 45_000,
        "```python\n" + "[" * 90_000 + "\n```",
    ],
)
@pytest.mark.parametrize("style", STYLES)
def test_long_hostile_text_is_cheap(text, style):
    import time

    start = time.process_time()
    extract_program(text, style=style, entry_point="add", prompt=PROMPT)
    assert time.process_time() - start < 4.0
