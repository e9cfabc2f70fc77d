"""The records between the scheduler and the runner: a step's plan, its result, and the updates of requests.

Records that every step creates once per request are named tuples: they cost a third of a frozen dataclass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:  # carried, never read here
    from headway.sampling_params import SamplingParams

from headway.core.kv.moves import NO_MOVES, BlockMoves
from headway.core.request import Request, RequestStatus

make_tuple = tuple.__new__
"""Creates a record from (named tuple class, values), in half the time of the class's constructor."""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """All that the runner has to know of a request that is admitted, for the first time or after a preemption."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    sampling_params: SamplingParams | None
    """None if no token is sampled, as in a simulation."""
    num_computed_tokens: int = 0
    """How many of its tokens are in the KV cache already."""
    block_ids: tuple[int, ...] = ()
    """The blocks with these tokens: the beginning of its block table."""


class ScheduledRequest(NamedTuple):
    """One request's share of a step."""

    request_id: str
    num_tokens: int
    """How many tokens to compute."""
    num_computed_tokens: int
    """How many tokens are in the cache already; the first token to compute has this position."""
    new_block_ids: tuple[int, ...]
    """Blocks appended to its block table for this step."""
    samples: bool
    """Whether this step computes the request's last token, so that it samples a new one. The last token may be pending,
    because an earlier step in flight samples it: then only the runner knows its value."""
    drafts: tuple[int, ...] = ()
    """Drafted tokens that follow the request's last one; they are included in the tokens to compute. The step returns
    the drafts up to the first one that would not have been sampled, and one more sampled token."""


def advance_requests(scheduled: Mapping[Request, ScheduledRequest]) -> int:
    """Advance requests by their shares of a step. Returns the number of tokens in the step."""
    num_scheduled_tokens = 0
    for request, (_, num_tokens, _, _, samples, drafts) in scheduled.items():  # a third of the time of lookups by name
        num_scheduled_tokens += num_tokens
        request.advance(num_tokens, samples + len(drafts))
    return num_scheduled_tokens


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The plan of one step: the admitted requests, the share of each request, and the requests that have left the batch
    since the previous step.

    An id may be among the departed and the admitted requests; the departure comes first. A plan with nothing to compute
    may still have transfers to begin.
    """

    step_id: int
    new_requests: tuple[NewRequest, ...]
    scheduled: tuple[ScheduledRequest, ...]
    preempted_request_ids: tuple[str, ...]
    finished_request_ids: tuple[str, ...]
    num_scheduled_tokens: int
    moves: BlockMoves = NO_MOVES

    @classmethod
    def empty(cls, step_id: int, moves: BlockMoves = NO_MOVES) -> SchedulerOutput:
        """Create a plan with nothing to compute."""
        return cls(step_id, (), (), (), (), num_scheduled_tokens=0, moves=moves)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.scheduled

    def without(self, request_ids: Container[str]) -> SchedulerOutput:
        """Return the plan without the shares of these requests."""
        scheduled = tuple(share for share in self.scheduled if share.request_id not in request_ids)
        num_tokens = sum(share.num_tokens for share in scheduled)
        return dataclasses.replace(self, scheduled=scheduled, num_scheduled_tokens=num_tokens)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the token there, of the most likely tokens, and of those that the request
    names."""

    token_id: int
    logprob: float
    rank: int
    """1 + how many tokens are more likely."""
    top_ids: list[int]
    """The most likely tokens, most likely first; equally likely ones by id."""
    top_logprobs: list[float]
    named_ids: Sequence[int] = ()
    named_logprobs: Sequence[float] = ()


@dataclass(slots=True)
class SampledTokens:
    """The tokens that a step sampled for one request. If `error` is set, it says why the request cannot continue.

    It is never changed, but it is not frozen: every step creates one per request, and a frozen dataclass takes three
    times as long to create."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Logprobs of each token, if the request asked for them."""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of consecutive prompt tokens; the first token is at position `start`."""

    start: int
    values: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    """The sum of the hidden states of consecutive prompt tokens; the first token is at position `start`."""

    start: int
    num_tokens: int
    total: bytes
    """The vector's values as float32 bytes."""


class RequestUpdate(NamedTuple):
    """What a step changed for one request: new tokens and perhaps its end, or results about its prompt."""

    request_id: str
    new_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_status: RequestStatus | None
    error: str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    last_status: RequestStatus | None = None
    """Set if these are its last tokens, but its end is reported by a later update: the final status of that update."""
    pooled: PooledPrompt | None = None


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The result of a step, by request id. Only requests that have sampled a token or failed have an entry."""

    sampled: Mapping[str, SampledTokens]
    prompt_logprobs: Mapping[str, PromptLogprobs]
    """For requests that asked for them: logprobs of the prompt tokens whose predecessors were computed in this step.
    After a preemption some of them are repeated."""
    pooled: Mapping[str, PooledPrompt] = field(default_factory=dict)
    """For requests that want a vector: the sum over the prompt tokens computed in this step. After a preemption it
    continues after the last token, or starts over."""
    has_prepared: bool = False
    """Whether the step prepared something for later ones, such as a CUDA graph. Its time then says nothing about
    theirs."""
    num_padding_tokens: int = 0
    """Tokens that the forward pass computed only to fill its batch up to the size of a graph."""
    stopped: frozenset[str] = frozenset()
    """Requests that end without a token of this step, because no token is allowed next."""


class PendingStep(Protocol):
    """A step that has been submitted."""

    def result(self) -> ModelRunnerOutput:
        """Wait until the step has run and return its result. Raises if the step failed. Called once per step, in order
        of submission."""
        ...


@dataclass(frozen=True, slots=True)
class BatchSnapshot:
    """The state of the scheduler right after it has planned a step: all that a step report needs but the outcome."""

    output: SchedulerOutput
    requests: tuple[Request, ...]
    """The request of each of `output.scheduled`; later steps change them."""
    num_tokens: tuple[int, ...]
    """How many tokens each request has, including the one that the step samples."""
    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_used_slots: int
