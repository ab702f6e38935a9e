"""``python -m akl_dist.score`` as a user runs it, and its parts. Rows share processes, since graders take seconds to start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akl_dist import score
from akl_dist.contract.errors import UserError
from akl_dist.contract.records import Status, Verdict
from akl_dist.verify.rows import judge

DATA = Path(__file__).parent / "data"
ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, cwd: Path, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "akl_dist.score", *arguments], cwd=cwd, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=timeout_s, check=False)


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, *lines: str | dict | bytes) -> Path:
    texts = [json.dumps(line) if isinstance(line, dict) else line for line in lines]
    encoded = [text if isinstance(text, bytes) else text.encode() for text in texts]
    path.write_bytes(b"".join(line + b"\n" for line in encoded))
    return path


def test_math_cases(tmp_path):
    done = run("verifier=math", f"input={DATA / 'math_cases.jsonl'}", "output=out.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    before, after = rows_of(DATA / "math_cases.jsonl"), rows_of(tmp_path / "out.jsonl")
    assert [{**row, **{k: out[k] for k in ("status", "correct", "extracted", "reason")}} for row, out in
            zip(before, after, strict=True)] == after, "the input row, in order, plus four columns"
    assert [row["id"] for row in after if bool(row["correct"]) is not row["expected"]] == []
    assert not [row for row in after if row["status"] in ("timeout", "error")]


def test_text_cases(tmp_path):
    done = run("verifier=extract", f"input={DATA / 'text_cases.jsonl'}", "output=out.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    after = rows_of(tmp_path / "out.jsonl")
    assert len(after) == 41
    assert [row["id"] for row in after if row["extracted"] != row["expected_answer_or_null"]] == []
    assert all((row["status"] == "no_answer") is (row["extracted"] is None) for row in after)


def test_code_rows(tmp_path):
    """Rows of each prompt style, right and wrong, and malformed ones between them."""
    from akl_dist.sandbox.client import Sandbox, SandboxFault

    try:
        Sandbox().close()
    except SandboxFault:
        pytest.skip("this machine allows no isolation")
    cases = rows_of(DATA / "code_cases.jsonl")
    chosen = [next(row for row in cases if row["prompt_style"] == style and row["expected"] is expected)
              for style in ("instruct_function", "humaneval_completion", "stdin_program") for expected in (True, False)]
    write(tmp_path / "in.jsonl", *chosen, {"id": "x", "completion": "pass"}, {**chosen[0], "tests": {}}, "[]")
    done = run("verifier=code", "input=in.jsonl", "output=out.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    out = rows_of(tmp_path / "out.jsonl")
    assert [row["correct"] for row in out[:6]] == [row["expected"] for row in chosen]
    assert [row["status"] for row in out[6:]] == ["error", "invalid_gold", "error"]


def test_whatever_the_rows_hold(tmp_path):
    """Malformed rows, odd values and a path full of what shells, globs and Hydra read: one row each, in order, exit 0."""
    folder = tmp_path / "a b'\"=,[x]{y} $z*ü"
    folder.mkdir()
    deep = '{"gold": "1", "answer_text": "1", "x": ' + "[" * 5000 + "]" * 5000 + "}"
    lines = [
        {"id": 1, "gold": "7", "answer_text": "7.0"},
        "not json",
        {"id": 3, "gold": 0.5, "answer_text": "1/2"},
        b'{"gold": "\xff", "answer_text": "1"}',
        '["gold", "1"]',
        {"id": 6, "gold": "7"},
        "",
        {"id": 7, "answer_text": "7"},
        {"id": 8, "gold": "7", "answer_text": ["7"]},
        {"id": 9, "gold": None, "answer_text": "7"},
        {"id": 10, "gold": "7", "answer_text": None},
        {"id": 11, "gold": "7", "answer_text": None, "response": "\\boxed{7}"},
        {"id": 12, "gold": "7", "response": "\\boxed{7}", "truncated": True},
        {"id": 13, "gold": "7", "response": "\\boxed{7}", "truncated": "yes"},
        {"id": 14, "gold": "\ud800", "answer_text": "\ud800"},
        '{"id": 15, "gold": NaN, "answer_text": "1"}',
        '{"id": 16, "gold": 1e999, "answer_text": "1"}',
        deep,
        {"id": 18, "gold": "7", "answer_text": "7", "status": "mine", "verdict": {"nested": [1, None]}},
        {"id": 19, "gold": "3", "response": 5},
        {"id": 20, "gold": True, "answer_text": "1"},
        '{"id": 21, "gold": "7", "answer_text": "7\u2028"}',
        "",
        " \t",
    ]
    write(folder / "in=1.jsonl", *lines)
    done = run("verifier=math", f"input={folder}/in=1.jsonl", f"output={folder}/out=1.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    out = rows_of(folder / "out=1.jsonl")
    assert (out.pop(6)["reason"], len(out)) == ("malformed row: a blank line", 21)
    assert [row["status"] for row in out] == [
        "ok", "error", "ok", "error", "error", "error", "error", "error", "invalid_gold", "no_answer", "ok", "no_answer", "error",
        "invalid_gold", "error", "error", "error", "ok", "error", "invalid_gold", "ok"]
    assert all(row["correct"] is {"ok": True, "no_answer": False}.get(row["status"]) for row in out)
    assert (out[1]["input"], out[1]["line"]) == ("not json", 2)
    assert "no column gold" in out[6]["reason"] and "list" in out[7]["reason"] and "truncated is str" in out[12]["reason"]
    assert out[17]["verdict"] == {"nested": [1, None]} and out[17]["status"] == "ok"
    assert sorted(p.name for p in folder.iterdir()) == ["in=1.jsonl", "out=1.jsonl"]


def test_hostile_rows_cost_their_limit_and_no_more(tmp_path, monkeypatch):
    """A judgement that never ends is a timeout, one that kills its process an error; the rows around them are judged."""
    module = tmp_path / "hostile_rows.py"
    module.write_text(
        "import os, time\nfrom akl_dist.verify.rows import judge as real\n"
        "def judge(*, verifier, fields):\n"
        "    if fields['answer_text'] == 'hang': time.sleep(600)\n"
        "    if fields['answer_text'] == 'die': os._exit(9)\n"
        "    return real(verifier=verifier, fields=fields)\n")
    monkeypatch.setattr(score, "ROW_JUDGE", "hostile_rows:judge")
    spawned = score.GraderPool

    def with_path(**options):
        return spawned(**options, environment={"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"})

    def plain_probes(**options):
        return with_path(**{**options, "probes": ()})

    monkeypatch.setattr(score, "GraderPool", plain_probes)
    answers = ["7", "hang", "7", "die", "8", "7"]
    write(tmp_path / "in.jsonl", *({"gold": "7", "answer_text": answer} for answer in answers))
    start = time.monotonic()
    code = score.main(["verifier=math", f"input={tmp_path / 'in.jsonl'}", f"output={tmp_path / 'out.jsonl'}", "timeout_s=1"])
    assert code == 0 and time.monotonic() - start < 60
    assert [row["status"] for row in rows_of(tmp_path / "out.jsonl")] == ["ok", "timeout", "ok", "error", "wrong", "ok"]


@pytest.mark.parametrize(("arguments", "message"), [
    (["verifier=maths", "input=in", "output=out"], "verifier: got 'maths'.*Write verifier=math"),
    (["verifer=math", "input=in", "output=out"], "an unknown argument.*Write verifier="),
    (["math", "in", "out"], "without '='"),
    (["verifier=math", "input=in"], "output: got nothing"),
    (["verifier=math", "input=in", "output="], "output: got nothing"),
    (["verifier=math", "input=in", "input=in", "output=out"], "two values"),
    (["verifier=math", "input=in", "output=out", "timeout_s=-1"], "timeout_s: got '-1'"),
    (["verifier=math", "input=in", "output=out", "workers=1.5"], "workers: got '1.5'"),
    (["verifier=math", "input=in", "output=out", "debug=yes"], "debug: got 'yes'"),
])
def test_mistakes_on_the_command_line(arguments, message):
    with pytest.raises(UserError, match=message):
        score.parse(arguments)


def test_files_that_cannot_be_used(tmp_path, capsys):
    """Exit 2, one readable message, no graders started, no file left behind."""
    good = write(tmp_path / "in.jsonl", {"gold": "1", "answer_text": "1"})
    out = tmp_path / "out.jsonl"
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for source, target in ((tmp_path / "nowhere.jsonl", out), (tmp_path, out), (good, tmp_path / "none" / "out"), (good, tmp_path),
                           (good, good), (good, Path(os.devnull)), (good, loop), (loop, out)):
        assert score.main(["verifier=math", f"input={source}", f"output={target}"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and "Traceback" not in error and "expected" in error
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "loop"]
    assert good.read_text().count("\n") == 1, "the input is never overwritten"


class _Judges:
    def __init__(self, fail: bool = False) -> None:
        self.fail, self.closed = fail, False

    def judge(self, rows):
        if self.fail:
            raise KeyboardInterrupt
        return [Verdict(Status.OK) for _ in rows]

    def close(self):
        self.closed = True


def test_written_whole_or_not_at_all(tmp_path, monkeypatch):
    write(tmp_path / "in.jsonl", *({"id": n} for n in range(score.CHUNK_ROWS + 1)))
    out = tmp_path / "out.jsonl"
    out.write_text("earlier\n")
    arguments = ["verifier=extract", f"input={tmp_path / 'in.jsonl'}", f"output={out}"]
    judges = _Judges(fail=True)
    monkeypatch.setattr(score, "make_judges", lambda command: judges)
    assert score.main(arguments) == 130
    assert (out.read_text(), judges.closed) == ("earlier\n", True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    judges.fail = False
    assert score.main(arguments) == 0
    assert [row["id"] for row in rows_of(out)] == list(range(score.CHUNK_ROWS + 1))


def test_a_link_stays_a_link(tmp_path, monkeypatch):
    monkeypatch.setattr(score, "make_judges", lambda command: _Judges())
    write(tmp_path / "in.jsonl", {"id": 1})
    target, link = tmp_path / "target.jsonl", tmp_path / "link.jsonl"
    target.write_text("")
    link.symlink_to(target)
    assert score.main(["verifier=extract", f"input={tmp_path / 'in.jsonl'}", f"output={link}"]) == 0
    assert link.is_symlink() and rows_of(target)[0]["status"] == "ok"


def test_no_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(score, "make_judges", lambda command: _Judges())
    write(tmp_path / "in.jsonl", " ")
    assert score.main(["verifier=extract", f"input={tmp_path / 'in.jsonl'}", f"output={tmp_path / 'out.jsonl'}"]) == 0
    assert (tmp_path / "out.jsonl").read_text() == ""


def test_sigterm_leaves_nothing(tmp_path):
    write(tmp_path / "in.jsonl", *({"gold": "2\\sqrt{2}", "answer_text": f"\\sqrt{{{n}}}+{n}"} for n in range(20_000)))
    process = subprocess.Popen([sys.executable, "-m", "akl_dist.score", "verifier=math", "input=in.jsonl", "output=out.jsonl"],
                               cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out.jsonl*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


def test_light_imports_and_help():
    code = ("import sys; from akl_dist.score import main; assert main(['--help']) == 0; "
            "print([m for m in ('torch', 'ray', 'hydra', 'omegaconf', 'vllm', 'transformers', 'sympy') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "example: python -m akl_dist.score verifier=math" in done.stdout
    assert done.stdout.strip().endswith("[]")


def test_graders_import_neither_torch_nor_ray():
    code = ("import sys; from akl_dist.verify import rows; rows.warm_up(); "
            "print([m for m in ('torch', 'ray', 'hydra') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_one_extractor_and_one_equality():
    """What score says of a response is what training says of it."""
    from akl_dist.verify.math import judge as trained

    for response in ("\\boxed{7}", "<think>\\boxed{7}", "#### 8", "the answer is 7.", "", "\\boxed{7"):
        verdict = judge(verifier="math", fields={"gold": "7", "response": response})
        assert verdict == trained(gold="7", response_text=response, truncated=False)
        extracted = judge(verifier="extract", fields={"response": response})
        assert (extracted.extracted, extracted.span) == (verdict.extracted, verdict.span)
        if verdict.extracted is not None:
            assert judge(verifier="math", fields={"gold": "7", "answer_text": verdict.extracted}).status is verdict.status


@given(st.lists(st.binary(max_size=30).map(lambda line: line.replace(b"\n", b" ")), max_size=8))
def test_any_bytes_are_rows(lines):
    """One row per line up to the last that is not blank, numbered as in the file; each can be written."""
    rows = list(score.read_rows(iter([line + b"\n" for line in lines])))
    last = max((number for number, line in enumerate(lines, start=1) if line.strip()), default=0)
    assert [row.number for row in rows] == list(range(1, last + 1))
    for row in rows:
        json.loads(score._output_line(row, Verdict(Status.OK)))
