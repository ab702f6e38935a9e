"""Text of sampled token ids with the character range of every token, exact where characters and tokens do not align.

Reads ``tokenizer.json`` with the tokenizers library alone (no torch, no transformers). Each token becomes bytes, the bytes of all
tokens become text at once, and byte offsets become character offsets. A token that holds part of a character gets the whole
character's range.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from akl_dist.contract.errors import ModelError

Span = tuple[int, int]
_KNOWN_DECODERS = {"ByteLevel", "ByteFallback", "Metaspace", "Replace", "Fuse", "Strip"}


def _byte_of_character() -> dict[str, int]:
    """Inverse of the byte-level BPE alphabet (GPT-2): printable bytes stand for themselves, the rest follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + k): byte for k, byte in enumerate(others)}


class _Pieces(dict[int, bytes]):
    """Bytes of each token, found when first asked for."""

    def __init__(self, find: Callable[[int], bytes]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = found = self._find(token_id)
        return found


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
        self._pieces = _Pieces(self._bytes)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this token adds to the text; none for an id outside the vocabulary (padded embedding rows)."""
        return self._pieces[token_id]

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
        """Text (special tokens included, invalid bytes as U+FFFD) and one character range per token. O(n).

        A token without bytes has an empty range, inside a character the one at its beginning.
        """
        pieces = [self._pieces[int(token_id)] for token_id in token_ids]
        data, ends = b"".join(pieces), [0, *accumulate(map(len, pieces))]
        if data.isascii():
            return data.decode("ascii"), list(pairwise(ends))
        text, first = _characters(data)
        character = np.cumsum(first) - 1  # of each byte
        bounds = np.asarray(ends)
        last = character[np.maximum(bounds[1:], 1) - 1] + 1
        start = np.append(character, len(text))[bounds[:-1]]
        end = np.where(bounds[1:] > bounds[:-1], last, start)
        return text, list(zip(start.tolist(), end.tolist(), strict=True))


def _characters(data: bytes) -> tuple[str, np.ndarray]:
    """Text, and for every byte whether it begins a character of it. Bytes that are no UTF-8 give one U+FFFD for each maximal
    part of a character (Unicode 3.9, as Python's and Rust's decoders do)."""
    first = (np.frombuffer(data, np.uint8) & 0xC0) != 0x80
    text = data.decode("utf-8", "replace")
    if "\ufffd" in text:
        first = first.copy()
        for start, end in _invalid(data):
            first[start], first[start + 1 : end] = True, False
    return text, first


def _invalid(data: bytes) -> Iterator[Span]:
    """Byte ranges that the decoder replaces, one for each U+FFFD. O(n): only invalid bytes are looked at one by one."""
    escaped = data.decode("utf-8", "surrogateescape")
    points = np.frombuffer(escaped.encode("utf-32-le", "surrogatepass"), np.uint32)
    is_invalid = (points >= 0xDC80) & (points <= 0xDCFF)
    sizes = np.where(is_invalid, 1, 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000))
    done = 0
    for start in (np.cumsum(sizes) - sizes)[is_invalid].tolist():
        if start < done:
            continue
        try:
            data[start : start + 4].decode("utf-8")
        except UnicodeDecodeError as error:
            done = start + error.end - error.start
        yield start, done
