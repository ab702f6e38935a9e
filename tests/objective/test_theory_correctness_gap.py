"""Optimal correctness gap of a KL-regularised policy on a finite space, binary reward: closed forms, table, training.

Maximise E_pi[r] - beta D. Z = ref(C) is the reference's probability of being correct, gap = 1 - pi*(C). Closed forms:

    reverse KL(pi||ref): pi* ~ ref exp(r/beta),                  gap = (1-Z) / (1-Z + Z e^{1/beta})
    forward KL(ref||pi): pi*(y) = beta ref(y) / (lambda - r(y)), gap = beta (1-Z) / lambda,
                         lambda = ((1+beta) + sqrt((1+beta)^2 - 4 beta (1-Z))) / 2
    CoKL KL(ref_C||pi_C): gap 0 and pi*_C = ref_C for every beta, reached in the limit by a softmax policy
"""

from __future__ import annotations

import math

import pytest
import torch

from akl_dist.objective import full_kl

REF = torch.tensor([0.40, 0.10, 0.05, 0.25, 0.15, 0.05], dtype=torch.float64)
CORRECT = torch.tensor([True, True, True, False, False, False])
Z = 0.55
TABLE = {0.1: (0.000037, 0.042555), 0.5: (0.099690, 0.169052), 1.0: (0.231356, 0.258380)}


def optimal_policy(direction: str, ref: torch.Tensor, reward: torch.Tensor, beta: float) -> torch.Tensor:
    if direction == "reverse":
        return torch.softmax(ref.log() + reward / beta, 0)
    wrong = ref[reward == 0].sum().item()
    root = ((1 + beta) + math.sqrt((1 + beta) ** 2 - 4 * beta * wrong)) / 2
    return beta * ref / (root - reward)


def gap(policy: torch.Tensor, correct: torch.Tensor = CORRECT) -> float:
    return policy[~correct].sum().item()


def closed_gap(direction: str, z: float, beta: float) -> float:
    if direction == "reverse":
        return (1 - z) / (1 - z + z * math.exp(1 / beta))
    return beta * (1 - z) / (((1 + beta) + math.sqrt((1 + beta) ** 2 - 4 * beta * (1 - z))) / 2)


def cokl(logp: torch.Tensor, correct: torch.Tensor = CORRECT, ref: torch.Tensor = REF) -> torch.Tensor:
    """KL(ref_C || pi_C) from log-probabilities [..., Y]."""
    target = ref[correct] / ref[correct].sum()
    return (target * (target.log() - torch.log_softmax(logp[..., correct], -1))).sum(-1)


