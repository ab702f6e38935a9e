"""CoKL: coefficients by hand, population gradients by enumeration, the estimators' documented bias, degenerate prompts."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from akl_dist.objective import COKL_ESTIMATORS, cokl_coefficients, cokl_terms

# --- three tokens, length three: 27 sequences, every prefix with logits of its own ---------------------------------
V, T = 3, 3
SEQUENCES = torch.tensor(list(itertools.product(range(V), repeat=T)))
STATES = torch.stack([torch.zeros(27, dtype=torch.long), 1 + SEQUENCES[:, 0], 1 + V + V * SEQUENCES[:, 0] + SEQUENCES[:, 1]], dim=1)
S = 1 + V + V * V
CORRECT = torch.zeros(27, dtype=torch.bool)
CORRECT[[1, 4, 5, 11, 16, 22, 26]] = True


class World(NamedTuple):
    """Log-probability tables [S, V] of the current policy, of the one that drew its responses, and of the reference."""

    policy: torch.Tensor
    old: torch.Tensor
    reference: torch.Tensor


def world(seed: int, scale: float) -> World:
    generator = torch.Generator().manual_seed(seed)
    return World(*(torch.log_softmax(scale * torch.randn(S, V, generator=generator, dtype=torch.float64), -1) for _ in range(3)))


FAR, NEAR = world(3, 1.0), world(3, 0.25)
POLICY, OLD, REFERENCE = FAR


def seq_logp(table: torch.Tensor) -> torch.Tensor:
    return table[STATES, SEQUENCES].sum(-1)


def conditional(table: torch.Tensor) -> torch.Tensor:
    """[27] probabilities of the correct sequences given that the sequence is correct; 0 elsewhere."""
    probs = torch.where(CORRECT, seq_logp(table).exp(), torch.zeros(27, dtype=torch.float64))
    return probs / probs.sum()


def gradient(coefficients: torch.Tensor, table: torch.Tensor = POLICY, sequences: torch.Tensor | None = None) -> torch.Tensor:
    """[S, V] gradient in the policy's logits of sum c log pi(y)."""
    logits = table.clone().requires_grad_(True)
    logp = seq_logp(torch.log_softmax(logits, -1))
    logp = logp if sequences is None else logp[sequences]
    (coefficients * logp).sum().backward()
    return logits.grad


def population_gradient(table: torch.Tensor = POLICY) -> torch.Tensor:
    """Autograd of KL(ref_C || pi_C) itself."""
    logits = table.clone().requires_grad_(True)
    logp = seq_logp(torch.log_softmax(logits, -1))[CORRECT]
    target = conditional(REFERENCE)[CORRECT]
    (target * (target.log() - (logp - logp.logsumexp(0)))).sum().backward()
    return logits.grad


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got - expected).norm() / expected.norm()).item()


def all_once(estimator: str, table: torch.Tensor = POLICY, **options) -> torch.Tensor:
    """Coefficients of one group that holds each of the 27 sequences once: a uniform behaviour policy's population."""
    reference = estimator == "reference_buffer"
    uniform = torch.zeros(27, dtype=torch.float64)
    return cokl_coefficients(
        estimator, seq_logp=seq_logp(table), seq_ref_logp=seq_logp(REFERENCE), seq_behaviour_logp=uniform, correct=CORRECT,
        group_index=torch.zeros(27, dtype=torch.long), is_reference=torch.full((27,), reference), **options,
    )


def drawn(estimator: str, current: torch.Tensor, reference: torch.Tensor, tables: World = FAR, **options):
    """(coefficients [R, n + m], sequences [R, n + m]) of R groups of n draws of `old` and m draws of the reference."""
    sequences = torch.cat([current, reference], dim=1)
    is_reference = torch.zeros_like(sequences, dtype=torch.bool)
    is_reference[:, current.shape[1] :] = True
    index = torch.arange(sequences.shape[0]).unsqueeze(1).expand_as(sequences)
    flat = sequences.flatten()
    logp, old_logp, ref_logp = (seq_logp(table)[flat] for table in tables)
    coefficients = cokl_coefficients(
        estimator, seq_logp=logp, seq_ref_logp=ref_logp, seq_behaviour_logp=old_logp,
        correct=CORRECT[flat], group_index=index.flatten(), is_reference=is_reference.flatten(), **options,
    )
    return coefficients.view_as(sequences), sequences


