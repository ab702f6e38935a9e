"""Mixtures: the schedule by hand and by its bound, resuming, per-source limits and verifiers, checks across sources."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from fractions import Fraction
from itertools import islice

import pytest

from akl_dist.config.mixture import mixture_sources, natural_verifier, shares, verifiers
from akl_dist.config.schema import Config, DataConfig, VerifyConfig
from akl_dist.contract.errors import DataError, ResumeMismatch
from akl_dist.contract.records import Prompt
from akl_dist.data.mixture import MixedPromptSource, prompt_source_of, schedule, source_from_state
from akl_dist.data.order import PromptSource
from akl_dist.data.recipes import RECIPES
from akl_dist.data.source import DataReport, LoadedData, load, load_evaluation

SIZES = {"a": 12, "b": 7, "c": 30}
WEIGHTS = {"a": 2, "b": 1, "c": 1}


def prompts(sizes: dict[str, int] = SIZES) -> list[Prompt]:
    return [Prompt(f"{name}/{i}", name, f"p{i}", (i + 1,), str(i)) for name, n in sizes.items() for i in range(n)]


def parts(weights: dict[str, float] = WEIGHTS) -> dict[str, Fraction]:
    return shares(mixture_sources({name: {"recipe": "tiny", "weight": weight} for name, weight in weights.items()}))


def mixed(weights: dict[str, float] = WEIGHTS, seed: int = 3) -> MixedPromptSource:
    return MixedPromptSource(prompts(), parts(weights), seed=seed)


def ids(batch: list[Prompt]) -> list[str]:
    return [p.prompt_id for p in batch]


# --- the schedule ------------------------------------------------------------------------------------------------------


def test_schedule_by_hand():
    """Two to one: the source that is due first, ties by name. After 1 place a is owed 2/3 and b 1/3, so a; after 2 places b is
    owed 2/3 and a 1/3 more than it has, so b; the third brings both to their share."""
    assert "".join(islice(schedule({"b": Fraction(1, 3), "a": Fraction(2, 3)}), 9)) == "abaabaaba"
    assert "".join(islice(schedule({"a": Fraction(1)}), 4)) == "aaaa"


@pytest.mark.parametrize("weights", [
    {"a": 1, "b": 1}, {"a": 2, "b": 1}, {"a": 0.7, "b": 0.3}, {"a": 1, "b": 1, "c": 1}, {"a": 5, "b": 2, "c": 1},
    {"a": 0.5, "b": 0.3, "c": 0.15, "d": 0.05}, {"a": 97, "b": 1, "c": 1, "d": 1, "e": 13},
])
def test_every_window_holds_its_shares(weights: dict[str, float]):
    part = parts(weights)
    order = list(islice(schedule(part), 600))
    bound = 1 - Fraction(1, 2 * len(part) - 2)
    for name, share in part.items():
        ahead = [Fraction(0)]  # of its share, after each place
        for chosen in order:
            ahead.append(ahead[-1] + (chosen == name) - share)
        assert max(map(abs, ahead)) <= bound < 1, "a prefix"
        assert max(ahead) - min(ahead) <= (1 if len(part) == 2 else 2 * bound), "any window"


def test_a_drawn_schedule_would_break_the_bound():
    """Negative control: sources drawn at random by their weights are not within 1 of their shares."""
    import random

    drawn = random.Random(0).choices("ab", weights=(2, 1), k=600)
    ahead = [sum(one == "a" for one in drawn[:n]) - Fraction(2 * n, 3) for n in range(601)]
    assert max(map(abs, ahead)) > 1


def test_the_schedule_goes_on_from_its_counts():
    part = parts({"a": 5, "b": 2, "c": 1})
    whole = list(islice(schedule(part), 100))
    for stop in (1, 7, 8, 50):
        assert list(islice(schedule(part, Counter(whole[:stop])), 100 - stop)) == whole[stop:]


def test_weights_are_proportions_and_exact():
    assert parts({"a": 2, "b": 1}) == parts({"a": 4, "b": 2}) == {"a": Fraction(2, 3), "b": Fraction(1, 3)}
    assert parts({"a": 0.1, "b": 0.2, "c": 0}) == {"a": Fraction(1, 3), "b": Fraction(2, 3)}  # as written, not as binary floats


# --- prompts -----------------------------------------------------------------------------------------------------------


def test_shares_and_uniqueness_of_batches():
    source = mixed()
    source.check_step(8)
    for _ in range(30):
        batch = source.take(8)
        assert len(set(ids(batch))) == 8
    taken = Counter(p.source for _ in range(30) for p in source.take(8))
    assert all(abs(taken[name] - 240 * share) < 2 for name, share in parts().items())
    assert source.position == 480 and len(source) == 49


def test_each_source_keeps_its_own_order():
    source = mixed()
    taken = [p for _ in range(12) for p in source.take(4)]
    for name in SIZES:
        own = PromptSource([p for p in prompts() if p.source == name], seed=3)
        mine = [p.prompt_id for p in taken if p.source == name]
        assert mine == [p for epoch in range(3) for p in own.order(epoch)][: len(mine)]


def test_the_batch_size_does_not_change_the_order():
    ten = mixed()
    assert ids(ten.take(10)) + ids(ten.take(10)) == ids(mixed().take(10) + mixed_after(10).take(10))
    one = mixed()
    by_twelves, twelve = mixed(), [one.take(1)[0].prompt_id for _ in range(36)]
    assert [name for _ in range(3) for name in ids(by_twelves.take(12))] == twelve
    assert by_twelves.state() == one.state()
    assert ids(mixed(seed=4).take(20)) != ids(mixed(seed=3).take(20))


def mixed_after(n: int) -> MixedPromptSource:
    source = mixed()
    source.take(n)
    return source


def test_the_order_is_pinned():
    """A changed order would break old checkpoints."""
    assert ids(mixed().take(8)) == ["a/9", "b/2", "c/23", "a/6", "a/11", "b/3", "c/16", "a/0"]


@pytest.mark.parametrize("stop", [0, 1, 4, 9])
@pytest.mark.parametrize("batch", [3, 8])
def test_resume_equals_uninterrupted(stop: int, batch: int):
    whole = mixed()
    expected = [ids(whole.take(batch)) for _ in range(12)]
    first = mixed()
    got = [ids(first.take(batch)) for _ in range(stop)]
    state = json.loads(json.dumps(first.state()))
    second = MixedPromptSource.from_state(list(reversed(prompts())), state, parts())
    assert second.state() == state and second.fingerprint == first.fingerprint
    got += [ids(second.take(batch)) for _ in range(12 - stop)]
    assert got == expected and second.state() == whole.state()


def loaded(sizes: dict[str, int] = SIZES) -> LoadedData:
    return LoadedData(prompts(sizes), [], dataclasses.replace(EMPTY))


EMPTY = DataReport("mixture", "", *(2 * [None]))  # type: ignore[arg-type]


def config(weights: dict[str, float] = WEIGHTS) -> DataConfig:
    return DataConfig(recipe="mixture", mixture={name: {"recipe": "tiny", "weight": weight} for name, weight in weights.items()})


def test_resume_refuses_what_has_changed():
    state = mixed_after(5).state()
    assert prompt_source_of(loaded(), config(), 3, state).state() == state
    assert prompt_source_of(loaded(), config({"a": 4, "b": 2, "c": 2}), 3, state).state() == state
    for changed in ({"a": 1, "b": 1, "c": 1}, {"a": 2, "b": 1}, {"a": 2, "b": 1, "c": 1, "d": 1}):
        with pytest.raises(ResumeMismatch, match=r"data\.mixture: got .*checkpoint's shares: a 1/2, b 1/4, c 1/4.*resume=never"):
            prompt_source_of(loaded(), config(changed), 3, state)
    with pytest.raises(ResumeMismatch, match=r"data\.mixture\.b.*8 prompts that differ"):
        prompt_source_of(loaded({**SIZES, "b": 8}), config(), 3, state)
    with pytest.raises(ResumeMismatch, match=r"data\.mixture: got \{\}"):
        prompt_source_of(loaded(), DataConfig(), 3, state)
    alone = PromptSource(prompts(), seed=3).state()
    with pytest.raises(ResumeMismatch, match="one data set, as in the checkpoint"):
        prompt_source_of(loaded(), config(), 3, alone)


def test_one_function_for_both_kinds():
    assert isinstance(prompt_source_of(loaded(), DataConfig(), 3), PromptSource)
    assert isinstance(prompt_source_of(loaded(), config(), 3), MixedPromptSource)
    for source in (mixed_after(5), PromptSource(prompts(), seed=3)):
        ahead = source_from_state(prompts(), source.state())
        assert type(ahead) is type(source) and ids(ahead.take(6)) == ids(source.take(6))


def test_a_source_too_small_for_a_step():
    few = {**SIZES, "a": 3}
    with pytest.raises(DataError, match=r"data\.mixture\.a: got 3 training prompts; expected at least 5.*prompts_per_step=8"):
        prompt_source_of(loaded(few), config(), 3, prompts_per_step=8)
    source = prompt_source_of(loaded(few), config(), 3)
    source.take(4)
    before = source.state()
    with pytest.raises(DataError, match=r"data\.mixture\.a: got 3"):
        source.take(8)
    assert source.state() == before and len(source.take(4)) == 4
    with pytest.raises(DataError, match=r"training prompts of data\.mixture\.b: got 0"):
        prompt_source_of(loaded({"a": 3, "b": 0, "c": 1}), config(), 3)
    with pytest.raises(DataError, match="at least 1"):
        mixed().take(0)


@pytest.mark.parametrize("weights", [{"a": 1, "b": 1}, {"a": 3, "b": 2, "c": 2}, {"a": 1, "b": 1, "c": 7}])
@pytest.mark.parametrize("n", [1, 5, 8])
def test_what_check_step_lets_pass_is_always_enough(weights: dict[str, float], n: int):
    """The largest draw of a source in any step never exceeds the bound that check_step goes by."""
    for size in range(1, 9):
        source = MixedPromptSource(prompts(dict.fromkeys(weights, size)), parts(weights), seed=0)
        try:
            source.check_step(n)
        except DataError:
            continue
        for _ in range(60):
            source.take(n)


# --- loading -----------------------------------------------------------------------------------------------------------


def rows(*pairs: tuple[str, str], start: int = 0) -> list[dict[str, str]]:
    return [{"id": f"r{start + n}", "prompt": text, "answer": gold} for n, (text, gold) in enumerate(pairs)]


def sources(write_jsonl, **changes) -> DataConfig:
    math = write_jsonl("gsm.jsonl", [{"question": "a b", "answer": "#### 1"}, {"question": "b c", "answer": "#### 2"}])
    held = write_jsonl("gsm_test.jsonl", [{"question": "a a", "answer": "#### 3"}])
    own = write_jsonl("own.jsonl", rows(("a", "1"), ("b", "2"), ("A b.", "9"), ("c c", "4")))
    own_test = write_jsonl("own_test.jsonl", rows(("B  c!", "7"), ("be", "8")))
    mixture = {"gsm8k": {"weight": 2, "path": math, "eval_path": held},
               "own": {"recipe": "generic", "path": own, "eval_path": own_test, "limit": 3, "verifier": "code",
                       "max_response_tokens": 5, "prompt_suffix": " c"}}
    for name, change in changes.pop("change", {}).items():
        mixture[name] = {**mixture.get(name, {}), **change}
    return DataConfig(recipe="mixture", mixture=mixture, max_prompt_tokens=64, **changes)


def test_load_by_hand(write_jsonl, tokenizer_path):
    found = load(sources(write_jsonl), tokenizer_path, num_eval_problems=None)
    assert [(p.prompt_id, p.source, p.verifier, p.max_response_tokens) for p in found.train] == [
        ("gsm8k/train/0", "gsm8k", "math", None), ("gsm8k/train/1", "gsm8k", "math", None),
        ("own/r0", "own", "code", 5), ("own/r1", "own", "code", 5), ("own/r2", "own", "code", 5)]
    assert found.train[0].text.endswith("\\boxed{}.") and found.train[2].text == "a c", "each source has its own words"
    assert [(p.prompt_id, p.source, p.verifier) for p in found.evaluation] == [
        ("gsm8k/test/0", "gsm8k", "math"), ("own/r0", "own", "code"), ("own/r1", "own", "code")]
    assert found.suffixes["own"] == " c" and found.suffixes["gsm8k"].startswith("\n\nReason")
    report = found.report.as_dict()
    assert report["overlap"] == ["own/r0"], "a training problem of gsm8k that own is evaluated on"
    assert report["repeated"] == ["own/r2"], "own's third problem is gsm8k's first"
    assert (report["train"]["rows"], report["train"]["used"], report["train"]["unselected"]) == (6, 5, 1)
    assert report["sources"]["own"]["share"] == pytest.approx(1 / 3) and report["sources"]["own"]["train"]["used"] == 3
    assert report["instruction"].startswith("gsm8k boxed-1, own custom-")
    text = str(found.report)
    assert "source own: share 33.3 %, verifier code, at most 5 response tokens; 3 training and 2 evaluation prompts" in text
    assert "repeated: 1 training prompts" in text


def test_contaminated_prompts_are_dropped_from_their_source(write_jsonl, tokenizer_path):
    found = load(sources(write_jsonl, contaminated="drop"), tokenizer_path, num_eval_problems=None)
    assert ids(found.train) == ["gsm8k/train/0", "own/r0", "own/r1", "own/r2"]
    assert found.report.sources["gsm8k"].train.contaminated == ("gsm8k/train/1",)
    assert found.report.sources["own"].train.contaminated == ()
    assert found.report.train.used == 4
    with pytest.raises(DataError, match="1 that are also evaluated on"):
        load(sources(write_jsonl, contaminated="error"), tokenizer_path, num_eval_problems=None)


def test_golds_are_checked_by_their_own_verifier(write_jsonl, tokenizer_path):
    """The run's own verifier would take every gold; the one that the source names refuses two."""
    def checks(kind: str):
        return lambda gold: f"no {kind}" if kind == "code" and gold in ("2", "8") else None

    data = sources(write_jsonl)
    with pytest.raises(DataError, match=r"own\.jsonl: 1 of 4 rows: got line 2 \(id r1\): gold '2' cannot be judged \(no code\)"):
        load(data, tokenizer_path, num_eval_problems=None, invalid_gold=lambda gold: None, gold_checks=checks)
    dropped = load(dataclasses.replace(data, invalid_gold="drop"), tokenizer_path, num_eval_problems=None,
                   invalid_gold=lambda gold: None, gold_checks=checks)
    assert [p.gold for p in dropped.train if p.source == "gsm8k"] == ["1", "2"]
    assert dropped.report.sources["own"].train.excluded == ("line 2 (id r1): gold '2' cannot be judged (no code)",)
    assert len(dropped.report.evaluation.excluded) == 1


