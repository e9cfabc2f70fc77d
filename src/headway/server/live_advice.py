"""Advice in words: which known sickness the engine's numbers show, and what helps against it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

GROWTH_WINDOW_S = 15.0
PREEMPTION_WINDOW_S = 60.0
ENOUGH_GAPS = 100
"""Fewer gaps than that say nothing about the 99th percentile."""
UNEVEN = 3.0
"""P99/P50 of the gaps above this is felt by readers."""
FULL = 0.95
"""Share of the KV blocks in use from which on the memory counts as full: a growing request needs some of the rest."""

Level = Literal["calm", "good", "warn", "bad"]


@dataclass(frozen=True, kw_only=True)
class Vitals:
    """What a look at the engine tells, with a memory of about a minute."""

    is_healthy: bool = True
    reason: str = ""
    """Why it is not."""
    num_running: int = 0
    num_waiting: int = 0
    max_num_seqs: int = 1
    queue_growth: int = 0
    """Waiting requests now, less those of `GROWTH_WINDOW_S` ago; 0 if the queue was empty at any time since."""
    kv_used: float = 0.0
    """Share of the KV blocks that requests hold."""
    num_preemptions: int = 0
    """In the last `PREEMPTION_WINDOW_S`."""
    num_gaps: int = 0
    gap_p50_s: float | None = None
    gap_p99_s: float | None = None

    @property
    def unevenness(self) -> float:
        """P99/P50 of the gaps between tokens; 1 where there are too few to tell."""
        if self.num_gaps < ENOUGH_GAPS or not self.gap_p50_s or self.gap_p99_s is None:
            return 1.0
        return self.gap_p99_s / self.gap_p50_s


@dataclass(frozen=True)
class Advice:
    """One finding: what is seen, and what to do about it."""

    level: Level
    title: str
    text: str


def advise(vitals: Vitals) -> Advice:
    """The most important thing to say. Rules stand in the order of what hurts most."""
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
        "Each enters as soon as there is room and leaves with its last token; nobody waits for the slowest.",
    )


class Trend:
    """Remembers the queue and the preemption counter for as long as the rules look back."""

    def __init__(self) -> None:
        self._queue: deque[tuple[float, int]] = deque()
        self._preemptions: deque[tuple[float, int]] = deque()

    def add(self, now_s: float, *, num_waiting: int, num_preemptions: int) -> None:
        """Take in one look; `num_preemptions` is a counter that never falls."""
        _append_within(self._queue, now_s, num_waiting, GROWTH_WINDOW_S)
        _append_within(self._preemptions, now_s, num_preemptions, PREEMPTION_WINDOW_S)

    @property
    def queue_growth(self) -> int:
        """See `Vitals.queue_growth`. 0 also while less than half the window has been seen."""
        if not self._queue or any(num_waiting == 0 for _, num_waiting in self._queue):
            return 0
        if self._queue[-1][0] - self._queue[0][0] < GROWTH_WINDOW_S / 2:
            return 0
        return self._queue[-1][1] - self._queue[0][1]

    @property
    def num_preemptions(self) -> int:
        """In the last minute."""
        return self._preemptions[-1][1] - self._preemptions[0][1] if self._preemptions else 0


def _append_within(samples: deque[tuple[float, int]], now_s: float, value: int, window_s: float) -> None:
    samples.append((now_s, value))
    while samples[0][0] < now_s - window_s:
        samples.popleft()