def mean_coefficients(estimator: str, tables: World = FAR, *, n: int, m: int, only_correct: bool = True, **options) -> torch.Tensor:
    """[27] expected total coefficient of each sequence over every group of n draws of `old` and m draws of the reference.

    With `only_correct` the draws are from the conditionals on C (every member counts, no group is skipped).
    """
    pool = CORRECT.nonzero().squeeze(-1) if only_correct else torch.arange(27)
    old, ref = (conditional(t) if only_correct else seq_logp(t).exp() for t in (tables.old, tables.reference))
    groups = torch.cartesian_prod(*[pool] * (n + m)).view(-1, n + m)
    coefficients, sequences = drawn(estimator, groups[:, :n], groups[:, n:], tables, **options)
    probs = old[groups[:, :n]].prod(1) * ref[groups[:, n:]].prod(1)
    return torch.zeros(27, dtype=torch.float64).index_add(0, sequences.flatten(), (probs.unsqueeze(1) * coefficients).flatten())


# --- population ----------------------------------------------------------------------------------------------------


def test_population_gradient_is_pi_c_minus_ref_c():
    """The formula of the loss's gradient, against autograd of the divergence; its coefficients sum to zero."""
    coefficients = conditional(POLICY) - conditional(REFERENCE)
    assert relative_error(gradient(coefficients), population_gradient()) < 1e-9
    assert coefficients.sum().abs() < 1e-14
    assert population_gradient().norm() > 0.05


def test_group_is_exact_on_its_population():
    """Each sequence once under a uniform mu: u is pi_C and v is ref_C."""
    coefficients = all_once("group")
    assert relative_error(coefficients, conditional(POLICY) - conditional(REFERENCE)) < 1e-9
    assert relative_error(gradient(coefficients), population_gradient()) < 1e-9
    assert coefficients[~CORRECT].abs().max() == 0


