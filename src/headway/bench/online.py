"""Replayed traffic: requests arrive at their own times, and the time of every token is noted.

One thread does everything: it adds the requests that are due, steps the engine, and looks at the clock when the step's
tokens are there. While nothing runs it sleeps until the next arrival.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.bench.rounds import Progress, Step, sampling_params
from headway.bench.times import RequestTimeline, percentile
from headway.workload.requests import Work

if TYPE_CHECKING:
    from headway.engine.llm_engine import LLMEngine

SHOWN_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Replay:
    """What came of a replay."""

    timelines: Sequence[RequestTimeline]
    duration_s: float
    num_steps: int

    @property
    def num_lost(self) -> int:
        """Requests that did not get exactly their tokens."""
        return sum(not timeline.is_complete for timeline in self.timelines)


def replay(
    engine: LLMEngine,
    work: Work,
    *,
    temperature: float,
    step: Step | None = None,
    progress: Progress | None = None,
    now: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Replay:
    """Replay the work from its first arrival until the last request has ended."""
    step = step or engine.step
    params = [sampling_params(request, temperature) for request in work]
    timelines = [RequestTimeline(r.arrival_s, r.num_prompt_tokens, r.num_output_tokens) for r in work]
    expected = deque(range(len(work)))
    num_steps = 0
    gc.collect()
    started_s = now()
    while expected or engine.has_unfinished_requests():
        elapsed_s = now() - started_s
        while expected and work[expected[0]].arrival_s <= elapsed_s:
            index = expected.popleft()
            request = work[index]
            engine.add_request(str(index), request.prompt_token_ids, params[index], stream=True, **request.options)
        if not engine.has_unfinished_requests():
            sleep(work[expected[0]].arrival_s - elapsed_s)
            continue
        outputs = step()
        num_steps += 1
        elapsed_s = now() - started_s
        for output in outputs:
            timeline = timelines[int(output.request_id)]
            num_new = len(output.outputs[0].token_ids) - len(timeline.token_times_s)
            timeline.token_times_s.extend([elapsed_s] * num_new)
            if output.finished:
                timeline.num_preemptions = 0 if output.metrics is None else output.metrics.num_preemptions
                if progress is not None:
                    progress()
    return Replay(timelines, now() - started_s, num_steps)


@dataclass(frozen=True)
class Distribution:
    """One kind of latency over all requests (or all gaps), in milliseconds."""

    mean: float
    std: float
    percentiles: dict[int, float]
    max: float

    @classmethod
    def of_seconds(cls, values: Sequence[float]) -> Distribution:
        """Of latencies in seconds; all `nan` if there are none."""
        ms = [1000 * value for value in values]
        return cls(
            mean=statistics.fmean(ms) if ms else math.nan,
            std=statistics.pstdev(ms) if ms else math.nan,
            percentiles={percent: percentile(ms, percent) for percent in SHOWN_PERCENTILES},
            max=max(ms, default=math.nan),
        )

    def as_json(self, name: str) -> dict[str, float | None]:
        """Under the keys that vLLM's serving benchmark uses, and some more of the same form."""
        keys = {"mean": self.mean, "median": self.percentiles[50], "std": self.std}
        keys |= {f"p{percent}": value for percent, value in self.percentiles.items() if percent != 50}
        keys["max"] = self.max
        return {f"{key}_{name}_ms": _or_none(value) for key, value in keys.items()}


@dataclass(frozen=True)
class OnlineMetrics:
    """The latencies of a replay. Lost requests are counted, and left out of the rest."""

    ttft: Distribution
    tpot: Distribution
    itl: Distribution
    e2el: Distribution
    duration_s: float
    num_completed: int
    num_lost: int
    num_input_tokens: int
    num_output_tokens: int
    num_preemptions: int

    @classmethod
    def of(cls, timelines: Sequence[RequestTimeline], duration_s: float) -> OnlineMetrics:
        """Sum up the timelines of a replay."""
        done = [timeline for timeline in timelines if timeline.is_complete]
        return cls(
            ttft=Distribution.of_seconds([timeline.ttft_s for timeline in done]),
            tpot=Distribution.of_seconds([t.tpot_s for t in done if t.tpot_s is not None]),
            itl=Distribution.of_seconds([gap for timeline in done for gap in timeline.itls_s]),
            e2el=Distribution.of_seconds([timeline.e2e_s for timeline in done]),
            duration_s=duration_s,
            num_completed=len(done),
            num_lost=len(timelines) - len(done),
            num_input_tokens=sum(timeline.num_prompt_tokens for timeline in done),
            num_output_tokens=sum(len(timeline.token_times_s) for timeline in done),
            num_preemptions=sum(timeline.num_preemptions for timeline in timelines),
        )

    @property
    def output_tok_s(self) -> float:
        return self.num_output_tokens / self.duration_s

    @property
    def itl_p99_over_p50(self) -> float:
        """How uneven the flow of tokens is; 1 is a metronome."""
        median = self.itl.percentiles[50]
        return self.itl.percentiles[99] / median if median else math.nan

    @property
    def latencies(self) -> dict[str, Distribution]:
        """By the short names that the keys use."""
        return {"ttft": self.ttft, "tpot": self.tpot, "itl": self.itl, "e2el": self.e2el}

    def as_json(self) -> dict[str, float | None]:
        """vLLM's keys for a serving benchmark, and ours beside them."""
        result: dict[str, float | None] = {
            "duration": self.duration_s,
            "completed": self.num_completed,
            "failed": self.num_lost,
            "total_input_tokens": self.num_input_tokens,
            "total_output_tokens": self.num_output_tokens,
            "request_throughput": self.num_completed / self.duration_s,
            "output_throughput": self.output_tok_s,
            "total_token_throughput": (self.num_input_tokens + self.num_output_tokens) / self.duration_s,
            "itl_p99_over_p50": _or_none(self.itl_p99_over_p50),
            "num_preemptions": self.num_preemptions,
        }
        for name, distribution in self.latencies.items():
            result |= distribution.as_json(name)
        return result


def _or_none(value: float) -> float | None:
    """JSON has no word for a number that is none."""
    return value if math.isfinite(value) else None
