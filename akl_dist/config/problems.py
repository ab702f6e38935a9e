"""How validation states a problem: the key, its value, the rule, the remedy. Stdlib only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from akl_dist.contract.errors import DataError, UserError

Problems = Iterator[UserError]

Unread = tuple[str, bool, str]
"""(key, whether the chosen variant reads it, what would read it)."""


def problem(key: str, value: Any, rule: str, remedy: str, kind: type[UserError] = UserError) -> UserError:
    return kind(key, got=repr(value), expected=rule, remedy=remedy, stage="config")


def local_data(key: str, path: str | None) -> Problems:
    """A path of data that is not there, or that this user may not read."""
    if path is not None and not Path(path).exists():
        yield problem(key, path, "an existing file (JSONL or Parquet) or folder", "Check the path.", DataError)
    elif path is not None and not os.access(path, os.R_OK):
        yield problem(key, path, "a file or folder that this user may read", "Mend its permissions, or use a copy.", DataError)
