"""Speculative decoding: decides which requests verify drafts of their next tokens in a step, and how many tokens.

As long as a step's time is that of reading the weights, computing several tokens of a request takes hardly longer than
computing one, and each draft token that is right is gained for nothing. When computing takes the time, a draft token
costs as much as a token of another request. So a draft token is verified if it is worth its time:

    chance that it survives        time that it adds to the step
    ────────────────────────  ≥   ─────────────────────────────
    tokens of the step             time of the step

The chances are counted (`headway.core.draft_chances`), and the times are measured (`headway.core.draft_costs`). Both
fade slowly, so that what did not pay is tried again now and then.

Drafts do not change which tokens are sampled. They come from a proposer (`headway.core.proposers`).
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Annotated, NamedTuple, Protocol

from headway.core.draft_chances import NO_HISTORY, DraftChances, history_of, kind_of
from headway.core.draft_costs import DraftCosts
from headway.core.kv.manager import KVCacheManager
from headway.core.proposers import FORCED, UNKNOWN, Draft, Proposer, create_proposer
from headway.core.request import Request
from headway.core.scheduler_output import ScheduledRequest, SchedulerOutput, make_tuple
from headway.core.shares import StepPlan
from headway.core.step_time import DecodePace
from headway.core.tuning import SPECULATION
from headway.counters import Counter, Statistics, field
from headway.settings import SchedulerSettings


def create_speculation(config: SchedulerSettings, *, kv_cache: KVCacheManager, pace: DecodePace) -> Speculation | None:
    """Create the speculation that the options ask for. Returns None if it is off."""
    if config.speculation == "off":
        return None
    return Speculation(
        proposer=create_proposer(config),
        kv_cache=kv_cache,
        pace=pace,
        max_draft_tokens=config.max_draft_tokens,
        max_num_lines=config.max_num_lines,
    )


class TokenGuides(Protocol):
    """Knows which tokens the grammars of guided requests allow."""

    def forced(self, request_id: str) -> Sequence[int]:
        """Return the next tokens of a request's answer, as long as its grammar leaves no choice."""
        ...

    def num_fitting(self, request_id: str, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens are allowed to follow."""
        ...


class SpeculationStats(Statistics):
    """Counts the drafts that were verified, and their tokens that were right."""

    num_drafts: Annotated[int, Counter("spec_decode_num_drafts", "How often a request has verified guesses.")] = 0
    num_draft_tokens: Annotated[
        int, Counter("spec_decode_num_draft_tokens", "Guesses of tokens that were verified.")
    ] = 0
    num_accepted_tokens: Annotated[
        int, Counter("spec_decode_num_accepted_tokens", "Guesses of tokens that were right.")
    ] = 0
    num_wrong_drafts: Annotated[
        int, Counter("spec_decode_num_wrong_drafts", "How often some token of a guess was wrong.")
    ] = 0
    num_accepted_at: Annotated[
        list[int],
        Counter("spec_decode_num_accepted_tokens_per_pos", "Right guesses, by their place.", label="position"),
    ] = field(default_factory=list)


class _Guess(NamedTuple):
    """A draft that has been made, and may be verified."""

    draft: Draft
    kind: int
    num_known: int
    """How many known tokens its request had when the draft was made."""


class _Level(NamedTuple):
    """Draft tokens that are equally likely to survive: those of one kind at one place."""

    chance: float
    kind: int
    place: int
    num_guesses: int


class Speculation:
    """Adds drafts to planned steps, and learns from their outcome.

    How many tokens the requests of a step with drafts gain is not known before it has landed. If the device can
    continue without the host knowing (`is_ahead`), the device makes the drafts. Then this class decides only how many
    tokens they have, based on the guesses that it can make from known tokens. Otherwise the next step may be planned
    only after such a step has landed (`must_await`).
    """

    def __init__(
        self,
        *,
        proposer: Proposer,
        kv_cache: KVCacheManager,
        pace: DecodePace,
        max_draft_tokens: int,
        max_num_lines: int,
    ) -> None:
        """`max_num_lines`: how many requests and drafted tokens together a step may have at most."""
        self.stats = SpeculationStats(num_accepted_at=[0] * max_draft_tokens)
        self._kv_cache = kv_cache
        self._pace = pace
        self._max_tokens = max_draft_tokens
        self._max_num_lines = max_num_lines
        self._proposer = proposer
        self._chances = DraftChances(max_draft_tokens, proposer.prior_chance)
        self._cost = DraftCosts(pace)
        self._guesses: dict[Request, _Guess] = {}  # the last guess of each request, until it is verified or checked
        self._verifying: dict[Request, list[int]] = {}  # the kinds of drafts in flight
        self._histories: dict[Request, int] = {}
        self.guides: TokenGuides | None = None
        self.is_ahead = False
        """Whether steps are planned before it is known which drafts of earlier ones are right."""
        self._is_verifying = False  # whether the last planned step has drafts
        self._num_steps = 0
        self._num_lookups_left = 0

    def learn_from(self, other: Speculation) -> None:
        """Take over what another speculation has counted and measured. Both have the same most drafted tokens."""
        self._chances = copy.deepcopy(other._chances)
        self._cost.learn_from(other._cost)

    def go_ahead(self) -> None:
        """From now on, plan steps before it is known which drafts of earlier ones are right."""
        self.is_ahead = True

    def must_await(self, step: SchedulerOutput) -> bool:
        """Whether this step in flight has to land before another is planned, because the proposer needs the values of
        its tokens, or their number depends on its drafts."""
        return not self.is_ahead and (self._proposer.knows_tokens or any(share.drafts for share in step.scheduled))

    def add_drafts(self, plan: StepPlan) -> None:
        """Let requests with a decode in this step verify drafts, if these are worth their time and there is room."""
        num_rows = len(plan.scheduled)
        most = min(plan.budget.left, self._max_num_lines - num_rows)
        if self._cost.wants_plain(num_rows):
            return
        was_verifying, self._is_verifying = self._is_verifying, False
        if most <= 0 or not self._cost.plain_s(num_rows):
            return
        if self.is_ahead and not was_verifying and not self._may_look_up(num_rows):
            return
        uncached, guesses = self._kv_cache.uncached, {}
        for request, share in plan.scheduled.items():
            if share.num_tokens == 1 and share.samples and request not in uncached:
                guess = self._guess(request, most)
                if guess is not None:
                    guesses[request] = guess
        if guesses:
            for request, num_tokens in self._choose(plan, guesses, most).items():
                self._extend(plan, request, guesses[request], num_tokens)

    def _may_look_up(self, num_requests: int) -> bool:
        """Whether guesses may be looked up for this number of requests, to see whether drafts pay. Asked if steps
        overlap and the previous one had no drafts. Lookups take host time, so they are limited to a few requests per
        step on average."""
        self._num_lookups_left += SPECULATION.lookups_per_step
        if self._num_lookups_left < num_requests:
            return False
        self._num_lookups_left = 0
        return True

    def note_planned(self) -> None:
        """Count a planned step. After a number of them, old measurements fade and ended requests are forgotten."""
        self._num_steps += 1
        if self._num_steps % SPECULATION.steps_per_fade == 0:
            self._chances.fade()
            self._cost.fade()
            self._proposer.forget_finished()
            self._guesses = {one: guess for one, guess in self._guesses.items() if not one.status.is_finished}
            self._verifying = {one: kinds for one, kinds in self._verifying.items() if not one.status.is_finished}
            self._histories = {one: history for one, history in self._histories.items() if not one.status.is_finished}

    def observe_step(
        self, duration_s: float, *, num_drafts: int, num_decodes: int, num_chunk_tokens: int
    ) -> float | None:
        """Learn from a step. Returns how long it would have taken without its drafts; None for a step with drafts and
        without prompts, which shows only what drafts cost."""
        if num_chunk_tokens:
            return max(0.0, duration_s - (self._cost.added_s(num_decodes, num_drafts) if num_drafts else 0.0))
        self._cost.observe(num_decodes, num_drafts, duration_s)
        return None if num_drafts else duration_s

    def observe(self, request: Request, *, num_drafts: int, num_accepted: int) -> None:
        """Learn from a draft of `num_drafts` tokens, of which the first `num_accepted` were right."""
        self.stats.num_accepted_tokens += num_accepted
        self.stats.num_wrong_drafts += num_accepted < num_drafts
        for place in range(num_accepted):
            self.stats.num_accepted_at[place] += 1
        kinds = self._verifying[request]
        self._learn(request, kinds.pop(0), num_drafts, num_accepted)
        if not kinds:
            del self._verifying[request]

    def drop(self, request: Request) -> None:
        """Forget a request's oldest draft in flight: its outcome will not be known."""
        kinds = self._verifying[request]
        kinds.pop(0)
        if not kinds:
            del self._verifying[request]

    def _learn(self, request: Request, kind: int, num_drafts: int, num_right: int) -> None:
        self._chances.count(kind, num_drafts, num_right)
        self._histories[request] = history_of(num_drafts, num_right)

    def _guess(self, request: Request, most: int) -> _Guess | None:
        """Return a guess of what follows a request's known tokens, if there is one. An earlier guess that was not
        verified is compared with the tokens that have come since."""
        num_known = request.num_known_tokens
        last = self._guesses.get(request)
        if last is not None and last.num_known < num_known:
            del self._guesses[request]
            if self._proposer.knows_tokens and request not in self._verifying:
                token_ids = last.draft.token_ids[: num_known - last.num_known]
                came = request.known_tokens(last.num_known, last.num_known + len(token_ids))
                num_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(token_ids, came)))
                self._learn(request, last.kind, len(token_ids), num_right)
        can_draft = request.can_draft_ahead if self.is_ahead else request.can_draft
        if not can_draft or not request.output_token_ids:
            return None
        room = min(self._max_tokens, most, request.max_total_tokens - request.num_tokens - 1)
        draft = self._propose(request, room) if room > 0 else None
        if draft is None:
            return None
        guess = _Guess(draft, kind_of(draft.num_matched, self._histories.get(request, NO_HISTORY)), num_known)
        self._guesses[request] = guess
        return guess

    def _propose(self, request: Request, room: int) -> Draft | None:
        if not request.is_guided:
            return self._proposer.propose(request, room)
        if self.guides is None or request.num_pending_tokens:
            return None
        if forced := self.guides.forced(request.request_id):
            return Draft(tuple(forced[:room]), FORCED)
        draft = self._proposer.propose(request, room) if self._proposer.knows_tokens else None
        num_fitting = 0 if draft is None else self.guides.num_fitting(request.request_id, draft.token_ids)
        return draft._replace(token_ids=draft.token_ids[:num_fitting]) if draft is not None and num_fitting else None

    def _choose(self, plan: StepPlan, guesses: dict[Request, _Guess], most: int) -> dict[Request, int]:
        """Return how many tokens of each draft to verify: those most likely to survive, as long as they pay."""
        num_rows = len(plan.scheduled)
        num_tokens = sum(share.num_tokens for share in plan.scheduled.values())
        chunk_s = (num_tokens - num_rows) * (self._pace.step_time.per_token_s or 0.0)
        levels = self._levels(guesses.values())
        num_left = self._num_worth(
            levels,
            value=num_tokens,
            step_s=self._cost.plain_s(num_rows) + chunk_s,
            num_rows=num_rows,
            most=min(most, self._cost.most_tokens(num_rows)),
        )
        lengths, last_kind, chosen = collections.Counter[int](), None, {}
        for level in levels:
            if num_left < level.num_guesses:
                last_kind = level.kind
                break
            num_left -= level.num_guesses
            lengths[level.kind] += 1
        for request, guess in guesses.items():
            num_drafted = len(guess.draft.token_ids)
            length = min(lengths[guess.kind], num_drafted)
            if num_left and guess.kind == last_kind and length < num_drafted:  # not all of the kind get one more
                num_left -= 1
                length += 1
            if length:
                chosen[request] = length
        return chosen

    def _levels(self, guesses: Iterable[_Guess]) -> list[_Level]:
        """Return the draft tokens that can be verified, by kind and place, most likely to survive first."""
        counts: dict[int, list[int]] = {}
        for guess in guesses:
            places = counts.setdefault(guess.kind, [0] * self._max_tokens)
            places[len(guess.draft.token_ids) - 1] += 1
        levels = []
        for kind, places in counts.items():
            survival, count = self._chances.survival(kind), sum(places)
            for place, num_ending in enumerate(places):
                if not count:
                    break
                levels.append(_Level(survival[place], kind, place, count))
                count -= num_ending
        return sorted(levels, key=lambda level: (-level.chance, level.place))

    def _num_worth(self, levels: Sequence[_Level], *, value: float, step_s: float, num_rows: int, most: int) -> int:
        """Return how many draft tokens give the best rate of tokens in a step that yields `value` tokens in `step_s`
        without drafts; 0 if none improve it."""
        best, num_worth, num_taken = value / step_s, 0, 0
        if self._cost.is_known(num_rows):
            best *= 1.0 + SPECULATION.least_gain
        for level in levels:
            count = min(level.num_guesses, most - num_taken)
            if count <= 0:
                break
            num_taken += count
            value += count * level.chance
            rate = value / (step_s + self._cost.added_s(num_rows, num_taken))
            if rate > best:
                best, num_worth = rate, num_taken
        return num_worth

    def _extend(self, plan: StepPlan, request: Request, guess: _Guess, num_tokens: int) -> None:
        """Add a draft to a request's share. It is shortened if there are no blocks for all of it."""
        share = plan.scheduled[request]
        new_block_ids = self._kv_cache.allocate(request, 1 + num_tokens)
        if new_block_ids is None:
            new_block_ids, num_tokens = [], min(num_tokens, self._kv_cache.num_free_slots(request) - 1)
            if num_tokens <= 0:
                return
        token_ids = UNKNOWN[:num_tokens] if self.is_ahead else guess.draft.token_ids[:num_tokens]
        self._guesses.pop(request, None)
        if guess.draft.num_matched != FORCED:
            self._proposer.note_verified(request)
        self._verifying.setdefault(request, []).append(guess.kind)
        plan.budget.take(len(token_ids))
        plan.scheduled[request] = make_tuple(
            ScheduledRequest,
            (
                request.request_id,
                1 + len(token_ids),
                share.num_computed_tokens,
                (*share.new_block_ids, *new_block_ids),
                True,
                token_ids,
            ),
        )
        self._is_verifying = True
        self.stats.num_drafts += 1
        self.stats.num_draft_tokens += len(token_ids)
