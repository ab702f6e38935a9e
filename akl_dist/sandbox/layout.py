"""What of the machine a sandbox shows: read-only binds of what Python needs, nothing else. Made outside, used by the supervisor."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

STAGES = "/akl"  # PYTHONPATH inside
INSIDE = f"{STAGES}/akl_dist/sandbox/inside"
PACKAGES = f"{STAGES}-packages"
BOX = "/box"  # the private folder
ROOT_ONLY = "/.root-only"  # a file that the dropped user must not be able to read
DEVICES = ("null", "zero", "full", "random", "urandom")
LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64")
SETTINGS = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")


@dataclass(frozen=True)
class Layout:
    """The root a program sees.

    Args:
        python: the interpreter, by its real path (a virtual environment's own would show the environment).
        binds: (source outside, path inside) pairs, folders or files, read-only.
        links: (path inside, target) pairs.
        masks: folders inside that are covered by empty ones: packages of the interpreter that no program was promised.
    """

    python: str
    binds: tuple[tuple[str, str], ...]
    links: tuple[tuple[str, str], ...]
    masks: tuple[str, ...]


def machine_layout(packages: tuple[str, ...] = ()) -> Layout:
    """The layout for this interpreter.

    Args:
        packages: top-level names of installed packages that programs may import; the ones not installed are left out.
    """
    python = os.path.realpath(sys.executable)
    binds, links = [(python, python)], []
    for path in LIBRARIES:
        if os.path.islink(path):
            links.append((path, os.readlink(path)))
        elif os.path.isdir(path):
            binds.append((path, path))
    library = os.path.realpath(os.path.join(sys.base_prefix, "lib"))
    if not library.startswith("/usr/lib"):
        binds.append((library, library))
    binds += [(path, path) for path in SETTINGS if os.path.exists(path) and not os.path.islink(path)]
    binds += [(f"/dev/{name}", f"/dev/{name}") for name in DEVICES]
    binds.append((str(Path(__file__).parent / "inside"), INSIDE))
    binds += [(str(path), f"{PACKAGES}/{path.name}") for name in packages for path in _package(name)]
    links += [("/dev/shm", BOX), ("/tmp", BOX), ("/dev/fd", "/proc/self/fd"), ("/dev/stdin", "/proc/self/fd/0"),
              ("/dev/stdout", "/proc/self/fd/1"), ("/dev/stderr", "/proc/self/fd/2")]
    stdlib = sysconfig.get_path("stdlib", vars={"base": sys.base_prefix, "installed_base": sys.base_prefix})
    masks = [os.path.realpath(f"{stdlib}/site-packages"), os.path.realpath(f"{stdlib}/dist-packages"),
             "/usr/lib/python3/dist-packages"]
    shown = tuple(inside for _, inside in binds)
    return Layout(python, tuple(binds), tuple(links),
                  tuple(path for path in masks if os.path.isdir(path) and path.startswith(shown)))


def _package(name: str) -> list[Path]:
    """Where an installed package lies, with the folder of shared libraries that wheels put beside it."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        return []
    if not found.submodule_search_locations:
        return [Path(found.origin)]
    folder = Path(found.origin).parent
    beside = folder.parent / f"{name}.libs"
    return [folder, beside] if beside.is_dir() else [folder]
