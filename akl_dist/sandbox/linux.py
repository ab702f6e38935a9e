"""The few Linux calls the standard library of Python 3.11 lacks: namespaces, mounts, capabilities, process control."""

from __future__ import annotations

import ctypes
import os
import struct

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
AT_RECURSIVE, AT_FDCWD = 0x8000, -100
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 1, 2
SYS_MOUNT_SETATTR = 442  # the same number on every architecture
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 36, 38, 47, 4
CAPABILITY_VERSION = 0x20080522
CAP_SETGID, CAP_SETUID, CAP_SYS_ADMIN = 6, 7, 21

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _check(result: int, call: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    arguments = [None if text is None else text.encode() for text in (source, target, kind, data)]
    _check(_libc.mount(*arguments[:3], ctypes.c_ulong(flags), arguments[3]), f"mount {target}")


def unmount(target: str) -> None:
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def read_only(target: str) -> None:
    """Make a bind mount and everything mounted below it read-only and without set-user-id."""
    attributes = struct.pack("QQQQ", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    result = _libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, target.encode(), AT_RECURSIVE, attributes, ctypes.c_size_t(32))
    _check(result, f"mount_setattr {target}")


def pivot_root(new_root: str) -> None:
    """Make ``new_root`` the root and let go of the old one."""
    number = SYS_PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(f"pivot_root: unknown architecture {os.uname().machine}")
    os.chdir(new_root)
    _check(_libc.syscall(number, b".", b"."), "pivot_root")
    unmount(".")
    os.chdir("/")


def prctl(option: int, *arguments: int) -> None:
    padded = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    _check(_libc.prctl(option, *padded), f"prctl {option}")


def effective_capabilities() -> int:
    """Bit mask of this process's effective capabilities."""
    data = _capabilities_get()
    return data[0] | data[3] << 32


def _capabilities_get() -> tuple[int, ...]:
    header, data = ctypes.create_string_buffer(struct.pack("Ii", CAPABILITY_VERSION, 0)), ctypes.create_string_buffer(24)
    _check(_libc.capget(header, data), "capget")
    return struct.unpack("6I", data.raw)


def drop_capability_bounds() -> None:
    """Empty the bounding and ambient sets, so that no later exec gains a capability."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # past the last capability this kernel knows
            break
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)


def drop_capabilities() -> None:
    """Empty the effective, permitted and inheritable sets of this process."""
    header = ctypes.create_string_buffer(struct.pack("Ii", CAPABILITY_VERSION, 0))
    _check(_libc.capset(header, ctypes.create_string_buffer(24)), "capset")
