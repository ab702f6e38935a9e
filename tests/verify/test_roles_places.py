"""Which characters, and hence which tokens, the position and verifier votes cover."""

from __future__ import annotations

import ast
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from verify_examples import tiny_tokenizer

from akl_dist.verify.answer_places import CodeAnswer, Place, TokenSpans, position_place, token_votes
from akl_dist.verify.code_answer import entry_names, signature_and_return
from akl_dist.verify.code_extract import extract_program
from akl_dist.verify.extract import extract, locate
from akl_dist.verify.roles import position_votes, verifier_votes
from akl_dist.verify.token_text import TokenText

FEW = settings(max_examples=60, deadline=None, database=None)
STYLES = {  # response, its marker with delimiters, what the verifier reads
    "boxed": ("所以 \\boxed{数16🙂} 🙂", "\\boxed{数16🙂}", "数16🙂"),
    "answer": ("é<answer>e\u0301 1</answer>é", "<answer>e\u0301 1</answer>", "e\u0301 1"),
    "hash": ("是🙂\n#### 16é\n数", "#### 16é", "16é"),
    "words": ("so 🙂 the final answer is 16数\n是", "answer is 16数", "16数"),
    "fence": ("是\n```\nx = '🙂'\n```\n数", "```\nx = '🙂'\n```", None),
    "none": ("🙂 first\n是 last", "是 last", None),
}
TEXTS = [text for text, _, _ in STYLES.values()]


@pytest.fixture(scope="module", params=["trained", "bytes", "fallback", "tiny"])
def tokenizer(request, tmp_path_factory):
    """Byte-level with merges over borders and with single bytes, byte fallback, and one token a character."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "tiny":
        return tiny_tokenizer(folder), TokenText(folder)
    if request.param == "fallback":
        vocab = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256)),
                 *((word, -2.0) for word in ("\u2581", "16", "{数", "}", "\\boxed", "is", "\u2581answer", "</"))]
        made = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
        made.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(
            vocab_size=256 if request.param == "bytes" else 330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False))
        made.add_tokens([AddedToken("</think>", normalized=False)])
    made.save(str(folder / "tokenizer.json"))
    return made, TokenText(folder)


def by_bytes(token_text, ids, text, span):
    """Votes from bytes alone: the token's bytes and those of the range have one in common."""
    if span is None:
        return [False] * len(ids)
    start, end = (len(text[:place].encode()) for place in span)
    votes, at = [], 0
    for token in ids:
        size = len(token_text.token_bytes(token))
        votes.append(size > 0 and at < end and at + size > start)
        at += size
    return votes


@pytest.mark.parametrize("think", ["", "<think>\\boxed{1}数\n#### 2</think>"])
@pytest.mark.parametrize("style", STYLES)
def test_every_prompt_style(tokenizer, style, think):
    made, token_text = tokenizer
    response, marker, answer = STYLES[style]
    text = think + response
    ids = made.encode(text, add_special_tokens=False).ids
    if token_text.decode(ids)[0] != text:
        pytest.skip("the tiny vocabulary lacks these characters")
    _, spans = token_text.decode(ids)
    at = text.rindex(marker)
    assert position_votes(text, spans, False) == by_bytes(token_text, ids, text, (at, at + len(marker)))
    read = extract(text)
    assert (read and read.answer) == answer
    if read is not None:
        assert text[slice(*read.span)] == answer
    votes = verifier_votes(read and read.span, spans)
    assert votes == by_bytes(token_text, ids, text, read and read.span) and any(votes) == (answer is not None)


@FEW
@given(st.text(alphabet="a1 \n🙂数e\u0301ñ}{\\", max_size=12), st.text(alphabet="16x🙂数\u0301", min_size=1, max_size=5),
       st.text(alphabet="a \n🙂数é", max_size=12))
def test_any_text_around_a_box(tokenizer, before, answer, after):
    """The last box is found in the decoded text, and its tokens are those that share a byte with it."""
    made, token_text = tokenizer
    text = f"{before}</think>\\boxed{{{answer}}}{after}"
    ids = made.encode(text, add_special_tokens=False).ids
    text, spans = token_text.decode(ids)  # what a small vocabulary makes of it
    marker = locate(text)
    expected = by_bytes(token_text, ids, text, marker.outer) if marker is not None else None
    if expected is not None:
        assert position_votes(text, spans, True) == expected


def test_a_token_over_the_border_overlaps():
    text, spans = "7</think>\\boxed{5}.", [(0, 5), (5, 10), (10, 16), (16, 18), (18, 19)]
    assert position_votes(text, spans, False) == [False, True, True, True, False], "the second holds '</think>' and the box's start"
    assert verifier_votes((16, 17), spans) == [False, False, False, True, False], "'5}' holds the answer's last character"
    assert position_votes(text, [(0, 0), *spans, (19, 19)], False)[0] is False


