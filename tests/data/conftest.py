"""A small word-level tokenizer with a chat template and a BOS token, and rows in the published schemas (invented)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %} <{{ m['role'] }}> {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %} <assistant>{% endif %}"
)
WORDS = ["<unk>", "<s>", "</s>", "<system>", "<user>", "<assistant>", "a", "b", "c", "be", "brief"]


def build_tokenizer(folder: Path, *, template: str | None = TEMPLATE, unknown: bool = True) -> Path:
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>" if unknown else "<none>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # adds <s> by itself, as Llama's tokenizers do: the way a second BOS comes about
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def make_tokenizer():
    return build_tokenizer


@pytest.fixture
def tokenizer_path(tmp_path: Path) -> Path:
    return build_tokenizer(tmp_path / "tokenizer")


@pytest.fixture
def write_jsonl(tmp_path: Path):
    def write(name: str, rows: list) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write
