"""Where a model's files are: the embedded model, a local folder, or a hub snapshot in the cache."""

from __future__ import annotations

from pathlib import Path

from akl_dist.config import models
from akl_dist.contract.errors import ModelError

WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


def model_folder(path: str) -> Path:
    """The folder with config, tokenizer and safetensors weights of ``model.path``.

    A hub name is fetched into the cache (``HF_HOME``; on several nodes it must be on a shared file system). Only
    configuration, tokenizer and safetensors files are fetched: no code, no pickles.

    Raises:
        ModelError: a missing folder, or a hub model that cannot be fetched.
    """
    if models.looks_local(path):
        models.sizes(path)  # names a missing or unreadable folder
        return Path(models.resolve(path))
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(huggingface_hub.snapshot_download(path, allow_patterns=WANTED))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError, ValueError) as error:
        words = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            "model.path", got=f"{path}: {words[0]}", expected="a local folder, or a hub model that can be fetched",
            remedy="Check the name and the network, or set model.path=FOLDER of a downloaded copy.", stage="data",
        ) from error
