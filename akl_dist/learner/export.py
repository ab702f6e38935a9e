"""A Hugging Face checkpoint out of a sharded learner: gathered shard by shard, reopened and checked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from akl_dist.contract.errors import CheckpointError
from akl_dist.contract.records import ParameterInfo
from akl_dist.zero3.build import INDEX, WEIGHTS
from akl_dist.zero3.gathering import buckets, gather_bucket, manifest, tied_names

SIDE_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "LICENSE*")
"""Files beside the weights that a checkpoint needs: config, generation config, tokenizer, chat template."""


def export_checkpoint(model: Any, *, source: Path, folder: Path, max_shard_bytes: float = 4 * 2**30) -> None:
    """Write the weights of ``model`` and the side files of ``source`` into ``folder``. A collective; rank 0 writes.

    Tied parameters are written once, under their first name, as Hugging Face does.

    Raises:
        CheckpointError: the reopened files do not hold the names, shapes and dtypes of the model.
    """
    tied = tied_names(model)
    shards = buckets([info for info in manifest(model) if info.name not in tied], max_shard_bytes)
    rank = torch.distributed.get_rank()
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    names = [WEIGHTS] if len(shards) == 1 else [
        f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        tensors = gather_bucket(model, [info.name for info in shard])
        if tensors is not None:
            from safetensors.torch import save_file

            save_file(tensors, folder / name, metadata={"format": "pt"})
    if rank == 0:
        _write_side_files(model, source, folder)
        if len(shards) > 1:
            _write_index(folder, names, shards)
        _check(folder, names, shards)
    torch.distributed.barrier()


def _write_side_files(model: Any, source: Path, folder: Path) -> None:
    for pattern in SIDE_FILES:
        for file in source.glob(pattern):
            if not file.name.endswith(".safetensors.index.json") and file.resolve() != (folder / file.name).resolve():
                shutil.copyfile(file, folder / file.name)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _write_index(folder: Path, names: list[str], shards: list[list[ParameterInfo]]) -> None:
    total = sum(info.numel * getattr(torch, info.dtype).itemsize for shard in shards for info in shard)
    weight_map = {info.name: name for name, shard in zip(names, shards, strict=True) for info in shard}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")


def _check(folder: Path, names: list[str], shards: list[list[ParameterInfo]]) -> None:
    from safetensors import safe_open

    for name, shard in zip(names, shards, strict=True):
        with safe_open(folder / name, framework="pt") as reader:
            keys = list(reader.keys())
            found = {key: reader.get_tensor(key) for key in keys}
        got = {key: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for key, t in found.items()}
        expected = {info.name: (info.shape, info.dtype) for info in shard}
        broken = [key for key, tensor in found.items() if not torch.isfinite(tensor).all()]
        if got != expected or broken:
            wrong = sorted(key for key in got.keys() | expected.keys() if got.get(key) != expected.get(key))
            raise CheckpointError(
                f"export {folder / name}", got=f"wrong entries {wrong[:3]}, non-finite {broken[:3]}",
                expected=f"{len(expected)} parameters of the model, all finite", stage="learner",
                remedy="Export again; check free disk space and the learner's weights.",
            )
