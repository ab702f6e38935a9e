"""The command around the figures: what is evaluated, what is on file, what a kill leaves. A small stack stands for the real one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from akl_dist import evaluate, job, published
from akl_dist.bookkeeping.sample_records import SampleFile
from akl_dist.cluster.placement import evaluation_layout
from akl_dist.config.command_line import check_command_line
from akl_dist.config.compose import compose
from akl_dist.contract.errors import RunError, UserError
from akl_dist.contract.records import JudgedGroup, RolloutGroup, Sampling, Status, Verdict

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["data=tiny", "evaluate.num_problems=6", "evaluate.samples=2", "rollout.max_num_seqs=4"]


class Stack:
    """Engines and graders of plain Python: sample s of a problem is right when s is even; two problems fill a round."""

    def __init__(self, stop_after: int | None = None, stop=None, sandbox: str | None = None, last: str = "length") -> None:
        self.last = last  # finish reason of each problem's last sample
        self.rounds: list[list[str]] = []
        self.stop_after, self.stop, self.sandbox = stop_after, stop, sandbox
        self.earlier: list[int] = []
        self.streamed = 0

    def sample(self, prompts, sampling, finished):
        self.rounds.append([prompt.prompt_id for prompt in prompts])
        if self.stop_after == len(self.rounds):
            self.stop.requested = True
        size = sampling.group_size
        groups = [RolloutGroup(prompt, (5,) * size, ("stop",) * (size - 1) + (self.last,), 0, "e", None) for prompt in prompts]
        finished(groups[1:])
        return groups

    def stream(self):
        return self

    def add(self, groups):
        self.streamed += len(groups)

    def ticket(self, rollouts):
        return rollouts

    def collect(self, rollouts, earlier=()):
        self.earlier.append(len(earlier))
        size = len(rollouts[0].response_lengths)
        verdicts = tuple(Verdict(Status.OK if s % 2 == 0 else Status.WRONG) for s in range(size))
        arrays = SimpleNamespace(extracted=tuple(str(s) for s in range(size)), texts=tuple(f"text {s}\ud800" for s in range(size)))
        return [JudgedGroup(one.prompt.prompt_id, verdicts, (3,) * size, arrays) for one in rollouts]


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs the command with a stack of its own; everything but Ray is the real thing."""

    def run(*arguments: str, stack: Stack | None = None) -> int:
        made = stack or Stack()

        def start(self, model, shutdown):
            made.stop = self.stop
            self.sandbox = job.sandbox_of([{"grader_pids": [1], "isolation": made.sandbox}, 5])
            return made, made, Sampling(self.config.evaluate.samples, 1.0, 8, (1,), ("evaluate", 0))

        monkeypatch.setattr(evaluate._Evaluation, "_start", start)
        return evaluate.main([*SMALL, f"output_dir={tmp_path}", "run_id=r", *arguments])

    monkeypatch.setattr("akl_dist.cluster.environment.prepare", lambda address: None)
    monkeypatch.setattr("akl_dist.evaluate._missing", lambda config: [])
    return run


def test_whole_evaluation(command, tmp_path, capsys):
    stack = Stack()
    assert command(stack=stack) == 0
    assert [len(ids) for ids in stack.rounds] == [2, 2, 2], "as many problems as fill the engines"
    result = json.loads((tmp_path / "evaluate/r/evaluation.json").read_text())
    one = result["benchmarks"]["tiny"]
    assert (one["problems"], one["samples"], one["avg_at_k"]["mean"], one["pass_at_k"]["2"]["mean"]) == (6, 2, 0.5, 1.0)
    assert (one["maj_at_k"]["mean"], one["truncated_fraction"]) == (0.5, 0.5)
    assert result["sampling"]["samples"] == 2 and result["prompt"]["instruction"] == "none" and result["data"]["used"] == 6
    out = capsys.readouterr().out
    assert "avg@k (%)" in out and "50.0 +- 0.0" in out
    assert "50 % of the responses on tiny end at the limit" in out
    assert "published scores: none on file for tiny" in out
    assert (result["published"], result["sandbox"]) == ({"tiny": None}, None) and "UNSANDBOXED" not in out
    assert stack.earlier == [0, 2, 4], "the share of faults is that of the whole evaluation"


