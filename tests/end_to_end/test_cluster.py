"""Not only local: a job submitted to a running cluster with token authentication, and a sweep."""

from __future__ import annotations

import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.conftest import SMALL, CommandLine, untimed, wait_for

pytestmark = [pytest.mark.end_to_end, pytest.mark.stack, pytest.mark.timeout(600)]

RAY = str(Path(sys.executable).with_name("ray"))
ON_CLUSTER = [argument for argument in SMALL if not argument.startswith("cluster.")]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


needs_plain_path = pytest.mark.skipif(
    shlex.quote(sys.executable) != sys.executable,
    reason="Ray starts job supervisors through a shell line with the interpreter's path unquoted: no job runs from such a folder")


@pytest.fixture
def head(command_line: CommandLine) -> Iterator[dict[str, str]]:
    """A Ray head of this test's own, on localhost, with a token; yields the environment of a client."""
    port, dashboard = free_port(), free_port()
    environment = {**command_line.environment(), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32),
                   "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}"}
    with tempfile.TemporaryDirectory(prefix="akl_ray_", dir="/tmp") as folder:  # short: Unix sockets have a limit on paths
        process = subprocess.Popen(
            [RAY, "start", "--head", "--block", f"--port={port}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}",
             "--dashboard-agent-listen-port=0",  # the default is one port, which another cluster on the machine may hold
             f"--temp-dir={folder}", "--num-cpus=2", f"--object-store-memory={200 * 2**20}"],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        try:
            assert wait_for(lambda: takes_jobs(environment), timeout_s=90, every_s=1.0), "the head did not start"
            yield environment
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)
    assert command_line.wait_until_gone() == {}


def answers(environment: dict[str, str]) -> bool:
    done = subprocess.run([RAY, "job", "list"], env=environment, capture_output=True, timeout=60, check=False)
    return done.returncode == 0


def takes_jobs(environment: dict[str, str]) -> bool:
    """The list of jobs is served some seconds before the agent that runs them is there."""
    done = subprocess.run([RAY, "job", "submit", "--", "true"], env=environment, capture_output=True, timeout=60, check=False)
    return done.returncode == 0


@needs_plain_path
def test_a_job_on_a_running_cluster(command_line, head):
    """``ray job submit -- python -m akl_dist.main +exp=tiny``: finishes, and leaves the cluster and no actor behind."""
    submitted = subprocess.run(
        [RAY, "job", "submit", "--", sys.executable, "-m", "akl_dist.main", *ON_CLUSTER, "steps=1", "run_id=job",
         f"output_dir={command_line.folder}/outputs"],
        env=head, capture_output=True, text=True, timeout=240, check=False)
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    assert "it will not be stopped" in submitted.stdout
    assert command_line.result("job")["status"] == "finished"
    assert answers(head), "a cluster that the run did not start is still there"
    assert wait_for(lambda: not [t for t in command_line.processes().values() if t.startswith("ray::") and "Actor" in t
                                 and "JobSupervisor" not in t], timeout_s=30), command_line.processes()


@needs_plain_path
def test_without_the_token_nothing_joins(command_line, head):
    """The head refuses a client that has no token, with a message that says what to set."""
    address = subprocess.run([RAY, "job", "list"], env=head, capture_output=True, timeout=60, check=False)
    assert address.returncode == 0
    stranger = {**head, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    assert not answers(stranger)


def test_a_sweep_over_seeds(command_line):
    """``-m seed=0,1``: both jobs run, each in a directory of its own, and differ only by the seed."""
    done = command_line.run(*SMALL, "-m", "seed=0,1", "steps=1", "run_id=seeds")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [command_line.metrics(f"multirun-seeds/{job}") for job in (0, 1)]
    assert [len(row) for row in rows] == [1, 1] and untimed(rows[0]) != untimed(rows[1])
    assert command_line.wait_until_gone() == {}
