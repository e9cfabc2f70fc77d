"""The truth about the simulator: the same work in the real engine and in simulation, side by side.

The load is a fraction of the capacity: the rate at which requests are served when all are there at once. It is found by
simulation; a check with all requests at once measures it, too.

Machines are not always as fast as when they were calibrated. The time of every real step is compared with what the
calibration expects of it, and a second simulation follows the same ups and downs. It takes the machine's changes out of
the errors, and with them what the cost model gets wrong about all steps of a few seconds alike: what is left are errors
in which steps there are, and in their order. So it explains the errors; the promise is about the first column.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.lab.bench.online import replay
from headway.lab.bench.online_metrics import OnlineMetrics
from headway.lab.bench.rounds import Progress
from headway.lab.sim.calibration import Calibration
from headway.lab.sim.errors import ErrorRow, error_rows
from headway.lab.sim.fit_error import FitError, fit_errors
from headway.lab.sim.simulate import simulate
from headway.lab.sim.speed import SpeedProfile
from headway.lab.sim.step_meter import Now, metered
from headway.lab.workload.requests import BenchRequest

if TYPE_CHECKING:
    from headway.engine.llm_engine import LLMEngine

Work = Sequence[BenchRequest]


@dataclass(frozen=True)
class Check:
    """One replay of some work in both."""

    name: str
    num_requests: int
    rate: float | None
    """Requests a second; `None`: all at once."""
    load: float | None
    """The rate over the capacity, where it was chosen so."""
    speed: float
    """Seconds that the real steps took, over those that the calibration expects of the same steps."""
    rows: Sequence[ErrorRow]
    step_errors: Sequence[FitError]
    """Of the cost model, on the real steps."""
    measured: OnlineMetrics
    simulated: OnlineMetrics

    @property
    def num_missed(self) -> int:
        """Of the promises."""
        return sum(row.is_within is False for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        """For the result file."""
        return {
            "name": self.name,
            "num_requests": self.num_requests,
            "rate": self.rate,
            "load": self.load,
            "speed": self.speed,
            "errors": {row.key: row.as_json() for row in self.rows},
            "step_errors": [error.as_json() for error in self.step_errors],
            "measured": self.measured.as_json(),
            "simulated": self.simulated.as_json(),
        }


def check(
    engine: LLMEngine,
    calibration: Calibration,
    work: Work,
    *,
    name: str,
    rate: float | None = None,
    load: float | None = None,
    temperature: float,
    seed: int = 0,
    num_warm_up: int = 0,
    progress: Progress | None = None,
    now: Now = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Check:
    """Run the work in both, the real engine first. It must be idle and is it again afterwards. `num_warm_up`: so many
    of the first requests run unmeasured before, on engines that are slow the first time that a step has some shape."""
    if num_warm_up:
        beginning = apart(work[:num_warm_up], uuid.uuid4().hex)
        replay(engine, beginning, temperature=temperature, now=now, sleep=sleep)
    started_s = now()
    with metered(engine, now=now) as meter:
        result = replay(
            engine,
            apart(work, uuid.uuid4().hex),
            temperature=temperature,
            step=meter.step,
            progress=progress,
            now=now,
            sleep=sleep,
        )
        samples = list(meter.samples)
    measured = OnlineMetrics.of(result.timelines, result.duration_s)
    speed = SpeedProfile.of(calibration.cost, samples, started_s=started_s)
    simulated = _simulated(engine, calibration, work, seed)
    steps = [(sample.work, sample.duration_s) for sample in samples]
    return Check(
        name=name,
        num_requests=len(work),
        rate=rate,
        load=load,
        speed=speed.overall,
        rows=error_rows(measured, simulated, _simulated(engine, calibration, work, None, speed)),
        step_errors=fit_errors(calibration.cost.seconds, steps),
        measured=measured,
        simulated=simulated,
    )


def capacity(engine: LLMEngine, calibration: Calibration, work: Work, *, seed: int = 0) -> float:
    """Requests a second when all are there at once, by simulation."""
    return _simulated(engine, calibration, at_once(work), seed).requests_s


def at_once(work: Work) -> list[BenchRequest]:
    """The same requests without waiting for anything but each other."""
    return [dataclasses.replace(request, arrival_s=0.0, think_s=0.0) for request in work]


def apart(work: Work, salt: str) -> list[BenchRequest]:
    """The same requests, which share prefixes with each other only: what an engine has in its cache from before must
    not be found, since a simulation starts without."""
    return [
        dataclasses.replace(
            request,
            options=dataclasses.replace(request.options, cache_salt=f"{salt}/{request.options.cache_salt or ''}"),
        )
        for request in work
    ]


def _simulated(
    engine: LLMEngine, calibration: Calibration, work: Work, seed: int | None, speed: SpeedProfile | None = None
) -> OnlineMetrics:
    result = simulate(
        work,
        calibration.machine(),
        engine.config.scheduler,
        engine.config.cache,
        seed=seed,
        speed=None if speed is None else speed.at,
    )
    return OnlineMetrics.of(result.timelines, result.duration_s)