def test_evaluation_is_shared_out(write_jsonl, tokenizer_path):
    data = sources(write_jsonl)
    assert Counter(p.source for p in load(data, tokenizer_path, num_eval_problems=2).evaluation) == {"gsm8k": 1, "own": 1}
    assert load(data, tokenizer_path, num_eval_problems=0).evaluation == []
    without = sources(write_jsonl, change={"own": {"eval": False}})
    assert {p.source for p in load(without, tokenizer_path, num_eval_problems=None).evaluation} == {"gsm8k"}
    alone = load_evaluation(data, tokenizer_path, num_problems=None)
    assert alone.train == [] and len(alone.evaluation) == 3 and alone.report.overlap == ()
    no_file = sources(write_jsonl, change={"gsm8k": {"eval_path": None}})
    assert {p.source for p in load_evaluation(no_file, tokenizer_path, num_problems=None).evaluation} == {"own"}
    nothing = load(sources(write_jsonl, change={"gsm8k": {"eval_path": None}, "own": {"eval": False}}), tokenizer_path,
                   num_eval_problems=None)
    said = str(nothing.report)
    assert "evaluation: none (no source has a held-out side" in said and "set data.eval_path" not in said


def test_sources_that_are_only_evaluated(write_jsonl, tokenizer_path):
    bench = write_jsonl("aime24.jsonl", [{"id": 60, "problem": "be be", "answer": "25"}])
    data = sources(write_jsonl, change={"aime24": {"weight": 0, "eval_path": bench}})
    found = load(data, tokenizer_path, num_eval_problems=None)
    assert {p.source for p in found.train} == {"gsm8k", "own"}
    assert "aime24/60" in ids(found.evaluation) and "source aime24: only evaluated" in str(found.report)
    assert {p.source for p in prompt_source_of(found, data, 0, prompts_per_step=2).take(3)} == {"gsm8k", "own"}
    trained = sources(write_jsonl, change={"aime24": {"weight": 1, "path": bench}})
    with pytest.raises(DataError, match=r"data\.mixture\.aime24\.recipe: got aime24, a benchmark.*weight: 0"):
        load(trained, tokenizer_path, num_eval_problems=None)


