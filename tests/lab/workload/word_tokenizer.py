"""A tokenizer of words, in place of a model's: each new word has the next id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from headway.tokenizer import Tokenizer

FIRST_TOKEN = 0


class WordTokenizer:
    def __init__(self) -> None:
        self.ids: dict[str, int] = {"<s>": FIRST_TOKEN}
        self.vocab_size = 10_000

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        words = [*(["<s>"] if add_special_tokens else []), *text.split()]
        return [self.ids.setdefault(word, len(self.ids)) for word in words]

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> str:
        return " ".join(f"<{message['role']}> {message['content']}" for message in messages)


def word_tokenizer() -> Tokenizer:
    return cast(Tokenizer, WordTokenizer())
