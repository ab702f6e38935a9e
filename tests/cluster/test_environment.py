"""Which cluster is meant, without Ray: addresses, stale files, tokens."""

from __future__ import annotations

import io
import socket
import time

import pytest

from akl_dist.bookkeeping.console import printable
from akl_dist.cluster import environment


@pytest.fixture
def listening():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def clean(monkeypatch, tmp_path):
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(environment, "CURRENT_CLUSTER", tmp_path / "ray_current_cluster")
    return tmp_path / "ray_current_cluster"


def test_reachable(listening):
    assert environment.reachable(listening)
    begin = time.monotonic()
    for address in ("127.0.0.1:1", "nonsense", "localhost:99999"):
        assert not environment.reachable(address)
    assert time.monotonic() - begin < 20


def test_addresses(clean, monkeypatch, listening):
    assert environment.resolve_address("local") is None and environment.resolve_address("10.0.0.1:6379") == "10.0.0.1:6379"
    assert environment.resolve_address("auto") is None, "no cluster of ours runs"
    clean.write_text(listening + "\n")
    assert environment.resolve_address("auto") == listening
    clean.write_text("127.0.0.1:1\n")
    assert environment.resolve_address("auto") is None, "the file outlived its cluster"
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    assert environment.resolve_address("auto") == "127.0.0.1:6379"
    assert environment.resolve_address("local") is None


def test_a_cluster_of_our_own_gets_a_token_and_the_users_stays(clean, monkeypatch):
    environment.prepare("local")
    import os

    assert os.environ["RAY_AUTH_MODE"] == "token" and len(os.environ["RAY_AUTH_TOKEN"]) == 64
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    environment.prepare("local")
    assert os.environ["RAY_AUTH_TOKEN"] == "mine"


def test_no_token_is_made_for_somebody_elses_cluster(clean, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    environment.prepare("auto")
    import os

    assert "RAY_AUTH_TOKEN" not in os.environ


def test_text_for_a_terminal_that_knows_only_ascii():
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert printable("café", ascii_only) == "caf\\xe9"
