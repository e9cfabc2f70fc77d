"""From a generation's deltas to bytes: one JSON answer when all choices have ended, or a stream of server-sent events.

Nearly every event carries one token's text and is otherwise like the one before. Its bytes are therefore made once per
choice, and a token costs the encoding of its text:

    data: {"id":...,"choices":[{"index":0,"delta":{"content":  "text"  },"logprobs":null,"finish_reason":null}]}
    └──────────────────── head, made once ──────────────────┘          └──────────── tail, made once ─────────┘
"""

from __future__ import annotations

from typing import Any, Literal, cast

import msgspec

from headway.rpc.messages import Delta, PositionLogprobs
from headway.server.api.answers import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionLogprobsWriter,
    FinishReason,
    PromptLogprob,
    chat_logprobs,
    prompt_logprobs,
)
from headway.server.api.generation import Generation
from headway.server.api.prompts import PromptMaker

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


async def chat_answer(generation: Generation, model: str, prompts: PromptMaker) -> bytes:
    """The JSON of a chat completion."""
    choices = await _collect(generation)
    num_top = generation.job.num_logprobs
    answer = ChatCompletion(
        id=generation.id,
        object="chat.completion",
        created=generation.created,
        model=model,
        choices=[
            ChatChoice(
                index=index,
                message=AnswerMessage(choice.text),
                logprobs=None if num_top is None else chat_logprobs(choice.logprobs, num_top, prompts),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
            )
            for index, choice in enumerate(choices)
        ],
        usage=generation.usage,
        prompt_logprobs=_prompt_logprobs(generation, choices, 0, prompts),
    )
    return msgspec.json.encode(answer)


async def completion_answer(generation: Generation, model: str, prompts: PromptMaker) -> bytes:
    """The JSON of plain completions."""
    choices = await _collect(generation)
    echoes = await echoed_texts(generation, prompts)
    answer = Completion(
        id=generation.id,
        object="text_completion",
        created=generation.created,
        model=model,
        choices=[
            CompletionChoice(
                index=index,
                text=echoes[index // generation.job.n] + choice.text,
                logprobs=_completion_logprobs(generation, choices, index, prompts),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                prompt_logprobs=_prompt_logprobs(generation, choices, index, prompts),
            )
            for index, choice in enumerate(choices)
        ],
        usage=generation.usage,
    )
    return msgspec.json.encode(answer)


async def echoed_texts(generation: Generation, prompts: PromptMaker) -> list[str]:
    """What stands before the completions of each prompt: the prompt itself with `echo`, else nothing."""
    if not generation.job.echo:
        return [""] * len(generation.job.prompts)
    return [
        prompt.text if prompt.text is not None else await prompts.text_of(prompt.token_ids)
        for prompt in generation.job.prompts
    ]


async def _collect(generation: Generation) -> list[_Choice]:
    choices = [_Choice() for _ in range(generation.job.num_choices)]
    async with generation:
        async for deltas in generation:
            for delta in deltas:
                choices[delta.index].take(delta)
    return choices


def _completion_logprobs(
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
    return CompletionLogprobsWriter(job.num_logprobs, prompts).write(positions, token_ids)


def _prompt_positions(
    generation: Generation, choices: list[_Choice], index: int
) -> list[PositionLogprobs | None] | None:
    """They come with the first delta of a request, whichever of its choices that is for."""
    first = index - index % generation.job.n
    siblings = choices[first : first + generation.job.n]
    return next((choice.prompt_logprobs for choice in siblings if choice.prompt_logprobs is not None), None)


def _prompt_logprobs(
    generation: Generation, choices: list[_Choice], index: int, prompts: PromptMaker
) -> list[dict[str, PromptLogprob] | None] | None:
    positions = _prompt_positions(generation, choices, index) if generation.job.wants_prompt_logprobs else None
    return None if positions is None else prompt_logprobs(positions, prompts)


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

    def _choice_event(self, choice: dict[str, Any]) -> bytes:
        return self._before + _encode(choice) + self._after

    def end(self) -> bytes:
        """The last events."""
        if not self._job.include_usage:
            return DONE
        return self._before + b'],"usage":' + _encode(self._generation.usage) + b"}\n\n" + DONE


class ChatEvents(_Events):
    """A chat completion as chunks."""

    def __init__(self, generation: Generation, model: str, prompts: PromptMaker) -> None:
        super().__init__(generation, model, "chat.completion.chunk")
        self._prompts = prompts
        self._heads = [
            self._before + b'{"index":%d,"delta":{"content":' % index for index in range(self._job.num_choices)
        ]
        self._tail = b'},"logprobs":null,"finish_reason":null}'

    def begin(self) -> bytes:
        """Every choice starts by saying who speaks."""
        delta = {"role": "assistant", "content": ""}
        return b"".join(
            self._choice_event({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
            for index in range(self._job.num_choices)
        )

    def write(self, deltas: list[Delta]) -> bytes:
        """All events of what has arrived."""
        parts: list[bytes] = []
        for delta in deltas:
            self._count(len(delta.token_ids))
            if delta.logprobs is not None:
                parts.append(self._with_logprobs(delta))
            elif delta.text:
                parts += (self._heads[delta.index], _encode(delta.text), self._tail, self._after)
            if delta.finish_reason is not None:
                parts.append(self._last(delta))
        return b"".join(parts)

    def _with_logprobs(self, delta: Delta) -> bytes:
        logprobs = chat_logprobs(delta.logprobs or (), self._job.num_logprobs or 0, self._prompts)
        content = {"content": delta.text}
        return self._choice_event({"index": delta.index, "delta": content, "logprobs": logprobs, "finish_reason": None})

    def _last(self, delta: Delta) -> bytes:
        return self._choice_event(
            {
                "index": delta.index,
                "delta": {},
                "logprobs": None,
                "finish_reason": delta.finish_reason,
                "stop_reason": delta.stop_reason,
            }
        )


class CompletionEvents(_Events):
    """Plain completions as chunks."""

    def __init__(self, generation: Generation, model: str, prompts: PromptMaker, echoes: list[str]) -> None:
        super().__init__(generation, model, "text_completion")
        self._echoes = echoes
        self._heads = [self._before + b'{"index":%d,"text":' % index for index in range(self._job.num_choices)]
        self._tail = b',"logprobs":null,"finish_reason":null}'
        self._logprobs = [
            CompletionLogprobsWriter(self._job.num_logprobs or 0, prompts) for _ in range(self._job.num_choices)
        ]

    def begin(self) -> bytes:
        """With `echo`, every choice starts with its prompt."""
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
            if delta.logprobs is not None or delta.finish_reason is not None:
                parts.append(self._in_full(delta))
            elif delta.text:
                parts += (self._heads[delta.index], _encode(delta.text), self._tail, self._after)
        return b"".join(parts)

    def _in_full(self, delta: Delta) -> bytes:
        logprobs = None
        if delta.logprobs is not None:
            logprobs = self._logprobs[delta.index].write(delta.logprobs, delta.token_ids)
        choice = {"index": delta.index, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish_reason}
        return self._choice_event(choice | {"stop_reason": delta.stop_reason} if delta.finish_reason else choice)
