"""The samples of an evaluation on disk: one line per problem, appended whole, so that a killed evaluation goes on where it was.

The first line says what was sampled (model, data, sampling); records made under other settings are never mixed in.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from akl_dist.bookkeeping.atomic import strict_json, write_text
from akl_dist.contract.errors import RunError, UserError
from akl_dist.contract.records import JudgedArrays, JudgedGroup, RolloutGroup, Status
from akl_dist.evaluation import SampleRecord

FIELDS = ("status", "extracted", "tokens", "truncated", "answer_span_tokens")


def problem_row(group: RolloutGroup, judged: JudgedGroup, texts: JudgedArrays, sandbox: str | None) -> dict[str, Any]:
    """One problem with all its samples. ``sandbox``: the form of isolation in which programs ran, None where none did."""
    assert group.prompt.prompt_id == judged.prompt_id, "records of different problems"
    ran = {} if sandbox is None else {"sandbox": sandbox}
    samples = zip(judged.verdicts, texts.extracted, texts.texts, group.sampled_lengths, group.finish_reasons, group.truncated,
                  judged.answer_span_tokens, strict=True)
    return {"benchmark": group.prompt.source, "problem_id": group.prompt.prompt_id, "samples": [
        {"status": verdict.status.value, "extracted": extracted, "reason": verdict.reason, "tokens": tokens, "truncated": truncated,
         "turns_used_up": reason == "turns", "answer_span_tokens": span, "text": text, **ran}
        for verdict, extracted, text, tokens, reason, truncated, span in samples]}


def evaluation_path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.jsonl"


def write_evaluation(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """The problems of one evaluation during training, one :func:`problem_row` a line, in one atomic step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(strict_json(row) + "\n" for row in rows))


class SampleFile:
    """``path`` opened for appending; made when it is not there. A last line cut off by a kill is removed.

    Args:
        identity: what the samples depend on, plain values.
        votes: benchmarks whose answers have a majority.

    Raises:
        UserError: the file holds samples of another evaluation.
        RunError: a damaged line that is not the last.
    """

    def __init__(self, path: Path, *, identity: Mapping[str, Any], votes: Collection[str]) -> None:
        self._path, self._votes = path, votes
        self.records: list[SampleRecord] = []
        self.sandboxes: set[str] = set()  # forms of isolation in which programs were judged
        rows = self._read()
        if rows and rows[0] != dict(identity):
            changed = sorted(key for key in {*rows[0], *identity} if rows[0].get(key) != identity.get(key))
            raise UserError(str(path), got=f"samples taken with other {', '.join(changed)}", expected="samples of this evaluation",
                            remedy="Evaluate under another run_id.", stage="config")
        if not rows:
            self._append(dict(identity))
        for number, row in enumerate(rows[1:], start=2):
            self.records += self._parsed(row, number)

    @property
    def done(self) -> set[str]:
        """Ids of the problems on file."""
        return {record.problem_id for record in self.records}

    def append(self, row: Mapping[str, Any]) -> None:
        """One :func:`problem_row`; of its samples the :data:`FIELDS` are needed. On disk when this returns."""
        self.records += self._parsed(json.loads(self._append(row)), 0)

    def _append(self, row: Mapping[str, Any]) -> str:
        text = strict_json(row)
        with self._path.open("ab") as file:
            file.write(text.encode("ascii") + b"\n")
            file.flush()
            os.fsync(file.fileno())
        return text

    def _read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        content = self._path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(self._path, len(whole))
        try:
            return [json.loads(line) for line in whole.splitlines()]
        except ValueError as error:
            raise self._damaged(str(error)) from error

    def _parsed(self, row: Mapping[str, Any], number: int) -> list[SampleRecord]:
        try:
            self.sandboxes |= {sample["sandbox"] for sample in row["samples"] if "sandbox" in sample}
            return [
                SampleRecord(row["benchmark"], row["problem_id"], index, Status(sample["status"]), sample["extracted"],
                             sample["tokens"], sample["truncated"], sample["answer_span_tokens"], row["benchmark"] in self._votes,
                             sample.get("turns_used_up", False))
                for index, sample in enumerate(row["samples"])
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged(f"line {number}: {type(error).__name__} {error}") from error

    def _damaged(self, what: str) -> RunError:
        return RunError(str(self._path), got=f"a damaged file ({what})", expected="one problem a line",
                        remedy="Remove the file and evaluate again, or use another run_id.")
