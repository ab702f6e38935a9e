"""One side (training, evaluation or anchor) of one data set: rows read, checked, limited and tokenised. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from akl_dist.config.mixture import MixtureSource
from akl_dist.config.schema import DataConfig
from akl_dist.contract.errors import DataError
from akl_dist.contract.records import Prompt
from akl_dist.data import files
from akl_dist.data.order import digest
from akl_dist.data.recipes import Recipe
from akl_dist.data.report import NOTHING, SplitReport, listed
from akl_dist.data.template import PromptTemplate

ALL_GENERATED = 10**9  # more than any generated task has


@dataclass(frozen=True)
class Origin:
    """One data set of a run.

    Attributes:
        data: the ``data`` group as it is for this data set alone.
        version: of its instruction, the prompt-and-extractor unit.
        mixed: its entry in ``data.mixture``; None where it is the run's only one.
        invalid_gold: the word on a gold of the verifier that will judge its prompts.
    """

    data: DataConfig
    parts: tuple[Recipe, ...]
    template: PromptTemplate
    version: str
    invalid_gold: files.InvalidGold | None = None
    mixed: MixtureSource | None = None

    def key(self, name: str) -> str:
        """What one of its keys is called in messages."""
        return f"data.{name}" if self.mixed is None else f"data.mixture.{self.mixed.source}.{name}"

    @property
    def training(self) -> list[Recipe]:
        return [part for part in self.parts if part.trains and not part.benchmark]

    def label(self, recipe: Recipe, problem: files.Problem, *, trained: bool) -> tuple[str, str]:
        """Prompt id and source of a row. In a mixture training prompts belong to the source, whatever its recipe is made of;
        evaluation problems do where the recipe is one data set, and else keep the name of their benchmark."""
        name = recipe.name
        if self.mixed is not None and (trained or len(self.parts) == 1):
            name = self.mixed.source
        prefix = f"{name}/{recipe.name}" if trained and self.mixed is not None and len(self.training) > 1 else name
        return f"{prefix}/{problem.row_id}", problem.source or name


@dataclass(frozen=True)
class Side:
    """``texts``: the problems behind ``prompts``. ``all_ids``, ``all_texts``: of every usable row read, selected or not.
    ``embedded``: a problem may stand inside a longer prompt (rows that bring their own messages)."""

    prompts: list[Prompt]
    texts: list[str]
    report: SplitReport
    all_ids: list[str] = field(default_factory=list)
    all_texts: list[str] = field(default_factory=list)
    embedded: bool = False


NO_SIDE = Side([], [], NOTHING)


@dataclass(frozen=True)
class Selection:
    """Which rows make a side: those of ``path`` (else the hub's, else generated ones), of ``split``.

    tiny_count: problems generated in all (None: all there are), shared out among the parts; a part with fewer gives what it has.
    limit: of the prompts; ``spread`` takes them by a hash of their ids, else the first.
    """

    path: str | None
    split: str
    tiny_count: int | None
    limit: int | None
    spread: bool
    trained: bool


def read_side(origin: Origin, parts: Sequence[Recipe], how: Selection) -> Side:
    """Prompts of ``parts``, their problems' texts, and the counts. Raises DataError and ModelError."""
    data = origin.data
    named: list[tuple[str, str, files.Problem]] = []  # (prompt id, source, problem)
    excluded: list[str] = []
    rows_read = 0
    for recipe in parts:
        rows, subject = _read(origin, recipe, how, several=len(parts) > 1, share=-(-_generated(how) // len(parts)))
        problems, left_out = files.to_problems(rows, recipe, data.columns, subject=subject, invalid_gold=origin.invalid_gold,
                                               drop_invalid=data.invalid_gold == "drop")
        rows_read += len(rows)
        excluded += left_out
        named += [(*origin.label(recipe, problem, trained=how.trained), problem) for problem in problems]

    chosen = named
    if how.limit is not None and how.limit < len(named):
        ranked = sorted(named, key=lambda item: digest("select", item[0])) if how.spread else named
        keep = {item[0] for item in ranked[: how.limit]}
        chosen = [item for item in named if item[0] in keep]
    prompts, texts, overlong = [], [], []
    for prompt_id, source, problem in chosen:
        prompt = _prompt(origin, prompt_id, source, problem)
        if len(prompt.token_ids) > data.max_prompt_tokens:
            overlong.append(f"{prompt_id} ({len(prompt.token_ids)} tokens)")
            continue
        prompts.append(prompt)
        texts.append(problem.text)
    _check_overlong(data, overlong, kept=len(prompts), split=how.split)
    report = SplitReport(rows_read, len(prompts), tuple(excluded), tuple(overlong), len(named) - len(chosen))
    return Side(prompts, texts, report, [item[0] for item in named], [item[2].text for item in named],
                embedded=any(item[2].messages for item in named))


def _generated(how: Selection) -> int:
    return ALL_GENERATED if how.tiny_count is None else how.tiny_count


def _prompt(origin: Origin, prompt_id: str, source: str, problem: files.Problem) -> Prompt:
    rendered = origin.template.render(problem.text, problem.messages)
    return Prompt(
        prompt_id, source, origin.template.message(problem.text), rendered.token_ids, problem.gold, think_open=rendered.think_open,
        verifier=origin.mixed.verifier if origin.mixed else "",
        max_response_tokens=origin.mixed.max_response_tokens if origin.mixed else None, extra=problem.extra)


def _check_overlong(data: DataConfig, overlong: Sequence[str], *, kept: int, split: str) -> None:
    if overlong and (data.overlong == "error" or not kept):
        raise DataError(
            f"prompts of split {split!r}", got=f"{len(overlong)} longer than the limit: {listed(overlong)}",
            expected=f"at most data.max_prompt_tokens={data.max_prompt_tokens} tokens", stage="data",
            remedy="Raise data.max_prompt_tokens" + (", or set data.overlong=drop." if kept else "; none is left."),
        )


def _read(
    origin: Origin, recipe: Recipe, how: Selection, *, several: bool, share: int
) -> tuple[list[files.RawRow], str]:
    """Rows of one part of a recipe, and what to call them in errors."""
    data, path, split = origin.data, how.path, how.split
    if path is not None:
        file = Path(path)
        if file.is_dir():
            names = (f"{recipe.name}_{split}", recipe.name)
            found = [one for name in names for suffix in files.SUFFIXES if (one := file / f"{name}{suffix}").is_file()]
            key = origin.key("path" if how.trained else "anchor_path" if split == "anchor" else "eval_path")
            if not found:  # no nearest name: that would be another split
                raise DataError(key, got=f"{path}, without {' or '.join(names)}", stage="data",
                                expected=f"a file of one of these names in that folder, as {', '.join(files.SUFFIXES[:-1])} or "
                                f"{files.SUFFIXES[-1]}", remedy="Name the file itself, or bring one of that name.")
            file = found[0]
        elif several:
            raise DataError(
                origin.key("path"), got=path, stage="data",
                expected=f"a folder with one file per part (such as {recipe.name}_{split}.jsonl) for {data.recipe}",
                remedy="Name such a folder, or train on one data set.",
            )
        return _of_split(files.read_file(file, split=split), recipe, split, str(file)), str(file)
    if recipe.generated is not None:
        at_most = several or not how.spread or how.tiny_count is None or origin.mixed is not None
        rows = files.read_tiny(split=split, count=share, task=recipe.generated, at_most=at_most)
        return rows, f"{recipe.name} problems"
    if data.name is not None and several:
        raise DataError(origin.key("name"), got=data.name, expected=f"null for {data.recipe}, which is several data sets",
                        remedy="Leave data.name out.", stage="data")
    hub_name = data.name or recipe.hub_name
    if hub_name is None:
        key = origin.key("path" if how.trained else "eval_path")
        raise DataError(key, got="null", expected=f"a file or data.name for recipe {recipe.name}", stage="data",
                        remedy=f"Set {key}=FILE (columns prompt and answer) or data.name=HUB_NAME.")
    configs = recipe.hub_configs if hub_name == recipe.hub_name else (None,)
    split = recipe.splits.get(split, split) if hub_name == recipe.hub_name else split
    rows = [row for config in configs for row in files.read_hub(hub_name, config, split=split)]
    return rows, f"hub data set {hub_name}, split {split!r}"


def _of_split(rows: list[files.RawRow], recipe: Recipe, split: str, subject: str) -> list[files.RawRow]:
    """Rows of one split, where the rows themselves tell (a file with all of them); all rows of any other data set."""
    if recipe.split_of is None:
        return rows
    found = {row.where: recipe.split_of(row.values) for row in rows}
    mine = [row for row in rows if found[row.where] in (split, None)]  # a row that does not tell is refused by its reader
    if not mine:
        names = sorted({name for name in found.values() if name})
        raise DataError(subject, got=f"rows of {', '.join(names)}", expected=f"rows of split {split!r}", stage="data",
                        remedy="Set data.split or data.eval_split to one of them, or give another file.")
    return mine
