"""Rollout dumps: one Parquet file a step, one row a response, exact enough to train from again (``rollout.replay``).

The functions take resolved arrays and know no cluster: whoever holds the arrays (a worker, not the driver) calls them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from akl_dist.bookkeeping.atomic import replacing
from akl_dist.contract.errors import DataError
from akl_dist.contract.records import (
    JudgedArrays,
    Prompt,
    ReferenceArrays,
    RoleArrays,
    RolloutArrays,
    TrainingGroup,
    Turns,
)

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("prompt_id", pa.string()),
        ("source", pa.string()),
        ("sample_index", pa.int32()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("prompt_text", pa.string()),
        ("gold", pa.string()),
        ("response_token_ids", pa.list_(pa.int32())),
        ("text", pa.string()),
        ("role", pa.list_(pa.bool_())),  # True = answer token
        ("logp", pa.list_(pa.float32())),  # behaviour log-probs, nats
        ("ref_logp", pa.list_(pa.float32())),
        ("entropy", pa.list_(pa.float32())),  # of the reference, nats
        ("advantage", pa.float64()),
        ("reward", pa.float64()),  # null where there is no verdict
        ("status", pa.string()),
        ("reason", pa.string()),  # why, in words; empty where the status says it all
        ("extracted", pa.string()),
        ("finish_reason", pa.string()),
        ("policy_version", pa.int64()),
        ("answer_span_tokens", pa.int32()),
        ("turns", pa.string()),  # JSON of contract.records.Turns; null where the response was sampled in one piece
        ("prompt_extras", pa.string()),  # JSON of the prompt's think_open, verifier, max_response_tokens and extra
    ]
)
_EXTRAS = ("think_open", "verifier", "max_response_tokens", "extra")
_PER_TOKEN = ("role", "logp", "ref_logp", "entropy")
_TEXT = ("prompt_id", "source", "prompt_text", "gold", "text", "status", "reason", "extracted", "finish_reason")
_FILE = re.compile(r"step_(\d+)\.parquet")


@dataclass(frozen=True)
class DumpRow:
    """One response. Per-token arrays have the response's length T: response_token_ids int32 [T], role bool [T],
    logp, ref_logp, entropy float32 [T]. ``reward`` is None where there is no verdict."""

    step: int
    prompt_id: str
    source: str
    sample_index: int
    prompt_token_ids: tuple[int, ...]
    prompt_text: str
    gold: str
    response_token_ids: np.ndarray
    text: str
    role: np.ndarray
    logp: np.ndarray
    ref_logp: np.ndarray
    entropy: np.ndarray
    advantage: float
    reward: float | None
    status: str
    reason: str
    extracted: str | None
    finish_reason: str
    policy_version: int
    answer_span_tokens: int
    turns: str | None = None
    prompt_extras: str = "{}"

    def __post_init__(self) -> None:
        lengths = {name: np.shape(getattr(self, name)) for name in ("response_token_ids", *_PER_TOKEN)}
        if len(set(lengths.values())) != 1 or len(lengths["logp"]) != 1:
            raise ValueError(f"prompt {self.prompt_id}, sample {self.sample_index}: arrays do not align: {lengths}")


def rows_of_group(
    step: int, group: TrainingGroup, rollout: RolloutArrays, judged: JudgedArrays, reference: ReferenceArrays,
    roles: RoleArrays,
) -> list[DumpRow]:
    """The rows of one group from its header and its resolved arrays (flat, [n])."""
    labelled = group.labelled
    header, prompt = labelled.rollout, labelled.rollout.prompt
    ends = np.cumsum(header.response_lengths)
    if not len(rollout.token_ids) == len(reference.logp) == len(roles.answer_mask) == ends[-1]:
        raise ValueError(f"prompt {prompt.prompt_id}: arrays do not hold the {ends[-1]} tokens of the header")
    extras = json.dumps({name: getattr(prompt, name) for name in _EXTRAS})
    rows = []
    for index, (end, length) in enumerate(zip(ends, header.response_lengths, strict=True)):
        piece = slice(end - length, end)
        verdict = labelled.judged.verdicts[index]
        rows.append(
            DumpRow(
                step=step, prompt_id=prompt.prompt_id, source=prompt.source, sample_index=index,
                prompt_token_ids=prompt.token_ids, prompt_text=prompt.text, gold=prompt.gold,
                response_token_ids=rollout.token_ids[piece], text=judged.texts[index],
                role=roles.answer_mask[piece], logp=rollout.logp[piece], ref_logp=reference.logp[piece],
                entropy=reference.entropy[piece], advantage=group.advantages[index], reward=verdict.reward,
                status=verdict.status.value, reason=verdict.reason, extracted=judged.extracted[index],
                finish_reason=header.finish_reasons[index],
                policy_version=header.policy_version,
                answer_span_tokens=labelled.judged.answer_span_tokens[index],
                turns=json.dumps(asdict(header.turns[index])) if header.turns else None, prompt_extras=extras,
            )
        )
    return rows


def dump_path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.parquet"


def write_rollouts(path: Path, rows: Iterable[DumpRow]) -> int:
    """Write one step's responses in one atomic step; returns their number. Text that is no Unicode is escaped: the
    token ids are the truth."""
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    for row in rows:
        for name, values in columns.items():
            value = getattr(row, name)
            values.append(_encodable(value) if name in _TEXT else value)
    arrays = [pa.array(columns[field.name], type=field.type) for field in SCHEMA]
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        pq.write_table(pa.Table.from_arrays(arrays, schema=SCHEMA), temporary, compression="zstd")
    return len(columns["step"])


def _encodable(text: str | None) -> str | None:
    return None if text is None else text.encode("utf-8", "backslashreplace").decode("utf-8")


@dataclass(frozen=True)
class ReplayGroup:
    """What a replayed rollout stage needs to rebuild a RolloutGroup: bit-equal ids and log-probs."""

    prompt: Prompt
    response_lengths: tuple[int, ...]
    arrays: RolloutArrays
    finish_reasons: tuple[str, ...]
    policy_version: int
    turns: tuple[Turns, ...]


def read_rollouts(path: Path) -> list[ReplayGroup]:
    """The groups of one step, in the order written. Raises DataError for a damaged file or another schema."""
    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise _unreadable(path, error) from error
    _require_schema(path, table.schema)
    index = table.column("sample_index").to_pylist()
    starts = [row for row, sample in enumerate(index) if sample == 0]
    if not starts or starts[0] != 0:
        raise DataError(str(path), got="no first sample" if index else "0 rows", stage="rollout",
                        expected="whole groups from sample 0 on", remedy="Take the dump again.")
    return [_group(path, table.slice(start, end - start)) for start, end in
            zip(starts, [*starts[1:], len(index)], strict=True)]


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(str(path), got=f"an unreadable file ({error})", expected="a rollout dump", stage="rollout",
                     remedy="Take the dump again.")


def _require_schema(path: Path, schema: pa.Schema) -> None:
    if not schema.equals(SCHEMA):
        raise DataError(str(path), got=f"columns {', '.join(schema.names)}", stage="rollout",
                        expected=f"columns {', '.join(SCHEMA.names)} with their types", remedy="Take the dump again.")


def _dump_size(path: Path) -> tuple[int, int]:
    """(rows, responses of the largest group) of a dump, from its footer: no row is read."""
    try:
        with pq.ParquetFile(path) as file:
            _require_schema(path, file.schema_arrow)
            footer, column = file.metadata, SCHEMA.get_field_index("sample_index")
            leaf = [footer.schema.column(i).path for i in range(footer.num_columns)].index(SCHEMA.names[column])
            parts = [footer.row_group(i).column(leaf).statistics for i in range(footer.num_row_groups)]
    except (pa.ArrowInvalid, OSError) as error:
        raise _unreadable(path, error) from error
    return footer.num_rows, max((part.max + 1 for part in parts if part is not None and part.has_min_max), default=0)


def _group(path: Path, table: pa.Table) -> ReplayGroup:
    def column(name: str) -> list[Any]:
        return table.column(name).to_pylist()

    def flat(name: str) -> np.ndarray:
        return np.array(table.column(name).combine_chunks().flatten())  # a copy: torch wants writable arrays

    prompts = list(zip(*(column(n) for n in ("prompt_id", "source", "prompt_text", "gold", "prompt_extras")), strict=True))
    versions = set(column("policy_version"))
    size = len(prompts)
    if len(set(prompts)) != 1 or len(versions) != 1 or column("sample_index") != list(range(size)):
        raise DataError(f"{path}, prompt {prompts[0][0]}", got=f"samples {column('sample_index')} of "
                        f"{len(set(prompts))} prompts and {len(versions)} policy versions", stage="rollout",
                        expected="samples 0 to G-1 of one prompt and version", remedy="Take the dump again.")
    prompt_id, source, text, gold, extras = prompts[0]
    turns = [Turns(**_tuples(json.loads(text))) for text in column("turns") if text is not None]
    return ReplayGroup(
        prompt=Prompt(prompt_id, source, text, tuple(column("prompt_token_ids")[0]), gold, **json.loads(extras)),
        response_lengths=tuple(len(ids) for ids in column("response_token_ids")),
        arrays=RolloutArrays(flat("response_token_ids"), flat("logp")),
        finish_reasons=tuple(column("finish_reason")),
        policy_version=versions.pop(), turns=tuple(turns),
    )


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """JSON knows lists alone."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