def in_multiples(counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences, each as often as its count, and the log-probs of a distribution proportional to the counts."""
    weights = torch.tensor(counts, dtype=torch.float64)
    return torch.arange(27).repeat_interleave(torch.tensor(counts)), (weights / weights.sum()).log()


def test_reference_buffer_and_paper_are_exact_on_their_population():
    """Draws in exact proportion to integer distributions: old (for `paper`) and ref; pi anything (`paper` unclipped)."""
    ref_sequences, ref_logp = in_multiples([1 + n % 4 for n in range(27)])
    old_sequences, old_logp = in_multiples([1 + (5 * n) % 7 for n in range(27)])
    policy = seq_logp(POLICY)
    flat = torch.cat([old_sequences, ref_sequences])
    is_reference = torch.arange(len(flat)) >= len(old_sequences)

    def given_c(logp: torch.Tensor) -> torch.Tensor:
        probs = torch.where(CORRECT, logp.exp(), torch.zeros(27, dtype=torch.float64))
        return probs / probs.sum()

    for estimator in ("reference_buffer", "paper"):
        # clip next to 1 and pi within that window of old: unclipped
        pi = policy if estimator == "reference_buffer" else old_logp + 0.3 * torch.sin(torch.arange(27, dtype=torch.float64))
        coefficients = cokl_coefficients(
            estimator, seq_logp=pi[flat], seq_ref_logp=ref_logp[flat], seq_behaviour_logp=old_logp[flat], correct=CORRECT[flat],
            group_index=torch.zeros(len(flat), dtype=torch.long), is_reference=is_reference, clip=0.99,
        )
        per_sequence = torch.zeros(27, dtype=torch.float64).index_add(0, flat, coefficients)
        assert relative_error(per_sequence, given_c(pi) - given_c(ref_logp)) < 1e-9
        assert coefficients.sum().abs() < 1e-12
        other = coefficients[~is_reference] if estimator == "reference_buffer" else coefficients[~CORRECT[flat]]
        assert other.abs().max() == 0


def test_coefficients_do_not_move_the_probability_of_being_correct():
    """A shift of log pi common to all of C changes no coefficient, and coefficients sum to zero: Z is not anchored."""
    shifted = seq_logp(POLICY) + 3.0
    options = {"correct": CORRECT, "group_index": torch.zeros(27, dtype=torch.long), "is_reference": ~CORRECT & CORRECT,
               "seq_ref_logp": seq_logp(REFERENCE), "seq_behaviour_logp": seq_logp(OLD)}  # fmt: skip
    one = cokl_coefficients("group", seq_logp=seq_logp(POLICY), **options)
    two = cokl_coefficients("group", seq_logp=shifted, **options)
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)
    assert one.sum().abs() < 1e-14


def test_group_is_the_gradient_of_the_divergence_of_its_weights():
    """c = d KL(v || u) / d log pi, also after tempering (over the exponent)."""
    generator = torch.Generator().manual_seed(0)
    for fraction in (0.0, 0.9):
        logp = torch.randn(6, generator=generator, dtype=torch.float64).mul(3).requires_grad_(True)
        ref, mu = (3 * torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(2))
        terms = one_group("group", logp, ref, mu, min_ess_fraction=fraction)
        exponent = terms.exponent.item()
        log_u = torch.log_softmax(exponent * (logp - mu), 0)
        log_v = torch.log_softmax(exponent * (ref - mu), 0)
        divergence = (log_v.exp() * (log_v - log_u)).sum()
        divergence.backward()
        assert relative_error(exponent * terms.coefficients, logp.grad) < 1e-9
        assert terms.divergence.item() == pytest.approx(divergence.item(), rel=1e-9)
        assert (exponent < 1) == (fraction > 0)


# --- bias ----------------------------------------------------------------------------------------------------------


def target_of(tables: World) -> torch.Tensor:
    return conditional(tables.policy) - conditional(tables.reference)


def test_paper_on_policy_is_unbiased_up_to_the_skipped_prompts():
    """pi = old: the mean gradient is the population gradient times P(neither set is empty)."""
    n, m = 2, 1
    mean = mean_coefficients("paper", FAR._replace(policy=OLD), n=n, m=m, only_correct=False)
    z_old, z_ref = (seq_logp(table).exp()[CORRECT].sum() for table in (OLD, REFERENCE))
    both = (1 - (1 - z_old) ** n) * (1 - (1 - z_ref) ** m)
    assert 0.05 < both < 0.8
    assert relative_error(mean, both * (conditional(OLD) - conditional(REFERENCE))) < 1e-9


def test_paper_off_policy_is_pulled_towards_old():
    """clip = 0 makes the second part the mean over old_C exactly; a wide clip leaves the bias of self-normalised weights."""
    closed = mean_coefficients("paper", n=2, m=1, clip=0.0)
    assert relative_error(closed, conditional(OLD) - conditional(REFERENCE)) < 1e-9
    target = target_of(FAR)
    errors = [relative_error(mean_coefficients("paper", n=n, m=1, clip=0.999), target) for n in (1, 2, 3)]
    default = relative_error(mean_coefficients("paper", n=3, m=1), target)
    assert errors[0] > errors[1] > errors[2] > 0.01
    assert errors[2] < default < relative_error(closed, target)


@pytest.mark.parametrize("estimator", ["group", "reference_buffer"])
def test_self_normalised_estimators_lose_their_bias_as_one_over_n(estimator):
    """n times the relative bias settles near a constant, the more so the nearer the policies are to each other."""
    sizes = (2, 3, 4, 5, 6)
    scaled = {}
    for name, tables in (("near", NEAR), ("far", FAR)):
        draws = [{"n": n, "m": 0} if estimator == "group" else {"n": 0, "m": n} for n in sizes]
        errors = [relative_error(mean_coefficients(estimator, tables, **d), target_of(tables)) for d in draws]
        assert all(later < earlier for earlier, later in itertools.pairwise(errors)), errors
        assert errors[-1] > 0.05  # the documented bias is there
        scaled[name] = [n * error for n, error in zip(sizes, errors, strict=True)]
    assert max(scaled["near"]) / min(scaled["near"]) < 1.2, scaled
    assert all(near < far for near, far in zip(scaled["near"], scaled["far"], strict=True)), scaled


def test_reference_buffer_has_the_lowest_error_and_paper_the_highest():
    """Mean squared error of the coefficients per sequence, four correct draws each (`paper`: two and two), over all groups."""
    pool = CORRECT.nonzero().squeeze(-1)
    groups = torch.cartesian_prod(*[pool] * 4)

    def error(estimator: str, n: int, tables: World) -> float:
        coefficients, sequences = drawn(estimator, groups[:, :n], groups[:, n:], tables)
        probs = conditional(tables.old)[groups[:, :n]].prod(1) * conditional(tables.reference)[groups[:, n:]].prod(1)
        rows = torch.zeros(len(groups), 27, dtype=torch.float64).scatter_add(1, sequences, coefficients)
        return (probs * ((rows - target_of(tables)) ** 2).sum(1)).sum().item()

    for tables in (NEAR, FAR):
        buffer, group, paper = (error(e, n, tables) for e, n in (("reference_buffer", 0), ("group", 4), ("paper", 2)))
        assert buffer < group < paper, (buffer, group, paper)


# --- by hand -------------------------------------------------------------------------------------------------------


def logs(*probs: float) -> torch.Tensor:
    return torch.tensor(probs, dtype=torch.float64).log()


def one_group(estimator: str, logp, ref, mu, *, correct=None, is_reference=None, **options):
    n = len(logp)
    return cokl_terms(
        estimator, seq_logp=logp, seq_ref_logp=ref, seq_behaviour_logp=mu,
        correct=torch.ones(n, dtype=torch.bool) if correct is None else torch.tensor(correct),
        is_reference=torch.zeros(n, dtype=torch.bool) if is_reference is None else torch.tensor(is_reference),
        group_index=torch.zeros(n, dtype=torch.long), **options,
    )


def test_paper_by_hand():
    """Two reference answers: -1/2 each. Ratios 1, 1.1 and 3 (clipped to 1.2): w = 1/3.3, 1.1/3.3, 1.2/3.3."""
    terms = one_group(
        "paper", logs(0.1, 0.11, 0.3, 0.2, 0.5, 0.4), logs(*[0.1] * 6), logs(0.1, 0.1, 0.1, 0.9, 0.9, 0.9),
        correct=[True] * 5 + [False], is_reference=[False] * 3 + [True] * 2 + [False],
    )
    w = [1 / 3.3, 1.1 / 3.3, 1.2 / 3.3]
    assert terms.coefficients.tolist() == pytest.approx([*w, -0.5, -0.5, 0.0], rel=1e-12)
    assert terms.largest_weight.item() == pytest.approx(w[2], rel=1e-12)
    assert terms.ess.item() == pytest.approx(1 / sum(x * x for x in w), rel=1e-12)
    assert terms.divergence is None and terms.used.tolist() == [True] * 5 + [False]


def test_group_by_hand():
    """mu equal: u = (.2, .6)/.8 = (1/4, 3/4), v = (.3, .1)/.4 = (3/4, 1/4); the wrong third member counts nowhere."""
    terms = one_group("group", logs(0.2, 0.6, 0.9), logs(0.3, 0.1, 0.5), logs(0.5, 0.5, 0.5), correct=[True, True, False])
    assert terms.coefficients.tolist() == pytest.approx([-0.5, 0.5, 0.0], rel=1e-12)
    assert terms.ess.item() == pytest.approx(1.6) and terms.largest_weight.item() == pytest.approx(0.75)
    assert terms.divergence.item() == pytest.approx(0.5 * math.log(3))  # 3/4 log 3 - 1/4 log 3


def test_reference_buffer_by_hand():
    """v = 1/2 each; pi/ref = 1 and 3, so u = 1/4 and 3/4; the policy's own response is not a member."""
    terms = one_group("reference_buffer", logs(0.2, 0.6, 0.3), logs(0.2, 0.2, 0.3), logs(0.9, 0.1, 0.3),
                      is_reference=[True, True, False])
    assert terms.coefficients.tolist() == pytest.approx([-0.25, 0.25, 0.0], rel=1e-12)


def test_zero_at_the_reference():
    """pi = ref: `group` and `reference_buffer` are zero on every sample; `paper` only in expectation (see its bias)."""
    for estimator in ("group", "reference_buffer"):
        for fraction in (0.0, 0.5):
            assert all_once(estimator, REFERENCE, min_ess_fraction=fraction).abs().max() == 0
    same = World(REFERENCE, REFERENCE, REFERENCE)
    assert mean_coefficients("paper", same, n=2, m=2).abs().max() < 1e-12
    coefficients, _ = drawn("paper", torch.tensor([[1]]), torch.tensor([[4]]))
    assert coefficients.tolist() == [[1.0, -1.0]]  # one sample of each: far from zero


def test_prompts_without_a_term():
    """Five prompts: no reference answer; no correct response; one correct of each; one correct member; two."""
    correct = [True, True, False, True, True, True, True, False, True, True]
    is_reference = [False, False, False, True, False, True, False, True, False, False]
    index = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4])
    logp, mu = torch.linspace(-2, -1, 10, dtype=torch.float64), torch.full((10,), -1.5, dtype=torch.float64)
    options = {"seq_logp": logp, "seq_ref_logp": mu, "seq_behaviour_logp": mu, "correct": torch.tensor(correct),
               "is_reference": torch.tensor(is_reference), "group_index": index}  # fmt: skip
    expected = {"paper": [False, False, True, False, False], "group": [True, False, False, False, True],
                "reference_buffer": [False] * 5}  # fmt: skip
    for estimator in COKL_ESTIMATORS:
        terms = cokl_terms(estimator, **options)
        assert terms.has_term.tolist() == expected[estimator]
        silent = ~terms.has_term
        assert terms.coefficients[silent[index]].abs().max() == 0
        assert terms.ess[silent].abs().sum() == 0 and terms.largest_weight[silent].abs().sum() == 0
        assert terms.largest_weight.isfinite().all()


