"""Outputs of requests: the records that `LLM.generate` returns and streaming yields.

`CompletionOutput` and `RequestOutput` are not frozen. Streaming makes one of each per token, and freezing them would
double the cost.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from headway.errors import InvalidRequestError, RequestFailedError

FinishReason = Literal["stop", "length", "abort", "error"]
"""stop: end-of-sequence, a stop token or a stop string · length: max_tokens or the context is used up · abort: by the
caller · error: this request failed; the engine still works."""

Streaming = bool | Literal["full", "delta"]
"""When a request gives outputs, and what they contain. False: a single output, at its end · "full" or True: an output
per step that changes it, with everything so far · "delta": the same, with only the part that is new since the previous
output. The cost of long outputs is quadratic in their length with "full", and linear with "delta"."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability under the model, before any sampling parameter changed it."""

    logprob: float
    rank: int | None = None
    """1 is the most likely token of the vocabulary."""
    decoded_token: str | None = None


LogprobsOfOnePosition = dict[int, Logprob]
"""Token id → its logprob: the chosen (or given) token first, then the most likely ones in order."""


def forecast_error(expected_s: float, actual_s: float, *, least_s: float = 0.2) -> float:
    """Return the error of a forecast wait as a share of the actual one; above 0 if less was waited than expected. It is
    never divided by less than `least_s`: in a shorter wait some milliseconds mean little."""
    return (expected_s - actual_s) / max(actual_s, least_s)


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """The times of one request's events, on the engine's clock (seconds), and its preemptions."""

    arrival_time_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0

    @property
    def queue_time_s(self) -> float | None:
        """From arrival to the first step that computed one of its tokens."""
        return None if self.first_scheduled_s is None else self.first_scheduled_s - self.arrival_time_s

    @property
    def time_to_first_token_s(self) -> float | None:
        """From arrival to the first output token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_time_s

    @property
    def e2e_latency_s(self) -> float | None:
        """From arrival to the last output token."""
        return None if self.finished_s is None else self.finished_s - self.arrival_time_s

    def time_per_output_token_s(self, num_output_tokens: int) -> float | None:
        """Mean time of each output token after the first; None while unfinished or with fewer than two tokens."""
        if self.first_token_s is None or self.finished_s is None or num_output_tokens < 2:
            return None
        return (self.finished_s - self.first_token_s) / (num_output_tokens - 1)


@dataclass(slots=True)
class CompletionOutput:
    """The present state of one of a request's `n` completions. In a delta, text, tokens and logprobs are only the new
    ones."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """Sum of the chosen tokens' logprobs; None unless `logprobs` was requested or beams were compared by it."""
    logprobs: list[LogprobsOfOnePosition] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for the model's own end-of-sequence token."""

    @property
    def finished(self) -> bool:
        """Whether this completion has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request's prompt and the present state of its completions. A delta has only the completions that changed, and
    only the first delta has prompt logprobs."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[LogprobsOfOnePosition | None] | None
    """One entry per prompt token; the first is None, because no token precedes it. None unless requested."""
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values were found in the prefix cache."""
    metrics: RequestMetrics | None = None
    embedding: array[float] | None = None
    """The unscaled embedding of the prompt, in the last output of a request with `pooling`."""


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """An embedding vector."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """The result of `LLM.embed` for one prompt, in vLLM's form."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    num_cached_tokens: int = 0
    finished: bool = True

    @classmethod
    def of(cls, output: RequestOutput, *, dimensions: int | None, normalize: bool) -> EmbeddingRequestOutput:
        """Make it from the output of a request that has ended. Raises `RequestFailedError` if that has no embedding."""
        if output.embedding is None:
            reason = output.outputs[0].finish_reason if output.outputs else None
            raise RequestFailedError({output.request_id: f"it ended ({reason}) before its prompt was read"}, [output])
        vector = shortened(output.embedding, dimensions=dimensions, normalize=normalize)
        embedding = EmbeddingOutput(vector.tolist())
        return cls(output.request_id, output.prompt_token_ids, embedding, output.num_cached_tokens)


def check_dimensions(dimensions: int | None, hidden_size: int) -> None:
    """Raise `InvalidRequestError` if this model's vectors cannot be cut to `dimensions` numbers."""
    is_count = isinstance(dimensions, int) and not isinstance(dimensions, bool)
    if dimensions is not None and not (is_count and 1 <= dimensions <= hidden_size):
        raise InvalidRequestError(
            f"dimensions must be a whole number from 1 to {hidden_size}, the length of this model's vectors; "
            f"it is {dimensions!r:.80}",
            param="dimensions",
        )


def shortened(vector: Sequence[float], *, dimensions: int | None, normalize: bool) -> array[float]:
    """The first `dimensions` numbers of a vector in single precision, scaled to length 1 with `normalize`."""
    kept = vector if dimensions is None else vector[:dimensions]
    length = math.sqrt(math.fsum(value * value for value in kept)) if normalize else 1.0
    return array("f", [value / length for value in kept] if length > 0.0 else kept)


class SilentProgress(NamedTuple):
    """The progress of one step for a request without output before its end: a beam search, or one with `best_of`."""

    num_started: int
    """Sequences that got their first token. A search starts with all its beams at once."""
    num_tokens: int
    """Tokens that were added to its sequences, whether or not these will be returned."""


class Delivered(NamedTuple):
    """The part of a completion that was delivered to its reader, when its request continues in another engine."""

    token_ids: list[int]
    is_finished: bool = False


class GrowingOutput:
    """Accumulates a request's deltas. Its cost is linear in their number, unlike a record of each state."""

    def __init__(self, num_completions: int) -> None:
        self._completions = [CompletionOutput(index, "", []) for index in range(num_completions)]
        self._texts: list[list[str]] = [[] for _ in range(num_completions)]
        self._last: RequestOutput | None = None
        self._prompt_logprobs: list[LogprobsOfOnePosition | None] | None = None

    def add(self, delta: RequestOutput) -> None:
        """Take the next delta."""
        self._last = delta
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs
        for new in delta.outputs:
            grown = self._completions[new.index]
            self._texts[new.index].append(new.text)
            grown.token_ids += new.token_ids
            if new.logprobs is not None:
                grown.logprobs = new.logprobs if grown.logprobs is None else grown.logprobs + new.logprobs
            grown.cumulative_logprob = new.cumulative_logprob
            grown.finish_reason, grown.stop_reason = new.finish_reason, new.stop_reason

    def output(self) -> RequestOutput:
        """A record of the state after the last delta; later ones do not change it."""
        assert self._last is not None, "there is no output before the first delta"
        outputs = []
        for grown, texts in zip(self._completions, self._texts, strict=True):
            texts[:] = ["".join(texts)]
            logprobs = None if grown.logprobs is None else grown.logprobs.copy()
            outputs.append(replace(grown, text=texts[0], token_ids=grown.token_ids.copy(), logprobs=logprobs))
        return replace(self._last, prompt_logprobs=self._prompt_logprobs, outputs=outputs)


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One of the sequences that `LLM.beam_search` has found, in vLLM's form: tokens and text begin with the prompt."""

    tokens: list[int]
    """Prompt and output tokens, including a stop token at the end."""
    text: str
    cum_logprob: float
    """Sum of the output tokens' logprobs."""
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The result of `LLM.beam_search` for one prompt."""

    sequences: list[BeamSearchSequence]
    """The best first."""