class ReplayOrder:
    """Which dump a run's next step takes. Pure.

    Step N takes the dump of step N, or the N-th dump where the numbers do not start at 1. A run that goes on from the
    checkpoint of step N - 1 of a normal run takes the dump of step N, wherever the numbers start; one that goes on from a
    replay's checkpoint takes the dump after the last one that was replayed.

    Args:
        dumped: steps that have a dump; at least one.
        last: the dump before the next one, 0 before the first.
    """

    def __init__(self, dumped: Sequence[int], *, last: int = 0) -> None:
        self._dumped, self._last = sorted(dumped), last

    @classmethod
    def resumed(cls, dumped: Sequence[int], *, step: int, prompt_source: Mapping[str, Any]) -> ReplayOrder:
        """Go on from a checkpoint of ``step`` with this ``prompt_source`` state, a replay's (:meth:`state`) or a normal one.

        Raises DataError when a normal run's next step has no dump.
        """
        if "last_dump" in prompt_source:
            return cls(dumped, last=prompt_source["last_dump"])
        order = cls(dumped, last=step)
        if step + 1 not in dumped:
            raise order._missing(f"a dump of step {step + 1}, to go on from the checkpoint of step {step}",
                                 "Resume from the checkpoint before a dumped step, or start anew with resume=never.")
        return order

    def take(self) -> int:
        """The next dump's step. Raises DataError when there is none, or a gap where dumps go by their numbers."""
        following = [step for step in self._dumped if step > self._last]
        if not following:
            raise self._missing(f"a dump after step {self._last}", "Lower steps, or name a folder with more dumps.")
        if self._dumped[0] == 1 and following[0] != self._last + 1:
            raise DataError("rollout.replay", got=f"no dump of step {self._last + 1}, the next is {following[0]}", stage="rollout",
                            expected="consecutive steps from 1 on", remedy="Dump the missing step, or remove the dumps before it.")
        self._last = following[0]
        return self._last

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores in the place of a prompt source's position."""
        return {"last_dump": self._last}

    def _missing(self, expected: str, remedy: str) -> DataError:
        got = f"{len(self._dumped)} dumped steps, {self._dumped[0]} to {self._dumped[-1]}"
        return DataError("rollout.replay", got=got, expected=expected, remedy=remedy, stage="rollout")


