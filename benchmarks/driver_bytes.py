"""Bytes that pass through the driver in one step, for short responses and for ones ten times as long.

Runs the loop's ``one_step`` and the rollout dump on a local Ray cluster with real stages: same prompts, same weights, same
seeds, once with responses of --tokens tokens and once with ten times as many (only a token that the model hardly ever draws
ends a response, so nearly all of them are that long). In the driver, every argument of a remote call and every result that it
fetches is pickled once more and measured; references to stored objects count with their own size, each time they occur. The
arrays behind the references are then fetched, outside the count, and their bytes are shown beside.

The probe of the weight sync does pass through the driver: weight_sync.probe_sequences sequences of at most PROBE_TOKENS tokens
(weight_sync.pool), whatever the length of the responses. Below that bound it grows with them, so it is counted apart from the
rest as well.

    python -m benchmarks.driver_bytes [--tokens 20 --max-ratio 1.05 --override rollout.group_size=4]

Prints a table and one JSON line. Exits 1 if the total for the long responses is more than --max-ratio times that for the
short ones.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import io
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks.in_process import Running, running

if TYPE_CHECKING:
    from akl_dist.contract.records import JudgedGroup, Prompt, RolloutGroup, TrainingGroup
    from akl_dist.loop import Progress

DEADLINE_S = 600
FACTOR = 10
PROMPT_TOKENS = 48
MIN_FILLED = 0.95
"""Mean response length at least, as a share of the limit."""
METHODS = {
    "rollout": ("begin_draw", "more_groups", "groups"),
    "verify": ("judge", "label"),
    "reference": ("score",),
    "critic": ("appraise",),
    "learner": ("update", "entropies"),
    "cokl": ("take",),
    "weight_sync": ("sync_manifest", "parameter_manifest", "begin_update", "gather_bucket", "load_bucket", "finish_update",
                    "confirm_update"),
    "weight_sync probe": ("probe_sequences", "probe_logprobs", "prompt_logprobs"),
    "dump": ("write",),
}
"""Remote methods of a step by stage, the probe of the weight sync apart from the rest of it; others count as "other"."""
STAGE_OF = {method: stage for stage, methods in METHODS.items() for method in methods}


@dataclass
class Traffic:
    """Bytes by remote method."""

    sent: collections.Counter[str] = field(default_factory=collections.Counter)
    received: collections.Counter[str] = field(default_factory=collections.Counter)

    @property
    def by_method(self) -> dict[str, int]:
        return {name: self.sent[name] + self.received[name] for name in sorted({*self.sent, *self.received})}

    def by_stage(self) -> dict[str, int]:
        out: collections.Counter[str] = collections.Counter()
        for name, size in self.by_method.items():
            out[STAGE_OF.get(name, "other")] += size
        return dict(out)

    @property
    def total(self) -> int:
        return sum(self.by_method.values())


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20, help="length of the short responses; the long ones: ten times")
    parser.add_argument("--max-ratio", type=float, default=1.05)
    parser.add_argument("--override", action="append", default=[], help="key=value of the configuration, over +exp=tiny")
    return parser.parse_args(argv)


# --- measuring ---------------------------------------------------------------------------------------------------


@contextmanager
def counted() -> Iterator[Traffic]:
    """Count what this process sends to actors and fetches with ``ray.get`` while inside."""
    import ray
    from ray.actor import ActorMethod

    traffic, method_of = Traffic(), {}
    send, get, put = ActorMethod.remote, ray.get, ray.put

    def remote(method: Any, *args: Any, **kwargs: Any) -> Any:
        name = method._method_name
        traffic.sent[name] += size_of((args, kwargs))
        ref = send(method, *args, **kwargs)
        method_of[ref] = name
        return ref

    def fetched(refs: Any, **options: Any) -> Any:
        value = get(refs, **options)
        traffic.received[method_of.get(refs, "other get") if isinstance(refs, ray.ObjectRef) else "other get"] += size_of(value)
        return value

    def stored(value: Any, **options: Any) -> Any:
        traffic.sent["put"] += size_of(value)
        return put(value, **options)

    with (mock.patch.object(ActorMethod, "remote", remote), mock.patch.object(ray, "get", fetched),
          mock.patch.object(ray, "put", stored)):
        yield traffic


def size_of(value: Any) -> int:
    """Pickled size in bytes. An object reference inside counts as the reference, each time it occurs: how many groups share one
    object of the store depends on their size, and a pickler would write their reference once."""
    import ray
    from ray import cloudpickle

    references: list[ray.ObjectRef] = []

    class Pickler(cloudpickle.Pickler):
        def persistent_id(self, obj: Any) -> tuple[()] | None:
            if not isinstance(obj, ray.ObjectRef):
                return None
            references.append(obj)
            return ()

    Pickler(buffer := io.BytesIO()).dump(value)
    return len(buffer.getvalue()) + sum(len(cloudpickle.dumps(ref)) for ref in references)


@dataclass(frozen=True)
class Fixed:
    """A prompt source that serves the same prompts again."""

    prompts: list[Prompt]

    def take(self, n: int) -> list[Prompt]:
        return self.prompts[:n]

    def state(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Silent:
    """A recorder that records nothing."""

    def step_done(self, progress: Progress, metrics: dict[str, float], groups: Sequence[TrainingGroup]) -> None: ...

    def evaluation_done(
        self, progress: Progress, rollouts: Sequence[RolloutGroup], judged: Sequence[JudgedGroup]
    ) -> None: ...


def one_measured_step(running_: Running, tokens: int, end_id: int, version: int) -> tuple[Traffic, dict[str, int]]:
    """Driver traffic of a step with responses of ``tokens`` tokens, and the bytes of the arrays it made."""
    from akl_dist.loop import Progress, one_step

    config = running_.config
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, max_response_tokens=tokens))
    run = running_.run(Silent(), config=config, end_ids=(end_id,), prompts=Fixed(running_.loaded.train))
    with counted() as traffic:
        _, _, groups = one_step(run, Progress(step=0, policy_version=version))
        dump = running_.assembly.dump
        assert dump is not None
        dump.write(tokens, groups)
        dump.flush()
    lengths = [n for group in groups for n in group.labelled.rollout.response_lengths]
    if sum(lengths) < MIN_FILLED * tokens * len(lengths):
        raise SystemExit(f"responses have {sum(lengths) / len(lengths):.1f} tokens on average, expected nearly {tokens}")
    return traffic, bulk_bytes(groups)


def bulk_bytes(groups: Sequence[TrainingGroup]) -> dict[str, int]:
    """Bytes of the arrays and texts behind the groups' handles, by record."""
    from akl_dist.cluster.gather import fetch_all

    out: collections.Counter[str] = collections.Counter()
    for group in groups:
        labelled = group.labelled
        handles = [labelled.rollout.arrays, labelled.judged.arrays, labelled.reference.arrays, labelled.roles]
        for record in fetch_all(handles, timeout_s=60, stage="benchmark", what="the arrays of a group"):
            out[type(record).__name__] += size_of(record)
    return dict(out)


