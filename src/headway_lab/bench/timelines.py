"""Times of a run: of a round, of a request's tokens, of the batch; and the rates, latencies and curves that follow."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headway_lab.workload.bench_requests import Work

if TYPE_CHECKING:
    from headway.core import Scheduler


NUM_BUCKETS = 50
"""About how many buckets a curve of rates has."""

MAX_SAMPLES = 4_000


@dataclass(frozen=True)
class RoundTimes:
    """The time of a round, and the work in it."""

    elapsed_s: float
    pace_s: float | None
    """Mean time of an output token after the first, over all requests; `None` if none has a second token."""
    num_requests: int
    num_input_tokens: int
    num_output_tokens: int
    prompt_share: float | None = None
    """The share of the steps' time that prompt tokens took; `None` if it is not known."""

    @classmethod
    def of(cls, work: Work, *, elapsed_s: float, pace_s: float | None, prompt_share: float | None = None) -> RoundTimes:
        return cls(
            elapsed_s=elapsed_s,
            pace_s=pace_s,
            num_requests=len(work),
            num_input_tokens=sum(request.num_prompt_tokens for request in work),
            num_output_tokens=sum(request.num_output_tokens * request.num_choices for request in work),
            prompt_share=prompt_share,
        )

    @property
    def output_tok_s(self) -> float:
        return self.num_output_tokens / self.elapsed_s

    @property
    def input_tok_s(self) -> float:
        return self.num_input_tokens / self.elapsed_s

    @property
    def total_tok_s(self) -> float:
        return (self.num_input_tokens + self.num_output_tokens) / self.elapsed_s

    @property
    def requests_s(self) -> float:
        return self.num_requests / self.elapsed_s

    @property
    def elapsed_per_token_s(self) -> float:
        """The time of the whole round over the tokens of one output, prompts included. For rounds of equal outputs."""
        return self.elapsed_s * self.num_requests / self.num_output_tokens


@dataclass
class RequestTimeline:
    """The life of a request, in seconds after the start of the replay."""

    arrival_s: float
    """When it was due, not when the engine took it: the wait outside of the engine counts too."""
    num_prompt_tokens: int
    num_wanted_tokens: int
    token_times_s: list[float] = field(default_factory=list)
    num_preemptions: int = 0
    num_cached_tokens: int | None = None
    """Prompt tokens that were found in the prefix cache; `None` if that is not known."""
    expected_first_s: float | None = None
    """When the engine expected its first token, by the forecast at its arrival; `None` if there was none."""

    @property
    def num_output_tokens(self) -> int:
        """The number of tokens that it got."""
        return len(self.token_times_s)

    @property
    def tokens_per_event(self) -> float:
        """The number of tokens for each of its times."""
        return self.num_output_tokens / len(self.token_times_s) if self.token_times_s else 1.0

    @property
    def is_complete(self) -> bool:
        """Whether it got exactly its tokens."""
        return len(self.token_times_s) == self.num_wanted_tokens

    @property
    def end_s(self) -> float | None:
        """When it had its last token; `None` if it had none."""
        return self.token_times_s[-1] if self.token_times_s else None

    @property
    def ttft_s(self) -> float:
        """Time to first token, from arrival."""
        return self.token_times_s[0] - self.arrival_s

    @property
    def itls_s(self) -> list[float]:
        """Inter-token latencies: the gaps between its tokens."""
        return [later - earlier for earlier, later in itertools.pairwise(self.token_times_s)]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token: the mean gap; `None` with a single token."""
        gaps = self.num_output_tokens - 1
        return (self._last_s - self.token_times_s[0]) / gaps if gaps > 0 else None

    @property
    def e2e_s(self) -> float:
        """The time from arrival to the last token."""
        return self._last_s - self.arrival_s

    @property
    def _last_s(self) -> float:
        assert self.end_s is not None
        return self.end_s


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile, linear between the two nearest ranks as numpy's default; `nan` without values."""
    return percentiles(values, [percent])[0]


def percentiles(values: Sequence[float], percents: Sequence[float]) -> list[float]:
    """Several percentiles with one sort. It does not use numpy, so that a load on a server starts without it."""
    ordered = sorted(values)
    return [_between_ranks(ordered, percent) for percent in percents]


def _between_ranks(ordered: Sequence[float], percent: float) -> float:
    if not ordered:
        return float("nan")
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True)
class Curve:
    """Values at times, in seconds after the start of the run."""

    xs: Sequence[float]
    ys: Sequence[float]

    @property
    def peak(self) -> float:
        return max(self.ys, default=0.0)


def in_flight(timelines: Sequence[RequestTimeline]) -> Curve:
    """Requests that had arrived and not ended; the curve changes at the times given. A request that never began or
    ended is left out."""
    changes: Counter[float] = Counter()
    for timeline in timelines:
        end_s = timeline.end_s
        if end_s is not None:
            changes[timeline.arrival_s] += 1
            changes[end_s] -= 1
    xs, ys, count = [], [], 0
    for at_s in sorted(changes):
        count += changes[at_s]
        xs.append(at_s)
        ys.append(float(count))
    return Curve(xs, ys)


