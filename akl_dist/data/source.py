"""From configuration to tokenised prompts (:func:`load`), and the resumable order in which they are trained on."""

from __future__ import annotations

import hashlib
import heapq
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from akl_dist.config.schema import DataConfig
from akl_dist.contract.errors import CheckpointError, DataError
from akl_dist.contract.records import Prompt
from akl_dist.data import files
from akl_dist.data.recipes import TINY, Recipe, find_recipe
from akl_dist.data.template import PromptTemplate


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
    """Counts of one side: ``rows`` = ``used`` + ``excluded`` + ``overlong`` + ``unselected`` (beyond the limit)."""

    rows: int
    used: int
    excluded: tuple[str, ...]
    overlong: tuple[str, ...]
    unselected: int


@dataclass(frozen=True)
class DataReport:
    recipe: str
    instruction: str  # version of the prompt-and-extractor unit
    train: SplitReport
    evaluation: SplitReport
    overlap: tuple[str, ...] = field(default=())  # evaluation prompts whose text also stands in the training set

    def as_dict(self) -> dict[str, Any]:
        sides = {
            name: {"rows": side.rows, "used": side.used, "excluded": list(side.excluded),
                   "overlong": list(side.overlong), "unselected": side.unselected}
            for name, side in (("train", self.train), ("evaluation", self.evaluation))
        }
        return {"recipe": self.recipe, "instruction": self.instruction, "overlap": list(self.overlap), **sides}

    def __str__(self) -> str:
        lines = [f"data: recipe {self.recipe}, instruction {self.instruction}"]
        for name, side in (("train", self.train), ("evaluation", self.evaluation)):
            if side.rows == 0:
                lines.append(f"  {name}: none (no held-out file: set data.eval_path, or evaluate.num_problems=0 if meant)")
                continue
            lines.append(f"  {name}: {side.used} prompts of {side.rows} rows; {len(side.excluded)} without gold, "
                         f"{len(side.overlong)} overlong dropped, {side.unselected} beyond the limit")
            for label, names in (("excluded", side.excluded), ("overlong", side.overlong)):
                if names:
                    lines.append(f"    {label}: {_listed(names)}")
        lines.append(f"  overlap: {len(self.overlap)} evaluation prompts also stand in the training set"
                     + (f": {_listed(self.overlap)}" if self.overlap else ""))
        return "\n".join(lines)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - files.LISTED
    return ", ".join(names[: files.LISTED]) + (f", and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class LoadedData:
    train: list[Prompt]
    evaluation: list[Prompt]
    report: DataReport


def without_held_out(data: DataConfig) -> bool:
    """A local training file without a held-out file: nothing to evaluate on, and the hub's split would be a surprise."""
    return data.path is not None and data.eval_path is None


def load(
    data: DataConfig, tokenizer_path: str | Path, *, num_eval_problems: int, invalid_gold: files.InvalidGold | None = None
) -> LoadedData:
    """Read, check, tokenise and limit both sides. Touches no accelerator and imports no torch.

    Args:
        data: the ``data`` group.
        tokenizer_path: folder of the model's tokenizer.
        num_eval_problems: size of the held-out set, chosen by a hash of the prompt ids (not the first rows, which some
            data sets order by subject); 0 for no evaluation.
        invalid_gold: the verifier's word on a gold, asked for every row: why it cannot be judged, empty or None if it
            can. None for no such check.

    Raises DataError (rows, columns, files, hub) and ModelError (tokenizer, template).
    """
    parts = find_recipe(data.recipe)
    suffix = parts[0].instruction.text if data.prompt_suffix is None else data.prompt_suffix
    version = parts[0].instruction.version if data.prompt_suffix is None else f"custom-{_digest(suffix).hex()[:8]}"
    template = PromptTemplate(tokenizer_path, system_prompt=data.system_prompt, suffix=suffix)

    train, train_texts, train_report = _side(
        data, parts, template, path=data.path, split=data.split, tiny_count=files.TINY_TRAIN_PROBLEMS,
        limit=data.limit, spread=False, invalid_gold=invalid_gold,
    )
    evaluation, eval_texts, eval_report = [], [], SplitReport(0, 0, (), (), 0)
    if num_eval_problems and not without_held_out(data):
        evaluation, eval_texts, eval_report = _side(
            data, parts, template, path=data.eval_path, split=data.eval_split, tiny_count=num_eval_problems,
            limit=num_eval_problems, spread=True, invalid_gold=invalid_gold,
        )
    known = {normalised(text) for text in train_texts}
    overlap = tuple(p.prompt_id for p, text in zip(evaluation, eval_texts, strict=True) if normalised(text) in known)
    return LoadedData(train, evaluation, DataReport(data.recipe, version, train_report, eval_report, overlap))


def _side(
    data: DataConfig, parts: Sequence[Recipe], template: PromptTemplate, *, path: str | None, split: str,
    tiny_count: int, limit: int | None, spread: bool, invalid_gold: files.InvalidGold | None,
) -> tuple[list[Prompt], list[str], SplitReport]:
    """Prompts, their problems' texts, and the counts of one side (training or evaluation)."""
    named: list[tuple[str, str, files.Problem]] = []  # (prompt id, source, problem)
    excluded: list[str] = []
    rows_read = 0
    for recipe in parts:
        rows, subject = _read(data, recipe, path=path, split=split, tiny_count=tiny_count, several=len(parts) > 1)
        problems, left_out = files.to_problems(rows, recipe, data.columns, subject=subject, invalid_gold=invalid_gold)
        rows_read += len(rows)
        excluded += left_out
        named += [(f"{recipe.name}/{problem.row_id}", recipe.name, problem) for problem in problems]

    chosen = named
    if limit is not None and limit < len(named):
        ranked = sorted(named, key=lambda item: _digest("select", item[0])) if spread else named
        keep = {item[0] for item in ranked[:limit]}
        chosen = [item for item in named if item[0] in keep]
    prompts, texts, overlong = [], [], []
    for prompt_id, source, problem in chosen:
        ids = template.encode(problem.text)
        if len(ids) > data.max_prompt_tokens:
            overlong.append(f"{prompt_id} ({len(ids)} tokens)")
            continue
        prompts.append(Prompt(prompt_id, source, template.message(problem.text), ids, problem.gold))
        texts.append(problem.text)
    _check_overlong(data, overlong, kept=len(prompts), split=split)
    report = SplitReport(rows_read, len(prompts), tuple(excluded), tuple(overlong), len(named) - len(chosen))
    return prompts, texts, report


def _check_overlong(data: DataConfig, overlong: Sequence[str], *, kept: int, split: str) -> None:
    if overlong and (data.overlong == "error" or not kept):
        raise DataError(
            f"prompts of split {split!r}", got=f"{len(overlong)} longer than the limit: {_listed(overlong)}",
            expected=f"at most data.max_prompt_tokens={data.max_prompt_tokens} tokens", stage="data",
            remedy="Raise data.max_prompt_tokens" + (", or set data.overlong=drop." if kept else "; none is left."),
        )


def _read(
    data: DataConfig, recipe: Recipe, *, path: str | None, split: str, tiny_count: int, several: bool
) -> tuple[list[files.RawRow], str]:
    """Rows of one part of a recipe, and what to call them in errors."""
    if path is not None:
        file = Path(path)
        if file.is_dir():
            candidates = [file / f"{recipe.name}_{split}{suffix}" for suffix in files.SUFFIXES]
            file = next((c for c in candidates if c.is_file()), candidates[0])
        elif several:
            raise DataError(
                "data.path", got=path, stage="data",
                expected=f"a folder with one file per part (such as {recipe.name}_{split}.jsonl) for {data.recipe}",
                remedy="Name such a folder, or train on one data set.",
            )
        return files.read_file(file, split=split), str(file)
    if recipe is TINY:
        return files.read_tiny(split=split, count=tiny_count), "tiny problems"
    if data.name is not None and several:
        raise DataError("data.name", got=data.name, expected=f"null for {data.recipe}, which is several data sets",
                        remedy="Leave data.name out.", stage="data")
    hub_name = data.name or recipe.hub_name
    if hub_name is None:
        raise DataError("data.path", got="null", expected=f"a file or data.name for recipe {recipe.name}",
                        remedy="Set data.path=FILE (columns prompt and answer) or data.name=HUB_NAME.", stage="data")
    configs = recipe.hub_configs if hub_name == recipe.hub_name else (None,)
    rows = [row for config in configs for row in files.read_hub(hub_name, config, split=split)]
    return rows, f"hub data set {hub_name}, split {split!r}"


_WRITTEN = re.compile(r"[.,;:!?'\"](?!\d)|[$\\\s]")


def normalised(text: str) -> str:
    """Text for comparing problems: compatibility form, case folded, without spacing, dollar signs, backslashes and
    the punctuation of sentences. Operators, brackets and decimal points stay: 7+36 is not 73+6."""
    return _WRITTEN.sub("", unicodedata.normalize("NFKC", text).casefold())
