"""Train a tiny model from nothing: `python -m akl_dist.tiny.make_model OUT [--task sums|products] [--seed 0]`.

Phase 1 teaches the skill almost fully; phase 2 sets the starting accuracy by noise in the training solutions, so that
reinforcement learning finds the right behaviour already present and only has to select it. Takes some minutes on one
CPU thread and writes the checkpoint (safetensors, float32), the tokenizer and `recipe.json` with measured accuracies.
"""
from __future__ import annotations

import argparse
import json
import math
import platform
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from akl_dist.tiny.task import Noise, Problem, Split, draw_operands, make_problem, problems, worked_solution
from akl_dist.tiny.tokenizer import ASSISTANT, EOS, EOS_ID, MAX_LENGTH, PAD_ID, USER, USER_ID, build_tokenizer
from akl_dist.tiny.tool_task import (
    MAX_OBSERVATIONS,
    ToolNoise,
    draw_product,
    final_answer,
    make_product,
    products,
    tool_reply,
    worked_conversation,
)

MAX_NEW_TOKENS = 48
IGNORED = -100  # torch's cross_entropy default for positions that carry no loss
_ANSWER = re.compile(r"</think>\\boxed\{(\d+(?:\.\d+)?)\}<eos>")


@dataclass(frozen=True)
class Phase:
    """A stretch of supervised training. Learning rates are AdamW's; from `start_lr` over `peak_lr` to `end_lr`."""

    steps: int
    start_lr: float
    peak_lr: float
    end_lr: float
    warmup_fraction: float
    noise: Noise | ToolNoise

    def lr(self, step: int) -> float:
        """Linear rise to the peak, then half a cosine down."""
        warmup = self.warmup_fraction * self.steps
        if step < warmup:
            return self.start_lr + (self.peak_lr - self.start_lr) * step / warmup
        progress = (step - warmup) / max(1.0, self.steps - warmup)
        return self.end_lr + (self.peak_lr - self.end_lr) * 0.5 * (1 + math.cos(math.pi * progress))


SKILL = Phase(
    steps=800, start_lr=3e-4, peak_lr=3e-3, end_lr=3e-4, warmup_fraction=0.1,
    noise=Noise(step=0.10, copy=0.02, direct=0.10, right_to_left=0.4, decimal=0.02),
)
START = Phase(
    steps=40, start_lr=4e-4, peak_lr=4e-4, end_lr=0.0, warmup_fraction=0.0,
    noise=Noise(step=0.18, copy=0.02, direct=0.25, right_to_left=0.4, decimal=0.02),
)
PHASES = (SKILL, START)
TOOL_SKILL = Phase(
    steps=500, start_lr=3e-4, peak_lr=3e-3, end_lr=3e-4, warmup_fraction=0.1,
    noise=ToolNoise(direct=0.10, void=0.02, copy=0.01, misread=0.03),  # no syntax errors: with them rows are twice as long
)
TOOL_START = Phase(
    steps=60, start_lr=6e-4, peak_lr=6e-4, end_lr=0.0, warmup_fraction=0.0,
    noise=ToolNoise(direct=0.22, void=0.06, copy=0.06, syntax=0.12, retry=0.4, misread=0.12),
)
TOOL_PHASES = (TOOL_SKILL, TOOL_START)
BATCH_SIZE = 128


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """A freshly initialised float32 Qwen2 with untied embeddings, about 0.6M parameters."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=False,
        # Every prompt begins with the user marker, so it plays the part of a begin-of-sequence token.
        bos_token_id=USER_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config).float()
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_p=1.0, max_new_tokens=MAX_NEW_TOKENS,
        bos_token_id=USER_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID,
    )
    return model


def prompt_text(problem: Problem) -> str:
    """The rendered prompt, equal to the chat template's output for one user message (a test holds this)."""
    return f"{USER}{problem.text}{ASSISTANT}"


