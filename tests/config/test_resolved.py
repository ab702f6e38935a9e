"""What follows from other keys: the declaration of the python tool that the chat template is given, the kind of verifier."""

from __future__ import annotations

from akl_dist.config.compose import compose
from akl_dist.config.resolve import PYTHON_TOOL, resolved_data

HERMES = ["+exp=tiny", "rollout.tools.environment=python", "rollout.tools.call=hermes"]


def test_calls_in_the_templates_own_format_are_declared_to_it() -> None:
    config = compose([*HERMES, "data.template_kwargs={enable_thinking: false}"])
    assert resolved_data(config).template_kwargs == {"enable_thinking": False, "tools": [PYTHON_TOOL]}
    assert config.data.template_kwargs == {"enable_thinking": False}, "the configuration stays as written"


def test_a_declaration_of_ones_own_stays() -> None:
    config = compose([*HERMES, "data.template_kwargs={tools: [{name: mine}]}"])
    assert resolved_data(config) is config.data


def test_without_such_a_tool_nothing_is_declared() -> None:
    for overrides in (["+exp=tiny"], [*HERMES[:2], "rollout.tools.call=fenced"], [HERMES[0], "rollout.tools.environment=m:C"]):
        config = compose(overrides)
        assert resolved_data(config) is config.data


def test_the_papers_recipe_calls_the_tool() -> None:
    config = compose(["+exp=ctpo_4b"])
    assert (config.rollout.tools.environment, config.rollout.tools.max_turns) == ("python", 5)
    assert resolved_data(config).template_kwargs["tools"] == [PYTHON_TOOL]


def test_a_reward_of_ones_own_says_the_kind_of_verifier() -> None:
    assert compose(["+exp=tiny", "verify.custom=my_rewards:brief"]).verify.kind == "custom"
    assert compose(["+exp=tiny", "verify.http_url=http://localhost:1/"]).verify.kind == "http"
    assert compose(["+exp=tiny", "verify.custom=m:f", "verify.kind=math"]).verify.kind == "math", "validation refuses it"
    assert compose(["+exp=tiny", "verify.custom=m:f", "verify.http_url=http://localhost:1/"]).verify.kind == "math"
    assert compose(["+exp=tiny"]).verify.kind == "math"
