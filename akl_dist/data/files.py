"""Reading rows from local JSONL and Parquet files, from the hub, and from the generated tiny task.

Local files are parsed here with one declared schema, every used column is text, instead of through a table library's
type inference: numbers keep their written form, an error names the line, and no cache can go stale. The hub goes
through ``datasets``, which keeps its own cache (``HF_HOME``) and respects ``HF_HUB_OFFLINE``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from akl_dist.config.schema import ColumnsConfig
from akl_dist.contract.errors import DataError, nearest
from akl_dist.data.composed import Composed, Numeral, other_columns
from akl_dist.data.recipes import GoldColumn, Recipe
from akl_dist.data.report import LISTED

InvalidGold = Callable[[str], "str | None"]
"""Why a gold cannot be judged; empty or None for one that can be."""

SUFFIXES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class RawRow:
    """One row as read. ``where`` names it in errors ("line 7", "row 7"), ``row_id`` is its default id in the split."""

    where: str
    row_id: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Problem:
    """One usable row: id (unique in its source), the problem's text, the gold answer; ``messages`` (role, content) of a row that
    brings its whole prompt, ``source`` where the row names its own, ``extra`` JSON text of what else it brings."""

    row_id: str
    text: str
    gold: str
    messages: tuple[tuple[str, str], ...] = ()
    source: str | None = None
    extra: str = ""


def read_file(path: Path, *, split: str) -> list[RawRow]:
    """All rows of a JSONL or Parquet file. Raises DataError: missing, of another kind, empty, malformed (by line)."""
    if not path.is_file():
        near = nearest(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else None
        raise _error(str(path), "no such file", "an existing JSONL or Parquet file",
                     f"Did you mean {str(path.parent / near)!r}?" if near else "Correct the path.")
    if path.suffix not in SUFFIXES:
        raise _error(str(path), f"a file ending in {path.suffix!r}", f"one of {', '.join(SUFFIXES)}",
                     "Convert the file to JSONL (one object a line) or Parquet.")
    values = _read_parquet(path) if path.suffix == ".parquet" else _read_jsonl(path)
    rows = [RawRow(where, f"{split}/{index}", row) for index, (where, row) in enumerate(values)]
    if not rows:
        raise _error(str(path), "0 rows", "at least one row", "Give a file that has rows.")
    return rows


def _read_jsonl(path: Path) -> Iterable[tuple[str, dict[str, Any]]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if not text.strip():
                    continue
                # numbers keep their spelling: 0.10 stays "0.10", a 30-digit integer loses nothing
                row = json.loads(text, parse_float=Numeral, parse_int=Numeral, parse_constant=_no_constant)
            except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
                raise _error(f"{path}, line {number}", f"malformed JSON ({error})", "one JSON object, UTF-8",
                             "Correct or remove the line.") from error
            except RecursionError as error:
                raise _error(f"{path}, line {number}", "malformed JSON (nested too deeply)", "one JSON object, UTF-8",
                             "Correct or remove the line.") from error
            if not isinstance(row, dict):
                raise _error(f"{path}, line {number}", f"a JSON {type(row).__name__}", "a JSON object",
                             "Write one object a line.")
            yield f"line {number}", row


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _read_parquet(path: Path) -> Iterable[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise _error(str(path), f"an unreadable Parquet file ({error})", "a complete Parquet file",
                     "Write or copy the file again.") from error
    for index, row in enumerate(table.to_pylist()):
        yield f"row {index}", row


def read_hub(name: str, config: str | None, *, split: str) -> list[RawRow]:
    """All rows of a hub data set's split. ``name`` may be a local folder in the hub's layout.

    Raises DataError with the way round (``data.path=``) when it cannot be had. Waits at most for the hub client's own
    retries (about half a minute without a network; at once with ``HF_HUB_OFFLINE=1``).
    """
    import datasets
    from datasets.exceptions import DatasetsError

    what = f"hub data set {name}" + (f" ({config})" if config else "")
    try:
        table = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError, DatasetsError) as error:
        raise _error(
            what, f"{type(error).__name__}: {error}", f"its split {split!r}, from the hub or the local cache",
            "Check the name, the split and the network, or give local files: data.path=FILE and data.eval_path=FILE "
            "(JSONL or Parquet).",
        ) from error
    prefix = f"{split}/{config}" if config and config != "main" else split
    rows = [RawRow(f"row {index}", f"{prefix}/{index}", row) for index, row in enumerate(table.to_list())]
    if not rows:
        raise _error(what, f"0 rows in split {split!r}", "at least one row", "Choose another split.")
    return rows


TINY_SPLITS: Mapping[str, Literal["train", "heldout"]] = {"train": "train", "test": "heldout", "heldout": "heldout"}
TINY_TRAIN_PROBLEMS = 4096


def read_tiny(*, split: str, count: int, task: str = "sums", at_most: bool = False) -> list[RawRow]:
    """``count`` generated problems of one task, whatever the run's seed; a longer list starts with the shorter one.

    Args:
        task: "sums", "blanks" (several right answers), "pairs" (two operands) or "products" (of two digits, by tool).
        at_most: give all there are where the split has fewer than ``count``.

    Raises DataError for an unknown split, and unless ``at_most`` for more problems than the split has.
    """
    from akl_dist.tiny import environments, tool_task
    from akl_dist.tiny import task as sums

    tasks = {"sums": (sums.num_problems, sums.problems), "blanks": (environments.num_blanks, environments.blanks),
             "pairs": (environments.num_pairs, environments.pairs),
             "products": (tool_task.num_products, tool_task.products)}  # fmt: skip
    if split not in TINY_SPLITS:
        raise _error("data.split of a generated recipe", repr(split), f"one of {', '.join(TINY_SPLITS)}",
                     "Generated tasks have a training and a held-out side.")
    number, problems = tasks[task]
    available = number(TINY_SPLITS[split])
    if count > available and not at_most:
        raise _error("evaluate.num_problems", str(count), f"at most {available}, the {task} of split {split!r}",
                     f"Write evaluate.num_problems={available} or less.")
    drawn = problems(TINY_SPLITS[split], min(count, available), seed=0)
    return [RawRow(f"problem {n}", p.id, {"id": p.id, "text": p.text, "answer": p.answer}) for n, p in enumerate(drawn)]


def to_problems(
    rows: Sequence[RawRow], recipe: Recipe, columns: ColumnsConfig, *, subject: str, invalid_gold: InvalidGold | None = None,
    drop_invalid: bool = False,
) -> tuple[list[Problem], list[str]]:
    """Apply the declared schema: id, problem and gold as text.

    Returns the problems and the rows left out: those that upstream is known to give no gold answer, and with ``drop_invalid``
    those whose gold cannot be judged. Raises DataError naming the rows for a missing column, a missing or non-text value, half a
    character (a lone surrogate, which no tokenizer takes), a gold that the adapter cannot read (coverage must be 100 %) or that
    ``invalid_gold`` objects to, or a repeated id.
    """
    found = {column: None for row in rows for column in row.values}
    id_column = columns.id and _present("data.columns.id", columns.id, (), found, subject)
    id_column = id_column or next((c for c in recipe.id_columns if c in found), None)
    schema = _schema(recipe, columns, found, subject, id_column)
    problems: list[Problem] = []
    excluded: list[str] = []
    bad: list[str] = []
    judged = False  # whether a gold that could be left out is among them
    for row in rows:
        row_id = _text(row.values.get(id_column)) if id_column else row.row_id
        name = f"{row.where}" + (f" (id {_printable(row_id)})" if row_id and id_column else "")
        composed = schema.compose(row.values) if row_id else f"column {id_column!r} has no text"
        if isinstance(composed, str):
            bad.append(f"{name}: {composed}")
            continue
        texts = {id_column: row_id, schema.prompt: composed.text + "".join(text for _, text in composed.messages),
                 schema.gold: composed.gold}
        reason = invalid_gold(composed.gold) if composed.gold and invalid_gold else None
        if halved := [column for column, text in texts.items() if _halved(text)]:
            bad.append(f"{name}: column {halved[0]!r} holds half a character (a lone surrogate)")
        elif composed.gold and not reason:
            problems.append(Problem(str(row_id), composed.text, composed.gold, composed.messages, composed.source,
                                    composed.extra))
        elif known := recipe.known_unusable.get(hashlib.sha256(composed.text.encode("utf-8", "replace")).hexdigest()):
            excluded.append(f"{row.where}: {known}")
        elif composed.gold:
            judged = not drop_invalid
            listed = excluded if drop_invalid else bad
            listed.append(f"{name}: gold {_shortened(composed.gold)} cannot be judged ({reason})")
        else:
            bad.append(f"{name}: prompt without answer (column {schema.gold!r})")
    if bad:
        listed = "; ".join(bad[:LISTED]) + (f"; and {len(bad) - LISTED} more" if len(bad) > LISTED else "")
        raise _error(f"{subject}: {len(bad)} of {len(rows)} rows", listed, f"{schema.expected}, in every row",
                     "Correct or remove these rows, or name other columns with data.columns."
                     + (" Or write data.invalid_gold=drop: golds that cannot be judged are left out and listed." if judged else ""))
    _check_unique(problems, subject)
    return problems, excluded


@dataclass(frozen=True)
class _Schema:
    """How a data set's rows are read. ``compose``: a gold that is not there is the empty text; a str says what else is missing.
    ``prompt`` and ``gold`` name the columns in errors, ``expected`` says what they must hold."""

    compose: Callable[[Mapping[str, Any]], Composed | str]
    prompt: str
    gold: str
    expected: str


def _schema(
    recipe: Recipe, columns: ColumnsConfig, found: Mapping[str, None], subject: str, id_column: str | None
) -> _Schema:
    if recipe.compose is not None:
        if columns.prompt or columns.answer:
            raise _error("data.columns", "prompt or answer", f"the columns of recipe {recipe.name}, which reads several at once",
                         "Leave data.columns out, or write problems and answers into two columns and use data=generic.")
        return _Schema(recipe.compose, recipe.prompt_column, "gold", f"rows in the layout of recipe {recipe.name}")
    prompt = _present("data.columns.prompt", columns.prompt, (recipe.prompt_column, *recipe.other_prompt_columns), found, subject)
    gold = _gold_column(recipe, columns, found, subject)

    def compose(values: Mapping[str, Any]) -> Composed | str:
        text, raw_gold = _text(values.get(prompt)), _text(values.get(gold.column))
        if not text or not text.strip():
            return f"column {prompt!r} has no text"
        if recipe.prompt_adapter is not None:
            text = recipe.prompt_adapter(text)
        extra = other_columns(values, {prompt, gold.column, id_column}) if recipe.brings_extra else ""
        return Composed(text, (gold.adapter(raw_gold) if raw_gold is not None else None) or "", extra=extra)

    return _Schema(compose, prompt, gold.column, f"text in {prompt!r} and {gold.expected} in {gold.column!r}")


def _check_unique(problems: Sequence[Problem], subject: str) -> None:
    seen: set[str] = set()
    repeated = [p.row_id for p in problems if p.row_id in seen or seen.add(p.row_id)]
    if repeated:
        raise _error(f"{subject}: ids", f"{len(repeated)} repeated, e.g. {', '.join(repeated[:LISTED])}",
                     "one id per row", "Make the ids unique, or name another column with data.columns.id.")


def _text(value: Any) -> str | None:
    """Lossless text of a cell, or None for a cell that is no text (missing, boolean, list, non-finite number)."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float) and value - value == 0:
        return repr(value)
    return None


