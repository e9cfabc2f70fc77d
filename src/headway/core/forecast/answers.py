"""How long answers are, as far as it can be known before they end, and how fast requests leave the batch.

The length of an answer is its prediction, if it has one. Otherwise it is drawn from the answers that ended last: what
is left of an answer of `n` tokens is as long as what was left of those that had more than `n`.

    departures   ▁▁▂▃▅▇      how many requests have left by then: those that run now, and those that take their seats
    steps        0 → 4096
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter, deque
from collections.abc import Iterable

from headway.core.request import Request

_STEPS: tuple[int, ...] = tuple(sorted({round(math.pow(2.0, power / 2)) for power in range(25)}))
"""The numbers of steps for which departures are computed: 1, 2, 3, 4, 6, 8 … 4096."""


class RecentAnswers:
    """The lengths of the answers that ended last."""

    KEPT = 256
    """How many are remembered."""

    def __init__(self, *, knows_limits: bool = True) -> None:
        """`knows_limits`: an answer is never expected to be longer than its request allows."""
        self._knows_limits = knows_limits
        self._in_order: deque[int] = deque()
        self._sorted: list[int] = []

    def note(self, num_tokens: int) -> None:
        """Note the length of an answer that has ended by itself or by its limit."""
        if len(self._in_order) == self.KEPT:
            del self._sorted[bisect.bisect_left(self._sorted, self._in_order.popleft())]
        self._in_order.append(num_tokens)
        bisect.insort(self._sorted, num_tokens)

    @property
    def mean_tokens(self) -> float | None:
        """The mean length of these answers; `None` if there are none."""
        return sum(self._sorted) / len(self._sorted) if self._sorted else None

    def expected_tokens(self, request: Request) -> float | None:
        """Return the expected length of the whole answer of a request that has none yet; `None` if nothing is known."""
        limit = request.max_total_tokens - request.num_prompt_tokens
        if request.options.predicted_tokens is not None:
            return max(1.0, min(request.options.predicted_tokens, limit))
        if not self._sorted:
            return None
        if not self._knows_limits:
            return self.mean_tokens
        num_below = bisect.bisect_left(self._sorted, limit)
        return (sum(self._sorted[:num_below]) + limit * (len(self._sorted) - num_below)) / len(self._sorted)

    def departures(self, running: Iterable[Request], *, num_fresh: int = 0) -> Departures | None:
        """Return how fast these requests, `num_fresh` that are about to begin, and the successors of all of them leave;
        `None` if nothing is known about some of them."""
        rests: list[float] = []
        ages: Counter[int] = Counter({0: num_fresh} if num_fresh else {})
        for request in running:
            num_tokens = request.num_tokens - request.num_prompt_tokens
            limit = request.max_total_tokens - request.num_tokens
            if request.options.predicted_tokens is not None:
                rests.append(max(1.0, min(request.options.predicted_tokens - num_tokens, limit)))
            elif self._knows_limits and (limit <= 1 or not self._sorted):
                rests.append(max(1.0, limit))
            else:
                ages[_rounded(num_tokens)] += 1
        if (ages or not rests) and not self._sorted:
            return None
        rests.sort()
        first = [bisect.bisect_right(rests, steps) for steps in _STEPS]
        counts = [
            known + sum(number * self._ended_share(age, steps) for age, number in ages.items())
            for known, steps in zip(first, _STEPS, strict=True)
        ]
        lengths = self._sorted or [max(1, round(rest)) for rest in rests]
        return Departures(counts, lengths, num_running=len(rests) + sum(ages.values()))

    def _ended_share(self, age: int, steps: int) -> float:
        """Return the share of answers longer than `age` that end within `steps` more tokens. An answer longer than all
        that are remembered has about as many tokens before it as behind it."""
        num_longer = len(self._sorted) - bisect.bisect_right(self._sorted, age)
        if not num_longer:
            return steps / (steps + max(age, 1))
        num_left = len(self._sorted) - bisect.bisect_right(self._sorted, age + steps)
        return 1.0 - num_left / num_longer


class Departures:
    """How many requests are expected to have left the batch after some number of steps. Each of them is replaced by a
    waiting one, which leaves in its turn."""

    def __init__(self, first: list[float], lengths: list[int], *, num_running: int) -> None:
        """`first`: the departures of those that run now, at each of `_STEPS`. `lengths`: those of the answers of their
        successors, sorted."""
        mean_tokens = max(1.0, sum(lengths) / len(lengths))
        self._per_step = max(1, num_running) / mean_tokens  # when those that run now have left
        self._points: list[tuple[int, float]] = [(0, 0.0)]  # (steps, departures until then)
        entered: list[tuple[float, float]] = []  # (in the middle of which steps, how many)
        for steps, own in zip(_STEPS, first, strict=True):
            last_steps, last = self._points[-1]
            if last_steps > 2 * mean_tokens and own >= num_running - 0.5:
                break
            renewed = sum(number * bisect.bisect_right(lengths, steps - at) / len(lengths) for at, number in entered)
            count = max(last, own + renewed)
            entered.append(((steps + last_steps) / 2, count - last))
            self._points.append((steps, count))

    def steps_until(self, number: float) -> float:
        """Return after how many steps this many requests are expected to have left."""
        for (start, before), (end, after) in itertools.pairwise(self._points):
            if number <= after:
                return start + (end - start) * (number - before) / (after - before) if number > before else start
        last_steps, last = self._points[-1]
        return last_steps + (number - last) / self._per_step


def _rounded(num_tokens: int) -> int:
    """Round to one of eight numbers between two powers of two, so that there are few of them."""
    shift = max(0, num_tokens.bit_length() - 4)
    return (num_tokens >> shift << shift) + (1 << shift >> 1)
