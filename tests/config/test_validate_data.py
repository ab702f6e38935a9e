"""What is refused of data.mixture and data.template_kwargs, each with its reason, and what passes."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
import textwrap
from pathlib import Path

import pytest
import yaml

from akl_dist.cluster.placement import layout
from akl_dist.cluster.preflight import lacking
from akl_dist.config.compose import compose, from_yaml, to_yaml
from akl_dist.config.mixture import KEYS, from_hub, mixture_sources
from akl_dist.config.validate import validate, warnings
from akl_dist.contract.errors import ConfigError
from tests.config.test_validate import composed

BASE = ["+exp=tiny", "data.recipe=mixture"]
TWO = "data.mixture={tiny: {weight: 2}, multi_solution: {weight: 1}}"
LONG = "model.path=Qwen/Qwen2.5-0.5B-Instruct"


def problems(*overrides: str) -> str:
    try:
        validate(composed(*overrides))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("overrides", [
    [*BASE, TWO],
    [*BASE, "data.mixture={tiny: {}, multi_solution: {weight: 0.5, max_response_tokens: 8, limit: 5, eval: false}}"],
    [*BASE, "data.mixture={easy: {recipe: tiny, limit: 100}, more: {recipe: tiny, weight: 0}}"],
    [*BASE, TWO, "data.mixture.multi_solution={weight: 3}"],
    [*BASE, TWO, "data.template_kwargs={enable_thinking: false, depth: 3, tools: [{name: x}]}"],
    ["data=math_code", LONG],
    ["data=math_code", LONG, "data.mixture.mbpp={weight: 2, max_response_tokens: 32}"],
    ["data=mbpp", LONG], ["data=mbpp_sanitized", LONG], ["data=humaneval", LONG],
    *([*BASE, TWO, "objective.cokl.beta=0.1", f"objective.cokl.estimator={estimator}", "objective.kl.beta_reasoning=0",
       "objective.kl.beta_answer=0"] for estimator in ("group", "paper", "reference_buffer")),
])
def test_what_passes(overrides):
    assert problems(*overrides) == ""
    config = composed(*overrides)
    assert from_yaml(to_yaml(config)) == config


@pytest.mark.parametrize(("overrides", "words"), [
    ([*BASE], "data.mixture: got {}; expected at least one source"),
    (["+exp=tiny", TWO], "data.recipe: got 'tiny'; expected mixture with data.mixture"),
    ([*BASE, "data.mixture={tiny: 3}"], "data.mixture.tiny: got 3; expected a group of keys"),
    ([*BASE, "data.mixture={tiny: {wieght: 1}}"], "data.mixture.tiny.wieght: got an unknown key"),
    ([*BASE, "data.mixture={tiny: {wieght: 1}}"], "Write weight."),
    ([*BASE, "data.mixture={tiny: {weight: two}}"], "data.mixture.tiny.weight: got 'two'; expected a number"),
    ([*BASE, "data.mixture={tiny: {weight: true}}"], "expected a number"),
    ([*BASE, "data.mixture={tiny: {weight: -1}}"], "expected a number of at least 0"),
    ([*BASE, "data.mixture={tiny: {weight: 0}}"], "a weight above 0 of at least one source"),
    ([*BASE, "data.mixture={tiny: {}, multi_solution: {weight: 0, eval: false}}"], "nothing would use this source"),
    ([*BASE, f"data.mixture={{tiny: {{}}, x: {{recipe: generic, weight: 0, path: {__file__}}}}}"],
     "data.mixture.x.eval_path: got None; expected a file for a source of weight 0"),
    ([*BASE, TWO, "data.template_kwargs={enable_thinking: no}"], "got 'no'; expected true or false"),
    ([*BASE, TWO, "data.template_kwargs={enable_thinking: 'False'}"], "Write data.template_kwargs.enable_thinking=false."),
    ([*BASE, "data.mixture={tiny: {limit: 0}}"], "data.mixture.tiny.limit: got 0"),
    ([*BASE, "data.mixture={tinny: {}}"], "data.mixture.tinny.recipe: got None; expected a recipe"),
    ([*BASE, "data.mixture={tinny: {}}"], "Write tiny for tinny"),
    ([*BASE, "data.mixture={x: {recipe: gsm8}}"], "Write recipe: gsm8k."),
    ([*BASE, "data.mixture={x: {recipe: mixture}}"], "data.mixture.x.recipe: got 'mixture'"),
    ([*BASE, "data.mixture={tiny: {verifier: mth}}"], "Write verifier: math."),
    ([*BASE, "data.mixture={mbpp: {verifier: math}}"], "code with recipe mbpp, whose golds are tests"),
    ([*BASE, "data.mixture={tiny: {max_response_tokens: 65}}"], "a number from 1 to rollout.max_response_tokens="),
    ([*BASE, "data.mixture={tiny: {max_response_tokens: 0}}"], "a number from 1 to rollout.max_response_tokens="),
    ([*BASE, "data.mixture={tiny: {max_response_tokens: 1.5}}"], "expected an integer"),
    ([*BASE, "data.mixture={x: {recipe: generic}}"], "data.mixture.x.path: got None; expected a file, or name"),
    ([*BASE, "data.mixture={x: {recipe: generic, path: /no/such}}"], "data.mixture.x.path: got '/no/such'; expected an existing"),
    ([*BASE, "data.mixture={x: {recipe: generic, name: a/b, columns: {promt: q}}}"], "column names: prompt, answer, id"),
    ([*BASE, "data.mixture={tiny: {name: a/b}}"], "whose problems are generated"),
    ([*BASE, TWO, "data.limit=5"], "data.limit: got 5; expected the default unless data.mixture={}"),
    ([*BASE, TWO, "data.split=test"], "in a mixture every source has its own split"),
    ([*BASE, TWO, "data.columns.prompt=q"], "data.columns.prompt: got 'q'"),
    ([*BASE, TWO, "objective.cokl.beta=0.1", "objective.cokl.estimator=reference_buffer", "objective.cokl.prompts=anchor_dataset"],
     "which has no retained task"),
    (["data.template_kwargs={tokenize: true}"], "data.template_kwargs.tokenize: got True; expected another name"),
    (["data=mbpp", LONG, "verify.kind=math"], "verify.kind: got 'math'; expected code with data.recipe=mbpp"),
])
def test_what_is_refused(overrides, words):
    assert words in problems(*overrides)


@pytest.mark.parametrize(("changes", "words"), [
    ({"mixture": {"a b": {"recipe": "tiny"}}}, "it begins prompt ids"),
    ({"mixture": {"a/b": {"recipe": "tiny"}}}, "it begins prompt ids"),
    ({"mixture": {"tiny": {}}, "template_kwargs": {"enable-thinking": True}}, "the name of a variable of the chat template"),
    ({"mixture": {"tiny": {}}, "template_kwargs": {"x": [math.inf]}}, "text, a finite number, true, false, null"),
    ({"mixture": {"tiny": {}}, "template_kwargs": {"x": {"y": {1: 2}}}}, "text, a finite number, true, false, null"),
])
def test_what_a_file_can_say_and_is_refused(changes, words):
    """Names and values that a YAML file can hold and the command line cannot."""
    config = compose(BASE)
    with pytest.raises(ConfigError, match=words):
        validate(dataclasses.replace(config, data=dataclasses.replace(config.data, **changes)))


def test_one_source_can_be_changed_on_the_command_line():
    line = [*BASE, TWO, "data.mixture.multi_solution={weight: 3}"]
    assert compose(line) == composed(*line)
    assert compose(line).data.mixture == {"tiny": {"weight": 2}, "multi_solution": {"weight": 3}}
    assert compose(["data=math_code", TWO]).data.mixture == compose(line[:-1]).data.mixture, "the file's sources are replaced"


def test_sources_as_records():
    one, two = mixture_sources(compose([*BASE, "data.mixture={mbpp: {weight: 2}, own: {recipe: generic, name: a/b, columns: "
                                                 "{prompt: q}}}"]).data.mixture)
    assert (one.source, one.recipe, one.verifier, one.weight, one.split, one.eval) == ("mbpp", "mbpp", "code", 2.0, "train", True)
    assert (two.verifier, two.name, two.columns.prompt) == ("", "a/b", "q")
    data = two.data(compose([*BASE, "data.max_prompt_tokens=99"]).data)
    assert (data.recipe, data.name, data.columns.prompt, data.max_prompt_tokens, data.mixture) == ("generic", "a/b", "q", 99, {})


def test_the_page_on_data_says_what_is_so():
    """The YAML example of docs/data.md is a mixture, and its table names every key of a source."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    block = page.split("In YAML:\n\n")[1].split("\n\n**Order.**")[0]
    sources = {one.source: one for one in mixture_sources(yaml.safe_load(textwrap.dedent(block))["mixture"])}
    assert sources["shop"].columns.answer == "total" and sources["shop"].prompt_suffix == "\nEnd with \\boxed{}."
    assert (sources["shop"].verifier, sources["aime24"].weight, sources["gsm8k"].weight) == ("", 0, 3)
    table = page.split("| key of a source |")[1].split("\n\n")[0]
    assert set(re.findall(r"`([a-z_]+)`", "\n".join(line.split("|")[1] for line in table.splitlines()[2:]))) == set(KEYS)
    commands = [shlex.split(one) for one in re.findall(r"python -m akl_dist\.main (.*data\.mixture=.*)", page.replace("\\\n", " "))]
    assert commands
    for one in commands:
        assert problems(*(LONG if word == "model.path=DIR" else word for word in one)) == "", "what the page shows can be run"


