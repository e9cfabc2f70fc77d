"""Writes chat completions and plain completions as streams of server-sent events.

Nearly every event differs from the one before only in its text. The constant bytes are therefore encoded once per
choice, and each token only costs the encoding of its text:

    data: {"id":...,"choices":[{"index":0,"delta":{"content":  "text"  },"logprobs":null,"finish_reason":null}]}
    └──────────────────── head, made once ──────────────────┘          └──────────── tail, made once ─────────┘
"""

from __future__ import annotations

from typing import Any

import msgspec

from headway.server.api.api_errors import ApiError
from headway.server.api.choices import OutputReader, call_id, usage_of
from headway.server.api.generation import Generation
from headway.server.api.logprobs import CompletionLogprobsWriter, LogprobForm, chat_logprobs
from headway.server.api.prompts import PromptMaker
from headway.server.api.response_models import Usage
from headway.server.api.wait_report import with_metrics
from headway.structured.output_pieces import CallArguments, CallBegin, ContentPiece, Piece, ReasoningPiece
from headway.wire.messages import Delta

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def event(payload: bytes) -> bytes:
    """Return one server-sent event. The payload is JSON, which has no line breaks here."""
    return b"data: " + payload + b"\n\n"


class _Events:
    """What both kinds of stream share: the bytes around `choices`."""

    def __init__(self, generation: Generation, model: str, object_name: str) -> None:
        self._generation = generation
        self._job = generation.job
        fields = {"id": generation.id, "object": object_name, "created": generation.created, "model": model}
        self._before = b"data: " + _encode(fields)[:-1] + b',"choices":['
        # With include_usage, every event has the field `usage`, and only the last one fills it, as in OpenAI's API.
        self._after = b'],"usage":null}\n\n' if self._job.include_usage else b"]}\n\n"
        self._num_tokens = self._num_ended = 0
        self._count(0)

    def _count(self, num_tokens: int) -> None:
        """With continuous_usage_stats, add tokens to the counts that every event carries, as in vLLM."""
        if self._job.continuous_usage:
            self._num_tokens += num_tokens
            prompt, output = self._job.num_prompt_tokens, self._num_tokens
            usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
            self._after = b'],"usage":' + _encode(usage) + b"}\n\n"

    def _choice_event(self, choice: dict[str, Any], delta: Delta | None = None) -> bytes:
        """Return the event of a choice, with the token ids of `delta` if they are requested."""
        if delta is not None and self._job.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return self._before + _encode(choice) + (self._after_end() if choice["finish_reason"] else self._after)

    def _after_end(self) -> bytes:
        """Return what follows a choice that has ended. Without an event for the usage, the event of the last of them
        has the metrics."""
        self._num_ended += 1
        if self._job.include_usage or self._num_ended < self._job.num_choices:
            return self._after
        return with_metrics(self._after[:-2], self._generation.metrics) + b"\n\n"

    def end(self) -> bytes:
        """Return the last events."""
        if not self._job.include_usage:
            return DONE
        metrics = with_metrics(b'],"usage":' + _encode(self._usage) + b"}", self._generation.metrics)
        return self._before + metrics + b"\n\n" + DONE

    @property
    def _usage(self) -> Usage:
        return self._generation.usage

    def fail(self, failure: ApiError) -> bytes:
        """Return the last events of a stream that failed."""
        return event(failure.body) + DONE


class ChatEvents(_Events):
    """Writes a chat completion of plain text as chunks."""

    def __init__(self, generation: Generation, model: str, prompts: PromptMaker) -> None:
        super().__init__(generation, model, "chat.completion.chunk")
        self._form = LogprobForm.of(self._job, prompts)
        self._heads = [
            self._before + b'{"index":%d,"delta":{"content":' % index for index in range(self._job.num_choices)
        ]
        self._tail = b'},"logprobs":null,"finish_reason":null}'

    def begin(self) -> bytes:
        """Return the first event of every choice: its role and, if token ids are requested, those of the prompt."""
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
        """Return all events for these deltas."""
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


class ParsedChatEvents(ChatEvents):
    """Writes a chat completion of text, reasoning and tool calls as chunks."""

    def __init__(self, generation: Generation, model: str, prompts: PromptMaker) -> None:
        super().__init__(generation, model, prompts)
        self._readers = [OutputReader(self._job.answer) for _ in range(self._job.num_choices)]

    def write(self, deltas: list[Delta]) -> bytes:
        """Return all events for these deltas."""
        parts: list[bytes] = []
        for delta in deltas:
            self._count(len(delta.token_ids))
            changes = [_change(piece) for piece in self._readers[delta.index].read(delta)]
            logprobs = None if delta.logprobs is None else chat_logprobs(delta.logprobs, self._form)
            if logprobs is not None or (self._job.return_token_ids and delta.token_ids):
                changes = changes or [{"content": ""}]
            for place, change in enumerate(changes):
                # Token ids are sent once, although a token may end one part and begin the next.
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
        return usage_of(self._generation, self._readers)


def _change(piece: Piece) -> dict[str, Any]:
    """Return a piece as the `delta` of a chunk."""
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
    """Writes plain completions as chunks."""

    def __init__(self, generation: Generation, model: str, prompts: PromptMaker, echoes: list[str]) -> None:
        super().__init__(generation, model, "text_completion")
        self._echoes = echoes
        self._heads = [self._before + b'{"index":%d,"text":' % index for index in range(self._job.num_choices)]
        self._tail = b',"logprobs":null,"finish_reason":null}'
        form = LogprobForm.of(self._job, prompts)
        self._logprobs = [CompletionLogprobsWriter(form) for _ in range(self._job.num_choices)]

    def begin(self) -> bytes:
        """Return the first events: each choice's prompt with `echo`, and its token ids with `return_token_ids`."""
        if self._job.return_token_ids:
            return b"".join(self._choice_event(self._first(index)) for index in range(self._job.num_choices))
        return b"".join(
            head + _encode(self._echoes[index // self._job.n]) + self._tail + self._after
            for index, head in enumerate(self._heads)
            if self._echoes[index // self._job.n]
        )

    def write(self, deltas: list[Delta]) -> bytes:
        """Return all events for these deltas."""
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
