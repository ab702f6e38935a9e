"""Weight sync on Ray: one transaction that moves the learner's weights to every engine and proves that they arrived."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from akl_dist.cluster.gather import gather
from akl_dist.contract.errors import WeightSyncError
from akl_dist.contract.records import ParameterInfo, Prompt, RolloutArrays, RolloutGroup, SyncReport
from akl_dist.weight_sync.plan import (
    GapStatistics,
    check_gap,
    check_manifest,
    gap_statistics,
    parameter_bytes,
    plan_buckets,
)

STAGE = "weight_sync"
PROBE_TOKENS = 64
"""Longest probe sequence; with it the bytes of a probe do not grow with the responses."""


class WeightSyncPool:
    """Manifest check, transfer bucket by bucket, cache drop, probe, version: in this order, or an error.

    Consumes: full parameters gathered by the learner ranks. Produces: engines at a new policy version. Waits for
    learner ranks and engines, within one deadline for the whole sync. The driver moves references only; weights go
    from the learner rank's object store to the engines. The gather of bucket i + 1 overlaps the load of bucket i, so
    at most two buckets are alive. After an error the engines refuse to sample: the run ends, a resume makes them anew.

    Args:
        learner_ranks: actor name -> handle, rank 0 first. They answer ``sync_manifest()``, ``gather_bucket(names)``
            (a list with the bucket's reference on rank 0, None elsewhere) and ``probe_logprobs(token_ids)`` (on rank 0
            the log-probs at temperature 1 of tokens 1 .. n-1 of each sequence, float32 [n - 1]).
        engines: actor name -> handle of a :class:`~akl_dist.rollout.pool.RolloutActor`.
        bucket_bytes: size of a bucket; the object store must hold two.
        mean_gap, max_gap: bounds on the probe's log-prob gap in nats; max_gap None = no bound on the largest.
        timeout_s: limit of one sync.
    """

    def __init__(
        self,
        *,
        learner_ranks: Mapping[str, Any],
        engines: Mapping[str, Any],
        bucket_bytes: int,
        mean_gap: float,
        max_gap: float | None,
        timeout_s: float,
    ) -> None:
        assert learner_ranks and engines, "a weight sync needs learner ranks and engines"
        self._ranks, self._engines = dict(learner_ranks), dict(engines)
        self._rank0 = next(iter(self._ranks))
        self._bucket_bytes, self._mean_gap, self._max_gap = bucket_bytes, mean_gap, max_gap
        self._timeout_s = timeout_s
        self._deadline = 0.0
        self._manifest: list[ParameterInfo] = []

    def sync(self, policy_version: int, probe: Sequence[RolloutGroup]) -> SyncReport:
        """Transfer, verify on the first response of each group of ``probe``, and set the engines' policy version.

        Raises:
            WeightSyncError: manifests differ, a transfer failed, or a gap is not finite or above its bound.
            ActorDied, DeadlineExceeded: naming whom the sync waited for.
        """
        start = time.perf_counter()
        self._deadline = time.monotonic() + self._timeout_s
        manifest = self._checked_manifest()
        buckets = plan_buckets(manifest, self._bucket_bytes)
        # Calls of one actor run in the order issued, so those that need no answer of another are issued together.
        building = self._build_probe(probe)
        beginning = {name: engine.begin_update.remote(manifest) for name, engine in self._engines.items()}
        gathering = self._gather_bucket(buckets[0])
        sequences = self._probe_sequences(building)
        self._wait(beginning, "beginning a weight update")
        scoring = {name: rank.probe_logprobs.remote(sequences) for name, rank in self._ranks.items()}
        self._transfer(buckets, gathering)
        gap = self._verify(scoring, sequences)
        self._on_engines(lambda engine: engine.confirm_update.remote(policy_version), "confirming a weight update")
        return SyncReport(
            policy_version=policy_version,
            seconds=time.perf_counter() - start,
            bytes=sum(parameter_bytes(parameter) for parameter in manifest),
            buckets=len(buckets),
            gap_mean=gap.mean,
            gap_p99=gap.p99,
            gap_max=gap.max,
        )

    def _checked_manifest(self) -> list[ParameterInfo]:
        """The learner's parameters, compared with every engine's on the first sync (neither changes afterwards)."""
        if self._manifest:
            return self._manifest
        refs = {self._rank0: self._ranks[self._rank0].sync_manifest.remote()}
        manifest = self._wait(refs, "listing parameters")[self._rank0]
        expected = self._on_engines(lambda engine: engine.parameter_manifest.remote(), "listing parameters")
        for engine, parameters in expected.items():
            check_manifest(manifest, parameters, engine=engine)
        self._manifest = manifest
        return manifest

    def _transfer(self, buckets: Sequence[Sequence[ParameterInfo]], gathering: dict[str, Any]) -> None:
        """Load every bucket, ``gathering`` being the first one's gather, and finish the engines' session."""
        loading: dict[str, Any] = {}
        for index in range(len(buckets)):
            payload = self._wait(gathering, f"gathering bucket {index + 1} of {len(buckets)}")[self._rank0]
            self._wait(loading, f"loading bucket {index} of {len(buckets)}")
            reference = payload[0]  # in a list, so that the driver gets the reference and not the weights
            loading = {name: engine.load_bucket.remote(reference) for name, engine in self._engines.items()}
            gathering = self._gather_bucket(buckets[index + 1]) if index + 1 < len(buckets) else {}
        finishing = {name: engine.finish_update.remote() for name, engine in self._engines.items()}
        self._wait(loading, f"loading bucket {len(buckets)} of {len(buckets)}")
        self._wait(finishing, "finishing a weight update")

    def _gather_bucket(self, bucket: Sequence[ParameterInfo]) -> dict[str, Any]:
        names = [parameter.name for parameter in bucket]
        return {name: rank.gather_bucket.remote(names) for name, rank in self._ranks.items()}

    def _verify(self, scoring: Mapping[str, Any], sequences: list[list[int]]) -> GapStatistics:
        """Worst of the engines' gaps to the learner's scores, which are under way since before the transfer."""
        refs = {**scoring, **{name: engine.prompt_logprobs.remote(sequences) for name, engine in self._engines.items()}}
        scores: dict[str, list[np.ndarray]] = self._wait(refs, "scoring the probe")
        gaps = {name: gap_statistics(scores[self._rank0], scores[name]) for name in self._engines}
        for name, gap in gaps.items():
            check_gap(gap, mean_bound=self._mean_gap, max_bound=self._max_gap, engine=name)
        return GapStatistics(*(max(values) for values in zip(*gaps.values(), strict=True)))

    def _build_probe(self, probe: Sequence[RolloutGroup]) -> dict[str, Any]:
        """Have an engine build the token ids to score from the arrays behind the handles."""
        name = next(iter(self._engines))
        return {name: self._engines[name].probe_sequences.remote(list(probe), PROBE_TOKENS)}

    def _probe_sequences(self, building: Mapping[str, Any]) -> list[list[int]]:
        """The token ids of :meth:`_build_probe`: a bounded number passes through here."""
        (sequences,) = self._wait(building, "building the probe").values()
        if not sequences:
            raise WeightSyncError(
                "probe",
                got="no sequence of two tokens or more",
                expected="at least one",
                stage=STAGE,
                remedy="Set weight_sync.probe_sequences to 1 or more.",
            )
        return sequences

    def _on_engines(self, call: Callable[[Any], Any], doing: str) -> dict[str, Any]:
        return self._wait({name: call(engine) for name, engine in self._engines.items()}, doing)

    def _wait(self, refs: Mapping[str, Any], doing: str) -> dict[str, Any]:
        return gather(refs, timeout_s=self._left(), stage=STAGE, doing=doing)

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())


def prompt_probe(prompts: Sequence[Prompt], *, policy_version: int) -> list[RolloutGroup]:
    """A probe for when nothing has been sampled yet (after a resume): the prompts themselves are scored."""
    return [
        RolloutGroup(
            prompt=prompt,
            response_lengths=(1,),
            finish_reasons=("length",),
            policy_version=policy_version,
            engine="",
            arrays=RolloutArrays(np.asarray(prompt.token_ids[-1:], dtype=np.int32), np.zeros(1, dtype=np.float32)),
        )
        for prompt in prompts
    ]
