"""Which requests verify guesses of their next tokens in a step, and how many.

A step that computes several tokens of a request where it would compute one takes hardly longer while reading the
weights is what takes the time, and each guess that is right is a token for nothing. Where computing is what takes the
time, a guess costs as much as a token of another request. So a draft token is verified if it is worth its time:

    chance that it survives        time that it adds to the step
    ────────────────────────  ≥   ─────────────────────────────
    tokens of the step             time of the step

Times come from the steps that have run: what they take without drafts, and what drafts add. Chances are
counted: how often a guess at that place was right, after a match so long, of a request whose last guess went so. Counts
fade, so that what did not work is tried again now and then.

What a step samples does not depend on how it came to be computed, so drafts change no token. Who guesses is in
`headway.core.proposers`.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Annotated, NamedTuple, Protocol

from headway.core.kv.manager import KVCacheManager
from headway.core.proposers import FORCED, UNKNOWN, Draft, Proposer, create_proposer
from headway.core.request import Request
from headway.core.scheduler_output import ScheduledRequest, SchedulerOutput, make_tuple
from headway.core.shares import StepPlan
from headway.core.step_time import MOST_TIMES_EXPECTED, DecodePace
from headway.counters import Counter, Statistics, field
from headway.settings import SchedulerSettings

PRIOR_WEIGHT = 2.0
"""How many guesses the prior chance is worth."""
FADE_STEPS = 1024
FADE = 0.8
"""Every so many steps, how much of all counts is kept."""
MOST_COUNTED = 200.0
"""Guesses that are remembered of a kind and place."""
FIRST_DRAFTS = 2
"""Tokens that are drafted in the first step that has any, or one for every four requests if that is more; then there is
one for each, or twice as many as one before, since what they cost is not known."""
FIRST_PART = 0.5
"""How much of what the fewest guesses cost that were ever tried one would cost."""
STEPS_TO_TRUST = 3
"""So often guesses are tried beside about so many requests, before it is believed that they cost more than these."""
FIRST_PLAIN_STEPS = 2
"""With about so many requests, before there is any draft beside them."""
STEPS_PER_PLAIN_ONE = 128
"""With drafts, one after the other, before one without shows what they are to be compared with."""
LEAST_GAIN = 0.03
"""Drafts have to make a step better by this part of it: what they cost and bring is not known to the last digit, and
requests that are lucky leave the others with smaller batches."""
ASKS_PER_STEP = 4
"""Where steps overlap: for how many requests guesses are looked up for a step, in the mean, as long as none pays."""
MOST_CAUTION = 4
"""How much rarer that becomes while it is in vain."""
_COST_WEIGHT = 0.1  # of the newest step in what drafts cost
_NO_HISTORY, _WRONG, _PARTLY, _RIGHT = range(4)
_MATCH_CLASSES = (3, 5, 9, 16, FORCED)
"""From which length on a match is of the next class."""


def create_speculation(config: SchedulerSettings, *, kv_cache: KVCacheManager, pace: DecodePace) -> Speculation | None:
    """The controller that the options ask for; None: no drafts."""
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
    """Who knows what guided requests may say."""

    def forced(self, request_id: str) -> Sequence[int]:
        """How a request's answer must go on, as far as that is certain."""
        ...

    def num_fitting(self, request_id: str, token_ids: Sequence[int]) -> int:
        """How many of these tokens may follow."""
        ...


