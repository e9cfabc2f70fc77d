"""How long a newcomer to a line would wait for its first token, from the engine's forecasts for those before it.

The engine makes a forecast for each request that it queues. The latest one says when the end of the line is reached.
What has joined the line since then adds the time of its prompt tokens:

    the line      ▣ ▣ ▣ ▣ ▣ ▣ ▣ │ ▢ ▢ │ newcomer
                                ▲  └ admitted since: prompt tokens × seconds per prompt token
                                └ its first token was forecast for this time

The expected wait shrinks with time. If the line moves slower than was forecast, the next request that is
admitted brings a new forecast.
"""

from __future__ import annotations

from collections.abc import Callable


class ExpectedWait:
    """The expected wait of one line. `token_s` returns the seconds that the engine needs for a prompt token."""

    def __init__(self, now: Callable[[], float], token_s: Callable[[], float]) -> None:
        self._now = now
        self._token_s = token_s
        self.num_tokens = 0
        """The prompt tokens of all requests that have ever been admitted, whether or not they still wait."""
        self._first_token_at_s = now()
        self._num_tokens_then = 0

    def admit(self, num_tokens: int) -> int:
        """Count the prompt tokens of a request. Returns its place, which `note_forecast` needs."""
        self.num_tokens += num_tokens
        return self.num_tokens

    def note_forecast(self, place: int, first_token_s: float) -> None:
        """Note the forecast for the request at this place. Forecasts of earlier places are outdated."""
        if place >= self._num_tokens_then:
            self._first_token_at_s, self._num_tokens_then = self._now() + first_token_s, place

    def seconds(self, num_tokens: int = 0) -> float:
        """Return how long a newcomer with this many prompt tokens would wait."""
        num_new = self.num_tokens - self._num_tokens_then + num_tokens
        return max(0.0, self._first_token_at_s - self._now()) + num_new * self._token_s()
