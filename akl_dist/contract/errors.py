"""Errors that say what to do. All of them survive pickling, so an actor's error reaches the driver as it was raised.

Two families decide the exit code: a :class:`UserError` is a mistake in configuration, data or files (exit 2),
a :class:`RunError` is a run that failed (exit 1).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name closest in spelling to ``name`` whatever its case, or None when nothing is close.

    Names that begin with the typed text come first (``drpo`` -> ``drpo_paper``, not ``grpo``).
    """
    spelt = {one.lower(): one for one in reversed(list(valid))}
    begun = beginning_with(name, spelt.values())
    close = difflib.get_close_matches(name.lower(), spelt, n=1, cutoff=0.6)
    return min(begun, key=len) if begun else spelt[close[0]] if close else None


def beginning_with(name: str, valid: Iterable[str]) -> list[str]:
    """The valid names that the typed text begins, whatever its case; none for a single letter, which says too little."""
    return [one for one in valid if len(name) > 1 and one.lower().startswith(name.lower())]


class AklError(Exception):
    """Base of every error raised on purpose.

    Args:
        subject: what is wrong, by its name ("learner.num_ranks", "rollout engine 1", a path).
        got: what was found.
        expected: what would have been right.
        remedy: what to do about it.
        stage: one of the six stage words, "data", "config", "checkpoint", "cluster" or "run".
        actor: name of the actor concerned, empty for the driver.
    """

    exit_code = 1

    def __init__(
        self, subject: str, *, got: str, expected: str, remedy: str, stage: str = "run", actor: str = ""
    ) -> None:
        super().__init__(subject, got, expected, remedy, stage, actor)
        self.subject, self.got, self.expected, self.remedy = subject, got, expected, remedy
        self.stage, self.actor = stage, actor

    def __reduce__(self):  # exceptions with keyword-only arguments do not unpickle by default
        return _rebuild, (type(self), self.args, self.__dict__.copy())

    def __str__(self) -> str:
        return f"{self.subject}: got {self.got}; expected {self.expected}. {self.remedy}".rstrip()


def _rebuild(cls: type[AklError], args: tuple, state: dict) -> AklError:
    error = cls.__new__(cls)
    Exception.__init__(error, *args)
    error.__dict__.update(state)
    return error


class UserError(AklError):
    """A mistake in the command, the configuration or a file the user named. Exit code 2."""

    exit_code = 2


class ConfigError(UserError):
    """Every problem found in a configuration, raised once.

    ``problems`` holds one :class:`UserError` per problem (subject = the key).
    """

    def __init__(self, problems: list[UserError]) -> None:
        assert problems, "a ConfigError needs at least one problem"
        keys = ", ".join(p.subject for p in problems)
        super().__init__(
            f"configuration ({len(problems)} problem{'s' if len(problems) > 1 else ''})",
            got=keys, expected="a valid configuration", remedy="Mend the keys listed.", stage="config",
        )
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(f"- {problem}" for problem in self.problems)


class DataError(UserError):
    """A data set, file, column or row that cannot be used."""


class ModelError(UserError):
    """A model or tokenizer folder that cannot be used."""


class RunError(AklError):
    """A run that failed after it had started. Exit code 1."""


class ActorDied(RunError):
    """An actor's process ended while the run still needed it."""


class DeadlineExceeded(RunError):
    """A wait ran past its limit; ``subject`` names whom it waited for."""


class NonFiniteLoss(RunError):
    """A loss was NaN or infinite; raised before the optimizer step, so the weights are unchanged."""


class StaleRollout(RunError):
    """A sample was drawn by a policy older than the configured staleness bound."""


class WeightSyncError(RunError):
    """Engine weights are not the learner's: manifest mismatch, probe gap above its bound, or a failed transfer."""


class VerifierFault(RunError):
    """The share of answers without a verdict (timeout, error, invalid gold) passed its bound."""


class CheckpointError(RunError):
    """A checkpoint that is incomplete, damaged or of another topology."""


class ResumeMismatch(UserError, CheckpointError):
    """What a command asks for is not what the checkpoint holds: other data, other ranks, no such checkpoint. Exit code 2."""


class ClusterError(RunError):
    """The cluster lacks something the layout needs, or cannot be reached."""
