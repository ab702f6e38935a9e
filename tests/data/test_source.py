from __future__ import annotations

import random
import re
import subprocess
import sys
from collections import Counter

import pytest

from akl_dist.config.schema import ColumnsConfig, DataConfig
from akl_dist.contract.errors import DataError, ResumeMismatch
from akl_dist.contract.records import Prompt
from akl_dist.data.contamination import normalised
from akl_dist.data.source import PromptSource, load, load_evaluation


def prompts(n: int) -> list[Prompt]:
    return [Prompt(f"s/{i}", "s", f"p{i}", (i + 1,), str(i)) for i in range(n)]


def ids(batch: list[Prompt]) -> list[str]:
    return [p.prompt_id for p in batch]


# --- order -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 8, 9, 50])
def test_every_epoch_is_a_permutation_with_spacing(n: int):
    source = PromptSource(prompts(n), seed=3)
    everything = {f"s/{i}" for i in range(n)}
    orders = [source.order(epoch) for epoch in range(12)]
    assert all(len(order) == n and set(order) == everything for order in orders)
    stream = [p for order in orders for p in order]
    last: dict[str, int] = {}
    gaps = []
    for place, prompt in enumerate(stream):
        if prompt in last:
            gaps.append(place - last[prompt])
        last[prompt] = place
    assert min(gaps) >= (n + 1) // 2


def test_plain_shuffles_would_break_the_spacing():
    """Negative control: without the delay rule the test above must fail."""
    source = PromptSource(prompts(50), seed=3)
    pairs = [(source._shuffled(e), source._shuffled(e + 1)) for e in range(12)]
    assert any(set(old[-12:]) & set(new[:12]) for old, new in pairs)
    assert not any(set(source.order(e)[-12:]) & set(source.order(e + 1)[:12]) for e in range(12))


def test_order_depends_on_seed_and_epoch_only():
    shuffled = prompts(40)
    random.Random(0).shuffle(shuffled)
    assert PromptSource(prompts(40), seed=1).order(5) == PromptSource(shuffled, seed=1).order(5)
    assert PromptSource(prompts(40), seed=1).order(0) != PromptSource(prompts(40), seed=2).order(0)
    assert PromptSource(prompts(40), seed=1).order(0) != PromptSource(prompts(40), seed=1).order(1)


def test_order_is_pinned():
    """The hash order is the same on every machine and in every release: a changed order would break old checkpoints."""
    source = PromptSource(prompts(6), seed=0)
    assert source.order(0) == ["s/2", "s/0", "s/4", "s/3", "s/1", "s/5"]
    assert source.order(1) == ["s/4", "s/0", "s/2", "s/5", "s/1", "s/3"]


def test_late_epochs_still_mix():
    """The delay rule must not freeze the order: over epochs each prompt opens an epoch about equally often."""
    source = PromptSource(prompts(8), seed=0)
    firsts = Counter(source.order(e)[0] for e in range(400))
    assert len(firsts) == 8 and max(firsts.values()) < 100  # 50 each if uniform


@pytest.mark.parametrize("batch", [1, 3, 5, 7, 10])
def test_batches_never_repeat_a_prompt(batch: int):
    source = PromptSource(prompts(10), seed=7)
    for _ in range(40):
        taken = ids(source.take(batch))
        assert len(set(taken)) == batch


def test_epochs_are_served_whole_up_to_half_the_set():
    source = PromptSource(prompts(10), seed=7)
    served = [p for _ in range(8) for p in ids(source.take(5))]
    assert set(Counter(served).values()) == {4} and source.skipped == 0
    crossing = PromptSource(prompts(10), seed=7)
    assert [p for _ in range(10) for p in ids(crossing.take(4))] == served, "the batch size must not change the order"


def test_larger_batches_pass_over_the_remainder_and_count_it():
    source = PromptSource(prompts(10), seed=7)
    source.take(7)
    assert ids(source.take(7)) == source.order(1)[:7]
    assert source.state()["skipped"] == 3


