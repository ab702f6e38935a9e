from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from akl_dist.config.schema import ColumnsConfig
from akl_dist.contract.errors import DataError
from akl_dist.data import files
from akl_dist.data.recipes import GENERIC, GSM8K, MATH
from akl_dist.verify.math import invalid_gold

GSM8K_ROWS = [
    {"question": "Ann has 3 pears and buys 4. How many has she?", "answer": "3+4=<<3+4=7>>7\n#### 7"},
    {"question": "A box holds 12 eggs. How many do 9 boxes hold?", "answer": "12*9=108\n#### 108"},
    {"question": "Rent is $1,100 and food $400. What is the sum?", "answer": "1100+400=1500\n#### 1,500"},
    {"question": "It was 3 degrees and fell by 5. How cold is it?", "answer": "3-5=-2\n#### -2"},
    {"question": "Näve schält 2 Äpfel und 2 Birnen.", "answer": "2+2=4\n#### 4"},
]

OWN_COLUMNS = ColumnsConfig()


def problems_of(path: str, recipe=GENERIC, columns: ColumnsConfig = OWN_COLUMNS):
    return files.to_problems(files.read_file(Path(path), split="train"), recipe, columns, subject=path)


def test_gsm8k_rows(write_jsonl):
    problems, excluded = problems_of(write_jsonl("g.jsonl", GSM8K_ROWS), GSM8K)
    assert [p.gold for p in problems] == ["7", "108", "1500", "-2", "4"]
    assert [p.row_id for p in problems] == ["train/0", "train/1", "train/2", "train/3", "train/4"]
    assert problems[4].text == "Näve schält 2 Äpfel und 2 Birnen."
    assert excluded == []


def test_parquet_reads_the_same(write_jsonl, tmp_path):
    path = tmp_path / "g.parquet"
    pq.write_table(pa.Table.from_pylist(GSM8K_ROWS), path)
    assert problems_of(str(path), GSM8K) == problems_of(write_jsonl("g.jsonl", GSM8K_ROWS), GSM8K)


def test_numbers_keep_their_written_form(tmp_path):
    path = tmp_path / "n.jsonl"
    path.write_text('{"id": 7, "prompt": "p", "answer": 0.10}\n'
                    '{"id": 8, "prompt": "q", "answer": 123456789012345678901}')
    problems, _ = problems_of(str(path))
    assert [(p.row_id, p.gold) for p in problems] == [("7", "0.10"), ("8", "123456789012345678901")]


def test_math_gold_from_answer_or_solution(write_jsonl):
    solved = [{"problem": "p", "solution": r"thus \boxed{\frac12}", "level": "Level 2", "type": "Algebra"}]
    assert problems_of(write_jsonl("s.jsonl", solved), MATH)[0][0].gold == r"\frac12"
    answered = [{"problem": "p", "solution": r"\boxed{1}", "answer": "2", "unique_id": "train/algebra/5.json"}]
    problem = problems_of(write_jsonl("a.jsonl", answered), MATH)[0][0]
    assert (problem.gold, problem.row_id) == ("2", "train/algebra/5.json")
    chosen = problems_of(write_jsonl("a.jsonl", answered), MATH, ColumnsConfig(answer="solution"))[0][0]
    assert chosen.gold == "1", "naming the solution column must bring its adapter along"


def test_column_map(write_jsonl):
    path = write_jsonl("c.jsonl", [{"q": "p", "gold": "3", "key": "k1"}])
    problems, _ = problems_of(path, GENERIC, ColumnsConfig(prompt="q", answer="gold", id="key"))
    assert problems == [files.Problem("k1", "p", "3")]


def test_other_columns_of_ones_own_data_go_to_ones_own_reward(write_jsonl, tmp_path):
    """All but problem, gold and id; numbers are numbers. What JSON cannot hold is left out, and known data sets bring nothing."""
    columns = ColumnsConfig(prompt="q", answer="gold", id="key")
    path = write_jsonl("c.jsonl", [{"q": "p", "gold": "3", "key": "k1", "level": 2.50, "hints": ["a", None]}])
    (problem,) = problems_of(path, GENERIC, columns)[0]
    assert json.loads(problem.extra) == {"level": 2.5, "hints": ["a", None]}
    pq.write_table(pa.Table.from_pylist([{"q": "p", "gold": "3", "key": "k1", "picture": b"x", "level": math.nan, "n": 1}]),
                   tmp_path / "c.parquet")
    (problem,) = problems_of(str(tmp_path / "c.parquet"), GENERIC, columns)[0]
    assert problem.extra == '{"n": 1}'
    path = write_jsonl("m.jsonl", [{"problem": "p", "answer": "3", "level": 2}])
    assert problems_of(path, MATH)[0][0].extra == ""


