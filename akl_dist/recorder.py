"""Where a finished step goes: metrics file, TensorBoard, rollout dump, console; and what a person should be warned about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from akl_dist.bookkeeping.console import Console
from akl_dist.bookkeeping.journal import Journal
from akl_dist.contract.records import JudgedGroup, RolloutGroup, TrainingGroup
from akl_dist.loop import Progress
from akl_dist.verify.roles import SIGNALS, agreement, likelihood_ratios

QUIET_KL_ACTIVITY, QUIET_KL_STEPS = 0.01, 20
MAX_ANSWER_FRACTION = 0.3
MIN_LIKELIHOOD_RATIO = 1.2
CONSTANT_REWARD_STEPS = 10


class Dump(Protocol):
    def write(self, step: int, groups: Sequence[TrainingGroup]) -> None: ...

    def write_samples(
        self, step: int, rollouts: Sequence[RolloutGroup], judged: Sequence[JudgedGroup], sandbox: str | None
    ) -> None: ...


class StepRecorder:
    """The loop's Recorder. ``dump`` is None where journal.dump_rollouts is off; ``sandbox`` is the form of isolation in which
    programs run, None where none do."""

    def __init__(
        self, journal: Journal, console: Console, dump: Dump | None, alarms: Alarms, *, sandbox: str | None = None
    ) -> None:
        self._sandbox = sandbox
        self._journal, self._console, self._dump, self._alarms = journal, console, dump, alarms
        self.progress = Progress()
        """The last that was reported; what a failed run's result says."""

    def step_done(self, progress: Progress, metrics: dict[str, float], groups: Sequence[TrainingGroup]) -> None:
        self.progress, step = progress, progress.step
        if self._dump is not None:
            self._dump.write(step, groups)
        self._journal.record(step, metrics)
        self._console.step(step, metrics)
        self._alarms.check(step, metrics)

    def evaluation_done(self, progress: Progress, rollouts: Sequence[RolloutGroup], judged: Sequence[JudgedGroup]) -> None:
        self.progress = progress
        if self._dump is not None:
            self._dump.write_samples(progress.step, rollouts, judged, self._sandbox)
        self._console.say(progress.evaluations["last"].text())


def vote_report(step: int, counts: Sequence[int]) -> str:
    """The agreement table of one step for people, a dozen lines: tokens by their votes, how often each two signals agree, and what
    each vote says about the role. ``counts`` as of :func:`akl_dist.verify.roles.vote_table`."""
    total, answer = sum(counts), sum(n for code, n in enumerate(counts) if code.bit_count() >= 2)
    if not answer:
        return "role votes: no token has the role answer in this step"
    lines = [f"role votes of step {step}: {answer:,} of {total:,} tokens have two votes or more",
             f"  {'  '.join(SIGNALS)}  {'tokens':>10}  {'share':>6}"]
    for code in sorted(range(8), key=lambda code: (code.bit_count(), -code)):
        marks = (("x" if code >> (2 - place) & 1 else ".").center(len(name)) for place, name in enumerate(SIGNALS))
        lines.append(f"  {'  '.join(marks)}  {counts[code]:>10,}  {100 * counts[code] / total:>4.1f} %")
    pairs = (f"{pair.replace('_', ' and ')} {share:.1%}" for pair, share in agreement(counts).items())
    ratios = (f"{name} {'never on reasoning' if ratio is None else format(ratio, '.1f')}"
              for name, ratio in likelihood_ratios(counts).items())
    return "\n".join([*lines, f"  the same vote on a token: {', '.join(pairs)}",
                      f"  P(vote | answer) / P(vote | reasoning): {', '.join(ratios)}"])


class Alarms:
    """Warnings that mean "these numbers do not say what you think". Each is given once.

    Args:
        kl_roles: roles ("reasoning", "answer") that have a KL term, with the keys that set its beta
            (:func:`akl_dist.config.resolve.kl_roles`).
    """

    def __init__(self, say: Callable[[str], None], *, kl_roles: Mapping[str, str]) -> None:
        self._say, self._constant_reward, self._beta_keys = say, 0, kl_roles
        self._quiet_steps = dict.fromkeys(kl_roles, 0)
        self._given: set[str] = set()

    def check(self, step: int, metrics: dict[str, float]) -> None:
        for role in self._quiet_steps:
            self._check_activity(role, metrics.get(f"objective/kl_activity_{role}"))
        if metrics.get("roles/answer_fraction", 0.0) > MAX_ANSWER_FRACTION:
            self._warn("answer", f"{metrics['roles/answer_fraction']:.0%} of the tokens have the role answer (above "
                                 f"{MAX_ANSWER_FRACTION:.0%}): roles hardly separate reasoning from answer.")
        self._constant_reward = self._constant_reward + 1 if metrics.get("verify/accuracy") in (0.0, 1.0) else 0
        if self._constant_reward >= CONSTANT_REWARD_STEPS:
            self._warn("reward", f"the reward has been constant for {CONSTANT_REWARD_STEPS} steps: nothing is learned. Check the "
                                 "verifier, the prompt's instruction and the data.")
        if not self._given & {"votes"} and any(k.startswith("roles/votes_") for k in metrics):
            self._given.add("votes")
            self._report_votes(step, [int(metrics[f"roles/votes_{i:03b}"]) for i in range(8)])

    def _check_activity(self, role: str, activity: float | None) -> None:
        """A step without an activity (no such token, or no policy gradient) says nothing either way."""
        if activity is None:
            return
        self._quiet_steps[role] = self._quiet_steps[role] + 1 if activity < QUIET_KL_ACTIVITY else 0
        if self._quiet_steps[role] >= QUIET_KL_STEPS:
            self._warn(f"kl {role}", f"the KL term of {role} tokens has been below {QUIET_KL_ACTIVITY:.0%} of the policy gradient "
                                     f"for {QUIET_KL_STEPS} steps: it changes nothing. Raise {self._beta_keys[role]}.")

    def _report_votes(self, step: int, counts: Sequence[int]) -> None:
        self._say(vote_report(step, counts))
        for name, ratio in likelihood_ratios(counts).items():
            if ratio is not None and ratio < MIN_LIKELIHOOD_RATIO:
                self._warn(f"vote {name}", f"the {name} vote hardly tells answer from reasoning here (ratio {ratio:.2f} below "
                                           f"{MIN_LIKELIHOOD_RATIO}).")

    def _warn(self, key: str, message: str) -> None:
        if key not in self._given:
            self._given.add(key)
            self._say(f"warning: {message}")
