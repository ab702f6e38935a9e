from __future__ import annotations

import random

import pytest
import torch

from akl_dist.verify.math import judge
from akl_dist.verify.roles import (
    Votes,
    entropy_votes,
    likelihood_ratios,
    position_votes,
    response_seed,
    role_votes,
    token_roles,
    verifier_votes,
    vote_table,
)

# Tokens of the tiny task; the end token is the last.
TOKENS = ["<think>", *"7+3=10;10+6=16", "</think>", "\\boxed", "{", "1", "6", "}", "<eos>"]


def spans_of(tokens):
    spans, at = [], 0
    for token in tokens:
        spans.append((at, at + len(token)))
        at += len(token)
    return "".join(tokens), spans


def picked(tokens, votes):
    return [token for token, vote in zip(tokens, votes, strict=True) if vote]


def positions(tokens, truncated=False, **options):
    text, spans = spans_of(tokens)
    return picked(tokens, position_votes(text.removesuffix("<eos>"), spans, truncated, **options))


def row(values, dtype=torch.bool):
    return torch.tensor([values], dtype=dtype)


def roles(entropies, position, verifier, mask=None, eos=None, **options):
    n = len(entropies)
    return token_roles(
        entropies=row(entropies, torch.float32), mask=row(mask or [1] * n), position_mask=row(position),
        verifier_span_mask=row(verifier), eos_mask=row(eos or [0] * n), **options,
    )[0].int().tolist()


def test_votes_on_the_tiny_example():
    text, spans = spans_of(TOKENS)
    assert positions(TOKENS) == ["\\boxed", "{", "1", "6", "}"]
    verdict = judge(gold="16", response_text=text, truncated=False)
    assert picked(TOKENS, verifier_votes(verdict.span, spans)) == ["1", "6"]
    assert not any(verifier_votes(None, spans))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["so ", "\\boxed", "{", "4", "}", " ok"], ["\\boxed", "{", "4", "}"]),  # no think section
        (["\\boxed{", "3}", "\n", "####", " 4"], ["\\boxed{", "3}"]),  # a box beats the marker
        (["a\n", "####", " 4", "\nb"], ["####", " 4"]),
        (["The ", "final ", "answer", " is", " 5", ".", "\n", "Bye"], ["answer", " is", " 5", "."]),  # to the end of the line
        (["\\boxed{1}", " no ", "\\boxed{2}"], ["\\boxed{2}"]),  # the last occurrence
        (["a\n", "b ", "c", "\n"], ["b ", "c"]),  # fallback: the last line
        (["x", "}\\boxed{", "7", "}y"], ["}\\boxed{", "7", "}y"]),  # merged over the borders
        (["<think>", "a", "</think>", "\\boxed{5"], ["\\boxed{5"]),  # never closed, stopped by itself: the last line
        (["<think>", "\\boxed{5}"], []),  # reasoning never closed
        (["<think>", "a", "</think>", "\n"], []),
    ],
)
def test_position_votes(tokens, expected):
    assert positions(tokens) == expected


def test_position_votes_when_truncated():
    assert positions(["a\n", "b ", "c"], truncated=True) == []
    assert positions(["\\boxed{5}", " and so"], truncated=True) == ["\\boxed{5}"]
    assert positions(["<think>", "a", "</think>", "\\boxed{5"], truncated=True) == []
    assert positions(["\\boxed{5}"], think_open=True) == []
    assert positions(["a", "</think>", "\\boxed{5}"], think_open=True) == ["\\boxed{5}"]


def test_last_line_is_at_most_32_tokens():
    tokens = [f"{k} " for k in range(40)]
    assert positions(tokens) == tokens[8:]


def test_entropy_votes_by_hand():
    # window 3: smoothed = [(0+3)/2, (0+3+3)/3, (3+3+0)/3, (3+0+0)/3, (0+0)/2] = [1.5, 2, 2, 1, 0]; median 1.5
    votes = entropy_votes(row([0, 3, 3, 0, 0], torch.float32), row([1] * 5), quantile=0.5, window=3)
    assert votes.tolist() == [[True, False, False, True, True]]
    # quantile .25 of the same values, sorted 0, 1, 1.5, 2, 2: position 1 -> 1
    votes = entropy_votes(row([0, 3, 3, 0, 0], torch.float32), row([1] * 5), quantile=0.25, window=3)
    assert votes.tolist() == [[False, False, False, True, True]]
    # the masked token leaves windows and quantile alone: [(0+3)/2, (0+3)/2, -, (0+0)/2, 0] -> median .75
    votes = entropy_votes(row([0, 3, float("nan"), 0, 0], torch.float32), row([1, 1, 0, 1, 1]), quantile=0.5, window=3)
    assert votes.tolist() == [[False, False, False, True, True]]
    # ties: a constant response is at its own quantile everywhere, at the borders too
    assert entropy_votes(torch.full((1, 30), 0.1), torch.ones(1, 30)).all()