def test_hardly_any_prompts_a_step():
    rare = compose([*BASE, "data.mixture={tiny: {weight: 99}, multi_solution: {weight: 1}}"])
    assert any("data.mixture.multi_solution: 0.01 of rollout.prompts_per_step" in text for text in warnings(rare))
    assert not any("data.mixture" in text for text in warnings(compose([*BASE, TWO])))


def test_what_a_dry_run_says_of_the_hub(tmp_path):
    file = tmp_path / "g.jsonl"
    file.write_text("{}\n")
    config = compose([*BASE, f"data.mixture={{tiny: {{}}, math: {{path: {file}}}, gsm8k: {{}}}}"])
    assert from_hub(config.data) == ["gsm8k"]
    assert [text for text in lacking(config, layout(config)) if text.startswith("hub: data set gsm8k")]
    held_out = compose([*BASE, f"data.mixture={{tiny: {{}}, math: {{weight: 0, eval_path: {file}}}, aime24: {{weight: 0}}, mbpp: "
                        f"{{path: {file}, eval_path: {file}}}, gsm8k: {{eval_path: {file}}}, dapo_math: {{path: {file}}}}}"])
    assert from_hub(held_out.data) == ["aime24", "gsm8k"], "of a source only evaluated the hub's training side is not read"
    assert from_hub(compose(["data=gsm8k", LONG]).data) == ["gsm8k"] and from_hub(compose([]).data) == []
