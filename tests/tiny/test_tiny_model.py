"""Tokenizer and shipped checkpoint of the tiny model."""
from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2ForCausalLM

from akl_dist.tiny import MODEL_DIR
from akl_dist.tiny.make_model import (
    IGNORED,
    MAX_NEW_TOKENS,
    PHASES,
    Phase,
    accuracy,
    build_model,
    is_correct,
    prompt_text,
    train,
    training_batch,
)
from akl_dist.tiny.task import Noise, make_problem, problems, worked_solution
from akl_dist.tiny.tokenizer import TASK_TOKENS, TOKENS, build_tokenizer

RESPONSE = r"<think>7+3=10;10+6=16;16+2=18</think>\boxed{18.0}<eos>"
PROMPT = "<user>7+3+6+2=<assistant>"


@pytest.fixture(scope="module", params=["built", "auto", "fast"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    if request.param == "built":
        return build_tokenizer()
    return (AutoTokenizer if request.param == "auto" else PreTrainedTokenizerFast).from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR).eval()


def test_round_trip_and_offsets(tokenizer: PreTrainedTokenizerFast) -> None:
    text = PROMPT + RESPONSE
    encoded = tokenizer(text, return_offsets_mapping=True)
    assert tokenizer.decode(encoded["input_ids"]) == text
    assert tokenizer.decode(encoded["input_ids"], skip_special_tokens=True) == "7+3+6+2=" + RESPONSE[: -len("<eos>")]
    tokens = tokenizer.convert_ids_to_tokens(encoded["input_ids"])
    assert [text[start:end] for start, end in encoded["offset_mapping"]] == tokens
    assert tokens[9:11] == ["<assistant>", "<think>"] and tokens[-8:-6] == ["\\boxed", "{"]


def test_ids_are_the_order_of_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.get_vocab() == {token: index for index, token in enumerate(TOKENS)}
    assert (tokenizer.pad_token, tokenizer.eos_token, len(tokenizer)) == ("<pad>", "<eos>", 263)


def test_decoding_token_by_token_adds_nothing(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer.encode(RESPONSE)
    assert "".join(tokenizer.decode([token_id]) for token_id in ids) == RESPONSE


def test_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    problem = make_problem((7, 3, 6, 2))
    user = {"role": "user", "content": problem.text}
    rendered = tokenizer.apply_chat_template([user], add_generation_prompt=True, tokenize=False)
    assert rendered == PROMPT == prompt_text(problem)
    answer = {"role": "assistant", "content": RESPONSE[: -len("<eos>")]}
    assert tokenizer.apply_chat_template([user, answer], tokenize=False) == PROMPT + RESPONSE
    ids = tokenizer.apply_chat_template([user], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids == tokenizer.encode(PROMPT)
    with pytest.raises(Exception, match="got system"):
        tokenizer.apply_chat_template([{"role": "system", "content": "1"}], tokenize=False)


def test_text_outside_the_task_is_kept(tokenizer: PreTrainedTokenizerFast) -> None:
    """No byte is dropped: a byte-level BPE that lacks one loses it without a word."""
    text = "What is 7 + 3?\n\t'é→日' \\boxed{1} <answer>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.encode()) - len("\\boxed") + 1
    every_byte = "".join(map(chr, range(128)))
    assert tokenizer.decode(tokenizer.encode(every_byte)) == every_byte


def test_task_text_uses_the_first_ids_and_fits() -> None:
    tokenizer, rng = build_tokenizer(), random.Random(0)
    noise = Noise(step=0.3, copy=0.3, direct=0.2, right_to_left=0.4, decimal=0.3)
    texts = [prompt_text(make_problem((12,) * 4))]
    texts += [worked_solution((12, 12, 12, 12), rng, noise) + "<eos>" for _ in range(500)]
    encoded = [tokenizer.encode(text) for text in texts]
    assert max(map(max, encoded)) < len(TASK_TOKENS) == 23
    assert 33 <= max(map(len, encoded)) <= MAX_NEW_TOKENS


def test_shipped_files_match_the_config() -> None:
    files = {path.name: path.stat().st_size for path in MODEL_DIR.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "recipe.json"} <= set(files)
    assert not [name for name in files if Path(name).suffix in {".bin", ".pt", ".pth", ".pkl"}]
    assert sum(files.values()) < 4_000_000
    config = json.loads((MODEL_DIR / "config.json").read_text())
    generation = json.loads((MODEL_DIR / "generation_config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"] and not config["tie_word_embeddings"]
    for name, token in (("pad_token_id", "<pad>"), ("eos_token_id", "<eos>"), ("bos_token_id", "<user>")):
        assert config[name] == generation[name] == TOKENS.index(token)
    with safe_open(MODEL_DIR / "model.safetensors", "pt") as weights:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert weights.get_slice(name).get_shape() == [len(TOKENS), 128] == [config["vocab_size"], 128]
            assert weights.get_slice(name).get_dtype() == "F32"
        names = list(weights.keys())
        assert names and all(weights.get_tensor(name).isfinite().all() for name in names)


def test_shipped_model_has_the_architecture_of_the_script(model: Qwen2ForCausalLM) -> None:
    fresh = build_model(build_tokenizer(), seed=0)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    assert shapes == {name: value.shape for name, value in fresh.state_dict().items()}
    recipe = json.loads((MODEL_DIR / "recipe.json").read_text())
    assert recipe["parameters"] == sum(value.numel() for value in model.parameters())
    assert [phase["steps"] for phase in recipe["phases"]] == [phase.steps for phase in PHASES]
    assert [Noise(**phase["noise"]) for phase in recipe["phases"]] == [phase.noise for phase in PHASES]


def test_shipped_model_leaves_room_to_learn(model: Qwen2ForCausalLM) -> None:
    """Between 30 % and 70 % sampled, far higher greedy, and near what the recipe file says; untrained it is zero."""
    torch.manual_seed(0)
    tokenizer, held_out = build_tokenizer(), problems("heldout", 128, seed=5)
    sampled = accuracy(model, tokenizer, held_out, samples=4)["accuracy"]
    greedy = accuracy(model, tokenizer, held_out, samples=0)["accuracy"]
    recorded = json.loads((MODEL_DIR / "recipe.json").read_text())["measured"]
    assert 0.3 < sampled < 0.7 and greedy > sampled + 0.2
    assert abs(sampled - recorded["sampled"]["accuracy"]) < 0.12
    assert accuracy(build_model(tokenizer, 0), tokenizer, held_out[:16], samples=1)["accuracy"] == 0


def test_is_correct() -> None:
    assert is_correct(RESPONSE, "18") and is_correct(r"<think></think>\boxed{18}<eos><pad><pad>", "18")
    assert not is_correct(r"<think></think>\boxed{18}", "18")  # not finished
    assert not is_correct(r"<think></think>\boxed{19}<eos>", "18")
    assert not is_correct(r"<think>\boxed{18}<eos>", "18")  # boxed inside the reasoning


def test_loss_covers_exactly_the_response() -> None:
    tokenizer = build_tokenizer()
    ids_BT, labels_BT = training_batch(tokenizer, random.Random(0), Noise(), 16)
    for ids, labels in zip(ids_BT, labels_BT, strict=True):
        text = tokenizer.decode(ids[labels != IGNORED])
        assert text.startswith("<think>") and text.endswith("}<eos>")
        assert torch.equal(ids[labels != IGNORED], labels[labels != IGNORED])


def test_training_is_deterministic_and_learns(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = build_tokenizer()
    phase = Phase(steps=3, start_lr=1e-3, peak_lr=1e-3, end_lr=1e-3, warmup_fraction=0.0, noise=Noise())
    weights = []
    for seed in (0, 0, 1):
        model = build_model(tokenizer, seed)
        train(model, tokenizer, (phase,), seed, batch_size=16)
        weights.append(model.lm_head.weight.detach().clone())
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    first, last = (float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()[:2])
    assert last < first


def test_learning_rate_schedule_by_hand() -> None:
    phase = Phase(steps=10, start_lr=0.0, peak_lr=1.0, end_lr=0.0, warmup_fraction=0.2, noise=Noise())
    assert [phase.lr(step) for step in (0, 1, 2, 6)] == pytest.approx([0.0, 0.5, 1.0, 0.5])