def test_a_published_score_is_held_against_ours(command, tmp_path, capsys, monkeypatch):
    """50 % of 6 problems (no spread) against 58.0 % of 100 greedy answers: -8 points, sqrt(.58 * .42 / 100) = 4.9."""
    protocol = published.Protocol(samples=1, temperature=0.0, problems=100)
    there = published.PublishedScore("tiny", "tiny", 58.0, "accuracy", "A Report, Table 1", protocol)
    monkeypatch.setattr(published, "published_scores", lambda: (there,))
    assert command() == 0
    one = json.loads((tmp_path / "evaluate/r/evaluation.json").read_text())["published"]["tiny"]
    assert (one["difference"], one["ours"]) == (-8.0, 50.0) and one["z"] == pytest.approx(-8 / 4.9356, rel=1e-4)
    assert {"problems": {"here": 6, "there": 100}, "samples": {"here": 2, "there": 1}}.items() <= one["differs"].items()
    assert {"prompt", "shots", "max_tokens"} <= set(one["not_stated"])
    assert "tiny: published 58.0 % (accuracy; A Report, Table 1), ours 50.0 % (avg@2): difference -8.0 +- 4.9 points" in " ".join(
        capsys.readouterr().out.split()), "4.9 is the error of the difference, not of ours"


def test_a_source_with_a_limit_of_its_own(command, tmp_path, capsys):
    """Half of the responses end at the limit; the advice names the limit that held, and the result holds each benchmark's."""
    assert command("data.recipe=mixture", "data.mixture={tiny: {max_response_tokens: 7}, multi_solution: {}}") == 0
    said = capsys.readouterr().out
    assert "50 % of the responses on tiny end at the limit of 7 tokens" in said
    assert "raise max_response_tokens of its source in data.mixture" in said
    assert "on multi_solution end at the limit of 64 tokens and count as no answer: raise rollout.max_response_tokens." in said
    found = json.loads((tmp_path / "evaluate" / "r" / "evaluation.json").read_text())
    assert found["sampling"]["max_response_tokens_of"] == {"tiny": 7, "multi_solution": 64}


TOOLS = ("model.path=tiny_tir", "data=tiny_tir", "rollout.tools.environment=python", "rollout.tools.max_turns=3",
         "rollout.tools.role=user", "rollout.tools.max_observation_tokens=8")


@pytest.mark.parametrize(("last", "arguments", "said"), [
    ("turns", (), "on tiny_tir want more answers of the environment than the 3 they may have and count as no answer: raise "
     "rollout.tools.max_turns."),
    ("length", (), "on tiny_tir end at the limit of 64 tokens and count as no answer: raise rollout.max_response_tokens."),
    ("length", ("rollout.tools.max_turn_tokens=20",), "on tiny_tir end at a limit, 64 tokens or 20 in one turn, and count as no "
     "answer: raise rollout.max_response_tokens or rollout.tools.max_turn_tokens."),
    ("turns", ("verify.kind=custom", "verify.custom=json:dumps"), "on tiny_tir want more answers of the environment than the 3 "
     "they may have: raise rollout.tools.max_turns."),
])
def test_the_advice_names_what_ended_the_responses(command, capsys, monkeypatch, last, arguments, said):
    """Half of the responses did not end by themselves, all for one reason; also in what another attempt reads from the file."""
    monkeypatch.setattr(evaluate, "check_rewards", lambda config: None)
    stack = Stack(stop_after=1, last=last)
    assert command(*TOOLS, *arguments, stack=stack) == 143
    assert command(*TOOLS, *arguments, stack=Stack(last=last)) == 0
    warned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ") and "responses on" in line]
    assert warned == [f"warning: 50 % of the responses {said}"], "one cause, one warning"