def example(rng: random.Random, noise: Noise | ToolNoise) -> list[str]:
    """One rendered training conversation, cut where the speaker changes: what the model reads, what it writes, and so on."""
    if isinstance(noise, ToolNoise):
        operands = draw_product(rng, "train")
        turns = worked_conversation(operands, rng, noise)
        written = [turn + EOS if index % 2 == 0 else USER + turn + ASSISTANT for index, turn in enumerate(turns)]
        return [prompt_text(make_product(*operands)), *written]
    problem = make_problem(draw_operands(rng, "train"))
    return [prompt_text(problem), worked_solution(problem.operands, rng, noise) + EOS]


def training_batch(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, noise: Noise | ToolNoise, size: int
) -> tuple[Tensor, Tensor]:
    """Right-padded `ids_BT` and `labels_BT` (IGNORED outside the model's turns, whose end-of-sequence tokens count)."""
    rows: list[tuple[list[int], list[int]]] = []
    for _ in range(size):
        ids: list[int] = []
        labels: list[int] = []
        for number, text in enumerate(example(rng, noise)):
            piece = tokenizer.encode(text)
            ids += piece
            labels += piece if number % 2 else [IGNORED] * len(piece)
        rows.append((ids, labels))
    longest = max(len(ids) for ids, _ in rows)
    ids_BT = torch.full((size, longest), PAD_ID)
    labels_BT = torch.full((size, longest), IGNORED)
    for row, (ids, labels) in enumerate(rows):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        labels_BT[row, : len(ids)] = torch.tensor(labels)
    return ids_BT, labels_BT


def train(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    phases: Sequence[Phase],
    seed: int,
    batch_size: int = BATCH_SIZE,
) -> None:
    """Supervised training in place: one AdamW over all phases, loss only on what the model writes."""
    rng = random.Random(f"akl_dist.tiny.sft:{seed}")
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    model.train()
    for number, phase in enumerate(phases, start=1):
        for step in range(phase.steps):
            for group in optimizer.param_groups:
                group["lr"] = phase.lr(step)
            ids_BT, labels_BT = training_batch(tokenizer, rng, phase.noise, batch_size)
            # Right padding needs no attention mask: a causal model's real positions never see what follows them.
            logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(
                logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=IGNORED
            )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 40 == 0 or step == phase.steps - 1:
                print(f"phase {number} step {step} loss {loss.item():.4f}", flush=True)
    model.eval()


@torch.no_grad()
def generate(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str], *, sample: bool
) -> Tensor:
    """`ids_BT` of the responses (padded after the end-of-sequence token), greedy or at temperature 1."""
    batch = tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left")
    config = GenerationConfig(
        do_sample=sample, max_new_tokens=MAX_NEW_TOKENS,
        eos_token_id=EOS_ID, pad_token_id=PAD_ID,
    )
    if sample:  # transformers' own default cuts the distribution to the 50 likeliest tokens
        config.temperature, config.top_p, config.top_k = 1.0, 1.0, 0
    ids_BT = model.generate(  # pyright: ignore[reportAttributeAccessIssue] - the library's protocol is too narrow
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], generation_config=config
    )
    return ids_BT[:, batch["input_ids"].shape[1] :]


def is_correct(response: str, answer: str) -> bool:
    """Strict check of a generated response: finished, boxed after the reasoning, numerically equal."""
    found = _ANSWER.search(response)
    return found is not None and float(found.group(1)) == float(answer)


def right_sums(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Sequence[Problem], *, sample: bool
) -> list[bool]:
    """Whether one response to each problem is right."""
    ids_BT = generate(model, tokenizer, [prompt_text(problem) for problem in rows], sample=sample)
    return [is_correct(text, problem.answer) for text, problem in zip(tokenizer.batch_decode(ids_BT), rows, strict=True)]


