"""Benchmarks and training sets in their published layouts: rows made up here, and the published files where a checkout has them."""

from __future__ import annotations

import hashlib
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from akl_dist.config.schema import ColumnsConfig, DataConfig
from akl_dist.contract.errors import DataError
from akl_dist.data import composed
from akl_dist.data.contamination import overlapping
from akl_dist.data.recipes import BOXED, COMPLETE_FUNCTION, NO_INSTRUCTION, RECIPES, WRITE_FUNCTION, find_recipe
from akl_dist.data.source import load, load_evaluation
from akl_dist.verify.golds import invalid_gold as gold_check
from akl_dist.verify.math import invalid_gold

LONG = {"max_prompt_tokens": 4096}
MBPP_ROW = {"task_id": 601, "text": "Write a function to add.", "code": "def add(a, b): return a + b", "challenge_test_list": [],
            "test_setup_code": "import math", "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]}
HUMANEVAL_ROW = {"task_id": "HumanEval/0", "prompt": 'def inc(x):\n    """ Plus one. """\n',
                 "canonical_solution": "    return x + 1\n", "entry_point": "inc",
                 "test": "def check(candidate):\n    assert candidate(1) == 2\n"}
VERL_ROW = {"data_source": "some/set", "prompt": [{"role": "user", "content": "a b"}], "ability": "math",
            "reward_model": {"ground_truth": "7", "style": "rule"}, "extra_info": {"index": 3, "split": "train"}}


def evaluated(path: str, recipe: str, tokenizer_path, **options):
    options = {**LONG, **options}
    check = gold_check(find_recipe(recipe)[0].instruction.verifier)
    return load_evaluation(DataConfig(recipe=recipe, eval_path=path, **options), tokenizer_path, num_problems=None,
                           invalid_gold=check)


# --- prompt and extractor are one unit --------------------------------------------------------------------------------


def test_a_changed_instruction_is_a_new_version():
    """Scores are comparable only within one version: another text under an old version fails here."""
    units = {one.instruction for parts in RECIPES.values() for one in parts}
    assert len({unit.version for unit in units}) == len(units)
    digests = {unit.version: hashlib.sha256(f"{unit.verifier} {unit.text}".encode()).hexdigest()[:12] for unit in units}
    assert digests == {"boxed-1": "822390c91a6a", "none": "8e84dd8b2e38", "function-1": "edf0d0978dd3",
                       "completion-1": "b907b18890f0"}
    assert units == {BOXED, NO_INSTRUCTION, WRITE_FUNCTION, COMPLETE_FUNCTION}


@pytest.mark.parametrize("name", RECIPES)
def test_parts_of_a_recipe_ask_in_the_same_words(name):
    assert len({part.instruction for part in find_recipe(name)}) == 1


# --- code -------------------------------------------------------------------------------------------------------------


def test_mbpp_by_hand(write_jsonl, tokenizer_path):
    rows = [{**MBPP_ROW, "task_id": n} for n in (10, 11, 510, 511, 600, 601, 974)]
    path = write_jsonl("mbpp.jsonl", rows)
    held_out = evaluated(path, "mbpp", tokenizer_path)
    assert [p.prompt_id for p in held_out.evaluation] == ["mbpp/11", "mbpp/510"]
    loaded = load(DataConfig(recipe="mbpp", path=path, eval_path=path, **LONG), tokenizer_path, num_eval_problems=None)
    assert [p.prompt_id for p in loaded.train] == ["mbpp/601", "mbpp/974"]
    one = held_out.evaluation[0]
    assert one.text == "Write a function to add.\nYour code should satisfy:\nassert add(1, 2) == 3" + WRITE_FUNCTION.text
    assert "add(0, 0)" not in one.text, "the other tests are hidden"
    assert json.loads(one.gold) == {"prompt_style": "instruct_function", "tests": {
        "entry_point": "", "setup": "import math", "asserts": MBPP_ROW["test_list"]}}


def test_mbpp_sanitized_and_parquet(tmp_path, tokenizer_path):
    row = {"source_file": "x.ipynb", "task_id": 11, "prompt": "Write a function to add.", "code": "",
           "test_imports": ["import math"], "test_list": MBPP_ROW["test_list"]}
    path = tmp_path / "s.parquet"
    pq.write_table(pa.Table.from_pylist([row]), path)
    one = evaluated(str(path), "mbpp_sanitized", tokenizer_path).evaluation[0]
    assert (one.prompt_id, one.source) == ("mbpp_sanitized/11", "mbpp_sanitized")
    assert json.loads(one.gold)["tests"]["setup"] == "import math"


def test_an_only_test_is_not_shown_with_its_answer():
    only = composed.mbpp({**MBPP_ROW, "test_list": ["assert add(1, 2) == 3"] * 3})
    assert isinstance(only, composed.Composed) and only.text.endswith("\nadd(1, 2)") and "3" not in only.text
    assert isinstance(composed.mbpp({**MBPP_ROW, "test_list": ["assert not add(1, 2)"]}), str)


def test_humaneval_prompt_is_byte_identical(write_jsonl, tokenizer_path):
    loaded = evaluated(write_jsonl("h.jsonl", [HUMANEVAL_ROW]), "humaneval", tokenizer_path)
    one = loaded.evaluation[0]
    assert one.text == HUMANEVAL_ROW["prompt"] + COMPLETE_FUNCTION.text
    assert json.loads(one.gold)["tests"] == {"entry_point": "inc", "prompt": HUMANEVAL_ROW["prompt"], "setup": "",
                                             "test": HUMANEVAL_ROW["test"]}
    assert loaded.report.instruction == "completion-1"


@pytest.mark.parametrize(("recipe", "row", "message"), [
    ("mbpp", {**MBPP_ROW, "task_id": 11, "test_list": []}, r"line 1 \(id 11\): no asserts"),
    ("mbpp", {**MBPP_ROW, "task_id": 11, "test_list": ["assert f(1) ==", "assert f(2)"]}, "cannot be judged"),
    ("mbpp", {**MBPP_ROW, "task_id": 11, "text": " "}, "no text in column 'text' or 'prompt'"),
    ("mbpp", {**MBPP_ROW, "task_id": "x"}, None),
    ("mbpp", MBPP_ROW, "rows of train; expected rows of split 'test'"),
    ("humaneval", {**HUMANEVAL_ROW, "test": ""}, "'prompt', 'test' and 'entry_point'"),
    ("verl", {**VERL_ROW, "prompt": "a b"}, "no list of messages"),
    ("verl", {**VERL_ROW, "prompt": [{"role": "tool", "content": "a"}]}, "no role"),
    ("verl", {**VERL_ROW, "prompt": [*VERL_ROW["prompt"], {"role": "assistant", "content": "b"}]}, "does not end with"),
    ("verl", {**VERL_ROW, "reward_model": {"style": "rule"}}, "reward_model.ground_truth"),
    ("verl", {**VERL_ROW, "reward_model": {"ground_truth": r"\frac{1}{"}}, "cannot be judged"),
    ("verl", {**VERL_ROW, "data_source": ""}, "data_source"),
])
def test_rows_that_cannot_be_used(write_jsonl, tokenizer_path, recipe, row, message):
    path = write_jsonl("x.jsonl", [row])
    if message is None:
        assert evaluated(path, recipe, tokenizer_path).report.evaluation.used == 1
        return
    with pytest.raises(DataError, match=message):
        evaluated(path, recipe, tokenizer_path)


def test_columns_of_composed_rows_cannot_be_renamed(write_jsonl, tokenizer_path):
    with pytest.raises(DataError, match="reads several at once"):
        evaluated(write_jsonl("x.jsonl", [VERL_ROW]), "verl", tokenizer_path, columns=ColumnsConfig(prompt="prompt"))


# --- verl's layout -----------------------------------------------------------------------------------------------------


def test_verl_parquet_is_read_unchanged(tmp_path, tokenizer_path):
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a b"}]
    rows = [VERL_ROW, {**VERL_ROW, "data_source": "other", "prompt": chat, "reward_model": {"ground_truth": "8", "style": "rule"}}]
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    loaded = evaluated(str(path), "verl", tokenizer_path, max_prompt_tokens=64)
    one, two = loaded.evaluation
    assert (one.text, one.gold, one.source, one.token_ids) == ("a b", "7", "some/set", (1, 4, 6, 7, 5))
    assert (two.gold, two.source, two.token_ids) == ("8", "other", (1, 3, 9, 10, 4, 6, 7, 5))
    assert loaded.report.instruction == "none"
    with_system = evaluated(str(path), "verl", tokenizer_path, system_prompt="c", prompt_suffix=" c").evaluation
    assert with_system[0].token_ids == (1, 3, 8, 4, 6, 7, 8, 5)
    assert with_system[1].token_ids == (1, 3, 9, 10, 4, 6, 7, 8, 5), "a row's own system message stays"


# --- training sets and benchmarks --------------------------------------------------------------------------------------


def test_dapo_words_are_removed(write_jsonl, tokenizer_path):
    wrapped = composed.DAPO_OPENING + "a b" + composed.DAPO_CLOSING
    rows = [{"prompt": wrapped, "solution": "34"}, {"prompt": "c", "solution": "5"}]
    path = write_jsonl("d.jsonl", rows)
    loaded = load(DataConfig(recipe="dapo_math", path=path, **LONG), tokenizer_path, num_eval_problems=None)
    assert [p.text for p in loaded.train] == ["a b" + BOXED.text, "c" + BOXED.text]
    own = write_jsonl("own.jsonl", [{"problem": "a b", "answer": "34"}])
    assert load(DataConfig(recipe="dapo_math", path=own, **LONG), tokenizer_path, num_eval_problems=0).train[0].gold == "34"


@pytest.mark.parametrize("recipe", ["math500", "aime24", "aime25", "humaneval"])
def test_benchmarks_are_not_trained_on(write_jsonl, tokenizer_path, recipe):
    path = write_jsonl("b.jsonl", [{"problem": "a", "answer": "1"}])
    with pytest.raises(DataError, match=rf"{recipe}, a benchmark.*akl_dist\.evaluate data={recipe}"):
        load(DataConfig(recipe=recipe, path=path, **LONG), tokenizer_path, num_eval_problems=0)
    with pytest.raises(DataError, match="no retained task"):
        load(DataConfig(recipe="dapo_math", path=path, **LONG), tokenizer_path, num_eval_problems=0, with_anchor=True)


def test_a_training_set_is_evaluated_on_its_benchmarks(write_jsonl, tokenizer_path, tmp_path):
    write_jsonl("files/aime24.jsonl", [{"id": 60, "problem": "a a", "answer": "025"}])
    write_jsonl("files/aime25_test.jsonl", [{"id": "0", "problem": "b b", "answer": "70"}])
    train = write_jsonl("files/dapo_math_train.jsonl", [{"problem": "c c", "answer": "1"}, {"problem": "A  a.", "answer": "25"}])
    data = DataConfig(recipe="dapo_math", path=train, eval_path=str(tmp_path / "files"), **LONG)
    loaded = load(data, tokenizer_path, num_eval_problems=None)
    found = [(p.prompt_id, p.source, p.gold) for p in loaded.evaluation]
    assert found == [("aime24/60", "aime24", "025"), ("aime25/0", "aime25", "70")]
    assert (loaded.report.overlap, len(loaded.train)) == (("aime24/60",), 2)
    dropped = load(DataConfig(**{**vars(data), "contaminated": "drop"}), tokenizer_path, num_eval_problems=None)
    assert [p.gold for p in dropped.train] == ["1"]
    assert dropped.report.train.contaminated == ("dapo_math/train/1",) and dropped.report.train.used == 1
    assert "1 dropped as evaluated on" in str(dropped.report) and dropped.report.overlap == ("aime24/60",)
    with pytest.raises(DataError, match=r"1 that are also evaluated on \(aime24/60\).*contaminated=drop"):
        load(DataConfig(**{**vars(data), "contaminated": "error"}), tokenizer_path, num_eval_problems=None)
    one_file = DataConfig(**{**vars(data), "eval_path": str(tmp_path / "files" / "aime24.jsonl")})
    assert [p.source for p in load(one_file, tokenizer_path, num_eval_problems=None).evaluation] == ["aime24"]
    unnamed = write_jsonl("unnamed.jsonl", [{"problem": "a", "answer": "1"}])
    with pytest.raises(DataError, match="a folder with one file per part"):
        load(DataConfig(**{**vars(data), "eval_path": unnamed}), tokenizer_path, num_eval_problems=None)


def test_contamination_counts_unselected_problems(write_jsonl, tokenizer_path):
    """Which problems are drawn for a small evaluation must not decide what is trained on."""
    rows = [{"id": str(n), "prompt": "a " * (n + 1), "answer": "1"} for n in range(10)]
    path = write_jsonl("t.jsonl", rows)
    data = DataConfig(recipe="generic", path=path, eval_path=path, contaminated="keep", **LONG)
    loaded = load(data, tokenizer_path, num_eval_problems=2)
    assert (len(loaded.evaluation), len(loaded.report.overlap)) == (2, 10)


def test_overlapping_by_hand():
    long = "Find the sum of all integer bases b>9 for which 17_b divides 97_b and explain each of your steps in detail."
    assert len(long) > 80
    train, evaluation = ["7+36=", f"Solve this. {long} Answer briefly.", "x"], ["73+6=", long, "X.", "unseen"]
    assert overlapping(train, evaluation) == ({2}, {2})
    assert overlapping(train, evaluation, embedded=True) == ({1, 2}, {1, 2})
    assert overlapping([], evaluation) == (set(), set())


def test_invalid_golds_are_dropped_with_a_count(write_jsonl, tokenizer_path):
    rows = [{"id": "a", "prompt": "a", "answer": "7"}, {"id": "b", "prompt": "b", "answer": r"\frac{1}{2"}]
    path = write_jsonl("g.jsonl", rows)
    data = DataConfig(recipe="generic", path=path, **LONG)
    with pytest.raises(DataError, match="1 of 2 rows"):
        load(data, tokenizer_path, num_eval_problems=0, invalid_gold=invalid_gold)
    report = load(DataConfig(**{**vars(data), "invalid_gold": "drop"}), tokenizer_path, num_eval_problems=0,
                  invalid_gold=invalid_gold).report
    assert (report.train.used, report.train.rows) == (1, 2)
    assert report.train.excluded[0].startswith("line 2 (id b): gold") and "unbalanced" in report.train.excluded[0]
    assert "line 2 (id b)" in str(report)


# --- as published ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "recipe", "split", "count"), [
    ("math500", "math500", "test", 500), ("aime24", "aime24", "test", 30), ("aime25", "aime25", "test", 30),
    ("mbpp", "mbpp", "test", 500), ("mbpp", "mbpp", "train", 374), ("mbpp", "mbpp", "validation", 90),
    ("mbpp", "mbpp", "prompt", 10),
    ("mbpp_sanitized", "mbpp_sanitized", "test", 257), ("mbpp_sanitized", "mbpp_sanitized", "train", 120),
    ("humaneval", "humaneval", "test", 164),
])
def test_published_benchmarks_are_read_whole(published, tokenizer_path, name, recipe, split, count):
    loaded = evaluated(str(published / f"{name}.jsonl"), recipe, tokenizer_path, eval_split=split)
    assert (len(loaded.evaluation), loaded.report.evaluation.excluded, loaded.report.evaluation.overlong) == (count, (), ())
    assert len({p.prompt_id for p in loaded.evaluation}) == count


def test_published_training_set(published, tokenizer_path):
    train = str(published / "rlvr_math.jsonl")
    data = DataConfig(recipe="dapo_math", path=train, eval_path=str(published), contaminated="drop", **LONG)
    loaded = load(data, tokenizer_path, num_eval_problems=None, invalid_gold=invalid_gold)
    assert (len(loaded.train), len(loaded.evaluation), loaded.report.overlap) == (17398, 60, ())
    on_math = DataConfig(recipe="dapo_math", path=train, eval_path=str(published / "math500.jsonl"), **LONG)
    overlap = load(on_math, tokenizer_path, num_eval_problems=None).report.overlap
    assert len(overlap) == 7 and all(name.startswith("math500/test/") for name in overlap)


def test_code_recipes_need_the_code_verifier():
    from akl_dist.config.compose import compose
    from akl_dist.config.validate import validate
    from akl_dist.contract.errors import ConfigError

    base = ["data=mbpp", "model.path=Qwen/Qwen2.5-0.5B-Instruct"]
    validate(compose(base))  # the data group brings its verifier
    with pytest.raises(ConfigError, match=r"verify\.kind: got 'math'; expected code with data\.recipe=mbpp"):
        validate(compose([*base, "verify.kind=math"]))
