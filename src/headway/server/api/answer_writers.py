"""From a generation's deltas to bytes: one JSON answer when all choices have ended, or a stream of server-sent events.

Nearly every event carries one token's text and is otherwise like the one before. Its bytes are therefore made once per
choice, and a token costs the encoding of its text:

    data: {"id":...,"choices":[{"index":0,"delta":{"content":  "text"  },"logprobs":null,"finish_reason":null}]}
    └──────────────────── head, made once ──────────────────┘          └──────────── tail, made once ─────────┘
"""

from __future__ import annotations

import base64
import secrets
from array import array
from typing import Any, Literal, cast

import msgspec

from headway.outputs import shortened
from headway.server.api.answers import (
    AnswerFunction,
    AnswerMessage,
    AnswerToolCall,
    ChatChoice,
    ChatCompletion,
    ChatFinishReason,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionLogprobsWriter,
    CompletionTokensDetails,
    Embedding,
    EmbeddingList,
    EmbeddingUsage,
    FinishReason,
    LogprobForm,
    PromptLogprob,
    Usage,
    chat_logprobs,
    chat_position,
    prompt_position,
)
from headway.server.api.api_errors import ApiError
from headway.server.api.generation import Generation
from headway.server.api.jobs import Job
from headway.server.api.prompts import PromptMaker
from headway.server.api.requests import EmbeddingRequest
from headway.server.api.turns import JsonList, Turns, written_in_turns
from headway.structured.answer_pieces import CallArguments, CallBegin, ContentPiece, Piece, ReasoningPiece
from headway.structured.answer_spec import AnswerSpec
from headway.wire.messages import Delta, PositionLogprobs

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class _Choice:
    """One completion, as far as it has come."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] = []
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None
        self.finish_reason: FinishReason = "stop"
        self.stop_reason: int | str | None = None

    def take(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            self.finish_reason = cast(Literal["stop", "length"], delta.finish_reason)
            self.stop_reason = delta.stop_reason

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def message(self) -> AnswerMessage:
        return AnswerMessage(self.text)

    @property
    def chat_finish_reason(self) -> ChatFinishReason:
        return self.finish_reason


class AnswerReader:
    """Takes one completion apart as it comes: text, thoughts and calls."""

    def __init__(self, answer: AnswerSpec) -> None:
        self._parser = answer.parser()
        self._has_thoughts = False
        self._num_tokens_before_text = 0
        self._has_text = False
        self.num_calls = 0

    def read(self, delta: Delta) -> list[Piece]:
        """What is new. The last delta gives all that was held back."""
        pieces = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            pieces = [*pieces, *self._parser.finish()]
        for piece in pieces:
            self._has_thoughts |= isinstance(piece, ReasoningPiece)
            self._has_text |= not isinstance(piece, ReasoningPiece)
            self.num_calls += isinstance(piece, CallBegin)
        if not self._has_text:
            self._num_tokens_before_text += len(delta.token_ids)
        return pieces

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens before the first one of which something came into text or a call, if there were thoughts."""
        return self._num_tokens_before_text if self._has_thoughts else 0

    def finish_reason(self, reason: str) -> ChatFinishReason:
        """A completion that ended by itself, and has calls, waits for their results."""
        return "tool_calls" if reason == "stop" and self.num_calls else cast(FinishReason, reason)


def call_id() -> str:
    """A name for a call, by which its result is told later."""
    return f"call_{secrets.token_hex(12)}"


class _PartedChoice(_Choice):
    """One completion of text, thoughts and calls."""

    def __init__(self, answer: AnswerSpec) -> None:
        super().__init__()
        self.reader = AnswerReader(answer)
        self._content: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[tuple[str, list[str]]] = []

    def take(self, delta: Delta) -> None:
        super().take(delta)
        for piece in self.reader.read(delta):
            match piece:
                case ContentPiece():
                    self._content.append(piece.text)
                case ReasoningPiece():
                    self._thoughts.append(piece.text)
                case CallBegin():
                    self._calls.append((piece.name, []))
                case CallArguments():
                    self._calls[piece.index][1].append(piece.text)

    @property
    def message(self) -> AnswerMessage:
        content = "".join(self._content)
        message = AnswerMessage(content or (None if self._calls else ""))
        if self._thoughts:
            message.reasoning_content = message.reasoning = "".join(self._thoughts)
        if self._calls:
            message.tool_calls = [
                AnswerToolCall(call_id(), AnswerFunction(name, "".join(texts))) for name, texts in self._calls
            ]
        return message

    @property
    def chat_finish_reason(self) -> ChatFinishReason:
        return self.reader.finish_reason(self.finish_reason)


