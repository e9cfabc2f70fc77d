"""From text and messages to token ids, in threads: a long prompt takes seconds, and the loop goes on meanwhile.

Only what is so short that it takes some tenths of a millisecond is done on the spot, without changing threads twice.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from headway.errors import HeadwayError
from headway.server.errors import ApiError, bad_request
from headway.server.messages import EngineReady
from headway.server.requests import ChatMessage
from headway.tokenizer import Tokenizer

_T = TypeVar("_T")
SHORT_CHARS = 256
"""Up to this size, text is tokenised on the spot. That takes 0.2 ms, and 0.6 ms where every character is a token."""
ITEM_CHARS = 64
"""What a message, or one of several texts, counts for by itself: a template loops over messages."""
_TEMPLATE_OWN = frozenset({"messages", "tools", "add_generation_prompt", "self"})
"""Names that `chat_template_kwargs` may not carry: they have fields of their own, or none."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the engine takes it."""

    token_ids: list[int]
    text: str | None = None


class PromptMaker:
    """Tokenises, templates and decodes off the event loop. Everything it returns fits the model's context."""

    def __init__(self, tokenizer: Tokenizer | None, *, num_threads: int) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")
        self._longest_token = max(map(len, tokenizer.backend.get_vocab()), default=1) if tokenizer else 1

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; 400 if it has none."""
        if self._tokenizer is None:
            raise bad_request("This model has no tokenizer; send the prompt as token ids to /v1/completions.")
        return self._tokenizer

    async def from_messages(
        self,
        messages: Sequence[ChatMessage],
        info: EngineReady,
        *,
        add_generation_prompt: bool = True,
        template_options: dict[str, Any] | None = None,
    ) -> Prompt:
        """A conversation in the words of the model's chat template."""
        own = sorted(_TEMPLATE_OWN & set(template_options or ()))
        if own:
            raise bad_request(f"'chat_template_kwargs' must not have '{own[0]}'.", param="chat_template_kwargs")
        if not messages:
            raise bad_request("'messages' must not be empty.", param="messages")
        options = template_options or {}
        encode = partial(self._encode_messages, messages, info, add_generation_prompt, options)
        num_chars = sum(message.num_chars + ITEM_CHARS for message in messages)
        # What a template does with options of its own, nobody here knows.
        return await self._run(encode, is_short=num_chars <= SHORT_CHARS and not options)

    async def from_texts(
        self, texts: Sequence[str], info: EngineReady, *, add_special_tokens: bool = True
    ) -> list[Prompt]:
        """Plain texts, all of them in one go."""

        def encode() -> list[Prompt]:
            return [self._encode(text, info, param="prompt", add_special_tokens=add_special_tokens) for text in texts]

        return await self._run(encode, is_short=sum(map(len, texts)) + ITEM_CHARS * (len(texts) - 1) <= SHORT_CHARS)

    def from_ids(self, token_ids: list[int], info: EngineReady) -> Prompt:
        """Token ids as they are, once they are known to be tokens."""
        _check_length(len(token_ids), info, param="prompt")
        _check_ids(token_ids, info, param="prompt")
        return Prompt(token_ids)

    async def decode(self, token_ids: list[int], info: EngineReady) -> str:
        """The text of token ids that a client sent, special tokens included."""

        def decode() -> str:
            _check_ids(token_ids, info, param="tokens")
            return self.tokenizer.decode(token_ids, skip_special_tokens=False)

        return await self._run(decode, is_short=len(token_ids) <= SHORT_CHARS)

    async def text_of(self, token_ids: list[int]) -> str:
        """The text of token ids that are known to be good."""
        decode = partial(self.tokenizer.decode, token_ids, skip_special_tokens=False)
        return await self._run(decode, is_short=len(token_ids) <= SHORT_CHARS)

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text of any length."""
        encode = partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return await self._run(encode, is_short=len(text) <= SHORT_CHARS)

    async def warm_up(self) -> None:
        """Compile the chat template and start a thread, so that the first request need not wait for that."""
        if self._tokenizer is not None and self._tokenizer.chat_template is not None:
            with contextlib.suppress(HeadwayError):  # a template that refuses this, or cannot be used: said when asked
                await self._run(partial(self._template, [ChatMessage(role="user", content="Hi")]), is_short=False)

    def token_text(self, token_id: int) -> str:
        """One token's text, for log-probabilities; "" without a tokenizer."""
        return "" if self._tokenizer is None else self._tokenizer.token_text(token_id)

    def token_bytes(self, token_id: int) -> list[int] | None:
        """One token's bytes, where tokens have bytes of their own."""
        if self._tokenizer is None or not self._tokenizer.has_token_bytes:
            return None
        return list(self._tokenizer.token_bytes(token_id))

    def close(self) -> None:
        """Take no more work."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _template(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        return self.tokenizer.apply_chat_template(
            [message.for_template() for message in messages],
            add_generation_prompt=add_generation_prompt,
            **(options or {}),
        )

    def _encode_messages(
        self,
        messages: Sequence[ChatMessage],
        info: EngineReady,
        add_generation_prompt: bool,
        options: Mapping[str, Any],
    ) -> Prompt:
        """From template to tokens in one go: each change of threads costs time to first token."""
        text = self._template(messages, add_generation_prompt, options)
        return self._encode(text, info, param="messages", add_special_tokens=False)

    def _encode(self, text: str, info: EngineReady, *, param: str, add_special_tokens: bool) -> Prompt:
        # No token is longer than the longest: what is over this cannot fit, and need not be tokenised to know.
        if len(text) > info.max_model_len * self._longest_token:
            raise _too_long(f"{len(text)} characters", info, param)
        token_ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if not token_ids:
            raise bad_request(f"'{param}' is empty.", param=param)
        _check_length(len(token_ids), info, param=param)
        return Prompt(token_ids, text)

    async def _run(self, work: Callable[[], _T], *, is_short: bool) -> _T:
        if is_short:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _check_ids(token_ids: list[int], info: EngineReady, *, param: str) -> None:
    if not token_ids:
        raise bad_request(f"'{param}' is empty.", param=param)
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= info.vocab_size:
        raise bad_request(
            f"'{param}' has token id {low if low < 0 else high}; the vocabulary has ids 0 to {info.vocab_size - 1}.",
            param=param,
        )


def _check_length(num_tokens: int, info: EngineReady, *, param: str) -> None:
    if num_tokens >= info.max_model_len:
        raise _too_long(f"{num_tokens} tokens", info, param)


def _too_long(length: str, info: EngineReady, param: str) -> ApiError:
    return bad_request(
        f"This model's context has {info.max_model_len} tokens; with at least one of output, a prompt may have "
        f"{info.max_model_len - 1}. This one has {length}.",
        param=param,
        code="context_length_exceeded",
    )
