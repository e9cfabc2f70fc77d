"""Recognises known problems in the engine's numbers and writes advice against them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from headway.wire.engine_stats import EngineStats

_T = TypeVar("_T")

GROWTH_WINDOW_S = 15.0
COUNT_WINDOW_S = 60.0
ENOUGH_GAPS = 100
"""Least number of gaps between tokens for a meaningful 99th percentile."""
UNEVEN = 3.0
"""Ratio P99/P50 of the gaps between tokens from which on readers notice the unevenness."""
ENOUGH_LOOKUPS = 1000
"""Least number of looked-up tokens for a meaningful hit rate."""
MUCH_EVICTED = 0.25
"""Share of all blocks evicted in a minute from which on eviction counts as heavy."""
FALLEN = 0.8
"""A hit rate below this multiple of the previous minute's counts as a drop."""
FULL = 0.95
"""Share of KV blocks in use from which on the memory counts as full. Growing requests need some of the rest."""

Level = Literal["calm", "good", "warn", "bad"]


@dataclass(frozen=True, kw_only=True)
class Vitals:
    """The numbers that advice is based on: the engine's current state and about a minute of history."""

    is_healthy: bool = True
    reason: str = ""
    """Why the engine is not healthy."""
    num_running: int = 0
    num_waiting: int = 0
    max_num_seqs: int = 1
    queue_growth: int = 0
    """Growth of the queue in the last `GROWTH_WINDOW_S`, in requests; 0 if the queue was empty at any time in it."""
    kv_used: float = 0.0
    """Share of the KV blocks held by requests."""
    num_preemptions: int = 0
    """Preemptions in the last `COUNT_WINDOW_S`."""
    evicted: float = 0.0
    """Blocks that the prefix cache evicted in the last `COUNT_WINDOW_S`, as a share of all blocks."""
    hit_rate: float | None = None
    """The prefix cache's hit rate in the last `COUNT_WINDOW_S`; None if there were too few lookups."""
    hit_rate_before: float | None = None
    """The hit rate in the window of the same length before that."""
    num_gaps: int = 0
    gap_p50_s: float | None = None
    gap_p99_s: float | None = None

    @property
    def unevenness(self) -> float:
        """Ratio P99/P50 of the gaps between tokens; 1 if there are too few gaps."""
        if self.num_gaps < ENOUGH_GAPS or not self.gap_p50_s or self.gap_p99_s is None:
            return 1.0
        return self.gap_p99_s / self.gap_p50_s

    @property
    def forgets_too_soon(self) -> bool:
        """Whether the prefix cache evicts blocks that would have been hits."""
        if self.hit_rate is None or self.hit_rate_before is None or self.evicted < MUCH_EVICTED:
            return False
        return self.hit_rate < FALLEN * self.hit_rate_before


@dataclass(frozen=True)
class Advice:
    """One piece of advice: a problem, and what to do about it."""

    level: Level
    title: str
    text: str


