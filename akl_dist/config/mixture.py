"""``data.mixture``: its sources as frozen records, and what is wrong with them. Stdlib only."""

from __future__ import annotations

import os.path
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from typing import Any

from akl_dist.config import typed
from akl_dist.config.choices import CHOICES, CODE_RECIPES, GENERATED_RECIPES
from akl_dist.config.problems import problem
from akl_dist.config.schema import ColumnsConfig, Config, DataConfig
from akl_dist.contract.errors import UserError, nearest

RECIPE = "mixture"
"""``data.recipe`` of a run with several sources."""

OWN_WORDS = ("generic", "verl")  # recipes whose golds only the user knows how to judge: the run's own verifier by default
OWNED = ("name", "path", "split", "eval_path", "eval_split", "limit", "columns", "prompt_suffix")
"""Keys of ``data`` that every source has for itself."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_PATHS = ("path", "eval_path")


@dataclass(frozen=True)
class MixtureSource:
    """One source: ``data.mixture={<source>: {<field>: value, ...}}``.

    weight: share of the training prompts in proportion to the others' weights; 0 for a source that is only evaluated.
    recipe: the source's own name unless given. verifier: empty for the run's ``verify.kind``.
    max_response_tokens: limit of a response to its prompts, at most the run's. eval: whether it is evaluated.
    The others are the keys of ``data`` of the same names, for this source alone.
    """

    source: str
    recipe: str
    weight: float = 1.0
    verifier: str = ""
    max_response_tokens: int | None = None
    name: str | None = None
    path: str | None = None
    split: str = DataConfig.split
    eval_path: str | None = None
    eval_split: str = DataConfig.eval_split
    limit: int | None = None
    eval: bool = True
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    prompt_suffix: str | None = None

    def data(self, whole: DataConfig) -> DataConfig:
        """The ``data`` group as it would be for this source alone."""
        return replace(whole, recipe=self.recipe, mixture={}, **{key: getattr(self, key) for key in OWNED})


KEYS = tuple(one.name for one in fields(MixtureSource) if one.name != "source")


def natural_verifier(recipe: str) -> str:
    """The verifier that a recipe's golds are written for; empty where only the user can know."""
    return "code" if recipe in CODE_RECIPES else "" if recipe in OWN_WORDS else "math"


def mixture_sources(mixture: Mapping[str, Any]) -> tuple[MixtureSource, ...]:
    """The sources of a validated ``data.mixture``, in its order. Raises the first problem, a UserError, of one that is not."""
    sources, problems = read_mixture(mixture)
    if problems:
        raise problems[0]
    return sources


def shares(sources: typing.Sequence[MixtureSource]) -> dict[str, Fraction]:
    """Exact share of each trained source, of weights as written (0.1 is a tenth); they add up to 1."""
    weights = {one.source: Fraction(str(one.weight)) for one in sources if one.weight > 0}
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def verifiers(config: Config) -> frozenset[str]:
    """Every kind of verifier that a run's prompts ask for: ``verify.kind``, or those of the sources of a mixture."""
    sources = read_mixture(config.data.mixture)[0]
    return frozenset(one.verifier or config.verify.kind for one in sources) or frozenset({config.verify.kind})


def from_hub(data: DataConfig) -> list[str]:
    """Names of recipes or sources whose rows come from the hub."""
    alone = [(data.recipe, data.recipe, data.path)]
    mixed = [(one.source, one.recipe, one.path or (one.eval_path if one.weight == 0 else None))
             for one in read_mixture(data.mixture)[0]]
    return [label for label, recipe, path in mixed or alone if recipe not in GENERATED_RECIPES and path is None]


def read_mixture(mixture: Mapping[str, Any]) -> tuple[tuple[MixtureSource, ...], list[UserError]]:
    """The sources that can be read, and every problem of keys and types; values are checked by validate_data."""
    sources: list[MixtureSource] = []
    problems: list[UserError] = []
    for name, content in mixture.items():
        key = f"data.mixture.{name}"
        if not _NAME.fullmatch(str(name)):
            problems.append(problem(key, name, "letters, digits and _ . + - (it begins prompt ids)", "Rename it."))
        elif not isinstance(content, Mapping):
            problems.append(problem(key, content, "a group of keys such as {weight: 1}", "Write {} for the defaults."))
        else:
            found = _source(str(name), content, key)
            problems += found[1]
            if found[0] is not None:
                sources.append(found[0])
    return tuple(sources), problems


def _source(name: str, content: Mapping[str, Any], key: str) -> tuple[MixtureSource | None, list[UserError]]:
    hints = typing.get_type_hints(MixtureSource)
    values: dict[str, Any] = {}
    problems: list[UserError] = []
    for inner, value in content.items():
        if inner not in KEYS:
            close = nearest(str(inner), KEYS)
            problems.append(UserError(f"{key}.{inner}", got="an unknown key", expected=f"one of {', '.join(KEYS)}", stage="config",
                                      remedy=f"Write {close}." if close else "Leave it out."))
            continue
        try:
            values[inner] = _columns(value) if inner == "columns" else typed.convert(hints[inner], value)
        except TypeError as error:
            problems.append(typed.wrong_type(f"{key}.{inner}", value, str(error)))
    recipe = values.setdefault("recipe", name)
    if "recipe" not in content and recipe not in CHOICES["data.recipe"]:
        close = nearest(name, CHOICES["data.recipe"])
        problems.append(problem(f"{key}.recipe", None, "a recipe, where the source's name is none",
                                f"Write {close} for {name}, or give {name} recipe: generic." if close
                                else f"Give {name} recipe: generic (or another recipe)."))
    if problems:
        return None, problems
    for path in _PATHS:
        value = values.get(path)
        if value is not None and value.startswith("~/"):
            values[path] = os.path.expanduser(value)
    values.setdefault("verifier", natural_verifier(recipe))
    return MixtureSource(name, **values), []


def _columns(value: Any) -> ColumnsConfig:
    """Raises TypeError, with what it should be in words."""
    names = [one.name for one in fields(ColumnsConfig)]
    if not isinstance(value, Mapping) or not set(value) <= set(names) or not all(
            one is None or isinstance(one, str) for one in value.values()):
        raise TypeError(f"a group of column names: {', '.join(names)}")
    return ColumnsConfig(**value)
