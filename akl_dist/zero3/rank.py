"""One rank of a model under ZeRO-3: process group, engine, guarded optimizer steps, checkpoints. What learner and critic
share. A plain class; every public method is a collective.

Weights change only in ``engine.step()``, which is reached when every rank has seen a finite loss on every micro-batch.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import math
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from akl_dist.config.schema import LearnerConfig
from akl_dist.contract.errors import CheckpointError, NonFiniteLoss
from akl_dist.contract.records import ParameterInfo
from akl_dist.zero3 import gathering
from akl_dist.zero3.build import build_sharded
from akl_dist.zero3.planning import RankUpdate, SampleKey


def listen(host: str = "0.0.0.0") -> torch.distributed.TCPStore:
    """Rank 0's rendezvous, bound to a port that the system chose and already listening: ``store.port`` is free by construction."""
    return torch.distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False)


def learning_rate(step: int, *, lr: float, warmup_steps: int) -> float:
    """Learning rate of optimizer step ``step`` (from 0): linear from lr/warmup_steps up to lr, then constant."""
    return lr if warmup_steps <= 0 else lr * min(1.0, (step + 1) / warmup_steps)


class Zero3Rank:
    """Args:
    role: "learner" | "critic": stage of its errors, name of its part of a checkpoint.
    model_path: local Hugging Face folder with safetensors weights.
    dtype: "float32" or "bfloat16" (then with float32 master weights and gradient reduction).
    attention: attention implementation name of transformers.
    store: rank 0's :func:`listen` result; None on other ranks, which connect to master_addr:master_port.
    device: "cpu" (gloo) or "cuda" (NCCL; the device is cuda:``local_rank``).
    learner: optimizer, batch and ZeRO settings of this role.
    timeout_s: limit of one collective.
    failures: folder for the batches of failed updates.
    """

    def __init__(
        self, *, role: str, model_path: str, dtype: str, attention: str, rank: int, world_size: int, master_addr: str,
        master_port: int, device: str, num_threads: int, learner: LearnerConfig, seed: int, timeout_s: float, failures: Path,
        local_rank: int, store: torch.distributed.Store | None,
    ) -> None:
        self.role, self.rank, self.world_size, self.learner = role, rank, world_size, learner
        self.failures, self.model_path = Path(failures), Path(model_path)
        self._trace_is_of_training = False
        self.dtype_name, self.optimizer_steps, self.skipped_steps = dtype, 0, 0
        self.device = torch.device(device, local_rank) if device == "cuda" else torch.device(device)
        torch.set_num_threads(num_threads)
        for seeder in (random.seed, np.random.seed, torch.manual_seed):
            seeder(seed)
        self._connect(master_addr, master_port, local_rank, timeout_s, store)
        self._build(getattr(torch, dtype), attention)

    def wrapped(self, causal_lm: Any, ds_config: dict[str, Any]) -> tuple[Any, torch.nn.Module, list[type]]:
        """(what weights are named by, the module that trains, classes of its ZeRO-3 leaf modules) of a sharded causal LM."""
        raise TypeError(f"{type(self).__name__} does not say what it trains")

    # --- start ---------------------------------------------------------------------------------------------------

    def _connect(self, addr: str, port: int, local_rank: int, timeout_s: float, store: torch.distributed.Store | None) -> None:
        # DeepSpeed reads these at import and at initialize; it must not look for MPI or build native ops on CPU.
        os.environ["DS_ACCELERATOR"] = self.device.type
        os.environ |= {"RANK": str(self.rank), "WORLD_SIZE": str(self.world_size), "LOCAL_RANK": str(local_rank),
                       "MASTER_ADDR": addr, "MASTER_PORT": str(port)}
        import deepspeed

        if self.device.type == "cpu":
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        else:
            torch.cuda.set_device(self.device)
        limit = datetime.timedelta(seconds=timeout_s)
        if store is None:
            store = torch.distributed.TCPStore(addr, port, is_master=False, timeout=limit)
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size, timeout=limit)
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, timeout=limit, verbose=False)

    def _build(self, dtype: torch.dtype, attention: str) -> None:
        import deepspeed
        from deepspeed.utils import set_z3_leaf_modules

        ds_config = self._ds_config()
        causal_lm = build_sharded(self.model_path, dtype=dtype, attention=attention, ds_config=ds_config)
        if self.learner.gradient_checkpointing:
            causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model, wrapper, leaves = self.wrapped(causal_lm, ds_config)
        if leaves:
            set_z3_leaf_modules(wrapper, leaves)
        numels = [math.prod(gathering.full_shape(p)) for p in wrapper.parameters()]
        # The reduction bucket is allocated whole: its default of 5e8 elements would cost a small model 2 GB.
        ds_config["zero_optimization"]["reduce_bucket_size"] = max(max(numels), min(sum(numels), 200_000_000))
        first, second = self.learner.adam_betas
        optimizer = torch.optim.AdamW(
            wrapper.parameters(), lr=self.learner.lr, betas=(first, second), weight_decay=self.learner.weight_decay)
        self.engine: Any = deepspeed.initialize(model=wrapper, optimizer=optimizer, config=ds_config)[0]
        self.engine.train()

    def _ds_config(self) -> dict[str, Any]:
        zero: dict[str, Any] = {
            "stage": 3, "stage3_param_persistence_threshold": self.learner.param_persistence_threshold,
            "overlap_comm": self.device.type == "cuda", "contiguous_gradients": True,
        }
        if self.learner.offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": self.device.type == "cuda"}
        config: dict[str, Any] = {
            # One sample and one accumulation step by name only: boundaries are set explicitly around every backward pass.
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "zero_optimization": zero,
            "gradient_clipping": self.learner.max_grad_norm, "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False, "steps_per_print": 2**31, "wall_clock_breakdown": False,
        }
        if self.dtype_name == "bfloat16":
            config |= {"bf16": {"enabled": True}, "communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}
        return config

    # --- update --------------------------------------------------------------------------------------------------

    def begin_accumulation(self) -> None:
        """Once, before the first training pass: have ZeRO-3 learn its order of parameter gathers from that pass.

        It records the order of the first pass it sees. That is a pass without a backward (a probe, old values), and with such
        a record it gathers parameters one by one in every later update: 155 gathers of the tiny model instead of 4, a fifth of
        the time of an update.
        """
        if not self._trace_is_of_training:
            coordinator = self.engine.optimizer.parameter_offload.get_param_coordinator()
            if not coordinator.is_invalid_trace():
                coordinator._invalidate_trace()
            self._trace_is_of_training = True

    def backward(
        self, loss: torch.Tensor, what: str, keys: Sequence[SampleKey], samples: Mapping[SampleKey, Any]
    ) -> None:
        """Backward pass of one micro-batch's share of the loss, once all ranks agree that theirs is finite.

        ``keys`` name the samples of ``what`` for the report of a failure.
        """
        self.require_finite(loss, what, keys, samples)
        # DeepSpeed averages gradients over ranks, but the loss is already divided by the global count.
        self.engine.backward(loss * self.world_size)

    def optimizer_step(self, samples: Mapping[SampleKey, Any], plan: RankUpdate, step: int) -> tuple[float, float]:
        """One optimizer step on the accumulated gradients; returns (gradient norm before clipping, learning rate)."""
        lr = self.next_learning_rate()
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        before = self.engine.global_steps
        self.engine.step()
        assert self.engine.global_steps == before + 1, f"global_steps went from {before} to {self.engine.global_steps}"
        norm = torch.tensor(float(self.engine.get_global_grad_norm()))
        # DeepSpeed itself drops gradients and leaves the weights alone when their norm is not finite.
        keys = [key for micro_batch in plan.micro_batches for key in micro_batch]
        self.require_finite(norm, f"gradient norm at step {step}", keys, samples)
        self.optimizer_steps += 1
        return float(norm), lr

    def next_learning_rate(self) -> float:
        return learning_rate(self.optimizer_steps, lr=self.learner.lr, warmup_steps=self.learner.warmup_steps)

    def require_finite(
        self, value: torch.Tensor, what: str, keys: Sequence[SampleKey], samples: Mapping[SampleKey, Any]
    ) -> None:
        """All ranks agree whether ``value`` is finite everywhere; if not, drop gradients, dump, and raise on every rank."""
        bad = torch.tensor([0.0 if bool(torch.isfinite(value)) else 1.0], device=self.device)
        torch.distributed.all_reduce(bad)
        if not bad.item():
            return
        self.engine.optimizer.zero_grad()
        mine = None
        if not torch.isfinite(value):
            path = self._dump(what, keys, samples)
            mine = f"rank {self.rank}: {float(value.detach())} on samples {list(keys)} (group, response), dumped to {path}"
        reports: list[str | None] = [None] * self.world_size
        torch.distributed.all_gather_object(reports, mine)
        raise NonFiniteLoss(
            what, got="; ".join(report for report in reports if report), expected="a finite number on every rank",
            remedy=f"The weights are unchanged. Look at the dumped batch; lower {self.role}.lr or the KL strength, or mend the "
                   "data.", stage=self.role,
        )

    def _dump(self, what: str, keys: Sequence[SampleKey], samples: Mapping[SampleKey, Any]) -> Path:
        self.failures.mkdir(parents=True, exist_ok=True)
        path = self.failures / f"{what.replace(' ', '_')}_rank_{self.rank}.npz"
        arrays = {}
        for group, response in keys:
            fields = dataclasses.asdict(samples[group, response])
            for name, value in fields.items():
                entries = {f"{name}/{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
                arrays |= {f"{group}/{response}/{key}": np.asarray(one) for key, one in entries.items() if one is not None}
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        return path

    # --- weights -------------------------------------------------------------------------------------------------

    def manifest(self) -> list[ParameterInfo]:
        return gathering.manifest(self.model)

    def parameters_checksum(self) -> str:
        """SHA-256 over all ranks' shards: equal weights on equally many ranks give equal checksums."""
        digest = hashlib.sha256()
        for name, shard in gathering.shards(self.model).items():
            digest.update(name.encode())
            digest.update(shard.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        parts: list[str] = [""] * self.world_size
        torch.distributed.all_gather_object(parts, digest.hexdigest())
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    # --- checkpoint ----------------------------------------------------------------------------------------------

    def _topology(self) -> dict[str, Any]:
        return {"world_size": self.world_size, "dtype": self.dtype_name, "parameters": len(self.manifest()),
                "param_persistence_threshold": self.learner.param_persistence_threshold}

    def _topology_file(self, folder: Path) -> Path:
        return Path(folder) / f"{self.role}_topology.json"

    def save(self, folder: Path) -> None:
        """Sharded weights, optimizer state, random states and counters into the existing ``folder``."""
        state = {
            "optimizer_steps": self.optimizer_steps, "skipped_steps_total": self.skipped_steps, "torch_rng": torch.get_rng_state(),
            "numpy_rng": np.random.get_state(), "python_rng": random.getstate(),
            "cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }
        self.engine.save_checkpoint(str(folder), tag=self.role, client_state={"akl_dist": state}, save_latest=False)
        if self.rank == 0:
            self._topology_file(folder).write_text(json.dumps(self._topology(), indent=2) + "\n")
        torch.distributed.barrier()

    def load(self, folder: Path) -> None:
        """Bit-exact continuation of a run that saved into ``folder``. Unpickles: only for folders of one's own runs.

        Raises:
            CheckpointError: no such checkpoint, or one of another number of ranks, dtype or model.
        """
        file, expected = self._topology_file(folder), self._topology()
        found = json.loads(file.read_text()) if file.is_file() else None
        if found != expected:
            raise CheckpointError(
                f"{self.role} checkpoint {folder}", got=str(found or f"no {self.role} checkpoint"), expected=str(expected),
                stage=self.role, remedy="Resume with the topology that saved it, or start anew from its hf/ export.",
            )
        path, client = self.engine.load_checkpoint(str(folder), tag=self.role, load_lr_scheduler_states=False)
        if path is None:
            raise CheckpointError(f"{self.role} checkpoint {folder}", got="an incomplete folder", expected="every rank's files",
                                  remedy="Resume from an earlier checkpoint.", stage=self.role)
        state = client["akl_dist"]
        self.optimizer_steps, self.skipped_steps = state["optimizer_steps"], state["skipped_steps_total"]
        torch.set_rng_state(state["torch_rng"])
        np.random.set_state(state["numpy_rng"])
        random.setstate(state["python_rng"])
        if state["cuda_rng"] is not None:
            torch.cuda.set_rng_state(state["cuda_rng"], self.device)

    def close(self) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
