"""What becomes of a local cluster when its driver dies without a word."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.end_to_end.conftest import CommandLine, wait_for

pytestmark = [pytest.mark.stack, pytest.mark.timeout(120)]

DRIVER = """
import time
from akl_dist.cluster import environment
environment.prepare("local")
from akl_dist.cluster.connect import connect
connection = connect("local", num_cpus=1, object_store_mib=80, say=print)
print("up", flush=True)
{then}
"""


@pytest.mark.parametrize(("then", "by"), [("time.sleep(100)", signal.SIGKILL), ("connection.close()", None)])
def test_nothing_outlives_the_driver(tmp_path, then, by):
    line = CommandLine(tmp_path)
    with subprocess.Popen([sys.executable, "-c", DRIVER.format(then=then)], env=line.environment(), stdout=subprocess.PIPE,
                          text=True) as driver:
        assert driver.stdout is not None
        assert wait_for(lambda: "up" in driver.stdout.readline() or driver.poll() is not None, timeout_s=60)
        if by is not None:
            assert len(line.processes()) > 3, "driver, guard, servers of Ray"
            driver.send_signal(by)
        assert driver.wait(timeout=30) == (-signal.SIGKILL if by else 0)
    assert line.wait_until_gone(20) == {}
