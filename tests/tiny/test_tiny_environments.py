"""Blanks (several right answers) and pairs (the new task of continual learning): splits, golds, and what the model can do."""
from __future__ import annotations

import zlib

import pytest
import torch

from akl_dist.contract.golds import alternatives
from akl_dist.contract.records import Status
from akl_dist.tiny.environments import PAIR_LARGEST, blanks, make_blank, num_blanks, num_pairs, pairs
from akl_dist.tiny.task import problems
from akl_dist.verify.math import judge


def known(text: str) -> tuple[int, ...]:
    return tuple(sorted(int(part) for part in text.rstrip("=").split("+") if part != "{}"))


def test_a_blank_by_hand() -> None:
    """7 + ? + 6 with a blank of 1 to 12: every sum from 14 to 25."""
    problem = make_blank((7, 6), 1)
    assert (problem.id, problem.text) == ("blank:7+{}+6", "7+{}+6=")
    assert alternatives(problem.answer) == tuple(str(value) for value in range(14, 26))
    assert [make_blank((7, 6), place).text for place in (0, 2)] == ["{}+7+6=", "7+6+{}="]
    with pytest.raises(ValueError, match="position 3"):
        make_blank((7, 6), 3)


@pytest.mark.parametrize(
    ("response", "status"),
    [
        ("<think>7+1=8;8+6=14</think>\\boxed{14}", Status.OK),
        ("<think>7+12=19;19+6=25</think>\\boxed{25.0}", Status.OK),
        ("<think></think>\\boxed{13}", Status.WRONG),
        ("<think></think>\\boxed{26}", Status.WRONG),
        ("<think></think>", Status.NO_ANSWER),
    ],
)
def test_any_right_answer_is_accepted(response: str, status: Status) -> None:
    assert judge(gold=make_blank((7, 6), 1).answer, response_text=response, truncated=False).status is status


def test_blanks_are_split_by_their_known_operands() -> None:
    train, heldout = blanks("train", 3000, seed=0), blanks("heldout", 1000, seed=0)
    assert not {known(p.text) for p in train} & {known(p.text) for p in heldout}
    assert len({p.id for p in train + heldout}) == 4000
    assert {p.text.count("{}") for p in train} == {1} and {len(p.operands) for p in train} == {2, 3}
    assert blanks("train", 50, seed=0) == train[:50] and blanks("train", 50, seed=1) != train[:50]


def test_a_split_by_the_written_text_would_leak() -> None:
    """Negative control: with the place of the blank in the key, one sum's blanks would fall on both sides."""
    def bucket(text: str) -> bool:
        return zlib.crc32(text.encode()) % 5 == 0

    written = [make_blank(pair, place).text for pair in ((a, b) for a in range(1, 13) for b in range(1, 13)) for place in range(3)]
    assert {known(t) for t in written if bucket(t)} & {known(t) for t in written if not bucket(t)}


def test_numbers_of_problems() -> None:
    """12^2 * 3 + 12^3 * 4 blanks and 20^2 pairs in all."""
    assert num_blanks("train") + num_blanks("heldout") == 144 * 3 + 1728 * 4
    assert num_pairs("train") + num_pairs("heldout") == PAIR_LARGEST**2
    everything = blanks("heldout", num_blanks("heldout"), seed=0)
    assert len({p.text for p in everything}) == num_blanks("heldout")
    for call in (lambda: blanks("heldout", num_blanks("heldout") + 1, seed=0), lambda: blanks("test", 1, seed=0),  # type: ignore[arg-type]
                 lambda: blanks("train", -1, seed=0)):
        with pytest.raises(ValueError, match="tiny blanks"):
            call()


def test_pairs_are_another_task_than_the_old_one() -> None:
    train, heldout = pairs("train", num_pairs("train"), seed=0), pairs("heldout", num_pairs("heldout"), seed=0)
    assert not {known(p.text) for p in train} & {known(p.text) for p in heldout}
    assert {len(p.operands) for p in train} == {2} and max(max(p.operands) for p in train) == PAIR_LARGEST
    assert not {p.text for p in train} & {p.text for p in problems("train", 1000, seed=0)}
    assert all(p.answer == str(sum(p.operands)) for p in train)


def test_where_the_shipped_model_starts() -> None:
    """About .8 on blanks with several different right answers a prompt, about .05 on pairs: neither is solved nor hopeless."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    from akl_dist.tiny import MODEL_DIR
    from akl_dist.tiny.make_model import generate, prompt_text

    torch.manual_seed(0)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL_DIR)
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR).eval()

    def right(rows: list) -> list[tuple[str, str]]:
        repeated = [problem for problem in rows for _ in range(8)]
        ids = generate(model, tokenizer, [prompt_text(problem) for problem in repeated], sample=True)
        found = []
        for problem, text in zip(repeated, tokenizer.batch_decode(ids), strict=True):
            response, ended, _ = text.partition("<eos>")
            verdict = judge(gold=problem.answer, response_text=response, truncated=not ended)
            if verdict.correct:
                found.append((problem.id, str(verdict.extracted)))
        return found

    on_blanks, on_pairs = right(blanks("heldout", 24, seed=0)), right(pairs("heldout", 60, seed=0))
    assert 0.6 < len(on_blanks) / (24 * 8) < 0.95
    assert len({(one, answer.removesuffix(".0")) for one, answer in on_blanks}) / 24 > 2.5
    assert 0.005 < len(on_pairs) / (60 * 8) < 0.25