def test_missing_column_names_found_and_nearest(write_jsonl):
    path = write_jsonl("c.jsonl", [{"promt": "p", "answer": "3"}])
    with pytest.raises(DataError, match=r"column 'prompt': got columns promt, answer.*data\.columns\.prompt=promt"):
        problems_of(path)
    path = write_jsonl("d.jsonl", [{"prompt": "p", "answer": "3"}])
    with pytest.raises(DataError, match=r"column 'anser'.*'answer' is the nearest name"):
        problems_of(path, GENERIC, ColumnsConfig(answer="anser"))


def test_missing_file_names_the_nearest(write_jsonl, tmp_path):
    write_jsonl("train.jsonl", [{"prompt": "p", "answer": "3"}])
    with pytest.raises(DataError, match=r"trian\.jsonl: got no such file.*Did you mean .*train\.jsonl"):
        files.read_file(tmp_path / "trian.jsonl", split="train")
    with pytest.raises(DataError, match="no such file"):
        files.read_file(tmp_path / "nowhere" / "x.jsonl", split="train")


def test_kind_and_emptiness(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n")
    with pytest.raises(DataError, match=r"ending in '\.csv'"):
        files.read_file(tmp_path / "x.csv", split="train")
    (tmp_path / "x.jsonl").write_text("\n \n")
    with pytest.raises(DataError, match="got 0 rows"):
        files.read_file(tmp_path / "x.jsonl", split="train")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "p"', "malformed JSON"),
        (b'{"prompt": NaN}', "NaN is not JSON"),
        (b'["p", "3"]', "a JSON list"),
        (b'{"prompt": "\xff"}', "malformed JSON .*utf-8"),
    ],
)
def test_malformed_line_is_numbered(tmp_path, line: bytes, message: str):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"prompt": "p", "answer": "1"}\n\n' + line + b"\n")  # the blank second line counts
    with pytest.raises(DataError, match=rf"m\.jsonl, line 3: got .*{message}"):
        files.read_file(path, split="train")


def test_truncated_parquet(tmp_path):
    path = tmp_path / "t.parquet"
    pq.write_table(pa.Table.from_pylist(GSM8K_ROWS), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="unreadable Parquet"):
        files.read_file(path, split="train")


def test_bad_rows_are_all_named(write_jsonl):
    rows = [
        {"id": "a", "prompt": "p", "answer": "1"},
        {"id": "b", "prompt": "p"},
        {"id": "c", "prompt": "p", "answer": None},
        {"id": "d", "prompt": " ", "answer": "1"},
        {"id": "e", "prompt": "p", "answer": True},
        {"prompt": "p", "answer": "1"},
        {"id": "g", "prompt": [{"role": "user", "content": "p"}], "answer": "1"},
    ]
    with pytest.raises(DataError) as caught:
        problems_of(write_jsonl("b.jsonl", rows))
    message = str(caught.value)
    for part in ("6 of 7 rows", "line 2 (id b): prompt without answer", "line 3 (id c): prompt without answer",
                 "line 4 (id d): column 'prompt' has no text", "line 5 (id e)", "line 6: column 'id' has no text",
                 "line 7 (id g): column 'prompt'"):
        assert part in message
    assert "(id a)" not in message
    assert caught.value.exit_code == 2


def test_long_lists_of_bad_rows_are_cut(write_jsonl):
    with pytest.raises(DataError, match=r"25 of 25 rows: .*line 10: .*; and 15 more"):
        problems_of(write_jsonl("b.jsonl", [{"question": "q", "answer": "72"}] * 25), GSM8K)


def test_repeated_ids(write_jsonl):
    rows = [{"id": i, "prompt": "p", "answer": "1"} for i in ("x", "y", "x")]
    with pytest.raises(DataError, match=r"ids: got 1 repeated, e\.g\. x"):
        problems_of(write_jsonl("r.jsonl", rows))


def test_only_known_upstream_rows_may_lack_gold(published, write_jsonl):
    rows = [json.loads(line) for line in (published / "math_train.jsonl").open(encoding="utf-8")]
    problems, excluded = problems_of(str(published / "math_train.jsonl"), MATH)
    assert (len(problems), len(excluded)) == (7498, 2)
    assert all("number_theory/711" in name for name in excluded)
    tampered = [{**rows[0], "answer": ""}, rows[1]]
    with pytest.raises(DataError, match=r"line 1 \(id train/algebra/0\.json\): prompt without answer"):
        problems_of(write_jsonl("t.jsonl", tampered), MATH)


