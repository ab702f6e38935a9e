"""The text that an environment gets of a turn is the text that the verifier reads, whatever bytes the tokens hold."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from akl_dist.rollout.tools import turn_text
from akl_dist.tiny.tokenizer import build_tokenizer
from akl_dist.verify.token_text import TokenText


def byte_level(folder) -> None:
    """Merges, single bytes, a special and a plain added token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  special_tokens=["<|im_end|>"], show_progress=False)
    tokenizer.train_from_iterator(["```python\nprint(1 + 1)\n```", "naïve 数学 \\boxed{2}"] * 9, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("make", [byte_level, lambda folder: build_tokenizer().save_pretrained(folder)], ids=["bytes", "tiny"])
def test_the_verifiers_text(tmp_path, make):
    make(tmp_path)
    text, verifier = turn_text(str(tmp_path)), TokenText(tmp_path)
    size = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size()
    chance = random.Random(7)
    turns = [[chance.randrange(size) for _ in range(chance.randrange(1, 12))] for _ in range(500)]
    texts = [verifier.decode(ids)[0] for ids in turns]
    assert [text(ids) for ids in turns] == texts
    assert len({tuple(ids) for ids in turns}) > 400 and (make is not byte_level or any("\ufffd" in one for one in texts))


def test_a_program_comes_through_as_written(tmp_path):
    byte_level(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    program = "<think>ok</think>\n```python\nprint('数学', 1 +  1)\n```"
    assert turn_text(str(tmp_path))(tokenizer.encode(program, add_special_tokens=False).ids) == program
