"""How a supervisor and its programs are cut off from the machine, in the forms this machine allows.

``root``: started with the rights of root: mount, pid, network, ipc and uts namespaces, the user really dropped to one that owns
nothing, also outside. ``user_namespace``: started by anybody: the same inside a user namespace, in which the program has no
capability. ``none``: neither is allowed: limits of each process alone.
"""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

from akl_dist.sandbox import linux, seccomp
from akl_dist.sandbox.layout import BOX, ROOT_ONLY, Layout
from akl_dist.sandbox.limits import Limits

MODES = ("root", "user_namespace", "none")
ROOT_MOUNT = "/sys"  # exists everywhere and is needed no more: the new root is mounted over it, in our namespace only
MACHINE_PROC = "/.proc"  # the supervisor's alone: a user namespace may mount a /proc only where it sees one
FIRST_SPARE_USER = 1_900_000_000  # in a range that distributions leave unused
NOBODY = 65534


def spare_user() -> int:
    """A user id that owns nothing here and differs between supervisors, so that their process counts are apart."""
    wanted = FIRST_SPARE_USER + os.getpid()
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        inside, _, count = (int(word) for word in line.split())
        if inside <= wanted < inside + count:
            return wanted
    return NOBODY


def enter_user_namespace() -> None:
    """Become nobody, with capabilities in a new user namespace only."""
    uid, gid = os.getuid(), os.getgid()
    linux.unshare(linux.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{NOBODY} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{NOBODY} {gid} 1")


def build_root(layout: Layout) -> None:
    """Move this process into a read-only root that holds the layout alone, in new mount and network namespaces."""
    linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWNET)
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", ROOT_MOUNT, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,mode=0755")
    for source, inside in layout.binds:
        target = ROOT_MOUNT + inside
        if os.path.isdir(source):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        linux.mount(source, target, None, linux.MS_BIND | linux.MS_REC)
        linux.read_only(target)
    for path, link in layout.links:
        os.makedirs(os.path.dirname(ROOT_MOUNT + path), exist_ok=True)
        os.symlink(link, ROOT_MOUNT + path)
    for path in layout.masks:
        linux.mount("tmpfs", ROOT_MOUNT + path, "tmpfs", linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV, "size=4k,mode=0755")
    for folder in (BOX, "/proc", MACHINE_PROC):
        os.makedirs(ROOT_MOUNT + folder, exist_ok=True)
    os.close(os.open(ROOT_MOUNT + ROOT_ONLY, os.O_CREAT | os.O_WRONLY, 0o600))
    linux.mount("/proc", ROOT_MOUNT + MACHINE_PROC, None, linux.MS_BIND | linux.MS_REC)
    linux.pivot_root(ROOT_MOUNT)
    linux.read_only("/")


def private_mounts(limits: Limits, user: int) -> None:
    """For one program: a folder of its own in memory and, where the kernel allows it, a /proc of its own processes alone."""
    linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS)
    data = f"size={limits.folder_bytes},nr_inodes=4096,mode=0700,uid={user},gid={user}"
    linux.mount("tmpfs", BOX, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, data)
    with contextlib.suppress(OSError):  # older kernels, and user namespaces whose own /proc is partly covered: then there is none
        # read-only: a program could give itself less of a busy processor there (autogroup) and have its waits put down to the load
        flags = linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
        linux.mount("proc", "/proc", "proc", flags, "subset=pid,hidepid=invisible")
    linux.unmount(MACHINE_PROC)


def set_limits(limits: Limits) -> None:
    """The limits of each process."""
    stack = min(64 << 20, limits.memory_bytes // 4)
    for name, value in (
        (resource.RLIMIT_AS, limits.memory_bytes), (resource.RLIMIT_CPU, limits.cpu_s), (resource.RLIMIT_NPROC, limits.processes),
        (resource.RLIMIT_FSIZE, limits.file_bytes), (resource.RLIMIT_NOFILE, limits.open_files), (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_STACK, stack), (resource.RLIMIT_MEMLOCK, 0), (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(name)[1]
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (allowed, allowed))


def drop_rights(user: int | None, *, isolated: bool) -> None:
    """Become the unprivileged user (or stay who we are) for good: no capability, none to gain, the system-call filter on."""
    if isolated:
        linux.drop_capability_bounds()
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    linux.drop_capabilities()
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    if seccomp.available():
        seccomp.install()


def open_to_all(path: str) -> bool:
    """Whether any user may reach and execute a file."""
    return all(os.stat(part).st_mode & 0o001 for part in (path, *Path(path).parents))