@pytest.fixture
def hub_folder(tmp_path, monkeypatch) -> Path:
    """A folder in the hub's own layout: read by the same code as the hub, without a network."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "hub"
    (folder / "main").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(GSM8K_ROWS), folder / "main" / "train-00000-of-00001.parquet")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n---\n"
    )
    return folder


def test_hub_layout(hub_folder):
    rows = files.read_hub(str(hub_folder), "main", split="train")
    problems, _ = files.to_problems(rows, GSM8K, ColumnsConfig(), subject="hub")
    assert [(p.row_id, p.gold) for p in problems][:2] == [("train/0", "7"), ("train/1", "108")]


@pytest.mark.parametrize(("config", "split"), [("main", "nope"), ("zzz", "train")])
def test_hub_mistakes(hub_folder, config, split):
    with pytest.raises(DataError, match=r"data\.path=FILE"):
        files.read_hub(str(hub_folder), config, split=split)


def test_hub_out_of_reach(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"hub data set openai/gsm8k \(main\): got .*data\.path=FILE and data"):
        files.read_hub("openai/gsm8k", "main", split="train")


def test_tiny_sides_are_disjoint_and_nested():
    train, held_out = files.read_tiny(split="train", count=200), files.read_tiny(split="test", count=50)
    assert not {r.values["text"] for r in train} & {r.values["text"] for r in held_out}
    assert files.read_tiny(split="train", count=20) == train[:20]
    assert all(str(sum(map(int, r.values["text"].rstrip("=").split("+")))) == r.values["answer"] for r in train)
    with pytest.raises(DataError, match="training and a held-out side"):
        files.read_tiny(split="validation", count=1)


def test_local_files_need_no_datasets_library(write_jsonl, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it now fails
    assert len(problems_of(write_jsonl("g.jsonl", GSM8K_ROWS), GSM8K)[0]) == 5


def judged(path: str, recipe=GENERIC):
    rows = files.read_file(Path(path), split="train")
    return files.to_problems(rows, recipe, OWN_COLUMNS, subject=path, invalid_gold=invalid_gold)


def test_unusable_golds_are_listed_by_row(write_jsonl):
    rows = [{"prompt": "p", "answer": "7"}, {"prompt": "q", "answer": r"\frac{1}{2"}, {"prompt": "r", "answer": "?"}]
    path = write_jsonl("g.jsonl", rows)
    with pytest.raises(DataError, match=r"2 of 3 rows: got line 2: gold '.*' cannot be judged \(gold has unbalanced braces\); "
                                        r"line 3: gold '\?' cannot be judged \(gold is empty\).*data\.invalid_gold=drop"):
        judged(path)
    with pytest.raises(DataError) as caught:
        judged(write_jsonl("n.jsonl", [{"prompt": "p", "answer": ""}]))
    assert "data.invalid_gold" not in str(caught.value), "a row without any gold is not dropped"
    problems, _ = problems_of(path)  # control: without the judge these rows pass
    assert len(problems) == 3
    assert [p.gold for p in judged(write_jsonl("h.jsonl", rows[:1]))[0]] == ["7"]


@pytest.mark.parametrize(("name", "recipe", "count"), [("gsm8k_train", GSM8K, 7473), ("math_train", MATH, 7498)])
def test_published_golds_are_usable(published, name, recipe, count):
    problems, excluded = judged(str(published / f"{name}.jsonl"), recipe)
    assert len(problems) + len(excluded) in (count, count + 2)


@pytest.mark.parametrize("column", ["prompt", "answer", "id"])
def test_lone_surrogate_names_the_row(tmp_path, column):
    path = tmp_path / "s.jsonl"
    first, second = ({"prompt": "p", "answer": "3", "id": "a"}, {"prompt": "q", "answer": "4", "id": "b", column: "x\ud800"})
    path.write_text(json.dumps(first) + "\n" + json.dumps(second) + "\n", encoding="ascii")  # written as \ud800
    with pytest.raises(DataError, match=rf"1 of 2 rows: got line 2.*column '{column}' holds half a character") as caught:
        problems_of(str(path))
    str(caught.value).encode("utf-8")  # the message itself can be written down
    path.write_text(json.dumps(first) + "\n" + json.dumps({**second, column: "\U0001f600"}) + "\n", encoding="ascii")
    assert len(problems_of(str(path))[0]) == 2, "a whole pair is a character"


def test_deeply_nested_line_is_named(tmp_path):
    path = tmp_path / "deep.jsonl"
    path.write_text('{"prompt": "p", "answer": "3"}\n{"prompt": ' + "[" * 200_000 + "\n")
    with pytest.raises(DataError, match=r"line 2: got .*nested too deeply"):
        problems_of(str(path))


def test_more_tiny_problems_than_there_are():
    with pytest.raises(DataError, match=r"evaluate\.num_problems: got 200000; expected at most 4432.*evaluate\.num_problems=4432"):
        files.read_tiny(split="test", count=200_000)
