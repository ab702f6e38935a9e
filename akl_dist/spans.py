"""Wall-clock spans of one step, by stage word."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Spans:
    """Measures from its creation; ``metrics()`` gives ``time/step_s``, ``time/<stage>_s`` and ``time/idle_fraction``.

    ``idle_fraction`` is the share of the step in which no stage was at work (the driver's own time between stages).
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begin = time.perf_counter()

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - begin

    def metrics(self) -> dict[str, float]:
        total = time.perf_counter() - self._begin
        out = {f"time/{stage}_s": seconds for stage, seconds in self.seconds.items()}
        out["time/step_s"] = total
        out["time/idle_fraction"] = max(0.0, 1.0 - sum(self.seconds.values()) / total) if total > 0 else 0.0
        return out
