"""Length penalty, KL in the reward, adaptive coefficient, group filter: hand-made numbers, enumeration, negative controls."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from akl_dist.objective import adapted_coefficient, keep_group, kl_to_go, kl_value_k3, overlong_penalty, segment_cumsum


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- overlong -------------------------------------------------------------------------------------------------------


def test_overlong_by_hand():
    """Limit 100, buffer 20: free up to 80, half the penalty at 90, all of it at 100 and beyond."""
    lengths = [1, 80, 81, 90, 100, 120]
    expected = [0, 0, 0.05, 0.5, 1, 1]
    assert overlong_penalty(lengths, max_tokens=100, buffer_tokens=20).tolist() == pytest.approx(expected)
    doubled = overlong_penalty(torch.tensor(lengths), max_tokens=100, buffer_tokens=20, penalty=2.0)
    assert doubled.tolist() == pytest.approx([2 * value for value in expected])
    assert overlong_penalty([], max_tokens=100, buffer_tokens=20).shape == (0,)


def test_overlong_never_rewards():
    got = overlong_penalty(torch.arange(1, 200), max_tokens=100, buffer_tokens=100)
    assert (got >= 0).all() and (got[1:] >= got[:-1]).all()


@pytest.mark.parametrize("arguments", [{"buffer_tokens": 0}, {"buffer_tokens": 101}, {"buffer_tokens": 5, "penalty": -1.0}])
def test_overlong_mistakes_are_refused(arguments):
    with pytest.raises(ValueError, match="overlong"):
        overlong_penalty([5], max_tokens=100, **arguments)


# --- group filter ---------------------------------------------------------------------------------------------------


def test_groups_are_kept_for_their_raw_outcome():
    assert keep_group([True, False]) and keep_group([None, False, True])
    for flat in ([], [None, None], [True, True], [False, False, None], [True, None]):
        assert not keep_group(flat)
    assert keep_group([0.2, 0.3, None]) and not keep_group([0.2, 0.2]), "a verifier's own numbers are outcomes, too"


# --- KL in the reward -----------------------------------------------------------------------------------------------


def test_kl_to_go_by_hand():
    """k1 = 1, (masked), 2, 4; roles reasoning, -, reasoning, answer; betas 10 and 100."""
    nan = math.nan
    logp, ref = tensor([[-1, nan, -1, -1]]), tensor([[-2, nan, -3, -5]])
    mask, answer = tensor([[1, 0, 1, 1]]), tensor([[0, 1, 0, 1]])
    got = kl_to_go(logp=logp, ref_logp=ref, answer_mask=answer, mask=mask, beta_reasoning=10.0, beta_answer=100.0)
    assert got.tolist() == [[430, 0, 420, 400]]


def test_packed_rows_and_padded_rows_agree():
    torch.manual_seed(0)
    lengths = [3, 5, 1]
    flat = [torch.randn(9).double() for _ in range(2)]
    answer, mask = torch.rand(9) < 0.5, torch.rand(9) < 0.7
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    betas = {"beta_reasoning": 0.3, "beta_answer": 0.8}
    packed = kl_to_go(logp=flat[0], ref_logp=flat[1], answer_mask=answer, mask=mask, segment_ids=ids, **betas)
    pieces = [kl_to_go(logp=a, ref_logp=b, answer_mask=c, mask=d, **betas) for a, b, c, d in zip(
        *(x.split(lengths) for x in (*flat, answer, mask)), strict=True)]
    torch.testing.assert_close(packed, torch.cat(pieces), rtol=1e-12, atol=1e-12)


VOCAB, STEPS = 3, 2


def tree(logits, ref_logits):
    """All sequences of a two-step policy whose second step depends on the first token: log pi and log ref, [sequences, 2]."""
    logp, ref = (table.log_softmax(-1) for table in (logits, ref_logits))

    def walk(table):
        return torch.stack([torch.stack([table[0, a], table[1 + a, b]]) for a, b in itertools.product(range(VOCAB), repeat=STEPS)])

    return walk(logp), walk(ref)


def policy_gradient(leaf, logp, to_go) -> torch.Tensor:
    """sum over sequences of pi(y) sum_t (amount subtracted) grad log pi_t: the gradient of what is being paid."""
    probability = logp.detach().sum(-1).exp()
    (gradient,) = torch.autograd.grad((probability[:, None] * to_go * logp).sum(), leaf, retain_graph=True)
    return gradient


def test_gradient_is_exactly_that_of_the_sequence_reverse_kl():
    torch.manual_seed(4)
    leaf = torch.randn(1 + VOCAB, VOCAB).double().requires_grad_(True)
    logp, ref = tree(leaf, torch.randn(1 + VOCAB, VOCAB).double())
    sequence_kl = (logp.sum(-1).exp() * (logp - ref).sum(-1)).sum()
    (exact,) = torch.autograd.grad(0.7 * sequence_kl, leaf, retain_graph=True)
    ones = torch.ones_like(logp)
    to_go = kl_to_go(logp=logp, ref_logp=ref, answer_mask=0 * ones, mask=ones, beta_reasoning=0.7, beta_answer=9.0)
    assert not to_go.requires_grad
    torch.testing.assert_close(policy_gradient(leaf, logp, to_go), exact, rtol=0, atol=1e-12)
    # negative controls: k3 in the reward, the same token's k1 only, and the sum of what is already past
    k3 = 0.7 * kl_value_k3(logp=logp, ref_logp=ref, mask=ones)
    k1 = 0.7 * (logp - ref).detach()
    for wrong in (segment_cumsum(k3.flip(-1)).flip(-1), k1, segment_cumsum(k1)):
        assert (policy_gradient(leaf, logp, wrong) - exact).abs().max() > 1e-3


def test_roles_known_before_their_token_keep_the_gradient_exact():
    """Step 1 is reasoning, step 2 answer: gradient of beta_r KL_1 + beta_a E[KL_2]."""
    torch.manual_seed(5)
    leaf = torch.randn(1 + VOCAB, VOCAB).double().requires_grad_(True)
    logp, ref = tree(leaf, torch.randn(1 + VOCAB, VOCAB).double())
    probability = logp.sum(-1).exp()
    weighted = (probability * (0.2 * (logp - ref)[:, 0] + 1.5 * (logp - ref)[:, 1])).sum()
    (exact,) = torch.autograd.grad(weighted, leaf, retain_graph=True)
    answer = torch.zeros_like(logp)
    answer[:, 1] = 1
    to_go = kl_to_go(logp=logp, ref_logp=ref, answer_mask=answer, mask=torch.ones_like(logp), beta_reasoning=0.2,
                     beta_answer=1.5)  # fmt: skip
    torch.testing.assert_close(policy_gradient(leaf, logp, to_go), exact, rtol=0, atol=1e-12)


# --- adaptive coefficient -------------------------------------------------------------------------------------------


def test_controller_by_hand():
    """Target 2 nats, horizon 10: 10 % too much raises beta by 1 %; beyond 20 % the step is 2 %."""
    assert adapted_coefficient(5.0, kl=2.2, target=2.0, horizon=10) == pytest.approx(5.05)
    assert adapted_coefficient(5.0, kl=1.8, target=2.0, horizon=10) == pytest.approx(4.95)
    assert adapted_coefficient(5.0, kl=200.0, target=2.0, horizon=10) == pytest.approx(5.1)
    assert adapted_coefficient(5.0, kl=-3.0, target=2.0, horizon=10) == pytest.approx(4.9)
    assert adapted_coefficient(5.0, kl=2.0, target=2.0, horizon=10) == 5.0
    assert adapted_coefficient(0.0, kl=9.0, target=2.0, horizon=10) == 0.0


def test_controller_settles_where_the_kl_answers_to_the_coefficient():
    """A world with KL = 1 / (1 + beta) and target 0.25, so beta = 3; with the sign turned it would run away."""
    beta = wrong = 0.5
    for _ in range(2000):
        beta = adapted_coefficient(beta, kl=1 / (1 + beta), target=0.25, horizon=10)
        wrong = adapted_coefficient(wrong, kl=2 * 0.25 - 1 / (1 + wrong), target=0.25, horizon=10)
    assert beta == pytest.approx(3.0, rel=1e-3)
    assert wrong < 1e-3


def test_controller_mistakes_are_refused():
    for arguments, subject in (
        ({"kl": math.nan, "target": 1.0, "horizon": 10}, "kl"),
        ({"kl": 1.0, "target": 0.0, "horizon": 10}, "target"),
        ({"kl": 1.0, "target": 1.0, "horizon": 0.5}, "horizon"),
    ):
        with pytest.raises(ValueError, match=subject):
            adapted_coefficient(1.0, **arguments)
