"""Composition: YAML groups + command-line overrides -> one frozen :class:`Config`. The only user of OmegaConf, with command_line.

Hydra composes, but its schema node is a *plain* dictionary of the dataclasses' defaults, and the result is converted by
``typed.build``: frozen dataclasses in Hydra's ConfigStore refuse every override, and OmegaConf's typed nodes repair values
silently (``seed=1.5`` becomes 1). Overrides of free-form dictionaries are applied after Hydra, which could only merge them
(see _apply_free_form). ``@hydra.main`` is not used: it would change output folders and logging, and answers
mistakes before this code runs. Sweeps keep Hydra's grammar and its sweeper's order (see command_line.sweep).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from akl_dist.config import typed
from akl_dist.config.resolve import with_implied_kind
from akl_dist.config.schema import Config
from akl_dist.contract.errors import ConfigError, UserError

# Where a run is written and how it is started, not what it computes.
NOT_HASHED = ("run_id", "output_dir", "resume", "dry_run", "debug")

# Each free-form dictionary with the key that names whose parameters it holds.
NAMED_BY = {"objective.policy_loss_params": "objective.policy_loss"}


@cache
def conf_dir() -> Path:
    """The folder of YAML files: ``akl_dist/conf`` in an installed wheel, ``conf`` beside the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError([UserError(
        "conf", got=f"no config.yaml in {package / 'conf'} or {package.parent / 'conf'}", expected="the shipped YAML files",
        remedy="Reinstall the package, or run from a complete checkout.", stage="config",
    )])


def group_choices(extra_folders: Sequence[Path] = ()) -> dict[str, list[str]]:
    """Configuration groups and their choices, from the folders: ``{"data": ["gsm8k", ...], "objective/kl": [...], ...}``."""
    choices: dict[str, set[str]] = {}
    for root in (conf_dir(), *extra_folders):
        for file in sorted(root.rglob("*.yaml")):
            group = file.parent.relative_to(root).as_posix()
            if group != ".":
                choices.setdefault(group, set()).add(file.stem)
    return {group: sorted(names) for group, names in sorted(choices.items())}


@contextmanager
def _hydra() -> Iterator[None]:
    ConfigStore.instance().store(name="schema", node=typed.plain(Config()))
    with initialize_config_dir(config_dir=str(conf_dir()), job_name="akl_dist", version_base="1.3"):
        yield


def _split_free_form(overrides: Sequence[str]) -> tuple[list[str], list[Override]]:
    """Hydra's share of the overrides, and those of free-form dictionaries and of the keys that name them."""
    shared, own = [], []
    for line, override in zip(overrides, OverridesParser.create().parse_overrides(list(overrides)), strict=True):
        key = override.key_or_group
        is_own = typed.free_form_of(key) or key in NAMED_BY.values()
        if is_own and not override.is_delete() and not override.is_sweep_override():
            own.append(override)
        else:
            shared.append(line)
    return shared, own


def _apply_free_form(composed: DictConfig, overrides: Sequence[Override]) -> None:
    """Put the command line's free-form values over those of the files, from left to right.

    ``params={...}`` replaces the dictionary, ``params.name=value`` changes one entry. A command line that names something
    else than the files do (``objective.policy_loss=gspo`` over DAPO) drops the files' parameters, which were not meant for it.
    """
    for params, named_by in NAMED_BY.items():
        named = [override for override in overrides if override.key_or_group == named_by]
        if named:
            of_files = OmegaConf.select(composed, named_by)
            OmegaConf.update(composed, named_by, named[-1].value())
            if OmegaConf.select(composed, named_by) != of_files:
                OmegaConf.update(composed, params, {}, merge=False)
    for override in overrides:
        if override.key_or_group not in NAMED_BY.values():
            OmegaConf.update(composed, override.key_or_group, override.value(), merge=False, force_add=True)


