"""How validation states a problem: the key, its value, the rule, the remedy. Stdlib only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from akl_dist.contract.errors import UserError

Problems = Iterator[UserError]

Unread = tuple[str, bool, str]
"""(key, whether the chosen variant reads it, what would read it)."""


def problem(key: str, value: Any, rule: str, remedy: str, kind: type[UserError] = UserError) -> UserError:
    return kind(key, got=repr(value), expected=rule, remedy=remedy, stage="config")
