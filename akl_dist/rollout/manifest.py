"""The parameters that a weight update must bring, read from a checkpoint's own headers. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from akl_dist.contract.errors import ModelError
from akl_dist.contract.records import ParameterInfo

SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def parameter_manifest(model_path: str) -> list[ParameterInfo]:
    """Names, full shapes and dtypes that a weight update must bring, from the headers of the safetensors files.

    The names are those the engine's loader knows. A model with tied embeddings gets an explicit ``lm_head.weight``:
    the engine keeps the head apart from the embedding while it reloads, and would silently leave it at its old values.
    """
    folder = Path(model_path)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(
            f"model folder {model_path}",
            got="no *.safetensors file",
            expected="a safetensors checkpoint",
            remedy="Download or convert the model first; other weight formats are not read.",
            stage="rollout",
        )
    parameters = [parameter for file in files for parameter in _header(file)]
    names = {parameter.name for parameter in parameters}
    if _is_tied(folder) and "lm_head.weight" not in names:
        embedding = next((p for p in parameters if p.name.endswith("embed_tokens.weight")), None)
        if embedding is None:
            raise ModelError(
                f"model folder {model_path}",
                got="tied embeddings without embed_tokens.weight",
                expected="a decoder-only language model",
                remedy="Use another architecture.",
                stage="rollout",
            )
        parameters.append(ParameterInfo("lm_head.weight", embedding.shape, embedding.dtype))
    return parameters


def _is_tied(folder: Path) -> bool:
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(
            str(path),
            got="no such file",
            expected="the model's configuration",
            stage="rollout",
            remedy="Copy the whole model folder.",
        )
    return bool(json.loads(path.read_text(encoding="utf-8")).get("tie_word_embeddings", False))


def _header(file: Path) -> Iterable[ParameterInfo]:
    """Entries of a safetensors file: 8 bytes of header length (little endian), then the header as JSON."""
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    for name, entry in header.items():
        if name != "__metadata__":
            yield ParameterInfo(name, tuple(entry["shape"]), SAFETENSORS_DTYPES.get(str(entry["dtype"]), str(entry["dtype"])))