def _usage(generation: Generation, readers: list[AnswerReader]) -> Usage:
    """The tokens, with those of thoughts where they can be told apart."""
    usage = generation.usage
    if generation.job.answer.reasoning is not None and not generation.job.is_silent:
        number = sum(reader.num_reasoning_tokens for reader in readers)
        usage.completion_tokens_details = CompletionTokensDetails(number)
    return usage


async def chat_answer(generation: Generation, model: str, prompts: PromptMaker) -> bytes:
    """The JSON of a chat completion."""
    choices = await _collect(generation)
    job = generation.job
    readers = [choice.reader for choice in choices if isinstance(choice, _PartedChoice)]
    answer = ChatCompletion(
        id=generation.id,
        object="chat.completion",
        created=generation.created,
        model=model,
        choices=[
            ChatChoice(
                index=index,
                message=choice.message,
                logprobs=await _chat_logprobs(job, choice, prompts),
                finish_reason=choice.chat_finish_reason,
                stop_reason=choice.stop_reason,
                token_ids=choice.token_ids if job.return_token_ids else msgspec.UNSET,
            )
            for index, choice in enumerate(choices)
        ],
        usage=_usage(generation, readers),
        prompt_logprobs=await _prompt_logprobs(generation, choices, 0, prompts),
        prompt_token_ids=job.prompts[0].token_ids if job.return_token_ids else msgspec.UNSET,
    )
    return msgspec.json.encode(answer)


