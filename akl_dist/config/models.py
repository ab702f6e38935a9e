"""Sizes of a model without loading it: from a local ``config.json`` read as JSON, else from a shipped table. Stdlib only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from akl_dist.contract.errors import ModelError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

EMBEDDED = {"tiny": "model", "tiny_tir": "tool_model"}
"""Values of ``model.path`` that mean a shipped checkpoint -> its folder in ``akl_dist/tiny``."""


@dataclass(frozen=True)
class ModelSizes:
    """Dimensions of a decoder-only model; counts, no units.

    ``intermediate`` is the MLP width of one expert when ``num_experts`` > 0. ``context`` is the longest sequence in tokens.
    """

    architecture: str  # model_type of the Hugging Face config: qwen2 | qwen3 | qwen3_moe | llama
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    tied_embeddings: bool
    num_experts: int = 0
    experts_per_token: int = 0

    @property
    def num_parameters(self) -> int:
        """All parameters. Qwen2 has biases on q, k, v; Qwen3 has norms on q and k; a mixture has a router per layer."""
        return self._count(max(self.num_experts, 1))

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token passes through (all of them for a dense model)."""
        return self._count(max(self.experts_per_token, 1))

    def _count(self, experts: int) -> int:
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden * (2 * q_width + 2 * kv_width)
        if self.architecture == "qwen2":
            attention += q_width + 2 * kv_width
        if self.architecture.startswith("qwen3"):
            attention += 2 * self.head_dim
        mlp = experts * 3 * self.hidden * self.intermediate + self.hidden * self.num_experts
        embeddings = self.vocabulary * self.hidden * (1 if self.tied_embeddings else 2)
        return embeddings + self.num_layers * (attention + mlp + 2 * self.hidden) + self.hidden


def _dense(
    architecture: str, layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocabulary: int, context: int,
    *, tied: bool, head_dim: int = 0,
) -> ModelSizes:
    return ModelSizes(architecture, layers, hidden, intermediate, heads, kv_heads, head_dim or hidden // heads, vocabulary,
                      context, tied)


KNOWN: dict[str, ModelSizes] = {
    "Qwen/Qwen2.5-0.5B-Instruct": _dense("qwen2", 24, 896, 4864, 14, 2, 151936, 32768, tied=True),
    "Qwen/Qwen2.5-1.5B-Instruct": _dense("qwen2", 28, 1536, 8960, 12, 2, 151936, 32768, tied=True),
    "Qwen/Qwen2.5-3B-Instruct": _dense("qwen2", 36, 2048, 11008, 16, 2, 151936, 32768, tied=True),
    "Qwen/Qwen2.5-7B-Instruct": _dense("qwen2", 28, 3584, 18944, 28, 4, 152064, 32768, tied=False),
    "Qwen/Qwen2.5-14B-Instruct": _dense("qwen2", 48, 5120, 13824, 40, 8, 152064, 32768, tied=False),
    "Qwen/Qwen2.5-32B-Instruct": _dense("qwen2", 64, 5120, 27648, 40, 8, 152064, 32768, tied=False),
    "Qwen/Qwen2.5-72B-Instruct": _dense("qwen2", 80, 8192, 29568, 64, 8, 152064, 32768, tied=False),
    "Qwen/Qwen3-4B": _dense("qwen3", 36, 2560, 9728, 32, 8, 151936, 40960, tied=True, head_dim=128),
    "Qwen/Qwen3-14B": _dense("qwen3", 40, 5120, 17408, 40, 8, 151936, 40960, tied=False, head_dim=128),
    "Qwen/Qwen3-30B-A3B": ModelSizes("qwen3_moe", 48, 2048, 768, 32, 4, 128, 151936, 40960, False, 128, 8),
    "HuggingFaceTB/SmolLM2-135M-Instruct": _dense("llama", 30, 576, 1536, 9, 3, 49152, 8192, tied=True),
    "meta-llama/Llama-3.1-8B-Instruct": _dense("llama", 32, 4096, 14336, 32, 8, 128256, 131072, tied=False),
}


def resolve(path: str) -> str:
    """What loaders are given: an embedded model's folder for its name, an absolute path for a local folder, else the hub
    name unchanged."""
    if path in EMBEDDED:
        return str(Path(__file__).resolve().parents[1] / "tiny" / EMBEDDED[path])
    return str(Path(path).expanduser().resolve()) if looks_local(path) else path


