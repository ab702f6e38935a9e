"""The fused head against the definition by whole logits: values, gradients, memory, extreme logits, half precision."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from akl_dist.objective import (
    HeadReference,
    TokenStatistics,
    chunked_token_statistics,
    fused_head,
    token_statistics,
    topk_reference,
)

N, H, H_REF, V, TEMPERATURE = 11, 5, 4, 13, 0.7
DIFFERENTIABLE = ("logp", "entropy", "kl_forward", "kl_reverse")
KINDS = ("none", "topk1", "topk4", "topk12", "topk13", "full")


def problem(kind: str = "none", *, temperature: float = TEMPERATURE, bias: bool = True, scale: float = 1.0, seed: int = 0):
    """(hidden, weight, bias), targets, the fused head's reference, and the same reference for the definition."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale

    hidden, weight = normal(N, H).requires_grad_(True), normal(V, H).requires_grad_(True)
    leaf = normal(V).requires_grad_(True) if bias else None
    targets = torch.randint(V, (N,), generator=generator)
    frozen = HeadReference(normal(N, H_REF), normal(V, H_REF), normal(V))
    ref_logits = frozen.hidden @ frozen.weight.T + frozen.bias
    if kind == "none":
        return (hidden, weight, leaf), targets, None, {}
    if kind == "full":
        return (hidden, weight, leaf), targets, frozen, {"ref_logprobs": torch.log_softmax(ref_logits / temperature, -1)}
    kept = topk_reference(ref_logits, targets, k=int(kind[4:]), temperature=temperature)
    return (hidden, weight, leaf), targets, kept, {"topk": kept}


def logits_of(hidden, weight, bias):
    return hidden @ weight.T if bias is None else hidden @ weight.T + bias


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("chunk_tokens", "block_elements", "temperature", "bias"), [
    (1, 1, 1.0, False), (4, 26, TEMPERATURE, True), (N, 40, 1.0, True), (100, 10**6, TEMPERATURE, False)])
def test_values_and_gradients_equal_the_definition(monkeypatch, kind, chunk_tokens, block_elements, temperature, bias):
    monkeypatch.setattr(fused_head, "BLOCK_ELEMENTS", block_elements)
    leaves, targets, reference, options = problem(kind, temperature=temperature, bias=bias)
    options |= {"temperature": temperature, "with_gradient_norms": True}
    whole = token_statistics(logits_of(*leaves), targets, **options)
    fused = chunked_token_statistics(*leaves, targets, chunk_tokens=chunk_tokens, temperature=temperature, reference=reference,
                                     with_gradient_norms=True)
    for name, value in whole._asdict().items():
        if value is None:
            assert getattr(fused, name) is None, name
        else:
            torch.testing.assert_close(getattr(fused, name), value, rtol=1e-9, atol=1e-12, msg=name)
    wanted = [leaf for leaf in leaves if leaf is not None]
    names = [name for name in DIFFERENTIABLE if getattr(whole, name) is not None]
    slopes = torch.linspace(-1, 2, N, dtype=torch.float64)
    together = None
    for chosen in (*([name] for name in names), names):  # each output alone, then all of them
        losses = [sum((scale * slopes * getattr(one, name)).sum() for scale, name in enumerate(chosen, 1))
                  for one in (fused, whole)]
        got, expected = (torch.autograd.grad(loss, wanted, retain_graph=True) for loss in losses)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=f"{chosen}")
        together = got
    assert together is not None and max(float(g.abs().max()) for g in together) > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind):
    (hidden, weight, bias), targets, reference, _ = problem(kind)
    rows = 3
    if kind == "full":
        reference = reference._replace(hidden=reference.hidden[:rows])
    elif kind != "none":
        reference = reference.rows(0, rows)

    def outputs(*inputs):
        got = chunked_token_statistics(*inputs, targets[:rows], chunk_tokens=2, temperature=TEMPERATURE, reference=reference)
        return tuple(value for value in got[:4] if value is not None)

    assert torch.autograd.gradcheck(outputs, (hidden[:rows].detach().requires_grad_(True), weight, bias))


