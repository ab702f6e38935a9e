from __future__ import annotations

import json

import pytest

from akl_dist.contract.errors import DataError
from akl_dist.data.recipes import RECIPES, find_recipe, gsm8k_gold, last_boxed, plain_gold


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("48/2 = <<48/2=24>>24 clips.\n#### 72", "72"),
        ("#### 1,234", "1234"),
        ("#### -12,345,678.50", "-12345678.50"),
        ("#### 1,2", "1,2"),  # no grouping of thousands: a pair stays a pair
        ("#### 5\nand on", None),
        ("first #### 3\nthen\n#### 4 ", "4"),
        ("72", None),
        ("####  ", None),
    ],
)
def test_gsm8k_gold(text: str, gold: str | None):
    assert gsm8k_gold(text) == gold


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} but rather \boxed{ 2 }", "2"),
        (r"$\boxed 9$.", "9"),
        (r"\fbox{7}", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),  # escaped braces are text
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"\boxed{", None),
        (r"\boxed{}", None),
        (r"\boxedness{3}", None),
        ("no box", None),
    ],
)
def test_last_boxed(text: str, gold: str | None):
    assert last_boxed(text) == gold


def test_plain_gold_keeps_inner_text():
    assert (plain_gold("  1, 2 "), plain_gold(" \n")) == ("1, 2", None)


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(DataError, match=r"data\.recipe: got 'gsm8'; expected one of tiny.*Did you mean 'gsm8k'"):
        find_recipe("gsm8")


def test_combined_recipe_has_one_instruction():
    """Both parts are judged by one extractor, so they must ask for the answer in the same words."""
    assert len({part.instruction for part in find_recipe("gsm8k_math")}) == 1
    assert [part.name for part in RECIPES["gsm8k_math"]] == ["gsm8k", "math"]


def test_published_golds_are_all_read(published):
    for name, count in (("gsm8k_train", 7473), ("gsm8k_test", 1319)):
        rows = [json.loads(line) for line in (published / f"{name}.jsonl").open(encoding="utf-8")]
        golds = [gsm8k_gold(row["answer"]) for row in rows]
        assert len(golds) == count
        assert all(str(int(gold)) == gold for gold in golds)
    rows = [json.loads(line) for line in (published / "math_train.jsonl").open(encoding="utf-8")]
    differing = [row["unique_id"] for row in rows if (last_boxed(row["solution"]) or "") != row["answer"].strip()]
    assert differing == []