def test_without_a_sandbox_everybody_is_told(command, tmp_path, capsys):
    """In words everywhere, in red on a terminal alone; and still in the result when another attempt ends the evaluation."""
    assert command(stack=Stack(stop_after=2, sandbox="none")) == 143
    out = capsys.readouterr().out
    assert "UNSANDBOXED" in out and "\x1b" not in out
    assert command(stack=Stack(sandbox="root")) == 0
    assert "UNSANDBOXED" not in capsys.readouterr().out
    result = tmp_path / "evaluate/r/evaluation.json"
    assert json.loads(result.read_text())["sandbox"] == "none", "part of it ran without"
    for path in (tmp_path / "evaluate/r").iterdir():
        assert path.is_dir() or b"\x1b" not in path.read_bytes()


def test_goes_on_after_an_interruption(command, tmp_path, capsys):
    """SIGTERM in the second round: that round is kept, no result is written; the second call samples only what is left."""
    first, second = Stack(stop_after=2), Stack()
    assert command(stack=first) == 143
    assert not (tmp_path / "evaluate/r/evaluation.json").exists()
    assert "run_id=r goes on" in capsys.readouterr().out
    assert command(stack=second) == 0
    assert len(second.rounds) == 1
    ids = [problem for round_ in first.rounds + second.rounds for problem in round_]
    assert len(ids) == len(set(ids)) == 6
    third = Stack()
    assert command(stack=third) == 0 and third.rounds == [], "a finished evaluation prints its result again"


def test_other_settings_are_never_mixed_in(command, capsys):
    assert command(stack=Stack(stop_after=1)) == 143
    assert command("evaluate.samples=3") == 2
    assert "samples taken with other evaluate.samples" in capsys.readouterr().err
    assert command("rollout.temperature=0.5") == 2
    assert command("evaluate.num_problems=7") == 2, "other problems"
    assert command("cluster.start_timeout_s=10") == 0, "how it runs is no part of what is sampled"


def test_missing_samples_are_an_error(command, tmp_path, capsys):
    assert command(stack=Stack()) == 0
    (tmp_path / "evaluate/r/evaluation.json").unlink()
    file = tmp_path / "evaluate/r/samples.jsonl"
    lines = file.read_text().splitlines()
    row = json.loads(lines[1])
    row["samples"].pop()
    file.write_text("\n".join([lines[0], json.dumps(row), *lines[2:]]) + "\n")
    assert command() == 1
    assert "1 missing" in capsys.readouterr().err and not (tmp_path / "evaluate/r/evaluation.json").exists()


def test_mistakes(command, capsys):
    for arguments, message in (
        (["-m", "seed=1,2"], "one evaluation a command"),
        (["evaluate.sample=8"], "evaluate.samples"),
        (["evaluate.num_problems=0"], "at least 1, or null"),
        (["data=nope"], "data"),
        (["data=generic"], "data.eval_path: got null; expected a file"),
        (["data=math500", "data.eval_path=/nowhere.jsonl"], "data.eval_path"),
        (["+exp=tiny_tir", "rollout.tools.environment=no_such:Chess", "verify.kind=environment"], "no module named 'no_such'"),
    ):
        assert evaluate.main(arguments) == 2
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error


def test_debug_raises(command):
    with pytest.raises(UserError):
        evaluate.main(["evaluate.num_problems=0", "debug=true"])


def test_whole_benchmarks_unless_asked_otherwise():
    def problems(*arguments):
        command = check_command_line([*arguments, "model.path=Qwen/Qwen2.5-0.5B-Instruct"])
        return evaluate.configuration(command).evaluate.num_problems

    assert problems("data=gsm8k") is None
    assert problems("data=aime24", "rollout.max_response_tokens=4096") is None, "the learner's token budget does not matter here"
    assert problems("data=gsm8k", "evaluate.num_problems=100") == 100
    assert problems("data=gsm8k", "evaluate.num_problems=null") is None
    assert problems("data=tiny", "data.max_prompt_tokens=64") == 256


