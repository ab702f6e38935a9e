"""Judges of rows ``{prompt_style, completion, tests}`` for tools, with the trainer's own code verifier in killable graders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from akl_dist.contract.records import Status, Verdict
from akl_dist.verify.code import CodeSettings, gold_text, pool_options
from akl_dist.verify.grader import GraderPool, Item


class CodeJudges:
    """Verdicts of rows, in order. Owns its graders: call :meth:`close`.

    Raises:
        VerifierFault: the graders do not start, for one because this machine allows no isolation and ``allow_unsandboxed`` is off.
    """

    def __init__(self, *, workers: int, allow_unsandboxed: bool = False, settings: CodeSettings | None = None) -> None:
        settings = settings or CodeSettings(allow_unsandboxed=allow_unsandboxed)
        self._pool = GraderPool(num_workers=workers, **pool_options(settings))
        self.isolation = self._pool.isolation

    def judge(self, rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
        """One verdict per row; a row without the three columns is ``error``."""
        items = [_item(row) for row in rows]
        verdicts = iter(self._pool.judge_many([item for item in items if isinstance(item, Item)]))
        return [next(verdicts) if isinstance(item, Item) else Verdict(Status.ERROR, reason=item) for item in items]

    def close(self) -> None:
        self._pool.close()


def _item(row: Mapping[str, Any]) -> Item | str:
    """What a grader is sent, or why the row cannot be judged."""
    for name, kind in (("prompt_style", str), ("completion", str), ("tests", dict)):
        if not isinstance(row.get(name), kind):
            got = type(row[name]).__name__ if name in row else "missing"
            return f"malformed row: {name} is {got}, expected {'text' if kind is str else 'an object'}"
    flags = [row.get(name, False) for name in ("truncated", "think_open")]
    if not all(isinstance(flag, bool) for flag in flags):
        return "malformed row: truncated or think_open is not true or false"
    return Item(gold_text(row["prompt_style"], row["tests"]), row["completion"], *flags)
