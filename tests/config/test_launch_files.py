"""Launch scripts and manifests: they parse, name runs by their job, keep tokens off command lines, stop only their own."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from akl_dist.config.command_line import check_command_line
from akl_dist.config.compose import compose
from akl_dist.config.validate import validate

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted(path.name for path in LAUNCH.iterdir() if path.suffix in (".sh", ".sbatch"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(name: str) -> None:
    path = LAUNCH / name
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=20)
    text = path.read_text(encoding="utf-8")
    assert os.access(path, os.X_OK)
    assert "set -euo pipefail" in text
    assert "RAY_AUTH_MODE=token" in text and "RAY_USAGE_STATS_ENABLED=0" in text
    assert "run_id=" in text and "akl_dist.main" in text
    assert not re.search(r"pkill|killall|ray stop|\$RAY\" stop", text), "stop only what the script started, by process id"
    assert "0.0.0.0" not in text


def test_a_head_of_ones_own_shares_no_port_with_another_cluster() -> None:
    """Every port of the submitting script is a free one, the agent's (52365 unless told otherwise) as well."""
    text = (LAUNCH / "ray_job_submit.sh").read_text(encoding="utf-8")
    (start,) = re.findall(r'"\$RAY" start --head (?:.*\\\n)*.*', text)
    assert set(re.findall(r"--[a-z-]*port=\S+", start)) == {
        '--port="$GCS_PORT"', '--dashboard-port="$DASHBOARD_PORT"', "--dashboard-agent-listen-port=0"}
    assert len(re.findall(r'_PORT="\$\(free_port\)"', text)) == 2


def run_stand_in(tmp_path: Path, *arguments: str, **env: str) -> list[str]:
    """single_node.sh with a stand-in interpreter that prints its arguments, one a line."""
    stand_in = tmp_path / "my python"
    stand_in.write_text('#!/usr/bin/env bash\n[[ "$1" == -c ]] && { echo token; exit; }\n'
                        'printf "%s\\n" "$@" "$RAY_AUTH_MODE" "$RAY_AUTH_TOKEN"\n')
    stand_in.chmod(0o755)
    done = subprocess.run([str(LAUNCH / "single_node.sh"), *arguments], env={**os.environ, "PYTHON": str(stand_in), **env},
                          cwd=tmp_path, capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.splitlines()


def test_single_node(tmp_path: Path) -> None:
    shown = run_stand_in(tmp_path, "+exp=tiny", "data.path=/a (b)", RUN_ID="r1", RAY_AUTH_TOKEN="")
    assert shown[1:] == ["-m", "akl_dist.main", "+exp=tiny", "data.path=/a (b)", "cluster.address=local", "run_id=r1", "token",
                         "token"]
    shown = run_stand_in(tmp_path, "run_id=mine", "cluster.address=auto", RAY_AUTH_TOKEN="kept")
    assert shown == ["-m", "akl_dist.main", "run_id=mine", "cluster.address=auto", "token", "kept"]


def test_slurm_matches_the_large_experiment() -> None:
    text = (LAUNCH / "slurm.sbatch").read_text(encoding="utf-8")
    cluster = compose(["+exp=akl_72b"]).cluster
    assert f"#SBATCH --nodes={cluster.num_nodes}\n" in text
    assert f"#SBATCH --gpus-per-node={cluster.devices_per_node}\n" in text
    assert "#SBATCH --requeue" in text and "run_id=slurm-$SLURM_JOB_ID" in text


def test_kuberay_manifest() -> None:
    manifest = yaml.safe_load((LAUNCH / "kuberay_rayjob.yaml").read_text(encoding="utf-8"))
    spec = manifest["spec"]
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    words = spec["entrypoint"].split()
    assert words[:3] == ["python", "-m", "akl_dist.main"]
    config = compose(check_command_line(words[3:]).overrides)
    validate(config)
    assert config.run_id == spec["jobId"] and config.resume == "auto"
    cluster = spec["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == config.cluster.num_nodes
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert int(limits["nvidia.com/gpu"]) == config.cluster.devices_per_node
    assert int(limits["cpu"]) >= config.cluster.cpus_per_actor * config.cluster.devices_per_node
    for group in (cluster["headGroupSpec"], workers):
        assert group["template"]["spec"]["securityContext"]["runAsNonRoot"] is True


@pytest.mark.parametrize(("name", "extra"), [("Dockerfile.cpu", "cpu"), ("Dockerfile.cuda", "gpu")])
def test_dockerfiles(name: str, extra: str) -> None:
    lines = (ROOT / "docker" / name).read_text(encoding="utf-8").splitlines()
    assert f"RUN make install EXTRA={extra}" in lines
    users = [line for line in lines if line.startswith("USER ")]
    assert users and users[-1] != "USER root" and lines.index(users[-1]) < lines.index(f"RUN make install EXTRA={extra}")
    assert ".venv" in (ROOT / "docker" / f"{name}.dockerignore").read_text(encoding="utf-8").split()
