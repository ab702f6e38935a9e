"""From configuration to tokenised prompts: one data set, or the sources of a mixture. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from akl_dist.config.mixture import MixtureSource, mixture_sources, shares
from akl_dist.config.schema import DataConfig
from akl_dist.contract.errors import DataError
from akl_dist.contract.records import Prompt
from akl_dist.data import files
from akl_dist.data.contamination import normalised, overlapping
from akl_dist.data.order import PromptSource, digest
from akl_dist.data.recipes import Recipe, benchmark_of, find_recipe
from akl_dist.data.report import NOTHING, DataReport, SourceReport, SplitReport, listed
from akl_dist.data.side import NO_SIDE, Origin, Selection, Side, read_side
from akl_dist.data.template import PromptTemplate

__all__ = ["DataReport", "GoldChecks", "LoadedData", "PromptSource", "SplitReport", "load", "load_evaluation", "without_held_out"]

GoldChecks = Callable[[str], files.InvalidGold]
"""The check of golds by a kind of verifier (akl_dist.verify.golds.invalid_gold)."""


@dataclass(frozen=True)
class LoadedData:
    """``anchor``: prompts that a CoKL term holds to the reference instead of the training prompts; empty unless asked for.
    ``suffixes``: the text put after each problem, by the source of evaluation prompts."""

    train: list[Prompt]
    evaluation: list[Prompt]
    report: DataReport
    anchor: list[Prompt] = field(default_factory=list)
    suffixes: Mapping[str, str] = field(default_factory=dict)


def without_held_out(data: DataConfig) -> bool:
    """A local training file without a held-out file: nothing to evaluate on, and the hub's split would be a surprise."""
    return data.path is not None and data.eval_path is None


def load(
    data: DataConfig, tokenizer_path: str | Path, *, num_eval_problems: int | None, invalid_gold: files.InvalidGold | None = None,
    gold_checks: GoldChecks | None = None, with_anchor: bool = False,
) -> LoadedData:
    """Read, check, tokenise and limit both sides. Touches no accelerator and imports no torch.

    Args:
        data: the ``data`` group.
        tokenizer_path: folder of the model's tokenizer.
        num_eval_problems: size of the held-out set, chosen by a hash of the prompt ids (not the first rows, which some
            data sets order by subject); 0 for no evaluation, None for all there are. The sources of a mixture share it out
            evenly; one that has fewer gives what it has.
        invalid_gold: the verifier's word on a gold, asked for every row: why it cannot be judged, empty or None if it
            can. None for no such check.
        gold_checks: the same by kind of verifier, for sources of a mixture that name one of their own.
        with_anchor: read the anchor prompts, too: those of ``data.anchor_path``, else the training side of the recipe's
            retained tasks.

    Raises DataError (rows, columns, files, hub) and ModelError (tokenizer, template).
    """
    origins = _origins(data, tokenizer_path, invalid_gold, gold_checks)
    trains = [_training_side(origin) for origin in origins]
    share = _share(num_eval_problems, origins)
    held_out = [_held_out(origin, share) if num_eval_problems != 0 and not without_held_out(origin.data) else NO_SIDE
                for origin in origins]
    evaluation = _merged(_once(origins, held_out))
    trains, overlap = _without_contaminated(trains, evaluation, data.contaminated)
    anchor = _anchor(origins[0]) if with_anchor else []
    train = _merged(trains)
    report = _report(data, origins, trains, held_out, overlap=overlap, repeated=_repeated(train))
    return LoadedData(train.prompts, evaluation.prompts, report, anchor, _suffixes(origins, held_out))


def load_evaluation(
    data: DataConfig, tokenizer_path: str | Path, *, num_problems: int | None, invalid_gold: files.InvalidGold | None = None,
    gold_checks: GoldChecks | None = None,
) -> LoadedData:
    """The evaluation side alone (``train`` is empty): of any recipe, benchmarks included. Arguments and errors of :func:`load`."""
    if without_held_out(data):
        raise DataError("data.eval_path", got=f"null beside data.path={data.path}", stage="data",
                        expected="the evaluation problems' own file: data.path holds training problems, which are not evaluated",
                        remedy=f"Write data.eval_path={data.path} if these are the problems to evaluate.")
    origins = _origins(data, tokenizer_path, invalid_gold, gold_checks)
    share = _share(num_problems, origins)
    held_out = [NO_SIDE if origin.mixed and without_held_out(origin.data) else _held_out(origin, share) for origin in origins]
    report = _report(data, origins, [NO_SIDE] * len(origins), held_out)
    return LoadedData([], _merged(_once(origins, held_out)).prompts, report, suffixes=_suffixes(origins, held_out))


