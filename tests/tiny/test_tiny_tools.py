"""Products by tool: splits, worked conversations, the loss on the model's turns alone, and the shipped model that calls Python."""
from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2ForCausalLM

from akl_dist.config import models
from akl_dist.tiny import MODEL_DIR, TOOL_MODEL_DIR
from akl_dist.tiny.make_model import (
    IGNORED,
    TOOL_PHASES,
    accuracy,
    build_model,
    conversations,
    example,
    prompt_text,
    right_products,
    training_batch,
)
from akl_dist.tiny.tokenizer import MAX_LENGTH, build_tokenizer
from akl_dist.tiny.tool_task import (
    LARGEST,
    SMALLEST,
    ToolNoise,
    final_answer,
    make_product,
    num_products,
    products,
    shown,
    tool_reply,
    worked_conversation,
)

PINNED = ["71*46=", "74*81=", "13*80="]
CALL = "```python\nprint(37*84)\n```"
EVERYTHING = ToolNoise(direct=0.2, void=0.1, copy=0.2, syntax=0.3, retry=0.5, misread=0.2)


def pair(text: str) -> tuple[int, ...]:
    return tuple(sorted(int(part) for part in text.rstrip("=").split("*")))


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(TOOL_MODEL_DIR).eval()


def test_a_product_by_hand() -> None:
    problem = make_product(37, 84)
    assert (problem.id, problem.text, problem.answer) == ("product:37*84", "37*84=", "3108")


def test_split_is_disjoint_up_to_the_order_of_the_operands() -> None:
    """90 * 90 products in all, about a fifth held out; both orders of two operands on one side."""
    train, heldout = (products(side, num_products(side), seed=0) for side in ("train", "heldout"))
    assert len(train) + len(heldout) == len({p.text for p in train + heldout}) == 90 * 90
    assert 0.17 < len(heldout) / 8100 < 0.23
    assert not {pair(p.text) for p in train} & {pair(p.text) for p in heldout}
    assert {value for p in train + heldout for value in p.operands} == set(range(SMALLEST, LARGEST + 1))
    written = {p.text: p.text[0] in "13" for p in train}  # negative control: a split by the text as written leaks
    assert {pair(t) for t, side in written.items() if side} & {pair(t) for t, side in written.items() if not side}


def test_products_are_deterministic_exhaustible_and_prefix_stable() -> None:
    assert products("train", 50, seed=3) == products("train", 200, seed=3)[:50] != products("train", 50, seed=4)
    assert products("heldout", 0, seed=0) == []
    assert [p.text for p in products("heldout", 3, seed=0)] == PINNED
    for call in (lambda: products("heldout", num_products("heldout") + 1, 0), lambda: products("train", -1, 0),
                 lambda: products("test", 1, 0)):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="tiny products"):
            call()


def test_a_worked_conversation_by_hand() -> None:
    rng = random.Random(0)
    assert worked_conversation((37, 84), rng) == (CALL, "3108", r"\boxed{3108}")
    assert worked_conversation((37, 84), rng, ToolNoise(void=1.0)) == ("print(37*84)",)
    bad, error, *rest = worked_conversation((37, 84), rng, ToolNoise(syntax=1.0))
    assert bad == CALL.replace(")", "") and not error.isdigit() and rest == [CALL, "3108", r"\boxed{3108}"]
    assert len(worked_conversation((37, 84), rng, ToolNoise(syntax=1.0, retry=0.0))) == 3
    (guess,) = worked_conversation((37, 84), rng, ToolNoise(direct=1.0))
    assert re.fullmatch(r"\\boxed\{31\d\d\}", guess)
    with pytest.raises(ValueError, match=r"ToolNoise\.copy: got -0\.1"):
        ToolNoise(copy=-0.1)


