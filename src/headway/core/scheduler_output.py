"""The records that cross from decisions to tensors and back: one step's plan, its result, and what it changed.

Those of which every step makes one per request are named tuples: they cost a third of a frozen dataclass.
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
"""(named tuple class, values) → a record, in half the time of the class's own constructor."""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """All the runner has to know of a request that enters the batch: for the first time, or back from preemption."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    sampling_params: SamplingParams | None
    """None where no token is chosen, as in a simulation."""
    num_computed_tokens: int = 0
    """How many of its tokens are in the KV cache already, computed for requests that began with the same."""
    block_ids: tuple[int, ...] = ()
    """The blocks with these tokens: the beginning of its table."""


class ScheduledRequest(NamedTuple):
    """One request's share of a step."""

    request_id: str
    num_tokens: int
    """How many tokens to compute."""
    num_computed_tokens: int
    """How many are in the cache already; the first token to compute has this position."""
    new_block_ids: tuple[int, ...]
    """Blocks appended to its table for this step."""
    samples: bool
    """Whether this step reaches the request's last token, so that a new token comes out. The last token may be one
    that an earlier step, still under way, samples: then only the runner knows it."""
    drafts: tuple[int, ...] = ()
    """Guesses of the tokens that follow the request's last one: the last of the tokens to compute. The longest
    beginning of them that would have been sampled anyway comes out, and the token sampled after it."""


def advance_requests(scheduled: Mapping[Request, ScheduledRequest]) -> int:
    """Advance requests by their shares of a step. Returns the number of tokens in it."""
    num_scheduled_tokens = 0
    for request, (_, num_tokens, _, _, samples, drafts) in scheduled.items():  # a third of the time of lookups by name
        num_scheduled_tokens += num_tokens
        request.advance(num_tokens, samples + len(drafts))
    return num_scheduled_tokens


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: requests that enter the batch, what each computes, and requests that have left since the step before.

    A request id among those that left may be among those that enter: leaving comes first. A plan with nothing to
    compute may have transfers to begin.
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
        """A plan to compute nothing."""
        return cls(step_id, (), (), (), (), num_scheduled_tokens=0, moves=moves)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.scheduled

    def without(self, request_ids: Container[str]) -> SchedulerOutput:
        """The plan with nothing to compute for these requests."""
        scheduled = tuple(share for share in self.scheduled if share.request_id not in request_ids)
        num_tokens = sum(share.num_tokens for share in scheduled)
        return dataclasses.replace(self, scheduled=scheduled, num_scheduled_tokens=num_tokens)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the token that stands there, of the most likely ones, and of those that the
    request names."""

    token_id: int
    logprob: float
    rank: int
    """1 + how many tokens are more likely."""
    top_ids: list[int]
    """Most likely first; equally likely ones by id."""
    top_logprobs: list[float]
    named_ids: Sequence[int] = ()
    named_logprobs: Sequence[float] = ()


@dataclass(slots=True)
class SampledTokens:
    """What one request got out of a step. `error` set: the request cannot go on, and why. Never changed: it is not
    frozen, since every step makes one per request, and a frozen one takes three times as long to make."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token, if the request asked for them."""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of consecutive prompt tokens, the first of them at position `start`."""

    start: int
    values: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    """The sum of the hidden states of consecutive prompt tokens, the first of them at position `start`."""

    start: int
    num_tokens: int
    total: bytes
    """Of float32."""


class RequestUpdate(NamedTuple):
    """What a step changed for one request: new tokens and perhaps its end, or what is told of its prompt."""

    request_id: str
    new_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_status: RequestStatus | None
    error: str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    last_status: RequestStatus | None = None
    """These are its last tokens, but a later update says that it has ended, and that will be like this."""
    pooled: PooledPrompt | None = None


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The result of a step, keyed by request id. Only requests that sampled, or failed, have an entry."""

    sampled: Mapping[str, SampledTokens]
    prompt_logprobs: Mapping[str, PromptLogprobs]
    """For requests that asked: the prompt tokens whose predecessors were computed in this step. A preempted request
    gives some of them again."""
    pooled: Mapping[str, PooledPrompt] = field(default_factory=dict)
    """For requests that want a vector: the prompt tokens that were computed in this step. A preempted request goes on
    where it was, or begins again."""
    has_prepared: bool = False
    """Whether it waited for something that later steps find, like a CUDA graph: its time says nothing about theirs."""
    stopped: frozenset[str] = frozenset()
    """Requests that end before the token of this step: there is none that they may choose."""


class PendingStep(Protocol):
    """A step that has been submitted."""

    def result(self) -> ModelRunnerOutput:
        """Wait until the step has run. Called once per step, in order of submission; raises if the step failed."""
        ...


@dataclass(frozen=True, slots=True)
class BatchSnapshot:
    """The state of the scheduler right after it has planned a step: all that a report says of it but the outcome."""

    output: SchedulerOutput
    requests: tuple[Request, ...]
    """One for each of `output.scheduled`; later steps change them."""
    num_tokens: tuple[int, ...]
    """How many tokens each has, with the one that the step samples."""
    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_used_slots: int
