"""The recipes multi_solution and continual: sides, sources, anchors, and disjoint training and held-out problems."""

from __future__ import annotations

import pytest

from akl_dist.config.schema import DataConfig
from akl_dist.contract.errors import DataError
from akl_dist.contract.golds import alternatives
from akl_dist.data.files import read_tiny
from akl_dist.data.recipes import find_recipe
from akl_dist.data.source import load
from akl_dist.tiny import MODEL_DIR
from akl_dist.tiny.environments import num_pairs
from akl_dist.verify.math import invalid_gold


def loaded(recipe: str, *, problems: int = 100, with_anchor: bool = False, **fields):
    data = DataConfig(recipe=recipe, **fields)
    return load(data, MODEL_DIR, num_eval_problems=problems, invalid_gold=invalid_gold, with_anchor=with_anchor)


def operands(text: str) -> tuple[int, ...]:
    return tuple(sorted(int(part) for part in text.rstrip("=").split("+") if part != "{}"))


def test_multi_solution():
    data = loaded("multi_solution")
    assert len(data.train) == 4096 and len(data.evaluation) == 100 and data.anchor == []
    assert {p.source for p in data.train + data.evaluation} == {"multi_solution"}
    assert all(len(alternatives(p.gold) or ()) == 12 for p in data.train + data.evaluation)
    assert not {operands(p.text) for p in data.train} & {operands(p.text) for p in data.evaluation}
    assert data.report.overlap == () and data.report.as_dict()["recipe"] == "multi_solution"
    assert data.train[0].prompt_id.startswith("multi_solution/blank:")


def test_continual_trains_on_the_new_task_and_evaluates_on_both():
    data = loaded("continual", with_anchor=True)
    assert {p.source for p in data.train} == {"tiny_pairs"} and len(data.train) == num_pairs("train")
    by_source = {name: [p for p in data.evaluation if p.source == name] for name in ("tiny_pairs", "tiny")}
    assert {name: len(prompts) for name, prompts in by_source.items()} == {"tiny_pairs": 50, "tiny": 50}
    assert not {operands(p.text) for p in data.train} & {operands(p.text) for p in by_source["tiny_pairs"]}
    # anchors: the old task's training side, so that its evaluation stays held out
    assert {p.source for p in data.anchor} == {"tiny"} and len(data.anchor) == 4096
    assert not {operands(p.text) for p in data.anchor} & {operands(p.text) for p in by_source["tiny"]}
    assert {len(operands(p.text)) for p in data.train} == {2} and {len(operands(p.text)) for p in data.anchor} == {3, 4}


def test_continual_takes_what_the_smaller_task_has():
    data = loaded("continual", problems=1000)
    counts = [sum(p.source == name for p in data.evaluation) for name in ("tiny_pairs", "tiny")]
    assert counts == [num_pairs("heldout"), 500]
    with pytest.raises(DataError, match=r"evaluate\.num_problems"):
        loaded("multi_solution", problems=5000)  # a single task must be as large as asked for


def test_anchor_file(tmp_path, monkeypatch):
    file = tmp_path / "anchor.jsonl"
    file.write_text('{"text": "1+2+3=", "answer": "6", "id": "a"}\n{"text": "4+5+6=", "answer": "15", "id": "b"}\n')
    data = loaded("tiny", problems=10, with_anchor=True, anchor_path=str(file))
    assert [(p.prompt_id, p.gold) for p in data.anchor] == [("tiny/a", "6"), ("tiny/b", "15")]
    assert loaded("tiny", problems=10, anchor_path=str(file)).anchor == []  # nobody asked
    with pytest.raises(DataError, match=r"data\.anchor_path: got null.*no retained task"):
        loaded("tiny", problems=10, with_anchor=True)


def test_generated_tasks_by_name():
    for task in ("sums", "blanks", "pairs", "products"):
        rows = read_tiny(split="train", count=20, task=task)
        assert len({row.values["id"] for row in rows}) == 20
        assert rows[:5] == read_tiny(split="train", count=5, task=task)
    assert len(read_tiny(split="test", count=10**6, task="pairs", at_most=True)) == num_pairs("heldout")


def test_retained_parts_are_marked_in_the_recipe_alone():
    assert [(part.name, part.trains) for part in find_recipe("continual")] == [("tiny_pairs", True), ("tiny", False)]
    assert all(part.trains for name in ("tiny", "multi_solution", "gsm8k_math") for part in find_recipe(name))