@pytest.mark.parametrize("n", [0, 11])
def test_impossible_batches(n: int):
    with pytest.raises(DataError, match=r"rollout\.prompts_per_step.*1 to 10"):
        PromptSource(prompts(10), seed=0).take(n)


def test_no_prompts():
    with pytest.raises(DataError, match="training prompts: got 0"):
        PromptSource([], seed=0)


# --- resume ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [3, 4, 8])
@pytest.mark.parametrize("stop", range(0, 12))
def test_resume_equals_uninterrupted(stop: int, batch: int):
    whole = PromptSource(prompts(11), seed=5)
    expected = [ids(whole.take(batch)) for _ in range(12)]
    first = PromptSource(prompts(11), seed=5)
    got = [ids(first.take(batch)) for _ in range(stop)]
    state = first.state()
    second = PromptSource.from_state(prompts(11), state)
    assert second.state() == state
    got += [ids(second.take(batch)) for _ in range(12 - stop)]
    assert got == expected
    assert second.state() == whole.state()


def test_resume_refuses_other_prompts():
    state = PromptSource(prompts(11), seed=5).state()
    other_tokens = [*prompts(10), Prompt("s/10", "s", "p10", (99,), "10")]
    other_gold = [*prompts(10), Prompt("s/10", "s", "p10", (11,), "9")]
    for changed in (prompts(10), other_tokens, other_gold):
        with pytest.raises(ResumeMismatch, match=r"differ from the checkpoint's.*resume=never"):
            PromptSource.from_state(changed, state)


# --- load --------------------------------------------------------------------------------------------------------


def config(train: str, evaluation: str | None, **changes) -> DataConfig:
    return DataConfig(recipe="generic", path=train, eval_path=evaluation, **changes)


def test_load_by_hand(write_jsonl, tokenizer_path):
    def rows(*triples):
        return [dict(zip(("id", "prompt", "answer"), triple, strict=True)) for triple in triples]

    train = write_jsonl("train.jsonl", rows(("x", "a b", "1"), ("y", "c", "2")))
    held_out = write_jsonl("eval.jsonl", rows(("z", "A  B.", "1"), ("w", "b", "3")))
    loaded = load(config(train, held_out, prompt_suffix=" c"), tokenizer_path, num_eval_problems=10)
    assert loaded.train[0] == Prompt("generic/x", "generic", "a b c", (1, 4, 6, 7, 8, 5), "1")
    assert ids(loaded.evaluation) == ["generic/z", "generic/w"]
    report = loaded.report.as_dict()
    assert report["overlap"] == ["generic/z"]  # "A  B." is "a b" in other dress
    assert report["train"] == {"rows": 2, "used": 2, "excluded": [], "overlong": [], "unselected": 0, "contaminated": []}
    assert report["instruction"].startswith("custom-")
    assert "1 evaluation problems also stand in the training set: generic/z" in str(loaded.report)


def test_overlong_drop_and_error(write_jsonl, tokenizer_path):
    rows = [{"id": str(n), "prompt": "a " * n, "answer": "1"} for n in (1, 2, 3, 4)]
    train = write_jsonl("train.jsonl", rows)  # n words are n + 3 tokens
    loaded = load(config(train, None, max_prompt_tokens=5), tokenizer_path, num_eval_problems=0)
    assert ids(loaded.train) == ["generic/1", "generic/2"]
    assert loaded.report.train.overlong == ("generic/3 (6 tokens)", "generic/4 (7 tokens)")
    assert "2 overlong dropped" in str(loaded.report) and "generic/3 (6 tokens)" in str(loaded.report)
    with pytest.raises(DataError, match=r"2 longer than the limit: generic/3.*data\.max_prompt_tokens=5"):
        load(config(train, None, max_prompt_tokens=5, overlong="error"), tokenizer_path, num_eval_problems=0)
    with pytest.raises(DataError, match="none is left"):
        load(config(train, None, max_prompt_tokens=3), tokenizer_path, num_eval_problems=0)


