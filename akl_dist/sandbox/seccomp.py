"""A system-call filter for the program: what a Python program has no use for and an attack has.

It closes what namespaces leave open: nested user namespaces (they give capabilities over a fresh tmpfs that no limit bounds),
kernel key rings (they outlive the program), tracing, sockets that no network namespace holds (AF_VSOCK reaches the host of a
virtual machine), and large kernel surfaces. A program keeps its priority and its processors,
too: what it waits for a processor does not count towards its limit (:mod:`akl_dist.sandbox.clock`), so it may not ask to wait.
Linux, x86-64 and AArch64.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from akl_dist.sandbox import linux

_DENIED = {  # name: (x86-64, AArch64)
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "quotactl": (179, 60), "acct": (163, 89),
    "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "syslog": (103, 116), "personality": (135, 92),
    "pidfd_getfd": (438, 438), "clone3": (435, 435),
    "setpriority": (141, 140), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
}
_CLONE = (56, 220)
_SOCKET = (41, 198)
_FAMILIES = (1, 2, 10, 16)  # UNIX, INET, INET6, NETLINK: what the network namespace holds
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_NEW_NAMESPACES = 0x7E020000  # every CLONE_NEW* flag that clone takes
_X32 = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000


def available() -> bool:
    """Whether the filter knows this machine's architecture."""
    return os.uname().machine in _ARCHITECTURES


def refusals() -> dict[str, tuple[int, int]]:
    """What the filter denies on this machine whatever the arguments: name -> (number, errno); clone3 gets ENOSYS, so that libc uses
    clone."""
    column, _ = _ARCHITECTURES[os.uname().machine]
    return {name: (numbers[column], errno.ENOSYS if name == "clone3" else errno.EPERM) for name, numbers in _DENIED.items()}


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def program() -> bytes:
    """The filter as BPF instructions: refuse the denied calls, new namespaces and other families of sockets."""
    column, audit = _ARCHITECTURES[os.uname().machine]
    steps = [_step(_LOAD, 4), _step(_EQUAL, audit, 1, 0), _step(_RETURN, _KILL), _step(_LOAD, 0)]
    if column == 0:
        steps += [_step(_AT_LEAST, _X32, 0, 1), _step(_RETURN, _KILL)]
    for number, refusal in refusals().values():
        steps += [_step(_EQUAL, number, 0, 1), _step(_RETURN, _REFUSE | refusal)]
    steps += [
        _step(_EQUAL, _CLONE[column], 0, 3), _step(_LOAD, 16),
        _step(_ANY_BIT, _NEW_NAMESPACES, 0, 4 + len(_FAMILIES)), _step(_RETURN, _REFUSE | errno.EPERM),
        _step(_EQUAL, _SOCKET[column], 0, 2 + len(_FAMILIES)), _step(_LOAD, 16),
        *(_step(_EQUAL, family, len(_FAMILIES) - place, 0) for place, family in enumerate(_FAMILIES)),
        _step(_RETURN, _REFUSE | errno.EAFNOSUPPORT),
        _step(_RETURN, _ALLOW),
    ]
    return b"".join(steps)


def install() -> None:
    """Put the filter on this process and all its descendants, for good. Needs no_new_privs."""
    code = program()
    buffer = ctypes.create_string_buffer(code, len(code))
    filter_ = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer)))
    linux.prctl(linux.PR_SET_SECCOMP, 2, ctypes.addressof(filter_))
