"""How long to wait before the engine is started again: longer after each failure, from the start after good service."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Backoff:
    """0.5 s, 1 s, 2 s, … up to half a minute."""

    first_s: float = 0.5
    longest_s: float = 30.0
    good_service_s: float = 60.0
    """An engine that has served this long before it failed did not fail because it was started too early."""
    _num_failures: int = 0

    def next_delay_s(self, *, served_s: float) -> float:
        """The delay after a failure; `served_s` is how long the engine had been ready, 0 if it never was."""
        if served_s >= self.good_service_s:
            self._num_failures = 0
        delay_s = min(self.first_s * 2.0**self._num_failures, self.longest_s)
        self._num_failures = min(self._num_failures + 1, 64)
        return delay_s
