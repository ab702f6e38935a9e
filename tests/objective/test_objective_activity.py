"""Activity and direction cosine: by hand, and against autograd on the logits."""

from __future__ import annotations

import math

import pytest
import torch

from akl_dist.objective import (
    activity_ratio,
    akl_full_loss,
    akl_loss,
    direction_cosine,
    direction_sums,
    full_kl_norm2,
    kl_activity,
    policy_loss,
    role_sums,
    sampled_direction_products,
    sampled_norm2,
    token_gradient,
    token_statistics,
)

N, V, TEMPERATURE = 9, 5, 1.7
BETAS = {"beta_reasoning": 0.3, "beta_answer": 0.8}


def problem():
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits, ref = normal(N, V), torch.log_softmax(normal(N, V), -1)
    targets = torch.randint(V, (N,), generator=generator)
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 1, 1, 0], dtype=torch.bool)
    roles = {"answer_mask": torch.tensor([0, 0, 1, 0, 1, 1, 0, 1, 0], dtype=torch.bool), "mask": mask}
    return logits, ref, targets, normal(N), normal(N) * 0.1, roles


def squared_norms_by_role(loss_of, logits, roles) -> tuple[float, float]:
    """Autograd: squared norm of the loss's gradient in the temperature-scaled logits, summed by role."""
    leaf = (logits / TEMPERATURE).requires_grad_(True)
    (gradient,) = torch.autograd.grad(loss_of(leaf).sum(), leaf)
    norm2 = (gradient**2).sum(-1)
    keep, answer = roles["mask"], roles["answer_mask"]
    return norm2[keep & ~answer].sum().item(), norm2[keep & answer].sum().item()


def test_role_sums_by_hand():
    values = torch.tensor([1.0, 2, math.nan, 4])
    sums = role_sums(values, answer_mask=torch.tensor([0, 1, 1, 0]), mask=torch.tensor([1, 1, 0, 1]))
    assert (sums.reasoning.item(), sums.answer.item()) == (5.0, 2.0)
    assert activity_ratio(4.0, 100.0) == 0.2
    assert activity_ratio(1.0, 0.0) is None
    assert direction_cosine(4.0, 9.0, 3.0) == 0.5
    assert direction_cosine(0.0, 1.0, 0.0) is None


def test_sampled_activity_equals_autograd_on_the_logits():
    logits, ref, targets, advantages, noise, roles = problem()
    statistics = token_statistics(logits, targets, temperature=TEMPERATURE, with_gradient_norms=True)
    old = statistics.logp + noise
    ref_logp = ref.gather(-1, targets.unsqueeze(-1)).squeeze(-1)

    def policy(logp):
        return policy_loss("ppo", logp=logp, anchor_logp=old, advantages=advantages, mask=roles["mask"])

    def kl(logp):
        return akl_loss(logp=logp, ref_logp=ref_logp, behaviour_logp=old, **roles, **BETAS)

    activity = kl_activity(
        kl_norm2=sampled_norm2(token_gradient(kl, statistics.logp), statistics.score_norm2),
        policy_norm2=sampled_norm2(token_gradient(policy, statistics.logp), statistics.score_norm2),
        **roles,
    )

    def of_logits(loss):
        return lambda z: loss(torch.log_softmax(z, -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1))

    for sums, loss in ((activity.kl, kl), (activity.policy, policy)):
        expected = squared_norms_by_role(of_logits(loss), logits, roles)
        assert (sums.reasoning.item(), sums.answer.item()) == pytest.approx(expected, rel=1e-12)
        assert min(expected) > 0


@pytest.mark.parametrize("direction", ["forward", "reverse", "symmetric"])
def test_full_activity_equals_autograd_on_the_logits(direction):
    logits, ref, targets, _, _, roles = problem()
    options = {"temperature": 1.0, "ref_logprobs": ref}
    got = token_statistics(logits / TEMPERATURE, targets, with_gradient_norms=True, **options)
    beta = torch.full((N,), BETAS["beta_reasoning"], dtype=torch.float64)
    beta[roles["answer_mask"]] = BETAS["beta_answer"]
    norms = {name: getattr(got, name) for name in ("forward_norm2", "reverse_norm2", "forward_reverse_dot")}
    sums = role_sums(full_kl_norm2(direction, **norms, coefficient=beta), **roles)

    def loss(z):
        statistics = token_statistics(z, targets, **options)
        return akl_full_loss(
            kl_forward=statistics.kl_forward,
            kl_reverse=statistics.kl_reverse,
            logp=statistics.logp,
            behaviour_logp=statistics.logp,
            direction_reasoning=direction,
            direction_answer=direction,
            **roles,
            **BETAS,
        )

    expected = squared_norms_by_role(loss, logits, roles)
    assert (sums.reasoning.item(), sums.answer.item()) == pytest.approx(expected, rel=1e-12)


def test_direction_cosine_tends_to_one_near_the_reference():
    """To leading order both divergences are the same quadratic form; far away their gradients differ."""
    _, ref, targets, _, _, roles = problem()
    shift = torch.randn(N, V, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    def cosine(scale: float) -> float:
        got = token_statistics(ref + scale * shift, targets, temperature=1.0, ref_logprobs=ref, with_gradient_norms=True)
        sums = direction_sums(
            forward_norm2=got.forward_norm2,
            reverse_norm2=got.reverse_norm2,
            forward_reverse_dot=got.forward_reverse_dot,
            **roles,
        )
        return direction_cosine(sums.forward.answer, sums.reverse.answer, sums.dot.answer)

    assert cosine(1e-3) > 0.99999
    assert cosine(3.0) < 0.9


def test_sampled_direction_products_by_hand():
    """pi/ref = 2: gradients of k3 and k2 in logp are 1 - 1/2 and ln 2; score norm 3."""
    logp, zero, one = torch.tensor([math.log(2.0)], dtype=torch.float64), torch.zeros(1), torch.ones(1)
    forward, reverse, dot = sampled_direction_products(logp=logp, ref_logp=zero, score_norm2=3 * one, mask=one)
    assert forward.item() == pytest.approx(3 * 0.25, rel=1e-12)
    assert reverse.item() == pytest.approx(3 * math.log(2) ** 2, rel=1e-12)
    assert dot.item() == pytest.approx(3 * 0.5 * math.log(2), rel=1e-12)
