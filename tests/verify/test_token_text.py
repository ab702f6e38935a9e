"""Text and character ranges of sampled tokens, against the tokenizers library and against a byte-by-byte reading."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from verify_examples import tiny_tokenizer

from akl_dist.verify.token_text import TokenText, _byte_of_character

LINES = ["the answer is \\boxed{16}🙂.", "数学 的答案是 16。数学", "éclair e\u0301 naïve \u0928\u093f",
         "👩\u200d👩\u200d👧 and 🇩🇪", "```python\nreturn 1\n```"]
SAVE = settings(max_examples=150, deadline=None, database=None)


def saved(tokenizer, folder):
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer, TokenText(folder)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return tiny_tokenizer(folder), TokenText(folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A byte-level BPE trained on LINES: some characters are one token, some are cut into pieces."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
                                  special_tokens=["<|im_end|>"])
    tokenizer.train_from_iterator(LINES * 5, trainer)
    tokenizer.add_tokens([AddedToken("</think>", normalized=False)])
    return saved(tokenizer, tmp_path_factory.mktemp("trained"))


PIECES = [bytes([value]) for value in range(256)] + [
    b"", b"ab", b"a\xf0", b"\xf0\x9f", b"\x9f\x99\x82", b"\x99\x82b", b"\x82\xe4\xb8", b"\xad\xe6", "数".encode(), "🙂".encode(),
    "e\u0301".encode(), b"\x81x", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90", b"}\xe3\x80", b"\x82</", b"\xef\xbf\xbd"]


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """Tokens of any bytes: id i is PIECES[i]."""
    letters = {byte: char for char, byte in _byte_of_character().items()}
    names = ["".join(letters[byte] for byte in piece) for piece in PIECES]
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return saved(tokenizer, tmp_path_factory.mktemp("pieces"))


@pytest.fixture(scope="module")
def fallback(tmp_path_factory):
    """As SentencePiece makes them: words with U+2581, bytes for what is not in the vocabulary."""
    vocab = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256)),
             *((word, -2.0) for word in
               ("\u2581", "\u2581the", "\u2581answer", "is", "数", "\\boxed", "{", "}", "16", "a", "e", "\u0301"))]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return saved(tokenizer, tmp_path_factory.mktemp("fallback"))


def by_bytes(parts):
    """Text and ranges from the definition: each character's bytes, then the characters that a token's bytes are in."""
    data, characters, at = b"".join(parts), [], 0
    while at < len(data):
        size = next((n for n in range(1, 5) if _valid(data[at:at + n])), 0)
        character = data[at:at + size].decode() if size else "\ufffd"
        if not size:
            size = max(n for n in range(1, 4) if n == 1 or _begins(data[at:at + n], n))
        characters.append((character, at, at + size))
        at += size
    spans, start = [], 0
    for part in parts:
        end = start + len(part)
        held = [i for i, (_, a, b) in enumerate(characters) if a < end and b > start]
        spans.append((held[0], held[-1] + 1) if part else None)
        start = end
    return "".join(c for c, _, _ in characters), spans


def _valid(data):
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


def _begins(data, size):
    """Whether these bytes, all of them, begin some character (Unicode's maximal part of an ill-formed sequence)."""
    tails = ([lead] + [0x80] * k for lead in (0x80, 0x90, 0xA0, 0xBF) for k in range(3))
    return len(data) == size and any(_valid(data + bytes(tail)) for tail in tails)


@SAVE
@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=30))
def test_any_bytes(pieces, ids):
    tokenizer, token_text = pieces
    text, spans = token_text.decode(ids)
    expected, ranges = by_bytes([PIECES[i] for i in ids])
    assert text == expected
    assert text == tokenizer.decode(ids, skip_special_tokens=False)
    assert [span for span, i in zip(spans, ids, strict=True) if PIECES[i]] == [one for one in ranges if one is not None]
    assert all(a == b <= len(text) for (a, b), i in zip(spans, ids, strict=True) if not PIECES[i]), "an empty token covers nothing"
    assert [a for a, _ in spans] == sorted(a for a, _ in spans)