def test_without_noise_every_conversation_is_right_when_its_program_is_run() -> None:
    """The program is multiplied out here, not by the module."""
    rng = random.Random(1)
    for problem in products("train", 300, seed=1):
        call, output, answer = worked_conversation(problem.operands, rng)
        left, right = re.fullmatch(r"```python\nprint\((\d+)\*(\d+)\)\n```", call).groups()  # type: ignore[union-attr]
        assert (int(left), int(right)) == problem.operands
        assert output == str(int(left) * int(right)) == problem.answer == final_answer((call, output, answer))


def test_noise_has_its_nominal_rates() -> None:
    rng = random.Random(2)
    drawn = [worked_conversation((37, 84), rng, ToolNoise(direct=0.2, void=0.1, copy=0.25, syntax=0.2, misread=0.3))
             for _ in range(4000)]
    called = [turns for turns in drawn if len(turns) > 1]
    alone = [turns[0] for turns in drawn if len(turns) == 1]
    assert abs(sum("boxed" in turn for turn in alone) / 4000 - 0.2) < 0.03
    assert abs(sum("boxed" not in turn for turn in alone) / 4000 - 0.1) < 0.02
    assert abs(sum(len(turns) == 5 for turns in called) / len(called) - 0.2) < 0.03
    assert abs(sum(turns[-3] == CALL for turns in called) / len(called) - 0.75**2) < 0.04
    assert abs(sum(final_answer(turns) != turns[-2] for turns in called) / len(called) - 0.3) < 0.03


@pytest.mark.parametrize(
    ("turn", "reply"),
    [(CALL, "3108"), ("```python\nprint(9*100)\n```", "900"), (CALL.replace(")", ""), "Syntax\n...\nne 1)"),
     ("print(37*84)", None), (r"\boxed{3108}", None), ("```python\nprint(37*84)", None)],
)
def test_the_stand_in_of_the_tool(turn: str, reply: str | None) -> None:
    assert tool_reply(turn) == reply


def test_the_engines_tool_reads_the_same_calls() -> None:
    from akl_dist.rollout.tool_calls import is_void, parse_call

    call = parse_call(CALL, style="fenced")
    assert call is not None and call.code.rstrip("\n") == "print(37*84)" and not call.mistake
    assert parse_call("print(37*84)", style="fenced") is None and is_void("print(37*84)", style="fenced")
    assert not is_void(r"\boxed{3108}", style="fenced")


def test_a_long_message_loses_its_middle() -> None:
    """As the engine's template cuts it: 16 tokens, one a byte, of which the mark takes 5."""
    from akl_dist.rollout.observations import ObservationTemplate

    assert (shown("0123456789abcdef"), shown("0123456789abcdefg")) == ("0123456789abcdef", "012345\n...\ncdefg")
    tokenizer, template = build_tokenizer(), ObservationTemplate(str(MODEL_DIR), role="user", max_tokens=16)
    for message in ("3108", "0123456789abcdefg", "SyntaxError: '(' was never closed (main.py, line 1)"):
        assert tokenizer.decode(template.ids(message)) == f"<user>{shown(message)}<assistant>"


def test_the_final_answer_is_in_the_models_last_turn() -> None:
    assert final_answer((CALL, "3108", r"\boxed{3108}")) == "3108"
    assert final_answer((CALL, "3108")) is None
    assert final_answer((CALL, "3108", r"so \boxed{3108}")) is None


