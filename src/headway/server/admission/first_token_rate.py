"""How fast a line moves: first tokens per second, measured while somebody waited for one.

Idle time says nothing about how fast requests could have been served, so it does not count as time; but it lets what
was seen before fade, as all time does.

    expected wait of a newcomer  =  those who wait  /  first tokens per second

The rate is the line's own. Whoever else is served meanwhile, and in what order, is in it already, whatever the policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable

MEMORY_S = 10.0
"""After so long what was seen counts 1/e of what is seen now."""


class FirstTokenRate:
    """Of one line."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._num_waiting = 0
        self._last_s = now()
        self._num_first_tokens = 0.0
        self._busy_s = 0.0

    def note_waiting(self, num_waiting: int) -> None:
        """So many wait from now on."""
        self._advance()
        self._num_waiting = num_waiting

    def note_first_tokens(self, number: int) -> None:
        """They wait no longer, because they got what they waited for."""
        self._advance()
        self._num_first_tokens += number

    def per_second(self) -> float:
        """Infinite if nobody has had to wait. A line that stands still counts as one in which a single first token has
        come, so that there is always a number to tell."""
        self._advance()
        return max(self._num_first_tokens, 1.0) / self._busy_s if self._busy_s else math.inf

    def _advance(self) -> None:
        now_s = self._now()
        fade = math.exp((self._last_s - now_s) / MEMORY_S)
        self._last_s = now_s
        self._num_first_tokens *= fade
        self._busy_s = self._busy_s * fade + (MEMORY_S * (1.0 - fade) if self._num_waiting else 0.0)
