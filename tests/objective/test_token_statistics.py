"""Log-probabilities, entropy, exact divergences and gradient norms; chunked against whole; memory."""

from __future__ import annotations

import itertools
import math
import weakref

import pytest
import torch

from akl_dist.objective import TokenStatistics, chunked_token_statistics, num_chunks, token_statistics

N, H, V, TEMPERATURE = 11, 5, 13, 0.7
DIFFERENTIABLE = ("logp", "entropy", "kl_forward", "kl_reverse")


def problem(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    head = torch.nn.Linear(H, V, bias=True, dtype=torch.float64)
    head.weight.data, head.bias.data = normal(V, H), normal(V)
    hidden = normal(N, H).requires_grad_(True)
    targets = torch.randint(V, (N,), generator=generator)
    return head, hidden, targets, torch.log_softmax(normal(N, V), -1)


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


@pytest.mark.parametrize("chunk_tokens", [1, 4, N, 100])
@pytest.mark.parametrize("min_chunks", [1, 7])
def test_chunked_equals_whole(chunk_tokens, min_chunks):
    head, hidden, targets, ref = problem()
    weights = torch.linspace(-1, 2, N, dtype=torch.float64)

    def run(statistics: TokenStatistics):
        loss = sum(scale * (weights * getattr(statistics, name)).sum() for scale, name in enumerate(DIFFERENTIABLE, 1))
        return torch.autograd.grad(loss, [hidden, head.weight, head.bias])

    options = {"temperature": TEMPERATURE, "ref_logprobs": ref, "with_gradient_norms": True}
    whole = token_statistics(head(hidden), targets, **options)
    chunked = chunked_token_statistics(head, hidden, targets, chunk_tokens=chunk_tokens, min_chunks=min_chunks, **options)
    for name, value in whole._asdict().items():
        torch.testing.assert_close(getattr(chunked, name), value, rtol=1e-12, atol=1e-12)
    for got, expected in zip(run(chunked), run(whole), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_without_reference_fields_are_none():
    head, hidden, targets, _ = problem()
    got = chunked_token_statistics(head, hidden, targets, chunk_tokens=4, temperature=1.0)
    assert got.logp.shape == got.entropy.shape == (N,)
    assert got[2:] == (None,) * 6


class CountingHead(torch.nn.Linear):
    """LM head that records the rows of every call."""

    def forward(self, states):
        self.__dict__.setdefault("calls", []).append(states.shape[0])
        return super().forward(states)


@pytest.mark.parametrize("tokens", [0, 3, 10])
def test_ranks_can_be_given_the_same_number_of_head_calls(tokens):
    """With sharded weights every call is a collective: forward and backward must call equally often on all ranks."""
    head = CountingHead(H, V, dtype=torch.float64)
    hidden = torch.randn(tokens, H, dtype=torch.float64, requires_grad=True)
    got = chunked_token_statistics(
        head, hidden, torch.zeros(tokens, dtype=torch.long), chunk_tokens=4, temperature=1.0, min_chunks=3
    )
    assert got.logp.shape == (tokens,)
    assert len(head.calls) == 3 and max(head.calls) <= 4
    got.logp.sum().backward()
    assert len(head.calls) == 6
    assert hidden.grad.shape == hidden.shape and head.weight.grad is not None
    assert [num_chunks(count, 4) for count in (0, 1, 4, 5)] == [1, 1, 1, 2]


def saved_elements(compute) -> int:
    """Elements that autograd keeps from `compute()` for the backward pass."""
    kept: dict[int, int] = {}

    def pack(value):
        kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes() // value.element_size()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        result = compute()
    assert result.requires_grad
    return sum(kept.values())


def test_no_more_than_one_chunk_of_logits_is_alive():
    """Between forward and backward no logits are kept, and no call ever sees more than one chunk of rows."""
    tokens, vocabulary = 64, 257
    head = CountingHead(H, vocabulary)
    hidden = torch.randn(tokens, H, requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.long)

    def chunked():
        return chunked_token_statistics(head, hidden, targets, chunk_tokens=8, temperature=1.0).logp

    whole = saved_elements(lambda: token_statistics(head(hidden), targets, temperature=1.0).logp)
    assert whole >= tokens * vocabulary  # the control: the hook does see logits where they are kept
    assert saved_elements(chunked) <= tokens * vocabulary / 16
    alive = [0, 0]  # now, peak: rows of logits not yet freed, by finalizers of the head's outputs
    track = head.register_forward_hook(lambda module, inputs, output: count_alive(output, alive))
    kept = [head(part) for part in hidden.split(8)]
    assert alive == [tokens, tokens]  # the control: the finalizers do count logits that are kept
    kept.clear()
    alive[:] = [0, 0]
    head.calls.clear()
    chunked().sum().backward()
    track.remove()
    assert head.calls == [8] * 16
    assert alive == [0, 8]


def count_alive(output: torch.Tensor, alive: list[int]) -> None:
    rows = output.shape[0]
    alive[0] += rows
    alive[1] = max(alive[1], alive[0])

    def free() -> None:
        alive[0] -= rows

    weakref.finalize(output.untyped_storage(), free)


def test_no_graph_is_built_without_gradients():
    head, hidden, targets, _ = problem()
    with torch.no_grad():
        got = chunked_token_statistics(head, hidden, targets, chunk_tokens=4, temperature=1.0)
    assert not got.logp.requires_grad


def test_mistakes_are_refused():
    head, hidden, targets, ref = problem()
    for wrong in ({"temperature": 0.0}, {"temperature": -1.0}):
        with pytest.raises(ValueError, match="temperature"):
            token_statistics(head(hidden), targets, **wrong)
    with pytest.raises(ValueError, match="targets"):
        token_statistics(head(hidden), targets[1:], temperature=1.0)
    with pytest.raises(ValueError, match="ref_logprobs"):
        token_statistics(head(hidden), targets, temperature=1.0, ref_logprobs=ref[:, 1:])
    for chunk_tokens, reference in itertools.product((0, -1), (None, ref)):
        with pytest.raises(ValueError, match="chunk_tokens"):
            chunked_token_statistics(head, hidden, targets, chunk_tokens=chunk_tokens, temperature=1.0, ref_logprobs=reference)
