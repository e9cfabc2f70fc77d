"""The answers of the OpenAI API that this server gives, with vLLM's extra fields, log-probabilities among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from starlette.responses import Response

from headway.server.api.jobs import Job
from headway.server.api.prompts import PromptMaker
from headway.wire.messages import PositionLogprobs, TokenLogprob

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]
LEAST_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON cannot write."""


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
    """Of models that think."""


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


class AnswerFunction(msgspec.Struct):
    """What a call says."""

    name: str
    arguments: str


class AnswerToolCall(msgspec.Struct):
    """A call that the model makes."""

    id: str
    function: AnswerFunction
    type: Literal["function"] = "function"


class AnswerMessage(msgspec.Struct):
    """What the model said; null content where it only called tools."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    """The same under its newer name."""
    tool_calls: list[AnswerToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    """One of the `n` answers."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: int | str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """With `return_token_ids`."""


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
    """With `return_token_ids`."""


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
    """Both with `return_token_ids`."""


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
    """With `return_token_strs`: as the vocabulary writes them."""


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
    """Those with a name of their own, e.g. bos_token."""
    added_tokens: dict[str, int]
    """Special tokens and their ids, as far as a bound lets them be told."""
    bos_token_id: int | None
    eos_token_ids: list[int]


class KVEvent(msgspec.Struct):
    """What a replica's prefix cache holds, or how that has changed."""

    replica: int
    epoch: int
    """Of its process: another one begins with an empty cache."""
    number: int
    """Of its report. One more than before, unless `is_whole`; the events of one state have the same."""
    block_size: int
    is_whole: bool
    """Whatever was told of this replica before holds no more."""
    stored: list[str]
    """Digests in hexadecimal."""
    evicted: list[str]


class HealthResponse(msgspec.Struct):
    """Whether the server can serve, and if not, why."""

    status: Literal["ok", "draining", "unavailable"]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LogprobForm:
    """How a request wants log-probabilities to be told."""

    prompts: PromptMaker
    num_top: int = 0
    """How many of the most likely tokens."""
    named_ids: frozenset[int] = frozenset()
    """Tokens that are told in place of the most likely ones, with the chosen one."""
    as_token_ids: bool = False
    """Whether a token is told as `token_id:123` in place of its text."""

    @classmethod
    def of(cls, job: Job, prompts: PromptMaker) -> LogprobForm:
        """As the job has it."""
        return cls(
            prompts,
            num_top=job.num_logprobs or 0,
            named_ids=frozenset(job.params.logprob_token_ids or ()),
            as_token_ids=job.tokens_as_ids,
        )

    def name(self, entry: TokenLogprob) -> str:
        """What stands for a token."""
        return f"token_id:{entry.token_id}" if self.as_token_ids else _text(entry, self.prompts)

    def shown(self, position: PositionLogprobs) -> list[TokenLogprob]:
        """The best tokens of a position, in order; the chosen one, which stands first there, is not always among them.
        Where tokens were named: the chosen one and those."""
        if not self.named_ids:
            return most_likely(position, self.num_top)
        named = [entry for entry in position[1:] if entry.token_id in self.named_ids]
        return list({entry.token_id: entry for entry in (position[0], *named)}.values())


def chat_logprobs(positions: Sequence[PositionLogprobs], form: LogprobForm) -> ChatLogprobs:
    """One entry per token, each with those that are told besides."""
    return ChatLogprobs([chat_position(position, form) for position in positions])


def chat_position(position: PositionLogprobs, form: LogprobForm) -> ChatLogprob:
    """The entry of one token."""
    chosen, token_bytes = position[0], form.prompts.token_bytes
    top = [
        TopLogprob(form.name(entry), _finite(entry.logprob), token_bytes(entry.token_id))
        for entry in form.shown(position)
    ]
    return ChatLogprob(form.name(chosen), _finite(chosen.logprob), token_bytes(chosen.token_id), top_logprobs=top)


def most_likely(position: PositionLogprobs, number: int) -> list[TokenLogprob]:
    """The best tokens of a position, in order; the chosen one, which stands first there, is not always among them."""
    ranked = sorted(position, key=lambda entry: -entry.logprob)
    seen: dict[int, TokenLogprob] = {}
    for entry in ranked:
        seen.setdefault(entry.token_id, entry)
    return list(seen.values())[:number]


class CompletionLogprobsWriter:
    """Collects OpenAI's older form: lists side by side, with each token's place in the text."""

    def __init__(self, form: LogprobForm, *, offset: int = 0) -> None:
        self._form = form
        self._offset = offset

    def write(self, positions: Sequence[PositionLogprobs | None], token_ids: Sequence[int]) -> CompletionLogprobs:
        """The next tokens. A position without log-probabilities is the first of a prompt: nothing precedes it."""
        form, lists = self._form, CompletionLogprobs([], [], [], [])
        for token_id, position in zip(token_ids, positions, strict=True):
            chosen = TokenLogprob(token_id, 0.0, None, None) if position is None else position[0]
            lists.tokens.append(form.name(chosen))
            lists.text_offset.append(self._offset)
            lists.token_logprobs.append(None if position is None else _finite(chosen.logprob))
            lists.top_logprobs.append(None if position is None else self._top(position))
            self._offset += len(_text(chosen, form.prompts))
        return lists

    def _top(self, position: PositionLogprobs) -> dict[str, float]:
        """The chosen token is always among them, as OpenAI has it."""
        top = {self._form.name(entry): _finite(entry.logprob) for entry in self._form.shown(position)}
        top.setdefault(self._form.name(position[0]), _finite(position[0].logprob))
        return top


def prompt_position(position: PositionLogprobs | None, prompts: PromptMaker) -> dict[str, PromptLogprob] | None:
    """vLLM's form of a prompt token's: a mapping from token ids."""
    if position is None:
        return None
    return {
        str(entry.token_id): PromptLogprob(_finite(entry.logprob), entry.rank, _text(entry, prompts))
        for entry in position
    }


def _text(entry: TokenLogprob, prompts: PromptMaker) -> str:
    return prompts.token_text(entry.token_id) if entry.text is None else entry.text


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB


def json_response(answer: msgspec.Struct, *, status: int = 200) -> Response:
    """A record as JSON."""
    return Response(msgspec.json.encode(answer), status_code=status, media_type="application/json")
