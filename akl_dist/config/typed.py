"""Strict conversion between the frozen configuration and plain dictionaries, and the list of all keys. Stdlib only.

Nothing is silently repaired: ``1.5`` for an integer, ``1`` for a boolean or a number for a text is refused, an integer for
a float is the one widening allowed (and YAML's list for a tuple). OmegaConf's own typed nodes would turn 1.5 into 1.
A leading ``~`` of a path (PATHS) becomes the home folder.
"""

from __future__ import annotations

import difflib
import os.path
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from functools import cache
from typing import Any, NoReturn

from akl_dist.config.schema import Config
from akl_dist.contract.errors import UserError, nearest

# Keys that may hold a path: a leading ~ means the home folder, which no shell expands after "key=".
PATHS = ("output_dir", "resume", "model.path", "critic.path", "data.path", "data.eval_path", "data.anchor_path", "rollout.replay")
_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


class FrozenDict(dict):
    """A dictionary that refuses every change; the value type of free-form keys. Pickles and copies as itself."""

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError("the configuration is frozen; compose a new one instead")

    __setitem__ = __delitem__ = update = setdefault = pop = popitem = clear = __ior__ = _refuse  # type: ignore[assignment]

    def __reduce__(self):  # the default protocol refills through __setitem__
        return FrozenDict, (dict(self),)

    def __deepcopy__(self, memo: dict) -> FrozenDict:
        return self


@cache
def hints() -> dict[str, Any]:
    """Every leaf key in dotted form, with its type: ``{"seed": int, "objective.kl.adaptive_target": float | None, ...}``."""
    return {path: hint for path, hint in _walk(Config, "") if not is_dataclass(hint)}


@cache
def sections() -> frozenset[str]:
    """Every inner node: ``data``, ``data.columns``, ``objective.kl``, ..."""
    return frozenset(path for path, hint in _walk(Config, "") if is_dataclass(hint))


@cache
def free_form() -> frozenset[str]:
    """Keys whose value is a dictionary with names of its own (``objective.policy_loss_params``)."""
    return frozenset(path for path, hint in hints().items() if typing.get_origin(hint) is dict)


def free_form_of(key: str) -> str | None:
    """The free-form dictionary that ``key`` names or lies in (``data.mixture`` for ``data.mixture.gsm8k.weight``), or None."""
    while key:
        if key in free_form():
            return key
        key = key.rpartition(".")[0]
    return None


def _walk(cls: type, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, hint in typing.get_type_hints(cls).items():
        yield prefix + name, hint
        if is_dataclass(hint):
            yield from _walk(typing.cast(type, hint), f"{prefix}{name}.")


def is_text(key: str) -> bool:
    """Whether a key holds text (or null), and no number."""
    hint = hints().get(key)
    members = typing.get_args(hint) or (hint,)
    return str in members and float not in members


def default(key: str) -> Any:
    """The schema's default of a leaf key."""
    node: Any = Config()
    for part in key.split("."):
        node = getattr(node, part)
    return node


def value_of(config: Config, key: str) -> Any:
    """The value at a dotted key."""
    node: Any = config
    for part in key.split("."):
        node = getattr(node, part)
    return node


def nearest_key(key: str) -> str | None:
    """The valid key closest to ``key``: by its whole path, else by its last name (``lr`` -> ``learner.lr``)."""
    valid = [*hints(), *sections()]
    last = key.rpartition(".")[2]
    same_last = [k for k in hints() if k.rpartition(".")[2] == last]
    if same_last:
        return max(same_last, key=lambda k: difflib.SequenceMatcher(None, key, k).ratio())
    by_path = nearest(key, valid)
    if by_path is not None:
        return by_path
    leaf = nearest(last, [k.rpartition(".")[2] for k in hints()])
    return next((k for k in hints() if k.rpartition(".")[2] == leaf), None)


def unknown_key(key: str) -> UserError:
    """The error for a key that does not exist, with the nearest one that does."""
    close = nearest_key(key)
    same_last = [name for name in hints() if name.rpartition(".")[2] == key]
    if len(same_last) > 1:
        close = " or ".join(same_last)
    return UserError(
        key, got="an unknown key", expected=f"{close}" if close else "a key of the schema",
        remedy=f"Write {close}." if close else "The keys are listed in akl_dist/config/schema.py.", stage="config",
    )


def expected_type(hint: Any) -> str:
    """A type in words, for messages: ``an integer or null``."""
    if hint is type(None):
        return "null"
    if _is_union(hint):
        return " or ".join(expected_type(member) for member in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"a list of {len(typing.get_args(hint))} numbers"
    if typing.get_origin(hint) is dict:
        return "a dictionary"
    return _NAMES[hint]


def convert(hint: Any, value: Any) -> Any:
    """``value`` as the schema's type.

    Raises:
        TypeError: it is of another type; the message is the expected type in words.
    """
    if _is_union(hint):
        return None if value is None else _converted_to_one_of(hint, value)
    origin = typing.get_origin(hint)
    if origin is tuple and isinstance(value, (list, tuple)) and len(value) == len(typing.get_args(hint)):
        return tuple(convert(member, item) for member, item in zip(typing.get_args(hint), value, strict=True))
    if origin is dict and isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return FrozenDict(value)
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if origin is None and type(value) is hint:
        return value
    raise TypeError(expected_type(hint))


def _converted_to_one_of(union: Any, value: Any) -> Any:
    """``value`` as the first member of ``union`` that takes it."""
    members = [member for member in typing.get_args(union) if member is not type(None)]
    for member in members:
        try:
            return convert(member, value)
        except TypeError:
            continue
    raise TypeError(" or ".join(expected_type(member) for member in members))


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def wrong_type(key: str, value: Any, expected: str) -> UserError:
    return UserError(key, got=repr(value), expected=expected, remedy=f"Give {key} {expected}.", stage="config")


def build(data: Mapping[str, Any]) -> tuple[Config, list[UserError]]:
    """A frozen configuration from a plain nested dictionary; keys left out take the schema's defaults.

    Returns the configuration (defaults where a value cannot be used) and every problem found; use it only if there is none.
    """
    problems: list[UserError] = []
    return _build(Config, data, "", problems), problems


def _build(cls: type, data: Mapping[str, Any], prefix: str, problems: list[UserError]) -> Any:
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for name, value in data.items():
        key = f"{prefix}{name}"
        if name not in hints:
            problems.append(unknown_key(key))
        elif is_dataclass(hints[name]):
            if isinstance(value, Mapping):
                values[name] = _build(hints[name], value, key + ".", problems)
            else:
                problems.append(wrong_type(key, value, "a group of keys"))
        else:
            try:
                values[name] = _expand_home(key, convert(hints[name], value))
            except TypeError as error:
                problems.append(wrong_type(key, value, str(error)))
    return cls(**values)


def _expand_home(key: str, value: Any) -> Any:
    """``~`` and ``~/x`` of a path as the home folder; ``~name`` stays, it may be a file."""
    if key in PATHS and isinstance(value, str) and (value == "~" or value.startswith("~/")):
        return os.path.expanduser(value)
    return value


def plain(config: Config) -> dict[str, Any]:
    """The configuration as nested dictionaries, lists and scalars (what YAML and JSON hold)."""
    return _plain(asdict(config))


def _plain(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {name: _plain(value) for name, value in node.items()}
    return [_plain(value) for value in node] if isinstance(node, (list, tuple)) else node


def leaves(config: Config) -> Iterator[tuple[str, Any]]:
    """Every leaf key with its value."""
    for key in hints():
        yield key, value_of(config, key)
