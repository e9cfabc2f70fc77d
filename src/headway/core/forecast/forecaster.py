"""The forecast of a request's first token and end, made when it arrives and before it waits.

The next steps are imagined one by one, each as the scheduler would plan it: as many prompt tokens as fit beside the
decodes, in a time that was learned from the last steps. The request has its first token when the prompts ahead of it
and its own are computed:

    prompt tokens ahead  ▓▓▓▓▓▓▓▓▓▓▓▓░░░        ░ its own
    steps                ├────┼────┼────┼───►   first token

If the batch has no seat or no memory for all of them, some requests must leave first. A forecast takes about the
same time however many requests wait, since it reads only sums. It is made between two steps and changes nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from headway.core.forecast.answers import Departures, RecentAnswers
from headway.core.forecast.arrivals import ArrivalRate
from headway.core.forecast.waiting_totals import Waiting
from headway.core.kv.manager import KVCacheManager
from headway.core.landing import LaunchedStep
from headway.core.live_requests import LiveRequests
from headway.core.policy import SchedulingPolicy
from headway.core.request import Request, RequestStatus
from headway.core.step_time import DecodePace
from headway.settings import SchedulerSettings


class Forecast(NamedTuple):
    """What to expect of a request, from now on."""

    first_token_s: float
    total_s: float | None
    """Until its last token; `None` if nothing is known about the length of its answer."""


class _Batch(NamedTuple):
    """What is in the batch."""

    num_decodes: int
    prompts: list[tuple[int, int]]
    """For each prompt that is not complete: its tokens, and those left to compute."""

    @property
    def num_prompt_tokens(self) -> int:
        return sum(left for _, left in self.prompts)


@dataclass(slots=True)
class _Lanes:
    """The prompt tokens ahead of a newcomer. Short prompts pass long ones, within a share of each step."""

    num_long: float
    num_short: float


class Forecaster:
    """Makes the forecasts of a scheduler. The scheduler notes arrivals and ends here."""

    SINGLE_STEPS = 8
    """How many steps are imagined one by one. After these, several are imagined at once: a part of what is left."""
    _PARTS = 4
    _MOST_ROUNDS = 80
    _ARRIVALS_S = 10.0  # the time constant of the rate at which prompt tokens arrive

    def __init__(
        self,
        config: SchedulerSettings,
        *,
        kv_cache: KVCacheManager,
        live: LiveRequests,
        policy: SchedulingPolicy,
        pace: DecodePace,
        in_flight: deque[LaunchedStep],
        can_foresee: bool,
    ) -> None:
        """`can_foresee`: whether the scheduler plans steps as they are imagined here."""
        self.answers = RecentAnswers()
        self._config = config
        self._kv_cache = kv_cache
        self._live = live
        self._policy = policy
        self._pace = pace
        self._in_flight = in_flight
        self._arrivals = ArrivalRate(self._ARRIVALS_S)
        self._can_foresee = can_foresee
        passes = config.short_prompt_share > 0 and not policy.divides_steps
        self._passing_share = config.short_prompt_share / (1.0 + config.short_prompt_share) if passes else 0.0
        self._departures: Departures | None = None
        self._departures_at = (-1, -1, -1)  # for how many plans, running requests, and fresh ones they were computed

    def note_arrival(self, request: Request, *, now_s: float) -> None:
        """Note that a request is queued. A fork computes almost nothing, since it finds its tokens in the cache."""
        if not request.is_fork:
            self._arrivals.note(request.num_tokens, now_s=now_s)

    def note_end(self, request: Request, status: RequestStatus) -> None:
        """Note that a request has ended. Only a complete answer says how long answers are, and none that could have one
        token only, as those of embeddings and each position of a beam."""
        if request.is_beam or request.max_total_tokens - request.num_prompt_tokens == 1:
            return
        if status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH):
            self.answers.note(request.num_output_tokens)

    def forecast(self, request: Request, *, now_s: float) -> Forecast | None:
        """Return what to expect of a request that is not queued yet. `None` if it is not known how long steps take, or
        how long answers are and requests must leave before it; if its blocks come from elsewhere; and for schedulers
        that plan steps in another way."""
        if not self._can_foresee or request.options.blocks_at or self._token_s is None:
            return None
        num_own = max(1, request.num_tokens - self._num_cached(request))
        ahead = self._policy.ahead_of(request, self._live.totals)
        batch = self._batch()
        num_steps, first_token_s = self._until_computed(batch, ahead, num_own, now_s=now_s)
        num_entering = self._num_entering(ahead, num_own)
        if num_entering < ahead.num_requests + 1:
            waited_s = self._until_room(batch, ahead, num_own, num_entering=num_entering, after_steps=num_steps)
            if waited_s is None:
                return None
            first_token_s = max(first_token_s, waited_s)
        first_token_s += self._in_flight_s()
        expected = self.answers.expected_tokens(request)
        total_s = None if expected is None else first_token_s + (expected - 1.0) * self._policy.view.step_s
        return Forecast(first_token_s, total_s)

    # ---- what there is --------------------------------------------------------------------------------------------

    @property
    def _token_s(self) -> float | None:
        """The seconds that a prompt token adds to a step."""
        measured_s = self._pace.prompt_token_time.seconds
        return self._pace.step_time.per_token_s if measured_s is None else measured_s

    def _num_cached(self, request: Request) -> int:
        return self._kv_cache.num_cached_tokens(request) if request.reads_cache else 0

    def _batch(self) -> _Batch:
        running = self._live.running
        prompts = [(one.num_tokens, one.num_remaining_tokens) for one in running if one.num_remaining_tokens > 1]
        return _Batch(len(running) - len(prompts), prompts)

    def _in_flight_s(self) -> float:
        """Return how long the steps in flight take, which were planned without the newcomer."""
        token_s, seconds = self._token_s or 0.0, 0.0
        for step in self._in_flight:
            num_rows = len(step.output.scheduled)
            seconds += self._pace.decode_s(num_rows) + token_s * (step.output.num_scheduled_tokens - num_rows)
        return seconds

    # ---- the time for the prompts ---------------------------------------------------------------------------------

    def _until_computed(self, batch: _Batch, ahead: Waiting, num_own: int, *, now_s: float) -> tuple[float, float]:
        """Return how many steps it takes to compute the prompts ahead and the request's own, and how many seconds."""
        pace = self._pace
        token_s, target_s = self._token_s or 0.0, self._policy.pace_s(pace.target_s)
        num_left = float(batch.num_prompt_tokens + ahead.num_tokens + num_own)
        num_each = num_left / (1 + len(batch.prompts) + ahead.num_requests)
        num_behind, arriving = self._live.totals.num_tokens - ahead.num_tokens, self._arrivals.per_second(now_s)
        num_decodes, num_late_allowed = float(batch.num_decodes), pace.num_late_allowed
        num_in_order = num_passed = num_steps = seconds = 0.0  # tokens computed in order, and by passing
        most_short, lanes = 0, _Lanes(0.0, 0.0)
        for number in range(self._MOST_ROUNDS):
            room = pace.foresee(
                target_s=target_s,
                num_decodes=int(num_decodes),
                num_backlog_tokens=num_left + num_behind + arriving * seconds,
                num_late_allowed=num_late_allowed,
            )
            num_tokens = min(room.num_tokens, max(1, self._config.max_num_batched_tokens - int(num_decodes)))
            limit = pace.max_short_tokens(num_tokens)
            if abs(limit - most_short) > 0.1 * most_short:
                most_short, lanes = limit, self._lanes(batch, ahead, limit)
            done = num_in_order / max(lanes.num_long + lanes.num_short, 1.0)
            num_long = lanes.num_long * (1.0 - done)
            if num_long >= 1.0 or num_own > most_short:
                num_tokens = min(num_tokens, pace.long_tokens(int(num_decodes)))
            num_passing = 0.0
            if num_long >= 1.0 and num_own <= most_short:
                num_passing = min(self._passing_share * num_tokens, lanes.num_short * (1 - done) - num_passed + num_own)
            at_once = 1.0
            if number >= self.SINGLE_STEPS:
                at_once = max(1.0, num_left / num_tokens / self._PARTS)
            if room.is_late:
                at_once = min(at_once, max(1.0, num_late_allowed // num_decodes))
                num_late_allowed -= at_once * num_decodes
            num_computed = min(num_tokens, num_left / at_once)
            num_steps += at_once
            seconds += at_once * (pace.decode_s(int(num_decodes)) + token_s * num_computed)
            num_in_order += at_once * (num_computed - num_passing)
            num_passed += at_once * num_passing
            num_left -= at_once * num_computed
            has_passed = num_passing and lanes.num_short * (1 - done) - num_passed + num_own <= 0
            if num_left < 1.0 or has_passed:
                break
            num_decodes = min(num_decodes + at_once * num_computed / num_each, float(self._live.num_seats))
        return num_steps, seconds

    def _lanes(self, batch: _Batch, ahead: Waiting, most_short: int) -> _Lanes:
        """Divide the tokens ahead into those of prompts that are longer than `most_short`, and of others."""
        totals = self._live.totals
        num_short = float(sum(left for length, left in batch.prompts if length <= most_short))
        if totals.num_tokens:
            num_short += ahead.num_tokens * totals.up_to_size(most_short).num_tokens / totals.num_tokens
        return _Lanes(batch.num_prompt_tokens + ahead.num_tokens - num_short, num_short)

    # ---- the time for seats and memory ----------------------------------------------------------------------------

    def _num_entering(self, ahead: Waiting, num_own: int) -> float:
        """Return how many of the requests ahead and the newcomer find a seat and memory as the batch is now."""
        kv_cache, num_running = self._kv_cache, len(self._live.running)
        num_waiting = ahead.num_requests + 1
        # Each must have the blocks of its tokens, and one spare block for every request in the batch.
        num_each = max(1.0, kv_cache.blocks_for(ahead.num_tokens + num_own) / num_waiting) + 1.0
        num_free = kv_cache.num_available_blocks - kv_cache.num_promised_blocks - num_running
        return min(self._live.num_free_seats, num_waiting, max(0.0, num_free / num_each))

    def _until_room(
        self, batch: _Batch, ahead: Waiting, num_own: int, *, num_entering: float, after_steps: float
    ) -> float | None:
        """Return the seconds until all but the `num_entering` requests that find room have taken the places of others
        and the newcomer's prompt is computed; `None` if nothing is known about the length of answers."""
        departures = self._known_departures(int(num_entering))
        if departures is None:
            return None
        num_rows = len(self._live.running) + int(num_entering)
        num_steps = max(after_steps, departures.steps_until(ahead.num_requests + 1 - num_entering) + 1.0)
        num_tokens = batch.num_prompt_tokens + ahead.num_tokens + num_own
        return num_steps * self._pace.decode_s(num_rows) + num_tokens * (self._token_s or 0.0)

    def _known_departures(self, num_fresh: int) -> Departures | None:
        """Return the departures from the present batch, with this many of the queue in its free seats. They are
        computed about once for each step."""
        at = (self._live.num_plans, len(self._live.running), num_fresh)
        if at != self._departures_at:
            self._departures = self.answers.departures(self._live.running, num_fresh=num_fresh)
            self._departures_at = at
        return self._departures
