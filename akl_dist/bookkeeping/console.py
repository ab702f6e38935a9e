"""What a person sees: one line a step, and the table of before and after. ASCII unless on a terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

STAGES = ("rollout", "verify", "reference", "critic", "learner", "weight_sync")


def duration(seconds: float) -> str:
    """``7 s``, ``3:05`` or ``2:03:05``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def printable(message: str, stream: TextIO) -> str:
    """``message`` with what the stream's encoding cannot show escaped."""
    encoding = stream.encoding or "ascii"
    return message.encode(encoding, "backslashreplace").decode(encoding)


def write_line(message: str, stream: TextIO) -> None:
    """A whole line (or several). Characters that the stream cannot show are escaped, not fatal; a reader that has gone
    (``| head``) ends the printing, neither the work nor its exit code."""
    try:
        stream.write(printable(message, stream) + "\n")
        stream.flush()
    except BrokenPipeError:  # as the Python documentation advises: what is still buffered goes nowhere, also at the exit
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def write_alarm(message: str, stream: TextIO) -> None:
    """A whole line in red on a terminal; the same words without colour anywhere else."""
    write_line(f"\x1b[1;31m{message}\x1b[0m" if stream.isatty() else message, stream)


class Console:
    """Progress on ``stream`` (messages for people; results go to files and to the final table).

    On a terminal the running stage is shown in place and overwritten by the step's line.
    """

    def __init__(
        self, total_steps: int, *, first_step: int = 1, stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._first = total_steps, first_step
        self._stream = sys.stdout if stream is None else stream
        self._live = self._stream.isatty()
        self._clock = clock
        self._start = clock()
        self._transient = 0

    def stage(self, step: int, name: str) -> None:
        """Shows what the loop is waiting for; prints nothing where there is no terminal."""
        if self._live:
            self._show_transient(f"step {step}/{self._total} {name} ...")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line: accuracy, KL, gradient norm, speed, time by stage, time left. Absent metrics are left out."""
        parts = [f"step {step}/{self._total}"]
        for key, label, form in (
            ("verify/accuracy", "acc", ".3f"),
            ("objective/kl_value_k3", "KL", ".4f"),
            ("learner/grad_norm", "grad", ".3g"),
            ("rollout/tokens_per_s", "tok/s", ".0f"),
        ):
            if key in metrics:
                parts.append(f"{label} {metrics[key]:{form}}")
        undecided = sum(metrics.get(f"verify/{status}_fraction", 0.0) for status in ("timeout", "error", "invalid_gold"))
        if undecided > 0:
            parts.append(f"without verdict {100 * undecided:.0f} %")
        stages = [f"{name} {metrics[f'time/{name}_s']:.1f}" for name in STAGES if f"time/{name}_s" in metrics]
        if "time/step_s" in metrics:
            parts.append(f"{metrics['time/step_s']:.1f} s" + (f" ({', '.join(stages)})" if stages else ""))
        done = step - self._first + 1
        if done > 0 and step < self._total:
            parts.append(f"eta {duration((self._clock() - self._start) / done * (self._total - step))}")
        self.say(" | ".join(parts))

    def say(self, message: str) -> None:
        """A whole line (or several); see :func:`write_line`."""
        self._clear()
        write_line(message, self._stream)

    def final(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """The before/after table."""
        plus_minus = "±" if self._live and (self._stream.encoding or "").lower().replace("-", "") == "utf8" else "+-"
        self.say(before_after_table(before, after, plus_minus=plus_minus))

    def _show_transient(self, message: str) -> None:
        self._clear()
        self._stream.write(message)
        self._stream.flush()
        self._transient = len(message)

    def _clear(self) -> None:
        if self._transient:
            self._stream.write("\r" + " " * self._transient + "\r")
            self._transient = 0


@dataclass(frozen=True)
class TableRow:
    """``key`` and ``error`` (standard error, optional) are keys of an evaluation; ``scale`` multiplies both."""

    label: str
    key: str
    error: str | None = None
    form: str = ".2f"
    scale: float = 1.0


TABLE = (
    TableRow("accuracy (%)", "accuracy", "accuracy_standard_error", ".1f", 100.0),
    TableRow("answer-span tokens", "answer_span_tokens"),
    TableRow("response length (tokens)", "response_tokens", None, ".1f"),
    TableRow("KL to reference (nats/token)", "kl_per_token", None, ".4f"),
)


def before_after_table(
    before: Mapping[str, float], after: Mapping[str, float], *, rows: Sequence[TableRow] = TABLE, plus_minus: str = "+-"
) -> str:
    """An aligned table, one row a metric; a metric without a value shows ``-``.

    The keys are those of an evaluation record: accuracy and accuracy_standard_error (fractions), answer_span_tokens,
    response_tokens, kl_per_token.
    """

    def cell(values: Mapping[str, float], row: TableRow) -> str:
        if row.key not in values:
            return "-"
        text = f"{values[row.key] * row.scale:{row.form}}"
        if row.error and values.get(row.error) is not None:
            text += f" {plus_minus} {values[row.error] * row.scale:{row.form}}"
        return text

    def change(row: TableRow) -> str:
        if row.key not in before or row.key not in after:
            return "-"
        return f"{(after[row.key] - before[row.key]) * row.scale:+{row.form}}"

    cells = [("held-out", "before", "after", "change")]
    cells += [(row.label, cell(before, row), cell(after, row), change(row)) for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    lines = [
        "  ".join([line[0].ljust(widths[0]), *(text.rjust(w) for text, w in zip(line[1:], widths[1:], strict=True))])
        for line in cells
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
