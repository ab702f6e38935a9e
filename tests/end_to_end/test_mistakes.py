"""A user's mistake: one clear error, exit code 2, result.json with the failure, and nothing started."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import akl_dist

pytestmark = pytest.mark.end_to_end


def rows(path, *objects):
    path.write_text("".join(json.dumps(o) + "\n" for o in objects))
    return str(path)


CASES = {
    "missing model directory": (["model.path=./nowhere"], "missing model directory"),
    "unknown data set": (["data.recipe=gsm9k"], "gsm8k"),
    "missing data file": (["data=gsm8k", "data.path=./none.jsonl"], "none.jsonl"),
    "batch sizes that do not divide": (["rollout.prompts_per_step=9", "learner.updates_per_step=2"], "rollout.prompts_per_step"),
    "two problems at once": (["rollout.temperature=-1", "learner.lr=-1"], "learner.lr"),
}


@pytest.mark.parametrize("name", CASES)
def test_configuration_mistakes(command_line, name):
    overrides, word = CASES[name]
    done = command_line.run("+exp=tiny", "run_id=x", *overrides, timeout_s=60)
    assert done.returncode == 2, done.stderr
    assert word in done.stderr and "Traceback" not in done.stderr
    result = command_line.result("x")
    assert result["status"] == "failed" and word in result["first_failure"]["message"]
    assert command_line.processes() == {}


def test_incomplete_weights_are_found_before_anything_starts(command_line, tmp_path):
    """A download that broke off: said in a second, by a dry run too."""
    embedded = Path(akl_dist.__file__).parent / "tiny/model"
    folder = shutil.copytree(embedded, tmp_path / "cut short")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for more in ((), ("dry_run=true",)):
        done = command_line.run("+exp=tiny", "run_id=x", f"model.path={folder}", *more, timeout_s=60)
        assert done.returncode == 2 and "model.path" in done.stderr and "Traceback" not in done.stderr, done.stderr
        assert "starting" not in done.stdout
    assert command_line.result("x")["first_failure"]["stage"] == "config"


def test_data_mistakes(command_line, tmp_path):
    good = {"question": "1+1?", "answer": "so #### 2"}
    for name, path, word in (
        ("column", rows(tmp_path / "column.jsonl", {"problem": "1+1?", "answer": "#### 2"}), "question"),
        ("empty", rows(tmp_path / "empty.jsonl"), "empty.jsonl"),
        ("answer", rows(tmp_path / "answer.jsonl", good, {"question": "2+2?", "answer": "four"}), "answer.jsonl"),
    ):
        done = command_line.run("data=gsm8k", f"data.path={path}", "data.max_prompt_tokens=64", f"run_id={name}", timeout_s=60)
        assert done.returncode == 2, (name, done.stderr)
        assert word in done.stderr and "Traceback" not in done.stderr
        assert command_line.result(name, "default")["first_failure"]["stage"] == "data"


def test_more_ranks_than_cpus(command_line):
    done = command_line.run("+exp=tiny", "cluster.address=local", "cluster.num_cpus=2", "learner.num_ranks=4", "run_id=x",
                            timeout_s=60)
    assert done.returncode != 0 and "learner: needs 4 CPUs, the cluster has 2" in done.stderr
    assert command_line.result("x")["first_failure"]["stage"] == "cluster"
    assert command_line.wait_until_gone() == {}


@pytest.mark.parametrize("key", ["rollout.kv_cache_gib", "cluster.object_store_mib"])
def test_more_memory_than_there_is(command_line, key):
    done = command_line.run("+exp=tiny", "cluster.address=local", f"{key}=10000000", "run_id=x", timeout_s=60)
    assert done.returncode == 1 and f"{key}=1" in done.stderr and "GiB" in done.stderr and "Traceback" not in done.stderr
    assert "starting" not in done.stdout and command_line.wait_until_gone() == {}
    planned = command_line.run("+exp=tiny", "cluster.address=local", f"{key}=10000000", "dry_run=true", timeout_s=60)
    assert planned.returncode == 0 and f"{key}=1" in planned.stdout


def test_misspelt_keys_get_the_nearest_valid_one(command_line):
    done = command_line.run("+exp=tiny", "learner.lrr=1", "+steps=3", timeout_s=60)
    assert done.returncode == 2 and "learner.lr" in done.stderr and "steps" in done.stderr


def test_help_and_dry_run(command_line):
    shown = command_line.run("--help", timeout_s=60)
    assert shown.returncode == 0 and "+exp=tiny" in shown.stdout and "learner.lr" in shown.stdout
    planned = command_line.run("+exp=akl_72b", "dry_run=true", timeout_s=60)
    assert planned.returncode == 0, planned.stderr
    assert "128 GPUs" in planned.stdout and "this machine lacks" in planned.stdout and "samples" in planned.stdout
    assert not (command_line.folder / "outputs").exists()


@pytest.mark.parametrize(("overrides", "word"), [
    (["output_dir=/proc/nowhere"], "output_dir"),
    (["cluster.address=127.0.0.1:1"], "nothing answers at 127.0.0.1:1"),
])
def test_places_that_do_not_work(command_line, overrides, word):
    """A folder that cannot be written, a cluster that is not there: one message, soon."""
    done = command_line.run("+exp=tiny", "run_id=x", *overrides, timeout_s=60)
    assert done.returncode in (1, 2) and word in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.count("error") == 1, done.stderr
    assert command_line.wait_until_gone() == {}