def compose_plain(overrides: Sequence[str], *, with_hydra: bool = False) -> dict[str, Any]:
    """The composed configuration as nested dictionaries, interpolations resolved, types unchecked.

    Args:
        overrides: as ``command_line.check_command_line`` returns them, without sweeps.
        with_hydra: keep only what a sweep needs of Hydra's own node, under ``"sweep"``.
    Raises:
        ConfigError: Hydra or OmegaConf cannot compose them.
    """
    try:
        shared, own = _split_free_form(overrides)
        with _hydra():
            composed = hydra_compose("config", overrides=shared, return_hydra_config=with_hydra)
        if with_hydra:
            params = OmegaConf.select(composed, "hydra.sweeper.params")
            return {"sweep": {} if params is None else OmegaConf.to_container(params)}
        _apply_free_form(composed, own)
        data = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__
        detail = f"{error} ({cause})" if cause is not None and str(cause) not in str(error) else str(error)
        raise ConfigError([UserError(
            "composition", got=" ".join(detail.split()), expected=f"YAML groups of {conf_dir()} and overrides that compose",
            remedy="Mend the file or override named.", stage="config",
        )]) from error
    assert isinstance(data, dict)
    return {str(name): value for name, value in data.items()}


def compose(overrides: Sequence[str]) -> Config:
    """The frozen configuration for ``overrides`` (``["+exp=tiny", "learner.lr=1e-4"]``). Types checked, values not yet
    (``validate.validate``). ``verify.custom`` or ``verify.http_url`` alone say which kind of verifier is meant.

    Raises:
        ConfigError: every unknown key and value of a wrong type, also those in YAML files.
    """
    config, problems = typed.build(compose_plain(overrides))
    if problems:
        raise ConfigError(problems)
    said = any(override.lstrip("+").startswith("verify.kind=") for override in overrides)
    return config if said else with_implied_kind(config)


def beaten_choices(overrides: Sequence[str], config: Config) -> list[str]:
    """Keys of a group chosen on the command line that have another value all the same, because the experiment's own file sets them
    (Hydra puts ``+exp`` over every group): one sentence for each group, empty where all is as chosen."""
    found, choices = [], group_choices()
    given = [override.partition("=")[0].lstrip("+") for override in overrides]
    for override in overrides:
        group, _, choice = override.partition("=")
        if group == "exp" or choice not in choices.get(group, ()):
            continue
        text = (conf_dir() / group / f"{choice}.yaml").read_text(encoding="utf-8")
        prefix = "" if "@package _global_" in text else group.replace("/", ".") + "."
        wanted = {prefix + key: value for key, value in _scalars(yaml.safe_load(text) or {}) if prefix + key in typed.hints()}
        beaten = {key: typed.value_of(config, key) for key, value in wanted.items()
                  if key not in given and typed.value_of(config, key) != value}
        if beaten:
            values = ", ".join(f"{key}={value} (not {wanted[key]})" for key, value in beaten.items())
            found.append(f"{override}: the experiment's own file keeps {values}; write the keys out to change them.")
    return found


def _scalars(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}.")
        elif name != "defaults" and not (isinstance(value, str) and "${" in value):
            yield prefix + name, float(value) if _is_number_text(value) else value


def _is_number_text(value: Any) -> bool:
    """YAML 1.1 reads 1e-3 as text; OmegaConf as a number."""
    return isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value) is not None


def to_yaml(config: Config) -> str:
    """Text of ``config.yaml`` in the run directory; ``from_yaml`` reads it back to an equal configuration."""
    return yaml.safe_dump(typed.plain(config), sort_keys=False, allow_unicode=True)


def from_yaml(text: str) -> Config:
    """The configuration that ``to_yaml`` wrote.

    Raises:
        ConfigError: not YAML, unknown keys (written by another version), or values of a wrong type.
    """
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        data = error
    if not isinstance(data, dict):
        raise ConfigError([UserError(
            "config.yaml", got=str(data)[:200], expected="a YAML mapping written by this program",
            remedy="Use the config.yaml of a run directory.", stage="config",
        )])
    config, problems = typed.build(data)
    if problems:
        raise ConfigError(problems)
    return config


def config_hash(config: Config) -> str:
    """SHA-256 (hex) of all keys that decide what a run computes; NOT_HASHED keys do not."""
    content = {key: value for key, value in typed.leaves(config) if key not in NOT_HASHED}
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=True).encode()).hexdigest()
