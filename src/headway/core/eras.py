"""`EraScheduler`: batching from before continuous batching and chunked prefill, for comparisons.

    static          a batch is formed, sealed and computed to the end of its longest answer; then the next one is formed
                    ▇▇▇▇▇▇▇▇  ▇▇▇▇▇▇▇▇
                    ▇▇▇░░░░░  ▇▇▇▇▇░░░        ░ finished, but it holds its seat and memory until all have finished
    dynamic         the same, but a batch is formed of requests of about the same length, when it is full or its first
                    request has waited long enough
    continuous      requests are admitted at any step, and leave with their last token
                    ▇▇▇▇▇▇▇▇▇▇▇▇▇
                    ▇▇▇▇▇▇▇▇▇▇

    prefill-first   whole prompts are computed in separate steps, before any decode
    decode-first    the same, but only when no request decodes

A finished request of a sealed batch computes nothing more, which is cheaper than most static batching was. Its tokens
are delivered when they are sampled, but its end is reported when the whole batch is done.

A beam search is one member of its batch, although the scheduler sees one request per beam and position. A beam leaves
with its token, and its forks join the same batch as soon as there is room.
"""

from __future__ import annotations

import enum

from headway.core.admission import Admission
from headway.core.kv.manager import KVCacheManager
from headway.core.queue import GroupedQueue, WaitingQueue
from headway.core.request import Request, RequestStatus
from headway.core.scheduler import Scheduler
from headway.core.scheduler_output import ModelRunnerOutput, RequestUpdate, SchedulerOutput
from headway.core.shares import StepPlan
from headway.settings import SchedulerSettings

_LAST_TOKEN = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH)
_FORKS = -1  # the class of all forks: whatever their length, they belong to the batch of the beams that they continue


class LengthQueue(GroupedQueue):
    """Waiting requests by classes of lengths. The longest of a class has at most twice the tokens of the shortest.
    While a batch is being formed, its class goes first; otherwise the class with the earliest arrival does."""

    def __init__(self) -> None:
        super().__init__(_length_class, self._rank)
        self.open_class: int | None = None
        """The length class of the batch that is being formed."""

    def _rank(self, request: Request) -> tuple[bool, bool, int]:
        length_class = _length_class(request)
        return length_class != _FORKS, length_class != self.open_class, request.arrival_index


def _length_class(request: Request) -> int:
    """The class of a request, by its prompt tokens and its predicted answer tokens together."""
    if request.is_fork:
        return _FORKS
    num_tokens = request.num_prompt_tokens + (request.options.predicted_tokens or 0.0)
    return int(num_tokens).bit_length()


class _Entrants(enum.Enum):
    """Which waiting requests may be admitted to the batch in a step."""

    NONE = "none"
    FORKS = "forks"
    """The batch is sealed: only forks of its beams may join."""
    ALL = "all"


class EraAdmission(Admission):
    """Admits requests to a batch that is being formed, until none waits or no seat or memory is left; then the batch is
    sealed. If prompts are not cut into chunks, it admits only those that fit into the step as a whole."""

    _entrants = _Entrants.ALL
    """In the step that is being planned."""
    _is_forming = False
    _had_time = True

    @property
    def _lengths(self) -> LengthQueue | None:
        """The waiting requests by length, if batches are formed by length."""
        waiting = self._live.waiting
        return waiting if isinstance(waiting, LengthQueue) else None

    def admit_waiting(self, plan: StepPlan) -> None:
        if self._config.batching == "continuous":
            super().admit_waiting(plan)
            return
        self._entrants, self._had_time = self._choose_entrants(), True
        super().admit_waiting(plan)
        if self._entrants is not _Entrants.NONE:
            is_full = not plan.budget.left or not self._had_time
            others_may_follow = is_full and self._live.num_free_seats > 0 and len(self._live.waiting) > 0
            self._is_forming = self._entrants is _Entrants.ALL and others_may_follow

    def opens_at_s(self) -> float:
        """The time at which the next requests may be admitted, if the batch is empty."""
        lengths = self._lengths
        first = None if lengths is None else lengths.peek(0)
        if lengths is None or first is None or first.is_fork or lengths.num_alike(first) >= self._config.max_num_seqs:
            return self._live.now_s
        return first.arrival_s + self._config.batch_window_ms / 1e3

    def may_enter(self, request: Request) -> bool:
        """Whether a waiting request would be allowed to enter if requests were admitted now."""
        return self._is_among(request, self._choose_entrants())

    def _choose_entrants(self) -> _Entrants:
        if self._config.batching == "continuous":
            return _Entrants.ALL
        is_empty = self._live.num_free_seats == self._config.max_num_seqs
        if is_empty and self._lengths is not None:
            self._lengths.open_class = None
        first = self._live.waiting.peek(0)
        starts_with_fork = first is not None and first.is_fork
        if not self._is_forming and (starts_with_fork or not is_empty):
            entrants = _Entrants.FORKS if starts_with_fork else _Entrants.NONE
        else:
            is_open = not is_empty or self.opens_at_s() <= self._live.now_s
            entrants = _Entrants.ALL if is_open else _Entrants.NONE
        if entrants is not _Entrants.NONE and is_empty and self._lengths is not None and first is not None:
            self._lengths.open_class = _length_class(first)
        return entrants

    def _is_among(self, request: Request, entrants: _Entrants) -> bool:
        if request.is_fork or entrants is not _Entrants.ALL:
            return request.is_fork and entrants is not _Entrants.NONE
        return self._lengths is None or _length_class(request) == self._lengths.open_class

    def _peek(self, index: int) -> Request | None:
        if self._entrants is _Entrants.NONE:
            return None
        request = super()._peek(index)
        return request if request is not None and self._is_among(request, self._entrants) else None

    def _has_time_for(self, plan: StepPlan, request: Request) -> bool:
        """Whether the step has tokens left for a prompt. If prompts are not cut into chunks, the whole prompt must fit.
        Only the first one of a step may be cut, since it may fit into no step."""
        if self._config.prefill_mode == "chunked" or not plan.scheduled:
            self._had_time = super()._has_time_for(plan, request)
        else:
            self._had_time = request.num_tokens - self._kv_cache.num_cached_tokens(request) <= plan.budget.left
        return self._had_time

    def _choose_displaced(self, plan: StepPlan, request: Request, most: int) -> list[Request]:
        has_held = self._live.num_seats < self._config.max_num_seqs
        return [] if has_held else super()._choose_displaced(plan, request, most)