def test_majority_by_hand():
    entropies, position, verifier = [5, 5, 0, 0, 0], [0, 1, 1, 1, 0], [0, 1, 1, 0, 0]
    # window 1, median 0: entropy votes [0,0,1,1,1]
    assert roles(entropies, position, verifier, entropy_window=1) == [0, 1, 1, 1, 0]
    assert roles(entropies, position, verifier, entropy_window=1, rule="entropy") == [0, 0, 1, 1, 1]
    assert roles(entropies, position, verifier, entropy_window=1, rule="position") == position
    assert roles(entropies, position, verifier, entropy_window=1, rule="verifier") == verifier
    # negative control: no single signal gives the majority's answer when each is wrong somewhere
    entropies, position, verifier = [0, 9, 9, 0], [1, 1, 0, 0], [1, 0, 1, 0]
    majority = roles(entropies, position, verifier, entropy_window=1)
    assert majority == [1, 0, 0, 0]
    for rule in ("position", "entropy", "verifier"):
        assert roles(entropies, position, verifier, entropy_window=1, rule=rule) != majority


def test_end_token_counts_only_beside_the_close():
    entropies, verifier, eos = [1, 0, 0], [0, 0, 0], [0, 0, 1]
    adjacent = roles(entropies, [0, 1, 0], verifier, eos=eos, entropy_window=1)
    apart = roles(entropies, [1, 0, 1], verifier, eos=eos, entropy_window=1)
    assert adjacent == [0, 1, 1]
    assert apart == [0, 0, 0]
    assert roles([1, 0], [0, 1], [0, 0], eos=[1, 0], entropy_window=1) == [0, 1]


def batch(rng, rows=4, width=20):
    generator = torch.Generator().manual_seed(rng.randrange(10**6))
    lengths = torch.tensor([rng.randint(1, width) for _ in range(rows)])
    mask = torch.arange(width)[None] < lengths[:, None]
    mask &= torch.rand(rows, width, generator=generator) > 0.1
    draw = lambda: torch.rand(rows, width, generator=generator) > 0.6  # noqa: E731
    entropies = torch.rand(rows, width, generator=generator)
    eos = torch.zeros_like(mask)
    eos[torch.arange(rows), lengths - 1] = True
    return {"entropies": entropies, "mask": mask, "position_mask": draw(), "verifier_span_mask": draw(), "eos_mask": eos}


@pytest.mark.parametrize("rule", ["majority", "position", "entropy", "verifier"])
def test_invariances(rule):
    rng = random.Random(0)
    for _ in range(20):
        arguments = batch(rng)
        answer = token_roles(rule=rule, **arguments)
        assert not (answer & ~arguments["mask"]).any()
        poisoned = arguments | {"entropies": arguments["entropies"].masked_fill(~arguments["mask"], float("nan"))}
        assert torch.equal(token_roles(rule=rule, **poisoned), answer)
        order = torch.tensor([2, 0, 3, 1])
        assert torch.equal(token_roles(rule=rule, **{k: v[order] for k, v in arguments.items()}), answer[order])
        wider = {k: torch.nn.functional.pad(v, (3, 7)) for k, v in arguments.items()}
        assert torch.equal(token_roles(rule=rule, **wider)[:, 3:-7], answer)
        alone = token_roles(rule=rule, **{k: v[:1] for k, v in arguments.items()})
        assert torch.equal(alone, answer[:1])


def test_batch_quantile_is_another_rule():
    """Negative control: one quantile over the whole batch labels these rows differently."""
    entropies, mask = torch.tensor([[0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]]), torch.ones(2, 4)
    ours = entropy_votes(entropies, mask, window=1)
    assert ours.int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0]]
    assert not torch.equal(entropies <= entropies.quantile(0.5), ours)


def test_refusals():
    with pytest.raises(ValueError, match="majority"):
        roles([1.0], [1], [1], rule="most")
    with pytest.raises(ValueError, match="NaN"):
        roles([float("nan")], [1], [1])
    with pytest.raises(ValueError, match="odd"):
        roles([1.0], [1], [1], entropy_window=4)
    with pytest.raises(ValueError, match="shape"):
        token_roles(entropies=torch.zeros(1, 2), mask=torch.ones(1, 3), position_mask=torch.ones(1, 2),
                    verifier_span_mask=torch.ones(1, 2), eos_mask=torch.ones(1, 2))


def test_empty_rows():
    empty = torch.zeros(2, 0)
    assert token_roles(entropies=empty, mask=empty, position_mask=empty, verifier_span_mask=empty, eos_mask=empty).shape == (2, 0)
    assert roles([1.0, 2.0], [1, 1], [1, 1], mask=[0, 0]) == [0, 0]


