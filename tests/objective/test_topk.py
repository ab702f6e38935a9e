"""Divergences over buckets: numbers by hand, lower bounds, exactness at k = V, and expected gradients by enumeration."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from akl_dist.objective import (
    HeadReference,
    TopkReference,
    chunked_token_statistics,
    full_kl_loss,
    token_statistics,
    topk_reference,
)

POLICY, REF = (0.4, 0.3, 0.2, 0.1), (0.5, 0.25, 0.125, 0.125)


def log(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64).log()


def statistics(policy, ref, target: int, k: int, **options):
    targets = torch.tensor([target])
    return token_statistics(policy, targets, temperature=1.0, topk=topk_reference(ref, targets, k=k, temperature=1.0), **options)


@pytest.mark.parametrize(("target", "masses"), [
    (2, ((0.4, 0.5), (0.2, 0.125), (0.4, 0.375))),  # buckets {0}, {2}, {1, 3}
    (0, ((0.4, 0.5), (0.6, 0.5))),  # the sampled token is the top one and counted once: {0}, {1, 2, 3}
])
def test_buckets_by_hand(target, masses):
    got = statistics(log(*POLICY), log(*REF), target, k=1)
    assert got.kl_forward.item() == pytest.approx(sum(q * math.log(q / p) for p, q in masses), rel=1e-12)
    assert got.kl_reverse.item() == pytest.approx(sum(p * math.log(p / q) for p, q in masses), rel=1e-12)


def test_gradients_and_norms_by_hand():
    """k = 1 and token 2 sampled: tokens 1 and 3 share the rest, P = 0.4 and Q = 0.375, in proportion to the policy."""
    logits = log(*POLICY).requires_grad_(True)
    got = statistics(logits, log(*REF), 2, k=1, with_gradient_norms=True)
    (forward,) = torch.autograd.grad(got.kl_forward.sum(), logits, retain_graph=True)
    (reverse,) = torch.autograd.grad(got.kl_reverse.sum(), logits)
    expected_forward = torch.tensor([0.4 - 0.5, 0.3 * (1 - 0.375 / 0.4), 0.2 - 0.125, 0.1 * (1 - 0.375 / 0.4)])
    kl = got.kl_reverse.item()
    rest = math.log(0.4 / 0.375) - kl
    expected_reverse = torch.tensor([0.4 * (math.log(0.8) - kl), 0.3 * rest, 0.2 * (math.log(1.6) - kl), 0.1 * rest])
    torch.testing.assert_close(forward[0], expected_forward.double(), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(reverse[0], expected_reverse.double(), rtol=1e-6, atol=1e-8)
    products = {"forward_norm2": forward * forward, "reverse_norm2": reverse * reverse, "forward_reverse_dot": forward * reverse}
    for name, product in products.items():
        assert getattr(got, name).item() == pytest.approx(product.sum().item(), rel=1e-12)


def test_what_the_reference_keeps():
    kept = topk_reference(log(*POLICY).float(), torch.tensor([3]), k=2, temperature=1.0)
    assert kept.ids.tolist() == [[0, 1]] and kept.ids.dtype == torch.int32
    assert kept.logp.exp().tolist() == [pytest.approx([0.4, 0.3])]
    assert kept.rest_logp.exp().item() == pytest.approx(0.2) and kept.target_logp.exp().item() == pytest.approx(0.1)
    whole = topk_reference(log(*POLICY), torch.tensor([3]), k=99, temperature=2.0)
    assert whole.ids.shape == (1, 4) and whole.rest_logp.item() == -math.inf
    root = sum(math.sqrt(p) for p in POLICY)
    assert whole.logp[0, 0].exp().item() == pytest.approx(math.sqrt(0.4) / root)


def test_rest_mass_is_a_sum_and_not_what_is_left():
    """A rest of e^-40 each: 1 minus the others is 0 or rounding noise, and its logarithm is nothing."""
    logits = torch.tensor([[0.0, -1.0, -40.0, -41.0]])
    kept = topk_reference(logits, torch.tensor([0]), k=2, temperature=1.0)
    norm = math.log(1 + math.exp(-1))
    assert kept.rest_logp.item() == pytest.approx(-40 + math.log1p(math.exp(-1)) - norm, rel=1e-6)
    assert 1 - kept.logp.exp().sum().item() < 1e-7


# --- against the whole vocabulary --------------------------------------------------------------------------------

N, V, TEMPERATURE = 40, 9, 0.7


def problem(seed: int):
    generator = torch.Generator().manual_seed(seed)
    logits, ref = (3 * torch.randn(N, V, generator=generator, dtype=torch.float64) for _ in range(2))
    return logits.requires_grad_(True), ref, torch.randint(V, (N,), generator=generator)


def test_lower_bound_that_grows_with_k_and_is_exact_at_the_vocabulary():
    logits, ref, targets = problem(0)
    exact = token_statistics(logits, targets, temperature=TEMPERATURE, ref_logprobs=torch.log_softmax(ref / TEMPERATURE, -1))
    for direction in ("kl_forward", "kl_reverse"):
        below = torch.zeros(N, dtype=torch.float64)
        for k in range(1, V + 1):
            kept = topk_reference(ref, targets, k=k, temperature=TEMPERATURE)
            value = getattr(token_statistics(logits, targets, temperature=TEMPERATURE, topk=kept), direction)
            assert (value >= below - 1e-12).all() and (value <= getattr(exact, direction) + 1e-12).all()
            below = value.detach()
        assert (value - getattr(exact, direction)).abs().max() < 1e-12  # the last: k = V
        kept = topk_reference(ref, targets, k=2, temperature=TEMPERATURE)
        rough = getattr(token_statistics(logits, targets, temperature=TEMPERATURE, topk=kept), direction)
        assert (getattr(exact, direction) - rough).max() > 0.01  # the control: the bound is not always tight


def test_counting_the_sampled_token_twice_breaks_the_bound():
    """Negative control: ids that hold the sampled token again, as a second bucket, exceed the exact divergence."""
    target = torch.tensor([0])
    kept = TopkReference(torch.tensor([[0, 1, 0]]), log(0.5, 0.25, 0.5), log(0.25)[0], log(0.5)[0])
    wrong = token_statistics(log(*POLICY), target, temperature=1.0, topk=kept).kl_forward.item()
    exact = token_statistics(log(*POLICY), target, temperature=1.0, ref_logprobs=log(*REF)).kl_forward.item()
    assert wrong > exact
    right = statistics(log(*POLICY), log(*REF), 0, k=2).kl_forward.item()
    assert right <= exact


@pytest.mark.parametrize("direction", ["kl_forward", "kl_reverse"])
def test_gradient_at_the_vocabulary_is_the_full_one(direction):
    logits, ref, targets = problem(1)

    def gradient(**reference):
        value = getattr(token_statistics(logits, targets, temperature=TEMPERATURE, **reference), direction)
        return torch.autograd.grad(value.sum(), logits)[0]

    full = gradient(ref_logprobs=torch.log_softmax(ref / TEMPERATURE, -1))
    for k in (V - 1, V):  # with k = V - 1 the rest is one token or empty
        same = gradient(topk=topk_reference(ref, targets, k=k, temperature=TEMPERATURE))
        torch.testing.assert_close(same, full, rtol=1e-10, atol=1e-12)
    assert (gradient(topk=topk_reference(ref, targets, k=2, temperature=TEMPERATURE)) - full).abs().max() > 1e-3


# --- enumeration: three tokens, length three, every prefix a state of its own -------------------------------------

TOKENS, LENGTH = 3, 3
SEQUENCES = torch.tensor(list(itertools.product(range(TOKENS), repeat=LENGTH)))
STATES = torch.stack([torch.zeros(27, dtype=torch.long), 1 + SEQUENCES[:, 0], 4 + 3 * SEQUENCES[:, 0] + SEQUENCES[:, 1]], 1)
NUM_STATES = 13


def tables():
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(NUM_STATES, TOKENS, generator=generator, dtype=torch.float64) for _ in range(3)]


LOGITS, MU, REFERENCE = tables()


def sequence_probs(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits, -1)[STATES, SEQUENCES].sum(-1).exp()


def expected_gradient(direction: str, state_weight: str, estimator: str) -> torch.Tensor:
    """[13, 3] gradient in the logits of the mean loss over sequences of mu, through the fused head: its hidden state is
    the one-hot state, its weight the table."""
    leaf = LOGITS.clone().requires_grad_(True)
    states = torch.eye(NUM_STATES, dtype=torch.float64)[STATES.flatten()]
    reference: TopkReference | HeadReference = HeadReference(states, REFERENCE.T, None)
    if estimator != "full":
        kept = topk_reference(REFERENCE[STATES.flatten()], SEQUENCES.flatten(), k=int(estimator), temperature=1.0)
        reference = kept
    got = chunked_token_statistics(states, leaf.T, None, SEQUENCES.flatten(), chunk_tokens=20, temperature=1.0, reference=reference)
    fields = {name: getattr(got, name).view(27, LENGTH) for name in ("logp", "kl_forward", "kl_reverse")}
    loss = full_kl_loss(direction, **fields, behaviour_logp=torch.log_softmax(MU, -1)[STATES, SEQUENCES],
                        mask=torch.ones(27, LENGTH, dtype=torch.bool), state_weight=state_weight)
    (sequence_probs(MU) * loss.sum(-1)).sum().backward()
    return leaf.grad


@pytest.mark.parametrize("state_weight", ["token", "cumulative"])
@pytest.mark.parametrize("direction", ["forward", "reverse", "symmetric"])
def test_expected_gradient_is_the_named_divergence(direction, state_weight):
    policy, ref = torch.log_softmax(LOGITS, -1), torch.log_softmax(REFERENCE, -1)
    probs, ratio = policy.exp(), policy - ref
    forward, reverse = probs - ref.exp(), probs * (ratio - (probs * ratio).sum(-1, keepdim=True))
    exact = {"forward": forward, "reverse": reverse, "symmetric": (forward + reverse) / 2}[direction]
    visits = sequence_probs(MU if state_weight == "token" else LOGITS)
    states = torch.zeros(NUM_STATES, dtype=torch.float64).index_put((STATES,), visits[:, None], accumulate=True)
    target = states[:, None] * exact
    for estimator in ("full", "3", "2"):  # with two of three tokens kept no bucket ever holds more than one token
        gap = (expected_gradient(direction, state_weight, estimator) - target).norm() / target.norm()
        assert gap < 1e-9, estimator
    rough = (expected_gradient(direction, state_weight, "1") - target).norm() / target.norm()
    assert rough > 1e-3  # the control: one token kept is a looser divergence
    other = "cumulative" if state_weight == "token" else "token"
    assert (expected_gradient(direction, other, "full") - target).norm() / target.norm() > 1e-2


def test_mistakes_are_refused():
    logits, ref, targets = problem(3)
    kept = topk_reference(ref, targets, k=2, temperature=1.0)
    with pytest.raises(ValueError, match="one of the two"):
        token_statistics(logits, targets, temperature=1.0, topk=kept, ref_logprobs=ref)
    with pytest.raises(ValueError, match="rest log-probs"):
        token_statistics(logits, targets, temperature=1.0, topk=kept._replace(rest_logp=kept.rest_logp[1:]))
    with pytest.raises(ValueError, match="top-k ids"):
        token_statistics(logits, targets, temperature=1.0, topk=kept._replace(ids=kept.ids[:, :0]))
    for wrong in ({"k": 0, "temperature": 1.0}, {"k": 1, "temperature": 0.0}):
        with pytest.raises(ValueError, match="expected > 0"):
            topk_reference(ref, targets, **wrong)