# --- data sets -----------------------------------------------------------------------------------------------------


def _origins(
    data: DataConfig, tokenizer_path: str | Path, invalid_gold: files.InvalidGold | None, gold_checks: GoldChecks | None
) -> list[Origin]:
    """The run's data sets, on one tokenizer."""
    template = PromptTemplate(tokenizer_path, system_prompt=data.system_prompt, variables=data.template_kwargs)

    def origin(own: DataConfig, mixed: MixtureSource | None) -> Origin:
        parts = find_recipe(own.recipe)
        instruction = parts[0].instruction
        custom = own.prompt_suffix is not None
        suffix = own.prompt_suffix if own.prompt_suffix is not None else instruction.text
        version = f"custom-{digest(suffix).hex()[:8]}" if custom else instruction.version
        check = gold_checks(mixed.verifier) if mixed and mixed.verifier and gold_checks else invalid_gold
        return Origin(own, parts, template.with_suffix(suffix), version, check, mixed)

    sources = mixture_sources(data.mixture)
    return [origin(one.data(data), one) for one in sources] or [origin(data, None)]


def _training_side(origin: Origin) -> Side:
    data = origin.data
    if origin.mixed is not None and origin.mixed.weight == 0:
        return NO_SIDE
    if not origin.training:
        instead = (f"Evaluate it (python -m akl_dist.evaluate data={data.recipe}), or train on another recipe."
                   if origin.mixed is None else "Give it weight: 0, and it is only evaluated.")
        raise DataError(origin.key("recipe"), got=f"{data.recipe}, a benchmark", expected="a recipe with training problems",
                        remedy=instead, stage="data")
    return read_side(origin, origin.training, Selection(
        path=data.path, split=data.split, tiny_count=files.TINY_TRAIN_PROBLEMS, limit=data.limit, spread=False, trained=True))


