"""What the learner's tests share: a tiny random model, random samples, and a program that runs ranks as real processes.

Run as ``python learner_world.py SCENARIO RANK WORLD_SIZE FOLDER SHARED``; rank 0 publishes its port as a file in FOLDER.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from akl_dist.config.schema import KLConfig, LearnerConfig, ObjectiveConfig
from akl_dist.learner.batch import Sample
from akl_dist.objective import topk_reference
from akl_dist.zero3.planning import GroupLengths, plan_updates

VOCAB, HIDDEN, DEADLINE_S = 24, 32, 150.0
LEARNER = LearnerConfig(lr=1e-2, warmup_steps=2, max_tokens_per_micro_batch=64, logprob_chunk_tokens=7, max_grad_norm=1.0)
OBJECTIVE = ObjectiveConfig(
    entropy_coef=0.01,
    kl=KLConfig(beta_reasoning=0.3, beta_answer=0.7, estimator="full"),
)
TOPK = dataclasses.replace(OBJECTIVE, kl=dataclasses.replace(OBJECTIVE.kl, estimator="topk"))
TEMPERATURE = 0.8


def build_model(folder: Path, *, tied: bool = False) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=tied, initializer_range=0.3,
    )
    Qwen2ForCausalLM(config).float().save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def reference_rows(estimator: str, rng, ref_logp: np.ndarray, targets: np.ndarray) -> dict[str, np.ndarray]:
    """Random arrays of the reference; those of ``topk`` agree with ref_logp, which is replaced in place."""
    if estimator == "full":
        return {"hidden": rng.normal(size=(len(targets), HIDDEN)).astype(np.float32)}
    logprobs = torch.from_numpy(np.log(rng.dirichlet(np.ones(VOCAB), len(targets))).astype(np.float32))
    kept = topk_reference(logprobs, torch.from_numpy(targets.astype(np.int64)), k=5, temperature=1.0)
    ref_logp[:] = kept.target_logp.numpy()
    return {"topk_ids": kept.ids.numpy(), "topk_logp": kept.logp.numpy(), "topk_rest": kept.rest_logp.numpy()}


def make_samples(
    seed: int = 0, *, groups: int = 6, group_size: int = 3, estimator: str = "full"
) -> dict[tuple[int, int], Sample]:
    """Random samples; the last response of group 0 does not train and holds NaN everywhere a float can."""
    rng = np.random.default_rng(seed)
    samples = {}
    for g in range(groups):
        prompt = rng.integers(0, VOCAB, int(rng.integers(2, 7)))
        for s in range(group_size):
            n = int(rng.integers(1, 20))
            targets = rng.integers(0, VOCAB, n).astype(np.int32)
            trains = (g, s) != (0, group_size - 1)
            floats = [(-rng.random(n) * 3).astype(np.float32) if trains else np.full(n, np.nan, np.float32) for _ in range(2)]
            rows = reference_rows(estimator, rng, floats[1], targets)
            samples[g, s] = Sample(
                prompt, targets, floats[0], floats[1], rows, rng.random(n) < 0.4,
                float(rng.normal()) if trains else float("nan"), trains)
    return samples


def lengths(samples: dict[tuple[int, int], Sample]) -> list[GroupLengths]:
    out = []
    for g in range(1 + max(g for g, _ in samples)):
        members = [samples[key] for key in sorted(samples) if key[0] == g]
        out.append(GroupLengths(len(members[0].prompt_ids), tuple(len(m.response_ids) for m in members),
                                tuple(int(m.answer_mask.sum()) for m in members), tuple(m.trains for m in members)))
    return out


def plans_for(samples, *, rank: int, world_size: int, max_tokens: int = 64, updates: int = 1):
    plans = plan_updates(lengths(samples), num_ranks=world_size, updates_per_step=updates, max_tokens_per_micro_batch=max_tokens)
    return [plan.for_rank(rank) for plan in plans]


def make_worker(folder: Path, rank: int, world_size: int, port: int, *, model: str = "model", gradient_checkpointing=False):
    from akl_dist.learner.worker import LearnerWorker
    from akl_dist.zero3.rank import listen

    store = None
    if rank == 0:
        store = listen("127.0.0.1")
        port = store.port
        (folder / "port.tmp").write_text(str(port))
        (folder / "port.tmp").rename(folder / "port")
    return LearnerWorker(
        model_path=str(folder / model), dtype="float32", attention="sdpa", rank=rank, world_size=world_size,
        master_addr="127.0.0.1", master_port=port, device="cpu", num_threads=1,
        learner=dataclasses.replace(LEARNER, gradient_checkpointing=gradient_checkpointing), objective=OBJECTIVE, seed=0,
        temperature=TEMPERATURE, timeout_s=60.0, failures=folder / "failures", store=store,
    )


# --- scenarios, run by every rank -----------------------------------------------------------------------------------


def full_gradients(worker) -> dict[str, torch.Tensor]:
    from deepspeed.utils import safe_get_full_grad

    return {name: safe_get_full_grad(p).clone() for name, p in worker.model.named_parameters()}


def gradients_of(worker, samples, **plan) -> dict[str, torch.Tensor]:
    plans = plans_for(samples, rank=worker.rank, world_size=worker.world_size, **plan)
    old = [None] * len(plans[0].micro_batches)
    worker.accumulate_gradients(samples, plans[0], old_logp=old, step=0)
    gradients = full_gradients(worker)
    worker.engine.optimizer.zero_grad()
    return gradients


def reordered(samples):
    """The same samples with the groups in reverse order."""
    top = max(g for g, _ in samples)
    return {(top - g, s): sample for (g, s), sample in samples.items()}


def scenario_gradients(worker, folder: Path) -> dict:
    samples = make_samples()
    return {
        "one_cut": gradients_of(worker, samples, max_tokens=4096),
        "many_cuts": gradients_of(worker, samples, max_tokens=26),
        "reordered": gradients_of(worker, reordered(samples), max_tokens=40),
        "again": gradients_of(worker, samples, max_tokens=4096),
    }


def topk_gradients(worker, **plan) -> dict[str, torch.Tensor]:
    before, worker.objective = worker.objective, TOPK
    gradients = gradients_of(worker, make_samples(estimator="topk"), **plan)
    worker.objective = before
    return gradients


def scenario_training(worker, folder: Path) -> dict:
    """Sharding, probe, failure, fully masked update, six steps with a save after three, export."""
    from akl_dist.contract.errors import NonFiniteLoss

    out: dict = {"gradients": scenario_gradients(worker, folder)}
    out["topk"] = topk_gradients(worker, max_tokens=26)
    out["numel"] = {name: p.numel() for name, p in worker.model.named_parameters()}
    out["shard"] = {name: p.ds_tensor.numel() for name, p in worker.model.named_parameters()}
    out["probe"] = worker.probe_logprobs([list(range(9)), [3], list(range(5, 24))])
    out["bucket"] = worker.gather_bucket(["model.norm.weight", "lm_head.weight"])
    samples = make_samples()
    everything = {key: dataclasses.replace(sample, trains=True) for key, sample in samples.items() if key[0] != 1}
    everything = {(g - (g > 1), s): sample for (g, s), sample in everything.items()}  # five groups: ranks with unequal parts
    (plan,) = plans_for(everything, rank=worker.rank, world_size=worker.world_size, max_tokens=30)
    out["entropies"] = worker.entropies({key: (s.prompt_ids, s.response_ids) for key, s in everything.items()}, plan)
    before = worker.parameters_checksum()

    def attempt(batch, step: int) -> str:
        try:
            worker.update(batch, plans_for(batch, rank=worker.rank, world_size=worker.world_size, max_tokens=30), step=step)
        except NonFiniteLoss as error:
            return str(error)
        return "no error"

    out["bad_loss"] = attempt(poisoned(samples), 7)
    out["unchanged"] = worker.parameters_checksum() == before
    hook = worker.model.lm_head.weight.register_hook(lambda gradient: gradient * float("inf"))
    out["bad_gradient"] = attempt(samples, 8)
    hook.remove()
    out["unchanged"] = out["unchanged"] and worker.parameters_checksum() == before
    out["gradient_after_failure"] = gradients_of(worker, samples, max_tokens=4096)
    silent = {key: dataclasses.replace(sample, trains=False) for key, sample in samples.items()}
    masked = worker.update(silent, plans_for(silent, rank=worker.rank, world_size=worker.world_size), step=0)
    out["masked"] = (masked.optimizer_steps, masked.skipped_steps, masked.metrics)
    out["unchanged"] = out["unchanged"] and worker.parameters_checksum() == before
    out["metrics"] = train(worker, range(3))
    out["changed"] = worker.parameters_checksum() != before
    (folder / "checkpoint").mkdir(exist_ok=True)
    worker.save(folder / "checkpoint")
    train(worker, range(3, 6))
    out["after_six"] = worker.parameters_checksum()
    out["frozen_head"], out["manifest"] = worker._frozen_head, [info.name for info in worker.manifest()]
    worker.export(folder / "export")
    out["probe_six"] = worker.probe_logprobs([list(range(9))])
    out["steps"] = worker.optimizer_steps
    return out


def poisoned(samples):
    """One sample, on one rank, whose advantage is infinite."""
    return samples | {(4, 1): dataclasses.replace(samples[4, 1], advantage=float("inf"))}


def train(worker, steps) -> list:
    metrics = []
    for step in steps:
        samples = make_samples(100 + step)
        plans = plans_for(samples, rank=worker.rank, world_size=worker.world_size, max_tokens=40, updates=1 + step % 2)
        metrics.append(worker.update(samples, plans, step=step))
    return metrics


def scenario_resume(worker, folder: Path) -> dict:
    from akl_dist.contract.errors import CheckpointError

    fresh = worker.parameters_checksum()
    worker.load(folder / "checkpoint")
    loaded = worker.parameters_checksum()
    train(worker, range(3, 6))
    out = {"loaded_differs": fresh != loaded, "after_six": worker.parameters_checksum(), "steps": worker.optimizer_steps}
    worker.world_size += 1
    try:
        worker.load(folder / "checkpoint")
    except CheckpointError as error:
        out["other_topology"] = str(error)
    worker.world_size -= 1
    return out


def scenario_tied(worker, folder: Path) -> dict:
    from akl_dist.zero3.gathering import buckets

    out = {"gradients": gradients_of(worker, make_samples(), max_tokens=4096), "manifest": worker.manifest()}
    out["topk"] = topk_gradients(worker, max_tokens=4096)
    train(worker, range(1))
    worker.export(folder / "export_tied")
    bucket = worker.gather_bucket([info.name for info in worker.manifest()])
    out["bucket"] = bucket
    out["num_buckets"] = len(buckets(worker.manifest(), 8000))
    out["probe"] = worker.probe_logprobs([list(range(9))])
    return out


# --- launching ------------------------------------------------------------------------------------------------------


def start(scenario: str, world_size: int, folder: Path, shared: Path, program: str = __file__) -> list[subprocess.Popen]:
    """All ranks of one scenario; ``folder`` takes ports and results, ``shared`` holds models and checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    root = Path(__file__).resolve().parents[2]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), "DS_ACCELERATOR": "cpu"}
    return [subprocess.Popen(
        [sys.executable, program, scenario, str(rank), str(world_size), str(folder), str(shared)], env=env,
        stdout=(folder / f"rank_{rank}.log").open("w"), stderr=subprocess.STDOUT) for rank in range(world_size)]


