"""Policy losses per token, by name. Formulas: PPO (arXiv 1707.06347, eq. 7), DAPO's asymmetric window
(arXiv 2503.14476), dual clip (arXiv 1912.09729, eq. 5).

A loss is a function of keyword arguments `logp, anchor_logp, advantages, mask` plus its own named parameters. The
dispatcher hands it clean inputs: one shape, float32 or better, anchor and advantages detached, zeros where masked.
Register one of your own from any imported module:

    @register_policy_loss("mine")
    def mine(*, logp, anchor_logp, advantages, mask, scale=1.0):
        return -scale * advantages * logp
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from akl_dist.objective._checks import require, require_name, require_shape
from akl_dist.objective.masking import as_bool, at_least_float32, select
from akl_dist.objective.ratios import bounded_log_ratio

PolicyLoss = Callable[..., Tensor]
POLICY_LOSSES: dict[str, PolicyLoss] = {}
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
    function = POLICY_LOSSES[require_name("policy loss", name, POLICY_LOSSES)]
    accepted = [parameter for parameter in inspect.signature(function).parameters if parameter not in _TENSORS]
    for parameter in params:
        require_name(f"parameter of policy loss {name!r}", parameter, accepted)
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
    require(0 <= clip_low <= 1, "ppo clip_low", got=clip_low, expected="0 <= clip_low <= 1", remedy="0.2 is usual")
    require(clip_high >= 0, "ppo clip_high", got=clip_high, expected="clip_high >= 0", remedy="0.2 is usual")
    ratio = bounded_log_ratio(logp - anchor_logp).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    # `where` rather than `maximum`: at a tie (ratio inside the window) the whole gradient flows through one branch.
    loss = torch.where(unclipped >= clipped, unclipped, clipped)
    if dual_clip is None:
        return loss
    require(dual_clip > 1, "ppo dual_clip", got=dual_clip, expected="a number above 1, or null", remedy="3 is usual")
    ceiling = -advantages * dual_clip
    return torch.where((advantages < 0) & (loss > ceiling), ceiling, loss)
