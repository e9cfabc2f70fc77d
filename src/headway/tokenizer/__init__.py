"""Text to tokens and back: one `Tokenizer`, made from a Hugging Face folder or from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.tokenizer.from_folder import tokenizer_from_folder
from headway.tokenizer.from_gguf import tokenizer_from_gguf
from headway.tokenizer.tokenizer import Tokenizer, spell_bad_words

__all__ = [
    "Tokenizer",
    "load_tokenizer",
    "spell_bad_words",
    "tokenizer_from_folder",
    "tokenizer_from_gguf",
]


def load_tokenizer(source: str | Path | Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a Hugging Face folder, or of a GGUF file's metadata (key → plain Python value)."""
    if isinstance(source, Mapping):
        return tokenizer_from_gguf(source)
    return tokenizer_from_folder(source)