def test_a_benchmark_that_two_recipes_share_is_evaluated_once(write_jsonl, tokenizer_path, tmp_path):
    write_jsonl("f/aime24.jsonl", [{"id": 60, "problem": "a a", "answer": "025"}])
    write_jsonl("f/aime25.jsonl", [{"id": 0, "problem": "b b", "answer": "70"}])
    write_jsonl("f/math500.jsonl", [{"unique_id": "t/1", "problem": "c c", "answer": "1", "solution": ""}])
    one = write_jsonl("one.jsonl", [{"problem": "a", "answer": "1"}])
    data = DataConfig(recipe="mixture", max_prompt_tokens=64, mixture={
        name: {"path": one, "eval_path": str(tmp_path / "f")} for name in ("dapo_math", "deepscaler")})
    found = load(data, tokenizer_path, num_eval_problems=None)
    assert sorted(ids(found.evaluation)) == ["aime24/60", "aime25/0", "math500/t/1"]
    assert ids(found.train) == ["dapo_math/train/0", "deepscaler/train/0"] and found.report.repeated == ("deepscaler/train/0",)
    write_jsonl("g/aime24.jsonl", [{"id": 60, "problem": "a a", "answer": "26"}])
    write_jsonl("g/math500.jsonl", [{"unique_id": "t/1", "problem": "c c", "answer": "1", "solution": ""}])
    other = {**data.mixture, "deepscaler": {"path": one, "eval_path": str(tmp_path / "g")}}
    with pytest.raises(DataError, match=r"evaluation problem aime24/60: got another one in data\.mixture\.deepscaler\.eval_path"):
        load(dataclasses.replace(data, mixture=other), tokenizer_path, num_eval_problems=None)


