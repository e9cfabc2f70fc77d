"""A request: a list of tokens, how many of them are in the KV cache, and where it stands in its life.

    WAITING ──► RUNNING ──► FINISHED_*
     │   ▲      │    ▲
     ▼   │      ▼    │
    FETCHING   PREEMPTED        (its blocks are gone, its tokens are kept; they are computed again when it comes back)

A request whose first blocks are further away than host memory may be FETCHING, once: it waits for them outside the
queue, and is queued again when they have come or cannot.

A waiting or fetching request can also finish directly: aborted, or failed. So can a preempted one, which may also be
ended by a token that was pending when it was preempted. Any other move raises.

Steps may be launched before the result of the step before is known. The token that a launched step is going to sample
counts as one of the request's tokens, only its value is not known here yet: it is pending. So are tokens that were
drafted and are being verified: they count as if all were right, and those that were not are taken back.

    prompt    P P P P                    num_tokens 7: 4 prompt + 2 output + 1 pending
    output            A B
    pending               ?              the runner has it, or will have it when it is needed
    computed  ■ ■ ■ ■ ■ ■                num_computed_tokens 6, num_remaining_tokens 1: it can be planned again
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
    """Where a request stands. The `FINISHED_*` states are final."""

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
    """One sequence to be continued. The scheduler owns it; other layers know it by `request_id`.

    It holds its tokens and its progress only: what a queue, the batch or the KV cache note about it is in their tables.
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
        """`is_guided`: a grammar or a list says which tokens may come next. `is_beam`: it is one position of a beam
        search. `fork_of`: it continues this request, whose tokens its prompt begins with, and has its place among
        waiting requests."""
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
        self.reads_cache = reads_cache  # False: every prompt token must be computed, because something is asked of each
        self.can_draft = can_draft and not is_beam  # whether its tokens may be guessed and verified
        # and that before it is known how many it has
        self.can_draft_ahead = self.can_draft and can_draft_ahead and not is_guided
        self.is_guided = is_guided
        self.is_beam = is_beam
        self.is_fork = fork_of is not None
        self.status = RequestStatus.WAITING
        self.arrival_index = -1  # a total order over all requests of a scheduler
        self.order_index: int = -1 if fork_of is None else fork_of.order_index  # breaks ties; a fork has its ancestor's
        self.arrival_s = 0.0
        self.num_tokens = self.num_prompt_tokens  # all it has now: prompt, output, and pending
        self.num_pending_tokens = 0  # of these, what launched steps will sample
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0  # of these, what was in the prefix cache when it was first admitted
        self.num_preemptions = 0
        self.has_fetched = False  # whether it has waited for blocks, or is not going to: that is decided once
        self._digests: list[bytes] = [] if fork_of is None else fork_of._digests.copy()

    def resume(self, output_token_ids: Sequence[int]) -> None:
        """Go on behind these tokens, which were generated elsewhere: as if it had been preempted there. To be called
        before it is queued."""
        self.output_token_ids = list(output_token_ids)
        self.num_tokens = self.num_prompt_tokens + len(self.output_token_ids)

    def ends_with(self, num_tokens: int, last_token_id: int) -> RequestStatus | None:
        """The final status of a request whose output has so many tokens, the last of them this one."""
        if last_token_id in self.stop_token_ids and num_tokens >= self.min_tokens:
            return RequestStatus.FINISHED_STOPPED
        return RequestStatus.FINISHED_LENGTH if self.num_prompt_tokens + num_tokens >= self.max_total_tokens else None

    @property
    def shown_as(self) -> str:
        """Its name where requests are shown to people."""
        return self.request_id

    @property
    def num_inherited_tokens(self) -> int:
        """How many tokens of its prompt were generated, by requests that it continues."""
        return 0

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.output_token_ids)

    def known_tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Tokens `start .. end - 1`; none of them may be pending."""
        tokens = self.prompt_token_ids[start:end]
        if end > self.num_prompt_tokens:
            first = max(0, start - self.num_prompt_tokens)
            tokens += tuple(self.output_token_ids[first : end - self.num_prompt_tokens])
        return tokens

    def block_digests(self, block_size: int, num_blocks: int) -> list[bytes]:
        """Digests of its first full blocks, `num_blocks` or more; their tokens must be known. Each is computed once, so
        the block size is always the same. The list is not to be changed."""
        digests = self._digests
        if len(digests) < num_blocks:
            before = digests[-1] if digests else root_digest(self.options.cache_salt)
            tokens = self.known_tokens(len(digests) * block_size, num_blocks * block_size)
            digests += block_digests(before, tokens, block_size)
        return digests

    def num_shareable_blocks(self, block_size: int) -> int:
        """Full blocks that need not be computed: at least one token must be, or nothing could be sampled."""
        return (self.num_known_tokens - 1) // block_size

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output, without what is pending."""
        return self.num_tokens - self.num_pending_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """How far computed is behind tokens: what can be scheduled. The last token of all is never computed, so a
        request whose last token is pending has nothing left to schedule."""
        num_tokens = self.num_tokens if self.num_tokens <= self.max_kv_tokens else self.max_kv_tokens
        return num_tokens - self.num_computed_tokens

    def move_to(self, status: RequestStatus) -> None:
        """Change status; an illegal move raises and changes nothing."""
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
        """Enter the batch, with this many tokens found in the KV cache."""
        self.move_to(RequestStatus.RUNNING)
        self.num_computed_tokens = num_computed_tokens
        if not self.num_preemptions:
            self.num_cached_tokens = num_computed_tokens

    def preempt(self) -> None:
        """Leave the batch. All tokens stay, and none is computed any more."""
        self.move_to(RequestStatus.PREEMPTED)
        self.num_computed_tokens = 0
        self.num_preemptions += 1

    def advance(self, num_tokens: int, num_new: int) -> None:
        """Count a launched step that computes `num_tokens` tokens and brings up to `num_new` new ones."""
        self.num_computed_tokens += num_tokens
        if num_new:
            self.num_pending_tokens += num_new
            self.num_tokens += num_new

    def retract(self, num_tokens: int) -> None:
        """Take back drafted tokens that turned out to be wrong. One that was preempted since has none computed."""
        self.num_pending_tokens -= num_tokens
        self.num_tokens -= num_tokens
        if self.status is RequestStatus.RUNNING:
            self.num_computed_tokens -= num_tokens

    def append_output_token(self, token_id: int) -> RequestStatus | None:
        """Add a generated token; a pending one becomes known. Returns the final status if this token ends the request,
        and does not move to it."""
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
