"""What an environment writes, as token ids behind a turn: the chat template's separators, the message, the next turn's beginning.

The text around a message is read off the chat template once. A turn that was sampled ends with its end token already, so an
observation begins with what the template puts after that token (of ChatML: a line feed, then ``<|im_start|>tool``). Ids of earlier
turns are never made again. Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from akl_dist.contract.errors import DataError, ModelError
from akl_dist.data.template import THINK, PromptTemplate

CUT = "\n...\n"  # in place of the middle of a long message
CHARACTERS = 64  # of a token, at most, where a message is so long that tokenising all of it would hold up the engine
TURNS = ("PLACEHOLDERTURN", "another turn, of several words")
MESSAGES = ("PLACEHOLDERMESSAGE", 'the "second" one:\n\t<b> & {c} \\d\nend')  # white space and quotes as programs print them


@dataclass(frozen=True)
class Frame:
    """The text before a message (from behind the turn's end token on) and after it (to where the next turn begins)."""

    before: str
    after: str


class ObservationTemplate:
    """Tokenises messages of an environment.

    A message is untrusted text: no added token of the tokenizer (``<|im_start|>``, ``</think>``, ...) comes out of it; what looks
    like one stays text.

    Args:
        tokenizer_path: a model folder (or hub name) with ``tokenizer.json`` and a chat template.
        role: role of the messages in the template.
        max_tokens: of a message; the middle of a longer one is cut out. The template's own tokens come on top.
        template_kwargs: what the template is given beside the messages (``data.template_kwargs``).

    Raises:
        ModelError: no usable tokenizer or template, a template that refuses the role, changes a message, writes no special token
            at a turn's end, or frames messages differently from one time to the next.
    """

    def __init__(
        self, tokenizer_path: str, *, role: str, max_tokens: int, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        if max_tokens < 1:
            raise ModelError("rollout.tools.max_observation_tokens", got=str(max_tokens), expected="at least 1",
                             remedy="Raise it.", stage="rollout")
        self._path, self._role, self._max_tokens = str(tokenizer_path), role, max_tokens
        self._variables = dict(template_kwargs or {})
        self._tokenizer = PromptTemplate(tokenizer_path).tokenizer
        core = self._tokenizer.backend_tokenizer
        self._added = core.get_added_tokens_decoder()
        self._controls = {index for index, token in self._added.items() if token.special} - {self._tokenizer.unk_token_id}
        self._plain = _without_added_tokens(core)
        self.frame = self._stable_frame()
        self._join(self.frame)

    @property
    def opens_think(self) -> bool:
        """Whether the template opens a think section for the next turn, so that the turn begins inside the reasoning."""
        return self.frame.after.rstrip().endswith(THINK)

    def ids(self, observation: str) -> tuple[int, ...]:
        """Ids from behind the turn's end token to where the next turn begins.

        Raises:
            DataError: the tokenizer has no token for a character of the text, nor one for the unknown.
        """
        text = observation.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        half = CHARACTERS * (self._max_tokens + 64) // 2
        if len(text) > 2 * half:
            text = text[:half] + CUT + text[-half:]
        ids = self._encode(self._left + self._bounded(text) + self._right).ids
        return (*self._head, *(index for index in ids if index not in self._controls), *self._tail)

    # --- the frame ---------------------------------------------------------------------------------------------------

    def _stable_frame(self) -> Frame:
        """The frame, the same for other turns, other messages and the second message of a conversation."""
        frame = self._frame(TURNS[0], MESSAGES[0])
        for turn, message, earlier in ((*TURNS[1:], MESSAGES[0], 0), (TURNS[0], MESSAGES[1], 0), (TURNS[0], MESSAGES[0], 1)):
            other = self._frame(turn, message, earlier=earlier)
            if other != frame:
                raise self._refusal(f"{frame} once and {other} another time", "one frame for every message")
        return frame

    def _frame(self, turn: str, message: str, *, earlier: int = 0) -> Frame:
        pairs = [("user", "a question"), *[("assistant", "an earlier turn"), (self._role, "an earlier message")] * earlier]
        pairs += [("assistant", turn), (self._role, message)]
        rendered = self._render([{"role": role, "content": content} for role, content in pairs])
        _, found, rest = rendered.rpartition(turn)
        if not found or message not in rest:
            raise self._refusal(f"a rendering without the message as it is: {rendered[-200:]!r}", "every message, word for word")
        before, _, after = rest.partition(message)
        ends = [token.content for token in self._added.values() if token.special] + [self._tokenizer.eos_token or ""]
        end = _pattern(ends).search(before)
        if end is None:
            raise self._refusal(f"no special token between a turn and a message: {before!r}", "a token that ends a turn")
        return Frame(before[end.end():], after)

    def _render(self, talk: list[dict[str, str]]) -> str:
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False, **self._variables)
        except (TemplateError, TypeError, KeyError, IndexError) as error:
            raise self._refusal(f"a refusal: {error}", "acceptance of the role") from error

    def _refusal(self, got: str, expected: str) -> ModelError:
        other = "user" if self._role != "user" else "tool"
        return ModelError(
            f"chat template of {self._path}, role {self._role}", got=got, expected=expected, stage="rollout",
            remedy=f"Set rollout.tools.role={other}, or mend the model's chat template.",
        )

    def _join(self, frame: Frame) -> None:
        """Cut the frame at its added tokens next to the message: what lies between them is tokenised together with the message, as
        the template's whole text would be."""
        pattern = _pattern([token.content for token in self._added.values()])
        flags = {token.content: token for token in self._added.values()}
        head, left, right, tail = "", frame.before, frame.after, ""
        for match in pattern.finditer(frame.before):
            rest = frame.before[match.end():]
            left = rest.lstrip() if flags[match.group()].rstrip else rest
            head = frame.before[: len(frame.before) - len(left)]
        first = pattern.search(frame.after)
        if first is not None:
            right = frame.after[: first.start()]
            right = right.rstrip() if flags[first.group()].lstrip else right
            tail = frame.after[len(right):]
        self._left, self._right = left, right
        self._head, self._tail = (self._tokenizer.encode(part, add_special_tokens=False) if part else [] for part in (head, tail))

    # --- the message -------------------------------------------------------------------------------------------------

    def _encode(self, text: str) -> Any:
        try:
            return self._plain.encode(text, add_special_tokens=False)
        except Exception as error:
            if type(error) is not Exception:  # the Rust tokenizer raises bare Exception for text outside its vocabulary
                raise
            raise DataError(
                f"observation {text[:60]!r}", got=f"a refusal of the tokenizer ({error})", stage="rollout",
                expected="text that the model's vocabulary covers", remedy="Have the environment write text that it covers.",
            ) from error

    def _bounded(self, text: str) -> str:
        """The text, its middle cut out so that the rest has at most ``max_tokens`` tokens."""
        encoded = self._encode(text)
        count = len(encoded.ids)
        if count <= self._max_tokens:
            return text
        keep, offsets = self._max_tokens - len(self._encode(CUT).ids), encoded.offsets
        while keep >= 2:
            head, tail = (keep + 1) // 2, keep // 2
            shorter = text[: offsets[head - 1][1]] + CUT + text[offsets[count - tail][0]:]
            over = len(self._encode(shorter).ids) - self._max_tokens
            if over <= 0:
                return shorter
            keep -= over
        return text[: offsets[self._max_tokens - 1][0]]


def _pattern(contents: list[str]) -> re.Pattern[str]:
    """Any of the texts, the longest that fits; never matches where there are none."""
    wanted = sorted({content for content in contents if content}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, wanted)) or r"(?!)")


def _without_added_tokens(core: Any) -> Any:
    """The same tokenizer, to which every added token is text."""
    from tokenizers import Tokenizer

    return Tokenizer.from_str(json.dumps(json.loads(core.to_str()) | {"added_tokens": [], "truncation": None, "padding": None}))
