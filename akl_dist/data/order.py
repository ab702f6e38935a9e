"""The resumable order in which one data set's prompts are trained on: a pure function of (seed, epoch, position)."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Mapping, Sequence
from typing import Any

from akl_dist.contract.errors import DataError, ResumeMismatch
from akl_dist.contract.records import Prompt


def digest(*parts: object) -> bytes:
    """SHA-256 over the texts of ``parts``: the same on every machine and in every release."""
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
            b"".join(digest(p.prompt_id, p.token_ids, p.gold) for _, p in sorted(self._prompts.items()))
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
        return sorted(self._prompts, key=lambda prompt_id: digest("order", self.seed, epoch, prompt_id))

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
        """Continue where ``state`` was taken. Raises ResumeMismatch when the prompts are others than then."""
        if len(prompts) != state["num_prompts"]:
            source = None
        else:
            source = cls(prompts, seed=state["seed"], epoch=state["epoch"], position=state["position"])
        if source is None or source.fingerprint != state["fingerprint"]:
            raise ResumeMismatch(
                "training prompts", got=f"{len(prompts)} prompts that differ from the checkpoint's", stage="data",
                expected=f"the checkpoint's {state['num_prompts']} prompts (ids, token ids and golds)",
                remedy="Resume with the same data and tokenizer, or start anew with resume=never.",
            )
        source.skipped = state["skipped"]
        return source
