"""The response records of the OpenAI API, with vLLM's extra fields."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.responses import Response

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(msgspec.Struct):
    """Where the prompt's tokens came from."""

    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    """What the completions' tokens were for."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    """Tokens of all prompts and all completions of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET
    """Present for models with a reasoning format."""


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


class ChatCompletionFunction(msgspec.Struct):
    """What a call says."""

    name: str
    arguments: str


class ChatCompletionToolCall(msgspec.Struct):
    """A call that the model makes."""

    id: str
    function: ChatCompletionFunction
    type: Literal["function"] = "function"


class ChatCompletionMessage(msgspec.Struct):
    """What the model said; null content where it only called tools."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    """The same text under the field's newer name."""
    tool_calls: list[ChatCompletionToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    """One of the `n` completions."""

    index: int
    message: ChatCompletionMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: int | str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """Present with `return_token_ids`."""


class ChatCompletion(msgspec.Struct):
    """The answer to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """Present with `return_token_ids`."""


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
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """This field and `token_ids` are present with `return_token_ids`."""


class Completion(msgspec.Struct):
    """The continuations of prompts, in their order."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Embedding(msgspec.Struct):
    """The vector of one input, as numbers, or as base64 of little-endian float32."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(msgspec.Struct):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct):
    """Vectors in the order of their inputs."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


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
    token_strs: list[str] | None = None
    """The tokens as the vocabulary spells them, with `return_token_strs`."""


class DetokenizeResponse(msgspec.Struct):
    """Text."""

    prompt: str


class VersionResponse(msgspec.Struct):
    """What runs here."""

    version: str


class LoadResponse(msgspec.Struct):
    """How many generation requests are being answered."""

    server_load: int


class TokenizerInfo(msgspec.Struct):
    """What a client must know to make prompts itself."""

    vocab_size: int
    max_model_len: int
    chat_template: str | None
    special_tokens: dict[str, str]
    """Special tokens that have a role name, such as bos_token."""
    added_tokens: dict[str, int]
    """Special tokens and their ids, up to a maximum number."""
    bos_token_id: int | None
    eos_token_ids: list[int]


class KVEvent(msgspec.Struct):
    """What a replica's prefix cache holds, or how that has changed."""

    replica: int
    epoch: int
    """Identifies the replica's process. A new process begins with an empty cache."""
    number: int
    """The report's number: one more than that of the last report, unless `is_whole`. The events that describe one
    state share a number."""
    block_size: int
    is_whole: bool
    """Whether this event replaces everything reported about this replica before."""
    stored: list[str]
    """Block digests in hexadecimal."""
    evicted: list[str]


class HealthResponse(msgspec.Struct):
    """Whether the server can serve, and if not, why."""

    status: Literal["ok", "draining", "unavailable"]
    reason: str = ""


def json_response(record: msgspec.Struct, *, status: int = 200) -> Response:
    """Return a response with the record as JSON."""
    return Response(msgspec.json.encode(record), status_code=status, media_type="application/json")