def test_a_wrong_gradient_fails_the_check(monkeypatch):
    """Negative control: without the entropy's own term the comparison above fails."""
    real = fused_head._bucket_slope
    monkeypatch.setattr(fused_head, "_bucket_slope", lambda z, y, k, s, base, g, saved: real(
        z, y, k, s, base, g._replace(entropy=None), saved))
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        test_gradcheck("none")


def test_extreme_logits_stay_finite_and_right():
    """Logits of several hundred in float32: a rest of e^-300 neither vanishes nor overflows where the reference's is large."""
    for kind in KINDS:
        leaves, targets, reference, options = problem(kind, scale=4.0)
        exact = [leaf.detach().clone().requires_grad_(True) for leaf in leaves]
        whole = token_statistics(logits_of(*exact) * 8, targets, temperature=TEMPERATURE, with_gradient_norms=True, **options)
        narrow = [leaf.detach().float() for leaf in leaves]
        inputs = [(narrow[0] * 8).requires_grad_(True), narrow[1].requires_grad_(True), (narrow[2] * 8).requires_grad_(True)]
        fused = chunked_token_statistics(*inputs, targets, chunk_tokens=4, temperature=TEMPERATURE, reference=reference,
                                         with_gradient_norms=True)
        assert whole.logp.min() < -300
        for name, value in whole._asdict().items():
            if value is not None:
                size = value.abs() if name != "forward_reverse_dot" else (whole.forward_norm2 * whole.reverse_norm2).sqrt()
                assert ((getattr(fused, name) - value).abs() <= 2e-4 * (1 + size)).all(), f"{kind} {name}"
        for statistics, wanted in ((whole, exact), (fused, inputs)):
            loss = sum(value.sum() for value in statistics[:4] if value is not None)
            loss.backward()
            assert all(leaf.grad.isfinite().all() for leaf in wanted)
        scale = exact[1].grad.abs().max()
        torch.testing.assert_close(inputs[1].grad.double() / scale, exact[1].grad / scale, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mass", [1e-9, 1e-30])
def test_gradient_of_a_nearly_empty_rest(mass):
    """Reference: half of its mass in the rest, where the policy has next to nothing. d forward / d z_v = pi_v - Q share_v."""
    ratio = torch.tensor([0.75, 0.25])  # of the two tokens of the rest
    logits = torch.cat([torch.zeros(1), (mass * ratio).log()])
    weight = logits[:, None].clone().requires_grad_(True)
    targets = torch.tensor([0])
    kept = topk_reference(torch.tensor([[2.0, 1.0, 1.0]]).log(), targets, k=1, temperature=1.0)
    got = chunked_token_statistics(torch.ones(1, 1), weight, None, targets, chunk_tokens=1, temperature=1.0, reference=kept)
    assert got.kl_forward.item() == pytest.approx(0.5 * math.log(0.5) + 0.5 * math.log(0.5 / mass), rel=1e-5)
    got.kl_forward.sum().backward()
    torch.testing.assert_close(weight.grad[:, 0], torch.tensor([0.5, -0.5 * 0.75, -0.5 * 0.25]), rtol=1e-5, atol=1e-7)


def test_norm_and_entropy_of_a_nearly_certain_token_survive_float32():
    """1 - p is about e^-20: in float32 p is 1, and 1 - p would be 0."""
    weight = torch.tensor([[20.0], [0.0]])
    got = chunked_token_statistics(torch.ones(1, 1), weight, None, torch.tensor([0]), chunk_tokens=1, temperature=1.0,
                                   with_gradient_norms=True)
    assert got.score_norm2.item() == pytest.approx(2 * math.exp(-20) ** 2, rel=1e-4, abs=0)
    assert got.entropy.item() == pytest.approx(21 * math.exp(-20), rel=0.05, abs=0)  # log p itself is 0 in float32


@pytest.mark.parametrize("kind", ["none", "topk4", "full"])
def test_bfloat16_head(kind):
    leaves, targets, reference, options = problem(kind)
    half = [leaf.detach().bfloat16().requires_grad_(True) for leaf in leaves]
    if kind == "full":
        reference = HeadReference(*(field.bfloat16() for field in reference))
        ref_logits = torch.addmm(reference.bias, reference.hidden, reference.weight.T).float()
        options = {"ref_logprobs": torch.log_softmax(ref_logits / TEMPERATURE, -1)}
    elif kind != "none":
        options = {"topk": options["topk"]._replace(logp=options["topk"].logp.float())}
    fused = chunked_token_statistics(*half, targets, chunk_tokens=4, temperature=TEMPERATURE, reference=reference)
    product = torch.addmm(half[2], half[0], half[1].T)  # bfloat16, and everything after it in float32
    whole = token_statistics(product, targets, temperature=TEMPERATURE, **options)
    for a, b in zip(fused[:4], whole[:4], strict=True):
        if b is not None:
            assert a.dtype == torch.float32
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    got, expected = (torch.autograd.grad(sum(v.sum() for v in one[:4] if v is not None), half) for one in (fused, whole))
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a.float(), b.float(), rtol=0.05, atol=0.05)


