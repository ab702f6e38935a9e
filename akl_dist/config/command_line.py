"""The command line of every Hydra-composed command, checked before anything is composed.

Hydra's own parser reads each argument, so its grammar (quotes, lists, ``1,2``, ``range(0,5)``, ``choice``, ``glob``) is
unchanged. What Hydra would let pass or answer badly is refused here: unknown keys (it advises ``+key``), ``++``, ``~``,
``+`` except ``+exp=``, and ``hydra.*`` except ``hydra.searchpath``. All problems are collected and raised once.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, OverrideType, Quote, QuotedString, ValueType
from hydra.errors import HydraException

from akl_dist.config import typed
from akl_dist.config.compose import compose_plain, group_choices
from akl_dist.contract.errors import ConfigError, UserError, beginning_with, nearest

OPTIONS = {"-m": "multirun", "--multirun": "multirun", "-h": "help", "--help": "help"}
MAY_BE_EMPTY = ("data.prompt_suffix", "data.system_prompt")  # the empty text means something else than null
NEVER_SWEPT = ("run_id", "output_dir", "resume")
MANY = 6  # more candidates than these are no advice


@dataclass(frozen=True)
class ParsedCommand:
    """A command line without mistakes.

    Attributes:
        overrides: for ``compose`` (or ``sweep`` when ``multirun``), normalised so that Hydra reads them as meant.
        multirun: ``-m`` was given.
        help: ``-h`` was given.
    """

    overrides: tuple[str, ...] = ()
    multirun: bool = False
    help: bool = False


def check_command_line(argv: Sequence[str]) -> ParsedCommand:
    """Check ``sys.argv[1:]``.

    Raises:
        ConfigError: every mistake at once, each with the nearest valid key, group choice or option.
    """
    problems: list[UserError] = []
    flags: set[str] = set()
    lines: list[str] = []
    for argument in argv:
        if argument in OPTIONS:
            flags.add(OPTIONS[argument])
        elif argument.startswith("-"):
            problems.append(_unknown("option", argument, list(OPTIONS)))
        else:
            lines.append(argument)
    parsed = [override for line in lines if (override := _parse(line, problems)) is not None]
    folders = _search_folders(parsed, problems)
    checker = _Checker(group_choices(folders), multirun="multirun" in flags, problems=problems)
    overrides = tuple(text for override in parsed if (text := checker.check(override)) is not None)
    experiments = [override.input_line for override in parsed if override.key_or_group == "exp"]
    if len(experiments) > 1:
        problems.append(_problem("exp", got=" ".join(map(str, experiments)), expected="one experiment",
                                 remedy="Leave one; with -m, +exp=A,B runs one after the other."))
    if problems:
        raise ConfigError(problems)
    if folders:
        overrides += ("hydra.searchpath=[" + ",".join(_quoted(f"file://{folder}") for folder in folders) + "]",)
    return ParsedCommand(overrides, "multirun" in flags, "help" in flags)


def sweep(command: ParsedCommand, *, stamp: str) -> list[list[str]]:
    """The override lists of a multirun's jobs, in the order of Hydra's basic sweeper (last key varies fastest).

    Comma lists, ``range``, ``choice`` and ``glob`` mean what they mean to Hydra. An experiment file may bring a sweep along
    under ``hydra.sweeper.params`` (as with Hydra); the command line wins per key. Jobs run one after another; each gets a
    run directory of its own, ``<output_dir>/<experiment>/multirun-<stamp or run_id>/<job number>``.

    Args:
        command: a checked command line.
        stamp: names the multirun when no ``run_id`` is given.
    """
    parser = OverridesParser.create()
    given = parser.parse_overrides(list(command.overrides))
    fixed = [override.input_line or "" for override in given if not override.is_sweep_override()]
    params = compose_plain(fixed, with_hydra=True)["sweep"]
    from_file = check_command_line(["-m", *(f"{key}={value}" for key, value in params.items())])
    ordered = parser.parse_overrides([*from_file.overrides, *command.overrides])
    choices = group_choices(_search_folders(ordered, []))
    for override in ordered:
        if isinstance(override._value, Glob):
            override._value, override.value_type = override._value.filter(choices[override.key_or_group]), ValueType.CHOICE_SWEEP
    run_id = next((str(o.value()) for o in ordered if o.key_or_group == "run_id"), stamp)
    jobs = BasicSweeper.split_arguments([o for o in ordered if o.key_or_group != "run_id"], max_batch_size=None)[0]
    width = len(str(max(len(jobs) - 1, 0)))
    return [[*job, f"run_id={_quoted(f'multirun-{run_id}/{index:0{width}d}')}"] for index, job in enumerate(jobs)]


def help_text(command: str, example: str, *, sweeps: bool = True) -> str:
    """What ``--help`` prints: usage, an example, groups with their choices, keys with their defaults; with ``sweeps`` also -m."""
    usage = f"usage: python -m {command} [+exp=NAME] [group=CHOICE ...] [key=value ...]" + " [-m]" * sweeps
    lines = [usage, "", f"example: {example}", ""]
    lines += ["groups (group=CHOICE; +exp=NAME for an experiment):"]
    lines += [textwrap.fill(f"{group:14s} {', '.join(names)}", 110, initial_indent="  ", subsequent_indent=" " * 17)
              for group, names in group_choices().items()]
    lines += ["", "keys and defaults (key=value):"]
    lines += [f"  {key} = {_shown(typed.default(key))}" for key in typed.hints()]
    if sweeps:
        lines += ["", "-m runs every combination of comma lists and ranges, one after another: seed=0,1,2"]
    return "\n".join(lines)


class _Checker:
    """Checks one parsed override at a time; ``check`` returns its normalised text, or None after adding a problem."""

    def __init__(self, choices: dict[str, list[str]], *, multirun: bool, problems: list[UserError]) -> None:
        self.choices, self.multirun, self.problems = choices, multirun, problems

    def check(self, override: Override) -> str | None:
        line, key = override.input_line or "", override.key_or_group
        if key == "hydra.searchpath" and override.type == OverrideType.CHANGE:
            return None  # taken up by _search_folders
        problem = self._form(override)
        if problem is not None:
            self.problems.append(problem)
            return None
        is_sweep = override.is_sweep_override()
        if is_sweep and not self.multirun:
            self.problems.append(_problem(
                key, got=line, expected="one value, or -m for a sweep",
                remedy=f"Add -m to run every value; for a text with a comma quote twice: '{key}=\"a,b\"'.",
            ))
            return None
        if is_sweep and (override.value_type == ValueType.INTERVAL_SWEEP or key in NEVER_SWEPT):
            self.problems.append(_problem(
                key, got=line, expected="a list of values (1,2,3), range(), choice() or glob(), of a key other than "
                + ", ".join(NEVER_SWEPT), remedy="Sweep experiment settings; run folders are named by the sweep.",
            ))
            return None
        return self._group(override) if key in self.choices else self._key(override)

    def _form(self, override: Override) -> UserError | None:
        line, key = override.input_line or "", override.key_or_group
        if (override.is_delete() or override.is_force_add()) and not override.is_hydra_override():
            if not self._is_known(key):
                return typed.unknown_key(key)
            remedy = f"Every key exists already: write {line[2:]}." if override.is_force_add() else self._instead(key)
            return _problem(key, got=line, expected="key=value", remedy=remedy)
        if key == "hydra" or override.is_hydra_override():
            return _problem(key, got=line, expected="hydra.searchpath only", remedy="Use output_dir=, run_id=, resume= or -m.")
        if override.package is not None:
            return _problem(key, got=line, expected="group=CHOICE without @package", remedy=f"Write {key}=...")
        if override.is_add() and key != "exp":
            return _problem(line, got="a + override", expected="+exp=NAME only",
                            remedy=f"Write {line[1:]}.") if self._is_known(key) else typed.unknown_key(key)
        if key == "exp" and not override.is_add():
            return _problem(line, got="exp without +", expected="+exp=NAME", remedy=f"Write +{line}.")
        return None

    def _is_known(self, key: str) -> bool:
        return bool(typed.free_form_of(key)) or key in typed.hints() or key in typed.sections() or key in self.choices

    def _instead(self, key: str) -> str:
        """What to write instead of ``~key``."""
        if key in self.choices:
            return f"Every group has a choice: write {key}=CHOICE, one of {', '.join(self.choices[key])}."
        if key in typed.sections():
            return f"A group of keys always exists: set its keys: {_below(key)}."
        free = typed.free_form_of(key)
        if free is not None:
            return f"Write {free}={{name: value, ...}} for the whole dictionary ({free}={{}} empties it)."
        return "Every key exists already: set it (key=value or key=null)."

    def _group(self, override: Override) -> str | None:
        group, names = override.key_or_group, self.choices[override.key_or_group]
        value = override._value
        wanted = value.filter(names) if isinstance(value, Glob) else _values(override)
        if not wanted:
            self.problems.append(_problem(group, got=override.input_line or "", expected=f"one of {', '.join(names)}",
                                          remedy="The pattern matches nothing."))
        bad = [name for name in wanted if name not in names]
        self.problems.extend(_unknown(f"choice of {group}", str(name), names, subject=group) for name in bad)
        return override.input_line if wanted and not bad else None

    def _key(self, override: Override) -> str | None:
        key, line = override.key_or_group, override.input_line or ""
        if typed.free_form_of(key) not in (None, key):
            return line  # names inside are free here; validate() knows which exist
        if key in typed.sections():
            return self._section(key, override)
        if key not in typed.hints():
            self.problems.append(self._unknown_key(key, line))
            return None
        hint = typed.hints()[key]
        for value in _values(override):
            if isinstance(value, str) and "${" in value:
                continue  # an interpolation: its type shows after composition
            if value == "" and not (key in MAY_BE_EMPTY and _is_quoted(override)):
                empty = f", '{key}=\"\"' for the empty text" if key in MAY_BE_EMPTY else ""
                self.problems.append(_problem(key, got=f"{key}= (nothing)", expected=typed.expected_type(hint),
                                              remedy=f"Give a value (null for none{empty})."))
                return None
            if typed.is_text(key) and isinstance(value, (bool, int, float)) and not override.is_sweep_override():
                return f"{key}={_quoted(line.partition('=')[2].strip())}"  # run_id=123_4 is a name, not the number 1234
            try:
                typed.convert(hint, value)
            except TypeError as error:
                self.problems.append(typed.wrong_type(key, value, str(error)))
                return None
        return line

    def _section(self, key: str, override: Override) -> str | None:
        """``data.columns={prompt: q}``: the names inside must exist; types are checked after composition."""
        if all(isinstance(value, dict) for value in _values(override)):
            unknown = {name: None for value in _values(override) for name in _names(key, value) if not self._is_known(name)}
            self.problems.extend(typed.unknown_key(name) for name in unknown)
            return None if unknown else override.input_line
        line, group = override.input_line or "", key.replace(".", "/")
        if override.value() in self.choices.get(group, []):
            self.problems.append(_problem(key, got=line, expected="a group, with /", remedy=f"Write {group}={override.value()}."))
            return None
        self.problems.append(_problem(key, got=line, expected="a key of the group", remedy=f"Set one of its keys: {_below(key)}."))
        return None

    def _unknown_key(self, key: str, line: str) -> UserError:
        as_group = key.replace(".", "/")
        if as_group in self.choices:
            return _problem(key, got=line, expected=f"the group {as_group}", remedy=f"Write {as_group}={line.partition('=')[2]}.")
        group = nearest(key, self.choices)
        if "/" in key or (group is not None and typed.nearest_key(key) is None):
            return _unknown("group", key, list(self.choices), subject=key)
        return typed.unknown_key(key)


def _below(section: str) -> str:
    """The first keys of a section, for a message."""
    below = [key for key in typed.hints() if key.startswith(section + ".")]
    return ", ".join(below[:MANY]) + (", ..." if len(below) > MANY else "")


def _names(key: str, value: dict[Any, Any]) -> Iterator[str]:
    """Dotted names of everything in a section's dictionary."""
    for name, item in value.items():
        yield f"{key}.{name}"
        if isinstance(item, dict) and f"{key}.{name}" in typed.sections():
            yield from _names(f"{key}.{name}", item)


