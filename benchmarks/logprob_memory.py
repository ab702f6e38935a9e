"""Peak memory of token log-probabilities, forward and backward: whole logits against the chunked head.

Each way runs in a process of its own; its peak is the high-water mark of resident memory minus what was resident
once the inputs existed. Prints one JSON line with both peaks (bytes), their ratio and the times (seconds).

    python -m benchmarks.logprob_memory [--vocabulary 49152 --tokens 4096 --hidden 576 --chunk-tokens 256]

The whole-logits way is the leanest one in use (log_softmax and gather in float32, no entropy), so that the ratio does
not profit from work that only a careless version would do; the chunked way computes the entropy as well. Exits 1 if
the ratio is above --max-ratio.

On glibc keep chunk_tokens * vocabulary * 4 bytes above 32 MiB, or set MALLOC_MMAP_THRESHOLD_=1048576: blocks below the
allocator's threshold stay resident after they are freed, which is what resident memory would then show.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

WAYS = ("naive", "chunked")
DEADLINE_S = 600


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--max-ratio", type=float, default=0.25)
    parser.add_argument("--way", choices=WAYS, help="measure one way in this process (used by the benchmark itself)")
    return parser.parse_args()


def high_water_bytes() -> int:
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measure(way: str, *, vocabulary: int, tokens: int, hidden: int, chunk_tokens: int) -> dict[str, float]:
    """One forward and backward pass; memory of the weights' and inputs' gradients is part of both ways' peak."""
    import psutil
    import torch

    from akl_dist.objective import chunked_token_statistics

    torch.manual_seed(0)
    head = torch.nn.Linear(hidden, vocabulary, bias=False)
    states = torch.randn(tokens, hidden).requires_grad_(True)
    targets = torch.randint(vocabulary, (tokens,))
    resident = psutil.Process().memory_info().rss
    before_high_water = high_water_bytes()
    start = time.perf_counter()
    if way == "naive":
        logp = torch.log_softmax(head(states).float(), dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    else:
        logp = chunked_token_statistics(states, head.weight, None, targets, chunk_tokens=chunk_tokens, temperature=1.0).logp
    logp.mean().backward()
    seconds = time.perf_counter() - start
    peak = high_water_bytes()
    if peak <= before_high_water:
        raise SystemExit("the pass stayed below the start-up's high-water mark: raise --tokens or --vocabulary")
    return {"peak_bytes": peak - resident, "seconds": seconds, "logp_mean": logp.detach().double().mean().item()}


def main() -> int:
    options = arguments()
    sizes = {key: getattr(options, key) for key in ("vocabulary", "tokens", "hidden", "chunk_tokens")}
    if options.way:
        print(json.dumps(measure(options.way, **sizes)))
        return 0
    results = {}
    for way in WAYS:
        command = [sys.executable, __file__, "--way", way]
        for key, value in sizes.items():
            command += [f"--{key.replace('_', '-')}", str(value)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S)
        results[way] = json.loads(done.stdout.splitlines()[-1])
    ratio = results["chunked"]["peak_bytes"] / results["naive"]["peak_bytes"]
    for way, one in results.items():
        print(f"{way:<9}{one['peak_bytes'] / 2**20:>8.0f} MiB at the peak{one['seconds']:>9.1f} s")
    print(
        json.dumps(
            {
                "benchmark": "logprob_memory",
                **sizes,
                "naive_peak_bytes": results["naive"]["peak_bytes"],
                "chunked_peak_bytes": results["chunked"]["peak_bytes"],
                "ratio": round(ratio, 4),
                "max_ratio": options.max_ratio,
                "naive_s": round(results["naive"]["seconds"], 3),
                "chunked_s": round(results["chunked"]["seconds"], 3),
                "logp_mean_difference": abs(results["naive"]["logp_mean"] - results["chunked"]["logp_mean"]),
            }
        )
    )
    if ratio > options.max_ratio:
        print(f"peak ratio {ratio:.3f} is above {options.max_ratio}: lower --chunk-tokens", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
