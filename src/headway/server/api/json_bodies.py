"""Collects a generation's deltas into one JSON body for chat, completions and embeddings."""

from __future__ import annotations

import base64
from array import array
from typing import Any

import msgspec

from headway.outputs import shortened
from headway.server.api.choices import Choice, ParsedChoice, usage_of
from headway.server.api.generation import Generation
from headway.server.api.jobs import Job
from headway.server.api.logprobs import CompletionLogprobsWriter, LogprobForm, chat_position, prompt_position
from headway.server.api.prompts import PromptMaker
from headway.server.api.requests import EmbeddingRequest
from headway.server.api.response_models import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Embedding,
    EmbeddingList,
    EmbeddingUsage,
    PromptLogprob,
)
from headway.server.api.turns import JsonList, Turns, written_in_turns
from headway.wire.messages import PositionLogprobs

_encode = msgspec.json.Encoder().encode


async def chat_body(generation: Generation, model: str, prompts: PromptMaker) -> bytes:
    """Wait for all choices and return a chat completion as JSON."""
    choices = await _collect(generation)
    job = generation.job
    readers = [choice.reader for choice in choices if isinstance(choice, ParsedChoice)]
    body = ChatCompletion(
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
        usage=usage_of(generation, readers),
        prompt_logprobs=await _prompt_logprobs(generation, choices, 0, prompts),
        prompt_token_ids=job.prompts[0].token_ids if job.return_token_ids else msgspec.UNSET,
    )
    return msgspec.json.encode(body)


async def completion_body(generation: Generation, model: str, prompts: PromptMaker) -> bytes:
    """Wait for all choices and return plain completions as JSON."""
    choices = await _collect(generation)
    echoes = await echoed_texts(generation, prompts)
    job = generation.job
    body = Completion(
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
    return msgspec.json.encode(body)


async def embedding_body(generation: Generation, model: str, request: EmbeddingRequest) -> bytes:
    """Wait for all vectors and return them as JSON. They may have millions of numbers."""
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
    """Return the text that precedes the completions of each prompt: the prompt with `echo`, else an empty string."""
    if not generation.job.echo:
        return [""] * len(generation.job.prompts)
    return [
        prompt.text if prompt.text is not None else await prompts.text_of(prompt.token_ids)
        for prompt in generation.job.prompts
    ]


def _new_choice(job: Job) -> Choice:
    return Choice() if job.is_plain else ParsedChoice(job.answer)


async def _collect(generation: Generation) -> list[Choice]:
    choices = [_new_choice(generation.job) for _ in range(generation.job.num_choices)]
    async with generation:
        async for deltas in generation:
            for delta in deltas:
                choices[delta.index].take(delta)
    return choices


async def _chat_logprobs(job: Job, choice: Choice, prompts: PromptMaker) -> ChatLogprobs | None:
    if job.num_logprobs is None:
        return None
    form = LogprobForm.of(job, prompts)
    content: Any = await written_in_turns(chat_position(position, form) for position in choice.logprobs)
    return ChatLogprobs(content)


async def _completion_logprobs(
    generation: Generation, choices: list[Choice], index: int, prompts: PromptMaker
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
    generation: Generation, choices: list[Choice], index: int
) -> list[PositionLogprobs | None] | None:
    """Return the prompt's log-probabilities, which arrive with its first delta, for whichever choice that is."""
    first = index - index % generation.job.n
    siblings = choices[first : first + generation.job.n]
    return next((choice.prompt_logprobs for choice in siblings if choice.prompt_logprobs is not None), None)


async def _prompt_logprobs(
    generation: Generation, choices: list[Choice], index: int, prompts: PromptMaker
) -> list[dict[str, PromptLogprob] | None] | None:
    positions = _prompt_positions(generation, choices, index) if generation.job.wants_prompt_logprobs else None
    if positions is None:
        return None
    written: Any = await written_in_turns(prompt_position(position, prompts) for position in positions)
    return written
