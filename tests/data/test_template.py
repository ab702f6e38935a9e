from __future__ import annotations

import pytest

from akl_dist.contract.errors import DataError, ModelError
from akl_dist.data.template import PromptTemplate


def test_ids_by_hand(tokenizer_path):
    # <s>=1 <user>=4 <assistant>=5 a=6 b=7 c=8
    template = PromptTemplate(tokenizer_path, suffix=" c")
    assert template.message("a b") == "a b c"
    assert template.encode("a b") == (1, 4, 6, 7, 8, 5)


def test_system_prompt(tokenizer_path):
    assert PromptTemplate(tokenizer_path, system_prompt="be brief").encode("a") == (1, 3, 9, 10, 4, 6, 5)


def test_no_double_bos(tokenizer_path):
    template = PromptTemplate(tokenizer_path)
    assert template.encode("a").count(1) == 1
    # the mistake this guards against is real here: the tokenizer does add a BOS of its own
    rendered = template.tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}], add_generation_prompt=True, tokenize=False
    )
    assert template.tokenizer.encode(rendered).count(1) == 2


def test_no_template(tmp_path, make_tokenizer):
    with pytest.raises(ModelError, match=r"chat template of .*got none.*instruction-tuned"):
        PromptTemplate(make_tokenizer(tmp_path / "t", template=None))


def test_no_tokenizer(tmp_path, make_tokenizer):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"tokenizer of .*tokenizer\.json.*model\.path"):
        PromptTemplate(tmp_path / "empty")


def test_template_refuses_a_role(tmp_path, make_tokenizer):
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}a"
    template = PromptTemplate(make_tokenizer(tmp_path / "t", template=refusing), system_prompt="be brief")
    with pytest.raises(ModelError, match=r"no system.*data\.system_prompt=null"):
        template.encode("a")


def test_text_outside_the_vocabulary(tmp_path, make_tokenizer):
    template = PromptTemplate(make_tokenizer(tmp_path / "t", unknown=False))
    assert template.encode("a")
    with pytest.raises(DataError, match=r"text 'zebra'.*refusal of the tokenizer"):
        template.encode("zebra")


def test_half_a_character(tokenizer_path):
    with pytest.raises(DataError, match=r"text 'a \\ud800'.*half a character"):
        PromptTemplate(tokenizer_path).encode("a \ud800")
