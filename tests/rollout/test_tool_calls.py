"""How a turn calls the tool, row by row, and that no text breaks the parser."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akl_dist.rollout.tool_calls import STYLES, Call, is_void, parse_call

BLOCK = "```python\nprint(1)\n```"
CODE = "print(1)\n"


@pytest.mark.parametrize(("turn", "code"), [
    (BLOCK, CODE),
    (f"Let me compute.\n{BLOCK}\n\n  \n", CODE),
    ("```py\nprint(1)\n```", CODE),
    ("```Python\nprint(1)\n```", CODE),
    ("~~~python\nprint(1)\n~~~", CODE),
    ("````python\nprint(1)\n````", CODE),
    ("- so:\n  ```python\n  print(1)\n  ```", CODE),
    ("```python\r\nprint(1)\r\n```\r\n", "print(1)\r\n"),
    (f"```python\nx = 2\n```\nand then\n{BLOCK}", CODE),  # the last one
    ("```\noutput\n```\n" + BLOCK, CODE),
    ('```python\ns = """\n```\n"""\n```', 's = """\n```\n"""\n'),  # a fence inside the program
    (f"<think>I compute:\n{BLOCK}", CODE),  # in the middle of reasoning
    (f"<think>x</think>\n{BLOCK}", CODE),
    ("```python\n```", ""),
    (f"{BLOCK}\nThis prints 1.", None),
    (f"{BLOCK}</s>", None),
    ("```python\nprint(1)", None),  # never closed
    ("```\nprint(1)\n```", None),  # no language
    ("```text\nprint(1)\n```", None),
    ("```json\n{}\n```", None),
    (f"{BLOCK}\n```\n1\n```", None),  # it invented the output
    (f"<think>\n{BLOCK}\n</think>", None),  # went on without it
    ("`print(1)`", None),
    ("print(1)", None),
    ("", None),
])
def test_fenced(turn, code):
    assert parse_call(turn, style="fenced") == (None if code is None else Call(code))


def hermes(code=CODE, name="python"):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'code': code}})}\n</tool_call>"


@pytest.mark.parametrize(("turn", "code"), [
    (hermes(), CODE),
    (f"I compute.\n{hermes()}\n", CODE),
    (f"{hermes()}\nand wait", CODE),
    (f"<think>maybe</think>{hermes()}", CODE),
    (f"<think>I must compute {hermes()}", CODE),
    (f"<think>{hermes('x')} or rather {hermes()}", CODE),  # reasoning that ends with a call
    (hermes("print('{\"a\": 1}')"), "print('{\"a\": 1}')"),
    (f"<think>{hermes()}</think>the answer is 3", None),
    (f"<think>{hermes()} no, I need not", None),
    ("", None),
    (BLOCK, None),
    ('{"name": "python", "arguments": {"code": "print(1)"}}', None),
    ("</tool_call>", None),
])
def test_hermes(turn, code):
    assert parse_call(turn, style="hermes") == (None if code is None else Call(code))


@pytest.mark.parametrize(("turn", "words"), [
    ("<tool_call>{'name': 'python'}</tool_call>", "no JSON"),
    ('<tool_call>{"name": "python", "arguments": {"code": "a</tool_call>', "no JSON"),
    ("<tool_call>[1]</tool_call>", "no JSON object"),
    ("<tool_call>" + "[" * 100_000 + "</tool_call>", "no JSON"),
    (hermes(name="bash"), "there is no tool 'bash'"),
    ('<tool_call>{"name": "python"}</tool_call>', "arguments.code"),
    ('<tool_call>{"name": "python", "arguments": {"code": 3}}</tool_call>', "arguments.code"),
    ('<tool_call>{"name": "python", "arguments": "print(1)"}</tool_call>', "arguments.code"),
    ('<tool_call>{"name": "python", "arguments": {"code": "1"}}', "not closed"),
    (hermes() + hermes(), "2 tool calls in one turn"),
])
def test_a_mistaken_call_says_what_is_wrong(turn, words):
    call = parse_call(turn, style="hermes")
    assert call is not None and call.code == "" and words in call.mistake and "expected" in call.mistake
    assert not is_void(turn, style="hermes")


@pytest.mark.parametrize(("turn", "void"), [
    ("I should compute that.", True),
    ("", True),
    ("```python\nprint(1)", True),
    ("```text\n1\n```", True),
    ("<think>so \\boxed{3}", True),  # reasoning that never ended
    ("<think>so</think>  \n", True),
    ("## Step 1 ##### and no more", True),
    ("\\boxedx", True),
    ("\\boxed{3}", False),
    ("<answer>3", False),
    ("#### 3", False),
    ("The final answer is 3", False),
    ("**Answer:** 3", False),
    ("<think>so</think>It is three.", False),
    ("so</think>It is three.", False),  # the prompt had opened the section
    (BLOCK, False),  # a call
])
def test_void_turns(turn, void):
    assert is_void(turn, style="fenced") is void


def test_a_program_is_an_answer_where_it_is_no_call():
    assert not is_void(BLOCK, style="hermes")
    assert is_void("```python\nprint(1)", style="hermes")


def test_an_unknown_style():
    with pytest.raises(ValueError, match=r"rollout\.tools\.call.*fenced, hermes"):
        parse_call("", style="xml")


PIECES = ["```", "```python\n", "\n```", "~~~", "<think>", "</think>", "<tool_call>", "</tool_call>", "\n", '"""', "{", "}",
          '"code"', ":", "\\boxed{", "####", "x", " ", "\ud800", "\0", "\u2028", '{"name": "python", "arguments": {"code": "']


@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join), st.sampled_from(STYLES))
@settings(max_examples=300, deadline=None)
def test_no_text_breaks_the_parser(turn, style):
    call = parse_call(turn, style=style)
    assert call is None or not call.mistake or call.code == ""
    assert not (is_void(turn, style=style) and call is not None)
    if style == "fenced" and call is not None:
        assert turn.rstrip()[-3:] in ("```", "~~~")


def test_reasoning_that_the_template_opened_answers_once_it_is_closed():
    """A box inside it is a thought."""
    for style in STYLES:
        assert is_void(r"it is \boxed{4}", style=style, think_open=True) and not is_void(r"it is \boxed{4}", style=style)
        assert not is_void(r"so</think>it is 4", style=style, think_open=True)
        assert is_void("so</think> ", style=style, think_open=True)
