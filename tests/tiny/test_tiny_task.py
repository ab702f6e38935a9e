"""The generated sums: split, determinism, worked solutions. The arithmetic below can be redone by hand."""
from __future__ import annotations

import itertools
import random
import re

import pytest

from akl_dist.tiny.task import HELDOUT_PERCENT, Noise, make_problem, num_problems, problems, split_of, worked_solution

PINNED = {
    (1, 1, 1): "train",
    (1, 2, 3): "train",
    (7, 3, 6, 2): "heldout",
    (12, 12, 12, 12): "train",
    (5, 5, 5): "train",
    (4, 9, 2): "train",
    (2, 3, 5): "heldout",
    (8, 1, 1): "train",
    (3, 3, 3): "heldout",
}
SHAPE = re.compile(r"<think>(\d+\+\d+=\d+(;\d+\+\d+=\d+)*)?</think>\\boxed\{\d+(\.0)?\}")


def _operands_of(text: str) -> tuple[int, ...]:
    return tuple(sorted(int(value) for value in text.rstrip("=").split("+")))


def _boxed(text: str) -> float:
    return float(text.rsplit("{", 1)[1].rstrip("}"))


def test_problem_fields() -> None:
    problem = make_problem((7, 3, 6, 2))
    assert (problem.text, problem.answer, problem.id) == ("7+3+6+2=", "18", "sum:7+3+6+2")


def test_split_is_disjoint_up_to_reordering() -> None:
    train, heldout = problems("train", 4000, seed=0), problems("heldout", 2000, seed=0)
    assert not {_operands_of(p.text) for p in train} & {_operands_of(p.text) for p in heldout}
    assert len({p.id for p in train + heldout}) == 6000
    assert all(3 <= len(p.operands) <= 4 and set(p.operands) <= set(range(1, 13)) for p in train + heldout)


def test_split_by_the_ordered_tuple_would_leak() -> None:
    """Negative control: hashing the tuple as it comes puts reorderings of held-out sums into training."""
    leaky = {tuple(sorted(t)) for t in itertools.product(range(1, 13), repeat=3) if hash(t) % 5 == 0}
    rest = {tuple(sorted(t)) for t in itertools.product(range(1, 13), repeat=3) if hash(t) % 5 != 0}
    assert leaky & rest
    for operands in itertools.product(range(1, 13), repeat=3):
        assert split_of(operands) == split_of(tuple(sorted(operands)))


def test_split_share_and_pinned_values() -> None:
    """The share of held-out orderings is near the nominal one, and the hash does not depend on the process."""
    sides = [split_of(t) for n in (3, 4) for t in itertools.combinations_with_replacement(range(1, 13), n)]
    assert len(sides) == 364 + 1365
    assert abs(sides.count("heldout") / len(sides) - HELDOUT_PERCENT / 100) < 0.03
    assert [split_of(t) for t in PINNED] == list(PINNED.values())


def test_problems_are_deterministic_and_prefix_stable() -> None:
    assert problems("train", 50, seed=3) == problems("train", 50, seed=3)
    assert problems("train", 200, seed=3)[:50] == problems("train", 50, seed=3)
    assert problems("train", 50, seed=3) != problems("train", 50, seed=4)
    assert problems("train", 0, seed=0) == []


def test_problems_rejects_what_it_cannot_serve() -> None:
    with pytest.raises(ValueError, match="got split 'test'"):
        problems("test", 1, seed=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got count -1"):
        problems("train", -1, seed=0)
    with pytest.raises(ValueError, match="distinct problems"):
        problems("train", 28, seed=0, operand_counts=(3,), largest=3)  # 3^3 = 27 orderings in both splits together


def test_noise_free_solutions_by_hand() -> None:
    rng = random.Random(0)
    left = r"<think>7+3=10;10+6=16;16+2=18</think>\boxed{18}"
    right = r"<think>6+2=8;3+8=11;7+11=18</think>\boxed{18}"
    assert worked_solution((7, 3, 6, 2), rng) == left
    assert worked_solution((7, 3, 6, 2), rng, Noise(right_to_left=1.0)) == right
    assert worked_solution((7, 3, 6, 2), rng, Noise(direct=1.0)) == r"<think></think>\boxed{18}"
    assert worked_solution((7, 3, 6, 2), rng, Noise(decimal=1.0)).endswith(r"\boxed{18.0}")


@pytest.mark.parametrize("noise", [Noise(), Noise(right_to_left=0.5, direct=0.3, decimal=0.5)])
def test_solutions_without_errors_are_right(noise: Noise) -> None:
    rng = random.Random(1)
    for problem in problems("train", 300, seed=1):
        text = worked_solution(problem.operands, rng, noise)
        assert SHAPE.fullmatch(text)
        for step in re.findall(r"(\d+)\+(\d+)=(\d+)", text):
            assert int(step[0]) + int(step[1]) == int(step[2])
        assert _boxed(text) == int(problem.answer)


def test_noise_has_its_nominal_rates() -> None:
    rng = random.Random(2)
    texts = [worked_solution((5, 6, 7), rng, Noise(step=0.2, direct=0.25, right_to_left=0.4)) for _ in range(4000)]
    worked = [text for text in texts if "<think></think>" not in text]
    steps = [tuple(map(int, s)) for t in worked for s in re.findall(r"(\d+)\+(\d+)=(\d+)", t)]
    wrong = [c - a - b for a, b, c in steps if a + b != c]
    assert abs(len(worked) / len(texts) - 0.75) < 0.03
    assert abs(len(wrong) / len(steps) - 0.2) < 0.03
    assert set(wrong) == {-10, -1, 1, 10}
    assert abs(sum("6+7=" in t for t in worked) / len(worked) - 0.4) < 0.04


def test_noise_never_leaves_the_vocabulary() -> None:
    rng = random.Random(3)
    noise = Noise(step=1.0, copy=1.0, right_to_left=0.5)
    assert all(SHAPE.fullmatch(worked_solution((1, 1, 1), rng, noise)) for _ in range(500))


def test_worked_solution_is_deterministic() -> None:
    noise = Noise(step=0.2, copy=0.1, direct=0.2, right_to_left=0.4, decimal=0.1)
    first = [worked_solution((9, 8, 7, 6), random.Random(seed), noise) for seed in range(40)]
    assert first == [worked_solution((9, 8, 7, 6), random.Random(seed), noise) for seed in range(40)]
    assert len(set(first)) > 5


def test_noise_shares_are_checked() -> None:
    with pytest.raises(ValueError, match=r"Noise\.step: got 1\.5"):
        Noise(step=1.5)


def test_every_problem_of_the_split_and_not_one_more() -> None:
    """12^3 + 12^4 = 22,464 orderings in all."""
    held_out, train = num_problems("heldout"), num_problems("train")
    assert (held_out, held_out + train) == (4432, 22_464)
    assert len(problems("heldout", 4432, seed=0)) == 4432
    for count in (4433, 10**9):
        with pytest.raises(ValueError, match=rf"got count {count}; expected at most 4432 distinct problems"):
            problems("heldout", count, seed=0)


def test_a_split_without_problems_is_refused_at_once() -> None:
    """One operand tuple, (1, 1, 1), falls on one side: the other has nothing to draw."""
    other = "train" if split_of((1, 1, 1)) == "heldout" else "heldout"
    with pytest.raises(ValueError, match="at most 0"):
        problems(other, 1, seed=0, operand_counts=(3,), largest=1)
