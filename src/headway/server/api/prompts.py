"""Turns text and messages into token ids, in threads.

The size of a text is checked before anything else: text that cannot be a prompt of this model is refused by every
endpoint. All other checks of a prompt are in `RequestPreparer`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar

import msgspec

from headway.engine.request_preparer import RequestPreparer
from headway.errors import HeadwayError, RequestTooLargeError
from headway.sampling_params import SamplingParams
from headway.server.api.api_errors import bad_request
from headway.server.api.chat_messages import ChatMessage
from headway.server.limits import LIMITS
from headway.structured.conversation import chat_text
from headway.structured.tool_call_formats import ToolFormat
from headway.structured.tool_schemas import Tool
from headway.tokenizer import Tokenizer
from headway.tokenizer.tokenizer import IDS_PER_CHAR, LONG_CHARS, SHORT_CHARS, TokenizerThreads
from headway.wire.messages import EngineReady

_TEMPLATE_OWN = frozenset(
    {
        *("messages", "tools", "tool_format", "add_generation_prompt", "continue_final_message"),
        *("self", "tokenizer"),
    }
)
"""Names that `chat_template_kwargs` must not contain, because the server sets them itself."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in the form that the engine accepts."""

    token_ids: list[int]
    text: str | None = None
    end_token_id: int | None = None
    """A token that ends the output, in addition to the model's end tokens."""