def regularised(direction: str, logits: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """E_pi[r] - beta D of softmax policies [..., Y]."""
    logp = torch.log_softmax(logits, -1)
    divergence = cokl(logp) if direction == "cokl" else full_kl(direction, logprobs=logp, ref_logprobs=REF.log().expand_as(logp))
    return logp.exp()[..., CORRECT].sum(-1) - beta * divergence


@pytest.mark.parametrize("beta", sorted(TABLE))
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_table(direction, beta):
    """To the six printed digits, as closed form and as the mass that the optimal policy leaves on wrong responses."""
    printed = TABLE[beta][direction == "forward"]
    assert closed_gap(direction, Z, beta) == pytest.approx(printed, abs=1e-6)
    policy = optimal_policy(direction, REF, CORRECT.double(), beta)
    assert policy.sum().item() == pytest.approx(1, abs=1e-12)
    assert gap(policy) == pytest.approx(printed, abs=1e-6)


@pytest.mark.parametrize("beta", sorted(TABLE))
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_optimal_policies_are_optimal(direction, beta):
    """Stationary in the logits, and better than the policies around them (both objectives are concave in pi)."""
    best = optimal_policy(direction, REF, CORRECT.double(), beta).log().requires_grad_(True)
    value = regularised(direction, best, torch.tensor(beta, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(value, best)
    assert gradient.abs().max() < 1e-12
    generator = torch.Generator().manual_seed(0)
    around = best.detach() + 0.3 * torch.randn(200, 6, generator=generator, dtype=torch.float64)
    assert (regularised(direction, around, torch.tensor(beta, dtype=torch.float64)) < value).all()
    other = optimal_policy("forward" if direction == "reverse" else "reverse", REF, CORRECT.double(), beta)
    assert regularised(direction, other.log(), torch.tensor(beta, dtype=torch.float64)) < value - 1e-4


def test_neither_full_divergence_always_leaves_the_smaller_gap():
    """Z = .55: reverse. Z = .01, beta = .5: forward, .490 against .931. So "forward keeps more wrong mass" is not a theorem."""
    assert closed_gap("reverse", 0.01, 0.5) == pytest.approx(0.931, abs=5e-4)
    assert closed_gap("forward", 0.01, 0.5) == pytest.approx(0.490, abs=5e-4)
    assert all(reverse < forward for reverse, forward in TABLE.values())
    ref = torch.tensor([0.01, 0.99], dtype=torch.float64)
    reward = torch.tensor([1.0, 0.0], dtype=torch.float64)
    for direction in ("reverse", "forward"):
        policy = optimal_policy(direction, ref, reward, 0.5)
        assert policy[1].item() == pytest.approx(closed_gap(direction, 0.01, 0.5), rel=1e-12)


def trained(direction: str, betas: torch.Tensor, *, steps: int, lr: float) -> torch.Tensor:
    """[len(betas), 6] policies after gradient ascent on the logits, all strengths at once, from the reference."""
    logits = REF.log().repeat(len(betas), 1)
    for _ in range(steps):
        leaf = logits.requires_grad_(True)
        (gradient,) = torch.autograd.grad(regularised(direction, leaf, betas).sum(), leaf)
        logits = (leaf + lr * gradient).detach()
    return torch.softmax(logits, -1)


def test_softmax_training_reaches_cokls_zero_gap_where_both_full_divergences_stop_short():
    """Same training for all. The full divergences end at their own gap; CoKL's falls like 1/steps, and pi_C comes back to ref_C.

    The reward's gradient also sharpens within C, in proportion to the gap that is left, so pi_C is at ref_C in the limit only.
    """
    betas = torch.tensor(sorted(TABLE), dtype=torch.float64)
    full = {direction: trained(direction, betas, steps=1500, lr=2.0) for direction in ("reverse", "forward")}
    for direction, policies in full.items():
        for policy, beta in zip(policies, sorted(TABLE), strict=True):
            # at beta = .1 the reverse optimum lies at 4e-5, which plain gradient ascent approaches slowly
            assert gap(policy) == pytest.approx(closed_gap(direction, Z, beta), abs=2e-3 if beta == 0.1 else 1e-6)
    early, late = (trained("cokl", betas, steps=steps, lr=2.0) for steps in (1500, 3000))
    for before, after, beta in zip(early, late, sorted(TABLE), strict=True):
        assert gap(after) < 0.6 * gap(before) and gap(after) < 1e-3  # still falling, as 1/steps does
        drift = [(p[CORRECT] / p[CORRECT].sum() - REF[CORRECT] / Z).abs().max() for p in (before, after)]
        assert drift[1] < 0.6 * drift[0] and drift[1] < 2e-3
        if beta > 0.1:
            assert 100 * gap(after) < min(gap(policies[sorted(TABLE).index(beta)]) for policies in full.values())


def test_without_a_regulariser_the_correct_responses_do_not_stay_at_the_reference():
    """Negative control of pi_C = ref_C: plain reward training sharpens within C, towards what was likely at the start."""
    plain = trained("cokl", torch.zeros(1, dtype=torch.float64), steps=1500, lr=2.0)[0]
    conditional = plain[CORRECT] / plain[CORRECT].sum()
    assert gap(plain) < 2e-3
    assert (conditional - REF[CORRECT] / Z).abs().max() > 0.05
