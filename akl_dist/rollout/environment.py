"""What an environment is: the other side of a conversation with the policy. Standard library only; docs/tools.md shows one.

A rollout with an environment goes in turns. The policy writes a turn; the environment answers with a :class:`Step`; an observation
is put behind the turn as a message and the policy goes on; no observation ends the response. Each rollout has an environment
object of its own, which lives in a process that can be killed and never in the engine's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

PYTHON = "akl_dist.rollout.python_tool:PythonTool"  # the class behind the short name ``python``


@dataclass(frozen=True)
class Task:
    """What one response is about.

    Args:
        prompt_id: id of the prompt, the same for all of its samples.
        text: the problem as the data set has it.
        gold: its gold answer, in the form the verifier reads.
        extra: what else the data set says about it (JSON text), or "".
        sample_index: which of the prompt's samples this is.
        seed: for an environment that draws: the same for the same sample of the same step, other samples have others.
        think_open: the chat template has opened ``<think>`` for the response, so a turn begins inside its reasoning.
    """

    prompt_id: str
    text: str
    gold: str
    extra: str
    sample_index: int
    seed: int
    think_open: bool = False


@dataclass(frozen=True)
class Step:
    """The environment's answer to one turn.

    Args:
        observation: its message; None: it has nothing more to say and the response is finished.
        call: the turn called a tool.
        failed: ... and the call ended in an error, which is an observation all the same.
        void: the turn was neither a call nor a final answer (``rollout.tools.void_turns`` says what becomes of it).
        score: the environment's own reward so far; the last one given counts (``verify.kind=environment``).
    """

    observation: str | None
    call: bool = False
    failed: bool = False
    void: bool = False
    score: float | None = None


@runtime_checkable
class Environment(Protocol):
    """The methods that a class of one's own must have. It is made once for each response, with ``rollout.tools.params``.

    What a method raises fails that response alone (it gets no reward and is masked). A method that does not return within
    ``rollout.tools.timeout_s`` is ended together with its process: every response whose environment lives there fails.
    """

    def reset(self, task: Task) -> None:
        """Called once, before the first turn."""
        ...

    def step(self, turn: str) -> Step:
        """Answer a turn: the text that the policy wrote in it, without the end token."""
        ...

    def close(self) -> None:
        """Called once, when the response is finished. Not called where the process is killed."""
        ...