def test_the_rendered_conversation_is_the_chat_templates() -> None:
    tokenizer = build_tokenizer()
    pieces = [prompt_text(make_product(37, 84)), CALL + "<eos>", "<user>3108<assistant>", r"\boxed{3108}<eos>"]
    messages = [{"role": "user", "content": "37*84="}, {"role": "assistant", "content": CALL},
                {"role": "user", "content": "3108"}, {"role": "assistant", "content": r"\boxed{3108}"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "".join(pieces)
    ids = [token for piece in pieces for token in tokenizer.encode(piece)]
    assert ids == tokenizer.encode("".join(pieces)) and tokenizer.decode(ids) == "".join(pieces)


def test_the_loss_covers_the_models_turns_alone() -> None:
    tokenizer = build_tokenizer()
    ids_BT, labels_BT = training_batch(tokenizer, random.Random(0), EVERYTHING, 32)
    rng = random.Random(0)
    for ids, labels in zip(ids_BT, labels_BT, strict=True):
        pieces = example(rng, EVERYTHING)
        assert tokenizer.decode(ids).replace("<pad>", "") == "".join(pieces)
        assert tokenizer.decode(ids[labels != IGNORED]) == "".join(pieces[1::2])
        assert torch.equal(ids[labels != IGNORED], labels[labels != IGNORED])


def test_conversations_fit_the_model_and_the_experiment() -> None:
    from akl_dist.config.compose import compose

    tokenizer, rng, config = build_tokenizer(), random.Random(3), compose(["+exp=tiny_tir"])
    lengths = [[len(tokenizer.encode(piece)) for piece in example(rng, EVERYTHING)] for _ in range(2000)]
    assert max(row[0] for row in lengths) <= config.data.max_prompt_tokens
    assert max(sum(row[1:]) for row in lengths) <= config.rollout.max_response_tokens
    assert config.data.max_prompt_tokens + config.rollout.max_response_tokens <= MAX_LENGTH
    assert config.rollout.tools.max_turns == 2 and config.rollout.tools.role == "user"


def test_shipped_files_match_the_script() -> None:
    files = {path.name: path.stat().st_size for path in TOOL_MODEL_DIR.iterdir()}
    assert set(files) == {path.name for path in MODEL_DIR.iterdir()}
    assert not [name for name in files if Path(name).suffix in {".bin", ".pt", ".pth", ".pkl"}]
    assert sum(files.values()) < 4_000_000
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "tokenizer_config.json"):
        assert (TOOL_MODEL_DIR / name).read_bytes() == (MODEL_DIR / name).read_bytes()
    recipe = json.loads((TOOL_MODEL_DIR / "recipe.json").read_text())
    assert [phase["steps"] for phase in recipe["phases"]] == [phase.steps for phase in TOOL_PHASES]
    assert [ToolNoise(**phase["noise"]) for phase in recipe["phases"]] == [phase.noise for phase in TOOL_PHASES]
    fresh = build_model(build_tokenizer(), seed=0).state_dict()
    with safe_open(TOOL_MODEL_DIR / "model.safetensors", "pt") as weights:
        shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118 - not a mapping
        assert shapes == {name: list(value.shape) for name, value in fresh.items()}
        assert all(weights.get_tensor(name).isfinite().all() for name in shapes)


def test_the_name_tiny_tir_means_the_shipped_folder() -> None:
    assert models.resolve("tiny_tir") == str(TOOL_MODEL_DIR) and models.looks_local("tiny_tir")
    assert models.sizes("tiny_tir") == models.sizes("tiny")


def test_where_the_shipped_model_starts(model: Qwen2ForCausalLM) -> None:
    """Between 35 % and 60 % sampled, far higher greedy; every product that it gets right beyond a guess's luck took a call."""
    torch.manual_seed(0)
    tokenizer, heldout = PreTrainedTokenizerFast.from_pretrained(TOOL_MODEL_DIR), products("heldout", 96, seed=5)
    measured = accuracy(model, tokenizer, heldout, samples=4, right=right_products)["accuracy"]
    recorded = json.loads((TOOL_MODEL_DIR / "recipe.json").read_text())["measured"]
    assert 0.35 < measured < 0.6 and abs(measured - recorded["sampled"]["accuracy"]) < 0.12
    assert recorded["greedy"]["accuracy"] > recorded["sampled"]["accuracy"] + 0.2
    said = conversations(model, tokenizer, heldout * 2, sample=True)
    alone = [final_answer(turns) == problem.answer for turns, problem in zip(said, heldout * 2, strict=True) if len(turns) == 1]
    assert 0.1 < len(alone) / len(said) < 0.5 and sum(alone) / len(alone) < 0.2
