"""Chat template of a model: problem text -> prompt token ids, once per prompt. Imports no torch."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from akl_dist.contract.errors import DataError, ModelError

THINK = "<think>"


@dataclass(frozen=True)
class Rendered:
    """A tokenised prompt. ``think_open``: it ends, after white space, with an opened ``<think>``, so the response begins inside
    the reasoning. (An empty section that is closed again, ``<think></think>``, is not open.)"""

    token_ids: tuple[int, ...]
    think_open: bool


class PromptTemplate:
    """Renders one user message (after an optional system message) and tokenises it.

    Args:
        tokenizer_path: a model folder (or hub name) with ``tokenizer.json`` and a chat template.
        system_prompt: content of the system message; None for no system message.
        suffix: the instruction put after every problem.
        variables: what the template is given beside the messages (``{"enable_thinking": False}``).

    Raises ModelError when there is no usable tokenizer or no chat template.
    """

    def __init__(
        self, tokenizer_path: str | Path, *, system_prompt: str | None = None, suffix: str = "",
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        # AutoTokenizer would import torch (seconds); the fast tokenizer class reads the same folder without it.
        from transformers import PreTrainedTokenizerFast

        self.path, self.suffix, self.system_prompt = str(tokenizer_path), suffix, system_prompt
        self.variables = dict(variables or {})
        try:
            self.tokenizer = PreTrainedTokenizerFast.from_pretrained(self.path)
        except (OSError, ValueError) as error:
            raise ModelError(
                f"tokenizer of {self.path}", got=f"{type(error).__name__}: {error}".splitlines()[0],
                expected="a model folder or hub name with tokenizer.json", stage="data",
                remedy="Correct model.path, or save the model's fast tokenizer into the folder.",
            ) from error
        if not self.tokenizer.chat_template:
            raise ModelError(
                f"chat template of {self.path}", got="none", expected="a tokenizer with a chat template", stage="data",
                remedy="Use the instruction-tuned model, or add chat_template.jinja to the model folder.",
            )

    def with_suffix(self, suffix: str) -> PromptTemplate:
        """The same template (and tokenizer) with another instruction."""
        other = copy.copy(self)
        other.suffix = suffix
        return other

    def unused_variables(self) -> list[str]:
        """Those of ``variables`` that the template's text does not name: they change nothing."""
        texts = self.tokenizer.chat_template
        text = "\n".join(texts.values()) if isinstance(texts, dict) else str(texts)
        return [name for name in self.variables if not re.search(rf"\b{re.escape(name)}\b", text)]

    def message(self, problem: str) -> str:
        """The user message: the problem, byte for byte, and the instruction."""
        return problem + self.suffix

    def messages(self, problem: str, own: Sequence[tuple[str, str]] = ()) -> list[dict[str, str]]:
        """The conversation: the system prompt and the user message, or a row's own (role, content) pairs, to whose last message the
        instruction is added and which keep a system message of their own."""
        pairs = [*own[:-1], ("user", self.message(problem))]
        if self.system_prompt is not None and pairs[0][0] != "system":
            pairs.insert(0, ("system", self.system_prompt))
        return [{"role": role, "content": content} for role, content in pairs]

    def encode(self, problem: str, own: Sequence[tuple[str, str]] = ()) -> tuple[int, ...]:
        """Ids of the whole prompt, ending where the response begins. Errors of :meth:`render`."""
        return self.render(problem, own).token_ids

    def render(self, problem: str, own: Sequence[tuple[str, str]] = ()) -> Rendered:
        """The whole prompt, ending where the response begins.

        The template writes its own special tokens, so the tokenizer adds none (no second BOS). Raises ModelError when
        the template refuses the messages, and DataError when the tokenizer has no token for the text or the text holds
        half a character (a lone surrogate).
        """
        from jinja2 import TemplateError

        messages = self.messages(problem, own)
        try:
            rendered = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **self.variables)
        except (TemplateError, TypeError, ValueError, AttributeError) as error:  # the last three: a variable of another kind
            names = f" ({', '.join(self.variables)})" if self.variables else ""
            raise ModelError(
                f"chat template of {self.path}", got=f"a refusal: {error}",
                expected=f"acceptance of the roles {', '.join(m['role'] for m in messages)}", stage="data",
                remedy=f"Set data.system_prompt=null if the model knows no system message, or mend data.template_kwargs{names} or "
                "its chat template.",
            ) from error
        try:
            rendered.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"text {problem[:60]!r}", got=f"half a character (a lone surrogate, {error.object[error.start]!r}) in its prompt",
                expected="text that UTF-8 can hold", remedy="Correct the text, or the instruction around it.", stage="data",
            ) from error
        try:
            ids = self.tokenizer.encode(rendered, add_special_tokens=False)
        except Exception as error:
            if type(error) is not Exception:  # the Rust tokenizer raises bare Exception for text outside its vocabulary
                raise
            raise DataError(
                f"text {problem[:60]!r}", got=f"a refusal of the tokenizer ({error})", stage="data",
                expected="text that the model's vocabulary covers",
                remedy=f"Use another model.path than {self.path}, or data that fits it.",
            ) from error
        return Rendered(tuple(ids), rendered.rstrip().endswith(THINK))