def _share(num_problems: int | None, origins: Sequence[Origin]) -> int | None:
    """Held-out problems of one data set, so that every source is evaluated."""
    if num_problems is None or origins[0].mixed is None:
        return num_problems
    return -(-num_problems // max(1, sum(one.mixed is not None and one.mixed.eval for one in origins)))


def _held_out(origin: Origin, num_problems: int | None) -> Side:
    data, parts = origin.data, origin.parts
    if origin.mixed is not None and not origin.mixed.eval:
        return NO_SIDE
    evaluated: Sequence[Recipe] = [part for part in parts if part.evaluates]
    if data.eval_path is not None and len(evaluated) > 1 and Path(data.eval_path).is_file():
        evaluated = benchmark_of(Path(data.eval_path), parts[0].instruction) or evaluated
    return read_side(origin, evaluated or parts, Selection(
        path=data.eval_path, split=data.eval_split, tiny_count=num_problems, limit=num_problems, spread=True, trained=False))


def _anchor(origin: Origin) -> list[Prompt]:
    data = origin.data
    retained = origin.parts if data.anchor_path is not None else [one for one in origin.parts if not (one.trains or one.benchmark)]
    if not retained:
        raise DataError("data.anchor_path", got="null", stage="data", remedy="Write data.anchor_path=FILE.",
                        expected=f"a file of anchor prompts for recipe {data.recipe}, which has no retained task")
    split = "anchor" if data.anchor_path is not None else data.split
    return read_side(origin, retained, Selection(
        path=data.anchor_path, split=split, tiny_count=files.TINY_TRAIN_PROBLEMS, limit=None, spread=False, trained=False)).prompts


# --- across data sets ------------------------------------------------------------------------------------------------


def _merged(sides: Sequence[Side]) -> Side:
    if len(sides) == 1:
        return sides[0]
    return Side([one for side in sides for one in side.prompts], [one for side in sides for one in side.texts],
                sum((side.report for side in sides), NOTHING), [one for side in sides for one in side.all_ids],
                [one for side in sides for one in side.all_texts], any(side.embedded for side in sides))


def _once(origins: Sequence[Origin], sides: Sequence[Side]) -> list[Side]:
    """Evaluation sides without problems that an earlier source has brought (a benchmark that two recipes share).

    Raises DataError for two different problems of one id.
    """
    seen: dict[str, Prompt] = {}
    out = []
    for origin, side in zip(origins, sides, strict=True):
        fresh = [index for index, prompt in enumerate(side.prompts) if prompt.prompt_id not in seen]
        for prompt in side.prompts:
            earlier = seen.setdefault(prompt.prompt_id, prompt)
            if (earlier.token_ids, earlier.gold) != (prompt.token_ids, prompt.gold):
                raise DataError(f"evaluation problem {prompt.prompt_id}", got=f"another one in {origin.key('eval_path')}",
                                expected="one problem of that id", stage="data", remedy="Rename one of the two sources, or set "
                                "eval: false for one.")
        out.append(replace(side, prompts=[side.prompts[i] for i in fresh], texts=[side.texts[i] for i in fresh]))
    return out


def _suffixes(origins: Sequence[Origin], sides: Sequence[Side]) -> dict[str, str]:
    return {prompt.source: origin.template.suffix for origin, side in zip(origins, sides, strict=True) for prompt in side.prompts}


def _without_contaminated(trains: Sequence[Side], held_out: Side, contaminated: str) -> tuple[list[Side], tuple[str, ...]]:
    """The training sides as ``data.contaminated`` asks for them, and the ids of evaluation problems that stand in any of them.

    Every usable row of the evaluation sides counts, not only those selected. Raises DataError for ``error``.
    """
    whole = _merged(trains)
    trained, evaluated = overlapping(whole.texts, held_out.all_texts, embedded=whole.embedded)
    ids = tuple(dict.fromkeys(held_out.all_ids[index] for index in sorted(evaluated)))
    if not ids or contaminated == "keep":
        return list(trains), ids
    if contaminated == "error":
        raise DataError("training prompts", got=f"{len(trained)} that are also evaluated on ({listed(ids)})", stage="data",
                        expected="no problem on both sides", remedy="Set data.contaminated=drop, or choose other data.")
    out, start = [], 0
    for side in trains:
        kept = [index for index in range(len(side.prompts)) if start + index not in trained]
        dropped = tuple(one.prompt_id for index, one in enumerate(side.prompts) if start + index in trained)
        report = replace(side.report, used=len(kept), contaminated=dropped)
        start += len(side.prompts)
        out.append(replace(side, prompts=[side.prompts[i] for i in kept], texts=[side.texts[i] for i in kept], report=report))
    return out, ids


def _repeated(train: Side) -> tuple[str, ...]:
    """Ids of training prompts whose normalised text an earlier one has."""
    seen: set[str] = set()
    keys = [normalised(text) for text in train.texts]
    return tuple(prompt.prompt_id for prompt, key in zip(train.prompts, keys, strict=True) if key in seen or seen.add(key))


def _report(
    data: DataConfig, origins: Sequence[Origin], trains: Sequence[Side], held_out: Sequence[Side], *,
    overlap: tuple[str, ...] = (), repeated: tuple[str, ...] = (),
) -> DataReport:
    notes = tuple(
        f"data.template_kwargs.{name}: the chat template of {origins[0].template.path} does not name it, so it changes nothing"
        for name in origins[0].template.unused_variables())
    mixed = [(one, one.mixed) for one in origins if one.mixed is not None]
    part = shares([source for _, source in mixed])
    sources = {
        source.source: SourceReport(origin.version, float(part.get(source.source, 0)), source.verifier, source.max_response_tokens,
                                    train.report, evaluation.report)
        for (origin, source), train, evaluation in zip(mixed, trains, held_out, strict=bool(mixed))}
    version = ", ".join(f"{name} {one.instruction}" for name, one in sources.items()) or origins[0].version
    return DataReport(data.recipe, version, _merged(trains).report, _merged(held_out).report, overlap, repeated, notes, sources)
