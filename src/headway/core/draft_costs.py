"""Estimates what drafted tokens add to the time of a step, by their number and the number of requests.

    added      ╭──────────●──╱     ●  measured: a mean over steps of about that size; younger steps count more
            ╭──●                   between the points, and beyond the last one, straight lines
         ╱
        0  1  2  4  8  16  drafted tokens

A step may be slow for reasons that say nothing about the next one. So its time counts only up to a limit, and one step
is not enough. The time of steps without drafts is measured too, and repeatedly, since contexts grow.
"""

from __future__ import annotations

import collections
import copy

from headway.core.step_time import DecodePace
from headway.core.tuning import SPECULATION, STEP_TIME


class DraftCosts:
    """The cost of drafts, learned from steps without prompts, with drafts and without."""

    def __init__(self, pace: DecodePace) -> None:
        self._pace = pace
        self._plain: dict[int, _Mean] = {}  # steps without drafts, by the size class of the number of requests
        self._num_since = collections.Counter[int]()  # steps with drafts since the last one without, by size class
        self._tables: dict[int, dict[int, _Mean]] = {}  # by the size classes of requests and of drafted tokens

    def learn_from(self, other: DraftCosts) -> None:
        """Take over what another one has measured."""
        self._plain, self._tables = copy.deepcopy((other._plain, other._tables))
        self._num_since = other._num_since.copy()

    def observe(self, num_rows: int, num_tokens: int, duration_s: float) -> None:
        """Learn that a step with `num_rows` requests and `num_tokens` drafted tokens has taken this time."""
        size, expected_s = num_rows.bit_length(), self.plain_s(num_rows)
        if not num_tokens:
            self._num_since[size] = 0
            limit_s = STEP_TIME.most_times_expected * expected_s or duration_s
            self._plain.setdefault(size, _Mean()).observe(num_rows, min(duration_s, limit_s))
            return
        self._num_since[size] += 1
        limit_s = STEP_TIME.most_times_expected * (expected_s + self.added_s(num_rows, num_tokens))
        table = self._tables.setdefault(size, {})
        table.setdefault(_size_of(num_tokens), _Mean()).observe(num_tokens, min(duration_s - expected_s, limit_s))

    def wants_plain(self, num_rows: int) -> bool:
        """Whether the next step with about this number of requests should have no drafts, to measure its time."""
        size = num_rows.bit_length()
        plain = self._plain.get(size)
        return (
            plain is None
            or plain.num_steps < SPECULATION.steps_to_trust
            or self._num_since[size] >= SPECULATION.steps_per_plain_one
        )

    def plain_s(self, num_rows: int) -> float:
        """Return the time of a step with this number of requests without drafts. It lies on the line through the two
        measured steps of the nearest sizes."""
        if not self._plain:
            return self._pace.decode_s(num_rows)
        nearest = min(self._plain.values(), key=lambda one: abs(one.size - num_rows))
        least_s = nearest.mean_s * min(1.0, num_rows / nearest.size)  # it is at most proportional
        return max(least_s, nearest.mean_s + (num_rows - nearest.size) * self._row_s(num_rows))

    def _row_s(self, num_rows: int) -> float:
        """Return the time that one more request adds to a step with this number of requests."""
        two = sorted(self._plain.values(), key=lambda one: abs(one.size - num_rows))[:2]
        if len(two) < 2 or two[0].size == two[1].size:
            return self._pace.decode_time.row_s
        return max(0.0, (two[1].mean_s - two[0].mean_s) / (two[1].size - two[0].size))

    def added_s(self, num_rows: int, num_tokens: int) -> float:
        """Return the time that `num_tokens` drafted tokens add beside `num_rows` requests. Until drafts have been tried
        often enough, they are taken to add no more than the same number of requests."""
        row_s, table = self._row_s(num_rows), self._tables.get(num_rows.bit_length(), {})
        is_doubtful = not self.is_known(num_rows)
        last_tokens = last_s = 0.0
        more_s = row_s  # the time that one more token adds
        for _, one in sorted(table.items()):
            added_s = max(min(one.mean_s, one.size * row_s) if is_doubtful else one.mean_s, last_s)
            more_s = (added_s - last_s) / max(one.size - last_tokens, 1e-9)
            if num_tokens <= one.size:
                return last_s + (num_tokens - last_tokens) * more_s
            last_tokens, last_s = one.size, added_s
        return last_s + (num_tokens - last_tokens) * more_s

    def is_known(self, num_rows: int) -> bool:
        """Whether drafts have been tried often enough beside about this number of requests."""
        table = self._tables.get(num_rows.bit_length(), {})
        return sum(one.num_steps for one in table.values()) >= SPECULATION.steps_to_trust

    def most_tokens(self, num_rows: int) -> int:
        """Return how many tokens may be drafted in a step with this number of requests. At first these are few, since
        their cost is not known; later one for each request, or twice as many as have been tried."""
        seen = self._tables.get(num_rows.bit_length(), {})
        if not seen:
            return max(SPECULATION.first_drafts, num_rows // 4)
        return max(SPECULATION.first_drafts, num_rows, *(int(2 * one.size) for one in seen.values()))

    def fade(self) -> None:
        """Halve all measured costs, so that drafts that were too costly are tried again."""
        for table in self._tables.values():
            for one in table.values():
                one.mean_s *= 0.5


def _size_of(number: int) -> int:
    """Return the size class of a number. There are four classes from one power of two to the next."""
    return 4 * number.bit_length() + ((number << 3 >> number.bit_length()) & 3)


class _Mean:
    """The mean time and the mean size of steps of about the same size; younger steps count more."""

    def __init__(self) -> None:
        self.size = self.mean_s = 0.0
        self.num_steps = 0

    def observe(self, size: int, seconds: float) -> None:
        """Add a step. The first steps may have waited for a compiler or for weights that were never read before, so of
        these only the fastest counts."""
        self.num_steps += 1
        if self.num_steps <= SPECULATION.steps_to_trust:
            if self.num_steps == 1 or seconds < self.mean_s:
                self.size, self.mean_s = float(size), max(0.0, seconds)
            return
        weight = 0.1  # of the newest step
        self.size += weight * (size - self.size)
        self.mean_s = max(0.0, self.mean_s + weight * (seconds - self.mean_s))
