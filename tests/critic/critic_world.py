"""What the critic's tests share: random responses with rewards, and a program that runs ranks as real processes.

Run as ``python critic_world.py SCENARIO RANK WORLD_SIZE FOLDER SHARED``, like the learner's own (whose model and launching it
uses).
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "learner"))
import learner_world

from akl_dist.config.schema import LearnerConfig
from akl_dist.critic.batch import ValueSample
from akl_dist.zero3.planning import GroupLengths, plan_updates

LEARNER = LearnerConfig(lr=1e-2, max_tokens_per_micro_batch=64, max_grad_norm=1.0)
GAMMA, LAM, CLIP = 0.99, 0.9, 0.2


def make_samples(seed: int = 0, *, groups: int = 6, group_size: int = 3) -> dict[tuple[int, int], ValueSample]:
    """Random responses; the reward is whether token 0 occurs, which a value model can learn. (0, 2) has no verdict."""
    rng = np.random.default_rng(seed)
    samples = {}
    for g in range(groups):
        prompt = rng.integers(0, learner_world.VOCAB, int(rng.integers(2, 7)))
        for s in range(group_size):
            response = rng.integers(0, learner_world.VOCAB, int(rng.integers(1, 20))).astype(np.int32)
            if (g, s) != (0, group_size - 1):
                samples[g, s] = ValueSample(prompt, response, float((response == 0).any()))
    return samples


def plans_for(samples, *, rank: int, world_size: int, max_tokens: int = 64, updates: int = 1):
    lengths = []
    for g in range(1 + max(g for g, _ in samples)):
        members = {s: samples[group, s] for group, s in sorted(samples) if group == g}
        size = 1 + max(members)
        tokens = tuple(len(members[s].response_ids) if s in members else 1 for s in range(size))
        lengths.append(GroupLengths(len(next(iter(members.values())).prompt_ids), tokens, (0,) * size,
                                    tuple(s in members for s in range(size))))
    plans = plan_updates(lengths, num_ranks=world_size, updates_per_step=updates, max_tokens_per_micro_batch=max_tokens)
    return [plan.for_rank(rank) for plan in plans]


def make_worker(folder: Path, rank: int, world_size: int, port: int):
    from akl_dist.critic.worker import CriticWorker
    from akl_dist.zero3.rank import listen

    store = None
    if rank == 0:
        store = listen("127.0.0.1")
        port = store.port
        (folder / "port.tmp").write_text(str(port))
        (folder / "port.tmp").rename(folder / "port")
    return CriticWorker(
        model_path=str(folder / "model"), dtype="float32", attention="sdpa", rank=rank, world_size=world_size,
        master_addr="127.0.0.1", master_port=port, device="cpu", num_threads=1, learner=LEARNER, clip=CLIP, gamma=GAMMA, lam=LAM,
        seed=0, timeout_s=60.0, failures=folder / "failures", store=store)


# --- scenarios, run by every rank -----------------------------------------------------------------------------------


def set_head(worker) -> None:
    """A value head that is not zero, so that gradients reach the decoder; the same on every rank."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(worker.model.head.parameters()), modifier_rank=0):
        if worker.rank == 0:
            generator = torch.Generator().manual_seed(5)
            with torch.no_grad():
                for parameter in worker.model.head.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def gradients_of(worker, samples, **plan) -> dict[str, torch.Tensor]:
    """Gradient of the value loss at old values 0.1 above the current ones, so that clipping is at work in neither or one side."""
    from deepspeed.utils import safe_get_full_grad

    from akl_dist.critic.batch import Targets, pack

    (part,) = plans_for(samples, rank=worker.rank, world_size=worker.world_size, **plan)
    batches = [pack(keys, [samples[key] for key in keys]) for keys in part.micro_batches]
    (targets,) = worker._targets([batches])
    targets = [Targets(target.values + 0.3 * batch.mask, target.advantages, target.returns)
               for batch, target in zip(batches, targets, strict=True)]
    worker.accumulate_gradients(samples, part, batches, targets, step=0)
    gradients = {name: safe_get_full_grad(p).clone() for name, p in worker.model.named_parameters()}
    worker.engine.optimizer.zero_grad()
    return gradients


