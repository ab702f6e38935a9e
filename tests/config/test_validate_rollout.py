"""Rules on conversations with environments, each with its border."""

from __future__ import annotations

import inspect

import pytest

from akl_dist.config.validate import warnings
from akl_dist.config.validate_rollout import INTERPRETERS
from akl_dist.rollout.launch import ENTROPY_TOPK, engine_settings
from akl_dist.rollout.python_tool import PythonTool
from akl_dist.rollout.tools import ToolSettings
from tests.config.test_validate import composed, problems

PYTHON = ("rollout.tools.environment=python", "rollout.tools.max_observation_tokens=16", "rollout.tools.role=user")
OWN = ("rollout.tools.environment='mine.games:Chess'", *PYTHON[1:])


def test_environments_that_are_allowed() -> None:
    assert problems(*PYTHON) == problems(*OWN) == {}
    assert problems(*OWN, "rollout.tools.void_turns=mask_turn", "rollout.tools.params={size: 8}") == {}


@pytest.mark.parametrize("name", ["pyhton", "chess", "'mine:'", "'mine.games:Chess.Board'", "'/tmp/games.py:Chess'", "'a b:C'"])
def test_names_that_are_no_class(name: str) -> None:
    found = problems(f"rollout.tools.environment={name}", *PYTHON[1:])
    assert list(found) == ["rollout.tools.environment"] and "module:Class" in str(found["rollout.tools.environment"])


@pytest.mark.parametrize("key", ["max_turns=3", "void_turns=mask_turn", "max_turn_tokens=8", "timeout_s=3", "role=user",
                                 "params={size: 8}", "max_observation_tokens=9", "num_workers=2"])
def test_keys_that_nothing_reads_without_an_environment(key: str) -> None:
    (subject, problem), = problems(f"rollout.tools.{key}").items()
    assert subject == f"rollout.tools.{key.partition('=')[0]}" and "rollout.tools.environment" in str(problem)


@pytest.mark.parametrize("key", ["call=hermes", "interpreter=persistent", "program_s=2"])
def test_keys_of_the_python_tool_alone(key: str) -> None:
    assert problems(*PYTHON, f"rollout.tools.{key}") == {}
    assert list(problems(*OWN, f"rollout.tools.{key}")) == [f"rollout.tools.{key.partition('=')[0]}"]


def test_limits_leave_room_for_turns() -> None:
    longest = composed().rollout.max_response_tokens
    for key, most in (("max_turn_tokens", longest), ("max_observation_tokens", longest - 2)):
        assert problems(*PYTHON, f"rollout.tools.{key}={most}") == {}
        assert list(problems(*PYTHON, f"rollout.tools.{key}={most + 1}")) == [f"rollout.tools.{key}"]
    assert list(problems(*PYTHON, "rollout.tools.program_s=5", "rollout.tools.timeout_s=5")) == ["rollout.tools.program_s"]
    assert problems(*PYTHON, "rollout.tools.program_s=5", "rollout.tools.timeout_s=5.5") == {}
    assert list(problems(*PYTHON, "rollout.tools.max_turns=0")) == ["rollout.tools.max_turns"]
    assert list(problems("verify.queue_groups=0")) == ["verify.queue_groups"] and problems("verify.queue_groups=1") == {}


def test_answers_that_may_fill_the_whole_response() -> None:
    longest = composed().rollout.max_response_tokens
    many = [text for text in warnings(composed(*PYTHON, f"rollout.tools.max_turns={longest // 16}")) if "rollout.tools" in text]
    assert len(many) == 1 and str(longest) in many[0]
    assert not [text for text in warnings(composed(*PYTHON, "rollout.tools.max_turns=1")) if "rollout.tools" in text]


def test_what_an_engine_is_made_with() -> None:
    settings = engine_settings(composed(*PYTHON, "rollout.tools.call=hermes", "rollout.tools.params={memory_mib: 64}"), "folder")
    assert settings.entropy_topk == 0 and settings.tools == ToolSettings(
        "python", {"call": "hermes", "interpreter": "stateless", "program_s": 5.0, "allow_unsandboxed": False, "memory_mib": 64},
        max_observation_tokens=16, role="user")
    own = engine_settings(composed(*OWN, "rollout.tools.params={size: 8}"), "folder").tools
    assert own is not None and own.params == {"size": 8} and own.environment == "mine.games:Chess"
    plain = engine_settings(composed("roles.entropy_source=rollout_topk"), "folder")
    assert plain.tools is None and plain.entropy_topk == ENTROPY_TOPK == 20


def test_a_replay_of_conversations_needs_no_environment(tmp_path):
    """The preset that made a dump also trains from it, scores of an environment included: nothing is sampled, nothing started."""
    (tmp_path / "step_000001.parquet").touch()
    replay = (f"rollout.replay={tmp_path}", "steps=1")
    assert problems(*PYTHON, *replay) == {}
    assert problems(*OWN, "verify.kind=environment", *replay) == {}
    (said,) = [text for text in warnings(composed(*PYTHON, *replay)) if text.startswith("rollout.tools")]
    assert "not started" in said


def test_answers_that_are_taken_for_calls():
    def said(*overrides):
        return [text for text in warnings(composed(*PYTHON, *overrides)) if "instead of answering" in text]

    assert len(said("verify.kind=code", "rollout.tools.call=fenced")) == 1
    assert not said("verify.kind=code", "rollout.tools.call=hermes") and not said("verify.kind=math")


def test_more_responses_than_interpreters():
    def said(*overrides):
        size = ("rollout.prompts_per_step=17", "rollout.group_size=4", "rollout.num_engines=1")
        return [text for text in warnings(composed(*PYTHON, *size, *overrides)) if "interpreters" in text]

    persistent = "rollout.tools.interpreter=persistent"
    assert inspect.signature(PythonTool).parameters["max_interpreters"].default == INTERPRETERS
    assert len(said(persistent)) == 1 and "68 responses" in said(persistent)[0]
    assert not said() and not said(persistent, "rollout.tools.num_workers=2")
    assert not said(persistent, "rollout.tools.params={max_interpreters: 68}")
    assert said(persistent, "rollout.tools.params={max_interpreters: 67}")