class ReplayReader:
    """Serves the steps of a folder of dumps (a run directory or its ``rollouts/``)."""

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        self.folder = folder / "rollouts" if (folder / "rollouts").is_dir() else folder
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        self._files = {int(m[1]): file for file in found if (m := _FILE.fullmatch(file.name))}
        if not self._files:
            raise DataError("rollout.replay", got=f"no step_*.parquet in {self.folder}", stage="rollout",
                            expected="a folder of rollout dumps",
                            remedy="Name a run directory that was made with journal.dump_rollouts=true.")

    @property
    def steps(self) -> Sequence[int]:
        return sorted(self._files)

    def check(self, order: ReplayOrder, *, steps: int, prompts: int, group_size: int) -> None:
        """Whether ``order`` finds a dump for each of the next ``steps`` steps, and each holds ``prompts`` groups of ``group_size``
        responses by its footer. ``order`` is used up.

        Raises DataError: a dump that is missing, unreadable or of another size, with the keys to set.
        """
        for _ in range(steps):
            step = order.take()
            rows, size = _dump_size(self._files[step])
            if (rows, size) != (prompts * group_size, group_size):
                groups = f"{rows / size:g}" if size else "0"
                raise DataError(f"rollout.replay, step {step}", got=f"{groups} prompts of {size} responses", stage="rollout",
                                expected=f"{prompts} of {group_size} (rollout.prompts_per_step, rollout.group_size)",
                                remedy=f"Set rollout.prompts_per_step={groups} rollout.group_size={size}.")

    def read(self, step: int) -> list[ReplayGroup]:
        """Groups of one step. Raises DataError naming the steps there are."""
        if step not in self._files:
            steps = self.steps
            raise DataError(f"rollout.replay, step {step}", got=f"no dump in {self.folder}", stage="rollout",
                            expected=f"one of its {len(steps)} steps, {steps[0]} to {steps[-1]}",
                            remedy=f"Set steps={steps[-1]} or less, or dump the missing step.")
        return read_rollouts(self._files[step])
