"""What one sandboxed program may use, and the order of the nested time limits."""

from __future__ import annotations

from dataclasses import asdict, dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Limits of one program. All of them hold for the program and its descendants together, unless said otherwise.

    Args:
        wall_s: wall clock from its start to its end, less what it waited for a processor or for its user
            (:mod:`akl_dist.sandbox.clock`); the supervisor kills it then.
        cpu_s: processor time of each process.
        memory_bytes: address space of each process, and resident memory of all together where cgroups are available.
        processes: processes and threads.
        file_bytes: size of one file it writes.
        folder_bytes: size of its private folder (in memory).
        open_files: descriptors of each process.
        output_bytes: what it may print, and what it may return in one reply.
    """

    wall_s: float = 10.0
    cpu_s: int = 8
    memory_bytes: int = 1024 * MIB
    processes: int = 32
    file_bytes: int = 16 * MIB
    folder_bytes: int = 64 * MIB
    open_files: int = 64
    output_bytes: int = 2 * MIB

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"sandbox limit {name}: got {value}; expected a positive number.")
