"""What a workload looks like from outside: how many, how fast, how long, and how much of it has been there before."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headway.lab.workload.requests import Work

BLOCK_SIZE = 16
"""Of the prefix cache that the reusable share is counted for."""


@dataclass(frozen=True)
class LengthStatistics:
    """In tokens."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: int
    total: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> LengthStatistics:
        """Of nothing, everything is 0."""
        if not lengths:
            return cls(0.0, 0.0, 0.0, 0.0, 0, 0)
        ordered = sorted(lengths)
        p50, p90, p99 = (_percentile(ordered, percent) for percent in (50, 90, 99))
        return cls(sum(ordered) / len(ordered), p50, p90, p99, ordered[-1], sum(ordered))


@dataclass(frozen=True)
class WorkloadStatistics:
    num_requests: int
    num_conversations: int
    """Requests that others follow."""
    num_turns: int
    """Requests of conversations, the first of each included."""
    duration_s: float
    """From the first arrival to the last. Later turns of conversations come when they may, and do not count."""
    rate: float
    """Requests per second, those that follow others included; infinite if all are there at once."""
    gap_cv: float
    """Standard deviation of the gaps between arrivals over their mean: 1 is Poisson, more is bursts."""
    input: LengthStatistics
    output: LengthStatistics
    reusable_share: float
    """Of all prompt tokens those in leading blocks of `BLOCK_SIZE` that an earlier prompt began with, too: what a
    prefix cache without limits saves."""
    reusable_with_answers_share: float
    """The same if the turns before had been answered with exactly what later prompts have as their answers."""

    def as_json(self) -> dict[str, Any]:
        """With None for what is not a finite number."""
        values = dataclasses.asdict(self)
        return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}


def statistics_of(work: Work) -> WorkloadStatistics:
    """Of drawn work, in the order in which it was drawn."""
    arrivals = sorted(request.arrival_s for request in work if request.after is None)
    duration_s = arrivals[-1] - arrivals[0] if arrivals else 0.0
    per_arrival = len(work) / max(1, len(arrivals))
    followed = {request.after for request in work if request.after is not None}
    num_following = sum(request.after is not None for request in work)
    num_conversations = sum(work[number].after is None for number in followed)
    return WorkloadStatistics(
        num_requests=len(work),
        num_conversations=num_conversations,
        num_turns=num_conversations + num_following,
        duration_s=duration_s,
        rate=(len(arrivals) - 1) * per_arrival / duration_s if duration_s else math.inf,
        gap_cv=_variation([later - earlier for earlier, later in itertools.pairwise(arrivals)]),
        input=LengthStatistics.of([request.num_prompt_tokens for request in work]),
        output=LengthStatistics.of([request.num_output_tokens * request.num_choices for request in work]),
        reusable_share=(reusable := reusable_share(work)),
        reusable_with_answers_share=reusable_share(work, with_answers=True) if followed else reusable,
    )


def reusable_share(work: Work, *, block_size: int = BLOCK_SIZE, with_answers: bool = False) -> float:
    """The share of prompt tokens that a cache without limits would have had already, request after request."""
    seen: set[int] = set()
    num_reusable = num_tokens = 0
    for request in work:
        prompt = request.prompt_token_ids
        if with_answers and request.after is not None:
            before = work[request.after]
            seen.update(_chain(prompt[: before.num_prompt_tokens + before.num_output_tokens], block_size))
        chain = _chain(prompt, block_size)
        num_reusable += block_size * sum(1 for _ in itertools.takewhile(seen.__contains__, chain))
        num_tokens += len(prompt)
        seen.update(chain)
    return num_reusable / max(1, num_tokens)


def _chain(ids: Sequence[int], block_size: int) -> list[int]:
    """A hash for each full block, of it and of all before it."""
    starts = range(0, len(ids) - block_size + 1, block_size)
    blocks = (tuple(ids[start : start + block_size]) for start in starts)
    return list(itertools.accumulate(blocks, lambda above, block: hash((above, block)), initial=0))[1:]


def _variation(gaps: Sequence[float]) -> float:
    mean = sum(gaps) / len(gaps) if gaps else 0.0
    return statistics.pstdev(gaps) / mean if mean else math.nan


def _percentile(ordered: Sequence[int], percent: float) -> float:
    """Between the two nearest values where it falls between them."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