def test_layout_holds_engines_and_graders_alone():
    config = compose(["rollout.num_engines=3", "verify.num_workers=2", "learner.num_ranks=8"])
    plan = evaluation_layout(config)
    assert sorted({actor.role for actor in plan.actors}) == ["rollout", "verify"]
    assert (len(plan.bundles), len(plan.of("rollout")), plan.demand["CPU"]) == (3, 3, 3.0)


def test_sample_file(tmp_path):
    path, identity = tmp_path / "s.jsonl", {"model": "m"}
    sample = {"status": "ok", "extracted": None, "tokens": 3, "truncated": False, "answer_span_tokens": 0, "text": "\ud800",
              "sandbox": "root"}
    file = SampleFile(path, identity=identity, votes={"b"})
    file.append({"benchmark": "b", "problem_id": "p", "samples": [sample, sample]})
    whole = path.read_bytes()
    for cut in range(1, len(whole) - whole.index(b"\n") - 1):  # killed anywhere in the second line
        path.write_bytes(whole[:-cut])
        again = SampleFile(path, identity=identity, votes={"b"})
        assert (again.records, path.read_bytes().count(b"\n")) == ([], 1)
    path.write_bytes(whole)
    again = SampleFile(path, identity=identity, votes={"b"})
    assert again.records == file.records and again.done == {"p"} and again.sandboxes == {"root"}
    assert all(record.votes for record in again.records)
    assert not any(record.votes for record in SampleFile(path, identity=identity, votes={"another"}).records)
    with pytest.raises(UserError, match="other model"):
        SampleFile(path, identity={"model": "n"}, votes={"b"})
    path.write_bytes(whole.replace(b'"ok"', b'"fine"', 1))
    with pytest.raises(RunError, match=r"damaged file \(line 2"):
        SampleFile(path, identity=identity, votes={"b"})
    path.write_bytes(whole[:5] + b"\n" + whole)
    with pytest.raises(RunError, match="damaged"):
        SampleFile(path, identity=identity, votes={"b"})


def test_help_is_light():
    code = ("import sys; from akl_dist.evaluate import main; assert main(['--help']) == 0; "
            "print([m for m in ('torch', 'ray', 'vllm', 'transformers', 'datasets') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "example: python -m akl_dist.evaluate model.path=DIR" in done.stdout and done.stdout.strip().endswith("[]")


@pytest.mark.stack
def test_on_the_real_stack_with_a_kill(tmp_path):
    """Killed with SIGKILL between rounds and started again: the samples are those of an evaluation that was not."""
    line = [sys.executable, "-m", "akl_dist.evaluate", "data=tiny", "evaluate.samples=2", "evaluate.num_problems=24",
            "rollout.max_num_seqs=8", "cluster.address=local", "cluster.object_store_mib=200", f"output_dir={tmp_path}"]
    dropped = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS")
    env = {**{k: v for k, v in os.environ.items() if k not in dropped}, "PYTHONPATH": str(ROOT)}
    whole = subprocess.run([*line, "run_id=whole"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    process = subprocess.Popen([*line, "run_id=cut"], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for printed in process.stdout:
        if " of 24 problems" in printed:
            break
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    assert not (tmp_path / "evaluate/cut/evaluation.json").exists()
    again = subprocess.run([*line, "run_id=cut"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "problems are on file" in again.stdout
    files = [(tmp_path / f"evaluate/{name}/samples.jsonl").read_bytes() for name in ("whole", "cut")]
    assert files[0] == files[1]
    results = [json.loads((tmp_path / f"evaluate/{name}/evaluation.json").read_text()) for name in ("whole", "cut")]
    assert results[0] == results[1]