# --- memory ------------------------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, list | tuple) else (out,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.untyped_storage().nbytes() // value.element_size())
        return out


def wide(tokens: int, vocabulary: int, kind: str):
    torch.manual_seed(0)
    hidden, weight = torch.randn(tokens, 3, requires_grad=True), torch.randn(vocabulary, 3, requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.long)
    if kind == "full":
        return hidden, weight, targets, HeadReference(torch.randn(tokens, 3), torch.randn(vocabulary, 3), None)
    return hidden, weight, targets, topk_reference(torch.randn(tokens, vocabulary), targets, k=3, temperature=1.0)


@pytest.mark.parametrize("kind", ["topk", "full"])
def test_no_tensor_is_larger_than_one_chunk_of_logits(kind):
    tokens, vocabulary, chunk = 64, 257, 8
    hidden, weight, targets, reference = wide(tokens, vocabulary, kind)

    def largest(compute) -> int:
        with LargestTensor() as seen:
            statistics = compute()
            sum(getattr(statistics, name).sum() for name in DIFFERENTIABLE).backward()
        return seen.elements

    fused = largest(lambda: chunked_token_statistics(hidden, weight, None, targets, chunk_tokens=chunk, temperature=1.0,
                                                     reference=reference, with_gradient_norms=True))
    assert fused == chunk * vocabulary  # at most one chunk of logits, forward and backward
    options = {"topk": reference} if kind == "topk" else {"ref_logprobs": torch.randn(tokens, vocabulary)}
    whole = largest(lambda: token_statistics(hidden @ weight.T, targets, temperature=1.0, **options))
    assert whole == tokens * vocabulary  # the control: the hook does see whole logits


@pytest.mark.parametrize("kind", ["topk", "full"])
def test_nothing_of_the_vocabularys_size_is_kept_for_the_backward_pass(kind):
    hidden, weight, targets, reference = wide(64, 257, kind)
    kept: dict[int, int] = {}

    def pack(value):
        kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes() // value.element_size()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        got = chunked_token_statistics(hidden, weight, None, targets, chunk_tokens=8, temperature=1.0, reference=reference)
    assert got.logp.requires_grad
    own = {tensor.untyped_storage().data_ptr() for tensor in (hidden, weight, targets)}
    assert 0 < sum(size for pointer, size in kept.items() if pointer not in own) <= 8 * 64  # numbers per token


