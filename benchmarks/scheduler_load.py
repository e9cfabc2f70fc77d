"""Requests for measurements of the host's work: of random lengths, tenants, targets and priorities, always the same.

Predictions, priorities, tenants and targets say nothing about the true lengths. So whatever the order, about as many
requests come and go in each step, and what a longer queue costs is the queue's own doing.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from headway.core import Request
from headway.core.request_options import RequestOptions

NUM_TENANTS = 1_000
NUM_BEGINNINGS = 64
"""Different first halves of prompts, where prompts have something in common."""
Step = Callable[[], float]
"""Runs one step and returns the seconds it took."""
Side = TypeVar("Side", bound=Hashable)


class RandomRequests:
    """`shares_prefixes`: prompts have different tokens, and some begin alike."""

    def __init__(self, *, shares_prefixes: bool = False) -> None:
        self._rng = random.Random(0)
        self._ids = itertools.count()
        self._prompts = [tuple(range(length)) for length in range(257)]
        self._beginnings = [self._tokens(128) for _ in range(NUM_BEGINNINGS)] if shares_prefixes else []

    def request(self) -> Request:
        rng = self._rng
        has_targets = rng.random() < 0.5
        return Request(
            f"r{next(self._ids)}",
            self._prompt(),
            max_tokens=self.length(),
            options=RequestOptions(
                priority=rng.randint(0, 9),
                tenant=f"tenant {rng.randrange(NUM_TENANTS)}",
                predicted_tokens=rng.uniform(16, 256),
                ttft_target_s=rng.uniform(0.2, 5.0) if has_targets else None,
                tpot_target_s=rng.uniform(0.02, 0.2) if has_targets else None,
            ),
        )

    def length(self) -> int:
        """Of a prompt or an answer."""
        return self._rng.randint(16, 256)

    def _prompt(self) -> Sequence[int]:
        length = self.length()
        if not self._beginnings:
            return self._prompts[length]
        return self._rng.choice(self._beginnings)[: length // 2] + self._tokens(length - length // 2)

    def _tokens(self, length: int) -> tuple[int, ...]:
        return tuple(self._rng.choices(range(50_000), k=length))


def take_turns(sides: dict[Side, Step], *, num_rounds: int, num_steps: int, num_warmup: int) -> dict[Side, float]:
    """Microseconds per step of each side, the mean over all steps: what comes in bursts has to count, and a median
    would hide it. Sides take turns, so that a noisy machine is noisy for all."""
    times: dict[Side, list[float]] = {side: [] for side in sides}
    for step in sides.values():
        for _ in range(num_warmup):
            step()
    for _ in range(num_rounds):
        for side, step in sides.items():
            times[side] += [step() for _ in range(num_steps)]
    return {side: 1e6 * statistics.fmean(values) for side, values in times.items()}
