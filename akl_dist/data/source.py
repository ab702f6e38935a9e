"""From configuration to tokenised prompts (:func:`load`), and the resumable order in which they are trained on."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from akl_dist.config.schema import DataConfig
from akl_dist.contract.errors import CheckpointError, DataError
from akl_dist.contract.records import Prompt
from akl_dist.data import files
from akl_dist.data.contamination import overlapping
from akl_dist.data.recipes import Recipe, benchmark_of, find_recipe
from akl_dist.data.template import PromptTemplate

ALL_GENERATED = 10**9  # more than any generated task has


def _digest(*parts: object) -> bytes:
    return hashlib.sha256("\x1f".join(str(part) for part in parts).encode("utf-8", "replace")).digest()


class PromptSource:
    """Training prompts in an order that is a pure function of (seed, epoch, position).

    Every epoch is a new permutation of all prompts; it depends neither on the order of ``prompts`` nor on the machine.
    Within the border of two epochs no prompt comes twice among ``spacing`` = ceil(N / 2) successive ones, so a batch of
    up to that size never holds a prompt twice. A larger batch (up to N) would have to repeat one when crossing the
    border; it starts the next epoch instead, and the prompts passed over are counted in ``skipped``.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, epoch: int = 0, position: int = 0) -> None:
        if not prompts:
            raise DataError("training prompts", got="0", expected="at least one", stage="data",
                            remedy="See the data report for what was dropped.")
        self._prompts = {p.prompt_id: p for p in prompts}
        if len(self._prompts) != len(prompts):
            raise DataError("prompt ids", got=f"{len(prompts) - len(self._prompts)} repeated", stage="data",
                            expected="unique ids", remedy="Make the ids unique.")
        if not (0 <= position <= len(prompts) and epoch >= 0):
            raise ValueError(f"PromptSource: epoch {epoch}, position {position} of {len(prompts)} prompts")
        self.seed, self.epoch, self.position, self.skipped = seed, epoch, position, 0
        self.spacing = (len(prompts) + 1) // 2
        self.fingerprint = hashlib.sha256(
            b"".join(_digest(p.prompt_id, p.token_ids, p.gold) for _, p in sorted(self._prompts.items()))
        ).hexdigest()
        self._order: tuple[int, list[str]] = (-1, [])

    def __len__(self) -> int:
        return len(self._prompts)

    def order(self, epoch: int) -> list[str]:
        """Prompt ids of one epoch: sorted by hash, the first half delayed where the last epoch's end demands it."""
        base = self._shuffled(epoch)
        if epoch == 0:
            return base
        first, second = base[: self.spacing], base[self.spacing :]
        # h places into this epoch, a prompt followed by d others in the last epoch has gap d + h + 1: it must wait
        # until h = spacing - 1 - d. Only second halves are looked at and only first halves changed: no recursion.
        last = self._shuffled(epoch - 1)[self.spacing :]
        earliest = {p: self.spacing - 1 - d for d, p in enumerate(reversed(last))}
        arrivals: list[list[int]] = [[] for _ in first]
        for rank, prompt in enumerate(first):
            arrivals[earliest.get(prompt, 0)].append(rank)
        ready: list[int] = []  # a heap: of those that need not wait, the first by hash goes first
        out: list[str] = []
        for arriving in arrivals:
            for rank in arriving:
                heapq.heappush(ready, rank)
            # never empty: at place h at most spacing - 1 - h prompts still wait, and h are placed
            out.append(first[heapq.heappop(ready)])
        return out + second

    def _shuffled(self, epoch: int) -> list[str]:
        return sorted(self._prompts, key=lambda prompt_id: _digest("order", self.seed, epoch, prompt_id))

    def take(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts, all different. Raises DataError when n is more than there are."""
        if not 1 <= n <= len(self):
            raise DataError("rollout.prompts_per_step", got=str(n), expected=f"1 to {len(self)} (the training prompts)",
                            remedy="Lower rollout.prompts_per_step or give more data.", stage="data")
        remaining = len(self) - self.position
        if remaining < n and n > self.spacing:
            self.skipped += remaining
            self.epoch, self.position = self.epoch + 1, 0
        batch: list[Prompt] = []
        while len(batch) < n:
            if self.position == len(self):
                self.epoch, self.position = self.epoch + 1, 0
            if self._order[0] != self.epoch:
                self._order = (self.epoch, self.order(self.epoch))
            ids = self._order[1][self.position : self.position + n - len(batch)]
            batch.extend(self._prompts[prompt_id] for prompt_id in ids)
            self.position += len(ids)
        return batch

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores: absolute counters, and a fingerprint of the prompts they refer to."""
        return {"seed": self.seed, "epoch": self.epoch, "position": self.position, "skipped": self.skipped,
                "num_prompts": len(self), "fingerprint": self.fingerprint}

    @classmethod
    def from_state(cls, prompts: Sequence[Prompt], state: Mapping[str, Any]) -> PromptSource:
        """Continue where ``state`` was taken. Raises CheckpointError when the prompts are others than then."""
        if len(prompts) != state["num_prompts"]:
            source = None
        else:
            source = cls(prompts, seed=state["seed"], epoch=state["epoch"], position=state["position"])
        if source is None or source.fingerprint != state["fingerprint"]:
            raise CheckpointError(
                "training prompts", got=f"{len(prompts)} prompts that differ from the checkpoint's", stage="data",
                expected=f"the checkpoint's {state['num_prompts']} prompts (ids, token ids and golds)",
                remedy="Resume with the same data and tokenizer, or start anew with resume=never.",
            )
        source.skipped = state["skipped"]
        return source


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


@dataclass(frozen=True)
class DataReport:
    recipe: str
    instruction: str  # version of the prompt-and-extractor unit
    train: SplitReport
    evaluation: SplitReport
    overlap: tuple[str, ...] = field(default=())  # evaluation problems whose text also stands in the training set

    def as_dict(self) -> dict[str, Any]:
        sides = {
            name: {"rows": side.rows, "used": side.used, "excluded": list(side.excluded),
                   "overlong": list(side.overlong), "unselected": side.unselected, "contaminated": list(side.contaminated)}
            for name, side in (("train", self.train), ("evaluation", self.evaluation))
        }
        return {"recipe": self.recipe, "instruction": self.instruction, "overlap": list(self.overlap), **sides}

    def __str__(self) -> str:
        lines = [f"data: recipe {self.recipe}, instruction {self.instruction}"]
        for name, side in (("train", self.train), ("evaluation", self.evaluation)):
            if side.rows == 0:
                if name == "evaluation":
                    lines.append("  evaluation: none (no held-out file: set data.eval_path, or evaluate.num_problems=0 if meant)")
                continue
            lines.append(f"  {name}: {side.used} prompts of {side.rows} rows; {len(side.excluded)} without usable gold, "
                         f"{len(side.overlong)} overlong dropped, {side.unselected} beyond the limit"
                         + (f", {len(side.contaminated)} dropped as evaluated on" if side.contaminated else ""))
            for label, names in (("excluded", side.excluded), ("overlong", side.overlong)):
                if names:
                    lines.append(f"    {label}: {_listed(names)}")
        if self.train.rows == 0:  # an evaluation by itself
            return "\n".join(lines)
        lines.append(f"  overlap: {len(self.overlap)} evaluation problems also stand in the training set"
                     + (f": {_listed(self.overlap)}" if self.overlap else ""))
        return "\n".join(lines)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - files.LISTED
    return ", ".join(names[: files.LISTED]) + (f", and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class LoadedData:
    """``anchor``: prompts that a CoKL term holds to the reference instead of the training prompts; empty unless asked for."""

    train: list[Prompt]
    evaluation: list[Prompt]
    report: DataReport
    anchor: list[Prompt] = field(default_factory=list)


def without_held_out(data: DataConfig) -> bool:
    """A local training file without a held-out file: nothing to evaluate on, and the hub's split would be a surprise."""
    return data.path is not None and data.eval_path is None


def load(
    data: DataConfig, tokenizer_path: str | Path, *, num_eval_problems: int | None, invalid_gold: files.InvalidGold | None = None,
    with_anchor: bool = False,
) -> LoadedData:
    """Read, check, tokenise and limit both sides. Touches no accelerator and imports no torch.

    Args:
        data: the ``data`` group.
        tokenizer_path: folder of the model's tokenizer.
        num_eval_problems: size of the held-out set, chosen by a hash of the prompt ids (not the first rows, which some
            data sets order by subject); 0 for no evaluation, None for all there are.
        invalid_gold: the verifier's word on a gold, asked for every row: why it cannot be judged, empty or None if it
            can. None for no such check.
        with_anchor: read the anchor prompts, too: those of ``data.anchor_path``, else the training side of the recipe's
            retained tasks.

    Raises DataError (rows, columns, files, hub) and ModelError (tokenizer, template).
    """
    parts = find_recipe(data.recipe)
    training = [part for part in parts if part.trains and not part.benchmark]
    if not training:
        raise DataError("data.recipe", got=f"{data.recipe}, a benchmark", expected="a recipe with training problems", stage="data",
                        remedy=f"Evaluate it (python -m akl_dist.evaluate data={data.recipe}), or train on another recipe.")
    template, version = prompt_template(data, parts, tokenizer_path)
    train = _side(data, training, template, path=data.path, split=data.split, tiny_count=files.TINY_TRAIN_PROBLEMS,
                  limit=data.limit, spread=False, invalid_gold=invalid_gold)
    held_out = _NO_SIDE
    if num_eval_problems != 0 and not without_held_out(data):
        held_out = _evaluation_side(data, parts, template, num_eval_problems, invalid_gold)
    train, overlap = _without_contaminated(train, held_out, data.contaminated)
    anchor = _anchor(data, parts, template, invalid_gold) if with_anchor else []
    report = DataReport(data.recipe, version, train.report, held_out.report, overlap)
    return LoadedData(train.prompts, held_out.prompts, report, anchor)


def load_evaluation(
    data: DataConfig, tokenizer_path: str | Path, *, num_problems: int | None, invalid_gold: files.InvalidGold | None = None
) -> LoadedData:
    """The evaluation side alone (``train`` is empty): of any recipe, benchmarks included. Arguments and errors of :func:`load`."""
    parts = find_recipe(data.recipe)
    template, version = prompt_template(data, parts, tokenizer_path)
    held_out = _evaluation_side(data, parts, template, num_problems, invalid_gold)
    return LoadedData([], held_out.prompts, DataReport(data.recipe, version, _NO_SIDE.report, held_out.report))


def prompt_template(data: DataConfig, parts: Sequence[Recipe], tokenizer_path: str | Path) -> tuple[PromptTemplate, str]:
    """The template of a recipe's prompts, and the version of its instruction (that of a custom suffix: a hash of it)."""
    instruction = parts[0].instruction
    suffix = instruction.text if data.prompt_suffix is None else data.prompt_suffix
    version = instruction.version if data.prompt_suffix is None else f"custom-{_digest(suffix).hex()[:8]}"
    return PromptTemplate(tokenizer_path, system_prompt=data.system_prompt, suffix=suffix), version


@dataclass(frozen=True)
class _Side:
    """``texts``: the problems behind ``prompts``. ``all_ids``, ``all_texts``: of every usable row read, selected or not.
    ``embedded``: a problem may stand inside a longer prompt (rows that bring their own messages)."""

    prompts: list[Prompt]
    texts: list[str]
    report: SplitReport
    all_ids: list[str] = field(default_factory=list)
    all_texts: list[str] = field(default_factory=list)
    embedded: bool = False


_NO_SIDE = _Side([], [], SplitReport(0, 0, (), (), 0))


def _evaluation_side(
    data: DataConfig, parts: Sequence[Recipe], template: PromptTemplate, num_problems: int | None,
    invalid_gold: files.InvalidGold | None,
) -> _Side:
    evaluated = [part for part in parts if part.evaluates]
    if data.eval_path is not None and len(evaluated) > 1 and Path(data.eval_path).is_file():
        evaluated = benchmark_of(Path(data.eval_path), parts[0].instruction) or evaluated
    return _side(data, evaluated or parts, template, path=data.eval_path, split=data.eval_split, tiny_count=num_problems,
                 limit=num_problems, spread=True, invalid_gold=invalid_gold)


def _without_contaminated(train: _Side, held_out: _Side, contaminated: str) -> tuple[_Side, tuple[str, ...]]:
    """The training side as ``data.contaminated`` asks for it, and the ids of evaluation problems that stand in it.

    Every usable row of the evaluation side counts, not only those selected. Raises DataError for ``error``.
    """
    trained, evaluated = overlapping(train.texts, held_out.all_texts, embedded=train.embedded)
    ids = tuple(held_out.all_ids[index] for index in sorted(evaluated))
    if not ids or contaminated == "keep":
        return train, ids
    if contaminated == "error":
        raise DataError("training prompts", got=f"{len(trained)} that are also evaluated on ({_listed(ids)})", stage="data",
                        expected="no problem on both sides", remedy="Set data.contaminated=drop, or choose other data.")
    kept = [index for index in range(len(train.prompts)) if index not in trained]
    dropped = tuple(train.prompts[index].prompt_id for index in sorted(trained))
    report = replace(train.report, used=len(kept), contaminated=dropped)
    return replace(train, prompts=[train.prompts[i] for i in kept], texts=[train.texts[i] for i in kept], report=report), ids


def _anchor(
    data: DataConfig, parts: Sequence[Recipe], template: PromptTemplate, invalid_gold: files.InvalidGold | None
) -> list[Prompt]:
    retained = parts if data.anchor_path is not None else [part for part in parts if not (part.trains or part.benchmark)]
    if not retained:
        raise DataError("data.anchor_path", got="null", stage="data", remedy="Write data.anchor_path=FILE.",
                        expected=f"a file of anchor prompts for recipe {data.recipe}, which has no retained task")
    split = "anchor" if data.anchor_path is not None else data.split
    return _side(data, retained, template, path=data.anchor_path, split=split, tiny_count=files.TINY_TRAIN_PROBLEMS,
                 limit=None, spread=False, invalid_gold=invalid_gold).prompts


def _side(
    data: DataConfig, parts: Sequence[Recipe], template: PromptTemplate, *, path: str | None, split: str,
    tiny_count: int | None, limit: int | None, spread: bool, invalid_gold: files.InvalidGold | None,
) -> _Side:
    """Prompts, their problems' texts, and the counts of one side (training, evaluation or anchor).

    ``tiny_count`` problems are generated in all (None: all there are), shared out among the parts; a part with fewer gives what
    it has. The training side takes what there is, too; the held-out side of a single task must be as large as asked for.
    """
    at_most = not spread or tiny_count is None
    share = -(-(ALL_GENERATED if tiny_count is None else tiny_count) // len(parts))
    named: list[tuple[str, str, files.Problem]] = []  # (prompt id, source, problem)
    excluded: list[str] = []
    rows_read = 0
    for recipe in parts:
        rows, subject = _read(data, recipe, path=path, split=split, tiny_count=share, several=len(parts) > 1, at_most=at_most)
        problems, left_out = files.to_problems(rows, recipe, data.columns, subject=subject, invalid_gold=invalid_gold,
                                               drop_invalid=data.invalid_gold == "drop")
        rows_read += len(rows)
        excluded += left_out
        named += [(f"{recipe.name}/{problem.row_id}", problem.source or recipe.name, problem) for problem in problems]

    chosen = named
    if limit is not None and limit < len(named):
        ranked = sorted(named, key=lambda item: _digest("select", item[0])) if spread else named
        keep = {item[0] for item in ranked[:limit]}
        chosen = [item for item in named if item[0] in keep]
    prompts, texts, overlong = [], [], []
    for prompt_id, source, problem in chosen:
        ids = template.encode(problem.text, problem.messages)
        if len(ids) > data.max_prompt_tokens:
            overlong.append(f"{prompt_id} ({len(ids)} tokens)")
            continue
        prompts.append(Prompt(prompt_id, source, template.message(problem.text), ids, problem.gold))
        texts.append(problem.text)
    _check_overlong(data, overlong, kept=len(prompts), split=split)
    report = SplitReport(rows_read, len(prompts), tuple(excluded), tuple(overlong), len(named) - len(chosen))
    return _Side(prompts, texts, report, [item[0] for item in named], [item[2].text for item in named],
                 embedded=any(item[2].messages for item in named))


def _check_overlong(data: DataConfig, overlong: Sequence[str], *, kept: int, split: str) -> None:
    if overlong and (data.overlong == "error" or not kept):
        raise DataError(
            f"prompts of split {split!r}", got=f"{len(overlong)} longer than the limit: {_listed(overlong)}",
            expected=f"at most data.max_prompt_tokens={data.max_prompt_tokens} tokens", stage="data",
            remedy="Raise data.max_prompt_tokens" + (", or set data.overlong=drop." if kept else "; none is left."),
        )


def _read(
    data: DataConfig, recipe: Recipe, *, path: str | None, split: str, tiny_count: int, several: bool, at_most: bool,
) -> tuple[list[files.RawRow], str]:
    """Rows of one part of a recipe, and what to call them in errors."""
    if path is not None:
        file = Path(path)
        if file.is_dir():
            candidates = [file / f"{name}{suffix}" for name in (f"{recipe.name}_{split}", recipe.name) for suffix in files.SUFFIXES]
            file = next((c for c in candidates if c.is_file()), candidates[0])
        elif several:
            raise DataError(
                "data.path", got=path, stage="data",
                expected=f"a folder with one file per part (such as {recipe.name}_{split}.jsonl) for {data.recipe}",
                remedy="Name such a folder, or train on one data set.",
            )
        return _of_split(files.read_file(file, split=split), recipe, split, str(file)), str(file)
    if recipe.generated is not None:
        rows = files.read_tiny(split=split, count=tiny_count, task=recipe.generated, at_most=at_most or several)
        return rows, f"{recipe.name} problems"
    if data.name is not None and several:
        raise DataError("data.name", got=data.name, expected=f"null for {data.recipe}, which is several data sets",
                        remedy="Leave data.name out.", stage="data")
    hub_name = data.name or recipe.hub_name
    if hub_name is None:
        raise DataError("data.path", got="null", expected=f"a file or data.name for recipe {recipe.name}",
                        remedy="Set data.path=FILE (columns prompt and answer) or data.name=HUB_NAME.", stage="data")
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
