"""Rules on ``data.mixture`` and ``data.template_kwargs``. Each refusal says why. Stdlib only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from akl_dist.config import typed
from akl_dist.config.choices import CHOICES, CODE_RECIPES, GENERATED_RECIPES
from akl_dist.config.mixture import OWN_WORDS, OWNED, RECIPE, MixtureSource, read_mixture, shares
from akl_dist.config.problems import Problems, Unread, local_data, problem
from akl_dist.config.schema import Config
from akl_dist.contract.errors import DataError, nearest

RESERVED = ("add_generation_prompt", "bos_token", "chat_template", "continue_final_message", "conversation", "eos_token",
            "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize",
            "tokenizer_kwargs", "truncation")
"""What the template is always given, or what changes more than its text; not to be set by ``data.template_kwargs``."""


_SPELLED = {"true": True, "yes": True, "false": False, "no": False}


def data_problems(config: Config) -> Problems:
    """Every rule of this module."""
    yield from _template_kwargs(config)
    data = config.data
    if not data.mixture:
        if data.recipe == RECIPE:
            yield problem("data.mixture", {}, f"at least one source with data.recipe={RECIPE}",
                          "Write data.mixture={gsm8k: {weight: 2}, math: {weight: 1}}.")
        return
    if data.recipe != RECIPE:
        yield problem("data.recipe", data.recipe, f"{RECIPE} with data.mixture, whose sources have recipes of their own",
                      f"Write data.recipe={RECIPE}, or leave data.mixture out.")
    sources, wrong = read_mixture(data.mixture)
    yield from wrong
    for source in sources:
        yield from _source(config, source, f"data.mixture.{source.source}")
    if not wrong and not any(source.weight > 0 for source in sources):
        yield problem("data.mixture", {one.source: one.weight for one in sources}, "a weight above 0 of at least one source",
                      "Give one source a weight; those of weight 0 are only evaluated.")
    yield from _cokl(config)


def data_unread(config: Config) -> Iterator[Unread]:
    """Keys that every source of a mixture has for itself."""
    for key in OWNED:
        for path in [one for one in typed.hints() if one == f"data.{key}" or one.startswith(f"data.{key}.")]:
            yield (path, not config.data.mixture, f"data.mixture={{}} (in a mixture every source has its own {key})")


def data_warnings(config: Config) -> Iterator[str]:
    """Settings that are allowed and probably not meant, one sentence each."""
    sources, wrong = read_mixture(config.data.mixture)
    if wrong:
        return
    for name, share in shares(sources).items():
        if share * config.rollout.prompts_per_step < 1:
            yield (f"data.mixture.{name}: {float(share):.3g} of rollout.prompts_per_step={config.rollout.prompts_per_step} is less "
                   "than one prompt: most steps hold none of it.")


def _template_kwargs(config: Config) -> Problems:
    for name, value in config.data.template_kwargs.items():
        key = f"data.template_kwargs.{name}"
        if not name.isidentifier():
            yield problem(key, name, "the name of a variable of the chat template", "Rename it (enable_thinking, for example).")
        elif name in RESERVED:
            yield problem(key, value, "another name: this one is set here for every prompt", "Leave it out.")
        elif isinstance(value, str) and value.casefold() in _SPELLED:
            yield problem(key, value, "true or false: a template takes any text for true", f"Write {key}="
                          f"{str(_SPELLED[value.casefold()]).lower()}.")
        elif not _plain(value):
            yield problem(key, value, "text, a finite number, true, false, null, or lists and dictionaries of them",
                          f"Give {name} such a value.")


def _plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_plain, value))
    if isinstance(value, dict):
        return all(isinstance(name, str) and _plain(one) for name, one in value.items())
    return value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))


def _source(config: Config, source: MixtureSource, key: str) -> Problems:
    """Values of one source."""
    recipes = [name for name in CHOICES["data.recipe"] if name != RECIPE]
    if source.recipe not in recipes:
        close = nearest(source.recipe, recipes)
        yield problem(f"{key}.recipe", source.recipe, f"one of {', '.join(recipes)}",
                      f"Write recipe: {close}." if close else "Choose one of them (generic for your own data).")
        return
    kinds = CHOICES["verify.kind"]
    if source.verifier and source.verifier not in kinds:
        close = nearest(source.verifier, kinds)
        yield problem(f"{key}.verifier", source.verifier, f"one of {', '.join(kinds)}",
                      f"Write verifier: {close}." if close else "Choose one of them.")
    elif source.recipe in CODE_RECIPES and source.verifier != "code":
        yield problem(f"{key}.verifier", source.verifier, f"code with recipe {source.recipe}, whose golds are tests",
                      "Leave verifier out.")
    if not (source.weight >= 0 and math.isfinite(source.weight)):
        yield problem(f"{key}.weight", source.weight, "a number of at least 0", "Give it one; 0 for a source only evaluated.")
    elif source.weight == 0 and not source.eval:
        yield problem(f"{key}.weight", source.weight, "above 0 with eval: false: nothing would use this source",
                      "Leave the source out.")
    if source.limit is not None and source.limit < 1:
        yield problem(f"{key}.limit", source.limit, "a number of at least 1", "Leave it out for all rows.")
    limit, longest = source.max_response_tokens, config.rollout.max_response_tokens
    if limit is not None and not 1 <= limit <= longest:
        yield problem(f"{key}.max_response_tokens", limit, f"a number from 1 to rollout.max_response_tokens={longest}, for which "
                      "engines and learner have room", "Lower it, or raise rollout.max_response_tokens.")
    yield from _places(source, key)


def _places(source: MixtureSource, key: str) -> Problems:
    for name in ("path", "eval_path"):
        yield from local_data(f"{key}.{name}", getattr(source, name))
    if source.path is not None and source.name is not None:
        yield problem(f"{key}.name", source.name, "null beside path", "Leave one of the two out.", DataError)
    elif source.recipe in GENERATED_RECIPES and source.name is not None:
        yield problem(f"{key}.name", source.name, f"null with recipe {source.recipe}, whose problems are generated",
                      "Leave name out.", DataError)
    elif source.recipe in OWN_WORDS and source.path is None and source.name is None and (
            source.weight > 0 or source.eval_path is None):
        yield problem(f"{key}.path", None, f"a file, or name, for recipe {source.recipe}", "Write path: FILE or name: HUB_NAME.",
                      DataError)
    elif source.weight == 0 and source.eval and source.path is not None and source.eval_path is None:
        yield problem(f"{key}.eval_path", None, "a file for a source of weight 0, which is only evaluated: nothing reads its path",
                      f"Write eval_path: {source.path} if these are the problems to evaluate.", DataError)


def _cokl(config: Config) -> Problems:
    cokl = config.objective.cokl
    if cokl.beta == 0:
        return
    if cokl.prompts == "anchor_dataset":
        yield problem("objective.cokl.prompts", cokl.prompts, "same with data.mixture, which has no retained task",
                      "Write objective.cokl.prompts=same.")
