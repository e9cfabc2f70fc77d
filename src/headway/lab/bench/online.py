"""Replayed traffic: requests arrive at their own times, and the time of every token is noted.

One thread does everything: it adds the requests that are due, steps the engine, and looks at the clock when the step's
tokens are there. While nothing runs it sleeps until the next arrival.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headway.lab.bench.agenda import Agenda
from headway.lab.bench.batch_samples import BatchSample, SampleLog, sample_of
from headway.lab.bench.online_metrics import SHOWN_PERCENTILES, Distribution, OnlineMetrics
from headway.lab.bench.rounds import Progress, Step, sampling_params
from headway.lab.bench.times import RequestTimeline
from headway.lab.workload.requests import Work

if TYPE_CHECKING:
    from headway.engine.llm_engine import LLMEngine

__all__ = ["SHOWN_PERCENTILES", "Distribution", "OnlineMetrics", "Replay", "replay"]


@dataclass(frozen=True)
class Replay:
    """What came of a replay."""

    timelines: Sequence[RequestTimeline]
    duration_s: float
    num_steps: int
    samples: Sequence[BatchSample] = ()
    """How the batch stood after steps, thinned."""
    errors: Mapping[str, str] = field(default_factory=dict)
    """Why requests have failed, by their number."""

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
    """Replay the work from its first arrival until the last request has ended. A request that follows another arrives
    when it is sent: so long after the other's end, whatever became of it."""
    step = step or engine.step
    params = [sampling_params(request, temperature) for request in work]
    timelines = [RequestTimeline(r.arrival_s, r.num_prompt_tokens, r.num_output_tokens) for r in work]
    agenda, log, num_steps = Agenda(work), SampleLog(), 0
    errors: dict[str, str] = {}
    gc.collect()
    started_s = now()
    while agenda or engine.has_unfinished_requests():
        elapsed_s = now() - started_s
        for index, due_s in agenda.take_due(elapsed_s):
            request = work[index]
            timelines[index].arrival_s = due_s
            engine.add_request(str(index), request.prompt_token_ids, params[index], request.options, stream=True)
        if not engine.has_unfinished_requests():
            sleep(agenda.next_due_s - elapsed_s)
            continue
        stepped = step()
        num_steps += 1
        elapsed_s = now() - started_s
        errors |= stepped.errors
        for output in stepped.outputs:
            index = int(output.request_id)
            timeline = timelines[index]
            num_new = len(output.outputs[0].token_ids) - len(timeline.token_times_s)
            timeline.token_times_s.extend([elapsed_s] * num_new)
            if output.finished:
                timeline.num_preemptions = 0 if output.metrics is None else output.metrics.num_preemptions
                timeline.num_cached_tokens = output.num_cached_tokens
                agenda.ended(index, elapsed_s)
                if progress is not None:
                    progress()
        if log.is_due(is_idle=not engine.has_unfinished_requests()):
            log.add(sample_of(engine.core.scheduler, elapsed_s))
    return Replay(timelines, now() - started_s, num_steps, log.samples, errors)
