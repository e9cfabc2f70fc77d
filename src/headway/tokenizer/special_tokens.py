"""What tokenizers of both sources share: tokens put around a text, and tokens that end a chat turn."""

from __future__ import annotations

import tokenizers
from tokenizers.processors import TemplateProcessing

END_TOKENS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endofturn|>"),
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<EOT>", "<|return|>", "<|call|>"),
)
"""Special tokens with which models of several families end their turn or a text, besides the one that a GGUF file
declares: it has room for one of each kind, where generation_config.json lists all."""


def surround_with(backend: tokenizers.Tokenizer, *, first: str | None, last: str | None) -> None:
    """Make `backend` put these tokens before and after each text that it encodes with special tokens."""
    named = [token for token in (first, last) if token is not None]
    parts = [f"{first}:0"] * (first is not None) + ["$A:0"] + [f"{last}:0"] * (last is not None)
    second = [f"{first}:1"] * (first is not None) + ["$B:1"] + [f"{last}:1"] * (last is not None)
    backend.post_processor = TemplateProcessing(
        single=parts,
        pair=parts + second,
        special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(named)],
    )
