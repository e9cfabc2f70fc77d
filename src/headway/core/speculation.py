"""Which requests verify guesses of their next tokens in a step, and how many.

A step that computes several tokens of a request where it would compute one takes hardly longer while reading the
weights is what takes the time, and each guess that is right is a token for nothing. Where computing is what takes the
time, a guess costs as much as a token of another request. So a draft token is verified if it is worth its time:

    chance that it survives        time that it adds to the step
    ────────────────────────  ≥   ─────────────────────────────
    tokens of the step             time of the step

Times come from the steps that have run: what they take without drafts (`DecodeTime`), and what drafts add. Chances are
counted: how often a guess at that place was right, after a match so long, of a request whose last guess went so. Counts
fade, so that what did not work is tried again now and then.

What a step samples does not depend on how it came to be computed, so drafts change no token.

Guesses come from what has been: the longest end of a request's tokens that it has had before.

    tokens    … the cat sat on the mat , and the cat sat
                            └─ draft: on the mat ,      ▲ the last three tokens were there before

Text that is edited, summarised, quoted or repeated has much of that; other text has hardly any.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from headway.core.kv_cache_manager import KVCacheManager
from headway.core.request import Request
from headway.core.scheduler_output import ScheduledRequest
from headway.core.step_time import DecodePace
from headway.core.steps import LaunchedStep, StepPlan
from headway.settings import SchedulerSettings

MIN_MATCH = 2
"""Tokens that must have been there before, in this order."""
MAX_MATCH = 16
"""A longer match says no more."""
PRIOR_CHANCE = 0.5
"""Of a guess before any of its kind has been verified: enough to be tried where it costs little."""
PRIOR_WEIGHT = 2.0
"""So many guesses that is worth."""
FADE_STEPS = 1024
FADE = 0.8
"""Every so many steps, how much of all counts is kept."""
MOST_COUNTED = 200.0
"""Guesses that are remembered of a kind and place."""
FIRST_DRAFTS = 2
"""Tokens that are drafted in the first step that has any, over all requests. Later ones have at most twice as many as
one before, since what they cost is not known."""
_TOKEN_BYTES = array("i").itemsize
_COST_KEPT = 0.95  # weight of older steps with drafts in what a draft costs
_NO_HISTORY, _WRONG, _PARTLY, _RIGHT = range(4)
_MATCH_CLASSES = (3, 5, 9, 16)
"""From which length on a match is of the next class."""


def create_speculation(config: SchedulerSettings, *, kv_cache: KVCacheManager, pace: DecodePace) -> Speculation | None:
    """The controller that the options ask for; None: no drafts."""
    if config.speculation == "off":
        return None
    return Speculation(kv_cache=kv_cache, pace=pace, max_draft_tokens=config.max_draft_tokens)


@dataclass(slots=True)
class SpeculationStats:
    """What has been drafted so far."""

    num_drafts: int = 0
    """How often a request has had a draft."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class Speculation:
    """Adds drafts to planned steps, and learns from what became of them."""

    def __init__(self, *, kv_cache: KVCacheManager, pace: DecodePace, max_draft_tokens: int) -> None:
        self.stats = SpeculationStats()
        self.accepted_at = [0] * max_draft_tokens
        """How many tokens have been accepted at each place of a draft."""
        self._kv_cache = kv_cache
        self._pace = pace
        self._max_tokens = max_draft_tokens
        self._proposer = NgramProposer()
        self._chances = _Chances(max_draft_tokens)
        self._cost = _DraftCost()
        self._kinds: dict[Request, int] = {}  # of the drafts that are being verified
        self._histories: dict[Request, int] = {}
        self._num_steps = 0

    def add_drafts(self, plan: StepPlan) -> None:
        """Let requests that get one token verify more, as far as that is worth its time and there is room."""
        self._fade()
        if plan.budget.left == 0 or not self._pace.decode_time.seconds(1):
            return
        drafts = self._propose(plan.scheduled.items(), plan)
        if drafts:
            for request, num_tokens in self._choose(plan, drafts).items():
                self._extend(plan, request, drafts[request].token_ids[:num_tokens])

    def is_verifying(self, in_flight: Iterable[LaunchedStep]) -> bool:
        """Whether any of these steps has drafts."""
        return any(share.drafts for step in in_flight for share in step.output.scheduled)

    def without_drafts_s(self, duration_s: float, *, num_drafts: int, num_decodes: int, num_chunk_tokens: int) -> float:
        """How long a step would have taken without its drafts. A step without prompts teaches what drafts cost, and
        says nothing new about the rest of it."""
        if num_chunk_tokens:
            return max(0.0, duration_s - num_drafts * self._cost.token_s)
        expected_s = self._pace.decode_s(num_decodes)
        self._cost.observe(num_drafts, duration_s - expected_s)
        return expected_s

    def observe(self, request: Request, *, num_drafts: int, num_accepted: int) -> None:
        """Learn from a draft of so many tokens, of which so many were right."""
        self.stats.num_accepted_tokens += num_accepted
        for place in range(num_accepted):
            self.accepted_at[place] += 1
        self._chances.count(self._kinds.pop(request), num_drafts, num_accepted)
        self._histories[request] = _RIGHT if num_accepted == num_drafts else _PARTLY if num_accepted else _WRONG

    def _propose(self, shares: Iterable[tuple[Request, ScheduledRequest]], plan: StepPlan) -> dict[Request, NgramDraft]:
        """Guesses for the requests that decode and may have some."""
        most, unlanded, drafts = min(self._max_tokens, plan.budget.left), self._kv_cache.unlanded, {}
        for request, share in shares:
            if share.num_tokens != 1 or not share.samples or not request.can_draft or request in unlanded:
                continue
            if request.num_pending_tokens or not request.output_token_ids:
                continue
            room = min(most, request.max_total_tokens - request.num_tokens - 1)
            draft = self._proposer.propose(request, room) if room > 0 else None
            if draft is not None:
                drafts[request] = draft
        return drafts

    def _choose(self, plan: StepPlan, drafts: dict[Request, NgramDraft]) -> dict[Request, int]:
        """How many tokens of each draft to verify: those most likely to survive first, while they are worth it."""
        candidates: list[tuple[float, int, Request]] = []
        for order, (request, draft) in enumerate(drafts.items()):
            kind = self._kinds[request] = _kind_of(draft.num_matched, self._histories.get(request, _NO_HISTORY))
            survival = self._chances.survival(kind)
            candidates += [(survival[place], -order, request) for place in range(len(draft.token_ids))]
        candidates.sort(key=lambda entry: entry[:2], reverse=True)
        num_rows, token_s = len(plan.scheduled), self._cost.token_s
        num_tokens = sum(share.num_tokens for share in plan.scheduled.values())
        chunk_s = (num_tokens - num_rows) * (self._pace.step_time.per_token_s or 0.0)
        value, step_s = float(num_tokens), self._pace.decode_s(num_rows) + chunk_s
        chosen: dict[Request, int] = {}
        for chance, _, request in candidates[: min(plan.budget.left, self._cost.most_tokens)]:
            if chance * step_s < token_s * value:
                break
            value, step_s = value + chance, step_s + token_s
            chosen[request] = chosen.get(request, 0) + 1
        for request in drafts.keys() - chosen.keys():
            del self._kinds[request]
        return chosen

    def _extend(self, plan: StepPlan, request: Request, token_ids: tuple[int, ...]) -> None:
        """Give a request's share a draft, shorter if there are no blocks for all of it."""
        share = plan.scheduled[request]
        new_block_ids = self._kv_cache.allocate(request, 1 + len(token_ids))
        if new_block_ids is None:
            new_block_ids, token_ids = [], token_ids[: self._kv_cache.num_free_slots(request) - 1]
            if not token_ids:
                del self._kinds[request]
                return
        plan.budget.take(len(token_ids))
        plan.scheduled[request] = share._replace(
            num_tokens=1 + len(token_ids), new_block_ids=share.new_block_ids + tuple(new_block_ids), drafts=token_ids
        )
        self.stats.num_drafts += 1
        self.stats.num_draft_tokens += len(token_ids)

    def _fade(self) -> None:
        self._num_steps += 1
        if self._num_steps % FADE_STEPS == 0:
            self._chances.fade()
            self._proposer.forget_finished()
            for table in (self._histories, self._kinds):
                for request in [request for request in table if request.status.is_finished]:
                    del table[request]