def finish(processes: list[subprocess.Popen], folder: Path) -> list[dict]:
    """Results of all ranks in rank order; a rank that fails or hangs fails the test with its log."""
    deadline = time.monotonic() + DEADLINE_S
    try:
        while any(process.poll() is None for process in processes):
            failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
            if failed or time.monotonic() > deadline:
                time.sleep(1.0)  # let the others write what they saw
                break
            time.sleep(0.05)
        codes = [process.poll() for process in processes]
        logs = "\n".join((folder / f"rank_{rank}.log").read_text()[-3000:] for rank in range(len(processes)))
        assert codes == [0] * len(processes), f"exit codes {codes} (None: hung):\n{logs}"
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return [torch.load(folder / f"result_{rank}.pt", weights_only=False) for rank in range(len(processes))]


def main() -> None:
    scenario, rank, world_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    folder, shared = Path(sys.argv[4]), Path(sys.argv[5])
    port, deadline = 0, time.monotonic() + 60
    while rank and not port:
        assert time.monotonic() < deadline, "rank 0 published no port"
        port = int((folder / "port").read_text()) if (folder / "port").is_file() else time.sleep(0.1) or 0
    for name in ("model", "tied", "checkpoint"):
        if (shared / name).exists() and not (folder / name).exists() and rank == 0:
            (folder / name).symlink_to(shared / name)
    while rank and not (folder / "model").exists():
        time.sleep(0.1)
    model = "tied" if scenario == "tied" else "model"
    checkpointing = scenario == "gradients"  # so that the comparison with plain torch covers it too
    worker = make_worker(folder, rank, world_size, port, model=model, gradient_checkpointing=checkpointing)
    started = time.monotonic()
    result = globals()[f"scenario_{scenario}"](worker, folder)
    print(json.dumps({"scenario_s": round(time.monotonic() - started, 2)}))
    torch.save(result, folder / f"result_{rank}.pt")
    worker.close()
    sys.stdout.flush()
    os._exit(0)  # the result is on disk; at interpreter exit a thread of gloo that is still joining aborts now and then


if __name__ == "__main__":
    main()
