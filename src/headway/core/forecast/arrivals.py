"""How many prompt tokens arrive per second, as measured over the last seconds."""

from __future__ import annotations

import math


class ArrivalRate:
    """A rate with exponential decay: after `memory_s` an arrival has 1/e of its weight."""

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._sum = 0.0
        self._began_s: float | None = None
        self._last_s = 0.0

    def note(self, num_tokens: int, *, now_s: float) -> None:
        """Note a request with this many tokens to compute."""
        if self._began_s is None:
            self._began_s = self._last_s = now_s
        self._fade(now_s)
        self._sum += num_tokens

    def per_second(self, now_s: float) -> float:
        """Return the rate; 0 before any arrival. Shortly after the first one it counts as one in `memory_s`."""
        if self._began_s is None:
            return 0.0
        self._fade(now_s)
        seen_s = self._memory_s * (1.0 - math.exp((self._began_s - now_s) / self._memory_s))
        return self._sum / max(seen_s, 0.1 * self._memory_s)

    def _fade(self, now_s: float) -> None:
        if now_s > self._last_s:
            self._sum *= math.exp((self._last_s - now_s) / self._memory_s)
            self._last_s = now_s