def test_workspace_is_freed():
    hidden, weight, targets, reference = wide(64, 257, "full")
    alive: list[weakref.ref] = []
    real = fused_head._Workspace.__init__

    def watch(self, *arguments):
        real(self, *arguments)
        alive.append(weakref.ref(self))

    fused_head._Workspace.__init__ = watch
    try:
        got = chunked_token_statistics(hidden, weight, None, targets, chunk_tokens=8, temperature=1.0, reference=reference)
        assert len(alive) == 1 and alive[0]() is None
        got.logp.sum().backward()
        assert len(alive) == 2 and alive[1]() is None
    finally:
        fused_head._Workspace.__init__ = real


# --- edges -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", "topk4", "full"])
def test_no_tokens_at_all(kind):
    """A rank may have nothing to predict: the gradients are zeros and not missing, since the ranks reduce them together."""
    leaves, targets, reference, _ = problem(kind)
    cut = reference
    if kind == "full":
        cut = HeadReference(reference.hidden[:0], reference.weight, reference.bias)
    elif kind != "none":
        cut = reference.rows(0, 0)
    got = chunked_token_statistics(leaves[0][:0], *leaves[1:], targets[:0], chunk_tokens=4, temperature=1.0, reference=cut,
                                   with_gradient_norms=True)
    assert all(value.shape == (0,) for value in got if value is not None)
    assert (got.kl_forward is None) == (kind == "none")
    got.logp.sum().backward()
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in leaves)


def test_only_what_needs_a_gradient_gets_one():
    leaves, targets, reference, _ = problem("full")
    fixed = [leaf.detach() for leaf in leaves]
    got = chunked_token_statistics(leaves[0], *fixed[1:], targets, chunk_tokens=4, temperature=1.0, reference=reference)
    got.kl_reverse.sum().backward()
    assert leaves[0].grad is not None and reference.weight.grad is None
    with torch.no_grad():
        assert not chunked_token_statistics(*leaves, targets, chunk_tokens=4, temperature=1.0).logp.requires_grad


def test_log_probs_do_not_depend_on_the_reference_or_on_gradients():
    """The ratio of the first update is exactly 1 only if the pass without a reference gives the same bits."""
    leaves, targets, reference, _ = problem("full")
    narrow = [leaf.detach().float() for leaf in leaves]
    frozen = HeadReference(*(field.float() for field in reference))
    plain = chunked_token_statistics(*narrow, targets, chunk_tokens=4, temperature=TEMPERATURE).logp
    narrow[1].requires_grad_(True)
    full = chunked_token_statistics(*narrow, targets, chunk_tokens=4, temperature=TEMPERATURE, reference=frozen,
                                    with_gradient_norms=True).logp
    assert torch.equal(plain, full)


def test_without_reference_fields_are_none():
    leaves, targets, _, _ = problem()
    got = chunked_token_statistics(*leaves, targets, chunk_tokens=4, temperature=1.0)
    assert isinstance(got, TokenStatistics) and got.logp.shape == got.entropy.shape == (N,)
    assert got[2:] == (None,) * 6


def test_mistakes_are_refused():
    (hidden, weight, bias), targets, reference, _ = problem("full")
    right = {"chunk_tokens": 4, "temperature": 1.0}
    for wrong, match in (({"chunk_tokens": 0}, "chunk_tokens"), ({"temperature": 0.0}, "temperature")):
        with pytest.raises(ValueError, match=match):
            chunked_token_statistics(hidden, weight, bias, targets, **(right | wrong))
    with pytest.raises(ValueError, match="targets"):
        chunked_token_statistics(hidden, weight, bias, targets[1:], **right)
    with pytest.raises(ValueError, match="head weight"):
        chunked_token_statistics(hidden, weight[:, 1:], bias, targets, **right)
    for broken in (reference._replace(weight=reference.weight[1:]), reference._replace(hidden=reference.hidden[1:])):
        with pytest.raises(ValueError, match="reference"):
            chunked_token_statistics(hidden, weight, bias, targets, reference=broken, **right)
