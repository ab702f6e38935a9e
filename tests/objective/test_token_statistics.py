"""Log-probabilities, entropy, exact divergences and gradient norms out of whole logits."""

from __future__ import annotations

import math

import pytest
import torch

from akl_dist.objective import TokenStatistics, token_statistics

N, V, TEMPERATURE = 11, 13, 0.7
DIFFERENTIABLE = ("logp", "entropy", "kl_forward", "kl_reverse")


def test_by_hand_at_temperature_two():
    """Logits 2 ln 3 and 0 at temperature 2: probabilities 3/4, 1/4. Reference 1/2, 1/2."""
    logits = torch.tensor([[2 * math.log(3), 0.0]], dtype=torch.float64)
    ref = torch.full((1, 2), math.log(0.5), dtype=torch.float64)
    got = token_statistics(logits, torch.tensor([0]), temperature=2.0, ref_logprobs=ref, with_gradient_norms=True)
    kl_reverse = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    reverse_gradient = [0.75 * (math.log(1.5) - kl_reverse), 0.25 * (math.log(0.5) - kl_reverse)]
    expected = TokenStatistics(
        logp=math.log(0.75),
        entropy=-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)),
        kl_forward=0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25),
        kl_reverse=kl_reverse,
        score_norm2=2 * 0.25**2,
        forward_norm2=2 * 0.25**2,
        reverse_norm2=sum(entry**2 for entry in reverse_gradient),
        forward_reverse_dot=0.25 * reverse_gradient[0] - 0.25 * reverse_gradient[1],
    )
    for name, value in expected._asdict().items():
        assert getattr(got, name).item() == pytest.approx(value, rel=1e-12), name


@pytest.mark.parametrize("temperature", [1.0, TEMPERATURE])
def test_gradients_in_the_raw_logits_carry_one_over_temperature(temperature):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(N, V, generator=generator, dtype=torch.float64)
    ref = torch.log_softmax(torch.randn(N, V, generator=generator, dtype=torch.float64), -1)
    targets = torch.arange(N)
    probs = torch.softmax(logits / temperature, -1)
    onehot = torch.nn.functional.one_hot(targets, V).double()
    log_ratio = probs.log() - ref
    entropy = -(probs * probs.log()).sum(-1, keepdim=True)
    expected = {
        "logp": onehot - probs,
        "entropy": -probs * (probs.log() + entropy),
        "kl_forward": probs - ref.exp(),
        "kl_reverse": probs * (log_ratio - (probs * log_ratio).sum(-1, keepdim=True)),
    }
    for name, gradient in expected.items():
        leaf = logits.clone().requires_grad_(True)
        statistics = token_statistics(leaf, targets, temperature=temperature, ref_logprobs=ref)
        getattr(statistics, name).sum().backward()
        torch.testing.assert_close(leaf.grad, gradient / temperature, rtol=1e-10, atol=1e-13)
    norms = token_statistics(logits, targets, temperature=temperature, ref_logprobs=ref, with_gradient_norms=True)
    products = {
        "score_norm2": expected["logp"] ** 2,
        "forward_norm2": expected["kl_forward"] ** 2,
        "reverse_norm2": expected["kl_reverse"] ** 2,
        "forward_reverse_dot": expected["kl_forward"] * expected["kl_reverse"],
    }
    for name, product in products.items():
        torch.testing.assert_close(getattr(norms, name), product.sum(-1), rtol=1e-10, atol=1e-14)


def test_norm_of_a_nearly_certain_token_survives_float32():
    """1 - p = 1.2e-9 or so: in float32 p is 1, and 1 - p would be 0."""
    logits = torch.tensor([[20.0, 0.0]])
    norm2 = token_statistics(logits, torch.tensor([0]), temperature=1.0, with_gradient_norms=True).score_norm2
    assert norm2.item() == pytest.approx(2 * math.exp(-20) ** 2, rel=1e-4, abs=0)


def test_excluded_tokens_and_half_precision():
    logits = torch.tensor([[0.0, 0.0, -math.inf]], dtype=torch.bfloat16, requires_grad=True)
    ref = torch.tensor([[math.log(0.5), math.log(0.5), -math.inf]])
    got = token_statistics(logits, torch.tensor([1]), temperature=1.0, ref_logprobs=ref, with_gradient_norms=True)
    assert all(field.dtype == torch.float32 and field.isfinite().all() for field in got)
    assert got.entropy.item() == pytest.approx(math.log(2))
    sum(getattr(got, name).sum() for name in DIFFERENTIABLE).backward()
    assert logits.grad.isfinite().all()


def test_mistakes_are_refused():
    generator = torch.Generator().manual_seed(0)
    logits, ref = (torch.randn(N, V, generator=generator, dtype=torch.float64) for _ in range(2))
    targets = torch.arange(N)
    for wrong in (0.0, -1.0):
        with pytest.raises(ValueError, match="temperature"):
            token_statistics(logits, targets, temperature=wrong)
    with pytest.raises(ValueError, match="targets"):
        token_statistics(logits, targets[1:], temperature=1.0)
    with pytest.raises(ValueError, match="ref_logprobs"):
        token_statistics(logits, targets, temperature=1.0, ref_logprobs=ref[:, 1:])