def conversations(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Sequence[Problem], *, sample: bool
) -> list[tuple[str, ...]]:
    """One conversation with the stand-in tool on each problem: the turns of model and tool, as `worked_conversation` writes
    them. An unfinished last turn is marked by a second, empty one of the tool's."""
    contexts = [prompt_text(problem) for problem in rows]
    turns: list[tuple[str, ...]] = [() for _ in rows]
    going = list(range(len(rows)))
    for number in range(MAX_OBSERVATIONS + 1):
        texts = tokenizer.batch_decode(generate(model, tokenizer, [contexts[row] for row in going], sample=sample)) if going else []
        still = []
        for row, text in zip(going, texts, strict=True):
            turn, ended, _ = text.partition(EOS)
            reply = tool_reply(turn) if ended and number < MAX_OBSERVATIONS else None
            turns[row] += (turn,) if ended and reply is None else (turn, reply or "")
            if reply is not None:
                contexts[row] += turn + EOS + USER + reply + ASSISTANT
                still.append(row)
        going = still
    return turns


def right_products(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Sequence[Problem], *, sample: bool
) -> list[bool]:
    """Whether one conversation on each problem ends in the right answer."""
    said = conversations(model, tokenizer, rows, sample=sample)
    return [final_answer(turns) == problem.answer for turns, problem in zip(said, rows, strict=True)]


Right = Callable[..., "list[bool]"]


@dataclass(frozen=True)
class Target:
    """What one of the models is trained for: its phases, its problems, and how a response is judged when it is measured."""

    phases: tuple[Phase, ...]
    problems: Callable[[Split, int, int], list[Problem]]
    right: Right
    batch_size: int


TARGETS = {
    "sums": Target(PHASES, problems, right_sums, BATCH_SIZE),
    "products": Target(TOOL_PHASES, products, right_products, 64),
}


def accuracy(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, held_out: Sequence[Problem], *, samples: int,
    right: Right = right_sums,
) -> dict[str, float | int]:
    """Mean accuracy of `samples` responses per problem at temperature 1 (0: one greedy response) and its standard
    error over problems."""
    repeats = max(1, samples)
    rows = [problem for problem in held_out for _ in range(repeats)]
    correct = right(model, tokenizer, rows, sample=samples > 0)
    per_problem = torch.tensor(correct, dtype=torch.float64).view(len(held_out), repeats).mean(1)
    return {
        "accuracy": round(per_problem.mean().item(), 4),
        "standard_error": round((per_problem.std() / len(held_out) ** 0.5).item(), 4),
        "problems": len(held_out),
        "samples_per_problem": repeats,
    }


def make(out: Path, seed: int, task: str = "sums") -> dict[str, object]:
    """Train, measure and write the checkpoint for one of TARGETS to `out`; returns what `recipe.json` holds."""
    target = TARGETS[task]
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    started = time.perf_counter()
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed)
    train(model, tokenizer, target.phases, seed, target.batch_size)
    seconds = time.perf_counter() - started
    held_out = target.problems("heldout", 512, 0)
    torch.manual_seed(seed)
    recipe: dict[str, object] = {
        "seed": seed,
        "batch_size": target.batch_size,
        "phases": [asdict(phase) for phase in target.phases],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "measured": {
            "sampled": accuracy(model, tokenizer, held_out, samples=4, right=target.right),
            "greedy": accuracy(model, tokenizer, held_out, samples=0, right=target.right),
            "training_seconds": round(seconds),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")
    return recipe


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(prog="python -m akl_dist.tiny.make_model", description=__doc__)
    parser.add_argument("out", type=Path, help="folder to write the checkpoint to")
    parser.add_argument("--task", choices=tuple(TARGETS), default="sums", help="what to train it for (default sums)")
    parser.add_argument("--seed", type=int, default=0, help="seed of initialisation and training data (default 0)")
    arguments = parser.parse_args()
    print(json.dumps(make(arguments.out, arguments.seed, arguments.task)["measured"], indent=2))


if __name__ == "__main__":
    main()
