"""How much of a step prompts may take while other requests generate, so that these keep the inter-token time they want.

Nearly always it is what fits into the target. Two things may make a step longer, since a device that computes prompts
in small pieces reads its weights for every piece, and everybody in the queue waits for that:

* The target is kept by all but one token in `TOKENS_PER_LATE_ONE`. That little is spent where it helps most: when the
  prompts that are there would take many steps at the target's pace, one step may take a few times as long.
* A step may always take a fixed share of the time that the whole backlog needs. In quiet times that is less than the
  target and changes nothing; in a flood, where keeping the pace of a few would be paid for by the many that wait, it
  lets the steps grow, and as the backlog melts they shrink back.

    backlog   ▁▁▂▁▁▁▁▁▇▆▄▃▂▁▁▁▁          prompt tokens that are not computed yet
    step      ▂▂▂▂▂▂▂▂▅▄▃▂▂▂▂▂▂          max(target, share × backlog), now and then more

Matrix units compute rows in tiles, and the first row of a tile costs as much as all: a step is filled up to a whole
number of them.
"""

from __future__ import annotations

import math

from headway.core.decode_time import DecodeTime
from headway.core.step_time import FREE_TOKENS, StepTimeModel

BACKLOG_SHARE = 0.1
"""Of the time that the backlog needs, what one step may take."""
BACKLOG_STEPS = 8
"""So many steps at the target's pace are a backlog worth being late for."""
STRETCH = 4.0
"""How many times the target a late step may take."""
TOKENS_PER_LATE_ONE = 250
"""Tokens that have to be in time before another one may be late: the 99th percentile keeps the target."""
SHORT_TOKENS = 512
"""A prompt up to this length is never a long one, if a step's budget can hold it. What is learned of steps cannot tell:
beside a long context each token costs a multiple of what it costs in a short prompt."""
SHORT_PART = 0.25
"""Nor is one up to this part of the largest step: several of them are computed together at full speed."""
TILE_TOKENS = 128
"""Rows of a matrix product that are computed together, where there are many; smaller products have smaller tiles."""

_MOST_LATE_TOKENS = 1024.0  # what may be saved up for a burst


class DecodePace:
    """Answers one question per step, and keeps the books of late tokens. A target of 0 is none."""

    def __init__(self, *, target_s: float, max_tokens: int, long_step_s: float = 0.0) -> None:
        """`long_step_s`: how long a step may take in which a long prompt is computed; 0: as long as any."""
        self.target_s = target_s
        self.long_step_s = long_step_s
        self.step_time = StepTimeModel(max_tokens=max_tokens)
        self.decode_time = DecodeTime()
        self._max_tokens = max_tokens
        self._num_late_allowed = 0.0

    def chunk_tokens(self, *, num_decodes: int, num_backlog_tokens: int, limit_s: float = math.inf) -> int:
        """How many prompt tokens the next step may have beside its decodes, and none that make it longer than
        `limit_s`, whatever the backlog. To be asked once for each step that could have any."""
        if not self.target_s or not num_decodes:
            return self._max_tokens
        backlog_s = num_backlog_tokens * (self.step_time.per_token_s or 0.0)
        num_tokens = self.step_time.chunk_tokens(max(self.target_s, BACKLOG_SHARE * backlog_s))
        is_backlog = num_backlog_tokens > BACKLOG_STEPS * self.step_time.chunk_tokens(self.target_s)
        may_be_late = is_backlog and limit_s >= STRETCH * self.target_s
        if may_be_late and self._num_late_allowed >= num_decodes:
            self._num_late_allowed -= num_decodes
            num_tokens = max(num_tokens, self.step_time.chunk_tokens(STRETCH * self.target_s))
        else:
            self.note_decodes(num_decodes)
        if limit_s < math.inf:
            num_tokens = min(num_tokens, self.step_time.chunk_tokens(limit_s))
        return self._whole_tiles(num_tokens, num_decodes)

    def max_short_tokens(self, num_left_tokens: int) -> int:
        """The longest prompt that counts as fitting into one step, of one that has so many tokens left for prompts."""
        return min(num_left_tokens, max(SHORT_TOKENS, int(SHORT_PART * self._max_tokens), self._long_step_tokens()))

    def long_tokens(self, num_decodes: int) -> int:
        """How many prompt tokens a step may have beside its decodes if there is a long prompt among them."""
        num_tokens = self._long_step_tokens()
        return num_tokens if num_tokens == self._max_tokens else self._whole_tiles(num_tokens, num_decodes)

    def _long_step_tokens(self) -> int:
        if not self.long_step_s or self.step_time.per_token_s is None:
            return self._max_tokens
        return self.step_time.chunk_tokens(self.long_step_s)

    def note_decodes(self, num_decodes: int) -> None:
        """The next step is going to have decodes in time: some later ones may be late for that."""
        if self.target_s:
            saved = self._num_late_allowed + num_decodes / TOKENS_PER_LATE_ONE
            self._num_late_allowed = min(saved, _MOST_LATE_TOKENS)

    @property
    def longest_s(self) -> float:
        """About what a step takes that is full of prompts; 0 where time does not limit steps, or none was seen."""
        base_s, token_s = self.step_time.base_s, self.step_time.per_token_s
        return base_s + self._max_tokens * token_s if self.target_s and base_s and token_s else 0.0

    def decode_s(self, num_decodes: int) -> float:
        """What a step with so many decodes and nothing else takes, as far as anything was seen; else 0."""
        return self.decode_time.seconds(num_decodes) or self.step_time.base_s or 0.0

    def planned_s(self, *, num_decodes: int, num_backlog_tokens: int, slowdown: float) -> float:
        """How long the next step would be meant to take with so many decodes, such a backlog and nothing else, on a
        machine that takes `slowdown` times as long as this one."""
        decode_s = slowdown * self.decode_s(num_decodes)
        if not num_backlog_tokens:
            return decode_s
        backlog_s = slowdown * num_backlog_tokens * (self.step_time.per_token_s or 0.0)
        return max(decode_s, min(decode_s + backlog_s, max(self.target_s, BACKLOG_SHARE * backlog_s)))

    def _whole_tiles(self, num_chunk_tokens: int, num_decodes: int) -> int:
        """So much less that the step ends with a tile. Small steps have smaller tiles, so none loses over a quarter."""
        num_tokens = num_chunk_tokens + num_decodes
        tile = min(TILE_TOKENS, 1 << max(0, num_tokens.bit_length() - 3))
        return max(num_chunk_tokens - num_tokens % tile, min(FREE_TOKENS, self._max_tokens))

    def observe(self, *, num_chunk_tokens: int, num_decodes: int, duration_s: float) -> None:
        """A step with so many prompt tokens beside its decodes has taken so long."""
        self.step_time.observe(num_chunk_tokens, duration_s)
        if not num_chunk_tokens:
            self.decode_time.observe(num_decodes, duration_s)
