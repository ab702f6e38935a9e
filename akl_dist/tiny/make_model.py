"""Train the tiny model from nothing: `python -m akl_dist.tiny.make_model OUT [--seed 0]`.

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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from akl_dist.tiny.task import Noise, Problem, draw_operands, make_problem, problems, worked_solution
from akl_dist.tiny.tokenizer import ASSISTANT, EOS, EOS_ID, MAX_LENGTH, PAD_ID, USER, USER_ID, build_tokenizer

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
    noise: Noise

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


def training_batch(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, noise: Noise, size: int
) -> tuple[Tensor, Tensor]:
    """Right-padded `ids_BT` and `labels_BT` (IGNORED outside the response, whose end-of-sequence token counts)."""
    rows: list[tuple[list[int], int]] = []
    for _ in range(size):
        problem = make_problem(draw_operands(rng, "train"))
        prompt_ids = tokenizer.encode(prompt_text(problem))
        response_ids = tokenizer.encode(worked_solution(problem.operands, rng, noise) + EOS)
        rows.append((prompt_ids + response_ids, len(prompt_ids)))
    longest = max(len(ids) for ids, _ in rows)
    ids_BT = torch.full((size, longest), PAD_ID)
    labels_BT = torch.full((size, longest), IGNORED)
    for row, (ids, prompt_length) in enumerate(rows):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        labels_BT[row, prompt_length : len(ids)] = ids_BT[row, prompt_length : len(ids)]
    return ids_BT, labels_BT


def train(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    phases: Sequence[Phase],
    seed: int,
    batch_size: int = BATCH_SIZE,
) -> None:
    """Supervised training in place: one AdamW over all phases, loss only on response tokens."""
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


def accuracy(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, held_out: Sequence[Problem], *, samples: int
) -> dict[str, float | int]:
    """Mean accuracy of `samples` responses per problem at temperature 1 (0: one greedy response) and its standard
    error over problems."""
    repeats = max(1, samples)
    rows = [problem for problem in held_out for _ in range(repeats)]
    ids_BT = generate(model, tokenizer, [prompt_text(problem) for problem in rows], sample=samples > 0)
    correct = [
        is_correct(text, problem.answer) for text, problem in zip(tokenizer.batch_decode(ids_BT), rows, strict=True)
    ]
    per_problem = torch.tensor(correct, dtype=torch.float64).view(len(held_out), repeats).mean(1)
    return {
        "accuracy": round(per_problem.mean().item(), 4),
        "standard_error": round((per_problem.std() / len(held_out) ** 0.5).item(), 4),
        "problems": len(held_out),
        "samples_per_problem": repeats,
    }


def make(out: Path, seed: int) -> dict[str, object]:
    """Train, measure and write the checkpoint to `out`; returns what `recipe.json` holds."""
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    started = time.perf_counter()
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed)
    train(model, tokenizer, PHASES, seed)
    seconds = time.perf_counter() - started
    held_out = problems("heldout", 512, seed=0)
    torch.manual_seed(seed)
    recipe: dict[str, object] = {
        "seed": seed,
        "batch_size": BATCH_SIZE,
        "phases": [asdict(phase) for phase in PHASES],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "measured": {
            "sampled": accuracy(model, tokenizer, held_out, samples=4),
            "greedy": accuracy(model, tokenizer, held_out, samples=0),
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
    parser.add_argument("--seed", type=int, default=0, help="seed of initialisation and training data (default 0)")
    arguments = parser.parse_args()
    print(json.dumps(make(arguments.out, arguments.seed)["measured"], indent=2))


if __name__ == "__main__":
    main()