def looks_local(path: str) -> bool:
    """Whether ``path`` means a folder here rather than a hub name (``ORG/NAME``, existing folders win)."""
    if path in EMBEDDED or path.startswith(("/", ".", "~")) or path.count("/") != 1:
        return True
    folder = Path(path)
    return folder.is_dir() or (path not in KNOWN and folder.parent.is_dir())


def sizes(path: str) -> ModelSizes | None:
    """Sizes of the model at ``model.path``; None for a hub name that is not in the table.

    Raises:
        ModelError: a local folder that is missing, or whose config.json is missing, not JSON, or incomplete.
    """
    if not looks_local(path):
        return KNOWN.get(path)
    folder = Path(resolve(path))
    if not folder.is_dir():
        raise ModelError(
            "model.path", got=f"missing model directory {folder}", expected=f"{', '.join(EMBEDDED)}, a local folder with "
            "config.json and weights, or a hub name ORG/NAME", remedy="Check the path.", stage="config",
        )
    file = folder / "config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return _from_hf(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            "model.path", got=f"{file}: {type(error).__name__}: {error}", expected="a Hugging Face config.json of a "
            "decoder-only model", remedy="Use a folder written by save_pretrained.", stage="config",
        ) from error


def check_weights(key: str, path: str) -> None:
    """Hold a local folder's safetensors files against their own headers, without reading a weight; hub names are not looked at.

    Args:
        key: the configuration key that names the model, for the message.
        path: its value.
    Raises:
        ModelError: no weights, a shard of the index that is not there, a file cut short or of another kind, or an embedding
            with another number of rows than config.json has token ids.
    """
    if not looks_local(path):
        return
    folder, known = Path(resolve(path)), sizes(path)
    try:
        for file in _shards(folder):
            for name, entry in _complete_header(folder / file).items():
                rows = entry["shape"][0] if entry.get("shape") and name.endswith("embed_tokens.weight") else None
                if known is not None and rows not in (None, known.vocabulary):
                    raise ValueError(f"{file}: {rows:,} rows of {name}, and {known.vocabulary:,} token ids in config.json")
    except (OSError, ValueError) as error:
        what = f"{Path(error.filename).name}: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise ModelError(
            key, got=f"{folder}: {what}", expected=f"complete weights, as {WEIGHTS} or as the shards of {INDEX}, that fit "
            "config.json", remedy="Download, copy or convert the model again; other weight formats are not read.", stage="config",
        ) from error


def _shards(folder: Path) -> list[str]:
    """Names of the safetensors files of a checkpoint.

    Raises:
        ValueError: an index that names none.
    """
    if not (folder / INDEX).is_file():
        return [WEIGHTS]
    try:
        names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        names = []
    if not names:
        raise ValueError(f"{INDEX}: no weight_map of parameters to files")
    return names


def _complete_header(file: Path) -> dict[str, Any]:
    """Entries of a safetensors file by name: 8 bytes of header length (little endian), the header as JSON, then the tensors.

    Raises:
        ValueError: the file is not as long as its header says, or has none.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= size - 8:
            raise ValueError(f"{file.name}: not a safetensors file ({size:,} bytes)")
        text = stream.read(length)
    try:
        entries = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        wanted = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{file.name}: not a safetensors file ({size:,} bytes)") from error
    if size != wanted:
        raise ValueError(f"{file.name}: {size:,} bytes of {wanted:,}")
    return entries


def _from_hf(content: dict[str, Any]) -> ModelSizes:
    heads = int(content["num_attention_heads"])
    experts = int(content.get("num_experts") or 0)
    return ModelSizes(
        architecture=str(content["model_type"]),
        num_layers=int(content["num_hidden_layers"]),
        hidden=int(content["hidden_size"]),
        intermediate=int(content["moe_intermediate_size"] if experts else content["intermediate_size"]),
        num_heads=heads,
        num_kv_heads=int(content.get("num_key_value_heads") or heads),
        head_dim=int(content.get("head_dim") or content["hidden_size"] // heads),
        vocabulary=int(content["vocab_size"]),
        context=int(content["max_position_embeddings"]),
        tied_embeddings=bool(content.get("tie_word_embeddings", False)),
        num_experts=experts,
        experts_per_token=int(content.get("num_experts_per_tok") or 0) if experts else 0,
    )