def _parse(line: str, problems: list[UserError]) -> Override | None:
    try:
        return OverridesParser.create().parse_overrides([line])[0]
    except HydraException:
        key, equals, value = line.partition("=")
        if typed.is_text(key) and not re.search(r"""['"\\\[\]{}]|^(choice|range|glob|interval|shuffle|sort|tag|str)\(""", value):
            return OverridesParser.create().parse_overrides([f"{key}={_quoted(value)}"])[0]  # a path such as "/a (b)/c=d"
        remedy = f"Quote the value twice, for the shell and for the grammar: {_for_shell(key, value)}." if equals else (
            f"Write key=value; for an experiment +exp={line}.")
        problems.append(_problem(line, got="an argument that cannot be read", expected="key=value", remedy=remedy))
        return None


def _values(override: Override) -> list[Any]:
    """The value, or all values of a sweep, with quotes removed (globs: none)."""
    if not override.is_sweep_override():
        return [override.value()]
    if isinstance(override._value, Glob) or not override.is_discrete_sweep():
        return []
    return [Override._convert_value(value) for value in override.sweep_iterator()]


def _search_folders(overrides: Sequence[Override], problems: list[UserError]) -> list[Path]:
    """Folders of ``hydra.searchpath=[DIR, ...]``: more YAML groups beside the shipped ones."""
    folders: list[Path] = []
    for override in overrides:
        if override.key_or_group != "hydra.searchpath":
            continue
        value = override.value()
        for entry in value if isinstance(value, list) else [value]:
            folder = Path(str(entry).removeprefix("file://")).expanduser().resolve()
            if folder.is_dir():
                folders.append(folder)
            else:
                problems.append(_problem("hydra.searchpath", got=str(entry), expected="existing folders of YAML groups",
                                         remedy="Write hydra.searchpath=[DIR]."))
    return folders


