"""Pure parts of sampling: the seed of one request, and the token ids that end a response. Standard library only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from akl_dist.contract.errors import ModelError

SEED_BITS = 63
"""Seeds are non-negative and fit a signed 64-bit integer, the narrowest type on the engine's way to its generators."""

END_OF_TURN_TOKENS = (
    "<|im_end|>",  # ChatML: Qwen, SmolLM
    "<|eot_id|>",  # Llama 3
    "<|eom_id|>",  # Llama 3.1, end of a message that calls a tool
    "<|eot|>",  # Llama 4
    "<end_of_turn>",  # Gemma
    "<|end|>",  # Phi
    "<|end_of_turn|>",
    "<|endofturn|>",
    "<|return|>",
)
"""Tokens that close an assistant turn in published chat templates; one counts only where the template names it."""


def request_seed(seed_key: Sequence[int | str], prompt_id: str, sample_index: int) -> int:
    """Seed of one sampled response, in [0, 2**63).

    A function of what is sampled and of nothing else: which engine draws it, in what order and in what company does not
    matter, so a run can be resumed or spread over another number of engines without changing its samples.

    Args:
        seed_key: what sets this draw apart from others of the same prompt, e.g. (run seed, step) or ("evaluate", seed).
        prompt_id: id of the prompt.
        sample_index: 0 .. group_size - 1.
    """
    key = json.dumps([list(seed_key), prompt_id, sample_index], ensure_ascii=True, separators=(",", ":"))
    digest = hashlib.sha256(key.encode("ascii")).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)


def end_ids(folder: str | Path) -> tuple[int, ...]:
    """Token ids that end a response, ascending: the one definition for engine, data and learner.

    The union of the tokenizer's end token, the generation config's (one id or a list; the model config's where the
    generation config has none), and the end-of-turn tokens that the chat template names. Reads JSON files only.

    Raises:
        ModelError: nothing in the folder says how a response ends, or an end token has no id.
    """
    root = Path(folder)
    tokenizer_config = _read_json(root / "tokenizer_config.json")
    special_tokens = _read_json(root / "special_tokens_map.json")
    generation_eos = _id_list(_read_json(root / "generation_config.json").get("eos_token_id"), root)
    config_eos = _id_list(_config_eos(_read_json(root / "config.json")), root)
    found = set(generation_eos or config_eos)

    names = [text for text in (_text(tokenizer_config.get("eos_token") or special_tokens.get("eos_token")),) if text]
    template = _chat_template(root, tokenizer_config)
    # Where <|return|> ends a turn, a turn holds several messages, and <|end|> ends one of them.
    several = "<|return|>" in template
    turn_ends = [token for token in END_OF_TURN_TOKENS if token in template and not (several and token == "<|end|>")]
    if names or turn_ends:
        vocabulary = _vocabulary(root, tokenizer_config)
        for name in names:
            if name not in vocabulary:
                raise ModelError(
                    f"end token {name!r} of {root}",
                    got="no such token in its vocabulary",
                    expected="an entry of tokenizer.json",
                    remedy="Use a complete tokenizer folder.",
                    stage="rollout",
                )
            found.add(vocabulary[name])
        found.update(vocabulary[token] for token in turn_ends if token in vocabulary)
    if not found:
        raise ModelError(
            f"end token of {root}",
            got="none in tokenizer, generation config or chat template",
            expected="at least one",
            remedy='Set "eos_token" in tokenizer_config.json.',
            stage="rollout",
        )
    return tuple(sorted(found))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(
            str(path), got=str(error), expected="a JSON object", remedy="Copy the model folder again.", stage="rollout"
        ) from error
    if not isinstance(content, dict):
        raise ModelError(
            str(path),
            got=type(content).__name__,
            expected="a JSON object",
            remedy="Copy the model folder again.",
            stage="rollout",
        )
    return content


def _config_eos(config: Mapping[str, Any]) -> Any:
    text_config = config.get("text_config")  # multimodal models keep the language model's settings one level down
    nested = text_config.get("eos_token_id") if isinstance(text_config, dict) else None
    return nested if config.get("eos_token_id") is None else config.get("eos_token_id")


def _id_list(value: Any, root: Path) -> list[int]:
    ids = [] if value is None else list(value) if isinstance(value, list) else [value]
    for item in ids:
        if not isinstance(item, int) or isinstance(item, bool) or item < 0:
            raise ModelError(
                f"eos_token_id of {root}",
                got=repr(value),
                expected="a token id or a list of them",
                remedy="Mend generation_config.json or config.json.",
                stage="rollout",
            )
    return ids


def _text(token: Any) -> str | None:
    """A special token is written as its text or as an object with the text in "content"."""
    return token.get("content") if isinstance(token, dict) else token


def _chat_template(root: Path, tokenizer_config: Mapping[str, Any]) -> str:
    file = root / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template") or ""
    if isinstance(template, list):  # several named templates
        return "\n".join(str(entry.get("template", "")) for entry in template if isinstance(entry, dict))
    return str(template)


def _vocabulary(root: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, int]:
    """Token text -> id, from tokenizer.json, with the added tokens that only tokenizer_config.json may list."""
    tokenizer = _read_json(root / "tokenizer.json")
    table = (tokenizer.get("model") or {}).get("vocab") or {}
    vocabulary = dict(table) if isinstance(table, dict) else {entry[0]: index for index, entry in enumerate(table)}
    vocabulary.update(_added_tokens(tokenizer.get("added_tokens") or []))
    decoder = tokenizer_config.get("added_tokens_decoder") or {}
    vocabulary.update({entry["content"]: int(token_id) for token_id, entry in decoder.items()})
    return vocabulary


def _added_tokens(entries: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    return {entry["content"]: int(entry["id"]) for entry in entries}
