"""The order of a mixture's training prompts: sources by a balanced schedule, each source in its own resumable order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from akl_dist.config.mixture import MixtureSource, mixture_sources, shares
from akl_dist.config.schema import DataConfig
from akl_dist.contract.errors import DataError, ResumeMismatch
from akl_dist.contract.records import Prompt
from akl_dist.data.order import PromptSource
from akl_dist.data.source import LoadedData

__all__ = ["MixedPromptSource", "MixtureSource", "prompt_source_of", "schedule", "source_from_state"]


def schedule(parts: Mapping[str, Fraction], counts: Mapping[str, int] | None = None) -> Iterator[str]:
    """Which source each place goes to, without end: after any n places every source has had n times its share, give or take
    less than one.

    Of the sources that are behind, the one whose next place is due first (Tijdeman 1980, The chairman assignment problem, Discrete
    Mathematics 32, 323-330): with k sources no count is ever further from its share than 1 - 1 / (2 k - 2), which is the best
    there is. So any window of n places holds each source within 1 of n times its share where there are two, within 2 where there
    are more. (For three or more no order keeps every window strictly within 1, whatever the shares.)

    Args:
        parts: shares that add up to 1; their order does not matter.
        counts: places given so far, where the schedule goes on.
    """
    names = sorted(parts)
    given = {name: (counts or {}).get(name, 0) for name in names}
    slack = 1 - Fraction(1, 2 * len(names) - 2) if len(names) > 1 else Fraction(1)
    place = sum(given.values())
    while True:
        place += 1
        behind = {name: place * parts[name] - given[name] for name in names}
        due = [name for name in names if behind[name] >= 1 - slack]
        chosen = min(due, key=lambda name: ((slack - behind[name]) / parts[name], name))
        given[chosen] += 1
        yield chosen


class MixedPromptSource:
    """Training prompts of several sources; takes the place of a :class:`~akl_dist.data.order.PromptSource`.

    What place n of the run holds is a pure function of (seed, weights, n), however the places are cut into batches (as long as a
    batch takes no more than half of any source: see :class:`PromptSource`).

    Args:
        prompts: of all sources, told apart by the beginning of their ids (``"<source>/..."``).
        parts: exact share of each source; they add up to 1.
    Raises:
        DataError: a source without prompts.
    """

    def __init__(self, prompts: Sequence[Prompt], parts: Mapping[str, Fraction], *, seed: int) -> None:
        own = _by_source(prompts, parts)
        for name, found in own.items():
            if not found:
                raise DataError(f"training prompts of data.mixture.{name}", got="0", expected="at least one", stage="data",
                                remedy="See the data report for what was dropped, or leave the source out.")
        self._parts = dict(parts)
        self.seed = seed
        self._join({name: PromptSource(found, seed=seed) for name, found in own.items()}, {})

    def _join(self, sources: Mapping[str, PromptSource], counts: Mapping[str, int]) -> None:
        self._sources = dict(sources)
        self._counts = {name: counts.get(name, 0) for name in self._parts}
        self._schedule = schedule(self._parts, self._counts)
        marks = "".join(f"{name} {self._parts[name]} {self._sources[name].fingerprint}\n" for name in sorted(self._parts))
        self.fingerprint = hashlib.sha256(marks.encode()).hexdigest()

    def __len__(self) -> int:
        return sum(len(source) for source in self._sources.values())

    @property
    def position(self) -> int:
        """Prompts taken so far."""
        return sum(self._counts.values())

    @property
    def skipped(self) -> int:
        return sum(source.skipped for source in self._sources.values())

    def take(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts, all different, each source's as often as its share asks for.

        Raises DataError when a source has fewer prompts than that.
        """
        if n < 1:
            raise DataError("rollout.prompts_per_step", got=str(n), expected="at least 1", stage="data",
                            remedy="Take at least one prompt a step.")
        before = dict(self._counts)
        places = [next(self._schedule) for _ in range(n)]
        wanted = {name: places.count(name) for name in self._parts}
        for name, count in wanted.items():
            if count > len(self._sources[name]):
                self._join(self._sources, before)
                raise self._too_few(name, count, n)
        drawn = {name: iter(self._sources[name].take(count)) for name, count in wanted.items() if count}
        self._counts = {name: self._counts[name] + count for name, count in wanted.items()}
        return [next(drawn[name]) for name in places]

    def check_step(self, n: int) -> None:
        """Raise DataError unless every batch of ``n`` prompts can be had without a prompt twice."""
        for name, part in self._parts.items():
            spread = 2 * (1 - Fraction(1, 2 * len(self._parts) - 2)) if len(self._parts) > 1 else Fraction(0)
            most = min(n, int(n * part + spread))
            if most > len(self._sources[name]):
                raise self._too_few(name, most, n)

    def _too_few(self, name: str, count: int, n: int) -> DataError:
        return DataError(f"data.mixture.{name}", got=f"{len(self._sources[name])} training prompts", stage="data",
                         expected=f"at least {count}, its share of rollout.prompts_per_step={n} (no prompt comes twice in a step)",
                         remedy="Lower its weight or rollout.prompts_per_step, or give it more data.")

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores: the state of every source, its share as written and how often it has had its turn."""
        sources = {name: {"share": str(self._parts[name]), "taken": self._counts[name], **self._sources[name].state()}
                   for name in sorted(self._parts)}
        return {"seed": self.seed, "num_prompts": len(self), "fingerprint": self.fingerprint, "sources": sources}

    @classmethod
    def from_state(
        cls, prompts: Sequence[Prompt], state: Mapping[str, Any], parts: Mapping[str, Fraction] | None = None
    ) -> MixedPromptSource:
        """Continue where ``state`` was taken. Raises ResumeMismatch when prompts, sources or weights are others than then.

        Args:
            parts: the run's shares; None for those of the state.
        """
        sources = state["sources"]
        stored = {name: Fraction(one["share"]) for name, one in sources.items()}
        if parts is not None and stored != dict(parts):
            raise ResumeMismatch(
                "data.mixture", got=_shown(parts), expected=f"the checkpoint's shares: {_shown(stored)}", stage="data",
                remedy="Resume with the same sources and weights, or start anew with resume=never.")
        own = _by_source(prompts, stored)
        mixed = cls.__new__(cls)
        mixed._parts, mixed.seed = stored, state["seed"]
        resumed = {}
        for name, found in own.items():
            try:
                resumed[name] = PromptSource.from_state(found, sources[name])
            except ResumeMismatch as error:
                raise ResumeMismatch(f"training prompts of data.mixture.{name}", got=error.got, expected=error.expected,
                                     remedy=error.remedy, stage="data") from error
        mixed._join(resumed, {name: one["taken"] for name, one in sources.items()})
        return mixed


def _by_source(prompts: Sequence[Prompt], parts: Mapping[str, Fraction]) -> dict[str, list[Prompt]]:
    own: dict[str, list[Prompt]] = {name: [] for name in parts}
    for prompt in prompts:
        name = prompt.prompt_id.partition("/")[0]
        if name not in own:
            raise ResumeMismatch("data.mixture", got=f"prompts of {name}", expected=f"those of {', '.join(sorted(own))}",
                                 stage="data", remedy="Resume with the same sources, or start anew with resume=never.")
        own[name].append(prompt)
    return own


def _shown(parts: Mapping[str, Fraction]) -> str:
    return ", ".join(f"{name} {part}" for name, part in sorted(parts.items()))


def prompt_source_of(
    loaded: LoadedData, data: DataConfig, seed: int, state: Mapping[str, Any] | None = None, *, prompts_per_step: int | None = None,
) -> PromptSource | MixedPromptSource:
    """A run's training prompts in their order, from the beginning or from where ``state`` was taken.

    Args:
        prompts_per_step: refuse sources too small for such a step now instead of in the step that finds out.
    Raises:
        ResumeMismatch: the state is of other data, or of other sources or weights.
        DataError: a source without prompts, or with too few for a step.
    """
    if not data.mixture:
        if state is not None and "sources" in state:
            raise ResumeMismatch("data.mixture", got="{}", expected=f"the checkpoint's sources: {', '.join(state['sources'])}",
                                 stage="data", remedy="Resume with the same mixture, or start anew with resume=never.")
        return PromptSource(loaded.train, seed=seed) if state is None else PromptSource.from_state(loaded.train, state)
    parts = shares(mixture_sources(data.mixture))
    if state is not None and "sources" not in state:
        raise ResumeMismatch("data.mixture", got=_shown(parts), expected="one data set, as in the checkpoint", stage="data",
                             remedy="Resume without data.mixture, or start anew with resume=never.")
    mixed = (MixedPromptSource(loaded.train, parts, seed=seed) if state is None
             else MixedPromptSource.from_state(loaded.train, state, parts))
    if prompts_per_step is not None:
        mixed.check_step(prompts_per_step)
    return mixed


def source_from_state(prompts: Sequence[Prompt], state: Mapping[str, Any]) -> PromptSource | MixedPromptSource:
    """The prompts of a run's own state, a mixture's or not; for looking ahead without moving the run's source."""
    of = MixedPromptSource if "sources" in state else PromptSource
    return of.from_state(prompts, state)