def test_a_prompt_never_sees_another():
    """Groups in one call, in any order, with any index values: the same as one call each."""
    generator = torch.Generator().manual_seed(5)
    n = 24
    index = torch.randint(-3, 4, (n,), generator=generator)
    rows = {name: 2 * torch.randn(n, generator=generator, dtype=torch.float64)
            for name in ("seq_logp", "seq_ref_logp", "seq_behaviour_logp")}  # fmt: skip
    rows["correct"] = torch.rand(n, generator=generator) < 0.7
    rows["is_reference"] = torch.rand(n, generator=generator) < 0.5
    for estimator in COKL_ESTIMATORS:
        whole = cokl_coefficients(estimator, group_index=index, min_ess_fraction=0.5, **rows)
        for prompt in index.unique():
            mine = index == prompt
            of_prompt = {name: values[mine] for name, values in rows.items()}
            own = cokl_coefficients(estimator, group_index=index[mine], min_ess_fraction=0.5, **of_prompt)
            torch.testing.assert_close(whole[mine], own, rtol=1e-9, atol=1e-12)
        assert whole.sum().abs() < 1e-9 and whole.abs().max() > 0


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_order_and_unused_content_do_not_matter(data):
    """Permuting the responses permutes the coefficients; log-probs of responses that are not correct may be anything."""
    n = data.draw(st.integers(1, 12))
    number = st.floats(-50, 50, allow_nan=False, width=32)
    rows = {name: torch.tensor(data.draw(st.lists(number, min_size=n, max_size=n)), dtype=torch.float64)
            for name in ("seq_logp", "seq_ref_logp", "seq_behaviour_logp")}  # fmt: skip
    for name, values in (("correct", st.booleans()), ("is_reference", st.booleans()), ("group_index", st.integers(0, 2))):
        rows[name] = torch.tensor(data.draw(st.lists(values, min_size=n, max_size=n)))
    order = torch.tensor(data.draw(st.permutations(range(n))))
    fraction = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    garbage = torch.tensor([math.nan, math.inf, 1e30])[torch.arange(n) % 3].double()
    for estimator in COKL_ESTIMATORS:
        one = cokl_coefficients(estimator, min_ess_fraction=fraction, **rows)
        shuffled = cokl_coefficients(estimator, min_ess_fraction=fraction, **{name: value[order] for name, value in rows.items()})
        torch.testing.assert_close(shuffled, one[order], rtol=1e-7, atol=1e-9)
        spoilt = {name: torch.where(rows["correct"], value, garbage) for name, value in rows.items() if value.is_floating_point()}
        assert torch.equal(cokl_coefficients(estimator, min_ess_fraction=fraction, **{**rows, **spoilt}), one)
        assert one.isfinite().all() and one.abs().max() <= 1 and abs(one.sum().item()) < 1e-9


