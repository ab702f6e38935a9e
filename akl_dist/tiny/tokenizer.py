"""The tiny model's tokenizer: one token per byte, plus the markers of a worked solution.

transformers loads the tokenizer of every `qwen2` checkpoint as `Qwen2Tokenizer`, whatever class the folder names, and
rebuilds it as a byte-level BPE. So this one *is* a Qwen2Tokenizer, without merges: `AutoTokenizer`,
`PreTrainedTokenizerFast` and vLLM agree on it. It carries all 256 bytes because a byte-level BPE drops bytes that it
lacks silently; the task itself uses only the first 23 ids.
"""
from __future__ import annotations

from transformers import AddedToken, PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

PAD, EOS, USER, ASSISTANT = "<pad>", "<eos>", "<user>", "<assistant>"
THINK, END_THINK, BOXED = "<think>", "</think>", "\\boxed"
CHARACTERS = "0123456789+=;.{}"
TASK_TOKENS = (PAD, EOS, USER, ASSISTANT, THINK, END_THINK, BOXED, *CHARACTERS)
_OTHER_BYTES = tuple(symbol for symbol in bytes_to_unicode().values() if symbol not in CHARACTERS)
TOKENS = TASK_TOKENS + _OTHER_BYTES
PAD_ID, EOS_ID, USER_ID = (TOKENS.index(token) for token in (PAD, EOS, USER))
MAX_LENGTH = 256

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{- '<user>' + message['content'] -}}"
    "{%- elif message['role'] == 'assistant' -%}{{- '<assistant>' + message['content'] + '<eos>' -}}"
    "{%- else -%}{{- raise_exception('the tiny chat template knows the roles user and assistant, got '"
    " + message['role']) -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<assistant>' -}}{%- endif -%}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The 263-token tokenizer; ids are the positions in `TOKENS`.

    The think markers and `\\boxed` are single tokens but not *special* ones, so decoding with skip_special_tokens
    keeps them.
    """
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(TOKENS)},
        merges=[],
        unk_token=None,  # pyright: ignore[reportArgumentType] - the default would add a 264th token
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT],
        model_max_length=MAX_LENGTH,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    for token in (THINK, END_THINK, BOXED):
        tokenizer.add_tokens(AddedToken(token, normalized=False, special=False))
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
