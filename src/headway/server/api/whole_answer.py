"""Answers that are sent at once: choices are collected until all of them have ended."""

from __future__ import annotations

from typing import Literal, cast

import msgspec

from headway.rpc.messages import Delta, PositionLogprobs
from headway.server.api.answer_logprobs import CompletionLogprobsWriter, chat_logprobs, prompt_logprobs
from headway.server.api.answers import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    FinishReason,
    PromptLogprob,
)
from headway.server.api.generation import Generation
from headway.server.api.prompts import PromptMaker


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
