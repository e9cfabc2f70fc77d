"""The answers of the OpenAI API that this server gives, with vLLM's extra fields."""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length"]


class PromptTokensDetails(msgspec.Struct):
    """Where the prompt's tokens came from."""

    cached_tokens: int = 0


class Usage(msgspec.Struct):
    """Tokens of all prompts and all completions of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct):
    """A token that could have stood at a position."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(msgspec.Struct):
    """The token at a position, and the most likely ones."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """One entry per output token."""

    content: list[ChatLogprob]
    refusal: None = None


class AnswerMessage(msgspec.Struct):
    """What the model said."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """One of the `n` answers."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None = None


class ChatCompletion(msgspec.Struct):
    """The answer to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class PromptLogprob(msgspec.Struct):
    """A token of the prompt, or one that could have stood there, in vLLM's form."""

    logprob: float
    rank: int | None
    decoded_token: str | None


class CompletionLogprobs(msgspec.Struct):
    """Four lists of the same length, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """One of the `n` continuations of one of the prompts."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class Completion(msgspec.Struct):
    """The continuations of prompts, in their order."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ModelCard(msgspec.Struct):
    """A model that can be asked for."""

    id: str
    created: int
    max_model_len: int | None
    root: str
    object: Literal["model"] = "model"
    owned_by: Literal["headway"] = "headway"


class ModelList(msgspec.Struct):
    """All of them."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class TokenizeResponse(msgspec.Struct):
    """Tokens, and how many of them the model can take."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeResponse(msgspec.Struct):
    """Text."""

    prompt: str


class VersionResponse(msgspec.Struct):
    """What runs here."""

    version: str


class HealthResponse(msgspec.Struct):
    """Whether the server can serve, and if not, why."""

    status: Literal["ok", "unavailable"]
    reason: str = ""