def appraise(worker, samples, step: int, **plan):
    return worker.appraise(samples, plans_for(samples, rank=worker.rank, world_size=worker.world_size, **plan), step=step)


def train(worker, steps) -> list:
    return [appraise(worker, make_samples(100 + step % 3), step, max_tokens=40, updates=1 + step % 2).metrics for step in steps]


def scenario_training(worker, folder: Path) -> dict:
    """First appraisal, failure, a step without verdicts, gradients, six steps with a save after three, many more steps."""
    from akl_dist.contract.errors import NonFiniteLoss

    out: dict = {"numel": {name: p.numel() for name, p in worker.model.named_parameters()}}
    samples, before = make_samples(), worker.parameters_checksum()
    try:
        appraise(worker, samples | {(4, 1): dataclasses.replace(samples[4, 1], reward=float("inf"))}, 7)
    except NonFiniteLoss as error:
        out["bad"] = (error.stage, str(error))
    silent = worker.appraise({}, plans_for_nothing(), step=0)
    out["silent"] = (silent.advantages, silent.metrics)
    out["unchanged"] = worker.parameters_checksum() == before
    out["first"] = appraise(worker, samples, 1, max_tokens=40)
    out["changed"] = worker.parameters_checksum() != before
    out["metrics"] = train(worker, range(3))
    (folder / "checkpoint").mkdir(exist_ok=True)
    worker.save(folder / "checkpoint")
    train(worker, range(3, 6))
    out["after_six"], out["steps"] = worker.parameters_checksum(), worker.optimizer_steps
    out["later"] = train(worker, range(6, 40))
    return out


def plans_for_nothing():
    from akl_dist.zero3.planning import RankUpdate, Totals

    return [RankUpdate(Totals(0, 0, 0), (), 0.0)]


def scenario_resume(worker, folder: Path) -> dict:
    from akl_dist.contract.errors import CheckpointError

    fresh = worker.parameters_checksum()
    worker.load(folder / "checkpoint")
    loaded = worker.parameters_checksum()
    train(worker, range(3, 6))
    out = {"loaded_differs": fresh != loaded, "after_six": worker.parameters_checksum(), "steps": worker.optimizer_steps}
    worker.role = "learner"
    try:
        worker.load(folder / "checkpoint")
    except CheckpointError as error:
        out["other_role"] = str(error)
    return out


def scenario_gradients(worker, folder: Path) -> dict:
    set_head(worker)
    samples = make_samples()
    return {"one_cut": gradients_of(worker, samples, max_tokens=4096), "many_cuts": gradients_of(worker, samples, max_tokens=26),
            "again": gradients_of(worker, samples, max_tokens=4096),
            "appraised": appraise(worker, samples, 1, max_tokens=40)}


def main() -> None:
    scenario, rank, world_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    folder, shared = Path(sys.argv[4]), Path(sys.argv[5])
    port, deadline = 0, time.monotonic() + 60
    for name in ("model", "checkpoint"):
        if (shared / name).exists() and not (folder / name).exists() and rank == 0:
            (folder / name).symlink_to(shared / name)
    while rank and not port:
        assert time.monotonic() < deadline, "rank 0 published no port"
        port = int((folder / "port").read_text()) if (folder / "port").is_file() else time.sleep(0.1) or 0
    worker = make_worker(folder, rank, world_size, port)
    torch.save(globals()[f"scenario_{scenario}"](worker, folder), folder / f"result_{rank}.pt")
    worker.close()
    sys.stdout.flush()
    os._exit(0)  # the result is on disk; at interpreter exit a thread of gloo that is still joining aborts now and then


if __name__ == "__main__":
    main()
