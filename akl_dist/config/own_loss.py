"""A policy loss of the user's own, from the module that ``objective.policy_loss_module`` names.

Validation only looks whether the module is there; :func:`check_own_loss` imports it and calls the loss once, with torch, before
anything starts.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import math
import re
from collections.abc import Mapping
from typing import Any

from akl_dist.config.choices import POLICY_LOSS_PARAMS
from akl_dist.config.problems import Problems, problem
from akl_dist.config.schema import Config
from akl_dist.contract.errors import ConfigError, UserError

KEY = "objective.policy_loss_module"
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def own_loss_problems(config: Config) -> Problems:
    """What can be said about the module without importing it (a dotted name's parent package would be, by ``find_spec``)."""
    objective = config.objective
    module = str(objective.policy_loss_module)
    if not _MODULE.fullmatch(module) or not module_is_there(module):
        plain = module.rpartition("/")[2].removesuffix(".py")
        yield problem(KEY, module, "a module that Python finds (its name, without .py)", f"Write {KEY}={plain or 'my_losses'} and "
                      "start where that file is, or put its folder on PYTHONPATH.")
    if objective.policy_loss in POLICY_LOSS_PARAMS:
        yield problem("objective.policy_loss", objective.policy_loss, f"the name of a loss that {module} registers (this one is "
                      "built in, so nothing would read the module)", f"Name your loss, or leave {KEY} out.")


def module_is_there(module: str) -> bool:
    """Whether Python finds a module of this dotted name, without importing any part of it."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module without a spec, such as __main__
        return False
    name = top
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return False
        name = f"{name}.{part}"
        spec = importlib.machinery.PathFinder.find_spec(name, list(spec.submodule_search_locations))
    return spec is not None


def check_own_loss(config: Config) -> None:
    """Import the module, where one is named, hold its loss's signature against ``objective.policy_loss_params``, and call the loss
    once on two sequences of three tokens.

    Raises:
        ConfigError: it cannot be imported, registers nothing, lacks the loss or one of its parameters, or the loss fails there.
    """
    objective = config.objective
    if objective.policy_loss_module is None:
        return
    from akl_dist.objective import check_policy_loss, load_policy_loss_module

    subject = KEY
    try:
        load_policy_loss_module(objective.policy_loss_module)
        subject = "objective.policy_loss"
        check_policy_loss(objective.policy_loss, objective.policy_loss_params)
        _try_once(objective.policy_loss, objective.policy_loss_params)
    except ValueError as error:
        raise ConfigError([UserError(subject, got=str(error), expected="a policy loss of your own that the configuration fits",
                                     remedy="docs/changing_the_objective.md has a complete example.", stage="config")]) from error


def _try_once(name: str, params: Mapping[str, Any]) -> None:
    """One call on [2, 3] tokens close to the anchor, the last of the second row masked and NaN, one advantage of either sign.

    Raises:
        ValueError: the loss raises, has another shape, is not finite, or gives no finite gradient in ``logp``.
    """
    import torch

    from akl_dist.objective import policy_loss

    anchor = torch.tensor([[-0.5, -1.0, -2.0], [-0.2, -3.0, math.nan]])
    logp = (anchor + torch.tensor([[0.0, 0.01, -0.01], [0.01, -0.01, 0.0]])).requires_grad_(True)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    where = f"policy loss {name!r} on a [2, 3] trial batch"
    try:
        loss = policy_loss(name, logp=logp, anchor_logp=anchor, advantages=torch.tensor([1.0, -1.0]), mask=mask, **params)
        finite, trains = bool(loss.isfinite().all()), loss.requires_grad
        if finite and trains:
            loss.sum().backward()
    except (Exception, SystemExit) as error:  # code of the user's own may raise anything; it is raised again, with its name
        raise ValueError(f"{where}: {type(error).__name__}: {error}") from error
    if not finite:
        raise ValueError(f"{where}: a loss that is not finite: {loss.tolist()}")
    gradient = logp.grad
    if gradient is None or not bool(gradient.any()):
        raise ValueError(f"{where}: no gradient in logp; weight logp, or a ratio made of it, and detach neither")
    if not bool(gradient.isfinite().all()):
        raise ValueError(f"{where}: a gradient in logp that is not finite: {gradient.tolist()}")