class _DraftCost:
    """What a drafted token adds to a step: a mean over steps that had some, younger ones counting more."""

    def __init__(self) -> None:
        self._num_tokens = self._added_s = 0.0
        self.most_tokens = FIRST_DRAFTS
        """How many may be drafted in a step."""

    @property
    def token_s(self) -> float:
        """0 before any step had drafts."""
        return max(0.0, self._added_s / self._num_tokens) if self._num_tokens else 0.0

    def observe(self, num_tokens: int, added_s: float) -> None:
        """A step took so much longer for so many drafted tokens."""
        self._num_tokens = _COST_KEPT * self._num_tokens + num_tokens
        self._added_s = _COST_KEPT * self._added_s + added_s
        self.most_tokens = max(self.most_tokens, 2 * num_tokens)


class _Chances:
    """How often guesses were right, by their kind and their place in a draft, given that those before them were."""

    def __init__(self, num_places: int) -> None:
        num_kinds = (len(_MATCH_CLASSES) + 1) * (_RIGHT + 1)
        self._right = [[PRIOR_CHANCE * PRIOR_WEIGHT] * num_places for _ in range(num_kinds)]
        self._all = [[PRIOR_WEIGHT] * num_places for _ in range(num_kinds)]

    def survival(self, kind: int) -> list[float]:
        """For each place, how likely it is that all guesses up to it are right."""
        survival, found = 1.0, []
        for right, total in zip(self._right[kind], self._all[kind], strict=True):
            survival *= right / total
            found.append(survival)
        return found

    def count(self, kind: int, num_drafts: int, num_right: int) -> None:
        """Note a draft. What follows a wrong guess says nothing."""
        right, total = self._right[kind], self._all[kind]
        for place in range(min(num_drafts, num_right + 1)):
            if total[place] >= MOST_COUNTED:
                right[place] *= 0.5
                total[place] *= 0.5
            right[place] += place < num_right
            total[place] += 1.0

    def fade(self) -> None:
        """Forget some of it, but for what was assumed at first."""
        for right, total in zip(self._right, self._all, strict=True):
            for place in range(len(right)):
                right[place] += (1.0 - FADE) * (PRIOR_CHANCE * PRIOR_WEIGHT - right[place])
                total[place] += (1.0 - FADE) * (PRIOR_WEIGHT - total[place])


