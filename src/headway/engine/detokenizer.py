"""Text from tokens as they come, one small piece per token, never half a character.

A token of a byte-level or sentencepiece vocabulary stands for bytes, so its text needs no look at the tokens before
it: an incremental UTF-8 decoder holds the bytes of an unfinished character until the rest arrives. Tokenizers of other
kinds are decoded over a short window of recent tokens, and what the window's text gains by the new token is emitted.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from headway.tokenizer import Tokenizer

# Bytes of one character at most, hence tokens of the prompt that may hold the first bytes of the output's first one.
MAX_TOKENS_PER_CHARACTER = 4
# Tokens of the prompt that a window starts with, and how many new ones it holds back for an unfinished character.
PROMPT_CONTEXT_TOKENS = 5
MAX_PENDING_TOKENS = 12

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class _Decoding(Protocol):
    def append(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class IncrementalDetokenizer:
    """The growing text of one output, in the context of its prompt."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        decoding = _ByteDecoding if tokenizer.has_token_bytes else _WindowDecoding
        self._decoding: _Decoding = decoding(tokenizer, prompt_token_ids, skip_special_tokens)
        self._parts: list[str] = []

    def append(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens of the output and return the text they complete."""
        new = "".join(map(self._decoding.append, token_ids))
        if new:
            self._parts.append(new)
        return new

    def finish(self) -> str:
        """No more tokens come: return what was held back; an unfinished character becomes U+FFFD."""
        new = self._decoding.finish()
        if new:
            self._parts.append(new)
        return new

    @property
    def text(self) -> str:
        """All text so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""


class _ByteDecoding:
    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # The tokenizer drops one leading space of a whole text; the output has it only if nothing comes before.
        self._drop_space = tokenizer.drops_leading_space and not any(map(self._bytes, reversed(prompt_token_ids)))
        for token_id in prompt_token_ids[-MAX_TOKENS_PER_CHARACTER:]:
            self._utf8.decode(self._bytes(token_id))

    def _bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id, skip_special_tokens=self._skip_special_tokens)

    def append(self, token_id: int) -> str:
        data = self._bytes(token_id)
        if self._drop_space and data:
            data = data.removeprefix(b" ")
            self._drop_space = False
        return self._utf8.decode(data)

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoding:
    """The window is what was emitted last (so that spacing and joined bytes come out right) and what is pending."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._set_context(self._end_of_prompt(prompt_token_ids))

    def _end_of_prompt(self, token_ids: Sequence[int]) -> list[int]:
        """The prompt's last tokens, a few more where that begins inside a character."""
        for length in range(PROMPT_CONTEXT_TOKENS, PROMPT_CONTEXT_TOKENS + MAX_TOKENS_PER_CHARACTER):
            context = list(token_ids[-length:])
            if not self._decode(context).startswith(_REPLACEMENT):
                return context
        return list(token_ids[-PROMPT_CONTEXT_TOKENS:])

    def _set_context(self, token_ids: list[int]) -> None:
        self._window = token_ids
        self._num_context = len(token_ids)
        self._context_text = self._decode(token_ids)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def append(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT) and len(self._window) - self._num_context < MAX_PENDING_TOKENS:
            return ""
        return self._emit(text)

    def finish(self) -> str:
        return "" if len(self._window) == self._num_context else self._emit(self._decode(self._window))

    def _emit(self, text: str) -> str:
        # The context's last character may have been unfinished (U+FFFD) and is whole now.
        pairs = enumerate(zip(self._context_text, text))
        shared = next((place for place, (old, now) in pairs if old != now), len(self._context_text))
        new = text[shared:]
        if new:
            self._set_context(self._window[self._num_context :])
        elif len(self._window) - self._num_context >= MAX_PENDING_TOKENS:  # all without text: no context for others
            del self._window[self._num_context :]
        return new
