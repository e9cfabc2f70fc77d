"""The price of the server's tokens: of the last minutes and since the start, for its page.

The devices cost money while the server runs, whether they compute or wait. `headway.price` defines what a token costs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from headway.core.token_time import TokenTimeStats
from headway.price import TokenPrices, Use
from headway.wire.engine_stats import EngineStats


class _Mark(NamedTuple):
    """The counters at the end of a second."""

    at_s: float
    num_input_tokens: int
    num_output_tokens: int
    prompt_s: float
    output_s: float


class PriceMeter:
    """Keeps counters of the last minutes, and the seconds of the devices."""

    WINDOW_S = 300.0

    def __init__(
        self, per_hour: float, num_devices: Callable[[], int], *, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`per_hour` is the price of one device; `num_devices` says how many there are now."""
        self._per_hour, self._num_devices, self._now = per_hour, num_devices, now
        self._began_s = self._last_s = now()
        self._device_s = 0.0
        self._last = self._first = _Mark(self._began_s, 0, 0, 0.0, 0.0)
        self._marks: deque[_Mark] = deque([self._first])

    def observe(self, stats: EngineStats) -> None:
        """Take in the engine's counters, which only grow, after a step."""
        batch, token_time = stats.batch, stats.token_time
        now_s = self._advance()
        self._last = _Mark(
            now_s, batch.prompt_tokens, batch.generation_tokens, token_time.prompt_s, token_time.output_s
        )
        if int(self._marks[-1].at_s) == int(now_s) and len(self._marks) > 1:
            self._marks[-1] = self._last
        else:
            self._marks.append(self._last)

    def since_start(self) -> TokenPrices:
        """The prices of all tokens since the server's start."""
        self._advance()
        return self._prices(self._first, self._device_s)

    def recent(self) -> TokenPrices:
        """The prices of the tokens of the last `WINDOW_S` seconds, at the present number of devices."""
        now_s = self._advance()
        since_s = now_s - self.WINDOW_S
        while len(self._marks) > 1 and self._marks[1].at_s <= since_s:
            self._marks.popleft()
        return self._prices(self._marks[0], self._num_devices() * min(self.WINDOW_S, now_s - self._began_s))

    def numbers(self) -> dict[str, float | None]:
        """Both, for a frame of the page."""
        recent, whole = self.recent(), self.since_start()
        return {
            "recent_input": recent.input,
            "recent_output": recent.output,
            "input": whole.input,
            "output": whole.output,
        }

    def _advance(self) -> float:
        """Count the devices' seconds until now."""
        now_s = self._now()
        self._device_s += self._num_devices() * (now_s - self._last_s)
        self._last_s = now_s
        return now_s

    def _prices(self, since: _Mark, device_s: float) -> TokenPrices:
        last = self._last
        time = TokenTimeStats(max(last.prompt_s - since.prompt_s, 0.0), max(last.output_s - since.output_s, 0.0))
        use = Use(
            device_s,
            max(last.num_input_tokens - since.num_input_tokens, 0),
            max(last.num_output_tokens - since.num_output_tokens, 0),
            time.prompt_share,
        )
        return TokenPrices.of(self._per_hour, use)