def test_limits(write_jsonl, tokenizer_path):
    rows = [{"id": str(n), "prompt": "a", "answer": "1"} for n in range(30)]
    path = write_jsonl("train.jsonl", rows)
    loaded = load(config(path, path, limit=4), tokenizer_path, num_eval_problems=10)
    assert ids(loaded.train) == [f"generic/{n}" for n in range(4)]
    assert loaded.report.train.unselected == 26
    chosen = ids(loaded.evaluation)
    assert len(chosen) == 10 and chosen != [f"generic/{n}" for n in range(10)]
    assert chosen == sorted(chosen, key=lambda name: int(name.split("/")[1])), "file order is kept"
    fewer = load(config(path, path), tokenizer_path, num_eval_problems=6)
    assert set(ids(fewer.evaluation)) < set(chosen), "a smaller held-out set is part of the larger one"


def test_a_local_file_without_a_held_out_file_has_no_evaluation(write_jsonl, tokenizer_path):
    """Never the hub's split beside a local file, and never training rows as held-out ones."""
    path = write_jsonl("train.jsonl", [{"prompt": "a", "answer": "1"}])
    loaded = load(config(path, None), tokenizer_path, num_eval_problems=5)
    assert loaded.evaluation == [] and loaded.report.evaluation.rows == 0
    assert "no held-out file" in str(loaded.report)


def test_an_evaluation_reads_no_training_file(write_jsonl, tokenizer_path):
    """data.path is not taken for the evaluation problems, and nothing else is evaluated in its place."""
    path = write_jsonl("train.jsonl", [{"prompt": "a", "answer": "1"}])
    for data in (config(path, None), DataConfig(recipe="aime24", path=path)):
        with pytest.raises(DataError, match=rf"data\.eval_path: got null beside data\.path.*data\.eval_path={re.escape(path)}"):
            load_evaluation(data, tokenizer_path, num_problems=None)
    with pytest.raises(DataError, match=r"data\.eval_path: got null; expected a file.*data\.eval_path=FILE"):
        load_evaluation(DataConfig(recipe="generic"), tokenizer_path, num_problems=None)


def test_a_folder_without_the_split_suggests_no_other_split(write_jsonl, tokenizer_path, tmp_path):
    """Training rows are never proposed in place of the evaluation problems that are missing."""
    write_jsonl("d/math_train.jsonl", [{"problem": "b", "solution": r"\boxed{2}"}])
    with pytest.raises(DataError, match=r"data\.eval_path: got .*/d, without math_test or math") as caught:
        load_evaluation(DataConfig(recipe="math", eval_path=str(tmp_path / "d")), tokenizer_path, num_problems=None)
    assert "math_train" not in str(caught.value) and ".jsonl, .json or .parquet" in str(caught.value)


def test_generic_needs_a_place(tokenizer_path):
    with pytest.raises(DataError, match=r"data\.path: got null.*data\.path=FILE.*data\.name=HUB_NAME"):
        load(DataConfig(recipe="generic"), tokenizer_path, num_eval_problems=0)


def test_combined_recipe_from_a_folder(write_jsonl, tokenizer_path, tmp_path):
    write_jsonl("d/gsm8k_train.jsonl", [{"question": "a", "answer": "#### 1"}])
    write_jsonl("d/math_train.jsonl", [{"problem": "b", "solution": r"\boxed{2}"}])
    data = DataConfig(recipe="gsm8k_math", path=str(tmp_path / "d"))
    loaded = load(data, tokenizer_path, num_eval_problems=0)
    assert [(p.prompt_id, p.source, p.gold) for p in loaded.train] == [
        ("gsm8k/train/0", "gsm8k", "1"), ("math/train/0", "math", "2"),
    ]
    assert loaded.train[0].text.endswith("\\boxed{}.") and loaded.report.instruction == "boxed-1"
    with pytest.raises(DataError, match=r"data\.path: got .*a folder with one file per part"):
        data = DataConfig(recipe="gsm8k_math", path=str(tmp_path / "d" / "gsm8k_train.jsonl"))
        load(data, tokenizer_path, num_eval_problems=0)
    with pytest.raises(DataError, match=r"data\.name: got x/y; expected null"):
        load(DataConfig(recipe="gsm8k_math", name="x/y"), tokenizer_path, num_eval_problems=0)


