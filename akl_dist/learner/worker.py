"""One learner rank: DeepSpeed ZeRO-3 around the policy. A plain class; every public method is a collective.

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

from akl_dist.config.schema import LearnerConfig, ObjectiveConfig
from akl_dist.contract.errors import CheckpointError, NonFiniteLoss
from akl_dist.contract.packing import first_fit_decreasing, pack_row
from akl_dist.contract.records import ParameterInfo, Update
from akl_dist.learner import gathering
from akl_dist.learner.batch import MicroBatch, RankUpdate, Sample, SampleKey, pack
from akl_dist.learner.export import export_checkpoint
from akl_dist.learner.model import HeadStatistics, PolicyModel, build_sharded, unstack
from akl_dist.learner.step import MAXIMA, SUMS, StepResult, learning_rate, metrics_from_sums, micro_batch_loss
from akl_dist.objective import TokenStatistics

TAG = "learner"
TOPOLOGY = "learner_topology.json"


def listen(host: str = "0.0.0.0") -> torch.distributed.TCPStore:
    """Rank 0's rendezvous, bound to a port that the system chose and already listening: ``store.port`` is free by construction."""
    return torch.distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False)


class LearnerWorker:
    """Args:
    model_path: local Hugging Face folder with safetensors weights.
    dtype: "float32" or "bfloat16" (then with float32 master weights and gradient reduction).
    attention: attention implementation name of transformers.
    store: rank 0's :func:`listen` result; None on other ranks, which connect to master_addr:master_port.
    device: "cpu" (gloo) or "cuda" (NCCL; the device is cuda:``local_rank``).
    temperature: sampling temperature of the rollouts; log-probs are taken at it.
    timeout_s: limit of one collective.
    failures: folder for the batches of failed updates.
    """

    def __init__(
        self, *, model_path: str, dtype: str, attention: str, rank: int, world_size: int, master_addr: str,
        master_port: int, device: str, num_threads: int, learner: LearnerConfig, objective: ObjectiveConfig, seed: int,
        temperature: float, timeout_s: float, failures: Path, local_rank: int = 0, store: torch.distributed.Store | None = None,
    ) -> None:
        self.rank, self.world_size, self.learner, self.objective = rank, world_size, learner, objective
        self.temperature, self.failures, self.model_path = temperature, Path(failures), Path(model_path)
        self._trace_is_of_training = False
        self.dtype_name, self.optimizer_steps, self.skipped_steps = dtype, 0, 0
        self.device = torch.device(device, local_rank) if device == "cuda" else torch.device(device)
        torch.set_num_threads(num_threads)
        for seeder in (random.seed, np.random.seed, torch.manual_seed):
            seeder(seed)
        self._connect(master_addr, master_port, local_rank, timeout_s, store)
        self._build(getattr(torch, dtype), attention)

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
        self.model = build_sharded(self.model_path, dtype=dtype, attention=attention, ds_config=ds_config)
        if self.learner.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        wrapper = PolicyModel(self.model, self.learner.logprob_chunk_tokens)
        set_z3_leaf_modules(wrapper, [HeadStatistics])
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

    def update(self, samples: Mapping[SampleKey, Sample], plans: Sequence[RankUpdate], *, step: int) -> Update:
        """All optimizer steps of loop iteration ``step``; ``plans`` are this rank's parts, in order.

        An update without one trainable token is skipped on all ranks together and counted. Metrics are global.

        Raises:
            NonFiniteLoss: on every rank, weights unchanged by the update concerned; its batch is dumped.
        """
        old = self._old_logp(samples, plans)
        sums, maxima = np.zeros(len(SUMS)), np.zeros(len(MAXIMA))
        norms, taken, lr = [], 0, learning_rate(self.optimizer_steps, lr=self.learner.lr, warmup_steps=self.learner.warmup_steps)
        for plan, old_logp in zip(plans, old, strict=True):
            if plan.totals.tokens == 0:
                self.skipped_steps += 1
                continue
            local_sums, local_maxima = self.accumulate_gradients(samples, plan, old_logp=old_logp, step=step)
            norm, lr = self._optimizer_step(samples, plan, step)
            torch.distributed.all_reduce(local_sums)
            torch.distributed.all_reduce(local_maxima, op=torch.distributed.ReduceOp.MAX)
            sums += local_sums.cpu().numpy()
            maxima = np.maximum(maxima, local_maxima.cpu().numpy())
            norms.append(norm)
            taken += 1
        metrics = metrics_from_sums(dict(zip(SUMS, sums.tolist(), strict=True)), dict(zip(MAXIMA, maxima.tolist(), strict=True)),
                                    updates=taken, full=self.objective.kl.estimator == "full")
        metrics |= {"learner/lr": lr, "learner/padding_fraction": float(np.mean([plan.padding_fraction for plan in plans]))}
        if norms:
            metrics["learner/grad_norm"] = float(np.mean(norms))
        return Update(taken, len(plans) - taken, metrics)

    def accumulate_gradients(
        self, samples: Mapping[SampleKey, Sample], plan: RankUpdate, *, old_logp: Sequence[torch.Tensor | None], step: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward and backward over this rank's micro-batches; the optimizer step is left to the caller.

        Returns local metric sums and maxima. All ranks agree that a micro-batch's loss is finite before its backward pass.
        """
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self.device)
        maxima = torch.zeros(len(MAXIMA), dtype=torch.float64, device=self.device)
        last = len(plan.micro_batches) - 1
        self._forget_inference_trace()
        for index, keys in enumerate(plan.micro_batches):
            batch = pack(keys, [samples[key] for key in keys], device=self.device)
            self.engine.set_gradient_accumulation_boundary(index == last)
            statistics = self._forward(batch)
            result = self._loss(batch, statistics, plan, old_logp[index])
            self._require_finite(result.loss, f"loss of micro-batch {index} at step {step}", keys, samples)
            # DeepSpeed averages gradients over ranks, but the loss is already divided by the global count.
            self.engine.backward(result.loss * self.world_size)
            sums += result.sums
            maxima = torch.maximum(maxima, result.maxima)
        return sums, maxima

    def _forget_inference_trace(self) -> None:
        """Once, before the first training pass: have ZeRO-3 learn its order of parameter gathers from that pass.

        It records the order of the first pass it sees. That is a probe without a backward pass (the check before the first
        step), and with such a record it gathers parameters one by one in every later update: 155 gathers of the tiny model
        instead of 4, a fifth of the learner's time.
        """
        if not self._trace_is_of_training:
            coordinator = self.engine.optimizer.parameter_offload.get_param_coordinator()
            if not coordinator.is_invalid_trace():
                coordinator._invalidate_trace()
            self._trace_is_of_training = True

    def _forward(self, batch: MicroBatch) -> TokenStatistics:
        stacked = self.engine(batch.input_ids, batch.position_ids, batch.predict_index, batch.targets, batch.ref_logprobs,
                              self.temperature)
        return unstack(stacked, has_reference=batch.ref_logprobs is not None)

    def _loss(self, batch: MicroBatch, statistics: TokenStatistics, plan: RankUpdate, old: torch.Tensor | None) -> StepResult:
        return micro_batch_loss(batch, statistics, objective=self.objective, totals=plan.totals, old_logp=old)

    @torch.no_grad()
    def _old_logp(self, samples: Mapping[SampleKey, Sample], plans: Sequence[RankUpdate]) -> list[list[torch.Tensor | None]]:
        """Log-probs of all micro-batches under the weights at the start of the step, by the code path of the update.

        None where not needed: anchor ``rollout``, or a single update, whose own log-probs are the old ones.
        """
        needed = self.objective.anchor == "old" and sum(plan.totals.tokens > 0 for plan in plans) > 1
        if not needed:
            return [[None] * len(plan.micro_batches) for plan in plans]
        return [[self._forward(pack(keys, [samples[key] for key in keys], device=self.device)).logp for keys in plan.micro_batches]
                for plan in plans]

    def _optimizer_step(self, samples: Mapping[SampleKey, Sample], plan: RankUpdate, step: int) -> tuple[float, float]:
        """One optimizer step on the accumulated gradients; returns (gradient norm before clipping, learning rate)."""
        lr = learning_rate(self.optimizer_steps, lr=self.learner.lr, warmup_steps=self.learner.warmup_steps)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        before = self.engine.global_steps
        self.engine.step()
        assert self.engine.global_steps == before + 1, f"global_steps went from {before} to {self.engine.global_steps}"
        norm = torch.tensor(float(self.engine.get_global_grad_norm()))
        # DeepSpeed itself drops gradients and leaves the weights alone when their norm is not finite.
        keys = [key for micro_batch in plan.micro_batches for key in micro_batch]
        self._require_finite(norm, f"gradient norm at step {step}", keys, samples)
        self.optimizer_steps += 1
        return float(norm), lr

    def _require_finite(
        self, value: torch.Tensor, what: str, keys: Sequence[SampleKey], samples: Mapping[SampleKey, Sample]
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
            remedy="The weights are unchanged. Look at the dumped batch; lower learner.lr or the KL strength, or mend the data.",
            stage="learner",
        )

    def _dump(self, what: str, keys: Sequence[SampleKey], samples: Mapping[SampleKey, Sample]) -> Path:
        self.failures.mkdir(parents=True, exist_ok=True)
        path = self.failures / f"{what.replace(' ', '_')}_rank_{self.rank}.npz"
        arrays = {}
        for group, response in keys:
            for name, value in dataclasses.asdict(samples[group, response]).items():
                if value is not None:
                    arrays[f"{group}/{response}/{name}"] = np.asarray(value)
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        return path

    # --- weights out ---------------------------------------------------------------------------------------------

    def manifest(self) -> list[ParameterInfo]:
        return gathering.manifest(self.model)

    def gather_bucket(self, names: Sequence[str]) -> dict[str, torch.Tensor] | None:
        return gathering.gather_bucket(self.model, names)

    @torch.no_grad()
    def probe_logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Log-probs at temperature 1 of every token but the first of each sequence (float32 [length - 1]), on every rank."""
        out: list[np.ndarray] = [np.zeros(0, np.float32)] * len(token_ids)
        rows = first_fit_decreasing([max(len(ids) - 1, 0) for ids in token_ids], self.learner.max_tokens_per_micro_batch)
        for row in rows:
            members = [index for index in row if len(token_ids[index]) > 1]
            if not members:
                continue
            packed = pack_row([(token_ids[index][:1], token_ids[index][1:]) for index in members])
            tensors = [torch.from_numpy(a).to(self.device) for a in (packed.input_ids, packed.position_ids,
                                                                    packed.predict_index, packed.targets)]
            stacked = self.engine(tensors[0][None], tensors[1][None], tensors[2], tensors[3], None, 1.0)
            logp = unstack(stacked, has_reference=False).logp.float().cpu().numpy()
            ends = np.cumsum(packed.response_lengths)
            for index, piece in zip(members, np.split(logp, ends[:-1]), strict=True):
                out[index] = piece
        return out

    def parameters_checksum(self) -> str:
        """SHA-256 over all ranks' shards: equal weights on equally many ranks give equal checksums."""
        digest = hashlib.sha256()
        for name, shard in gathering.shards(self.model).items():
            digest.update(name.encode())
            digest.update(shard.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        parts: list[str] = [""] * self.world_size
        torch.distributed.all_gather_object(parts, digest.hexdigest())
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    def export(self, folder: Path) -> None:
        export_checkpoint(self.model, source=self.model_path, folder=Path(folder))

    # --- checkpoint ----------------------------------------------------------------------------------------------

    def _topology(self) -> dict[str, Any]:
        return {"world_size": self.world_size, "dtype": self.dtype_name, "parameters": len(self.manifest()),
                "param_persistence_threshold": self.learner.param_persistence_threshold}

    def save(self, folder: Path) -> None:
        """Sharded weights, optimizer state, random states and counters into the existing ``folder``."""
        state = {
            "optimizer_steps": self.optimizer_steps, "skipped_steps_total": self.skipped_steps, "torch_rng": torch.get_rng_state(),
            "numpy_rng": np.random.get_state(), "python_rng": random.getstate(),
            "cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }
        self.engine.save_checkpoint(str(folder), tag=TAG, client_state={"akl_dist": state}, save_latest=False)
        if self.rank == 0:
            (Path(folder) / TOPOLOGY).write_text(json.dumps(self._topology(), indent=2) + "\n")
        torch.distributed.barrier()

    def load(self, folder: Path) -> None:
        """Bit-exact continuation of a run that saved into ``folder``. Unpickles: only for folders of one's own runs.

        Raises:
            CheckpointError: no such checkpoint, or one of another number of ranks, dtype or model.
        """
        file, expected = Path(folder) / TOPOLOGY, self._topology()
        found = json.loads(file.read_text()) if file.is_file() else None
        if found != expected:
            raise CheckpointError(
                f"learner checkpoint {folder}", got=str(found or "no learner checkpoint"), expected=str(expected), stage="learner",
                remedy="Resume with the topology that saved it, or start anew from its hf/ export.",
            )
        path, client = self.engine.load_checkpoint(str(folder), tag=TAG, load_lr_scheduler_states=False)
        if path is None:
            raise CheckpointError(f"learner checkpoint {folder}", got="an incomplete folder", expected="every rank's files",
                                  remedy="Resume from an earlier checkpoint.", stage="learner")
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