def _unknown(what: str, name: str, valid: list[str], *, subject: str = "") -> UserError:
    containing = [one for one in valid if name and name.lower() in one.lower()]
    close = beginning_with(name, valid)
    stem = min(close, key=len, default="")
    if not close or len(close) > MANY or all(one.startswith(stem) for one in close):  # gsm: gsm8k, not gsm8k_math as well
        close = [one for one in (nearest(name, valid),) if one] or containing[:1]
    return _problem(subject or name, got=f"unknown {what} {name}", expected=f"one of {', '.join(valid)}",
                    remedy=f"Write {' or '.join(close)}." if close else "Choose one of them.")


def _problem(subject: str, *, got: str, expected: str, remedy: str) -> UserError:
    return UserError(subject, got=got, expected=expected, remedy=remedy, stage="config")


def _quoted(text: str) -> str:
    return QuotedString(text, Quote.single).with_quotes()


def _for_shell(key: str, value: str) -> str:
    """``key=value`` as typed into a shell, for a text that Hydra's grammar could not read; outer quotes are taken as quotes."""
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1]
    return shlex.quote(f"{key}={QuotedString(value, Quote.double).with_quotes()}")


def _is_quoted(override: Override) -> bool:
    """Whether an empty value was written as ``""``; inside a sweep Hydra reads no other kind of it."""
    return override.is_sweep_override() or isinstance(override._value, QuotedString)


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
