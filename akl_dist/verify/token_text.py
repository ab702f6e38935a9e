"""Text of sampled token ids with the character range of every token, exact where characters and tokens do not align.

Reads ``tokenizer.json`` with the tokenizers library alone (no torch, no transformers). Each token becomes bytes; one incremental
UTF-8 decoder turns them into text in a single pass. A token that holds part of a character gets the whole character's range.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from pathlib import Path

from akl_dist.contract.errors import ModelError

Span = tuple[int, int]
_KNOWN_DECODERS = {"ByteLevel", "ByteFallback", "Metaspace", "Replace", "Fuse", "Strip"}


def _byte_of_character() -> dict[str, int]:
    """Inverse of the byte-level BPE alphabet (GPT-2): printable bytes stand for themselves, the rest follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + k): byte for k, byte in enumerate(others)}


class TokenText:
    """Decoder of one tokenizer.

    Args:
        tokenizer_path: folder with ``tokenizer.json``, or that file.

    Raises:
        ModelError: no such file, or a decoder whose text cannot be traced to tokens.
    """

    def __init__(self, tokenizer_path: str | Path) -> None:
        path = Path(tokenizer_path)
        path = path / "tokenizer.json" if path.is_dir() else path
        if not path.is_file():
            raise ModelError(
                str(path),
                got="no such file",
                expected="a fast tokenizer (tokenizer.json)",
                remedy="Save the tokenizer in its fast form beside the model.",
                stage="verify",
            )
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path))
        decoder = json.loads(path.read_text(encoding="utf-8")).get("decoder") or {}
        kinds = {part.get("type") for part in decoder.get("decoders", [decoder])}
        if not kinds or not kinds <= _KNOWN_DECODERS:
            raise ModelError(
                str(path),
                got=f"decoder {sorted(map(str, kinds))}",
                expected=f"parts among {sorted(_KNOWN_DECODERS)}",
                remedy="Use a byte-level or SentencePiece tokenizer.",
                stage="verify",
            )
        self._byte_level, self._byte_fallback = "ByteLevel" in kinds, "ByteFallback" in kinds
        self._word_mark = bool(kinds & {"Metaspace", "Replace"})
        self._alphabet = _byte_of_character()
        self._added = {index: token.content for index, token in self._tokenizer.get_added_tokens_decoder().items()}
        self._cache: dict[int, bytes] = {}

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this token adds to the text; none for an id outside the vocabulary (padded embedding rows)."""
        cached = self._cache.get(token_id)
        if cached is None:
            cached = self._cache[token_id] = self._bytes(token_id)
        return cached

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode("utf-8")
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level and all(char in self._alphabet for char in token):
            return bytes(self._alphabet[char] for char in token)
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return (token.replace("\u2581", " ") if self._word_mark else token).encode("utf-8")

    def decode(self, token_ids: Sequence[int]) -> tuple[str, list[Span]]:
        """Text (special tokens included, invalid bytes as U+FFFD) and one character range per token. O(n)."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        chunks: list[str] = []
        spans: list[list[int]] = []
        unfinished: list[int] = []  # tokens that hold the beginning of a character not complete yet
        position = 0
        for index, token_id in enumerate(token_ids):
            chunk = decoder.decode(self.token_bytes(int(token_id)))
            start, position = position, position + len(chunk)
            spans.append([start, position])
            chunks.append(chunk)
            if chunk:
                for earlier in unfinished:
                    spans[earlier][1] = start + 1
                unfinished.clear()
            if decoder.getstate()[0] and (self.token_bytes(int(token_id)) or unfinished):
                unfinished.append(index)
        rest = decoder.decode(b"", True)
        chunks.append(rest)
        for earlier in unfinished:
            spans[earlier][1] = position + len(rest)
        return "".join(chunks), [(start, end) for start, end in spans]
