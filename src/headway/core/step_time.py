"""Learns how long steps take, and decides how many prompt tokens the next step may compute beside its decodes.

    DecodeTime      the duration of a step that only decodes, by its number of requests
    PromptTokenTime what a prompt token adds to a step, over all steps with prompts
    StepTimeModel   a step's duration by its number of prompt tokens
    DecodePace      how many prompt tokens the next step may have

There is no clock here: durations are arguments, so the same durations give the same results.
"""

from __future__ import annotations

import copy
import math
from typing import NamedTuple

from headway.core.tuning import STEP_TIME


class DecodeTime:
    """The time of a step that only decodes, as a line fitted to the observed steps. Younger steps count more.

    duration           ╱
                   ╱            each request adds the reading of its keys and values
               ╱
    ───────╱
           │  reading the weights takes the same time for any number of requests
           0          requests
    """

    ROWS_PER_BASE = 100.0
    """This many requests are assumed to cost as much as reading the weights while only batches of one size have been
    observed. It is about right for an 8B model in 16 bit with contexts of a thousand tokens."""
    _KEPT = 0.998  # older steps keep this part of their weight with each new one
    _PRIOR_WEIGHT = 0.1  # the weight of `ROWS_PER_BASE`; a step has weight 1

    def __init__(self) -> None:
        self._num = self._rows = self._rows_squared = self._s = self._rows_s = 0.0
        self._base_s = self._row_s = 0.0

    def observe(self, num_rows: int, duration_s: float) -> None:
        """Learn from a step in which this many requests generated."""
        expected_s = self.seconds(num_rows)
        if duration_s < expected_s / STEP_TIME.most_times_expected:
            self._num = self._rows = self._rows_squared = self._s = self._rows_s = 0.0
        elif self._num:
            duration_s = min(duration_s, STEP_TIME.most_times_expected * expected_s)
        self._num = self._KEPT * self._num + 1.0
        self._rows = self._KEPT * self._rows + num_rows
        self._rows_squared = self._KEPT * self._rows_squared + num_rows * num_rows
        self._s = self._KEPT * self._s + duration_s
        self._rows_s = self._KEPT * self._rows_s + num_rows * duration_s
        self._fit()

    @property
    def row_s(self) -> float:
        """The time that one more request adds."""
        return self._row_s

    def seconds(self, num_rows: int) -> float:
        """Return the expected time of a step with this many decodes; 0 before any was observed."""
        return self._base_s + num_rows * self._row_s

    def _fit(self) -> None:
        """Fit the line by least squares, with `base_s - ROWS_PER_BASE * row_s` as one more error. Neither `base_s` nor
        `row_s` becomes negative."""
        num = self._num + self._PRIOR_WEIGHT
        rows = self._rows - self._PRIOR_WEIGHT * self.ROWS_PER_BASE
        rows_squared = self._rows_squared + self._PRIOR_WEIGHT * self.ROWS_PER_BASE**2
        determinant = num * rows_squared - rows * rows
        self._base_s = (rows_squared * self._s - rows * self._rows_s) / determinant
        self._row_s = (num * self._rows_s - rows * self._s) / determinant
        if self._row_s < 0.0:
            self._base_s, self._row_s = self._s / self._num, 0.0
        elif self._base_s < 0.0:
            self._base_s, self._row_s = 0.0, self._rows_s / self._rows_squared


class PromptTokenTime:
    """What a prompt token adds to the time of a step's decodes, as a mean over the last steps with prompt tokens.

    Unlike `StepTimeModel` it has no tokens that cost nothing, and it remembers more: a mean is needed to say how long
    many prompts will take, and not how long the next step will.
    """

    _HORIZON_TOKENS = 8192  # a mean over about this many prompt tokens

    def __init__(self) -> None:
        self._num_tokens = self._s = 0.0

    @property
    def seconds(self) -> float | None:
        """The time that a prompt token adds; `None` before any step with prompt tokens."""
        return max(0.0, self._s) / self._num_tokens if self._num_tokens else None

    def observe(self, num_tokens: int, added_s: float) -> None:
        """Learn from a step with this many prompt tokens, which took `added_s` longer than its decodes alone."""
        expected_s = (self.seconds or 0.0) * num_tokens
        if expected_s:
            added_s = min(added_s, STEP_TIME.most_times_expected * expected_s)
        kept = self._HORIZON_TOKENS / (self._HORIZON_TOKENS + num_tokens)
        self._num_tokens = kept * self._num_tokens + num_tokens
        self._s = kept * self._s + added_s


