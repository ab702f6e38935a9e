"""Shared fixtures: one local Ray cluster per session that needs it, and quiet defaults for every process started here."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import pytest

for key, value in {
    "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
}.items():
    os.environ.setdefault(key, value)
# Ray reads these when it is first imported, so they are set here and not in the fixture.
os.environ.pop("RAY_ADDRESS", None)
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


ALONE = ("end_to_end", "evaluation", "test_verify_leaks.py")
"""Folders and files whose tests use the whole machine, or count what is left on it."""


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which need not be there
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several test processes the tests of ``ALONE`` run one after another in one of them; other files go to any, whole.
    (The groups of pytest-xdist 3.8 do not work with the node ids of pytest 9.2.)"""
    from xdist.scheduler import LoadScopeScheduling

    class WholeFiles(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = Path(nodeid.partition("::")[0])
            return "alone" if set(file.parts) & set(ALONE) else file.as_posix()

    return WholeFiles(config, log)


@pytest.fixture(scope="module")
def local_ray():
    """A small Ray cluster of this module's own, with a token that no file holds; stopped afterwards."""
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200 * 2**20)
    yield ray
    ray.shutdown()


@pytest.fixture
def published() -> Path:
    """Folder with the published data files, where a checkout has one."""
    for folder in (os.environ.get("AKL_SHARED"), *(p / "shared" for p in Path(__file__).resolve().parents[1:3])):
        if folder and (Path(folder) / "data" / "gsm8k_train.jsonl").is_file():
            return Path(folder) / "data"
    pytest.skip("no published data files: set AKL_SHARED to a folder that holds data/gsm8k_train.jsonl")
