"""A request to a server and what came back: the body that is sent, and the events that are read.

A client sees events, not tokens, and a server may put several tokens into one event (or none, while a character is
incomplete). So times are those of events with text, and the number of tokens comes from the server's `usage`; if that
is missing, events are counted.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from headway.core.request_options import DEFAULT_OPTIONS, RequestOptions
from headway.errors import ConfigError
from headway.server.api.record_fields import option_fields
from headway_lab.bench.http_client import EventParser
from headway_lab.bench.timelines import RequestTimeline
from headway_lab.workload.bench_requests import BenchRequest

MAX_ERROR_CHARS = 300
Prompt = str | Sequence[int]


@dataclass(frozen=True)
class ServedRequest:
    """A request that is going to be sent. The times are those of `BenchRequest`."""

    prompt: Prompt
    """Text, or token ids."""
    num_output_tokens: int
    arrival_s: float = 0.0
    options: RequestOptions = DEFAULT_OPTIONS
    after: int | None = None
    think_s: float = 0.0

    @classmethod
    def of(cls, request: BenchRequest, prompt: Prompt | None = None) -> ServedRequest:
        """The same request, with its ids or with this text as its prompt."""
        if request.num_choices != 1:
            raise ConfigError("A load on a server has one answer for each request.")
        return cls(
            request.prompt_token_ids if prompt is None else prompt,
            request.num_output_tokens,
            request.arrival_s,
            request.options,
            request.after,
            request.think_s,
        )

    @property
    def num_prompt_tokens(self) -> int:
        """The number of prompt tokens; 0 if only the server knows it."""
        return 0 if isinstance(self.prompt, str) else len(self.prompt)


@dataclass(frozen=True)
class Dialect:
    """The form in which requests are sent to a server."""

    kind: Literal["completions", "chat"]
    model: str
    temperature: float = 0.0
    ignore_eos: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    is_plain: bool = False
    """Whether the requests' scheduling options are left out."""

    def body(self, request: ServedRequest) -> bytes:
        """The JSON of a request."""
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.num_output_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.kind == "chat":
            fields["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            fields["prompt"] = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if not self.is_plain:
            fields |= option_fields(request.options)
        return json.dumps(fields | dict(self.extra_body)).encode()


def shared_share(work: Sequence[ServedRequest]) -> float:
    """The share of the prompts that others of the same work begin with, too: what a prefix cache can find without
    having seen them before. It is counted in tokens for ids and in characters for texts."""
    texts = sorted(request.prompt for request in work if isinstance(request.prompt, str))
    ids = sorted(list(request.prompt) for request in work if not isinstance(request.prompt, str))
    num_shared = _num_shared(texts) + _num_shared(ids)
    return num_shared / max(1, sum(len(request.prompt) for request in work))


def _num_shared(ordered: Sequence[Prompt]) -> int:
    """The length shared with earlier prompts. In sorted order, a prompt shares most with the one right before it."""
    total = 0
    for one, other in itertools.pairwise(ordered):
        total += len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other))))
    return total


@dataclass
class ServedTimeline(RequestTimeline):
    """The life of a request as its client sees it. `token_times_s` are those of events with text."""

    sent_s: float = 0.0
    """When the request was sent; later than `arrival_s` by as much as this program was late."""
    num_reported_tokens: int | None = None
    finished_s: float | None = None
    """When the event with the reason of the end, or the failure, arrived."""
    error: str | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_times_s) if self.num_reported_tokens is None else self.num_reported_tokens

    @property
    def is_complete(self) -> bool:
        """Whether it has its answer. A shorter answer than asked for counts, since models end when they want."""
        return self.error is None and bool(self.token_times_s)

    @property
    def is_short(self) -> bool:
        """Whether it is complete, but has another number of tokens than asked for."""
        return self.is_complete and self.num_output_tokens != self.num_wanted_tokens

    @property
    def end_s(self) -> float | None:
        return self.finished_s if self.finished_s is not None else super().end_s


class AnswerReader:
    """Writes the events of a stream into a timeline, with times after `started_s`."""

    def __init__(self, timeline: ServedTimeline, started_s: float) -> None:
        self._timeline = timeline
        self._started_s = started_s
        self._events = EventParser()
        self._has_finished = False

    def feed(self, body: bytes, at_s: float) -> None:
        """Take a piece of the stream, and the time when it arrived."""
        for payload in self._events.feed(body):
            if payload == b"[DONE]":
                self._has_finished = True
            else:
                self._read(payload, at_s - self._started_s)

    def end(self) -> None:
        """The HTTP response has ended without an error."""
        timeline = self._timeline
        if timeline.error is None and not self._has_finished:
            timeline.error = "the stream ended without a reason"
        elif timeline.error is None and not timeline.token_times_s:
            timeline.error = "the answer has no event with a choice"

    def _read(self, payload: bytes, at_s: float) -> None:
        timeline = self._timeline
        event = json.loads(payload)
        if event.get("error") is not None:
            timeline.error, timeline.finished_s = error_text(event), at_s
            return
        if usage := event.get("usage"):
            timeline.num_reported_tokens = usage.get("completion_tokens")
            timeline.num_prompt_tokens = usage.get("prompt_tokens", timeline.num_prompt_tokens)
            timeline.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if not (choices := event.get("choices")):
            return
        choice = choices[0]
        if _has_text(choice):
            timeline.token_times_s.append(at_s)
        if choice.get("finish_reason") is not None:
            self._has_finished, timeline.finished_s = True, at_s
            if not timeline.token_times_s:  # its only tokens have no text
                timeline.token_times_s.append(at_s)


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text"))
    return bool(delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"))


def error_text(answer: Any) -> str:
    """The error in an answer, on one line."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:MAX_ERROR_CHARS]