def test_a_recipe_of_several_data_sets_is_one_source(write_jsonl, tokenizer_path, tmp_path):
    write_jsonl("d/gsm8k_train.jsonl", [{"question": "a", "answer": "#### 1"}])
    write_jsonl("d/math_train.jsonl", [{"problem": "b", "solution": r"\boxed{2}"}])
    data = DataConfig(recipe="mixture", max_prompt_tokens=64, mixture={
        "both": {"recipe": "gsm8k_math", "path": str(tmp_path / "d")}, "tiny_like": {"recipe": "generic", "path": write_jsonl(
            "x.jsonl", rows(("c", "1")))}})
    found = load(data, tokenizer_path, num_eval_problems=0)
    assert [(p.prompt_id, p.source) for p in found.train] == [
        ("both/gsm8k/train/0", "both"), ("both/math/train/0", "both"), ("tiny_like/r0", "tiny_like")]
    assert prompt_source_of(found, data, 0).state()["sources"]["both"]["num_prompts"] == 2
    with pytest.raises(DataError, match=r"data\.mixture\.both\.path: got .*a folder with one file per part"):
        load(dataclasses.replace(data, mixture={"both": {"recipe": "gsm8k_math", "path": write_jsonl("y.jsonl", [{}])}}),
             tokenizer_path, num_eval_problems=0)


