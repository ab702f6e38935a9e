"""The engine's side of a weight sync: loads buckets of full parameters inside one layerwise reload.

Registered with vLLM's weight-transfer factory, so it runs in every worker of a tensor-parallel engine. One session is
``init_transfer_engine`` (the manifest), ``start_weight_update``, ``update_weights`` once per bucket,
``finish_weight_update``. Why not ``reload_weights`` per bucket: each call is a session of its own, which finalises
layers whose fused weights (query/key/value, gate/up) are only partly there and so corrupts them silently.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

from akl_dist.contract.errors import WeightSyncError

BACKEND = "akl_bucket"
"""Name under which the receiver is registered, for ``WeightTransferConfig(backend=...)``."""

WIRE_DTYPES = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}
"""How each dtype travels; bfloat16, which numpy lacks, as its bits."""


def from_wire(dtype: str, array: np.ndarray) -> torch.Tensor:
    """Tensor over the bytes of a received array, without a copy (it may be read-only shared memory: only read it)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


@dataclass
class SessionInfo(WeightTransferInitInfo):
    """What the coming session will bring: parameter name (as the checkpoint names it) -> full shape."""

    shapes: dict[str, tuple[int, ...]]


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """One bucket: parameter name -> (dtype name, array)."""

    bucket: dict[str, tuple[str, np.ndarray]]


class BucketReceiver(WeightTransferEngine[SessionInfo, BucketInfo]):
    """Loads what it was announced, all of it, once, in full shape; anything else raises WeightSyncError."""

    init_info_cls = SessionInfo
    update_info_cls = BucketInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: SessionInfo) -> None:
        """Announce the session's parameters. Called before every session."""
        self.expected = {name: tuple(shape) for name, shape in init_info.shapes.items()}
        self.received: set[str] = set()

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: BucketInfo) -> None:
        load_weights = cast(Callable[..., object], self.model.load_weights)
        for name, (dtype, array) in update_info.bucket.items():
            if name not in self.expected:
                raise _error(f"parameter {name}", got="a name that was not announced", expected="a name of the manifest")
            if name in self.received:
                raise _error(f"parameter {name}", got="a second delivery", expected="one per session")
            if tuple(array.shape) != self.expected[name]:
                raise _error(f"parameter {name}", got=f"shape {tuple(array.shape)}", expected=str(self.expected[name]))
            if array.dtype != WIRE_DTYPES.get(dtype):
                raise _error(f"parameter {name}", got=f"array of {array.dtype}", expected=f"the bytes of {dtype}")
            load_weights([(name, from_wire(dtype, array).to(self.model_config.dtype))])
            self.received.add(name)

    def finish_weight_update(self) -> None:
        """Check that every parameter arrived, then finalise.

        Raises before finalising, which leaves the model on the meta device: an engine with partial weights cannot run.
        """
        missing = sorted(set(self.expected) - self.received)
        if missing:
            raise _error("weight update", got=f"no {', '.join(missing[:8])}", expected=f"{len(self.expected)} parameters")
        self.check_coverage()
        finalize_layerwise_reload(self.model, self.model_config)

    def check_coverage(self) -> None:
        """Every parameter of the model was filled by this session; what is left out would keep its old values.

        This is where a tied model whose output head was not sent is caught: the head is a layer of its own in the
        reload (and holds repacked weights on CPU), although the checkpoint has no entry for it.
        """
        stale = [name for name, layer in self.model.named_modules() if _is_partial(layer)]
        if stale:
            raise _error(
                "weight update",
                got=f"layers without all of their weights: {', '.join(stale[:8])}",
                expected="every parameter of the engine, tied ones included",
            )

    def shutdown(self) -> None:
        """Nothing is held between sessions."""


def _is_partial(layer: torch.nn.Module) -> bool:
    info = get_layerwise_info(layer)
    if not info.can_load() or is_deferred_attention_layer(layer):
        return False  # loaded and processed, or an attention layer, whose cache scales no checkpoint has
    parameters = [parameter for parameter in layer._parameters.values() if parameter is not None]
    needed = sum(get_tensor_load_numel(parameter) for parameter in parameters)
    if isinstance(layer, VocabParallelEmbedding):  # rows that pad the vocabulary, maybe all of a worker's, are not loaded
        rows = layer.shard_indices
        needed = needed * rows.num_org_elements // rows.num_elements_padded
    return info.load_numel < needed


def _error(subject: str, *, got: str, expected: str) -> WeightSyncError:
    return WeightSyncError(
        subject,
        got=got,
        expected=expected,
        stage="weight_sync",
        remedy="Restart the engine: its weights are incomplete. A learner and an engine of the same checkpoint never meet this.",
    )


class WorkerExtension:
    """Mixed into every vLLM worker: importing it in a worker process registers the receiver there."""


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, BucketReceiver)