def naive(place, spans):
    """The definition, token by token."""
    votes = [any(a < end and b > start and a < b for start, end in place.spans) for a, b in spans]
    chosen = [i for i, vote in enumerate(votes) if vote]
    count = -(-len(chosen) // place.one_in)
    kept = chosen[len(chosen) - min(count, count if place.at_most is None else place.at_most):]
    return [i in kept for i in range(len(spans))]


def test_votes_of_a_batch_are_those_of_each_token():
    rng = random.Random(0)
    for _ in range(300):
        places, token_spans = [], []
        for _ in range(rng.randrange(4)):
            ends = sorted(rng.randrange(30) for _ in range(rng.randrange(12)))
            token_spans.append([(max(0, end - rng.randrange(4)), end) for end in ends])
            spans = tuple((a, a + rng.randrange(1, 6)) for a in (rng.randrange(40) for _ in range(rng.randrange(4))))
            places.append(Place(spans, rng.choice((None, None, 0, 2)), rng.choice((1, 1, 3))))
        expected = [vote for place, spans in zip(places, token_spans, strict=True) for vote in naive(place, spans)]
        assert token_votes(places, TokenSpans(token_spans)).tolist() == expected
    assert token_votes([Place(((1, 1),))], TokenSpans([[(0, 2)]])).tolist() == [False], "an empty range covers nothing"
    assert token_votes([], TokenSpans([])).tolist() == []


@pytest.mark.parametrize(("tokens", "kept"), [(1, 1), (9, 1), (10, 1), (11, 2), (30, 3), (31, 4)])
def test_the_last_tenth(tokens, kept):
    """Rounded up, of the final section alone; it does not look at markers, and says nothing where reasoning never ended."""
    spans = [(9 + i, 10 + i) for i in range(tokens)]
    text = "a</think>" + "\\boxed{16}" + "x" * 100
    votes = position_votes(text[:9 + tokens], [(0, 1), (1, 9), *spans], True, position="tail")
    assert votes == [False] * (2 + tokens - kept) + [True] * kept
    assert not any(position_votes("<think>" + "y" * 20, [(0, 10), (10, 27)], False, position="tail"))
    assert not any(position_votes("y" * 20, [(0, 10), (10, 20)], False, position="tail", think_open=True))


# --- code ------------------------------------------------------------------------------------------------------------

PROGRAM = '''import math

def helper(n):  # a: comment
    return n

@cache
@other(x="é:")
def solve(
    a: dict[str, int] = {1: 2},  # : not the colon
    *, b=lambda: 3,
) -> "int":
    """数: doc."""
    if a: return helper(a)
    s = "数🙂"; return (
        s +
        "🙂")
'''
SIGNATURE = PROGRAM[PROGRAM.index("@cache"):PROGRAM.index('"int":') + 6]
ANSWERS = [SIGNATURE, "return n", "return helper(a)", 'return (\n        s +\n        "🙂")']


def texts_of(text, spans):
    return [text[a:b] for a, b in spans]


def answers_of(program, names=("solve",), before="🙂 so\n", after="\nend"):
    text = before + program + after
    spans = signature_and_return(text, (len(before), len(before) + len(program)), names)
    assert all(len(before) <= a < b <= len(before) + len(program) for a, b in spans)
    return texts_of(text, spans)


def test_signature_and_return_of_a_program():
    assert sorted(answers_of(PROGRAM)) == sorted(ANSWERS)
    assert answers_of("def f(a): return a", ["f"]) == ["def f(a):", "return a"]
    assert answers_of("class S(object):\n    def go(self):\n        pass\n    def no(self): pass\n", ["S", "go"]) == [
        "class S(object):", "def go(self):"]
    assert answers_of("def f():\r\n    return 1\r\ndef g():\r\n    pass\r\n", ["g"]) == ["return 1", "def g():"]
    assert answers_of("async def f():\n    return\n", ["f"]) == ["async def f():", "return"]


def test_programs_whose_entry_point_is_not_known():
    assert answers_of("def f():\n    def inner(): pass\n\ndef g(): pass\n", []) == ["def f():", "def g():"]
    assert answers_of("def f(): pass\n", ["other"]) == ["def f():"]
    assert answers_of("n = int(input())\nprint(n + 1)\nif n:\n    sys.stdout.write('数')\n", []) == [
        "print(n + 1)", "sys.stdout.write('数')"], "a script answers by what it prints"
    assert answers_of("x = 1\n", []) == []


def test_indented_bodies_and_programs_that_are_no_python():
    assert answers_of("    é = n\n    return é + 1\n") == ["return é + 1"]  # a completion of the prompt's function
    assert answers_of("   def solve(n):\n       return n\n") == ["def solve(n):", "return n"]  # a block in a list
    broken = "@cache\ndef solve(n):\n    x = = 1\n    return n🙂 \n    returned = 2\n"
    assert answers_of(broken) == ["@cache", "def solve(n):", "return n🙂"]
    deep = "def solve(n):\n    x = " + "(" * 60 + ")" * 60 + "\n    return x\n"
    assert answers_of(deep) == ["def solve(n):", "return x"], "not parsed, and the same"
    assert answers_of("def solve(n):\n" + "    n += 1\n" * 3000 + "    return n") == ["def solve(n):", "return n"]


def test_names_that_the_tests_call():
    assert entry_names(json.dumps({"tests": {"entry_point": "Solution().go", "asserts": []}})) == {"Solution", "go"}
    assert "add" in entry_names(json.dumps({"tests": {"entry_point": "", "asserts": ["assert add(1, 2) == 3"]}}))
    for gold in ("7", "", "{}", "[1]", '{"tests": 3}', '{"tests": {"asserts": 1}}', "[" * 100_000):
        assert entry_names(gold) == frozenset()


THOUGHT = "<think>```\ndef solve(): return 0\n```</think>"
FENCED = "First:\n```python\nprint(1)\n```\nThen 🙂\n```python\ndef solve(n):\n    y = n\n    return y\n```\nDone."


@pytest.mark.parametrize(("kind", "think", "position", "verifier"), [
    ("signature_and_return", "", ["def solve(n):", "return y"], ["def solve(n):", "return y"]),
    ("signature_and_return", THOUGHT, ["def solve(n):", "return y"], ["def solve(n):", "return y"]),
    ("program", "", ["def solve(n):", "return y"], ["def solve(n):", "return y"]),  # nearly all of it would be answer
    ("program", THOUGHT, ["```python\ndef solve(n):\n    y = n\n    return y\n```"], ["def solve(n):\n    y = n\n    return y\n"]),
])
def test_code_prompts(kind, think, position, verifier):
    text, code = think + FENCED, CodeAnswer(kind, frozenset({"solve"}))
    assert texts_of(text, position_place(text, truncated=False, code=code).spans) == position
    source = extract_program(text, style="instruct_function", entry_point="solve")
    spans = [(i, i + 1) for i in range(len(text))]
    votes = verifier_votes(source.span, spans, text=text, code=code)
    assert "".join(c for c, vote in zip(text, votes, strict=True) if vote) == "".join(verifier)
    assert not any(verifier_votes(None, spans, text=text, code=code))


def test_code_blocks_that_are_no_marker():
    code = CodeAnswer("signature_and_return", frozenset())
    unclosed = "```\ndef f(): return 1\n```\nor\n```\ndef g(): return 2\n"
    assert texts_of(unclosed, position_place(unclosed, truncated=True, code=code).spans) == ["def f():", "return 1"]
    bare = "x\ndef f(): return 1"
    assert texts_of(bare, position_place(bare, truncated=False, code=code).spans) == ["def f(): return 1"]
    assert position_place(bare, truncated=True, code=code) == Place()
    boxed = "```\ndef f(): return 1\n```\n\\boxed{2}"
    assert texts_of(boxed, position_place(boxed, truncated=False, code=code).spans) == ["def f():", "return 1"]
    assert texts_of(boxed, position_place(boxed, truncated=False).spans) == ["\\boxed{2}"]


@FEW
@given(st.lists(st.sampled_from([
    "def f(x):\n", "    return x\n", "@d\n", "class A:\n",
    "    def f(self): return '🙂'\n", "return\n", "    \n", "x = (\n", ")\n", "\t",
    "é = 'def f():'\n", "'''\n", "\r\n", "\x0c", "\\\n", "print(1)\n", "```\n", "if 1:\n", "lambda: 3\n", "#:\n"]), max_size=14))
def test_any_program_gives_ranges_inside_it(lines):
    """Nothing raises, ranges are inside, and where it is Python each range is what it should be."""
    program = "".join(lines)
    found = answers_of(program, ["f"])
    try:
        tree = ast.parse(program)
    except (SyntaxError, ValueError):
        return
    returns = [ast.get_source_segment(program, node) for node in ast.walk(tree) if isinstance(node, ast.Return)]
    assert sorted(one for one in found if one.startswith("return")) == sorted(returns) or "\x0c" in program or "\r" in program
    assert all(one.startswith(("return", "def f", "class A", "@", "print")) for one in found)
    assert all(one.endswith(":") for one in found if one.startswith(("def", "class", "@")))
