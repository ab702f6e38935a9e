"""Full parameters out of a ZeRO-3 sharded model, one bucket at a time. The one home of gathering.

Outside a gather a sharded parameter is an empty tensor: sizes come from ``ds_shape``, never from ``shape`` or ``numel()``.
Names are those of the Hugging Face checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from akl_dist.contract.errors import WeightSyncError
from akl_dist.contract.records import ParameterInfo


def full_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Shape of the whole parameter, sharded or not."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def named_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Every parameter by every name it has: a tied LM head is listed beside the embedding it shares."""
    return dict(module.named_parameters(remove_duplicate=False))


def shards(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """This rank's flat part of every parameter, tied ones under each of their names; views, not copies."""
    return {name: getattr(p, "ds_tensor", p) for name, p in named_parameters(module).items()}


def manifest(module: torch.nn.Module) -> list[ParameterInfo]:
    """What a full copy of ``module`` (the Hugging Face model, not its wrapper) consists of, in module order."""
    return [ParameterInfo(name, full_shape(p), str(p.dtype).removeprefix("torch."))
            for name, p in named_parameters(module).items()]


def tied_names(module: torch.nn.Module) -> dict[str, str]:
    """name -> earlier name of the same parameter."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in named_parameters(module).items():
        if id(parameter) in first:
            tied[name] = first[id(parameter)]
        else:
            first[id(parameter)] = name
    return tied


def to_wire(tensor: torch.Tensor) -> tuple[str, np.ndarray]:
    """(dtype name, values on the host); bfloat16 travels as its uint16 bits, because numpy lacks it."""
    values = tensor.detach().to("cpu").contiguous()
    dtype = str(values.dtype).removeprefix("torch.")
    if values.dtype is torch.bfloat16:
        return dtype, values.view(torch.int16).numpy().view(np.uint16)
    return dtype, values.numpy()


def buckets(infos: Sequence[ParameterInfo], max_bytes: float) -> list[list[ParameterInfo]]:
    """Consecutive entries cut so that each bucket holds at most ``max_bytes`` (one larger entry gets a bucket alone)."""
    out: list[list[ParameterInfo]] = []
    size = 0
    for info in infos:
        need = info.numel * getattr(torch, info.dtype).itemsize
        if not out or size + need > max_bytes:
            out.append([])
            size = 0
        out[-1].append(info)
        size += need
    return out


def gather_bucket(module: torch.nn.Module, names: Sequence[str]) -> dict[str, torch.Tensor] | None:
    """Full CPU copies of the named parameters on rank 0, None on the others. A collective: every rank calls it, with
    the same names in the same order, while no forward pass is open.

    Raises:
        WeightSyncError: an unknown name, or a gathered tensor that lacks its full shape.
    """
    import deepspeed

    known = named_parameters(module)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise WeightSyncError(
            "bucket", got=f"unknown parameters {unknown[:3]}", expected="names of the manifest",
            remedy="Plan buckets from the learner's manifest.", stage="learner",
        )
    parameters: list[Any] = list({id(known[name]): known[name] for name in names}.values())
    rank = torch.distributed.get_rank()
    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=None):
        if rank != 0:
            return None
        bucket = {name: known[name].detach().to("cpu", copy=True) for name in names}
    for name, tensor in bucket.items():
        if tuple(tensor.shape) != full_shape(known[name]):
            raise WeightSyncError(
                name, got=f"shape {tuple(tensor.shape)}", expected=f"{full_shape(known[name])}",
                remedy="The gather was partial; this is a bug.", stage="learner",
            )
    return bucket