class SpeculationStats(Statistics):
    """Drafts that were verified, and how much of them was right."""

    num_drafts: Annotated[int, Counter("spec_decode_num_drafts", "How often a request has verified guesses.")] = 0
    num_draft_tokens: Annotated[
        int, Counter("spec_decode_num_draft_tokens", "Guesses of tokens that were verified.")
    ] = 0
    num_accepted_tokens: Annotated[
        int, Counter("spec_decode_num_accepted_tokens", "Guesses of tokens that were right.")
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
    """How many tokens its request had."""


class _Level(NamedTuple):
    """Guesses that are equally likely to survive: of one kind, at one place."""

    chance: float
    kind: int
    place: int
    num_guesses: int


class Speculation:
    """Adds drafts to planned steps, and learns from what became of them.

    How far the requests of a step with drafts come is not known before it has landed. Where the device can go on
    without the host knowing (`is_ahead`), it also guesses: here it is decided only how many tokens, by guesses from
    what is known. Elsewhere a step is planned when the one before it has landed, if that is needed (`must_await`).
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
        """`max_num_lines`: most requests and drafted tokens together that a step may have."""
        self.stats = SpeculationStats(num_accepted_at=[0] * max_draft_tokens)
        self._kv_cache = kv_cache
        self._pace = pace
        self._max_tokens = max_draft_tokens
        self._max_num_lines = max_num_lines
        self._proposer = proposer
        self._chances = _Chances(max_draft_tokens, proposer.prior_chance)
        self._cost = _DraftCost(pace)
        self._guesses: dict[Request, _Guess] = {}  # the last one of each request that is neither verified nor checked
        self._verifying: dict[Request, list[int]] = {}  # the kinds of drafts in flight
        self._histories: dict[Request, int] = {}
        self.guides: TokenGuides | None = None
        self.is_ahead = False
        """Whether steps are planned before it is known which drafts are right."""
        self._is_verifying = False  # whether the step that was planned last has drafts
        self._num_steps = 0
        self._num_asks = 0.0  # of requests, that have been saved up
        self._caution = 1  # how much rarer it is asked, after it has been in vain

    def go_ahead(self) -> None:
        """From now on, plan steps before it is known which drafts are right."""
        self.is_ahead = True

    def must_await(self, step: SchedulerOutput) -> bool:
        """Whether this step, in flight, has to land before another is planned: its tokens have to be known to guess
        what follows them, or how many they are."""
        return not self.is_ahead and (self._proposer.knows_tokens or any(share.drafts for share in step.scheduled))

    def add_drafts(self, plan: StepPlan) -> None:
        """Let requests that get one token verify more, as far as that is worth its time and there is room."""
        was_verifying, self._is_verifying = self._is_verifying, False
        num_rows = len(plan.scheduled)
        most = min(plan.budget.left, self._max_num_lines - num_rows)
        if most <= 0 or self._cost.wants_plain(num_rows) or not self._cost.plain_s(num_rows):
            return
        is_trial = self.is_ahead and not was_verifying
        if is_trial and not self._may_ask(num_rows):
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
        if self._is_verifying:
            self._caution = 1
        elif is_trial and all(share.num_tokens == 1 for share in plan.scheduled.values()):  # else there is seldom room
            self._caution = min(2 * self._caution, MOST_CAUTION)

    def _may_ask(self, num_requests: int) -> bool:
        """Where steps overlap: whether guesses for so many may be looked up, to see whether they pay. That takes the
        host's time, which others need."""
        self._num_asks += ASKS_PER_STEP
        if self._num_asks < num_requests * self._caution:
            return False
        self._num_asks = 0.0
        return True

    def note_planned(self) -> None:
        """A step has been planned."""
        self._num_steps += 1
        if self._num_steps % FADE_STEPS == 0:
            self._chances.fade()
            self._cost.fade()
            self._proposer.forget_finished()
            self._guesses = {one: guess for one, guess in self._guesses.items() if not one.status.is_finished}
            self._verifying = {one: kinds for one, kinds in self._verifying.items() if not one.status.is_finished}
            self._histories = {one: history for one, history in self._histories.items() if not one.status.is_finished}

    def observe_step(
        self, duration_s: float, *, num_drafts: int, num_decodes: int, num_chunk_tokens: int
    ) -> float | None:
        """Learn from a step; returns how long it would have taken without its drafts. A step without prompts teaches
        what drafts cost, and nothing new about the rest of it."""
        if num_chunk_tokens:
            return max(0.0, duration_s - (self._cost.added_s(num_decodes, num_drafts) if num_drafts else 0.0))
        self._cost.observe(num_decodes, num_drafts, duration_s)
        return None if num_drafts else duration_s

    def observe(self, request: Request, *, num_drafts: int, num_accepted: int) -> None:
        """Learn from a draft of so many tokens, of which so many were right."""
        self.stats.num_accepted_tokens += num_accepted
        for place in range(num_accepted):
            self.stats.num_accepted_at[place] += 1
        kinds = self._verifying[request]
        self._learn(request, kinds.pop(0), num_drafts, num_accepted)
        if not kinds:
            del self._verifying[request]

    def drop(self, request: Request) -> None:
        """What came of a request's oldest draft is not going to be known."""
        kinds = self._verifying[request]
        kinds.pop(0)
        if not kinds:
            del self._verifying[request]

    def _learn(self, request: Request, kind: int, num_drafts: int, num_right: int) -> None:
        self._chances.count(kind, num_drafts, num_right)
        self._histories[request] = _RIGHT if num_right == num_drafts else _PARTLY if num_right else _WRONG

    def _guess(self, request: Request, most: int) -> _Guess | None:
        """What may follow a request's known tokens. A guess that was made before and not verified is checked now."""
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
        guess = _Guess(draft, _kind_of(draft.num_matched, self._histories.get(request, _NO_HISTORY)), num_known)
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
        """How many tokens of each draft to verify: those most likely to survive first, while they are worth it."""
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
        """What can be verified, in the order in which it is worth it; guesses of a kind are alike."""
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
        """How many guesses make the most of a step that would bring `value` tokens in `step_s` without any: 0 if none
        does."""
        best, num_worth, num_taken = value / step_s, 0, 0
        if self._cost.is_known(num_rows):
            best *= 1.0 + LEAST_GAIN
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
        """Give a request's share a draft, shorter if there are no blocks for all of it."""
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


class _DraftCost:
    """What drafted tokens add to a step, by how many they are and beside how many requests.

        added      ╭──────────●──╱     ●  measured: a mean over steps of about that size, younger ones counting more
                ╭──●                   between them a line, which goes on above; below, half of it for the first and
              ●                        the rest for the others
            0  1  2  4  8  16  drafted tokens

    The first one often costs most: a product with a vector is another kernel than one with a matrix. As elsewhere, a
    step may be slow for reasons that say nothing about the next one: it counts up to a limit, and not alone. What has
    become too costly to be tried again is forgotten little by little. What a step takes without drafts is measured
    again now and then, since contexts grow.
    """

    def __init__(self, pace: DecodePace) -> None:
        self._pace = pace
        self._plain: dict[int, _Mean] = {}  # steps without drafts, by the size of the number of requests
        self._num_since: collections.Counter[int] = collections.Counter()  # steps with drafts since the last of those
        self._tables: dict[int, dict[int, _Mean]] = {}  # by the sizes of both numbers

    def observe(self, num_rows: int, num_tokens: int, duration_s: float) -> None:
        """A step with so many requests took so long with so many drafted tokens."""
        size, expected_s = num_rows.bit_length(), self.plain_s(num_rows)
        if not num_tokens:
            self._num_since[size] = 0
            limit_s = MOST_TIMES_EXPECTED * expected_s or duration_s
            self._plain.setdefault(size, _Mean()).observe(num_rows, min(duration_s, limit_s))
            return
        self._num_since[size] += 1
        limit_s = MOST_TIMES_EXPECTED * (expected_s + self.added_s(num_rows, num_tokens))
        table = self._tables.setdefault(size, {})
        table.setdefault(_size_of(num_tokens), _Mean()).observe(num_tokens, min(duration_s - expected_s, limit_s))

    def wants_plain(self, num_rows: int) -> bool:
        """Whether the next step with about so many requests should have no drafts, to see what it takes."""
        size = num_rows.bit_length()
        plain = self._plain.get(size)
        return plain is None or plain.num_steps < FIRST_PLAIN_STEPS or self._num_since[size] >= STEPS_PER_PLAIN_ONE

    def plain_s(self, num_rows: int) -> float:
        """What a step with so many requests takes without drafts: by the nearest measured one, and the line through it
        and the next."""
        if not self._plain:
            return self._pace.decode_s(num_rows)
        nearest = min(self._plain.values(), key=lambda one: abs(one.size - num_rows))
        least_s = nearest.mean_s * min(1.0, num_rows / nearest.size)  # reading the weights is shared
        return max(least_s, nearest.mean_s + (num_rows - nearest.size) * self._row_s(num_rows))

    def _row_s(self, num_rows: int) -> float:
        """What one more request adds to a step with so many."""
        two = sorted(self._plain.values(), key=lambda one: abs(one.size - num_rows))[:2]
        if len(two) < 2 or two[0].size == two[1].size:
            return self._pace.decode_time.row_s
        return max(0.0, (two[1].mean_s - two[0].mean_s) / (two[1].size - two[0].size))

    def added_s(self, num_rows: int, num_tokens: int) -> float:
        """What so many drafted tokens add beside so many requests."""
        row_s, table = self._row_s(num_rows), self._tables.get(num_rows.bit_length(), {})
        is_doubtful = not self.is_known(num_rows)
        last_tokens = last_s = 0.0
        more_s = row_s  # for one more
        for _, one in sorted(table.items()):
            added_s = max(min(one.mean_s, one.size * row_s) if is_doubtful else one.mean_s, last_s)
            if num_tokens <= one.size:
                part = (num_tokens - last_tokens) / max(one.size - last_tokens, 1e-9)
                if not last_tokens:
                    part = FIRST_PART + (1.0 - FIRST_PART) * part
                return last_s + min(1.0, part) * (added_s - last_s)
            if last_tokens:
                more_s = (added_s - last_s) / max(one.size - last_tokens, 1e-9)
            last_tokens, last_s = one.size, added_s
        return last_s + (num_tokens - last_tokens) * more_s

    def is_known(self, num_rows: int) -> bool:
        """Whether drafts have been tried often enough beside about so many requests."""
        table = self._tables.get(num_rows.bit_length(), {})
        return sum(one.num_steps for one in table.values()) >= STEPS_TO_TRUST

    def most_tokens(self, num_rows: int) -> int:
        """How many may be drafted in a step with so many requests."""
        seen = self._tables.get(num_rows.bit_length(), {})
        if not seen:
            return max(FIRST_DRAFTS, num_rows // 4)
        return max(FIRST_DRAFTS, num_rows, *(int(2 * one.size) for one in seen.values()))

    def fade(self) -> None:
        """Forget some of what tokens cost."""
        for table in self._tables.values():
            for one in table.values():
                one.mean_s *= FADE


def _size_of(number: int) -> int:
    """Numbers of about the same size have the same: four sizes from one power of two to the next."""
    return 4 * number.bit_length() + ((number << 3 >> number.bit_length()) & 3)


class _Mean:
    """A time over steps of about the same size, and that size; younger steps count more."""

    def __init__(self) -> None:
        self.size = self.mean_s = 0.0
        self.num_steps = 0

    def observe(self, size: int, seconds: float) -> None:
        """One more step. The first ones may have had to wait for a compiler, or for weights that were never read: of
        these the fastest counts."""
        self.num_steps += 1
        if self.num_steps <= STEPS_TO_TRUST:
            if self.num_steps == 1 or seconds < self.mean_s:
                self.size, self.mean_s = float(size), max(0.0, seconds)
            return
        self.size += _COST_WEIGHT * (size - self.size)
        self.mean_s = max(0.0, self.mean_s + _COST_WEIGHT * (seconds - self.mean_s))


class _Chances:
    """How often guesses were right, by their kind and their place in a draft, given that those before them were. Of a
    kind that has hardly been seen as much is assumed as of all together."""

    def __init__(self, num_places: int, prior: float) -> None:
        self._prior = prior
        num_kinds = (len(_MATCH_CLASSES) + 1) * (_RIGHT + 1)
        self._right = [[0.0] * num_places for _ in range(num_kinds + 1)]  # the last one: of all kinds
        self._all = [[0.0] * num_places for _ in range(num_kinds + 1)]

    def survival(self, kind: int) -> list[float]:
        """For each place, how likely it is that all guesses up to it are right."""
        survival, found = 1.0, []
        for right, total, any_right, any_total in zip(
            self._right[kind], self._all[kind], self._right[-1], self._all[-1], strict=True
        ):
            assumed = (any_right + PRIOR_WEIGHT * self._prior) / (any_total + PRIOR_WEIGHT)
            survival *= (right + PRIOR_WEIGHT * assumed) / (total + PRIOR_WEIGHT)
            found.append(survival)
        return found

    def count(self, kind: int, num_drafts: int, num_right: int) -> None:
        """Note a draft. What follows a wrong guess says nothing."""
        for right, total in ((self._right[kind], self._all[kind]), (self._right[-1], self._all[-1])):
            for place in range(min(num_drafts, num_right + 1)):
                if total[place] >= MOST_COUNTED:
                    right[place] *= 0.5
                    total[place] *= 0.5
                right[place] += place < num_right
                total[place] += 1.0

    def fade(self) -> None:
        """Forget some of it."""
        for counts in (*self._right, *self._all):
            counts[:] = [FADE * count for count in counts]


def _kind_of(num_matched: int, history: int) -> int:
    match_class = sum(num_matched >= start for start in _MATCH_CLASSES)
    return match_class * (_RIGHT + 1) + history