def test_tiny_loads_with_its_own_tokenizer(tmp_path):
    from akl_dist.tiny.tokenizer import build_tokenizer

    build_tokenizer().save_pretrained(tmp_path / "tiny")
    loaded = load(DataConfig(limit=100), tmp_path / "tiny", num_eval_problems=40)
    assert (len(loaded.train), len(loaded.evaluation), loaded.report.overlap) == (100, 40, ())
    suffixed = load(DataConfig(limit=100, prompt_suffix=" \u00e9"), tmp_path / "tiny", num_eval_problems=0)
    assert {len(b.token_ids) - len(a.token_ids) for a, b in zip(loaded.train, suffixed.train, strict=True)} == {3}  # a byte each


def test_columns_are_checked_for_generated_rows_too(tmp_path):
    from akl_dist.tiny.tokenizer import build_tokenizer

    build_tokenizer().save_pretrained(tmp_path / "tiny")
    data = DataConfig(limit=3, columns=ColumnsConfig(prompt="nope"))
    with pytest.raises(DataError, match=r"data\.columns"):
        load(data, tmp_path / "tiny", num_eval_problems=0)


def test_normalised():
    assert normalised("Find  $x$: A, B!") == normalised("find x a b")
    assert normalised("7+36=") != normalised("73+6=")
    assert normalised("1.5") != normalised("15")


def test_published_overlap(published, tokenizer_path):
    """MATH-500 and the MATH training set share no problem; test/precalculus/285 and train/precalculus/474 differ in one
    sign (z^4 - z^2 + 1, z^4 + z^2 + 1), which a comparison without operators takes for the same."""
    held_out = str(published / "math500.jsonl")
    data = DataConfig(recipe="math", path=str(published), eval_path=held_out, max_prompt_tokens=4096)
    loaded = load(data, tokenizer_path, num_eval_problems=500)
    assert (len(loaded.train), len(loaded.evaluation)) == (7498, 500)
    assert loaded.report.overlap == ()
    itself = load(DataConfig(recipe="math", path=held_out, eval_path=held_out, max_prompt_tokens=4096),
                  tokenizer_path, num_eval_problems=500)
    assert len(itself.report.overlap) == 500


def test_loading_imports_no_torch():
    code = (
        "import sys, akl_dist.data.source; from transformers import PreTrainedTokenizerFast; "
        "print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "False"


def test_load_judges_golds_of_both_sides(tokenizer_path, write_jsonl):
    good, bad = [{"prompt": "a", "answer": "1"}], [{"prompt": "b", "answer": "2"}]
    train, held_out = write_jsonl("train.jsonl", good), write_jsonl("held_out.jsonl", bad)
    data = DataConfig(recipe="generic", path=train, eval_path=held_out)

    def refuses_two(gold: str) -> str | None:
        return "is two" if gold == "2" else None

    with pytest.raises(DataError, match=r"held_out\.jsonl: 1 of 1 rows: got line 1: gold '2' cannot be judged \(is two\)"):
        load(data, tokenizer_path, num_eval_problems=1, invalid_gold=refuses_two)
    assert len(load(data, tokenizer_path, num_eval_problems=1).evaluation) == 1


def test_empty_suffix_is_no_instruction(tokenizer_path, write_jsonl):
    path = write_jsonl("g.jsonl", [{"question": "a b", "answer": "#### 1"}])
    message = [load(DataConfig(recipe="gsm8k", path=path, prompt_suffix=suffix), tokenizer_path, num_eval_problems=0)
               .train[0].text for suffix in ("", None)]
    assert message[0] == "a b" and message[1].startswith("a b\n\nReason step by step")
