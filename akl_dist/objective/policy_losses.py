"""Policy losses per token, by name: the registry, the dispatcher, and the losses of one ratio per token or sequence.

Formulas: PPO (arXiv 1707.06347, eq. 7), DAPO's asymmetric window (arXiv 2503.14476), dual clip (arXiv 1912.09729, eq. 5),
GSPO's token form (arXiv 2507.18071, eq. 13), CISPO (arXiv 2506.13585, eq. 4). Cumulative ratios and losses that measure
the distance to the anchor in probabilities are in `cumulative_losses` and `proximity_losses`.

A loss is a function of keyword arguments `logp, anchor_logp, advantages, mask` plus its own named parameters. The
dispatcher hands it clean inputs: one shape, float32 or better, anchor and advantages detached, zeros where masked.
Register one of your own from a module that the configuration names (`load_policy_loss_module`):

    @register_policy_loss("mine")
    def mine(*, logp, anchor_logp, advantages, mask, scale=1.0):
        return -scale * advantages * logp
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from akl_dist.objective._checks import require, require_name, require_rows, require_shape
from akl_dist.objective.masking import as_bool, at_least_float32, select
from akl_dist.objective.ratios import bounded_log_ratio

PolicyLoss = Callable[..., Tensor]
POLICY_LOSSES: dict[str, PolicyLoss] = {}
_LOADED: set[str] = set()  # modules of load_policy_loss_module
_TENSORS = ("logp", "anchor_logp", "advantages", "mask")


def register_policy_loss(name: str) -> Callable[[PolicyLoss], PolicyLoss]:
    """Decorator that adds a policy loss to `POLICY_LOSSES`; raises `ValueError` on a taken name or bad signature."""

    def add(function: PolicyLoss) -> PolicyLoss:
        parameters = inspect.signature(function).parameters
        open_ended = [p.name for p in parameters.values() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        missing = [tensor for tensor in _TENSORS if tensor not in parameters]
        require(
            not open_ended and not missing,
            f"policy loss {name!r}",
            got=f"signature {inspect.signature(function)}",
            expected=f"keyword arguments {', '.join(_TENSORS)} and named parameters only",
            remedy="name every parameter, so that a misspelt one is refused",
        )
        taken = POLICY_LOSSES.get(name)
        same = taken is not None and (taken.__module__, taken.__qualname__) == (
            function.__module__,
            function.__qualname__,
        )
        require(
            taken is None or same,
            f"policy loss {name!r}",
            got="a second registration",
            expected="a new name",
            remedy="register your loss under a name of its own",
        )
        POLICY_LOSSES[name] = function
        return function

    return add


def load_policy_loss_module(name: str) -> None:
    """Import a module of one's own that registers policy losses; a second call does nothing.

    Args:
        name: importable module name ("my_losses" for a my_losses.py in the working directory or on PYTHONPATH).

    Raises: `ValueError` naming the module where it cannot be imported, or registers no policy loss.
    """
    if name in _LOADED:
        return
    before = set(POLICY_LOSSES)
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:  # code of the user's own may raise anything; it is raised again, with its name
        raise ValueError(
            f"policy loss module {name!r}: got {type(error).__name__}: {error}; expected a module that can be imported; "
            "mend it, or put its folder on PYTHONPATH (the working directory is searched by `python -m`)"
        ) from error
    earlier = any(f.__module__ == name or f.__module__.startswith(f"{name}.") for f in POLICY_LOSSES.values())
    require(
        earlier or bool(set(POLICY_LOSSES) - before),
        f"policy loss module {name!r}",
        got="an import that registered no policy loss",
        expected='at least one function decorated with @register_policy_loss("name")',
        remedy="decorate a function at the top level of the module",
    )
    _LOADED.add(name)


def check_policy_loss(name: str, params: Mapping[str, object]) -> None:
    """Raise `ValueError` unless `name` is registered, takes every one of `params`, and needs no other."""
    parameters = inspect.signature(POLICY_LOSSES[require_name("policy loss", name, POLICY_LOSSES)]).parameters
    accepted = [parameter for parameter in parameters if parameter not in _TENSORS]
    for parameter in params:
        require_name(f"parameter of policy loss {name!r}", parameter, accepted)
    missing = [p for p in accepted if parameters[p].default is inspect.Parameter.empty and p not in params]
    require(
        not missing,
        f"policy loss {name!r}",
        got=f"no value for {', '.join(missing)}",
        expected="a value for every parameter without a default",
        remedy="set it in policy_loss_params",
    )


def policy_loss(
    name: str, *, logp: Tensor, anchor_logp: Tensor, advantages: Tensor, mask: Tensor, **params: float | str | None
) -> Tensor:
    """Per-token policy loss to be minimised, 0 where masked; differentiable in `logp` only.

    Args:
        name: key of `POLICY_LOSSES`.
        logp: log pi of the sampled tokens, [B, T] padded or [n] packed.
        anchor_logp: log-probabilities of the anchor policy (old or rollout), same shape; detached.
        advantages: [B] (one per row of a padded batch) or the shape of `logp`; detached.
        mask: same shape, bool or float, non-zero on tokens that the policy sampled. Masked entries of every other
            input may hold NaN.
        params: the named loss's own parameters.

    Returns: tensor of the shape of `logp`.
    Raises: `ValueError` on an unknown name or parameter (with the nearest valid one) or on shapes that differ.
    """
    check_policy_loss(name, params)
    function = POLICY_LOSSES[name]
    logp = at_least_float32(logp)
    require_shape("anchor_logp", anchor_logp, logp.shape)
    require_shape("mask", mask, logp.shape)
    keep = as_bool(mask)
    loss = function(
        logp=select(logp, keep),
        anchor_logp=select(anchor_logp.detach().to(logp.dtype), keep),
        advantages=select(_per_token(advantages, logp), keep),
        mask=keep,
        **params,
    )
    require_shape(f"result of policy loss {name!r}", loss, logp.shape)
    return select(loss, keep)


def _per_token(advantages: Tensor, logp: Tensor) -> Tensor:
    """Advantages as a detached tensor of the shape of `logp`; a row's advantage holds for all its tokens."""
    advantages = advantages.detach().to(logp.dtype)
    if logp.dim() == 2 and advantages.shape == logp.shape[:1]:
        return advantages.unsqueeze(-1).expand_as(logp)
    require_shape("advantages", advantages, logp.shape)
    return advantages


