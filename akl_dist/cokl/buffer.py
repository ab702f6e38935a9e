"""Reference samples on disk: one Parquet file a draw, one row a response with its verdict. Knows no cluster.

A file is whole or absent, and names what its samples were drawn with; files of other settings are not this run's samples.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from akl_dist.bookkeeping.atomic import replacing
from akl_dist.contract.errors import RunError
from akl_dist.contract.records import JudgedArrays, JudgedGroup, ReferenceArrays, RolloutArrays, RolloutGroup, Status
from akl_dist.contract.reference_samples import ReferenceSampleArrays, ReferenceSamples

SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("sample_index", pa.int32()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("response_token_ids", pa.list_(pa.int32())),
        ("ref_logp", pa.float64()),  # of the whole response, nats
        ("status", pa.string()),
        ("extracted", pa.string()),
        ("text", pa.string()),
    ]
)
DRAWN_WITH = b"drawn_with"
_FILE = re.compile(r"part_(\d{6})\.parquet")
_TEXT = ("extracted", "text")


@dataclass(frozen=True)
class DrawnGroup:
    """Headers and resolved arrays of one prompt's reference samples."""

    rollout: RolloutGroup
    arrays: RolloutArrays
    judged: JudgedGroup
    judged_arrays: JudgedArrays
    reference: ReferenceArrays

    def rows(self) -> list[dict[str, Any]]:
        """One row of ``SCHEMA`` per response."""
        ends = np.cumsum(self.rollout.response_lengths)
        if not len(self.arrays.token_ids) == len(self.reference.logp) == ends[-1]:
            raise RunError(f"reference samples of prompt {self.rollout.prompt.prompt_id}", stage="cokl",
                           got=f"{len(self.arrays.token_ids)} tokens and {len(self.reference.logp)} log-probs",
                           expected=f"{ends[-1]} of each", remedy="Arrays of different prompts were joined; this is a bug.")
        out = []
        for index, (end, length) in enumerate(zip(ends, self.rollout.response_lengths, strict=True)):
            piece = slice(end - length, end)
            out.append({
                "prompt_id": self.rollout.prompt.prompt_id, "sample_index": index,
                "prompt_token_ids": list(self.rollout.prompt.token_ids),
                "response_token_ids": self.arrays.token_ids[piece].tolist(),
                "ref_logp": float(self.reference.logp[piece].sum(dtype=np.float64)),
                "status": self.judged.verdicts[index].status.value, "extracted": self.judged_arrays.extracted[index],
                "text": self.judged_arrays.texts[index],
            })
        return out


class ReferenceBuffer:
    """The parts in one folder. ``drawn_with`` describes how samples are drawn (model, temperature, ...); parts of another
    description are removed when the buffer is opened, and their prompts are drawn again."""

    def __init__(self, folder: Path, drawn_with: Mapping[str, Any]) -> None:
        self._folder = folder
        self._drawn_with = json.dumps(dict(drawn_with), sort_keys=True)
        self._part_of: dict[str, Path] = {}
        self._loaded: tuple[Path, dict[str, list[dict[str, Any]]]] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        for part in self._parts():
            description = (pq.read_schema(part).metadata or {}).get(DRAWN_WITH, b"").decode()
            if description != self._drawn_with:
                part.unlink()
                continue
            ids = pq.read_table(part, columns=["prompt_id"]).column("prompt_id").to_pylist()
            self._part_of |= dict.fromkeys(ids, part)

    def _parts(self) -> list[Path]:
        return sorted(path for path in self._folder.iterdir() if _FILE.fullmatch(path.name))

    def prompt_ids(self) -> set[str]:
        """Prompts that have been sampled."""
        return set(self._part_of)

    def add(self, groups: Sequence[DrawnGroup]) -> int:
        """Write one part; returns the number of correct responses in it. Whole or absent."""
        rows = [row for group in groups for row in group.rows()]
        clean = [{name: _encodable(value) if name in _TEXT else value for name, value in row.items()} for row in rows]
        table = pa.Table.from_pylist(clean, schema=SCHEMA.with_metadata({DRAWN_WITH: self._drawn_with.encode()}))
        parts = self._parts()
        number = int(parts[-1].stem.removeprefix("part_")) + 1 if parts else 0
        part = self._folder / f"part_{number:06d}.parquet"
        with replacing(part) as temporary:
            pq.write_table(table, temporary)
        self._part_of |= {row["prompt_id"]: part for row in rows}
        return sum(row["status"] == Status.OK.value for row in rows)

    def correct(self, prompt_ids: Sequence[str]) -> list[ReferenceSamples]:
        """The correct responses to each prompt, arrays resolved; prompts that were never sampled are left out."""
        return [self._samples(prompt_id) for prompt_id in prompt_ids if prompt_id in self._part_of]

    def _samples(self, prompt_id: str) -> ReferenceSamples:
        rows = self._rows(self._part_of[prompt_id])[prompt_id]
        right = [row for row in rows if row["status"] == Status.OK.value]
        tokens = [np.asarray(row["response_token_ids"], np.int32) for row in right]
        arrays = ReferenceSampleArrays(
            token_ids=np.concatenate(tokens) if tokens else np.zeros(0, np.int32),
            seq_logp=np.asarray([row["ref_logp"] for row in right], np.float64))
        return ReferenceSamples(prompt_id, tuple(rows[0]["prompt_token_ids"]), tuple(len(t) for t in tokens), len(rows), arrays)

    def _rows(self, part: Path) -> dict[str, list[dict[str, Any]]]:
        """Rows of one part by prompt; the part read last is kept, since a step's prompts were mostly drawn together."""
        if self._loaded is None or self._loaded[0] != part:
            by_prompt: dict[str, list[dict[str, Any]]] = {}
            for row in pq.read_table(part).to_pylist():
                by_prompt.setdefault(row["prompt_id"], []).append(row)
            self._loaded = (part, by_prompt)
        return self._loaded[1]


def _encodable(text: str | None) -> str | None:
    """Text as UTF-8 can hold it (a model may emit half a character)."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode("utf-8")