class EraScheduler(Scheduler):
    """A scheduler with sealed batches, with separate steps for prompts, or with both."""

    admission_kind = EraAdmission
    can_foresee = False
    _admission: EraAdmission

    def __init__(self, config: SchedulerSettings, kv_cache: KVCacheManager) -> None:
        self._seals = config.batching != "continuous"
        self._held: dict[str, Request] = {}  # finished requests of a sealed batch, by id
        super().__init__(config, kv_cache)

    def _create_queue(self) -> WaitingQueue:
        return LengthQueue() if self.config.batching == "dynamic" else super()._create_queue()

    # ---- prompts ---------------------------------------------------------------------------------------------------

    def _fill(self, plan: StepPlan) -> None:
        if self.config.prefill_mode == "chunked":
            super()._fill(plan)
        elif self.config.prefill_mode == "prefill-first":
            self._compute_prompts(plan)
            if not plan.scheduled:
                self._continue_decodes(plan)
        else:
            self._continue_decodes(plan)
            if not plan.scheduled:
                self._compute_prompts(plan)

    def _compute_prompts(self, plan: StepPlan) -> None:
        """Schedule prompts only. Each is computed in one step, if a step can hold it at all."""
        self._shares.compute_each(plan, [one for one in self.live.running if one.num_remaining_tokens > 1])
        if not plan.preempted:
            self._admission.admit_waiting(plan)

    def _set_long(self, plan: StepPlan, num_decodes: int) -> None:
        if not self._seals:  # in a sealed batch no request passes another
            super()._set_long(plan, num_decodes)

    # ---- the end of a sealed batch ---------------------------------------------------------------------------------

    @property
    def in_batch(self) -> list[Request]:
        return [*self.live.running, *self._held.values()]

    def can_enter(self, request: Request) -> bool:
        return self._admission.may_enter(request) and super().can_enter(request)

    def ready_at_s(self) -> float | None:
        ready_at_s = super().ready_at_s()
        return ready_at_s if ready_at_s is None or not self._seals else self._admission.opens_at_s()

    def finish_request(self, request_id: str, status: RequestStatus) -> Request:
        """End a request, as in `Scheduler`. If it has its last token and its batch is sealed, it is held until the
        batch is done."""
        if (held := self._held.get(request_id)) is not None:
            self._let_go(held)
            return held
        request = self.live.by_id.get(request_id)
        is_running = request is not None and request.status is RequestStatus.RUNNING
        if request is None or not is_running or not self._seals or request.is_beam or status not in _LAST_TOKEN:
            return super().finish_request(request_id, status)
        self.live.stop_running(request)
        request.move_to(status)
        self.live.num_seats -= 1
        self._held[request_id] = request
        return request

    def update(
        self, output: SchedulerOutput, result: ModelRunnerOutput, *, duration_s: float | None = None
    ) -> list[RequestUpdate]:
        has_beams = bool(self.in_flight) and any(request.is_beam for request in self.in_flight[0].requests)
        updates = super().update(output, result, duration_s=duration_s)
        if not self._held or output.is_empty:
            return updates
        updates = [self._without_end(update) for update in updates]
        # The forks of a beam join the same batch: the engine adds them before it asks for the next plan.
        return updates if has_beams else updates + self.take_ends()

    def _without_end(self, update: RequestUpdate) -> RequestUpdate:
        if update.request_id not in self._held:
            return update
        return update._replace(finish_status=None, last_status=update.finish_status)

    def take_ends(self) -> list[RequestUpdate]:
        if self.live.running:
            return []
        held = list(self._held.values())
        for request in held:
            self._let_go(request)
        return [RequestUpdate(request.request_id, (), (), request.status) for request in held]

    def _let_go(self, request: Request) -> None:
        del self._held[request.request_id]
        self.live.num_seats += 1
        self.live.forget(request, keep=True)
