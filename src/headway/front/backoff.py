"""How soon a process that has failed is started again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Backoff:
    """0.5 s, 1 s, 2 s, … up to five: requests may be waiting for it."""

    first_s: float = 0.5
    longest_s: float = 5.0
    good_service_s: float = 1.0
    """A process that has served this long before it failed did not fail because it was started too early."""
    _num_failures: int = 0

    def next_delay_s(self, *, served_s: float) -> float:
        """The delay after a failure; `served_s` is how long the process had been ready, 0 if it never was."""
        if served_s >= self.good_service_s:
            self._num_failures = 0
        delay_s = min(self.first_s * 2.0**self._num_failures, self.longest_s)
        self._num_failures = min(self._num_failures + 1, 64)
        return delay_s
