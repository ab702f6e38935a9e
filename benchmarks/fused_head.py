"""Time and peak memory of log-probs, entropy and KL of sampled tokens, forward and backward: the fused head against whole
logits, and against computing the pieces one after another.

    python -m benchmarks.fused_head [--cases 49152x2048 151936x8192 --hidden 256 --chunk-tokens 256]

What is computed is logp, entropy and, by estimator, no divergence (`sampled`: its surrogate comes from logp alone), both
divergences over the reference's top 20 tokens (`topk`), or both over the vocabulary (`full`, reference logits included on every
side). Ways: *naive* holds whole logits and lets autograd differentiate the formulas; *separate* runs the chunked head once per
piece (logp, entropy, divergences); *fused* is what the learner calls; *norms* is the same with the gradient norms of the activity
metrics, which the learner asks for, too.

Every way runs in a process of its own, on one thread. Time is that process's CPU time, which other programs on the machine do not
add to. Memory is the high-water mark of resident memory minus what was resident once the inputs existed; the gradients of head and
hidden states are part of it. Whole logits are run where they are expected to take less than half of the memory that is free; their
peak grows linearly with the tokens, so elsewhere it is extrapolated from two small runs, and said to be.

Prints a table and one JSON line. Exits 1 if the fused head takes more than --max-ratio of the naive time in some case, or more than
1/8 of the naive memory at the largest vocabulary with 8,192 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

ESTIMATORS = ("sampled", "topk", "full")
WAYS = ("naive", "separate", "fused", "norms")
CASES = ("49152x2048", "49152x16384", "151936x2048", "151936x8192", "151936x16384")
EVERY_WAY = 2048  # largest number of tokens at which the separate pieces and the norms are run, too
ONE_ESTIMATOR = 16384  # smallest number of tokens at which only the default estimator is run
SMALL = (256, 512)  # tokens of the runs that the naive peak is extrapolated from
MEMORY_TOKENS, MAX_MEMORY_RATIO = 8192, 1 / 8
TOPK = 20
DEADLINE_S = 900


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES, help="VOCABULARYxTOKENS")
    parser.add_argument("--estimators", nargs="+", default=ESTIMATORS, choices=ESTIMATORS)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--max-ratio", type=float, default=1.6)
    parser.add_argument("--one", nargs=4, metavar=("WAY", "ESTIMATOR", "VOCABULARY", "TOKENS"), help="used by the benchmark itself")
    return parser.parse_args()


# --- one way in this process -------------------------------------------------------------------------------------


def high_water_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(way: str, estimator: str, vocabulary: int, tokens: int, hidden: int, chunk_tokens: int) -> dict[str, float]:
    """One forward and backward pass over every output; a small one before it loads what is loaded on first use."""
    import psutil
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    weight = (torch.randn(vocabulary, hidden) / hidden**0.5).requires_grad_(True)
    states = torch.randn(tokens, hidden).requires_grad_(True)
    targets = torch.randint(vocabulary, (tokens,))
    frozen = (states.detach() + 0.1 * torch.randn(tokens, hidden), weight.detach().clone())
    reference = reference_of(estimator, frozen, targets)
    small = min(8, tokens)
    compute(way, states[:small].detach().requires_grad_(True), weight.detach()[:64].requires_grad_(True), targets[:small] % 64,
            estimator if estimator == "sampled" else "none", None, chunk_tokens).backward()
    resident, before = psutil.Process().memory_info().rss, high_water_bytes()
    start = time.process_time()
    loss = compute(way, states, weight, targets, estimator, reference, chunk_tokens)
    loss.backward()
    seconds = time.process_time() - start
    peak = high_water_bytes()
    if peak <= before:
        raise SystemExit("the pass stayed below the start-up's high-water mark: raise the tokens or the vocabulary")
    assert states.grad is not None
    return {"seconds": seconds, "peak_bytes": peak - resident, "loss": float(loss.detach()),
            "gradient": float(states.grad.double().norm())}


def reference_of(estimator: str, frozen: tuple[Any, Any], targets: Any) -> Any:
    """The reference's side of the estimator; few rows at a time, since this must stay below what is measured after it."""
    from akl_dist.objective import HeadReference, topk_reference
    from akl_dist.objective.topk import cat_topk

    hidden, weight = frozen
    if estimator == "topk":
        return cat_topk([topk_reference(part @ weight.T, target, k=TOPK, temperature=1.0)
                         for part, target in zip(hidden.split(16), targets.split(16), strict=True)])
    return HeadReference(hidden, weight, None) if estimator == "full" else None


def whole_logits(logits: Any, targets: Any, reference: Any) -> Any:
    """The shortest way to write it: as few [tokens, vocabulary] tensors as autograd allows."""
    import torch

    from akl_dist.objective import HeadReference, TokenStatistics, token_statistics

    if reference is not None and not isinstance(reference, HeadReference):
        return token_statistics(logits, targets, temperature=1.0, topk=reference)
    logprobs = torch.log_softmax(logits, -1)
    del logits
    probs = logprobs.exp()
    logp, entropy = logprobs.gather(-1, targets[:, None]).squeeze(-1), -(probs * logprobs).sum(-1)
    if reference is None:
        return TokenStatistics(logp, entropy)
    with torch.no_grad():
        ref = torch.log_softmax(reference.hidden @ reference.weight.T, -1)
        ref_probs = ref.exp()
    difference = logprobs - ref
    return TokenStatistics(logp, entropy, -(ref_probs * difference).sum(-1), (probs * difference).sum(-1))


