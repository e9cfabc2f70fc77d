"""Incremental detokenizing and stop strings. Text comes in a small piece per token, never half a character. Stop
strings are found however the text is cut into pieces, and no part of one is shown to the reader.

A token of a byte-level or sentencepiece vocabulary stands for bytes, so its text does not depend on the tokens before
it. An incremental UTF-8 decoder holds the bytes of an unfinished character until the rest arrives. Other tokenizers
decode a short window of recent tokens, and the text that a new token adds to the window is emitted.
"""

from __future__ import annotations

import codecs
import functools
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from headway.tokenizer import Tokenizer

# Bytes of one character at most, hence tokens of the prompt that may hold the first bytes of the output's first one.
MAX_TOKENS_PER_CHARACTER = 4
# Tokens of the prompt that a window starts with, and how many new ones it holds back for an unfinished character.
PROMPT_CONTEXT_TOKENS = 5
MAX_PENDING_TOKENS = 12

AUTOMATA_KEPT = 64

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
        """Return the text held back, after the last token. An unfinished character becomes U+FFFD."""
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
    """Decodes a window of the tokens emitted last (so that spacing and joined bytes come out right) and the pending
    ones."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._set_context(self._end_of_prompt(prompt_token_ids))

    def _end_of_prompt(self, token_ids: Sequence[int]) -> list[int]:
        """The prompt's last tokens, with a few more if they would begin inside a character."""
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


# ---- stop strings ---------------------------------------------------------------------------------------------------


class StopChecker:
    """Passes text through and ends it at the first completed stop string.

    The result does not depend on how the text was cut into pieces. The stop string whose last character comes first
    wins; of several that end at the same character, the longest wins. Text that may still become a stop string is held
    back until it cannot any more, or until `finish`.
    """

    def __init__(self, stop_strings: Sequence[str], *, include_in_output: bool = False) -> None:
        self._automaton = _automaton(tuple(stop_strings)) if stop_strings else None
        self._include = include_in_output
        self._state = 0
        self._tail = ""  # the end of the text that begins a stop string: as long as the state is deep
        self.matched: str | None = None
        """The stop string that ended the text, once there is one."""

    def append(self, text: str, *, search: bool = True) -> str:
        """Take the next piece and return the text that is now certain to belong to the output.

        With `search=False` (before `min_tokens` are reached) stop strings are not searched. A later match counts only
        if it lies wholly in searched text.
        """
        if self.matched is not None or self._automaton is None:
            return "" if self.matched is not None else text
        if not search:
            return self.finish() + text
        buffer = self._tail + text
        released = len(self._tail) if self._include else 0
        num_read, self._state, self.matched = self._automaton.read(text, self._state)
        if self.matched is not None:
            end = len(self._tail) + num_read
            self._tail = ""
            return buffer[released : end if self._include else end - len(self.matched)]
        kept = self._automaton.depth[self._state]
        self._tail = buffer[len(buffer) - kept :]
        return buffer[released:] if self._include else buffer[: len(buffer) - kept]

    def finish(self) -> str:
        """Return the text held back, when the output ends for another reason."""
        held, self._tail, self._state = self._tail, "", 0
        return "" if self._include else held


class _Automaton:
    """An Aho-Corasick automaton that matches all stop strings at once, so that the cost of a character does not depend
    on their number. A state stands for the longest suffix of the text that is a prefix of a stop string."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.depth = [0]
        """The length of each state's prefix."""
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [0]  # the state of the next shorter suffix that is a prefix
        self._match: list[str | None] = [None]  # the longest stop string that ends here
        for stop in stops:
            self._match[self._add(stop)] = stop
        waiting = deque(self._next[0].values())
        while waiting:  # by depth, so that shorter ends are known
            state = waiting.popleft()
            for character, child in self._next[state].items():
                shorter = self._shorter[child] = self._follow(self._shorter[state], character)
                if self._match[child] is None:
                    self._match[child] = self._match[shorter]
                waiting.append(child)

    def read(self, text: str, state: int) -> tuple[int, int, str | None]:
        """Read text from a state on, up to the first stop string. Returns the number of characters read, the state
        after them, and the stop string, if any."""
        for place, character in enumerate(text):
            state = self._follow(state, character)
            if self._match[state] is not None:
                return place + 1, state, self._match[state]
        return len(text), state, None

    def _follow(self, state: int, character: str) -> int:
        while (found := self._next[state].get(character)) is None:
            if state == 0:
                return 0
            state = self._shorter[state]
        return found

    def _add(self, stop: str) -> int:
        state = 0
        for depth, character in enumerate(stop, start=1):
            found = self._next[state].get(character)
            if found is None:
                found = self._next[state][character] = len(self._next)
                self._next.append({})
                self._shorter.append(0)
                self._match.append(None)
                self.depth.append(depth)
            state = found
        return state


@functools.lru_cache(AUTOMATA_KEPT)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    """The automaton, cached so that all completions of a request share one."""
    return _Automaton(stops)