def _halved(text: str | None) -> bool:
    """Whether the text holds a lone surrogate: JSON can write one (``\\ud800``), UTF-8 and tokenizers cannot."""
    return text is not None and not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _shortened(text: str, limit: int = 60) -> str:
    return repr(text if len(text) <= limit else text[:limit] + "...")


def _gold_column(recipe: Recipe, columns: ColumnsConfig, found: Mapping[str, None], subject: str) -> GoldColumn:
    """The recipe's gold column that is present. A column of the user's own is read by the recipe's first adapter."""
    known = {g.column: g for g in recipe.gold_columns}
    name = _present("data.columns.answer", columns.answer, tuple(known), found, subject)
    first = recipe.gold_columns[0]
    return known.get(name) or GoldColumn(name, first.adapter, first.expected)


def _present(
    key: str, override: str | None, defaults: tuple[str, ...], found: Mapping[str, None], subject: str
) -> str:
    """The first wanted column that exists. Raises DataError naming the columns found and the nearest of them."""
    wanted = (override,) if override else defaults
    for column in wanted:
        if column in found:
            return column
    near = nearest(wanted[0], found)
    raise _error(
        f"{subject}: column {' or '.join(repr(w) for w in wanted)}", f"columns {', '.join(found)}", "that column",
        f"Set {key}={near or 'COLUMN'}" + (f" ({near!r} is the nearest name)." if near else "."),
    )


def _error(subject: str, got: str, expected: str, remedy: str) -> DataError:
    return DataError(subject, got=got, expected=expected, remedy=remedy, stage="data")
