"""Tries, from inside the sandbox, everything that it must not allow, and reports what it could do. Standard library only.

Standard input holds JSON: what lies outside (``hidden`` paths, the supervisor's ``pid``) and the limits. Standard output: a list
of what did not hold, empty when all restrictions do.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

CLONE_NEWUSER, AF_VSOCK = 0x10000000, 40
FAILURES = (OSError, MemoryError, RuntimeError, ValueError, OverflowError)
MIB = 1 << 20


def refused(action: Callable[[], Any]) -> bool:
    """Whether an action fails."""
    try:
        action()
    except FAILURES:
        return True
    return False


def connects() -> None:
    for family, address in ((socket.AF_INET, ("127.0.0.1", 9)), (socket.AF_INET, ("198.51.100.1", 53))):
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(address)
            sock.send(b"x")
            return


def new_user_namespace() -> None:
    if ctypes.CDLL(None).unshare(CLONE_NEWUSER) != 0:
        raise OSError


def answer_to(number: int) -> int:
    """Error number of a system call without sense in its arguments: a kernel that looks at them does nothing."""
    libc, nonsense = ctypes.CDLL(None, use_errno=True), [ctypes.c_long(-1)] * 6
    libc.syscall.restype = ctypes.c_long
    return ctypes.get_errno() if libc.syscall(ctypes.c_long(number), *nonsense) == -1 else 0


def status_of(name: str) -> str:
    """A field of /proc/self/status, empty where there is no /proc."""
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return line.split(":", 1)[1].strip()
    return ""


def fork_until_refused(limit: int) -> int:
    """How many children can be alive at once (at most limit + 1 are tried)."""
    gate_read, gate_write = os.pipe()
    children = []
    with contextlib.suppress(OSError):
        for _ in range(limit + 1):
            pid = os.fork()
            if pid == 0:
                os.close(gate_write)
                os.read(gate_read, 1)
                os._exit(0)
            children.append(pid)
    os.close(gate_write)
    for pid in children:
        os.waitpid(pid, 0)
    os.close(gate_read)
    return len(children)


def threads_until_refused(limit: int) -> int:
    gate = threading.Event()
    started = 0
    with contextlib.suppress(RuntimeError):
        for _ in range(limit + 1):
            threading.Thread(target=gate.wait, daemon=True).start()
            started += 1
    gate.set()
    return started


def fill_folder(limit: int) -> int:
    """Bytes that fit into the private folder (at most twice the limit is tried)."""
    written, names = 0, []
    with contextlib.suppress(OSError):
        while written < 2 * limit:
            names.append(f"fill{len(names)}")
            with open(names[-1], "wb", buffering=0) as file:
                for _ in range(8):
                    written += file.write(b"x" * MIB)
    for name in names:
        os.unlink(name)
    return written


def largest_write(size: int) -> int:
    """Bytes of ``size`` that fit into one file."""
    try:
        with open("big", "wb", buffering=0) as file:
            return file.write(b"x" * size) or 0
    except OSError:
        return 0


def descriptors() -> list[int]:
    found = []
    for fd in range(3, 256):
        with contextlib.suppress(OSError):
            os.fstat(fd)
            found.append(fd)
    return found


def other_processes() -> list[str]:
    if not os.path.isdir("/proc/self"):
        return []
    return [name for name in os.listdir("/proc") if name.isdigit() and int(name) not in (1, os.getpid())]


def isolation(given: dict[str, Any]) -> dict[str, bool]:
    """What only namespaces, the other user and the system-call filter give."""
    held = {
        "the network is cut off": refused(connects),
        "there is no interface but an unused loopback": [name for _, name in socket.if_nameindex()] in ([], ["lo"]),
        "other processes are out of sight": other_processes() == [] and os.getpid() < 16,
        "other processes are out of reach": refused(lambda: os.kill(given["pid"], 0))
        and refused(lambda: os.readlink("/proc/1/exe")),
        "the machine's files are not there": not any(map(os.path.lexists, given["hidden"])),
        "the root is read-only": all(refused(lambda path=path: Path(path).write_text("")) for path in given["read_only"]),
        "root cannot be regained": refused(lambda: os.setuid(0)) and os.getuid() != 0 and os.getgid() != 0,
        "the user is the sandbox's": os.getresuid() == (given["user"],) * 3 and os.getgroups() in ([], [given["user"]]),
        "a root-only file is unreadable": not given["root_only"] or refused(Path(given["root_only"]).read_bytes),
        "the environment is empty": set(os.environ) <= set(given["environment"]),
        "no descriptor is inherited": descriptors() == [],
    }
    if status_of("CapEff"):
        held["no capability is held or can be gained"] = (
            all(int(status_of(name), 16) == 0 for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"))
            and status_of("NoNewPrivs") == "1"
        )
    if given["filter"]:
        held["no new user namespace"] = refused(new_user_namespace)
        held["no socket that a network namespace does not hold"] = refused(lambda: socket.socket(AF_VSOCK, socket.SOCK_STREAM))
        held |= {f"the system call {name} is refused": answer_to(number) == refusal
                 for name, (number, refusal) in given["denied_calls"].items()}
    return held


def limits(given: dict[str, Any]) -> dict[str, bool]:
    """What holds with and without isolation."""
    held = {
        "memory": refused(lambda: bytearray(given["memory_bytes"])),
        "file size": largest_write(given["file_bytes"] + 1) <= given["file_bytes"],
        "open files": refused(lambda: [os.dup(0) for _ in range(given["open_files"])]),
        "processor time": resource.getrlimit(resource.RLIMIT_CPU)[1] == given["cpu_s"],
        "core files": resource.getrlimit(resource.RLIMIT_CORE) == (0, 0),
    }
    os.closerange(3, 256)
    if given["bounds_processes"]:
        held["processes"] = fork_until_refused(given["processes"]) < given["processes"]
        held["threads"] = threads_until_refused(given["processes"]) < given["processes"]
    if given["bounds_folder"]:
        held["size of the private folder"] = fill_folder(given["folder_bytes"]) <= given["folder_bytes"]
    return held


def main() -> None:
    given = json.load(sys.stdin)
    held = (isolation(given) if given["isolated"] else {}) | limits(given)
    json.dump([name for name, holds in held.items() if not holds], sys.stdout)


if __name__ == "__main__":
    main()
