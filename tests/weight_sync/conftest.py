from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))  # engine_models