def _kind_of(num_matched: int, history: int) -> int:
    match_class = sum(num_matched >= start for start in _MATCH_CLASSES)
    return match_class * (_RIGHT + 1) + history


# ---- guesses --------------------------------------------------------------------------------------------------------


class NgramDraft(NamedTuple):
    """A guess."""

    token_ids: tuple[int, ...]
    num_matched: int
    """How many tokens before it were the same, from `MIN_MATCH` to `MAX_MATCH`."""


class NgramProposer:
    """Looks up drafts in the tokens of requests. It copies them once, as they become known."""

    def __init__(self) -> None:
        self._tokens: dict[Request, _TokenBytes] = {}

    def propose(self, request: Request, max_tokens: int) -> NgramDraft | None:
        """What may follow a request's known tokens, at most so many; None if their end has not been there before."""
        known = self._tokens.get(request)
        if known is None:
            known = self._tokens[request] = _TokenBytes(request)
        size = known.take_new(request)
        start = known.follow(MIN_MATCH) if size > MIN_MATCH else None
        if start is None:
            return None
        shortest, longest = MIN_MATCH, min(MAX_MATCH, size - 1)
        while shortest < longest:  # where a longer end was, the shorter ones were too
            middle = (shortest + longest + 1) // 2
            found = known.follow(middle)
            if found is None:
                longest = middle - 1
            else:
                shortest, start = middle, found
        token_ids = known.tokens(start, start + max_tokens)
        while len(token_ids) < max_tokens:  # the guess runs into itself: a repetition
            token_ids.append(token_ids[len(token_ids) - (size - start)])
        return NgramDraft(tuple(token_ids), shortest)

    def forget_finished(self) -> None:
        """Drop the tokens of requests that have ended."""
        self._tokens = {request: known for request, known in self._tokens.items() if not request.status.is_finished}


class _TokenBytes:
    """A request's known tokens as bytes, which are searched fast."""

    def __init__(self, request: Request) -> None:
        self._bytes = bytearray(array("i", request.prompt_token_ids).tobytes())

    def take_new(self, request: Request) -> int:
        """Add what has become known; returns how many tokens there are."""
        num_read = len(self._bytes) // _TOKEN_BYTES
        self._bytes += array("i", request.output_token_ids[num_read - request.num_prompt_tokens :]).tobytes()
        return len(self._bytes) // _TOKEN_BYTES

    def follow(self, num_tokens: int) -> int | None:
        """Where the last so many tokens have been before, for the last time: the place behind them."""
        end = self._bytes[-num_tokens * _TOKEN_BYTES :]
        at = self._bytes.rfind(end, 0, -_TOKEN_BYTES)
        while at > 0 and at % _TOKEN_BYTES:  # across tokens
            at = self._bytes.rfind(end, 0, at + len(end) - 1)
        return None if at < 0 else at // _TOKEN_BYTES + num_tokens

    def tokens(self, start: int, end: int) -> list[int]:
        return array("i", bytes(self._bytes[start * _TOKEN_BYTES : end * _TOKEN_BYTES])).tolist()