def offered_rate(timelines: Sequence[RequestTimeline]) -> float | None:
    """Requests a second from the first arrival to the last; `None` if all were there at once."""
    arrivals = [timeline.arrival_s for timeline in timelines]
    span_s = max(arrivals, default=0.0) - min(arrivals, default=0.0)
    return (len(arrivals) - 1) / span_s if span_s > 0 else None


def token_rate(timelines: Sequence[RequestTimeline], bucket_s: float) -> Curve:
    """Output tokens a second in buckets of `bucket_s` seconds; each value is at the middle of its bucket. Of a time
    without tokens only the first and the last bucket are listed, so that an idle year is as short as an idle minute."""
    tokens: defaultdict[int, float] = defaultdict(float)
    for timeline in timelines:
        weight = timeline.tokens_per_event
        for at_s in timeline.token_times_s:
            tokens[int(at_s / bucket_s)] += weight
    last = max(tokens, default=-1)
    near = {place for bucket in tokens for place in (bucket - 1, bucket, bucket + 1)} | {0}
    buckets = [place for place in sorted(near) if 0 <= place <= last]
    rates = [tokens.get(bucket, 0.0) / bucket_s for bucket in buckets]
    return Curve([(bucket + 0.5) * bucket_s for bucket in buckets], rates)


def bucket_for(duration_s: float) -> float:
    """A round length of buckets that makes a readable curve of a run of this duration: 1, 2 or 5 times a power of
    ten."""
    least_s = max(duration_s / NUM_BUCKETS, 1e-6)
    power = 10.0 ** math.floor(math.log10(least_s))
    return power * next(factor for factor in (1, 2, 5, 10) if factor * power >= least_s * (1 - 1e-9))


@dataclass(frozen=True)
class BatchSample:
    """The batch at one moment."""

    at_s: float
    """Seconds after the start of the run."""
    num_running: int
    num_waiting: int
    kv_used: float
    """Share of KV blocks that requests hold, from 0 to 1; `nan` if it is not known."""

    @property
    def is_idle(self) -> bool:
        """Whether no request runs or waits."""
        return not self.num_running and not self.num_waiting


class SampleLog:
    """Keeps samples at even distances: whenever there are too many, every other one is dropped, and from then on fewer
    are taken. A sample counts until the next one. The samples of an engine that becomes idle are kept, since otherwise
    it would seem to run until its next request."""

    def __init__(self, most: int = MAX_SAMPLES) -> None:
        self.samples: list[BatchSample] = []
        self._most = most
        self._stride = 1
        self._num_offered = 0

    def is_due(self, *, is_idle: bool = False) -> bool:
        """Whether to make and keep the next sample. Call it once for each sample; others need not be made."""
        self._num_offered += 1
        return is_idle or (self._num_offered - 1) % self._stride == 0

    def add(self, sample: BatchSample) -> None:
        """Keep a sample that was due."""
        self.samples.append(sample)
        if len(self.samples) > self._most:
            self._thin()

    def _thin(self) -> None:
        idle = [one for one in self.samples if one.is_idle]
        if len(idle) > self._most // 2:  # too many to be seen apart
            del self.samples[1::2]
        else:
            busy = [one for one in self.samples if not one.is_idle][::2]
            self.samples = sorted([*idle, *busy], key=lambda one: one.at_s)
        self._stride *= 2


def sample_of(scheduler: Scheduler, at_s: float) -> BatchSample:
    """The state of a scheduler between two steps."""
    kv_cache = scheduler.kv_cache
    return BatchSample(
        at_s=at_s,
        num_running=len(scheduler.in_batch),
        num_waiting=len(scheduler.live.waiting),
        kv_used=kv_cache.num_used_blocks / kv_cache.num_blocks,
    )


@dataclass(frozen=True)
class Measure:
    """One number of a round."""

    key: str
    title: str
    of: Callable[[RoundTimes], float | None]
    """Applied to the floor's times it gives the floor of the number."""
    is_rate: bool
    """Whether a higher number is better."""
    num_decimals: int

    def ratio(self, times: RoundTimes, floor: RoundTimes) -> float | None:
        """How many times as long as the floor it took."""
        value, least = self.of(times), self.of(floor)
        if not value or not least:
            return None
        return least / value if self.is_rate else value / least

    def text(self, times: RoundTimes) -> str:
        """The number as text for people."""
        value = self.of(times)
        return "–" if value is None else f"{value:,.{self.num_decimals}f}"


def best_of(rounds: Sequence[RoundTimes]) -> RoundTimes:
    """The fastest round."""
    return min(rounds, key=lambda times: times.elapsed_s)