class StepTimeModel:
    """The time of a step without prompts (`base_s`), and the extra time per prompt token (`per_token_s`).

    Every step reads all weights once. A few prompt tokens add nothing to that time, and each further one adds
    `per_token_s`:

        duration                    ╱
                                 ╱         target ── the inter-token time that decodes should keep
        base      ───────────╱
                  0         64      chunk tokens

    `base_s` is learned from steps with at most a few prompt tokens, `per_token_s` from the others. While one of them is
    unknown it is derived from the other: a device computes about `TOKENS_PER_BASE` tokens in the time it needs to read
    the weights. A step can be slow for reasons that say nothing about the next one (a kernel is compiled, another
    process gets the core), but it cannot be faster than the device allows. So the time of a slow step counts only up to
    a limit, and a step that is much faster than expected replaces all that was learned.
    """

    TOKENS_PER_BASE = 200
    """About 230 was measured for an 8B model in 16 bit on an H200. Other devices differ, but it is used only until both
    times have been measured."""
    _BASE_WEIGHT = 0.1  # weight of the newest step in the base time
    _HORIZON_TOKENS = 1024  # the cost per token is a mean over about this many chunk tokens: it grows along a prompt
    _DEFAULT_TOKENS = 512  # prompt tokens of a step with decodes, before any step has run

    def __init__(self, *, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._base_s: float | None = None
        # Weighted sums over steps with chunks: steps, their tokens, their durations. Younger steps count more.
        self._num_steps = self._num_tokens = self._duration_s = 0.0

    @property
    def base_s(self) -> float | None:
        """The time of a step that only decodes; `None` before any step was observed."""
        if self._base_s is not None:
            return self._base_s
        return self.TOKENS_PER_BASE * self._ratio() if self._num_steps else None

    @property
    def per_token_s(self) -> float | None:
        """The extra time for each prompt token; `None` before any step was observed."""
        if not self._num_steps:
            return None if self._base_s is None else self._base_s / self.TOKENS_PER_BASE
        if self._base_s is None:
            return self._ratio()
        return max(0.0, (self._duration_s - self._num_steps * self._base_s) / self._num_tokens)

    def with_limit(self, max_tokens: int) -> StepTimeModel:
        """Return a model that has learned the same, of steps with at most `max_tokens` prompt tokens."""
        model = copy.copy(self)
        model._max_tokens = max_tokens
        return model

    def observe(self, num_chunk_tokens: int, duration_s: float) -> None:
        """Learn from a step with this many prompt tokens beside its decodes."""
        if num_chunk_tokens < STEP_TIME.free_tokens:
            self._observe_base(duration_s)
        else:
            self._observe_chunk(num_chunk_tokens, duration_s)

    def chunk_tokens(self, target_s: float) -> int:
        """Return how many prompt tokens a step with decodes can compute within `target_s`. The result is between
        `free_tokens` and `max_tokens`."""
        base_s, per_token_s = self.base_s, self.per_token_s
        if base_s is None or per_token_s is None:
            return min(self._DEFAULT_TOKENS, self._max_tokens)
        room_s = max(0.0, target_s - base_s)
        if room_s > per_token_s * self._max_tokens:
            return self._max_tokens
        num_tokens = int(room_s / per_token_s) if per_token_s else 0
        return max(min(STEP_TIME.free_tokens, self._max_tokens), num_tokens)

    def _observe_base(self, duration_s: float) -> None:
        if self._base_s is None or duration_s < self._base_s / STEP_TIME.most_times_expected:
            self._base_s = duration_s
        else:
            counted_s = min(duration_s, self._base_s * STEP_TIME.most_times_expected)
            self._base_s += self._BASE_WEIGHT * (counted_s - self._base_s)

    def _observe_chunk(self, num_tokens: int, duration_s: float) -> None:
        base_s, per_token_s = self.base_s, self.per_token_s
        if base_s is not None and per_token_s is not None:
            expected_s = base_s + per_token_s * num_tokens
            if duration_s < expected_s / STEP_TIME.most_times_expected:
                self._num_steps = self._num_tokens = self._duration_s = 0.0
            duration_s = min(duration_s, expected_s * STEP_TIME.most_times_expected)
        kept = self._HORIZON_TOKENS / (self._HORIZON_TOKENS + num_tokens)
        self._num_steps = kept * self._num_steps + 1
        self._num_tokens = kept * self._num_tokens + num_tokens
        self._duration_s = kept * self._duration_s + duration_s

    def _ratio(self) -> float:
        """The time per token, if reading the weights counts as `TOKENS_PER_BASE` tokens."""
        return self._duration_s / (self._num_tokens + self.TOKENS_PER_BASE * self._num_steps)


class PromptRoom(NamedTuple):
    """How many prompt tokens a step may have beside its decodes."""

    num_tokens: int
    is_late: bool
    """Whether its decodes miss their target for the sake of the backlog."""


class DecodePace:
    """Decides how many prompt tokens a step may compute, so that decoding requests keep their target inter-token time.

    Usually these are as many as fit into the target. In two cases a step may be longer, because a device that computes
    prompts in small chunks reads its weights for every chunk, and all waiting requests wait for that:

    * All but one token in `tokens_per_late_one` keep the target. The late ones are saved for when they help most: if
      the backlog of prompts would take many steps at the target's pace, one step may take a few times as long.
    * A step may always take a fixed share of the time that the whole backlog needs. Under low load that is less than
      the target and changes nothing. Under overload, when keeping the pace of a few requests would delay many, steps
      grow, and they shrink again with the backlog.

    In neither case is a step longer than `stretch` times the target, nor longer than `gaining_steps` times the decodes
    alone: beyond that, longer steps hardly compute prompts faster. Without a target, the latter is the only limit.

        backlog   ▁▁▂▁▁▁▁▁▇▆▄▃▂▁▁▁▁          prompt tokens that are not computed yet
        step      ▂▂▂▂▂▂▂▂▄▄▃▂▂▂▂▂▂          max(target, share × backlog), sometimes more, up to a limit

    Matrix units compute rows in tiles, and a tile with one row costs as much as a full one. So the number of tokens in
    a step is cut to a whole number of tiles.
    """

    SHORT_TOKENS = 512
    """A prompt up to this length is never long, if a step's budget can hold it. Measured step times cannot decide this:
    beside a long context each token costs a multiple of what it costs in a short prompt."""
    _MOST_LATE_TOKENS = 1024.0  # how many late tokens can be saved up for a burst

    def __init__(
        self, *, target_s: float, max_tokens: int, long_step_s: float = 0.0, full_tokens: int = STEP_TIME.free_tokens
    ) -> None:
        """`target_s`: the inter-token time of requests that have no own target; 0: none. `long_step_s`: how long a step
        with a long prompt may take; 0: no limit. Such a step may always have `full_tokens`, which keep the device busy.
        """
        self.target_s = target_s
        self.long_step_s = long_step_s
        self._full_tokens = min(full_tokens, max_tokens)
        self.step_time = StepTimeModel(max_tokens=max_tokens)
        self.decode_time = DecodeTime()
        self.prompt_token_time = PromptTokenTime()
        self._max_tokens = max_tokens
        self._num_late_allowed = 0.0

    def learn_from(self, other: DecodePace) -> None:
        """Take over what another pace has learned about the time of steps."""
        self.step_time = other.step_time.with_limit(self._max_tokens)
        self.decode_time = copy.copy(other.decode_time)

    def chunk_tokens(
        self, *, target_s: float, num_decodes: int, num_backlog_tokens: int, limit_s: float = math.inf
    ) -> int:
        """Return how many prompt tokens the next step may have beside its decodes. Whatever the backlog, they keep it
        within `limit_s`. Call it once for each step that could have prompt tokens, since it counts late tokens."""
        room = self.foresee(
            target_s=target_s,
            num_decodes=num_decodes,
            num_backlog_tokens=num_backlog_tokens,
            limit_s=limit_s,
            num_late_allowed=self._num_late_allowed,
        )
        if room.is_late:
            self._num_late_allowed -= num_decodes
        elif num_decodes:
            self.note_decodes(num_decodes, target_s=target_s)
        return room.num_tokens

    def foresee(
        self,
        *,
        target_s: float,
        num_decodes: int,
        num_backlog_tokens: float,
        num_late_allowed: float,
        limit_s: float = math.inf,
    ) -> PromptRoom:
        """Return what `chunk_tokens` would return for a step like this if `num_late_allowed` tokens had been saved up.
        This counts nothing, so it may be called for steps that are only imagined."""
        if not num_decodes:
            return PromptRoom(self._max_tokens, False)
        if not target_s:
            gaining_s = STEP_TIME.gaining_steps * self.decode_time.seconds(num_decodes) or math.inf
            limit_s = min(gaining_s, limit_s)
            if limit_s == math.inf:
                return PromptRoom(self._max_tokens, False)
            return PromptRoom(self._whole_tiles(self.step_time.chunk_tokens(limit_s), num_decodes), False)
        gaining_s = STEP_TIME.gaining_steps * self.decode_s(num_decodes) or math.inf
        longest_s = max(target_s, min(STEP_TIME.stretch * target_s, gaining_s))
        backlog_s = num_backlog_tokens * (self.step_time.per_token_s or 0.0)
        num_tokens = self.step_time.chunk_tokens(max(target_s, min(STEP_TIME.backlog_share * backlog_s, longest_s)))
        is_backlog = num_backlog_tokens > STEP_TIME.backlog_steps * self.step_time.chunk_tokens(target_s)
        may_be_late = is_backlog and limit_s >= STEP_TIME.stretch * target_s
        is_late = may_be_late and num_late_allowed >= num_decodes
        if is_late:
            num_tokens = max(num_tokens, self.step_time.chunk_tokens(longest_s))
        if limit_s < math.inf:
            num_tokens = min(num_tokens, self.step_time.chunk_tokens(limit_s))
        return PromptRoom(self._whole_tiles(num_tokens, num_decodes), is_late)

    @property
    def num_late_allowed(self) -> float:
        """How many tokens may be late, as saved up by those that were in time."""
        return self._num_late_allowed

    def max_short_tokens(self, num_left_tokens: int) -> int:
        """Return the length up to which a prompt is short, for a step with this many tokens left for prompts."""
        return min(
            num_left_tokens,
            max(self.SHORT_TOKENS, int(STEP_TIME.short_part * self._max_tokens), self._long_step_tokens()),
        )

    def long_tokens(self, num_decodes: int) -> int:
        """Return how many prompt tokens a step may have beside its decodes if one of its prompts is long."""
        num_tokens = self._long_step_tokens()
        return num_tokens if num_tokens == self._max_tokens else self._whole_tiles(num_tokens, num_decodes)

    def _long_step_tokens(self) -> int:
        if not self.long_step_s or self.step_time.per_token_s is None:
            return self._max_tokens
        return max(self.step_time.chunk_tokens(self.long_step_s), self._full_tokens)

    def note_decodes(self, num_decodes: int, *, target_s: float) -> None:
        """Count the decodes of the next step as in time, so that some later ones may be late."""
        if target_s:
            saved = self._num_late_allowed + num_decodes / STEP_TIME.tokens_per_late_one
            self._num_late_allowed = min(saved, self._MOST_LATE_TOKENS)

    @property
    def longest_s(self) -> float:
        """About how long a step full of prompt tokens takes; 0 without a target, or before any step has run."""
        base_s, token_s = self.step_time.base_s, self.step_time.per_token_s
        return base_s + self._max_tokens * token_s if self.target_s and base_s and token_s else 0.0

    def decode_s(self, num_decodes: int) -> float:
        """Return how long a step takes that has only this many decodes; 0 before any step has run."""
        return self.decode_time.seconds(num_decodes) or self.step_time.base_s or 0.0

    def planned_s(self, *, num_decodes: int, num_backlog_tokens: int, slowdown: float) -> float:
        """Return how long the next step would be planned to take with only these decodes and this backlog, on a machine
        that takes `slowdown` times as long as this one."""
        decode_s = slowdown * self.decode_s(num_decodes)
        if not num_backlog_tokens:
            return decode_s
        backlog_s = slowdown * num_backlog_tokens * (self.step_time.per_token_s or 0.0)
        grown_s = min(
            STEP_TIME.backlog_share * backlog_s, STEP_TIME.gaining_steps * decode_s, STEP_TIME.stretch * self.target_s
        )
        return max(decode_s, min(decode_s + backlog_s, max(self.target_s, grown_s)))

    def _whole_tiles(self, num_chunk_tokens: int, num_decodes: int) -> int:
        """Return fewer prompt tokens, so that the step fills whole tiles. Small steps have smaller tiles, so that none
        loses as much as a quarter."""
        num_tokens = num_chunk_tokens + num_decodes
        tile = min(STEP_TIME.tile_tokens, 1 << max(0, num_tokens.bit_length() - 3))
        return max(num_chunk_tokens - num_tokens % tile, min(STEP_TIME.free_tokens, self._max_tokens))

    def observe(self, *, num_chunk_tokens: int, num_decodes: int, duration_s: float) -> None:
        """Learn from a step with this many prompt tokens beside its decodes."""
        self.step_time.observe(num_chunk_tokens, duration_s)
        if num_chunk_tokens:
            self.prompt_token_time.observe(num_chunk_tokens, duration_s - self.decode_s(num_decodes))
        else:
            self.decode_time.observe(num_decodes, duration_s)
