"""Work on an engine in this process: all of it at once (a round), or each request at its own time (a replay).

One thread does everything: it adds the requests that are due, steps the engine, and reads the clock when the step's
tokens are there. While no request runs, it sleeps until the next arrival. The turns of a conversation follow each
other: turn k is due `think_s` after the end of turn k - 1, and not before its own arrival time.
"""

from __future__ import annotations

import gc
import heapq
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from headway.core.token_time import TokenTimeStats
from headway.core.utilisation import UNKNOWN, Utilisation
from headway.errors import ConfigError, HeadwayError
from headway.sampling_params import SamplingParams
from headway_lab.bench.timelines import BatchSample, RequestTimeline, RoundTimes, SampleLog, sample_of
from headway_lab.workload.bench_requests import BenchRequest, Work

if TYPE_CHECKING:
    from headway.console.step_profiler import Step
    from headway.engine.llm_engine import LLMEngine
    from headway.outputs import RequestOutput
    from headway.progress import Meter


class Timed(Protocol):
    """The times of a request; the fields are those of `BenchRequest`."""

    @property
    def arrival_s(self) -> float: ...
    @property
    def after(self) -> int | None: ...
    @property
    def think_s(self) -> float: ...


class Agenda:
    """The requests of some work that have not been sent yet, by number."""

    def __init__(self, work: Sequence[Timed]) -> None:
        """`ConfigError` if a request waits for one that does not stand before it: it might wait for ever."""
        self._work = work
        self._due: list[tuple[float, int]] = []
        self._followers: defaultdict[int, list[int]] = defaultdict(list)
        self._num_left = len(work)
        for index, request in enumerate(work):
            if request.after is None:
                self._due.append((request.arrival_s, index))
            elif 0 <= request.after < index:
                self._followers[request.after].append(index)
            else:
                raise ConfigError(f"Request {index} follows request {request.after}, which does not stand before it.")
        heapq.heapify(self._due)

    def __len__(self) -> int:
        """The number of requests that have not been taken, including those whose time is not known yet."""
        return self._num_left

    @property
    def next_due_s(self) -> float:
        """When the next request with a known time is due; infinity while all wait for others."""
        return self._due[0][0] if self._due else float("inf")

    def take_due(self, now_s: float) -> Iterator[tuple[int, float]]:
        """Yield the due requests in order of their times: (number, when it was due)."""
        while self._due and self._due[0][0] <= now_s:
            due_s, index = heapq.heappop(self._due)
            self._num_left -= 1
            yield index, due_s

    def ended(self, index: int, at_s: float) -> None:
        """A request has ended, so those that follow it have a time now."""
        for follower in self._followers.pop(index, ()):
            request = self._work[follower]
            heapq.heappush(self._due, (max(request.arrival_s, at_s + request.think_s), follower))


@dataclass(frozen=True)
class Round:
    times: RoundTimes
    num_steps: int
    num_preemptions: int
    utilisation: Utilisation = UNKNOWN
    """How well its steps used the device."""


def sampling_params(request: BenchRequest, temperature: float) -> SamplingParams:
    """Parameters that generate exactly as many tokens as the work says, and no text."""
    return SamplingParams(
        n=request.num_choices,
        temperature=temperature,
        max_tokens=request.num_output_tokens,
        ignore_eos=True,
        detokenize=False,
    )


def check_room(work: Work, max_model_len: int) -> None:
    """Refuse work that the engine would cut short, before any request runs."""
    longest = max(request.num_prompt_tokens + request.num_output_tokens for request in work)
    if longest > max_model_len:
        raise ConfigError(
            f"The work has a request of {longest} tokens, prompt and output together, but the engine takes at most "
            f"{max_model_len}. Raise --max-model-len or the memory of the KV cache, or choose shorter work."
        )


def run_round(
    engine: LLMEngine,
    work: Work,
    *,
    temperature: float,
    step: Step | None = None,
    progress: Meter | None = None,
    now: Callable[[], float] = time.perf_counter,
) -> Round:
    """Run the work to its end and time it. Raises if a request does not get exactly its tokens."""
    params = [sampling_params(request, temperature) for request in work]
    step = step or engine.step
    finished: dict[str, RequestOutput] = {}
    errors: dict[str, str] = {}
    num_steps = 0
    used_before = engine.utilisation.stats.copy()
    gc.collect()
    prompts_share = _prompt_share_from_now(engine)
    started_s = now()
    for index, (request, own_params) in enumerate(zip(work, params)):
        engine.add_request(str(index), request.prompt_token_ids, own_params, request.options, stream=False)
    while engine.has_unfinished_requests():
        num_steps += 1
        stepped = step()
        errors |= stepped.errors
        for output in stepped.outputs:
            if output.finished:
                finished[output.request_id] = output
                if progress is not None:
                    progress.advance()
    elapsed_s = now() - started_s
    check_tokens(work, finished, errors)
    return Round(
        RoundTimes.of(work, elapsed_s=elapsed_s, pace_s=_mean_pace(finished.values()), prompt_share=prompts_share()),
        num_steps,
        sum(output.metrics.num_preemptions for output in finished.values() if output.metrics is not None),
        Utilisation.of(engine.utilisation.stats.since(used_before)),
    )


