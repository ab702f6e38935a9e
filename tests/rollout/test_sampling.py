"""Covers request seeds and end ids. Not covered: how an engine uses them (test_engine.py)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from akl_dist.contract.errors import ModelError
from akl_dist.rollout.sampling import end_ids, request_seed


def test_seed_can_be_redone_by_hand():
    # sha256 of the JSON text, its first 16 hex digits, halved to 63 bits
    digest = hashlib.sha256(b'[[0,1],"tiny/7",2]').hexdigest()
    assert request_seed((0, 1), "tiny/7", 2) == int(digest[:16], 16) // 2 == 6936752989672550842


def test_seed_depends_on_every_part_and_fits_an_int64():
    seeds = {
        request_seed(key, prompt_id, index)
        for key in ((0, 1), (1, 0), (0, "1"), ("evaluate", 0), (0,))
        for prompt_id in ("a/1", "a/11", "b/1")
        for index in range(400)
    }
    assert len(seeds) == 5 * 3 * 400
    assert min(seeds) >= 0 and max(seeds) < 2**63
    assert max(seeds) > 2**62, "the whole range is used"


def folder(path: Path, **files: object) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return path


TOKENIZER = {
    "model": {"type": "WordLevel", "vocab": {"<pad>": 0, "<eos>": 1, "7": 4}},
    "added_tokens": [{"id": 1, "content": "<eos>"}, {"id": 5, "content": "<|im_end|>"}, {"id": 6, "content": "<|eot_id|>"}],
}
CHATML = "{{ '<|im_start|>' + m.content + '<|im_end|>' }}"


def test_end_ids_are_the_union_of_three_sources(tmp_path):
    root = folder(
        tmp_path,
        tokenizer=TOKENIZER,
        tokenizer_config={"eos_token": "<eos>", "chat_template": CHATML},
        generation_config={"eos_token_id": [3, 2]},
        config={"eos_token_id": 9},
    )
    # <eos> 1; generation config 2 and 3 (so the model config's 9 is not used); <|im_end|> 5; <|eot_id|> is in no template
    assert end_ids(root) == (1, 2, 3, 5)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": 7}}, (7,)),
        ({"config": {"eos_token_id": 8}}, (8,)),
        ({"config": {"text_config": {"eos_token_id": [8, 4]}}}, (4, 8)),
        ({"generation_config": {"eos_token_id": 0}}, (0,)),  # id 0 is an id, not "nothing"
        ({"tokenizer": TOKENIZER, "tokenizer_config": {"eos_token": {"content": "<eos>"}}}, (1,)),
        ({"tokenizer": TOKENIZER, "special_tokens_map": {"eos_token": "<eos>"}}, (1,)),
        (
            {
                "tokenizer": TOKENIZER,
                "tokenizer_config": {
                    "eos_token": "<eos>",
                    "chat_template": [{"name": "default", "template": CHATML}],
                },
            },
            (1, 5),
        ),
        (
            {
                "tokenizer_config": {
                    "eos_token": "<end>",
                    "added_tokens_decoder": {"11": {"content": "<end>"}},
                }
            },
            (11,),
        ),
        (
            {
                "tokenizer": {"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["</s>", -1.0]]}},
                "tokenizer_config": {"eos_token": "</s>"},
            },
            (1,),
        ),
        # a template that names a token the vocabulary lacks ends nothing
        (
            {
                "tokenizer": TOKENIZER,
                "tokenizer_config": {"eos_token": "<eos>", "chat_template": "<end_of_turn>"},
            },
            (1,),
        ),
    ],
)
def test_end_ids_of_single_sources(tmp_path, files, expected):
    assert end_ids(folder(tmp_path, **files)) == expected


def test_template_file_goes_over_the_config(tmp_path):
    root = folder(tmp_path, tokenizer=TOKENIZER, tokenizer_config={"eos_token": "<eos>", "chat_template": CHATML})
    (root / "chat_template.jinja").write_text("{{ m }}<|eot_id|>", encoding="utf-8")
    assert end_ids(root) == (1, 6)


@pytest.mark.parametrize(
    ("files", "subject"),
    [
        ({}, "end token of"),
        ({"tokenizer": TOKENIZER, "tokenizer_config": {"eos_token": "<gone>"}}, "end token '<gone>'"),
        ({"generation_config": {"eos_token_id": "1"}}, "eos_token_id of"),
        ({"generation_config": {"eos_token_id": [True]}}, "eos_token_id of"),
        ({"generation_config": [1]}, "generation_config.json"),
    ],
)
def test_a_folder_without_an_end_is_an_error(tmp_path, files, subject):
    with pytest.raises(ModelError, match=subject.replace("'", ".")):
        end_ids(folder(tmp_path, **files))
