"""Control groups of both versions on folders that look like theirs: what is chosen, written and read. No kernel takes part."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from akl_dist.sandbox import cgroups
from akl_dist.sandbox.cgroups import PREFIX, make

SPACE = os.stat("/proc/self/ns/pid").st_ino
OWN_NAME = f"{PREFIX}-{SPACE}-{os.getpid()}"
FILES = {
    2: {"memory.max": "max", "memory.swap.max": "max", "pids.max": "max", "cgroup.procs": "",
        "memory.events": "low 0\nhigh 0\nmax 7\noom 2\noom_kill 3\noom_group_kill 0\n"},
    1: {"memory.limit_in_bytes": "0", "memory.memsw.limit_in_bytes": "0", "memory.force_empty": "", "pids.max": "max",
        "cgroup.procs": "", "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"},
}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A root of control groups and the file that says where this process is; writing to subtree_control acts as in the kernel."""
    root = tmp_path / "cgroup"
    root.mkdir()
    monkeypatch.setattr(cgroups, "ROOT", root)
    monkeypatch.setattr(cgroups, "OWN", tmp_path / "own")
    plain = Path.write_text

    def write_text(path, text, *arguments, **options):
        if path.name == "cgroup.subtree_control" and text.startswith("+"):
            if not os.access(path, os.W_OK) or (path.parent / "busy").exists():
                raise OSError("device or resource busy")
            text = f"{path.read_text()} {text[1:]}"
        return plain(path, text, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", write_text)
    return root


def own_group(parent, version, without=()):
    """What the kernel would put into a group as it is made; the real folder is made where nobody has."""
    folder = parent / OWN_NAME
    folder.mkdir(parents=True)
    for name, text in FILES[version].items():
        if name not in without:
            (folder / name).write_text(text)
    return folder


def version_2(parent, controllers="cpu memory pids", enabled=""):
    parent.mkdir(parents=True, exist_ok=True)
    (parent / "cgroup.controllers").write_text(controllers)
    (parent / "cgroup.subtree_control").write_text(enabled)


def where(machine, *lines):
    cgroups.OWN.write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize("enabled", ["memory pids", "cpu", ""])
def test_version_2(machine, enabled):
    """A group beside our own with both controllers, enabled first where they are not."""
    where(machine, "0::/user.slice/run.scope")
    parent = machine / "user.slice" / "run.scope"
    version_2(parent, enabled=enabled)
    folder = own_group(parent, 2)
    groups = make()
    assert groups.controllers == {"memory", "pids"}
    assert {"memory", "pids"} <= set((parent / "cgroup.subtree_control").read_text().split())
    groups.limit(memory_bytes=123 << 20, processes=17)
    assert (folder / "memory.max").read_text().startswith(str(123 << 20))  # files here keep the tail of a longer value
    assert (folder / "memory.swap.max").read_text().startswith("0")
    assert (folder / "pids.max").read_text().startswith("17")
    groups.enter()
    assert (folder / "cgroup.procs").read_text() == "0", "the kernel's word for the process that writes"
    assert groups.out_of_memory_kills() == 3


def test_version_2_without_swap_accounting(machine):
    where(machine, "0::/")
    version_2(machine, enabled="memory pids")
    folder = own_group(machine, 2, without=["memory.swap.max"])
    make().limit(memory_bytes=1 << 20, processes=3)
    assert (folder / "memory.max").read_text().startswith("1048576")


def test_version_2_with_processes_alone(machine):
    where(machine, "0::/")
    version_2(machine, controllers="pids", enabled="pids")
    own_group(machine, 2)
    groups = make()
    assert groups.controllers == {"pids"} and groups.out_of_memory_kills() == 0


@pytest.mark.parametrize("obstacle", ["busy", "no controllers", "no folder", "not writable"])
def test_version_2_that_gives_nothing(machine, obstacle):
    """Processes in the parent, controllers not delegated, no such folder, or no group to be made: limits of each process remain."""
    where(machine, "0::/a")
    parent = machine / "a"
    if obstacle != "no folder":
        version_2(parent, controllers="cpu io" if obstacle == "no controllers" else "memory pids",
                  enabled="memory pids" if obstacle == "not writable" else "")
        if obstacle == "busy":
            (parent / "busy").touch()
        if obstacle == "not writable":
            own_group(parent, 2, without=["memory.max"])
        else:
            own_group(parent, 2)
    groups = make()
    assert groups.controllers == frozenset()
    groups.limit(memory_bytes=1, processes=1)
    groups.enter()
    assert groups.out_of_memory_kills() == 0
    groups.remove()


def test_version_1(machine):
    where(machine, "11:cpu,cpuacct:/x", "9:memory:/x/y", "3:pids:/x")
    folders = {name: own_group(machine / name / own, 1) for name, own in (("memory", "x/y"), ("pids", "x"))}
    groups = make()
    assert groups.controllers == {"memory", "pids"}
    groups.limit(memory_bytes=5 << 20, processes=9)
    for name in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"):
        assert (folders["memory"] / name).read_text().startswith(str(5 << 20))
    assert (folders["pids"] / "pids.max").read_text().startswith("9")
    assert (folders["memory"] / "pids.max").read_text() == "max", "each in its own hierarchy"
    assert groups.out_of_memory_kills() == 5


def test_version_1_at_its_root_where_our_own_folder_is_not_shown(machine):
    where(machine, "4:memory:/docker/abc")
    folder = own_group(machine / "memory", 1)
    groups = make()
    assert groups.controllers == {"memory"} and folder.exists()


def test_both_versions_side_by_side(machine):
    """Processes by version 2 under ``unified``, memory by version 1; what version 2 has is not taken twice."""
    where(machine, "5:memory,pids:/", "0::/s")
    version_2(machine / "unified" / "s", controllers="pids", enabled="pids")
    own_group(machine / "unified" / "s", 2)
    one = own_group(machine / "memory,pids", 1)
    groups = make()
    assert groups.controllers == {"memory", "pids"}
    groups.limit(memory_bytes=1 << 20, processes=4)
    assert (one / "pids.max").read_text() == "max"
    assert (machine / "unified" / "s" / OWN_NAME / "pids.max").read_text().startswith("4")
    assert groups.out_of_memory_kills() == 5


def test_groups_of_the_dead_are_cleared(machine):
    """Only those of this pid namespace whose supervisor is gone."""
    where(machine, "0::/")
    version_2(machine, enabled="memory pids")
    own_group(machine, 2)
    dead = 4_194_304 + 7  # above the largest process id
    names = {f"{PREFIX}-{SPACE}-{dead}": False, f"{PREFIX}-{SPACE}-1": True, f"{PREFIX}-{SPACE + 1}-{dead}": True,
             f"{PREFIX}-{SPACE}-other": True}
    for name in names:
        (machine / name).mkdir()
    make()
    assert {name: (machine / name).exists() for name in names} == names


def test_removed_where_empty(machine):
    where(machine, "0::/")
    version_2(machine, enabled="pids")
    folder = own_group(machine, 2)
    groups = make()
    groups.remove()
    assert folder.exists(), "not while it holds something"
    for name in FILES[2]:
        (folder / name).unlink()
    groups.remove()
    assert not folder.exists()
