"""Environment of actors, without a cluster."""

from __future__ import annotations

import shlex
import subprocess

from akl_dist.cluster.reserve import quoted_interpreter, thread_environment


def test_an_interpreter_whose_path_a_shell_would_split():
    assert quoted_interpreter("/usr/bin/python3") == {}
    quoted = quoted_interpreter("/a folder/.venv/bin/python")["py_executable"]
    echoed = subprocess.run(["bash", "-c", f"printf %s {quoted}"], capture_output=True, text=True, timeout=30, check=True)
    assert echoed.stdout == "/a folder/.venv/bin/python" and shlex.split(quoted) == ["/a folder/.venv/bin/python"]


def test_threads_are_set_and_secrets_stay_behind(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("HF_HOME", "/cache")
    environment = thread_environment(3)
    assert environment["OMP_NUM_THREADS"] == "3" == environment["MKL_NUM_THREADS"]
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE" and environment["HF_HOME"] == "/cache"
    assert "secret" not in environment.values()
