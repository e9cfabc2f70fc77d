"""A request: its tokens, how many of them are in the KV cache, and its status.

    WAITING ──► RUNNING ──► FINISHED_*
     │   ▲      │    ▲
     ▼   │      ▼    │
    FETCHING   PREEMPTED        (its blocks are freed, its tokens are kept; they are recomputed when it is readmitted)

A request may be FETCHING at most once, if its first blocks are on disk or at another replica. It waits for them outside
the queue, and is queued again when they have arrived or have failed to arrive.

A waiting or fetching request can also finish directly, aborted or failed. A preempted request can as well, and a token
that was pending when it was preempted may also end it. Any other move raises.

A step may be launched before the result of the previous step is known. The token that a launched step will sample
already counts as one of the request's tokens, but its value is not known here yet: it is pending. Drafted tokens that
are being verified are pending too. They count as if all were right, and the wrong ones are retracted later.

    prompt    P P P P                    num_tokens 7: 4 prompt + 2 output + 1 pending
    output            A B
    pending               ?              the runner has its value, or will have it when it is needed
    computed  ■ ■ ■ ■ ■ ■                num_computed_tokens 6, num_remaining_tokens 1: it can be scheduled again
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headway.core.kv.blocks import block_digests, root_digest
from headway.core.request_options import DEFAULT_OPTIONS, RequestOptions

if TYPE_CHECKING:  # carried, never read here
    from headway.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """The state of a request. The `FINISHED_*` states are final."""

    WAITING = "waiting"
    FETCHING = "fetching"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"

    @property
    def is_finished(self) -> bool:
        """Whether this state is final."""
        return self in _FINISHED


_FINISHED = frozenset(
    (
        RequestStatus.FINISHED_STOPPED,
        RequestStatus.FINISHED_LENGTH,
        RequestStatus.FINISHED_ABORTED,
        RequestStatus.FINISHED_ERROR,
    )
)
_LEGAL_MOVES = {
    RequestStatus.WAITING: frozenset(
        (
            RequestStatus.RUNNING,
            RequestStatus.FETCHING,
            RequestStatus.FINISHED_ABORTED,
            RequestStatus.FINISHED_ERROR,
        )
    ),
    RequestStatus.FETCHING: frozenset(
        (RequestStatus.WAITING, RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)
    ),
    RequestStatus.RUNNING: _FINISHED | {RequestStatus.PREEMPTED},
    RequestStatus.PREEMPTED: _FINISHED | {RequestStatus.RUNNING},
}


class Request:
    """One sequence to be continued. The scheduler owns it; other layers refer to it by `request_id`.

    It holds only its tokens and its progress. The queue, the batch and the KV cache keep their notes in tables of
    their own.
    """

    __slots__ = (
        "_digests",
        "arrival_index",
        "arrival_s",
        "can_draft",
        "can_draft_ahead",
        "has_fetched",
        "is_beam",
        "is_fork",
        "is_guided",
        "max_kv_tokens",
        "max_total_tokens",
        "min_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_pending_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "options",
        "order_index",
        "output_token_ids",
        "prompt_token_ids",
        "reads_cache",
        "request_id",
        "sampling_params",
        "status",
        "stop_token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        *,
        max_tokens: int,
        min_tokens: int = 0,
        stop_token_ids: frozenset[int] = frozenset(),
        sampling_params: SamplingParams | None = None,
        reads_cache: bool = True,
        can_draft: bool = True,
        can_draft_ahead: bool = True,
        is_guided: bool = False,
        options: RequestOptions = DEFAULT_OPTIONS,
        is_beam: bool = False,
        fork_of: Request | None = None,
    ) -> None:
        """Create a waiting request. `is_guided`: a grammar or a list restricts its tokens. `is_beam`: it is one
        position of a beam search. `fork_of`: the request that this one continues; its prompt begins with that
        request's tokens, and it takes that request's place in the queue."""
        if not prompt_token_ids:
            raise ValueError(f"request {request_id}: the prompt is empty")
        if max_tokens < 1:
            raise ValueError(f"request {request_id}: max_tokens must be at least 1, not {max_tokens}")
        self.request_id = request_id
        self.prompt_token_ids = tuple(prompt_token_ids)
        self.output_token_ids: list[int] = []
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.max_total_tokens = self.num_prompt_tokens + max_tokens
        self.max_kv_tokens = self.max_total_tokens - 1  # the last token of a finished request is never fed back
        self.min_tokens = min_tokens
        self.stop_token_ids = stop_token_ids
        self.options = options
        self.sampling_params = sampling_params  # carried to the runner, never read here
        self.reads_cache = reads_cache  # False: all prompt tokens must be computed, since a result is wanted for each
        self.can_draft = can_draft and not is_beam  # whether its tokens may be drafted and verified
        # Whether they may be drafted before it is known how many tokens the request has.
        self.can_draft_ahead = self.can_draft and can_draft_ahead and not is_guided
        self.is_guided = is_guided
        self.is_beam = is_beam
        self.is_fork = fork_of is not None
        self.status = RequestStatus.WAITING
        self.arrival_index = -1  # unique among all requests of a scheduler
        self.order_index: int = -1 if fork_of is None else fork_of.order_index  # breaks ties; a fork has its ancestor's
        self.arrival_s = 0.0
        self.num_tokens = self.num_prompt_tokens  # prompt, output and pending tokens together
        self.num_pending_tokens = 0  # tokens that launched steps will sample
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0  # tokens found in the prefix cache when it was first admitted
        self.num_preemptions = 0
        self.has_fetched = False  # whether it has been decided if it waits for remote blocks: that is decided once
        self._digests: list[bytes] = [] if fork_of is None else fork_of._digests.copy()

    def resume(self, output_token_ids: Sequence[int]) -> None:
        """Continue after these output tokens, which were generated elsewhere, as if it had been preempted there. Call
        this before it is queued."""
        self.output_token_ids = list(output_token_ids)
        self.num_tokens = self.num_prompt_tokens + len(self.output_token_ids)

    def ends_with(self, num_tokens: int, last_token_id: int) -> RequestStatus | None:
        """The final status if the output has `num_tokens` tokens and ends with `last_token_id`; None if it goes on."""
        if last_token_id in self.stop_token_ids and num_tokens >= self.min_tokens:
            return RequestStatus.FINISHED_STOPPED
        return RequestStatus.FINISHED_LENGTH if self.num_prompt_tokens + num_tokens >= self.max_total_tokens else None

    @property
    def shown_as(self) -> str:
        """The name that reports and logs show for it."""
        return self.request_id

    @property
    def num_inherited_tokens(self) -> int:
        """How many tokens of its prompt were generated by the requests that it continues."""
        return 0

    @property
    def num_output_tokens(self) -> int:
        """How many tokens have been generated so far."""
        return len(self.output_token_ids)

    def known_tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Return tokens `start .. end - 1`; none of them may be pending."""
        tokens = self.prompt_token_ids[start:end]
        if end > self.num_prompt_tokens:
            first = max(0, start - self.num_prompt_tokens)
            tokens += tuple(self.output_token_ids[first : end - self.num_prompt_tokens])
        return tokens

    def block_digests(self, block_size: int, num_blocks: int) -> list[bytes]:
        """Return the digests of at least its first `num_blocks` full blocks, whose tokens must be known. Each digest is
        computed once, so the block size must always be the same. The caller must not change the list."""
        digests = self._digests
        if len(digests) < num_blocks:
            before = digests[-1] if digests else root_digest(self.options.cache_salt)
            tokens = self.known_tokens(len(digests) * block_size, num_blocks * block_size)
            digests += block_digests(before, tokens, block_size)
        return digests

    def num_shareable_blocks(self, block_size: int) -> int:
        """How many full blocks may come from the cache: at least one token must be computed, to sample the next."""
        return (self.num_known_tokens - 1) // block_size

    @property
    def num_known_tokens(self) -> int:
        """The number of prompt and output tokens, without pending ones."""
        return self.num_tokens - self.num_pending_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """How many tokens can be scheduled: those that are not computed yet. The last token of a finished request is
        never computed, so a request whose last token is pending has nothing left to schedule."""
        num_tokens = self.num_tokens if self.num_tokens <= self.max_kv_tokens else self.max_kv_tokens
        return num_tokens - self.num_computed_tokens

    def move_to(self, status: RequestStatus) -> None:
        """Change the status. Raises `RuntimeError` and changes nothing if the move is illegal."""
        if status not in _LEGAL_MOVES.get(self.status, frozenset()):
            raise RuntimeError(f"request {self.request_id}: illegal move {self.status.name} -> {status.name}")
        self.status = status

    def arrive(self, index: int, *, now_s: float) -> None:
        """Take its place in the order of arrival; a fork keeps the place of the request it continues."""
        self.arrival_index = index
        self.arrival_s = now_s
        if self.order_index < 0:
            self.order_index = index

    def admit(self, num_computed_tokens: int) -> None:
        """Enter the batch; this many of its tokens were found in the KV cache."""
        self.move_to(RequestStatus.RUNNING)
        self.num_computed_tokens = num_computed_tokens
        if not self.num_preemptions:
            self.num_cached_tokens = num_computed_tokens

    def preempt(self) -> None:
        """Leave the batch. It keeps its tokens, but none of them counts as computed any more."""
        self.move_to(RequestStatus.PREEMPTED)
        self.num_computed_tokens = 0
        self.num_preemptions += 1

    def advance(self, num_tokens: int, num_new: int) -> None:
        """Count a launched step that computes `num_tokens` tokens and samples up to `num_new` new ones."""
        self.num_computed_tokens += num_tokens
        if num_new:
            self.num_pending_tokens += num_new
            self.num_tokens += num_new

    def retract(self, num_tokens: int) -> None:
        """Remove pending tokens whose drafts were wrong. If it was preempted since, none of them counts as computed."""
        self.num_pending_tokens -= num_tokens
        self.num_tokens -= num_tokens
        if self.status is RequestStatus.RUNNING:
            self.num_computed_tokens -= num_tokens

    def append_output_token(self, token_id: int) -> RequestStatus | None:
        """Add a generated token; if one was pending, it becomes known. Returns the final status if this token ends the
        request, but does not set it."""
        self.output_token_ids.append(token_id)
        if self.num_pending_tokens:
            self.num_pending_tokens -= 1
        else:
            self.num_tokens += 1
        return self.ends_with(len(self.output_token_ids), token_id)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, pending={self.num_pending_tokens}, computed={self.num_computed_tokens})"
        )