def clipped_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    *,
    low: Tensor | float,
    high: Tensor | float,
    ceiling: float | Tensor | None = None,
) -> Tensor:
    """max(-A r, -A clip(r, low, high)); with a `ceiling` (dual clip), for A < 0 at most -A ceiling.

    Args:
        ratio: [B, T] or [n], carries the gradient.
        low, high: bounds of the ratio, numbers or tensors of its shape.
    """
    lowest, highest = (torch.as_tensor(bound, dtype=ratio.dtype, device=ratio.device) for bound in (low, high))
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(lowest, highest)
    # `where` rather than `maximum`: at a tie (ratio inside the window) the whole gradient flows through one branch.
    loss = torch.where(unclipped >= clipped, unclipped, clipped)
    if ceiling is None:
        return loss
    most = -advantages * ceiling
    return torch.where((advantages < 0) & (loss > most), most, loss)


def current_token_ratio(log_ratio: Tensor, logp: Tensor) -> Tensor:
    """exp(sg(log_ratio)) whose gradient with respect to `logp` is the current token's alone, value bounded to e^+-20.

    For ratios of a whole sequence or prefix: the other tokens' part is a constant.
    """
    return bounded_log_ratio(log_ratio.detach().to(logp.dtype) + (logp - logp.detach())).exp()


def weighted_score(weight: Tensor, *, logp: Tensor, advantages: Tensor) -> Tensor:
    """-A sg(weight) logp: the score-function form, whose gradient in logp_t is -A weight_t."""
    return -advantages * weight.detach() * logp


def _require_window(loss: str, clip_low: float | None, clip_high: float) -> None:
    low = clip_low is None or 0 <= clip_low <= 1
    require(low, f"{loss} clip_low", got=clip_low, expected="0 <= clip_low <= 1", remedy="ratios are never negative")
    require(clip_high >= 0, f"{loss} clip_high", got=clip_high, expected="clip_high >= 0", remedy="the window holds 1")


@register_policy_loss("ppo")
def ppo(
    *,
    logp: Tensor,
    anchor_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = exp(logp - anchor_logp); shapes as in `policy_loss`.

    Args:
        clip_low, clip_high: window around ratio 1 (PPO and GRPO 0.2/0.2, DAPO 0.2/0.28).
        dual_clip: for A < 0 the loss is at most -A dual_clip; None (default) leaves the corrective gradient.
    """
    _require_window("ppo", clip_low, clip_high)
    above_one = dual_clip is None or dual_clip > 1
    require(above_one, "ppo dual_clip", got=dual_clip, expected="a number above 1, or null", remedy="3 is usual")
    ratio = bounded_log_ratio(logp - anchor_logp).exp()
    return clipped_surrogate(ratio, advantages, low=1 - clip_low, high=1 + clip_high, ceiling=dual_clip)


@register_policy_loss("gspo")
def gspo(
    *,
    logp: Tensor,
    anchor_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """PPO's surrogate with rho = exp(logp - sg(logp) + sg(s)), s the sequence's mean log-ratio (GSPO's token form).

    One sequence a row: [B, T] only. The gradient flows through the current token; summed with `seq_mean_token_mean` it
    is that of the sequence form.
    """
    require_rows("gspo", logp)
    _require_window("gspo", clip_low, clip_high)
    count = mask.sum(-1, keepdim=True).clamp(min=1)
    mean = (logp - anchor_logp).detach().double().sum(-1, keepdim=True) / count
    ratio = current_token_ratio(mean, logp)
    return clipped_surrogate(ratio, advantages, low=1 - clip_low, high=1 + clip_high)


@register_policy_loss("cispo")
def cispo(
    *,
    logp: Tensor,
    anchor_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float | None = None,
    clip_high: float = 0.2,
) -> Tensor:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A logp: every token keeps a gradient, its weight is clipped.

    Args:
        clip_low: None (default): no lower bound.
        clip_high: the largest weight is 1 + clip_high.
    """
    _require_window("cispo", clip_low, clip_high)
    weight = bounded_log_ratio(logp - anchor_logp).exp().clamp(None if clip_low is None else 1 - clip_low, 1 + clip_high)
    return weighted_score(weight, logp=logp, advantages=advantages)


@register_policy_loss("reinforce")
def reinforce(*, logp: Tensor, anchor_logp: Tensor, advantages: Tensor, mask: Tensor, max_weight: float | None = None) -> Tensor:
    """-A logp, times sg(min(r, max_weight)) where `max_weight` is given; shapes as in `policy_loss`."""
    if max_weight is None:
        return weighted_score(torch.ones_like(logp), logp=logp, advantages=advantages)
    positive = max_weight > 0
    require(positive, "reinforce max_weight", got=max_weight, expected="a positive number, or null", remedy="2 is usual")
    weight = bounded_log_ratio(logp - anchor_logp).exp().clamp(max=max_weight)
    return weighted_score(weight, logp=logp, advantages=advantages)