def test_rows_that_name_their_source_keep_it(write_jsonl, tokenizer_path):
    """Of files made for verl: metrics and rewards go by the row's data_source, the order and its limits by the mixture's source."""
    path = write_jsonl("v.jsonl", [{"data_source": name, "prompt": [{"role": "user", "content": "a"}], "extra_info": {"index": n},
                                    "reward_model": {"ground_truth": "1"}} for n, name in enumerate(["x/y", "z"])])
    data = sources(write_jsonl, change={"rows": {"recipe": "verl", "path": path, "max_response_tokens": 3}})
    found = load(data, tokenizer_path, num_eval_problems=0)
    mine = [p for p in found.train if p.prompt_id.startswith("rows/")]
    assert [(p.prompt_id, p.source, p.verifier, p.max_response_tokens, p.extra) for p in mine] == [
        ("rows/train/0", "x/y", "", 3, '{"index": 0}'), ("rows/train/1", "z", "", 3, '{"index": 1}')]
    assert prompt_source_of(found, data, 0).state()["sources"]["rows"]["num_prompts"] == 2


def test_published_files_as_a_mixture(published, tokenizer_path):
    """GSM8K's test side as training data, MBPP and HumanEval, every gold checked by its own verifier."""
    from akl_dist.verify.golds import invalid_gold

    at = {name: str(published / f"{name}.jsonl") for name in ("gsm8k_test", "mbpp", "humaneval", "aime24")}
    data = DataConfig(recipe="mixture", max_prompt_tokens=4096, mixture={
        "gsm8k": {"weight": 3, "path": at["gsm8k_test"]}, "mbpp": {"path": at["mbpp"], "eval_path": at["mbpp"]},
        "humaneval": {"weight": 0, "eval_path": at["humaneval"]}, "aime24": {"weight": 0, "eval_path": at["aime24"]}})
    found = load(data, tokenizer_path, num_eval_problems=None, invalid_gold=invalid_gold("custom"), gold_checks=invalid_gold)
    assert Counter(p.source for p in found.train) == {"gsm8k": 1319, "mbpp": 374}
    assert Counter((p.source, p.verifier) for p in found.evaluation) == {
        ("mbpp", "code"): 500, ("humaneval", "code"): 164, ("aime24", "math"): 30}
    batch = prompt_source_of(found, data, 0, prompts_per_step=64).take(64)
    assert Counter(p.source for p in batch) == {"gsm8k": 48, "mbpp": 16}


def test_natural_verifiers_are_those_of_the_recipes():
    for name, recipe_parts in RECIPES.items():
        expected = "" if name in ("generic", "verl") else recipe_parts[0].instruction.verifier
        assert natural_verifier(name) == expected, name
    run = Config(verify=VerifyConfig(kind="custom"), data=DataConfig(mixture={"gsm8k": {}, "mbpp": {}}))
    assert verifiers(run) == {"math", "code"}
    assert verifiers(dataclasses.replace(run, data=DataConfig(mixture={"own": {"recipe": "generic"}}))) == {"custom"}
    assert verifiers(dataclasses.replace(run, data=DataConfig())) == {"custom"}