def _prompt_share_from_now(engine: LLMEngine) -> Callable[[], float | None]:
    """A function that returns which share of the steps' time prompt tokens have taken since now."""
    stats = engine.core.scheduler.token_time.stats
    prompt_s, output_s = stats.prompt_s, stats.output_s
    return lambda: TokenTimeStats(stats.prompt_s - prompt_s, stats.output_s - output_s).prompt_share


def check_tokens(work: Work, finished: dict[str, RequestOutput], errors: dict[str, str]) -> None:
    """Raise unless each request has exactly the tokens that the work asked for."""
    for index, request in enumerate(work):
        output = finished.get(str(index))
        if output is None or str(index) in errors:
            raise HeadwayError(f"Request {index} of the work was lost: {errors.get(str(index), 'it never ended')}.")
        for completion in output.outputs:
            if len(completion.token_ids) != request.num_output_tokens:
                raise HeadwayError(
                    f"Request {index} of the work got {len(completion.token_ids)} tokens instead of "
                    f"{request.num_output_tokens}; the measurement is void."
                )


def _mean_pace(outputs: Iterable[RequestOutput]) -> float | None:
    paces = [
        output.metrics.time_per_output_token_s(len(output.outputs[0].token_ids))
        for output in outputs
        if output.metrics is not None
    ]
    known = [pace for pace in paces if pace is not None]
    return sum(known) / len(known) if known else None


@dataclass(frozen=True)
class Replay:
    timelines: Sequence[RequestTimeline]
    duration_s: float
    num_steps: int
    samples: Sequence[BatchSample] = ()
    """The batch after steps, thinned."""
    errors: Mapping[str, str] = field(default_factory=dict)
    """The errors of failed requests, by their number."""
    prompt_share: float | None = None
    """The share of the steps' time that prompt tokens took."""
    answers: Sequence[Sequence[int]] = ()
    """The tokens of each request's answer."""
    utilisation: Utilisation = UNKNOWN
    """How well its steps used the device."""

    @property
    def num_lost(self) -> int:
        """The number of requests that did not get exactly their tokens."""
        return sum(not timeline.is_complete for timeline in self.timelines)


def replay(
    engine: LLMEngine,
    work: Work,
    *,
    temperature: float,
    step: Step | None = None,
    progress: Meter | None = None,
    now: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Replay:
    """Replay the work from its first arrival until the last request has ended. A request that follows another arrives
    when it is sent: `think_s` after the other's end, complete or not."""
    step = step or engine.step
    params = [sampling_params(request, temperature) for request in work]
    timelines = [RequestTimeline(r.arrival_s, r.num_prompt_tokens, r.num_output_tokens) for r in work]
    agenda, log, num_steps = Agenda(work), SampleLog(), 0
    errors: dict[str, str] = {}
    answers: list[Sequence[int]] = [()] * len(work)
    used_before = engine.utilisation.stats.copy()
    gc.collect()
    prompts_share = _prompt_share_from_now(engine)
    started_s = now()
    while agenda or engine.has_unfinished_requests():
        elapsed_s = now() - started_s
        for index, due_s in agenda.take_due(elapsed_s):
            request = work[index]
            timelines[index].arrival_s = due_s
            prepared = engine.prepare(str(index), request.prompt_token_ids, params[index], request.options)
            if (forecast := engine.forecast(prepared)) is not None:
                timelines[index].expected_first_s = now() - started_s + forecast.first_token_s
            engine.submit(prepared, stream=True)
        if not engine.has_unfinished_requests():
            sleep(agenda.next_due_s - elapsed_s)
            continue
        stepped = step()
        errors |= stepped.errors
        num_steps += 1
        elapsed_s = now() - started_s
        for output in stepped.outputs:
            index = int(output.request_id)
            timeline = timelines[index]
            num_new = len(output.outputs[0].token_ids) - len(timeline.token_times_s)
            timeline.token_times_s.extend([elapsed_s] * num_new)
            if output.finished:
                answers[index] = output.outputs[0].token_ids
                timeline.num_preemptions = 0 if output.metrics is None else output.metrics.num_preemptions
                timeline.num_cached_tokens = output.num_cached_tokens
                agenda.ended(index, elapsed_s)
                if progress is not None:
                    progress.advance()
        if log.is_due(is_idle=not engine.has_unfinished_requests()):
            log.add(sample_of(engine.core.scheduler, elapsed_s))
    duration_s = now() - started_s
    used = Utilisation.of(engine.utilisation.stats.since(used_before))
    return Replay(timelines, duration_s, num_steps, log.samples, errors, prompts_share(), answers, used)
