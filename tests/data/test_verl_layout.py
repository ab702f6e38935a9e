"""Files made for verl, as pandas and pyarrow write them: structs, arrays, missing parts; what goes to a reward of one's own."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from akl_dist.config.schema import DataConfig
from akl_dist.contract.errors import DataError
from akl_dist.data import composed
from akl_dist.data.composed import Numeral, jsonable
from akl_dist.data.source import load_evaluation

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a b"}]


def row(**changes) -> dict:
    return {"data_source": "some/set", "prompt": CHAT[1:], "ability": "math", "extra_info": {"split": "train", "index": 0},
            "reward_model": {"style": "rule", "ground_truth": "7"}, **changes}


def parquet(path, rows: list[dict]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def read(path: str, tokenizer_path):
    data = DataConfig(recipe="verl", eval_path=path, max_prompt_tokens=64)
    return load_evaluation(data, tokenizer_path, num_problems=None).evaluation


def test_a_file_of_several_sources(tmp_path, tokenizer_path):
    rows = [row(), row(data_source="other", prompt=CHAT, extra_info=None), row(data_source=None, extra_info={
        "split": "train", "index": 2, "answer": "48 #### 72", "nested": {"scores": [0.5, None], "flag": True}})]
    one, two, three = read(parquet(tmp_path / "f.parquet", rows), tokenizer_path)
    assert [p.source for p in (one, two, three)] == ["some/set", "other", "verl"]
    assert one.token_ids == (1, 4, 6, 7, 5) and two.token_ids == (1, 3, 9, 10, 4, 6, 7, 5)
    # Parquet holds one struct for the whole column: what a row lacks is null
    assert json.loads(one.extra) == {"split": "train", "index": 0, "answer": None, "nested": None}
    assert two.extra == ""
    assert json.loads(three.extra)["nested"] == {"scores": [0.5, None], "flag": True}
    assert [p.prompt_id for p in (one, two, three)] == ["verl/test/0", "verl/test/1", "verl/test/2"]


def test_columns_as_pandas_writes_arrays(tmp_path, tokenizer_path):
    """A data frame's cells of numpy arrays (of messages, of tests) become Arrow lists."""
    prompt, tests = np.array(CHAT, dtype=object), {"inputs": np.array(["1\n", "2\n"]), "outputs": np.array(["2\n", "4\n"])}
    table = pa.Table.from_pydict({
        "data_source": ["code"], "prompt": [prompt.tolist()], "ability": ["code"],
        "reward_model": [{"style": "rule", "ground_truth": {name: one.tolist() for name, one in tests.items()}}],
        "extra_info": [{"vector": np.arange(3)}]})
    pq.write_table(table, tmp_path / "p.parquet")
    (one,) = read(str(tmp_path / "p.parquet"), tokenizer_path)
    assert json.loads(one.gold) == {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]}
    assert json.loads(one.extra) == {"vector": [0, 1, 2]}


@pytest.mark.parametrize(("truth", "gold"), [
    ("7", "7"), (" 7\n", "7"), (7, "7"), (0.5, "0.5"), (["7", "seven"], '["7", "seven"]'),
    ({"target": ["x"]}, '{"target": ["x"]}'), ('{"inputs": ["1"], "outputs": ["2"]}', '{"inputs": ["1"], "outputs": ["2"]}'),
])
def test_ground_truths(tmp_path, tokenizer_path, truth, gold):
    path = parquet(tmp_path / "g.parquet", [row(reward_model={"style": "rule", "ground_truth": truth})])
    assert read(path, tokenizer_path)[0].gold == gold


@pytest.mark.parametrize("truth", [None, "", " ", [], {}, True])
def test_no_ground_truth(truth):
    found = composed.verl(row(reward_model={"style": "model", "ground_truth": truth}))
    assert found == "no text in 'reward_model.ground_truth'"


def test_numbers_of_a_jsonl_file_are_numbers_in_extra(write_jsonl, tokenizer_path):
    """The reader keeps how a number is written (a gold 0.10 stays 0.10); the reward function still gets numbers."""
    path = write_jsonl("f.jsonl", [row(extra_info={"index": 3, "share": 0.5, "tiny": 1e-7, "name": "3"},
                                       reward_model={"ground_truth": 7.50, "style": "rule"}),
                                   row(reward_model={"ground_truth": {"n": [1, 2]}, "style": "rule"})])
    file = Path(path)
    file.write_text(file.read_text().replace("7.5", "7.50"))
    one, two = read(path, tokenizer_path)
    assert json.loads(one.extra) == {"index": 3, "share": 0.5, "tiny": 1e-7, "name": "3"} and one.gold == "7.50"
    assert two.gold == '{"n": [1, 2]}'


@pytest.mark.parametrize(("value", "message"), [
    ({"image": b"\x89PNG"}, r"row 1: a bytes in 'extra_info'\['image'\], which JSON cannot hold"),
    ({"day": datetime.date(2024, 1, 1)}, r"row 1: a date in 'extra_info'\['day'\]"),
    ({"score": float("nan")}, r"row 1: nan in 'extra_info'\['score'\]"),
])
def test_what_json_cannot_hold_names_the_row(tmp_path, tokenizer_path, value, message):
    path = parquet(tmp_path / "bad.parquet", [row(extra_info=None), row(extra_info=value)])
    with pytest.raises(DataError, match=message):
        read(path, tokenizer_path)


@pytest.mark.parametrize("content", ["", " \n"])
def test_a_prompt_without_words(content):
    empty = [CHAT[0], {"role": "user", "content": content}]
    assert composed.verl(row(prompt=empty)) == "no text in the user's message that ends 'prompt'"


def test_extra_info_that_is_no_dictionary():
    """A reward function of one's own gets it as it stands; what is nested too deeply is refused."""
    for value in ("as text", ["a", 2]):
        found = composed.verl(row(extra_info=value))
        assert not isinstance(found, str) and json.loads(found.extra) == {"extra_info": value}
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    for found in (composed.verl(row(extra_info={"tree": deep})), composed.verl(row(reward_model={"ground_truth": deep}))):
        assert isinstance(found, str) and "nested too deeply" in found


def test_jsonable_by_hand():
    assert jsonable({"a": (1, np.int64(2)), "b": np.array([[1.5]]), "c": np.bool_(True)}) == {"a": [1, 2], "b": [[1.5]], "c": True}
    assert [jsonable(Numeral(text)) for text in ("3", "-3", "0.10", "1e3")] == [3, -3, 0.1, 1000.0]
    assert type(jsonable(Numeral("3"))) is int
    for bad, words in (({1: "x"}, "the key 1"), ([float("inf")], r"inf in 'extra_info'\[0\]"), (Numeral("1e999"), "inf"),
                       (np.array([np.nan]), "nan")):
        with pytest.raises(ValueError, match=words):
            jsonable(bad)