def test_table_and_likelihood_ratios_by_hand():
    votes = Votes(row([0, 0, 0, 1, 1, 1]), row([0, 1, 0, 1, 1, 0]), row([0, 0, 1, 0, 1, 1]))
    counts = vote_table(votes, row([1] * 6))
    assert counts == (1, 1, 1, 0, 0, 1, 1, 1)  # 000, 001, 010, 011, 100, 101, 110, 111
    # answer: 101, 110, 111; reasoning: 000, 001, 010
    ratios = likelihood_ratios(counts)
    assert ratios == {"position": None, "entropy": pytest.approx((2 / 3) / (1 / 3)), "verifier": pytest.approx(2)}
    assert likelihood_ratios([5] + [0] * 7) == {"position": None, "entropy": None, "verifier": None}
    assert sum(vote_table(votes, row([1, 1, 0, 0, 0, 0]))) == 2


def test_votes_are_what_the_roles_use():
    arguments = batch(random.Random(3))
    votes = role_votes(**arguments)
    assert torch.equal(token_roles(**arguments), (votes.position.int() + votes.entropy.int() + votes.verifier.int()) >= 2)


# --- roles drawn at random ---------------------------------------------------------------------------------------


def drawn(rule, seeds, **changes):
    """Majority: the two tokens in the middle of six sampled ones (and one of the environment's, with mask 0)."""
    rows = len(seeds)
    mask = torch.tensor([[1, 1, 1, 0, 1, 1, 1]] * rows)
    middle = torch.tensor([[0, 0, 1, 0, 1, 0, 0]] * rows, dtype=torch.bool)
    arguments = {"entropies": torch.ones(rows, 7), "mask": mask, "position_mask": middle, "verifier_span_mask": middle,
                 "eos_mask": torch.zeros(rows, 7, dtype=torch.bool), "entropy_window": 1, "entropy_quantile": 0.0}
    arguments["entropies"][:, 0] = 0.0  # the only entropy vote
    return token_roles(rule=rule, seeds=seeds, **arguments | changes)


@pytest.mark.parametrize(("rule", "places"), [("random_span", 5), ("random_tokens", 15)])
def test_random_roles_by_count(rule, places):
    """Two of six tokens: five runs of two, fifteen pairs, each about as often; the token of mask 0 is stepped over."""
    assert drawn("majority", range(1)).sum() == 2
    answer = drawn(rule, range(3000))
    assert (answer.sum(1) == 2).all() and not answer[:, 3].any()
    kinds, counts = answer.int().unique(dim=0, return_counts=True)
    assert len(kinds) == places
    assert (counts / 3000 - 1 / places).abs().max() < 4 * (1 / places / 3000) ** 0.5  # four standard deviations
    if rule == "random_span":
        order = [0, 1, 2, 4, 5, 6]
        runs = {tuple(int(at in (start, start + 1)) for at in range(6)) for start in range(5)}
        assert {tuple(kind[order].tolist()) for kind in kinds} == runs


@pytest.mark.parametrize("rule", ["random_span", "random_tokens"])
def test_random_roles_depend_on_seed_and_response_alone(rule):
    rng = random.Random(1)
    for _ in range(20):
        arguments, seeds = batch(rng), [rng.randrange(10**9) for _ in range(4)]
        answer = token_roles(rule=rule, seeds=seeds, **arguments)
        majority = token_roles(**arguments)
        assert torch.equal(answer.sum(1), majority.sum(1)) and not (answer & ~arguments["mask"]).any()
        order = [2, 0, 3, 1]
        again = token_roles(rule=rule, seeds=[seeds[i] for i in order], **{k: v[torch.tensor(order)] for k, v in arguments.items()})
        assert torch.equal(again, answer[torch.tensor(order)])
        wider = {k: torch.nn.functional.pad(v, (3, 7)) for k, v in arguments.items()}
        assert torch.equal(token_roles(rule=rule, seeds=seeds, **wider)[:, 3:-7], answer)


def test_other_seeds_draw_other_tokens():
    assert len(drawn("random_tokens", [1, 2, 3, 4]).int().unique(dim=0)) > 1


def test_seeds_of_responses():
    seeds = {response_seed(run, prompt, sample) for run in (0, 1) for prompt in ("a/1", "a/11", "é") for sample in (0, 1)}
    assert len(seeds) == 12
    assert response_seed(0, "tiny/3", 5) == 2805246807527755653  # a resumed run on another machine draws the same


@pytest.mark.parametrize("rule", ["random_span", "random_tokens"])
def test_random_roles_without_answers_or_tokens(rule):
    assert roles([1.0, 2.0], [1, 1], [1, 1], mask=[0, 0], rule=rule, seeds=[3]) == [0, 0]
    assert roles([0.0, 2.0], [0, 0], [0, 1], rule=rule, seeds=[3], entropy_window=1) == [0, 0]
    assert roles([1.0, 1.0], [1, 1], [1, 1], rule=rule, seeds=[3]) == [1, 1]
    for seeds in (None, [1, 2]):
        with pytest.raises(ValueError, match="seeds"):
            roles([1.0], [1], [1], rule=rule, seeds=seeds)