async def completion_answer(generation: Generation, model: str, prompts: PromptMaker) -> bytes:
    """The JSON of plain completions."""
    choices = await _collect(generation)
    echoes = await echoed_texts(generation, prompts)
    job = generation.job
    answer = Completion(
        id=generation.id,
        object="text_completion",
        created=generation.created,
        model=model,
        choices=[
            CompletionChoice(
                index=index,
                text=echoes[index // job.n] + choice.text,
                logprobs=await _completion_logprobs(generation, choices, index, prompts),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                prompt_logprobs=await _prompt_logprobs(generation, choices, index, prompts),
                token_ids=choice.token_ids if job.return_token_ids else msgspec.UNSET,
                prompt_token_ids=job.prompts[index // job.n].token_ids if job.return_token_ids else msgspec.UNSET,
            )
            for index, choice in enumerate(choices)
        ],
        usage=generation.usage,
    )
    return msgspec.json.encode(answer)


async def embedding_answer(generation: Generation, model: str, request: EmbeddingRequest) -> bytes:
    """The JSON of vectors, of which there may be millions of numbers."""
    vectors = [b""] * generation.job.num_choices
    async with generation:
        async for deltas in generation:
            for delta in deltas:
                if delta.embedding is not None:
                    vectors[delta.index] = delta.embedding
    num_tokens = generation.job.num_prompt_tokens
    data: Any = await written_in_turns(
        Embedding(index, _written(vector, request)) for index, vector in enumerate(vectors)
    )
    return _encode(EmbeddingList(data, model, EmbeddingUsage(num_tokens, num_tokens)))


def _written(vector: bytes, request: EmbeddingRequest) -> list[float] | str:
    numbers = shortened(array("f", vector), dimensions=request.dimensions, normalize=request.normalize is not False)
    if request.encoding_format == "base64":
        return base64.b64encode(numbers.tobytes()).decode()
    return numbers.tolist()


async def echoed_texts(generation: Generation, prompts: PromptMaker) -> list[str]:
    """What stands before the completions of each prompt: the prompt itself with `echo`, else nothing."""
    if not generation.job.echo:
        return [""] * len(generation.job.prompts)
    return [
        prompt.text if prompt.text is not None else await prompts.text_of(prompt.token_ids)
        for prompt in generation.job.prompts
    ]


def _new_choice(job: Job) -> _Choice:
    return _Choice() if job.is_plain else _PartedChoice(job.answer)


async def _collect(generation: Generation) -> list[_Choice]:
    choices = [_new_choice(generation.job) for _ in range(generation.job.num_choices)]
    async with generation:
        async for deltas in generation:
            for delta in deltas:
                choices[delta.index].take(delta)
    return choices


async def _chat_logprobs(job: Job, choice: _Choice, prompts: PromptMaker) -> ChatLogprobs | None:
    if job.num_logprobs is None:
        return None
    form = LogprobForm.of(job, prompts)
    content: Any = await written_in_turns(chat_position(position, form) for position in choice.logprobs)
    return ChatLogprobs(content)


async def _completion_logprobs(
    generation: Generation, choices: list[_Choice], index: int, prompts: PromptMaker
) -> CompletionLogprobs | None:
    job = generation.job
    if job.num_logprobs is None:
        return None
    positions: list[PositionLogprobs | None] = list(choices[index].logprobs)
    token_ids = list(choices[index].token_ids)
    if job.echo:
        positions = (_prompt_positions(generation, choices, index) or []) + positions
        token_ids = job.prompts[index // job.n].token_ids + token_ids
    writer, turns = CompletionLogprobsWriter(LogprobForm.of(job, prompts)), Turns()
    lists = {name: JsonList() for name in CompletionLogprobs.__struct_fields__}
    for place in range(len(positions)):
        part = writer.write(positions[place : place + 1], token_ids[place : place + 1])
        for name, written in lists.items():
            written.add(getattr(part, name))
        await turns.pass_on()
    fields: dict[str, Any] = {name: written.finish() for name, written in lists.items()}
    return CompletionLogprobs(**fields)


def _prompt_positions(
    generation: Generation, choices: list[_Choice], index: int
) -> list[PositionLogprobs | None] | None:
    """They come with the first delta of a request, whichever of its choices that is for."""
    first = index - index % generation.job.n
    siblings = choices[first : first + generation.job.n]
    return next((choice.prompt_logprobs for choice in siblings if choice.prompt_logprobs is not None), None)


async def _prompt_logprobs(
    generation: Generation, choices: list[_Choice], index: int, prompts: PromptMaker
) -> list[dict[str, PromptLogprob] | None] | None:
    positions = _prompt_positions(generation, choices, index) if generation.job.wants_prompt_logprobs else None
    if positions is None:
        return None
    written: Any = await written_in_turns(prompt_position(position, prompts) for position in positions)
    return written


def event(payload: bytes) -> bytes:
    """One server-sent event. JSON has no line breaks of its own."""
    return b"data: " + payload + b"\n\n"


class _Events:
    """What both kinds of stream share: the frame around `choices`."""

    def __init__(self, generation: Generation, model: str, object_name: str) -> None:
        self._generation = generation
        self._job = generation.job
        fields = {"id": generation.id, "object": object_name, "created": generation.created, "model": model}
        self._before = b"data: " + _encode(fields)[:-1] + b',"choices":['
        # With include_usage, OpenAI's events all have the field; only the last one fills it.
        self._after = b'],"usage":null}\n\n' if self._job.include_usage else b"]}\n\n"
        self._num_tokens = 0
        self._count(0)

    def _count(self, num_tokens: int) -> None:
        """With continuous_usage_stats, vLLM's events have the number of tokens so far."""
        if self._job.continuous_usage:
            self._num_tokens += num_tokens
            prompt, output = self._job.num_prompt_tokens, self._num_tokens
            usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
            self._after = b'],"usage":' + _encode(usage) + b"}\n\n"

    def _choice_event(self, choice: dict[str, Any], delta: Delta | None = None) -> bytes:
        """With the tokens of `delta`, if they are wanted."""
        if delta is not None and self._job.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return self._before + _encode(choice) + self._after

    def end(self) -> bytes:
        """The last events."""
        if not self._job.include_usage:
            return DONE
        return self._before + b'],"usage":' + _encode(self._usage) + b"}\n\n" + DONE

    @property
    def _usage(self) -> Usage:
        return self._generation.usage

    def fail(self, failure: ApiError) -> bytes:
        """The last events of a stream that failed."""
        return event(failure.body) + DONE


class ChatEvents(_Events):
    """A chat completion as chunks."""

    def __init__(self, generation: Generation, model: str, prompts: PromptMaker) -> None:
        super().__init__(generation, model, "chat.completion.chunk")
        self._form = LogprobForm.of(self._job, prompts)
        self._heads = [
            self._before + b'{"index":%d,"delta":{"content":' % index for index in range(self._job.num_choices)
        ]
        self._tail = b'},"logprobs":null,"finish_reason":null}'

    def begin(self) -> bytes:
        """Every choice starts by saying who speaks, and where token ids are wanted, after which tokens."""
        delta = {"role": "assistant", "content": ""}
        after = self._after
        if self._job.return_token_ids:
            after = b'],"prompt_token_ids":' + _encode(self._job.prompts[0].token_ids) + self._after[1:]
        return b"".join(
            self._before
            + _encode({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
            + (self._after if index else after)
            for index in range(self._job.num_choices)
        )

    def write(self, deltas: list[Delta]) -> bytes:
        """All events of what has arrived."""
        parts: list[bytes] = []
        for delta in deltas:
            self._count(len(delta.token_ids))
            if delta.logprobs is not None or (self._job.return_token_ids and delta.token_ids):
                parts.append(self._in_full(delta))
            elif delta.text:
                parts += (self._heads[delta.index], _encode(delta.text), self._tail, self._after)
            if delta.finish_reason is not None:
                parts.append(self._last(delta))
        return b"".join(parts)

    def _in_full(self, delta: Delta) -> bytes:
        logprobs = None if delta.logprobs is None else chat_logprobs(delta.logprobs, self._form)
        content = {"content": delta.text}
        return self._choice_event(
            {"index": delta.index, "delta": content, "logprobs": logprobs, "finish_reason": None}, delta
        )

    def _last(self, delta: Delta) -> bytes:
        return self._choice_event(
            {
                "index": delta.index,
                "delta": {},
                "logprobs": None,
                "finish_reason": self._finish_reason(delta),
                "stop_reason": delta.stop_reason,
            }
        )

    def _finish_reason(self, delta: Delta) -> str | None:
        return delta.finish_reason


class PartedChatEvents(ChatEvents):
    """A chat completion of text, thoughts and calls as chunks."""

    def __init__(self, generation: Generation, model: str, prompts: PromptMaker) -> None:
        super().__init__(generation, model, prompts)
        self._readers = [AnswerReader(self._job.answer) for _ in range(self._job.num_choices)]

    def write(self, deltas: list[Delta]) -> bytes:
        """All events of what has arrived."""
        parts: list[bytes] = []
        for delta in deltas:
            self._count(len(delta.token_ids))
            changes = [_change(piece) for piece in self._readers[delta.index].read(delta)]
            logprobs = None if delta.logprobs is None else chat_logprobs(delta.logprobs, self._form)
            if logprobs is not None or (self._job.return_token_ids and delta.token_ids):
                changes = changes or [{"content": ""}]
            for place, change in enumerate(changes):
                # Once per token, although one may end a part and begin the next.
                choice = {"index": delta.index, "delta": change, "logprobs": None, "finish_reason": None}
                if place == 0:
                    choice["logprobs"] = logprobs
                parts.append(self._choice_event(choice, None if place else delta))
            if delta.finish_reason is not None:
                parts.append(self._last(delta))
        return b"".join(parts)

    def _finish_reason(self, delta: Delta) -> str | None:
        return self._readers[delta.index].finish_reason(str(delta.finish_reason))

    @property
    def _usage(self) -> Usage:
        return _usage(self._generation, self._readers)


def _change(piece: Piece) -> dict[str, Any]:
    """A piece as the `delta` of a chunk."""
    match piece:
        case ContentPiece():
            return {"content": piece.text}
        case ReasoningPiece():
            return {"reasoning_content": piece.text, "reasoning": piece.text}
        case CallBegin():
            function = {"name": piece.name, "arguments": ""}
            return {"tool_calls": [{"index": piece.index, "id": call_id(), "type": "function", "function": function}]}
        case CallArguments():
            return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}


class CompletionEvents(_Events):
    """Plain completions as chunks."""

    def __init__(self, generation: Generation, model: str, prompts: PromptMaker, echoes: list[str]) -> None:
        super().__init__(generation, model, "text_completion")
        self._echoes = echoes
        self._heads = [self._before + b'{"index":%d,"text":' % index for index in range(self._job.num_choices)]
        self._tail = b',"logprobs":null,"finish_reason":null}'
        form = LogprobForm.of(self._job, prompts)
        self._logprobs = [CompletionLogprobsWriter(form) for _ in range(self._job.num_choices)]

    def begin(self) -> bytes:
        """With `echo`, every choice starts with its prompt; with `return_token_ids`, with the prompt's tokens."""
        if self._job.return_token_ids:
            return b"".join(self._choice_event(self._first(index)) for index in range(self._job.num_choices))
        return b"".join(
            head + _encode(self._echoes[index // self._job.n]) + self._tail + self._after
            for index, head in enumerate(self._heads)
            if self._echoes[index // self._job.n]
        )

    def write(self, deltas: list[Delta]) -> bytes:
        """All events of what has arrived."""
        parts: list[bytes] = []
        for delta in deltas:
            self._count(len(delta.token_ids))
            is_shown = self._job.return_token_ids and delta.token_ids
            if is_shown or delta.logprobs is not None or delta.finish_reason is not None:
                parts.append(self._in_full(delta))
            elif delta.text:
                parts += (self._heads[delta.index], _encode(delta.text), self._tail, self._after)
        return b"".join(parts)

    def _first(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "text": self._echoes[index // self._job.n],
            "logprobs": None,
            "finish_reason": None,
            "token_ids": [],
            "prompt_token_ids": self._job.prompts[index // self._job.n].token_ids,
        }

    def _in_full(self, delta: Delta) -> bytes:
        logprobs = None
        if delta.logprobs is not None:
            logprobs = self._logprobs[delta.index].write(delta.logprobs, delta.token_ids)
        choice = {"index": delta.index, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish_reason}
        return self._choice_event(choice | {"stop_reason": delta.stop_reason} if delta.finish_reason else choice, delta)
