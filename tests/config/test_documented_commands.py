"""Every command that README and the pages on data, tools and evaluation show is one that a reader can run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from akl_dist import evaluate
from akl_dist.config.command_line import check_command_line
from akl_dist.config.compose import compose
from akl_dist.config.validate import validate

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/data.md", "docs/tools.md", "docs/evaluation.md")
SCHEMATIC = "+exp=NAME"
STANDS_FOR = {"...": "+exp=tiny_tir", "model.path=DIR": "model.path=ORG/NAME", "model.path=/models/mine": "model.path=ORG/NAME",
              "model.path=/models/SmolLM2-135M-Instruct": "model.path=ORG/NAME"}


def commands(page: str) -> list[list[str]]:
    """Words of each command of a page; what stands for the reader's own is replaced by something that is there."""
    text = re.sub(r"\\\n *", "", (ROOT / page).read_text(encoding="utf-8"))
    lines = re.findall(r"^ *(python -m akl_dist\.(?:main|evaluate) .*)", text, flags=re.MULTILINE)
    words = [shlex.split(line, comments=True)[2:] for line in lines if SCHEMATIC not in line]
    return [[STANDS_FOR.get(word, word) for word in line] for line in words]


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_accepted(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    example = re.search(r"```python\n(.*?class GuessNumber.*?)```", (ROOT / "docs/tools.md").read_text(), flags=re.DOTALL)
    assert example is not None
    for name in ("guess", "my_games"):
        (tmp_path / f"{name}.py").write_text(example[1])
    (tmp_path / "my_rewards.py").write_text("def brief(response): ...\n\n\ndef compute_score(solution_str): ...\n")
    for name in ("train.jsonl", "test.jsonl", "train.parquet", "test.parquet", "gsm8k_train.jsonl", "gsm8k_test.jsonl"):
        (tmp_path / name).touch()
    found = commands(page)
    assert len(found) >= 2
    for module, *arguments in found:
        parsed = check_command_line(arguments)
        if parsed.multirun or parsed.help:
            continue
        if module == "akl_dist.evaluate":
            evaluate.configuration(parsed)
        else:
            validate(compose(parsed.overrides))
