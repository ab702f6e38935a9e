"""The learner's side of a weight sync: functions called inside a learner rank.

Under ZeRO-3 a parameter outside a gather is an empty tensor whose full shape is ``ds_shape``; without ZeRO it is whole.
Both are handled here, so nothing else needs to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import nn

from akl_dist.contract.errors import WeightSyncError
from akl_dist.contract.records import ParameterInfo
from akl_dist.weight_sync.plan import Bucket

OUTPUT_HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"


def manifest(module: nn.Module, *, prefix_to_strip: str, tied: bool) -> list[ParameterInfo]:
    """Names (as the checkpoint has them), full shapes and dtypes of the module's parameters, layer by layer.

    Args:
        module: the trained module, wrapped or not.
        prefix_to_strip: what wrappers put before the checkpoint's names ("model."); every parameter must carry it.
        tied: the output head shares the embedding. It is listed explicitly all the same, because an engine keeps the
            head apart while it reloads and would leave it at its old values.
    """
    parameters = _by_checkpoint_name(module, prefix_to_strip=prefix_to_strip, tied=tied)
    return [ParameterInfo(name, full_shape(p), str(p.dtype).removeprefix("torch.")) for name, p in parameters.items()]


def gather_bucket(module: nn.Module, names: Sequence[str], *, prefix_to_strip: str, tied: bool, rank: int) -> Bucket | None:
    """Full values of the named parameters, on rank 0; None on the others.

    Collective: every rank calls it with the same names, and none may be inside a forward or backward pass. Only these
    parameters are gathered, and they are released on return.
    """
    table = _by_checkpoint_name(module, prefix_to_strip=prefix_to_strip, tied=tied)
    unknown = [name for name in names if name not in table]
    if unknown:
        raise WeightSyncError(
            "bucket",
            got=f"names the learner does not have: {', '.join(unknown[:8])}",
            expected="names of its manifest",
            remedy="Plan buckets from sync_manifest().",
            stage="weight_sync",
        )
    with _gathered([table[name] for name in names]):
        if rank != 0:
            return None
        return {name: to_wire(name, table[name]) for name in names}


def full_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Shape of the whole parameter, however it is sharded at the moment."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def to_wire(name: str, parameter: torch.Tensor) -> tuple[str, np.ndarray]:
    """(dtype name, copy of the values on the host). bfloat16 travels as its uint16 bits, because numpy lacks it."""
    if tuple(parameter.shape) != full_shape(parameter):
        raise WeightSyncError(
            f"parameter {name}",
            got=f"shape {tuple(parameter.shape)} while sending",
            expected=f"the full shape {full_shape(parameter)}",
            remedy="Gather it first.",
            stage="weight_sync",
        )
    values = parameter.detach().to("cpu", copy=True).contiguous()
    dtype = str(values.dtype).removeprefix("torch.")
    if values.dtype is torch.bfloat16:
        return dtype, values.view(torch.int16).numpy().view(np.uint16)
    return dtype, values.numpy()


def _by_checkpoint_name(module: nn.Module, *, prefix_to_strip: str, tied: bool) -> dict[str, nn.Parameter]:
    table: dict[str, nn.Parameter] = {}
    for name, parameter in module.named_parameters():  # shared parameters come once, under their first name
        if not name.startswith(prefix_to_strip):
            raise WeightSyncError(
                f"parameter {name}",
                got="no such prefix",
                expected=f"names beginning with {prefix_to_strip!r}",
                remedy="Pass the module that holds the policy alone.",
                stage="weight_sync",
            )
        table[name.removeprefix(prefix_to_strip)] = parameter
    if tied and OUTPUT_HEAD not in table:
        embedding = [parameter for name, parameter in table.items() if name.endswith(EMBEDDING)]
        if len(embedding) != 1:
            raise WeightSyncError(
                "tied output head",
                got=f"{len(embedding)} parameters named {EMBEDDING}",
                expected="one",
                remedy="Set tied only for models whose config says tie_word_embeddings.",
                stage="weight_sync",
            )
        table[OUTPUT_HEAD] = embedding[0]
    return table


def _gathered(parameters: Sequence[nn.Parameter]) -> AbstractContextManager[object]:
    sharded = list({id(p): p for p in parameters if hasattr(p, "ds_id")}.values())
    if not sharded:
        return nullcontext()
    from deepspeed.runtime.zero import GatheredParameters  # only a sharded module needs it

    return GatheredParameters(sharded, modifier_rank=None)
