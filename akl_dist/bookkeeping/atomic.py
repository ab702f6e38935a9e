"""Files that are either whole or absent: write beside the target, flush to disk, rename."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def strict_json(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON text in ASCII: any string survives, lone surrogates too. Raises ValueError for NaN and infinities."""
    return json.dumps(value, allow_nan=False, indent=indent)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder; on success it is flushed and takes ``path``'s place, else removed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        fsync(temporary)
        os.replace(temporary, path)
        fsync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by UTF-8 ``text`` in one step."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def fsync(path: Path) -> None:
    """Flush a file's content or a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