def advise(vitals: Vitals) -> Advice:
    """Return the most important piece of advice. The rules are ordered by severity."""
    if not vitals.is_healthy:
        return Advice("bad", "The engine does not answer.", vitals.reason or "It may be starting.")
    if vitals.num_running == 0 and vitals.num_waiting == 0:
        return Advice("calm", "Idle.", "The engine sleeps until a request comes. Ask something, or send load.")
    if vitals.unevenness > UNEVEN and vitals.num_preemptions:
        return Advice(
            "warn",
            "Tokens come unevenly, because requests are preempted.",
            f"P99 of the token gap is {vitals.unevenness:.1f} times P50, with {vitals.num_preemptions} preemptions in "
            "the last minute. Lower --max-num-seqs, or give more KV memory (--kv-cache-memory, "
            "--gpu-memory-utilization).",
        )
    if vitals.kv_used >= FULL and vitals.num_waiting:
        return Advice(
            "warn",
            "KV memory is full.",
            f"{vitals.num_waiting} requests wait for blocks, not for compute. Give more KV memory (--kv-cache-memory, "
            "--gpu-memory-utilization), or ask for fewer tokens per request.",
        )
    if vitals.queue_growth > 0 and vitals.num_running >= vitals.max_num_seqs:
        return Advice(
            "warn",
            "The queue grows while the batch is full.",
            f"All {vitals.max_num_seqs} seats are taken and {vitals.num_waiting} requests wait. Raise --max-num-seqs "
            "if the token gap allows it; otherwise this engine has reached its rate: send less, or add another.",
        )
    if vitals.queue_growth > 0:
        return Advice(
            "warn",
            "The queue grows although seats are free.",
            "Prompts arrive faster than steps take them in. Raise --max-num-batched-tokens; running requests will then "
            "share their steps with larger chunks.",
        )
    if vitals.forgets_too_soon:
        return Advice(
            "warn",
            "The prefix cache forgets too soon.",
            f"Its hit rate fell from {vitals.hit_rate_before:.0%} to {vitals.hit_rate:.0%} within a minute, in which "
            f"{vitals.evicted:.0%} of the blocks were given up. Give more KV memory (--kv-cache-memory, "
            "--gpu-memory-utilization), or keep the prompts that count with cache_ttl_s.",
        )
    if vitals.unevenness > UNEVEN:
        return Advice(
            "warn",
            "Tokens come unevenly.",
            f"P99 of the token gap is {vitals.unevenness:.1f} times P50, without preemptions: steps with long prompt "
            "chunks hold up the others. Lower --max-chunk-tokens or --max-num-batched-tokens, or set --target-itl-ms.",
        )
    if vitals.num_running <= 1 and vitals.num_waiting == 0:
        return Advice(
            "calm",
            "One request alone.",
            "A step reads all weights for a single token. Send load: more requests share a step at little cost.",
        )
    return Advice(
        "good",
        "All is well: requests share every step.",
        "Each enters as soon as there is room and leaves with its last token; none waits for the slowest.",
    )


class Trend:
    """Keeps the history of the queue and of some counters that the rules need."""

    def __init__(self) -> None:
        self._queue: deque[tuple[float, int]] = deque()
        self._counts: deque[tuple[float, _Counts]] = deque()

    def add(self, now_s: float, stats: EngineStats) -> None:
        """Add the engine's current numbers."""
        cache = stats.prefix_cache
        counts = _Counts(
            stats.batch.num_preemptions, cache.num_evicted_blocks, cache.num_hit_tokens, cache.num_queried_tokens
        )
        _append_within(self._queue, now_s, stats.batch.num_waiting, GROWTH_WINDOW_S)
        _append_within(self._counts, now_s, counts, 2 * COUNT_WINDOW_S)

    @property
    def queue_growth(self) -> int:
        """See `Vitals.queue_growth`. It is also 0 while the history covers less than half the window."""
        if not self._queue or any(num_waiting == 0 for _, num_waiting in self._queue):
            return 0
        if self._queue[-1][0] - self._queue[0][0] < GROWTH_WINDOW_S / 2:
            return 0
        return self._queue[-1][1] - self._queue[0][1]

    @property
    def num_preemptions(self) -> int:
        """Preemptions in the last minute."""
        first, last = self._last_minute()
        return last.num_preemptions - first.num_preemptions

    @property
    def num_evicted_blocks(self) -> int:
        """Blocks evicted in the last minute."""
        first, last = self._last_minute()
        return last.num_evicted_blocks - first.num_evicted_blocks

    @property
    def hit_rate(self) -> float | None:
        """The hit rate in the last minute."""
        return _hit_rate(*self._last_minute())

    @property
    def hit_rate_before(self) -> float | None:
        """The hit rate in the minute before the last one."""
        middle, _ = self._last_minute()
        return _hit_rate(self._counts[0][1] if self._counts else middle, middle)

    def _last_minute(self) -> tuple[_Counts, _Counts]:
        if not self._counts:
            return _Counts(), _Counts()
        now_s, last = self._counts[-1]
        return next(counts for at_s, counts in self._counts if at_s >= now_s - COUNT_WINDOW_S), last


class _Counts(NamedTuple):
    """Counters that never decrease."""

    num_preemptions: int = 0
    num_evicted_blocks: int = 0
    num_hit_tokens: int = 0
    num_queried_tokens: int = 0


def _hit_rate(first: _Counts, last: _Counts) -> float | None:
    num_queried = last.num_queried_tokens - first.num_queried_tokens
    return (last.num_hit_tokens - first.num_hit_tokens) / num_queried if num_queried >= ENOUGH_LOOKUPS else None


def _append_within(samples: deque[tuple[float, _T]], now_s: float, value: _T, window_s: float) -> None:
    samples.append((now_s, value))
    while samples[0][0] < now_s - window_s:
        samples.popleft()
