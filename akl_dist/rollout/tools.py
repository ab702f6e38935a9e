"""The environments of an engine: their settings, and what the sampler needs to take turns with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from akl_dist.config.schema import Config
from akl_dist.rollout.environment_main import check_params, load
from akl_dist.rollout.environment_pool import EnvironmentPool
from akl_dist.rollout.sampler import Tools

START_TIMEOUT_S = 60.0  # until an environment process is up
SILENCE_STEPS = 4.0  # limits of a step in which some environment must have answered, beside a start


@dataclass(frozen=True)
class ToolSettings:
    """``rollout.tools`` as an engine takes it; plain values, so that it crosses processes.

    Attributes:
        environment: "python" or "module:Class", made with ``params``.
        max_turns, max_turn_tokens, void_turns: see :class:`~akl_dist.rollout.turns.TurnLimits`.
        role, max_observation_tokens, template_kwargs: how an answer becomes tokens; see
            :class:`~akl_dist.rollout.observations.ObservationTemplate`.
        num_workers, timeout_s: processes of one engine, and the limit of one step.
    """

    environment: str
    params: Mapping[str, Any] = field(default_factory=dict)
    max_turns: int = 5
    max_turn_tokens: int | None = None
    max_observation_tokens: int = 256
    role: str = "tool"
    void_turns: str = "keep"
    num_workers: int = 1
    timeout_s: float = 10.0
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OpenTools:
    """The processes, to be closed by their owner, and what the sampler does with them."""

    pool: EnvironmentPool
    tools: Tools


def tool_settings(config: Config) -> ToolSettings | None:
    """The settings of a configuration's environments; None where responses are sampled in one piece."""
    tools = config.rollout.tools
    if tools.environment is None:
        return None
    own = {"call": tools.call, "interpreter": tools.interpreter, "program_s": tools.program_s,
           "allow_unsandboxed": config.verify.allow_unsandboxed} if tools.environment == "python" else {}
    return ToolSettings(
        environment=tools.environment, params={**own, **tools.params}, max_turns=tools.max_turns,
        max_turn_tokens=tools.max_turn_tokens, max_observation_tokens=tools.max_observation_tokens, role=tools.role,
        void_turns=tools.void_turns, num_workers=tools.num_workers, timeout_s=tools.timeout_s,
        template_kwargs=config.data.template_kwargs)


def check_environment(config: Config) -> None:
    """Import the class that the configuration names and hold it against the protocol and its parameters: before anything starts.

    Raises:
        UserError: one that is not there or does not fit.
    """
    settings = tool_settings(config)
    if settings is not None and config.rollout.replay is None:
        check_params(settings.environment, load(settings.environment), settings.params)


def open_tools(settings: ToolSettings, tokenizer_path: str) -> OpenTools:
    """Start the environment processes. Errors: those of :class:`EnvironmentPool` and of the template."""
    from akl_dist.rollout.observations import ObservationTemplate

    template = ObservationTemplate(tokenizer_path, role=settings.role, max_tokens=settings.max_observation_tokens,
                                   template_kwargs=settings.template_kwargs)
    pool = EnvironmentPool(environment=settings.environment, params=settings.params, num_workers=settings.num_workers,
                           timeout_s=settings.timeout_s, start_timeout_s=START_TIMEOUT_S)
    return OpenTools(pool, Tools(
        environments=pool, observation_ids=template.ids, text=turn_text(tokenizer_path), max_turns=settings.max_turns,
        max_turn_tokens=settings.max_turn_tokens, void_turns=settings.void_turns,
        silence_s=START_TIMEOUT_S + SILENCE_STEPS * settings.timeout_s))


def turn_text(tokenizer_path: str) -> Callable[[Sequence[int]], str]:
    """Decoder of a turn's token ids: special tokens stay in the text, invalid bytes become U+FFFD; as verifiers read it."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(tokenizer_path) / "tokenizer.json"))
    return lambda token_ids: tokenizer.decode(list(token_ids), skip_special_tokens=False)
