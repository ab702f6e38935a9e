"""Where a response's answer may stand: the final section, after the reasoning and before anything that is not the answer.

Standard library only. Offsets are character positions in the text that was passed in.
"""

from __future__ import annotations

import re

THINK, END_THINK = "<think>", "</think>"

END_MARKERS = (
    "<eos>",
    "</s>",
    "<|im_end|>",
    "<|im_start|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<end_of_turn>",
)
"""End-of-turn tokens of common templates. What a model writes after its first one is not part of its answer."""

_END = re.compile("|".join(re.escape(marker) for marker in END_MARKERS))


def final_section(text: str, *, think_open: bool = False) -> tuple[int, int] | None:
    """Character range of the final section: from the last ``</think>`` to the first end-of-turn token.

    Without a think section it is the whole response. None when the reasoning was opened and never closed.

    Args:
        text: the response as the model wrote it, special tokens included.
        think_open: the prompt itself ended with ``<think>``, so a response without ``</think>`` is all reasoning.
    """
    end_marker = _END.search(text)
    end = end_marker.start() if end_marker else len(text)
    close = text.rfind(END_THINK, 0, end)
    if close < 0:
        if think_open or text.find(THINK, 0, end) >= 0:
            return None
        return 0, end
    start = close + len(END_THINK)
    if text.find(THINK, start, end) >= 0:
        return None
    return start, end


def last_line(text: str, section: tuple[int, int]) -> tuple[int, int] | None:
    """Character range of the section's last non-empty line, without surrounding white space; None if there is none."""
    start, end = section
    body = text[start:end].rstrip()
    if not body.strip():
        return None
    line_start = max(body.rfind("\n"), body.rfind("\r")) + 1
    line = body[line_start:]
    line_start += len(line) - len(line.lstrip())
    return start + line_start, start + len(body)