def unlikely_token(folder: Path, end_ids: Sequence[int]) -> int:
    """The highest id of the vocabulary that ends nothing: the embedded model was never shown one of its spare tokens."""
    size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    return next(token for token in range(size - 1, -1, -1) if token not in end_ids)


def measure(options: argparse.Namespace, folder: Path) -> dict[int, tuple[Traffic, dict[str, int]]]:
    from akl_dist.data.hub import model_folder
    from akl_dist.loop import Progress, first_sync

    long = options.tokens * FACTOR
    overrides = ["+exp=tiny", "steps=1", "learner.lr=0", "journal.dump_rollouts=true", f"rollout.max_response_tokens={long}",
                 f"data.max_prompt_tokens={PROMPT_TOKENS}", *options.override]
    with running(overrides, folder, say=_say) as run:
        end_id = unlikely_token(Path(model_folder(run.config.model.path)), run.assembly.end_ids)
        first_sync(run.run(Silent()), Progress())
        results = {}
        for version, tokens in enumerate((options.tokens, long)):
            results[tokens] = one_measured_step(run, tokens, end_id, version)
            _say(f"{tokens} tokens: {results[tokens][0].total} bytes through the driver")
    return results


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


# --- reporting ---------------------------------------------------------------------------------------------------


def _ratio(short: int, long: int) -> float:
    if short:
        return long / short
    return float("inf") if long else 1.0


def summarise(results: Mapping[int, tuple[Traffic, Mapping[str, int]]]) -> dict[str, Any]:
    (short_tokens, (short, short_bulk)), (long_tokens, (long, long_bulk)) = sorted(results.items())
    probe = "weight_sync probe"
    rest = [sum(size for name, size in traffic.by_stage().items() if name != probe) for traffic in (short, long)]
    return {
        "tokens": [short_tokens, long_tokens], "driver_bytes": [short.total, long.total], "ratio": _ratio(short.total, long.total),
        "ratio_without_probe": _ratio(*rest),
        "sent_bytes": [sum(short.sent.values()), sum(long.sent.values())],
        "received_bytes": [sum(short.received.values()), sum(long.received.values())],
        "bulk_bytes": [sum(short_bulk.values()), sum(long_bulk.values())],
        "bulk_ratio": _ratio(sum(short_bulk.values()), sum(long_bulk.values())),
        "by_stage": {name: [short.by_stage().get(name, 0), long.by_stage().get(name, 0)]
                     for name in {**short.by_stage(), **long.by_stage()}},
        "bulk_by_record": {name: [short_bulk.get(name, 0), long_bulk.get(name, 0)] for name in {**short_bulk, **long_bulk}},
    }


def table(summary: Mapping[str, Any]) -> str:
    short, long = summary["tokens"]
    lines = [f"{'bytes':<22}{f'{short} tokens':>14}{f'{long} tokens':>14}{'ratio':>9}"]

    def row(name: str, pair: Sequence[int]) -> str:
        return f"{name:<22}{pair[0]:>14,}{pair[1]:>14,}{_ratio(*pair):>9.3f}"

    lines += [row(name, pair) for name, pair in summary["by_stage"].items()]
    lines += [row("through the driver", summary["driver_bytes"]), row("  sent", summary["sent_bytes"]),
              row("  received", summary["received_bytes"])]
    lines += [row(name, pair) for name, pair in summary["bulk_by_record"].items()]
    lines.append(row("actor to actor", summary["bulk_bytes"]))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    with tempfile.TemporaryDirectory(prefix="akl_bytes_") as folder, redirect_stdout(sys.stderr):
        summary = summarise(measure(options, Path(folder)))
    print(table(summary))
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in summary.items()}
    print(json.dumps({"benchmark": "driver_bytes", **rounded, "max_ratio": options.max_ratio, "overrides": options.override}))
    if summary["ratio"] > options.max_ratio:
        print(f"ratio {summary['ratio']:.3f} is above {options.max_ratio}", file=sys.stderr)
    return int(summary["ratio"] > options.max_ratio)


if __name__ == "__main__":
    sys.exit(main())
