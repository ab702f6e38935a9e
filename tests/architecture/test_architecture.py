"""Rules of the code base that a reader relies on: who may import whom, sizes, no tunnels, every configuration key read."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "akl_dist"
FILES = sorted(p for p in PACKAGE.rglob("*.py"))
STAGES = {"rollout", "verify", "reference", "critic", "learner", "weight_sync"}
HEAVY = {"ray", "vllm", "deepspeed", "transformers", "omegaconf", "hydra", "datasets"}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


def imports_of(source: str) -> set[str]:
    """Every module imported anywhere in the source, function bodies included."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used here"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def violations(name: str, source: str) -> list[str]:
    """Breaches of the import table of docs/architecture.md by one file."""
    modules = imports_of(source)
    tops = {m.split(".")[0] for m in modules}
    own = {m.split(".")[1] for m in modules if m.startswith("akl_dist.")}
    folder, _, file = name.partition("/")
    out = []

    def forbid(names: set[str], why: str) -> None:
        out.extend(f"{name} imports {m}: {why}" for m in sorted(tops & names))

    if folder == "contract" or name in ("config/schema", "config/validate", "config/models"):
        forbid(HEAVY, "contracts, schema and validation stay light")
    if folder == "objective":
        extra = own - {"objective"}
        out.extend(f"{name} imports akl_dist.{m}: objectives are pure torch" for m in sorted(extra))
        forbid(HEAVY | {"numpy"}, "objectives are pure torch")
    if name == "loop":
        forbid({"ray", "vllm", "deepspeed", "hydra", "omegaconf"}, "the loop knows stages by their Protocols")
        out.extend(f"loop imports {m}" for m in sorted(modules) if m.endswith(".pool"))
    if folder in STAGES:
        others = (own & STAGES) - {folder}
        out.extend(f"{name} imports akl_dist.{m}: stages meet in records" for m in sorted(others))
        if file != "pool":
            forbid({"ray"}, "pool.py is the only file of a stage that imports Ray")
        if folder != "rollout" and name != "weight_sync/receiver":
            forbid({"vllm"}, "only engines import vLLM")
        if folder != "learner":
            forbid({"deepspeed"}, "only learners and zero3 import DeepSpeed")
    if folder == "zero3":
        out.extend(f"{name} imports akl_dist.{m}: zero3 serves stages" for m in sorted(own & STAGES))
        if file != "pool":
            forbid({"ray"}, "pool.py is the only file of zero3 that imports Ray")
    if "omegaconf" in tops and name != "config/compose":
        out.append(f"{name} imports omegaconf: config/compose is its only user")
    if "akl_dist.main" in modules:
        out.append(f"{name} imports main: nobody does")
    return out


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_import_table(path: Path):
    assert violations(name_of(path), path.read_text()) == []


@pytest.mark.parametrize(("name", "source"), [
    ("objective/x", "from akl_dist.contract.records import Prompt"),
    ("loop", "import ray"),
    ("learner/step", "import ray"),
    ("verify/worker", "from akl_dist.learner.batch import pack"),
    ("critic/worker", "from akl_dist.learner.batch import pack"),
    ("zero3/rank", "from akl_dist.learner.batch import pack"),
    ("config/schema", "from omegaconf import OmegaConf"),
    ("reference/worker", "import vllm"),
])
def test_the_import_table_can_fail(name: str, source: str):
    assert violations(name, source)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_sizes_and_tunnels(path: Path):
    """Files stay under 400 lines, functions under 60; ``**kwargs`` only where the contract names it (loss parameters)."""
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno + 1 <= 60, f"{node.name} is too long"
            if node.args.kwarg is not None:
                assert name_of(path).startswith("objective/policy_losses"), f"{node.name} takes **{node.args.kwarg.arg}"
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "everything"
            assert caught not in ("everything", "Exception", "BaseException") or _reraises(node), f"catches {caught}"


def _reraises(handler: ast.ExceptHandler) -> bool:
    return any(isinstance(n, ast.Raise) for n in ast.walk(handler))


def leaves(cls: type, prefix: str = "") -> list[str]:
    out = []
    for field in dataclasses.fields(cls):
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        if dataclasses.is_dataclass(default):
            out += leaves(type(default), f"{prefix}{field.name}.")
        else:
            out.append(f"{prefix}{field.name}")
    return out


def reads(source: str, classes: dict[str, str]) -> set[tuple[str, str]]:
    """(section, leaf) of every configuration key that a file can read: an attribute of that name, where the file gets hold of the
    section, as an attribute, a keyword or by its class. A key of the top level has the section "config"."""
    tree = ast.parse(source)
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | {
        node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)} | attributes
    held = {section for section, cls in classes.items() if {section, cls} & names or f"_{section}" in names}
    return {(section, leaf) for section in held for leaf in attributes}


def sections(cls: type, name: str = "config") -> dict[str, str]:
    """Section -> its class, of the whole schema."""
    out = {name: cls.__name__}
    for field in dataclasses.fields(cls):
        if field.default_factory is not dataclasses.MISSING and dataclasses.is_dataclass(field.default_factory):
            out |= sections(field.default_factory, field.name)
    return out


def unread_keys(keys: list[str], sources: list[str], classes: dict[str, str]) -> list[str]:
    read = set().union(*(reads(source, classes) for source in sources))
    return [key for key in keys if tuple(f"config.{key}".split(".")[-2:]) not in read]


def test_every_configuration_key_is_read():
    """A key that nothing reads is a promise not kept. A read is an attribute access outside the schema, in a file that knows the
    key's section (a limit may be read by validation alone)."""
    from akl_dist.config.schema import Config

    sources = [path.read_text() for path in FILES if name_of(path) != "config/schema"]
    assert unread_keys(leaves(Config), sources, sections(Config)) == []


def test_a_key_that_another_section_has_too_is_not_taken_for_read():
    """The control: timeout_s is read, but not that of the reference."""
    classes = {"config": "Config", "rollout": "RolloutConfig", "reference": "ReferenceConfig"}
    source = "def f(config): return config.rollout.timeout_s"
    assert unread_keys(["rollout.timeout_s", "reference.timeout_s"], [source], classes) == ["reference.timeout_s"]


def test_light_imports():
    """Help, validation and dry runs start without the heavy libraries."""
    code = ("import sys, akl_dist, akl_dist.main, akl_dist.config.validate, akl_dist.cluster.placement; "
            "print([m for m in ('torch', 'ray', 'vllm', 'deepspeed', 'transformers', 'datasets') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_top_level():
    """The top level holds what the design names and nothing else (tracked files only)."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    if listed.returncode != 0 or not listed.stdout:
        pytest.skip("not a git checkout")
    tops = {line.split("/")[0] for line in listed.stdout.splitlines()}
    allowed = {"pyproject.toml", "akl_dist", "conf", "launch", "docker", "tests", "Makefile", "README.md", "docs",
               "benchmarks", ".ci", "LICENSE", "CHANGELOG.md", "CITATION.cff", ".gitignore"}
    assert tops <= allowed
