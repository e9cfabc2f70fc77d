"""When the requests of a load come, if they do not have times of their own: at a mean rate, more or less evenly."""

from __future__ import annotations

import itertools
import math
import random


def draw_arrivals(num_requests: int, rate: float, *, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Times in seconds. Gaps are drawn from a gamma distribution of this shape: 1 is a Poisson process, less comes in
    bursts, more is evener. They are then scaled so that the last request comes at `num_requests / rate`, as in vLLM's
    benchmark: the rate is met exactly. At an infinite rate all come at once."""
    if math.isinf(rate):
        return [0.0] * num_requests
    rng = random.Random(seed)
    times = list(itertools.accumulate(rng.gammavariate(burstiness, 1.0) for _ in range(num_requests)))
    scale = num_requests / rate / times[-1] if times and times[-1] else 0.0
    return [time * scale for time in times]