class PromptMaker:
    """Applies chat templates, tokenises and decodes outside the event loop, within limits on the input size."""

    def __init__(self, tokenizer: Tokenizer | None, *, num_threads: int, tool_format: ToolFormat | None = None) -> None:
        """`tool_format` writes tools and calls if the chat template does not. None chooses by the template."""
        self._tokenizer = tokenizer
        self._tool_format = tool_format
        self._threads = TokenizerThreads(num_threads)
        self._preparer_of = lru_cache(1)(partial(RequestPreparer, tokenizer=tokenizer))
        longest_token = max(map(len, tokenizer.backend.get_vocab()), default=1) if tokenizer else 1
        self._chars_per_token = min(longest_token, LIMITS.max_chars_per_token)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises 400 if the model has none."""
        if self._tokenizer is None:
            raise bad_request("This model has no tokenizer; send the prompt as token ids to /v1/completions.")
        return self._tokenizer

    def preparer(self, info: EngineReady) -> RequestPreparer:
        """Return the checker for these engine properties; it applies the same checks here as in the engine."""
        return self._preparer_of(vocab_size=info.vocab_size, max_model_len=info.max_model_len)

    @property
    def template_source(self) -> str:
        """The source of the chat template, or an empty string."""
        return (self._tokenizer.chat_template if self._tokenizer else None) or ""

    async def from_messages(
        self,
        messages: Sequence[ChatMessage],
        info: EngineReady,
        *,
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_options: Mapping[str, Any] | None = None,
        most_tokens: int | None = None,
    ) -> Prompt:
        """Apply the chat template to a conversation and tokenise it. `most_tokens` keeps only the last tokens."""
        own = sorted(_TEMPLATE_OWN & set(template_options or ()))
        if own:
            raise bad_request(f"'chat_template_kwargs' must not have '{own[0]}'.", param="chat_template_kwargs")
        if not messages:
            raise bad_request("'messages' must not be empty.", param="messages")
        options = template_options or {}
        template = partial(
            self._template,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            options=options,
        )
        encode = partial(self._encode_messages, template, info, most_tokens)
        num_chars = sum(message.num_chars for message in messages)
        if tools:
            num_chars += len(msgspec.json.encode(tools))
        if options:  # how a template expands them is unknown, so they count towards the limit of a prompt
            num_chars += SHORT_CHARS + len(msgspec.json.encode(options))
        self._check_chars(num_chars, info, param="messages")
        return await self._threads.run(encode, num_chars=num_chars + LIMITS.item_chars * len(messages))

    async def run(self, work: Callable[[], _T], *, num_chars: int) -> _T:
        """Run `work` in a tokenizer thread. It should take about as long as tokenising `num_chars` characters."""
        return await self._threads.run(work, num_chars=num_chars)

    async def from_texts(
        self,
        texts: Sequence[str],
        info: EngineReady,
        *,
        add_special_tokens: bool = True,
        most_tokens: int | None = None,
    ) -> list[Prompt]:
        """Tokenise plain texts together. `most_tokens` keeps only the last tokens of each."""
        for text in texts:
            self._check_chars(len(text), info, param="prompt")
        encode = partial(
            self._encode, info=info, param="prompt", add_special_tokens=add_special_tokens, most_tokens=most_tokens
        )
        num_chars = sum(map(len, texts)) + LIMITS.item_chars * (len(texts) - 1)
        return await self._threads.run(lambda: list(map(encode, texts)), num_chars=num_chars)

    async def between(
        self, texts: Sequence[str], suffix: str, info: EngineReady, *, add_special_tokens: bool = True
    ) -> list[Prompt]:
        """Return prompts that ask for the text between each of `texts` and `suffix`."""
        for text in texts:
            self._check_chars(len(text) + len(suffix), info, param="prompt")

        def encode() -> list[Prompt]:
            return [self._encode_infill(text, suffix, info, add_special_tokens) for text in texts]

        num_chars = sum(len(text) + len(suffix) + LIMITS.item_chars for text in texts)
        return await self._threads.run(encode, num_chars=num_chars)

    async def spell(self, params: SamplingParams, info: EngineReady) -> SamplingParams:
        """Return the parameters with the token sequences of their bad words."""
        words = params.bad_words or ()
        spell = partial(self.preparer(info).spell, params)
        return await self._threads.run(spell, num_chars=sum(map(len, words)) + LIMITS.item_chars * (len(words) - 1))

    async def from_ids(
        self, given: Sequence[list[int]], info: EngineReady, *, most_tokens: int | None = None
    ) -> list[Prompt]:
        """Return prompts from token ids after checking that they are valid. `most_tokens` keeps only the last ones."""
        prompts = given if most_tokens is None else [token_ids[-most_tokens:] for token_ids in given]
        preparer = self.preparer(info)

        def check() -> list[Prompt]:
            for token_ids in prompts:
                preparer.check_prompt(token_ids)
            return [Prompt(token_ids) for token_ids in prompts]

        return await self._threads.run(check, num_chars=sum(map(len, prompts)) // IDS_PER_CHAR)

    async def decode(self, token_ids: list[int], info: EngineReady) -> str:
        """Check token ids that a client sent and return their text, including special tokens."""
        self.check_number(token_ids, info)
        preparer = self.preparer(info)

        def decode() -> str:
            preparer.check_ids(token_ids, param="tokens")
            return self.tokenizer.decode(token_ids, skip_special_tokens=False)

        return await self._threads.run(decode, num_chars=len(token_ids))

    def check_number(self, token_ids: list[int], info: EngineReady) -> None:
        """Raise 400 for more token ids than one request may decode."""
        most = info.max_model_len * LIMITS.max_chars_per_token
        if len(token_ids) > most:
            raise bad_request(f"'tokens' may have at most {most} ids; there are {len(token_ids)}.", param="tokens")

    async def text_of(self, token_ids: list[int]) -> str:
        """Return the text of token ids that have been checked."""
        decode = partial(self.tokenizer.decode, token_ids, skip_special_tokens=False)
        return await self._threads.run(decode, num_chars=len(token_ids))

    async def tokenize(self, text: str, info: EngineReady, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text; there may be more than fit into the context."""
        self.check_text(text, info)
        encode = partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return await self._threads.run(encode, num_chars=len(text))

    async def pieces(self, token_ids: list[int]) -> list[str]:
        """Return the tokens as the vocabulary spells them."""
        piece = self.tokenizer.backend.id_to_token
        return await self._threads.run(lambda: [piece(one) or "" for one in token_ids], num_chars=len(token_ids))

    def check_text(self, text: str, info: EngineReady) -> None:
        """Raise 400 for a text that is too long to be a prompt of this model."""
        self._check_chars(len(text), info, param="prompt")

    async def warm_up(self) -> None:
        """Compile the chat template and start a thread, so that the first request does not wait for it."""
        if self._tokenizer is not None and self._tokenizer.chat_template is not None:
            with contextlib.suppress(HeadwayError):  # a template that fails here fails again with the first request
                await self._threads.run(
                    partial(self._template, [ChatMessage(role="user", content="Hi")]), num_chars=LONG_CHARS
                )

    def token_text(self, token_id: int) -> str:
        """Return one token's text, for log-probabilities, or an empty string without a tokenizer."""
        return "" if self._tokenizer is None else self._tokenizer.token_text(token_id)

    def token_bytes(self, token_id: int) -> list[int] | None:
        """Return one token's bytes, or None if the tokenizer does not define bytes for its tokens."""
        if self._tokenizer is None or not self._tokenizer.has_token_bytes:
            return None
        return list(self._tokenizer.token_bytes(token_id))

    def close(self) -> None:
        """Accept no more work."""
        self._threads.close()

    def _template(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        return chat_text(
            self.tokenizer,
            [message.for_template() for message in messages],
            tools=tools,
            tool_format=self._tool_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **(options or {}),
        )

    def _encode_messages(self, template: Callable[[], str], info: EngineReady, most_tokens: int | None) -> Prompt:
        """Apply the template and tokenise in one thread: each change of threads adds to the time to first token."""
        return self._encode(template(), info=info, param="messages", add_special_tokens=False, most_tokens=most_tokens)

    def _encode(
        self, text: str, *, info: EngineReady, param: str, add_special_tokens: bool, most_tokens: int | None = None
    ) -> Prompt:
        self._check_chars(len(text), info, param=param)
        token_ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if most_tokens is not None and len(token_ids) > most_tokens:
            token_ids = token_ids[-most_tokens:]
            text = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        self.preparer(info).check_prompt(token_ids, param=param)
        return Prompt(token_ids, text)

    def _encode_infill(self, text: str, suffix: str, info: EngineReady, add_special_tokens: bool) -> Prompt:
        infill = self.tokenizer.encode_infill(text, suffix, add_special_tokens=add_special_tokens)
        if infill is None:
            raise bad_request(
                "'suffix' is not supported by this model: its vocabulary has no tokens for filling in the middle.",
                param="suffix",
                code="unsupported_field",
            )
        self.preparer(info).check_prompt(infill.token_ids)
        return Prompt(infill.token_ids, end_token_id=infill.end_token_id)

    def _check_chars(self, num_chars: int, info: EngineReady, *, param: str) -> None:
        most = info.max_model_len * self._chars_per_token
        if num_chars > most:
            raise RequestTooLargeError.for_context(
                f"'{param}' may have at most {most} characters, {self._chars_per_token} for each of them; this one has "
                f"{num_chars}",
                num_tokens=num_chars // self._chars_per_token,
                max_model_len=info.max_model_len,
                param=param,
            )
