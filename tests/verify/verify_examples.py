"""Groups and tokenizers for the tests of the verify worker and pool."""

from __future__ import annotations

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from akl_dist.contract.records import Prompt, ReferenceArrays, ReferenceGroup, RolloutArrays, RolloutGroup
from akl_dist.tiny.tokenizer import build_tokenizer


def tiny_tokenizer(folder) -> Tokenizer:
    build_tokenizer().save_pretrained(folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def byte_level_tokenizer(folder) -> Tokenizer:
    """A byte-level BPE that merges over brace borders (``}}``, ``{1``) and leaves rare characters in single bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|im_end|>"], show_progress=False)
    tokenizer.train_from_iterator(["the answer is \\boxed{16}.", "so \\boxed{16} it is", "x\\boxed{16}y"] * 20, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def group_of(tokenizer, responses, *, gold="16", finish=None, prompt="<user>7+3+6=<assistant>", prompt_id="tiny/0"):
    """A rollout group with its arrays as the handle, from response texts."""
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in responses]
    prompt_ids = tuple(tokenizer.encode(prompt, add_special_tokens=False).ids)
    flat = np.asarray([i for row in ids for i in row], np.int32)
    return RolloutGroup(
        prompt=Prompt(prompt_id, "tiny", prompt, prompt_ids, gold),
        response_lengths=tuple(map(len, ids)),
        finish_reasons=tuple(finish or ["stop"] * len(ids)),
        policy_version=0,
        engine="rollout/test/0",
        arrays=RolloutArrays(flat, np.zeros(len(flat), np.float32)),
    )


def reference_of(group, entropies):
    n, size = group.num_tokens, len(group.response_lengths)
    arrays = ReferenceArrays(np.zeros(n, np.float32), np.asarray(entropies, np.float32), None)
    return ReferenceGroup(group.prompt.prompt_id, (0.0,) * size, (0.0,) * size, arrays)
