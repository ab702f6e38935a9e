"""Rules on conversations with environments (rollout.tools). Each refusal says why. Stdlib only."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from akl_dist.config.mixture import verifiers
from akl_dist.config.problems import Problems, Unread, problem
from akl_dist.config.schema import Config, ToolsConfig

PYTHON_KEYS = ("call", "interpreter", "program_s")  # of the python tool alone
INTERPRETERS = 64  # default of the python tool's max_interpreters; this package imports nothing of the rollout's
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def rollout_problems(config: Config) -> Problems:
    """Environments that cannot be, or whose limits leave no room for a turn."""
    rollout, tools = config.rollout, config.rollout.tools
    if tools.environment is None or rollout.replay is not None:  # a dump holds whole conversations: nothing is sampled
        return
    if tools.environment != "python" and not _CLASS.fullmatch(tools.environment):
        yield problem("rollout.tools.environment", tools.environment, "python, module:Class, or null", "Write the class as "
                      "package.module:ClassName, or rollout.tools.environment=python for the tool in the sandbox.")
    longest = rollout.max_response_tokens
    if tools.max_turn_tokens is not None and tools.max_turn_tokens > longest:
        yield problem("rollout.tools.max_turn_tokens", tools.max_turn_tokens, f"at most rollout.max_response_tokens={longest}, "
                      "which bounds all turns together", f"Write rollout.tools.max_turn_tokens={longest}, or null.")
    if tools.max_observation_tokens > longest - 2:
        yield problem("rollout.tools.max_observation_tokens", tools.max_observation_tokens, f"at most {longest - 2}, so that a "
                      f"turn before and one after fit into rollout.max_response_tokens={longest}",
                      f"Write rollout.tools.max_observation_tokens={max(longest // 4, 1)}, or allow longer responses.")
    if tools.environment == "python" and tools.program_s >= tools.timeout_s:
        yield problem("rollout.tools.program_s", tools.program_s, f"below rollout.tools.timeout_s={tools.timeout_s:g}: a step must "
                      "outlast its program, or the whole response is lost to a slow one", "Raise timeout_s, or lower program_s.")


def rollout_unread(config: Config) -> Iterator[Unread]:
    """Keys of the environments that nothing reads without them."""
    environment = config.rollout.tools.environment
    for name in (field.name for field in dataclasses.fields(ToolsConfig)):
        if name in PYTHON_KEYS:
            yield (f"rollout.tools.{name}", environment == "python", "rollout.tools.environment=python")
        elif name != "environment":
            yield (f"rollout.tools.{name}", environment is not None, "rollout.tools.environment")


def rollout_warnings(config: Config) -> Iterator[str]:
    """Settings that are allowed and probably not meant, one sentence each."""
    rollout, tools = config.rollout, config.rollout.tools
    if tools.environment is None:
        return
    if rollout.replay is not None:
        yield (f"rollout.tools.environment={tools.environment}: not started, because the conversations of rollout.replay="
               f"{rollout.replay} are trained on as they were recorded.")
        return
    if tools.environment == "python" and tools.call == "fenced" and "code" in verifiers(config):
        yield ("rollout.tools.call=fenced with programs as answers (verify.kind=code): a turn that ends with its answer's code "
               "block calls the tool instead of answering. With rollout.tools.call=hermes the two are told apart.")
    if tools.environment == "python" and tools.interpreter == "persistent":
        each = tools.params.get("max_interpreters", INTERPRETERS)
        room = tools.num_workers * (each if isinstance(each, int) else INTERPRETERS)  # the tool itself refuses what is no number
        drawn = -(-rollout.prompts_per_step // rollout.num_engines) * rollout.group_size
        if drawn > room:
            yield (f"rollout.tools.interpreter=persistent: up to {drawn} responses of an engine want an interpreter at the same "
                   f"time, and its {tools.num_workers} environment processes have {room}: the others' calls fail. Raise "
                   "rollout.tools.num_workers, or write rollout.tools.params={max_interpreters: ...}.")
    wanted = tools.max_turns * tools.max_observation_tokens
    if wanted >= rollout.max_response_tokens:
        yield (f"rollout.tools.max_turns={tools.max_turns} answers of up to {tools.max_observation_tokens} tokens may fill all of "
               f"rollout.max_response_tokens={rollout.max_response_tokens}, which bounds a whole response.")
