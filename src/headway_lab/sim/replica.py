"""A simulated replica: the real engine loop, scheduler and cache on a simulated device, with its own virtual clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.core import Request, Scheduler, SchedulerOutput
from headway.core.create import create_scheduler
from headway.core.forecast.answers import RecentAnswers
from headway.core.kv.cache_report import CacheChanges, CacheReport
from headway.core.step_work import StepWork
from headway.engine.engine_core import CoreStep, EngineCore
from headway.engine.utilisation import UtilisationMeter
from headway.executor.simulated import Arrivals, SimulatedExecutor, SimulatedTransfers, StepTime, VirtualClock
from headway.settings import CacheSettings, SchedulerSettings
from headway_lab.sim.calibration import Machine
from headway_lab.sim.drafting import Drafting, Drafts

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Variation:
    """How simulated steps deviate from the cost model. By default they do not."""

    seed: str | None = None
    """The seed with which steps spread around their mean as the measured ones did."""
    speed: Callable[[float], float] | None = None
    """Maps a time to the factor by which everything takes longer at that time."""

    def step_time(self, machine: Machine, clock: VirtualClock) -> StepTime:
        """A function for the time of a step, on a device with this clock."""
        cost = machine.cost
        step_s: StepTime = cost.step_s if machine.drafting.is_free else _with_drafts(cost.step_s, machine.drafting)
        speed = self.speed
        if self.seed is not None and len(cost.spread) > 1:
            step_s = _spread(step_s, cost.spread, random.Random(self.seed))
        if machine.ranks.number > 1:
            step_s = _with_ranks(step_s, machine)
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


def _with_drafts(step_s: StepTime, drafting: Drafting) -> StepTime:
    def drafted_s(output: SchedulerOutput) -> float:
        plain_s = step_s(output)
        return max(plain_s + drafting.seconds(Drafts.of(output)), 0.3 * plain_s)  # a fitted line has no bound

    return drafted_s


def _with_ranks(step_s: StepTime, machine: Machine) -> StepTime:
    ranks, link = machine.ranks, machine.link
    return lambda output: step_s(output) + ranks.seconds(StepWork.of(output), link)


class Replica:
    """A simulated engine that serves its share of the requests."""

    def __init__(
        self,
        machine: Machine,
        scheduler: SchedulerSettings,
        cache: CacheSettings,
        variation: Variation,
        arrivals: Arrivals | None = None,
        *,
        answers: Mapping[str, Sequence[int]] | None = None,
        learned: Scheduler | None = None,
        forecasts: bool = False,
    ) -> None:
        """`arrivals`: blocks that the replica fetches from others. `answers`: the tokens of requests, by their ids.
        `learned`: knows of steps and guesses what the replica's scheduler is to know at the start. `forecasts`: make
        one for each request, which takes an eighth of a simulation's time."""
        self.clock = VirtualClock()
        self._after_s = machine.host.after
        self.executor = SimulatedExecutor(
            variation.step_time(machine, self.clock),
            self.clock,
            max_in_flight=2 if machine.overlap else 1,
            host_s=machine.host.before,
            acceptance=scheduler.synthetic_chance or machine.drafting.acceptance,
            answers=answers,
            verifies_ahead=scheduler.speculation != "draft",
            transfers=None if arrivals is None else SimulatedTransfers(arrivals, self.clock),
        )
        self.core = EngineCore(
            create_scheduler(scheduler, cache, machine), self.executor, now=self.clock.now, sleep=self.clock.sleep
        )
        # The work's `max_tokens` are the true lengths, which a server would not know.
        self.core.scheduler.forecaster.answers = RecentAnswers(knows_limits=False)
        self._forecasts = forecasts
        if learned is not None:
            self.core.scheduler.learn_from(learned)
        self.utilisation = None if machine.costs is None else UtilisationMeter(machine.costs, machine.ceilings)
        self._changes: CacheChanges | None = None
        self.spans: list[tuple[float, float]] = []
        """The times in which it computed: (from, to)."""

    @property
    def now_s(self) -> float:
        """The virtual time."""
        return self.clock.now_s

    @property
    def is_busy(self) -> bool:
        """Whether it has a request to step for."""
        return self.core.has_unfinished_requests

    def add(self, request: Request, *, at_s: float) -> float | None:
        """Take a request that arrives at this time. A replica whose clock is later takes it after its current step, as
        engines do. Returns when its first token is expected, if forecasts are made and this one can be."""
        if not self.core.has_unfinished_requests:
            self.clock.sleep_until(at_s)
        forecast = self.core.forecast(request) if self._forecasts else None
        self.core.add_request(request)
        return None if forecast is None else self.clock.now_s + forecast.first_token_s

    def step(self) -> CoreStep:
        """Run one step, up to the time when its tokens are out."""
        started_s = self.clock.now_s
        step = self.core.step()
        num_rows = len(step.report.snapshot.output.scheduled)
        if num_rows:
            if self.utilisation is not None:
                self.utilisation.take(step.report)
            self.clock.sleep(self._after_s(num_rows))
            if self.spans and self.spans[-1][1] == started_s:
                started_s = self.spans.pop()[0]
            self.spans.append((started_s, self.clock.now_s))
        return step

    @property
    def token_s(self) -> float | None:
        """The estimated seconds of a prompt token; `None` before its first step."""
        return self.core.scheduler.pace.step_time.per_token_s

    def follow_cache(self) -> None:
        """Start recording changes of the prefix cache, which a router follows."""
        prefix_cache = self.core.scheduler.kv_cache.prefix_cache
        self._changes = None if prefix_cache is None else prefix_cache.follow_changes()

    def reports(self) -> Iterator[CacheReport]:
        """Yield the changes of its prefix cache."""
        while self._changes is not None and (report := self._changes.report()) is not None:
            yield report