def test_by_hand(pieces):
    _, token_text = pieces
    def decode(*parts):
        return token_text.decode([PIECES.index(part) for part in parts])
    assert decode(b"a\xf0", b"\x9f\x99\x82", b"ab") == ("a🙂ab", [(0, 2), (1, 2), (2, 4)])
    assert decode(b"\xf0\x9f", b"", b"\x99\x82b") == ("🙂b", [(0, 1), (0, 0), (0, 2)])
    assert decode(b"\xf0\x9f", b"ab") == ("\ufffdab", [(0, 1), (1, 3)]), "the letters are not part of the broken character"
    assert decode(b"\xf0\x9f") == ("\ufffd", [(0, 1)])
    assert decode(b"\xff", b"\xff", b"a") == ("\ufffd\ufffda", [(0, 1), (1, 2), (2, 3)])
    assert decode("e\u0301".encode(), b"\xef\xbf\xbd") == ("e\u0301\ufffd", [(0, 2), (2, 3)]), "two code points, and a real U+FFFD"
    assert decode() == ("", [])


def test_tokens_decoded_one_by_one_are_another_text(pieces):
    """Negative control: a character cut in two, and the offsets that follow it."""
    parts = [b"a\xf0", b"\x9f\x99\x82", b"ab"]
    alone = "".join(part.decode("utf-8", "replace") for part in parts)
    text, spans = pieces[1].decode([PIECES.index(part) for part in parts])
    assert alone != text and alone.index("ab") != spans[-1][0] == text.index("ab")


@pytest.mark.parametrize("name", ["tiny", "trained"])
def test_random_ids_read_as_the_tokenizer_reads_them(name, request):
    tokenizer, token_text = request.getfixturevalue(name)
    rng = random.Random(0)
    for _ in range(150):
        ids = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(rng.randrange(40))]
        text, spans = token_text.decode(ids)
        assert text == tokenizer.decode(ids, skip_special_tokens=False)
        assert (text, spans) == by_bytes([token_text.token_bytes(i) for i in ids])


def test_sentencepiece_with_byte_fallback(fallback):
    tokenizer, token_text = fallback
    for text in ("the answer is 数🙂 16", "a\u0301e\u0301 🇩🇪", "\\boxed{16}½"):
        ids = tokenizer.encode(text).ids
        assert any(tokenizer.id_to_token(i).startswith("<0x") for i in ids)
        decoded, spans = token_text.decode(ids)
        assert decoded.removeprefix(" ") == text == tokenizer.decode(ids)
        assert {k for a, b in spans for k in range(a, b)} == set(range(len(decoded)))
    rng, compared = random.Random(1), 0
    for _ in range(400):
        size = tokenizer.get_vocab_size()
        ids = [rng.choice((rng.randrange(1, 257), rng.randrange(257, size))) for _ in range(rng.randrange(1, 8))]
        theirs = tokenizer.decode(ids, skip_special_tokens=False)
        if "\ufffd" not in theirs:  # of a run with an invalid byte they give up every byte, the valid ones, too
            compared += 1
            assert token_text.decode(ids)[0].removeprefix(" ") == theirs
    assert compared > 50


def test_special_tokens_in_the_middle(trained):
    tokenizer, token_text = trained
    for text in ("数</think>🙂<|im_end|>数", "a<|im_end|><|im_end|>", "</think>"):
        ids = tokenizer.encode(text).ids
        decoded, spans = token_text.decode(ids)
        assert decoded == text
        for i, (a, b) in zip(ids, spans, strict=True):
            if tokenizer.id_to_token(i) in ("</think>", "<|im_end|>"):
                assert decoded[a:b] == tokenizer.id_to_token(i)
    half = tokenizer.encode("🙂").ids[:1]
    close = tokenizer.token_to_id("</think>")
    if token_text.token_bytes(half[0]) != "🙂".encode():
        text, spans = token_text.decode([*half, close])
        assert text == "\ufffd</think>" and spans[-1] == (1, 9), "a special token does not complete a character"


@SAVE
@given(st.lists(st.integers(0, 420), max_size=40))
def test_cutting_at_a_character_changes_nothing(trained, ids):
    """Where no character is cut, the text of two halves is the two texts, and the ranges move along."""
    _, token_text = trained
    for cut in (0, len(ids) // 2):
        left, right = token_text.decode(ids[:cut]), token_text.decode(ids[cut:])
        if "\ufffd" in left[0] + right[0]:
            continue
        text, spans = token_text.decode(ids)
        assert text == left[0] + right[0]
        assert spans == left[1] + [(a + len(left[0]), b + len(left[0])) for a, b in right[1]]