def test_tempering_reaches_the_effective_sample_size():
    """Log-weights 200 nats apart are one-hot; ten members keep an effective sample size of five, two keep their weights."""
    logp = torch.linspace(0, 200, 10, dtype=torch.float64)
    flat = torch.zeros(10, dtype=torch.float64)
    untempered = one_group("group", logp, flat, flat)
    assert untempered.ess.item() < 1.001 and untempered.exponent.item() == 1
    terms = one_group("group", logp, flat, flat, min_ess_fraction=0.5)
    assert terms.ess.item() == pytest.approx(5.0, rel=1e-6) and 0 < terms.exponent.item() < 1
    three = one_group("group", logp[:3], flat[:3], flat[:3], min_ess_fraction=0.1)
    assert three.ess.item() == pytest.approx(2.0, rel=1e-6)
    two = one_group("group", logs(0.25, 0.75), flat[:2], flat[:2], min_ess_fraction=0.5)
    assert two.exponent.item() == 1 and two.coefficients.tolist() == pytest.approx([-0.25, 0.25])
    # the target's weights count, too: the policy's are uniform here
    target = one_group("group", flat, logp, flat, min_ess_fraction=0.5)
    assert target.ess.item() == pytest.approx(10.0) and target.exponent.item() == pytest.approx(terms.exponent.item())