def compute(way: str, states: Any, weight: Any, targets: Any, estimator: str, reference: Any, chunk_tokens: int) -> Any:
    """Sum of the means of all outputs, so that every one has a gradient."""
    from akl_dist.objective import chunked_token_statistics

    def total(statistics: Any, names: tuple[str, ...]) -> Any:
        return sum(getattr(statistics, name).mean() for name in names)

    pieces = [("logp",), ("entropy",), *([("kl_forward", "kl_reverse")] if reference is not None else [])]
    every = tuple(name for piece in pieces for name in piece)
    if way == "naive":
        return total(whole_logits(states @ weight.T, targets, reference), every)

    def head(of: Any, norms: bool = False) -> Any:
        return chunked_token_statistics(states, weight, None, targets, chunk_tokens=chunk_tokens, temperature=1.0, reference=of,
                                        with_gradient_norms=norms)

    if way == "separate":
        return sum(total(head(reference if "kl_forward" in piece else None), piece) for piece in pieces)
    return total(head(reference, way == "norms"), every)


# --- all of them -------------------------------------------------------------------------------------------------


def run(way: str, estimator: str, vocabulary: int, tokens: int, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.fused_head", "--hidden", str(options.hidden), "--chunk-tokens",
               str(options.chunk_tokens), "--one", way, estimator, str(vocabulary), str(tokens)]
    # Freed blocks of a chunk's size go back to the system at once, so that resident memory is memory in use.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, env=env)
    return json.loads(done.stdout.splitlines()[-1])


def extrapolated(small: dict[int, float], tokens: int) -> float:
    """The line through two measured (tokens, bytes)."""
    (first, low), (second, high) = sorted(small.items())
    return low + (high - low) / (second - first) * (tokens - first)


def case(estimator: str, vocabulary: int, tokens: int, small: dict[int, float], options: argparse.Namespace) -> dict[str, Any]:
    """All ways of one case; naive_peak_bytes is extrapolated where there is no naive_s."""
    import psutil

    few = tokens <= EVERY_WAY and (estimator == "topk" or vocabulary < 100_000)
    ways = ["fused", "norms", "separate"] if few else ["fused"]
    expected = extrapolated(small, tokens)
    if expected < psutil.virtual_memory().available / 2:
        ways.append("naive")
    results = {way: run(way, estimator, vocabulary, tokens, options) for way in ways}
    fused, naive = results["fused"], results.get("naive")
    row: dict[str, Any] = {"estimator": estimator, "vocabulary": vocabulary, "tokens": tokens}
    row |= {f"{way}_s": round(one["seconds"], 2) for way, one in results.items()}
    row |= {f"{way}_peak_bytes": one["peak_bytes"] for way, one in results.items()}
    row.setdefault("naive_peak_bytes", expected)
    row["memory_ratio"] = fused["peak_bytes"] / row["naive_peak_bytes"]
    if naive is not None:
        row["time_ratio"] = fused["seconds"] / naive["seconds"]
        for name in ("loss", "gradient"):
            gap = abs(fused[name] - naive[name]) / (1e-6 + abs(naive[name]))
            assert gap < 1e-3, f"{row}: the {name} differs by {gap:.1e}: not the same computation"
    return row


def line(row: dict[str, Any]) -> str:
    def number(name: str, scale: float = 1.0, digits: int = 1) -> str:
        return f"{row[name] / scale:.{digits}f}" if name in row else "-"

    about = "" if "naive_s" in row else "~"
    return (f"{row['vocabulary']:>8}{row['tokens']:>7} {row['estimator']:<8}{number('naive_s'):>8}{number('separate_s'):>9}"
            f"{number('fused_s'):>8}{number('norms_s'):>8}{number('time_ratio', digits=2):>7}"
            f"{about + number('naive_peak_bytes', 2**20, 0):>10}{number('fused_peak_bytes', 2**20, 0):>8}"
            f"{number('memory_ratio', digits=3):>8}")


def main() -> int:
    options = arguments()
    if options.one:
        way, estimator, vocabulary, tokens = options.one
        print(json.dumps(measure(way, estimator, int(vocabulary), int(tokens), options.hidden, options.chunk_tokens)))
        return 0
    cases = [tuple(int(size) for size in text.split("x")) for text in options.cases]
    print(f"{'vocab':>8}{'tokens':>7} {'KL':<8}{'naive s':>8}{'separate':>9}{'fused':>8}{'norms':>8}{'ratio':>7}"
          f"{'naive MiB':>10}{'fused':>8}{'ratio':>8}", flush=True)
    rows = []
    for vocabulary in sorted({vocabulary for vocabulary, _ in cases}):
        for estimator in options.estimators:
            small = {tokens: run("naive", estimator, vocabulary, tokens, options)["peak_bytes"] for tokens in SMALL}
            for tokens in sorted(tokens for of, tokens in cases if of == vocabulary):
                if tokens >= ONE_ESTIMATOR and estimator != "topk":
                    continue
                rows.append(case(estimator, vocabulary, tokens, small, options))
                print(line(rows[-1]), flush=True)
    times = [row["time_ratio"] for row in rows if "time_ratio" in row]
    largest = max(row["vocabulary"] for row in rows)
    memory = [row["memory_ratio"] for row in rows if (row["vocabulary"], row["tokens"]) == (largest, MEMORY_TOKENS)]
    ratio, memory_ratio = max(times, default=None), max(memory, default=None)
    print(json.dumps({
        "benchmark": "fused_head", "hidden": options.hidden, "chunk_tokens": options.chunk_tokens, "topk": TOPK,
        "ratio": ratio, "max_ratio": options.max_ratio, "memory_ratio": memory_ratio, "max_memory_ratio": MAX_MEMORY_RATIO,
        "cases": rows}))
    missed = [name for name, value, limit in (("time", ratio, options.max_ratio), ("memory", memory_ratio, MAX_MEMORY_RATIO))
              if value is None or value > limit]
    if missed:
        print(f"missed or not measured: {' and '.join(missed)}", file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
