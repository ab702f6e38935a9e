"""What loading did with the rows of each side, counted and listed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

LISTED = 10
"""How many offending rows or prompts a message spells out."""


def listed(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f", and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class SplitReport:
    """Counts of one side: ``rows`` = ``used`` + ``excluded`` + ``overlong`` + ``unselected`` (beyond the limit) +
    ``contaminated`` (training prompts dropped because they are evaluated on)."""

    rows: int
    used: int
    excluded: tuple[str, ...]
    overlong: tuple[str, ...]
    unselected: int
    contaminated: tuple[str, ...] = ()

    def __add__(self, other: SplitReport) -> SplitReport:
        return SplitReport(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(SplitReport)))

    def as_dict(self) -> dict[str, Any]:
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def text(self) -> str:
        return (f"{self.used} prompts of {self.rows} rows; {len(self.excluded)} without usable gold, "
                f"{len(self.overlong)} overlong dropped, {self.unselected} beyond the limit"
                + (f", {len(self.contaminated)} dropped as evaluated on" if self.contaminated else ""))


NOTHING = SplitReport(0, 0, (), (), 0)


@dataclass(frozen=True)
class SourceReport:
    """One source of a mixture. ``share``: of the training prompts (0: only evaluated). ``verifier``: empty for the run's own."""

    instruction: str
    share: float
    verifier: str
    max_response_tokens: int | None
    train: SplitReport
    evaluation: SplitReport


@dataclass(frozen=True)
class DataReport:
    """Both sides of a run's data.

    Attributes:
        instruction: version of the prompt-and-extractor unit (of a mixture: of each source).
        overlap: ids of evaluation problems whose text also stands in the training set.
        repeated: ids of training prompts whose text an earlier one has already.
        notes: what is allowed and probably not meant.
        sources: of a mixture, by name.
    """

    recipe: str
    instruction: str
    train: SplitReport
    evaluation: SplitReport
    overlap: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    sources: Mapping[str, SourceReport] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain containers for JSON."""
        out: dict[str, Any] = {
            "recipe": self.recipe, "instruction": self.instruction, "overlap": list(self.overlap), "repeated": list(self.repeated),
            "notes": list(self.notes), "train": self.train.as_dict(), "evaluation": self.evaluation.as_dict()}
        if self.sources:
            out["sources"] = {
                name: {"instruction": one.instruction, "share": one.share, "verifier": one.verifier,
                       "max_response_tokens": one.max_response_tokens, "train": one.train.as_dict(),
                       "evaluation": one.evaluation.as_dict()}
                for name, one in self.sources.items()}
        return out

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"data: recipe {self.recipe}, instruction {self.instruction}"
        yield from (f"  note: {note}" for note in self.notes)
        for name, one in self.sources.items():
            limit = "" if one.max_response_tokens is None else f", at most {one.max_response_tokens} response tokens"
            share = f"share {100 * one.share:.1f} %" if one.share else "only evaluated"
            yield (f"  source {name}: {share}, verifier {one.verifier or 'of the run'}{limit}; {one.train.used} training and "
                   f"{one.evaluation.used} evaluation prompts")
        for name, side in (("train", self.train), ("evaluation", self.evaluation)):
            if side.rows == 0:
                if name == "evaluation":
                    lacks = ("no source has a held-out side: give one an eval_path" if self.sources
                             else "no held-out file: set data.eval_path")
                    yield f"  evaluation: none ({lacks}, or evaluate.num_problems=0 if meant)"
                continue
            yield f"  {name}: {side.text()}"
            for label, names in (("excluded", side.excluded), ("overlong", side.overlong)):
                if names:
                    yield f"    {label}: {listed(names)}"
        if self.train.rows == 0:  # an evaluation by itself
            return
        yield (f"  overlap: {len(self.overlap)} evaluation problems also stand in the training set"
               + (f": {listed(self.overlap)}" if self.overlap else ""))
        if self.repeated:
            yield f"  repeated: {len(self.repeated)} training prompts have the text of an earlier one: {listed(self.repeated)}"
