"""Replaying work on a virtual clock: what `headway.lab.bench.replay` does, in seconds instead of hours.

A replica is the real loop, scheduler and cache on a simulated device, with a clock of its own. The one that is furthest
behind steps next, and a request is routed when all that are busy have come as far as its arrival: a router never sees
what is to come.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headway.config import CacheConfig
from headway.core import Request, RequestStatus, RequestUpdate, Scheduler, SchedulerOutput
from headway.core.routing import CacheChanges, CacheReport, Router, expected_tokens
from headway.core.scheduler import create_scheduler
from headway.engine.engine_core import CoreStep, EngineCore
from headway.errors import ConfigError
from headway.executor.simulated import SimulatedExecutor, StepTime, VirtualClock
from headway.lab.bench.replay import Agenda
from headway.lab.bench.timelines import BatchSample, RequestTimeline, SampleLog, sample_of
from headway.lab.sim.calibration import Machine
from headway.lab.sim.cost_model import CostModel
from headway.lab.workload.bench_requests import BenchRequest
from headway.settings import CacheSettings, SchedulerSettings

if TYPE_CHECKING:
    from headway.cli.progress import Meter


@dataclass(frozen=True)
class Variation:
    """How simulated steps deviate from the cost model: not at all, unless something is given."""

    seed: str | None = None
    """Steps spread around their mean as the measured ones did, drawn with this seed."""
    speed: Callable[[float], float] | None = None
    """Time → how many times as long everything takes by then."""

    def step_time(self, cost: CostModel, clock: VirtualClock) -> StepTime:
        """The time of a step, on a device with this clock."""
        step_s: StepTime = cost.step_s
        speed = self.speed
        if self.seed is not None and len(cost.spread) > 1:
            step_s = _spread(step_s, cost.spread, random.Random(self.seed))
        if speed is None:
            return step_s
        return lambda output: speed(clock.now_s) * step_s(output)


def _spread(step_s: StepTime, quantiles: tuple[float, ...], rng: random.Random) -> StepTime:
    draw, num_parts = rng.random, len(quantiles) - 1

    def drawn_s(output: SchedulerOutput) -> float:
        place = draw() * num_parts
        below = int(place)
        return (quantiles[below] + (quantiles[below + 1] - quantiles[below]) * (place - below)) * step_s(output)

    return drawn_s


class Replica:
    """An engine that serves its share of the requests."""

    def __init__(
        self, machine: Machine, scheduler: SchedulerSettings, cache: CacheSettings, variation: Variation
    ) -> None:
        self.clock = VirtualClock()
        self._after_s = machine.host.after
        self.executor = SimulatedExecutor(
            variation.step_time(machine.cost, self.clock),
            self.clock,
            max_in_flight=2 if machine.overlap else 1,
            host_s=machine.host.before,
            acceptance=scheduler.synthetic_chance or 0.0,
        )
        self.core = EngineCore(
            create_scheduler(scheduler, cache, machine), self.executor, now=self.clock.now, sleep=self.clock.sleep
        )
        self._changes: CacheChanges | None = None

    @property
    def now_s(self) -> float:
        """Its virtual time."""
        return self.clock.now_s

    @property
    def is_busy(self) -> bool:
        """Whether there is anything to step for."""
        return self.core.has_unfinished_requests

    def add(self, request: Request, *, at_s: float) -> None:
        """Take a request that arrives then. A replica that is ahead takes it when its step is over, as engines do."""
        if not self.core.has_unfinished_requests:
            self.clock.sleep_until(at_s)
        self.core.add_request(request)

    def step(self) -> CoreStep:
        """One step, up to the time when its tokens are out."""
        step = self.core.step()
        num_rows = len(step.report.snapshot.output.scheduled)
        if num_rows:
            self.clock.sleep(self._after_s(num_rows))
        return step

    def follow_cache(self) -> None:
        """Have something to report: a router wants to know."""
        prefix_cache = self.core.scheduler.kv_cache.prefix_cache
        self._changes = None if prefix_cache is None else prefix_cache.follow_changes()

    def reports(self) -> Iterator[CacheReport]:
        """What its prefix cache has to tell."""
        while self._changes is not None and (report := self._changes.report()) is not None:
            yield report


@dataclass
class Simulation:
    timelines: list[RequestTimeline]
    duration_s: float = 0.0
    num_steps: int = 0
    busy_s: float = 0.0
    """Of all devices together."""
    waste: list[float] = field(default_factory=list)
    """Before each step with a request in the batch: which part of the KV memory that is kept from others holds
    nothing."""
    num_running: list[int] = field(default_factory=list)
    """At the same times, how many requests were in the batch."""
    most_waiting: int = 0
    """After a step was planned: how many requests found no room in it, at most, on one replica."""
    samples: Sequence[BatchSample] = ()
    """How the batches stood after steps, all replicas together; thinned."""
    num_routed: list[int] = field(default_factory=list)
    """How many requests each replica got."""
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    """Of tokens that were looked up in prefix caches, how many were found."""


def simulate(
    work: Sequence[BenchRequest],
    machine: Machine,
    scheduler: SchedulerSettings,
    cache: CacheSettings | None = None,
    *,
    num_replicas: int = 1,
    router: str = "round-robin",
    seed: int | None = 0,
    speed: Callable[[float], float] | None = None,
    progress: Meter | None = None,
) -> Simulation:
    """Replay the work from its first arrival to the end of its last request.

    `seed`: of the spread of steps around their means; `None`: every step takes what the cost model says. `speed`: how
    many times as long steps take at a certain time.
    """
    if scheduler.speculation != "off" and not scheduler.spec_synthetic_acceptance:
        raise ConfigError(
            "A simulation has no text to guess tokens from: say with spec_synthetic_acceptance how many tokens a step "
            "guesses bring, or leave speculation 'off'."
        )
    cache = cache or CacheConfig().resolve("cpu")  # nothing of it that counts here depends on the device
    seeds = [None if seed is None else f"{seed}/{place}" for place in range(num_replicas)]
    replicas = [Replica(machine, scheduler, cache, Variation(seed, speed)) for seed in seeds]
    return _Cluster(work, replicas, router, progress, max_num_seqs=scheduler.max_num_seqs).run()


_News = tuple[float, int, int, Sequence[CacheReport], Sequence[RequestUpdate]]
"""When, a number that sets equals apart, of which replica, and what it tells of a step."""


class _Cluster:
    """A simulation under way."""

    def __init__(
        self,
        work: Sequence[BenchRequest],
        replicas: Sequence[Replica],
        router: str,
        progress: Meter | None,
        *,
        max_num_seqs: int,
    ) -> None:
        self._work, self._replicas, self._progress = work, replicas, progress
        self._block_size = replicas[0].core.scheduler.kv_cache.block_size
        self._router = Router(router, block_size=self._block_size)
        for place, replica in enumerate(replicas):
            self._router.add(place, max_num_seqs=max_num_seqs)
            if len(replicas) > 1 and self._router.needs_digests:
                replica.follow_cache()
        self._busy: list[tuple[float, int]] = []  # a heap of (its time, its place) of replicas with something to do
        self._news: list[_News] = []  # a heap of what the router learns, and when
        self._num_news = 0
        self._agenda, self._log = Agenda(work), SampleLog()
        self.result = Simulation(
            [RequestTimeline(r.arrival_s, r.num_prompt_tokens, r.num_output_tokens) for r in work],
            num_routed=[0] * len(replicas),
        )

    def run(self) -> Simulation:
        result, agenda = self.result, self._agenda
        while True:
            due_s = agenda.next_due_s
            if due_s < float("inf") and (not self._busy or due_s <= self._busy[0][0]):
                for index, _ in agenda.take_due(due_s):
                    self._route(index, due_s)
            elif self._busy:
                self._step(heapq.heappop(self._busy)[1])
            else:
                break
        result.duration_s = max(replica.now_s for replica in self._replicas)
        result.samples = self._log.samples
        for replica in self._replicas:
            result.num_steps += replica.executor.num_steps
            result.busy_s += replica.executor.busy_s
            cache = replica.core.scheduler.kv_cache.prefix_cache
            if cache is not None:
                result.num_queried_tokens += cache.stats.num_queried_tokens
                result.num_hit_tokens += cache.stats.num_hit_tokens
        return result

    def _step(self, place: int) -> None:
        """One of the replica whose clock is behind the others'."""
        replica = self._replicas[place]
        _note_batch(self.result, replica.core.scheduler)
        step = replica.step()
        if replica.is_busy:
            heapq.heappush(self._busy, (replica.now_s, place))
        self._note_step(place, step)

    def _route(self, index: int, due_s: float) -> None:
        request = _request(str(index), self._work[index])
        place = 0 if len(self._replicas) == 1 else self._choose(request, due_s)
        self.result.num_routed[place] += 1
        self.result.timelines[index].arrival_s = due_s
        replica = self._replicas[place]
        was_busy = replica.is_busy
        replica.add(request, at_s=due_s)
        if not was_busy:
            heapq.heappush(self._busy, (replica.now_s, place))

    def _choose(self, request: Request, now_s: float) -> int:
        while self._news and self._news[0][0] <= now_s:
            _, _, place, reports, updates = heapq.heappop(self._news)
            self._learn(place, reports, updates)
        num_blocks = request.num_prompt_tokens // self._block_size
        max_tokens = request.max_total_tokens - request.num_prompt_tokens
        return self._router.route(
            request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            num_answer_tokens=expected_tokens(max_tokens, request.options.predicted_tokens),
            digests=lambda: request.block_digests(self._block_size, num_blocks)[:num_blocks],
        )

    def _tell(self, place: int, step: CoreStep) -> None:
        """Have the router learn of a step when its time has come; replicas are ahead of each other."""
        replica = self._replicas[place]
        heapq.heappush(self._news, (replica.now_s, self._num_news, place, list(replica.reports()), step.updates))
        self._num_news += 1

    def _learn(self, place: int, reports: Sequence[CacheReport], updates: Sequence[RequestUpdate]) -> None:
        router = self._router
        for report in reports:
            router.index.take(place, report)
        for update in updates:
            if update.new_token_ids:
                router.note_tokens(update.request_id, len(update.new_token_ids))
            if update.finish_status is not None:
                router.end(update.request_id)

    def _note_step(self, place: int, step: CoreStep) -> None:
        if len(self._replicas) > 1:
            self._tell(place, step)
        replica = self._replicas[place]
        now_s, timelines = replica.now_s, self.result.timelines
        for update in step.updates:
            timeline = timelines[int(update.request_id)]
            times_s, num_new = timeline.token_times_s, len(update.new_token_ids)
            if num_new == 1:
                times_s.append(now_s)
            else:
                times_s.extend([now_s] * num_new)
            if update.finish_status is None:
                continue
            if update.finish_status is RequestStatus.FINISHED_ERROR:
                raise RuntimeError(f"request {update.request_id} failed: {update.error}")
            self._agenda.ended(int(update.request_id), now_s)
            if self._progress is not None:
                self._progress.advance()
        self.result.most_waiting = max(self.result.most_waiting, len(replica.core.scheduler.waiting))
        for output in step.launched:
            for request_id in output.preempted_request_ids:
                timelines[int(request_id)].num_preemptions += 1
        if self._log.is_due(is_idle=not self._busy):
            self._log.add(self._sample(now_s))

    def _sample(self, at_s: float) -> BatchSample:
        """All replicas together."""
        if len(self._replicas) == 1:
            return sample_of(self._replicas[0].core.scheduler, at_s)
        each = [sample_of(replica.core.scheduler, at_s) for replica in self._replicas]
        num_running, num_waiting = sum(one.num_running for one in each), sum(one.num_waiting for one in each)
        return BatchSample(at_s, num_running, num_waiting, sum(one.kv_used for one in each) / len(each))


def _note_batch(result: Simulation, scheduler: Scheduler) -> None:
    if (waste := scheduler.kv_waste) is not None:
        result.waste.append(waste)
        result.num_running.append(scheduler.num_in_batch)


def _request(name: str, work: BenchRequest) -> Request:
    if work.num_choices != 1:
        raise ConfigError("The simulator has one answer for each request.")
    return Request(name, work.prompt_token_ids, max_tokens=work.num_output_tokens, options=work.options)