def test_long_responses_keep_differences_that_a_clamp_around_zero_would_erase():
    """Log-ratios of -300 and -301: u must be softmax(0, -1), not the half that clamp(-300, -20, 20) gives."""
    far = torch.tensor([-300.0, -301.0], dtype=torch.float64)
    zero = torch.zeros(2, dtype=torch.float64)
    u = 1 / (1 + math.exp(-1))
    assert one_group("group", far, zero, zero).coefficients.tolist() == pytest.approx([u - 0.5, 0.5 - u], rel=1e-9)
    extreme = one_group("group", torch.tensor([-1e5, 1e5], dtype=torch.float64), zero, zero)
    assert extreme.coefficients.isfinite().all() and extreme.divergence.isfinite().all()


def test_length_normalisation_is_another_target():
    """Per token: pi/mu of the second response is (e^2)^(1/2) = e; c holds 1/length."""
    logp, zero = torch.tensor([0.0, 2.0], dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    terms = one_group("group", logp, zero, zero, length_normalize=True, lengths=torch.tensor([1, 2]))
    u = math.e / (1 + math.e)
    assert terms.coefficients.tolist() == pytest.approx([0.5 - u, (u - 0.5) / 2], rel=1e-12)
    with pytest.raises(ValueError, match="lengths"):
        one_group("group", logp, zero, zero, length_normalize=True)


def test_duplicates_are_counted_per_origin_and_share_weight():
    ids = torch.tensor([7, 7, 7, 7, 8, 9])
    zero = torch.zeros(6, dtype=torch.float64)
    terms = one_group("paper", zero, zero, zero, is_reference=[True, True, False, False, False, False],
                      correct=[True] * 5 + [False], sequence_ids=ids)
    assert terms.duplicates.tolist() == [2]  # one of the reference's pair, one of the policy's
    twice = one_group("group", logs(0.2, 0.2, 0.6), logs(0.5, 0.5, 0.5), logs(0.5, 0.5, 0.5))
    assert twice.coefficients.tolist() == pytest.approx([0.2 - 1 / 3, 0.2 - 1 / 3, 0.6 - 1 / 3])
    assert one_group("group", zero, zero, zero).duplicates is None


def test_unused_members_may_hold_garbage_and_used_ones_may_not():
    nan = float("nan")
    logp = torch.tensor([-1.0, -2.0, nan], dtype=torch.float64)
    terms = one_group("group", logp, logp, logp, correct=[True, True, False])
    assert terms.coefficients.tolist() == [0, 0, 0]
    assert one_group("reference_buffer", logp[:2], logp[:2], torch.full((2,), nan), is_reference=[True, True]).has_term.all()
    for estimator, is_reference in (("group", [False] * 3), ("reference_buffer", [True] * 3), ("paper", [False, False, True])):
        with pytest.raises(ValueError, match="non-finite"):
            one_group(estimator, logp, logp, logp, is_reference=is_reference)


def test_dtype_empty_batches_and_mistakes():
    half = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16, requires_grad=True)
    terms = one_group("group", half, half.detach() - 1, half.detach())
    assert terms.coefficients.dtype == torch.float32 and not terms.coefficients.requires_grad
    nothing = torch.zeros(0)
    assert one_group("paper", nothing, nothing, nothing).coefficients.shape == (0,)
    with pytest.raises(ValueError, match="reference_buffer"):
        one_group("reference_bufer", nothing, nothing, nothing)
    with pytest.raises(ValueError, match="shape"):
        one_group("group", half, torch.zeros(3), half)
    with pytest.raises(ValueError, match="clip"):
        one_group("paper", nothing, nothing, nothing, clip=1.5)


# --- negative controls ---------------------------------------------------------------------------------------------


def test_wrong_variants_fail():
    """The full forward KL anchors wrong responses; the sign error and the missing second part are other gradients."""
    exact = population_gradient()
    pi, ref = seq_logp(POLICY).exp(), seq_logp(REFERENCE).exp()
    assert relative_error(gradient(pi - ref), exact) > 0.1
    assert relative_error(gradient(conditional(REFERENCE) - conditional(POLICY)), exact) > 1
    assert relative_error(gradient(-conditional(REFERENCE)), exact) > 0.1  # replay
    assert relative_error(gradient(torch.where(CORRECT, pi - ref, torch.zeros_like(pi))), exact) > 0.1  # not conditional
