"""What follows from other keys: the declaration of the python tool that the chat template is given, the kind of verifier."""

from __future__ import annotations

from akl_dist.config.command_line import check_command_line
from akl_dist.config.compose import beaten_choices, compose
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


def test_one_key_of_one_source_of_a_mixture() -> None:
    """As deep as it lies: the others keep what the file says."""
    command = check_command_line(["data=math_code", "data.mixture.mbpp.weight=3"])
    changed, before = compose(command.overrides).data.mixture, compose(["data=math_code"]).data.mixture
    assert changed["mbpp"] == {**before["mbpp"], "weight": 3}
    assert {name: one for name, one in changed.items() if name != "mbpp"} == {
        name: one for name, one in before.items() if name != "mbpp"}


def beaten(*overrides: str) -> str:
    return "\n".join(beaten_choices(overrides, compose(overrides)))


def test_a_choice_that_the_experiment_beats_is_named() -> None:
    """objective/kl=none beside +exp=tiny leaves both betas: whoever asks for no KL hears of it."""
    note = beaten("+exp=tiny", "objective/kl=none")
    assert "objective.kl.beta_reasoning=0.1 (not 0.0)" in note and "objective.kl.beta_answer=1.0 (not 0.0)" in note
    off = ("objective.kl.beta_reasoning=0", "objective.kl.beta_answer=0")
    assert "beta" not in beaten("+exp=tiny", "objective/kl=none", *off)
    for overrides in (("+exp=tiny_dapo", "objective/kl=none"), ("+exp=tiny", "roles=tail"), ("+exp=tiny", "objective=drpo_paper"),
                      ("data=mbpp",), ("+exp=tiny",)):
        assert beaten(*overrides) == ""
