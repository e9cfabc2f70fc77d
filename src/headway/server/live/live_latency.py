"""How long tokens took lately: times to the first token and gaps between tokens, each over a sliding window.

Gaps are read from step snapshots. So are the times to the first token, unless somebody who sees requests arrive and
tokens leave notes them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from headway.rpc.messages import SnapshotRow, StepSnapshot

WINDOW_S = 60.0
MAX_SAMPLES = 20_000
"""At thousands of tokens a second the window gets shorter, which nobody will notice."""


class RecentTimes:
    """Samples of the last minute, in seconds."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._samples: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)

    def add(self, seconds: float) -> None:
        """Something that took so long has just happened."""
        self._samples.append((self._now(), seconds))

    def of_last(self, last_s: float) -> list[float]:
        """What was added in the last seconds, at most `WINDOW_S` of them, sorted."""
        now_s = self._now()
        while self._samples and self._samples[0][0] < now_s - WINDOW_S:
            self._samples.popleft()
        recent = []
        for at_s, seconds in reversed(self._samples):
            if at_s < now_s - last_s:
                break
            recent.append(seconds)
        recent.sort()
        return recent


def percentile(ordered: list[float], share: float) -> float | None:
    """The nearest-rank percentile of sorted samples; None of nothing."""
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class TokenTimes:
    """Reads latencies from snapshots, on a clock made of step durations: requests that run have no time between steps.

    A request counts as arrived with the first snapshot that shows it. Snapshots show only the head of a queue, so with
    a long one the times to the first token come out too short.
    """

    def __init__(self, *, gaps: RecentTimes, first_tokens: RecentTimes | None) -> None:
        """What to fill; None: not wanted."""
        self._gaps = gaps
        self._first_tokens = first_tokens
        self._busy_s = 0.0
        self._arrived_s: dict[str, float] = {}
        self._last_token_s: dict[str, float] = {}
        self._preempted: set[str] = set()

    def add(self, snapshot: StepSnapshot) -> None:
        """Take in one step."""
        began_s = self._busy_s
        self._busy_s += snapshot.step_s
        shown = {row.request_id for row in snapshot.waiting} | {row.request_id for row in snapshot.rows}
        self._arrived_s = {i: s for i, s in self._arrived_s.items() if i in shown}
        for request_id in shown - self._last_token_s.keys():
            self._arrived_s.setdefault(request_id, began_s)
        self._preempted.update(snapshot.preempted)
        for row in snapshot.rows:
            self._preempted.discard(row.request_id)
            if samples_token(row):
                self._take_token(row)
        for request_id in snapshot.finished:
            self._last_token_s.pop(request_id, None)

    def forget_others(self, running: set[str]) -> None:
        """Drop requests that are gone without having finished. Those that were preempted will come back."""
        keep = running | self._preempted
        self._last_token_s = {i: s for i, s in self._last_token_s.items() if i in keep}

    def became_idle(self) -> None:
        """Nobody will come back."""
        self._preempted.clear()

    def _take_token(self, row: SnapshotRow) -> None:
        last_s = self._last_token_s.get(row.request_id)
        arrived_s = self._arrived_s.pop(row.request_id, None)
        if last_s is not None:
            self._gaps.add(self._busy_s - last_s)
        elif self._first_tokens is not None and row.num_output_tokens == 0 and arrived_s is not None:
            self._first_tokens.add(self._busy_s - arrived_s)
        self._last_token_s[row.request_id] = self._busy_s


def samples_token(row: SnapshotRow) -> bool:
    """Whether the step computed all tokens that the request had, and so gave it another."""
    return row.num_computed_tokens + row.num_tokens >= row.num_prompt_tokens + row.num_output_tokens
