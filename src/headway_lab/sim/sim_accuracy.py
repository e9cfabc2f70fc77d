"""The accuracy of simulations: runs the same work in the real engine and in simulation, and compares each number.

The load is a fraction of the capacity, which is the rate at which requests are served when all are there at once. The
capacity is found by simulation; a check with all requests at once measures it, too.

A machine's speed changes after its calibration. So the time of every real step is compared with what the calibration
expects, and a second simulation follows the same changes of speed. Its errors leave out these changes, and also the
cost model's errors that all steps of a few seconds have in common. What remains are errors in which steps there are,
and in their order. So the second simulation explains the errors; the promise is about the first.
"""

from __future__ import annotations

import dataclasses
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.core import Scheduler
from headway.core.create import create_scheduler
from headway_lab.bench.online_metrics import OnlineMetrics
from headway_lab.bench.replay import replay
from headway_lab.sim.calibration import Calibration
from headway_lab.sim.cost_model import FitError, fit_errors
from headway_lab.sim.drafting import acceptance_of, guess_counts
from headway_lab.sim.simulate import simulate
from headway_lab.sim.step_timing import Now, SpeedProfile, metered
from headway_lab.workload.bench_requests import BenchRequest, Work

if TYPE_CHECKING:
    from headway.engine.llm_engine import LLMEngine
    from headway.progress import Meter


TOLERANCES: Mapping[str, float] = {
    "output_throughput": 0.05,
    "mean_ttft_ms": 0.10,
    "mean_tpot_ms": 0.10,
    "p99_ttft_ms": 0.20,
    "p99_tpot_ms": 0.20,
    "p99_itl_ms": 0.20,
    "p99_e2el_ms": 0.20,
}
"""The largest errors that simulations promise; other keys are shown for information."""

SHOWN = (
    "request_throughput",
    "output_throughput",
    *(f"{what}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for what in ("mean", "p50", "p99")),
)


@dataclass(frozen=True)
class ErrorRow:
    """A measured and a simulated value of one key of a result."""

    key: str
    measured: float
    simulated: float
    at_measured_speed: float | None = None
    """The value simulated with the real machine's speed at each moment, as its own steps showed it."""

    @property
    def error(self) -> float:
        """(simulated - measured) / measured; `nan` if there is nothing to compare."""
        return _error(self.simulated, self.measured)

    @property
    def error_at_measured_speed(self) -> float | None:
        """The error that remains without errors in the time of steps."""
        return None if self.at_measured_speed is None else _error(self.at_measured_speed, self.measured)

    @property
    def tolerance(self) -> float | None:
        """The promised bound; `None` if there is no promise for this key."""
        return TOLERANCES.get(self.key)

    @property
    def is_within(self) -> bool | None:
        """Whether the error is within the promise; `None` if there is none for this key."""
        return None if self.tolerance is None else abs(self.error) <= self.tolerance

    def as_json(self) -> dict[str, Any]:
        return {
            "measured": _or_none(self.measured),
            "simulated": _or_none(self.simulated),
            "error": _or_none(self.error),
            "error_at_measured_speed": _or_none(self.error_at_measured_speed),
            "tolerance": self.tolerance,
        }


def error_rows(
    measured: OnlineMetrics,
    simulated: OnlineMetrics,
    at_measured_speed: OnlineMetrics | None = None,
    keys: Sequence[str] = SHOWN,
) -> list[ErrorRow]:
    """One row for each key for which both have a number."""
    sides = [side.as_json() for side in (measured, simulated)]
    third = None if at_measured_speed is None else at_measured_speed.as_json()
    rows = []
    for key in keys:
        first, second = (side[key] for side in sides)
        if first is not None and second is not None:
            rows.append(ErrorRow(key, first, second, None if third is None else third[key]))
    return rows


def percent_text(error: float | None) -> str:
    """A percentage with its sign; empty if there is none."""
    return "" if error is None or math.isnan(error) else f"{100 * error:+.1f}%"


def _error(simulated: float, measured: float) -> float:
    if measured == 0.0:
        return 0.0 if simulated == 0.0 else math.nan
    return (simulated - measured) / measured


def _or_none(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


@dataclass(frozen=True)
class Check:
    """One replay of the same work in the engine and in the simulator."""

    name: str
    num_requests: int
    rate: float | None
    """Requests a second; `None`: all at once."""
    load: float | None
    """The rate over the capacity, if it was chosen as a part of that."""
    speed: float
    """Seconds that the real steps took, divided by what the calibration expects of the same steps."""
    rows: Sequence[ErrorRow]
    step_errors: Sequence[FitError]
    """The cost model's errors on the real steps."""
    measured: OnlineMetrics
    simulated: OnlineMetrics

    @property
    def num_missed(self) -> int:
        """The number of errors beyond their promises."""
        return sum(row.is_within is False for row in self.rows)

    def as_json(self) -> dict[str, Any]:
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
    progress: Meter | None = None,
    now: Now = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Check:
    """Run the work in both, the real engine first. The engine must be idle, and is idle again afterwards. The first
    `num_warm_up` requests also run unmeasured before, since some engines are slow the first time that a step has some
    shape."""
    if num_warm_up:
        beginning = apart(work[:num_warm_up], uuid.uuid4().hex)
        replay(engine, beginning, temperature=temperature, now=now, sleep=sleep)
    before, learned = guess_counts(engine), _learned(engine, calibration)
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
    calibration, answers = _with_guesses(engine, calibration, result.answers, before)
    speed = SpeedProfile.of(calibration.cost, samples, started_s=started_s, drafting=calibration.drafting)
    simulated = _simulated(engine, calibration, work, seed, answers=answers, learned=learned)
    follows = _simulated(engine, calibration, work, None, speed, answers=answers, learned=learned)
    plain = [(sample.work, sample.duration_s) for sample in samples if not sample.drafts.num_tokens]
    return Check(
        name=name,
        num_requests=len(work),
        rate=rate,
        load=load,
        speed=speed.overall,
        rows=error_rows(measured, simulated, follows),
        step_errors=fit_errors(calibration.cost.seconds, plain),
        measured=measured,
        simulated=simulated,
    )


def _learned(engine: LLMEngine, calibration: Calibration) -> Scheduler:
    """What the engine's scheduler knows now of steps and guesses. The simulation begins with it: the engine has run
    before, and sizes its first steps by it."""
    learned = create_scheduler(engine.config.scheduler, engine.config.cache, calibration.machine())
    learned.learn_from(engine.core.scheduler)
    return learned


def _with_guesses(
    engine: LLMEngine, calibration: Calibration, answers: Sequence[Sequence[int]], before: tuple[int, int]
) -> tuple[Calibration, Sequence[Sequence[int]] | None]:
    """What a simulation takes from the real run, since it has no text: the answers, in which guesses are looked up; or,
    of a draft model, how many of its guesses were right. Like lengths, these belong to the work."""
    settings = engine.config.scheduler
    if settings.speculation == "off" or settings.spec_synthetic_acceptance:
        return calibration, None
    if settings.speculation == "ngram":
        return calibration, answers
    counts = [now - then for now, then in zip(guess_counts(engine), before, strict=True)]
    drafting = dataclasses.replace(calibration.drafting, acceptance=acceptance_of(*counts))
    return dataclasses.replace(calibration, drafting=drafting), None


def rate_at_once(engine: LLMEngine, calibration: Calibration, work: Work, *, seed: int = 0) -> float:
    """Requests a second when all are there at once, by simulation. Guesses in text that is not known count as none."""
    return _simulated(engine, calibration, at_once(work), seed, has_guesses=False).requests_s


def at_once(work: Work) -> list[BenchRequest]:
    """The same requests, which wait only for requests that they follow."""
    return [dataclasses.replace(request, arrival_s=0.0, think_s=0.0) for request in work]


def apart(work: Work, salt: str) -> list[BenchRequest]:
    """The same requests, which share prefixes only with each other. They must not find earlier cached blocks, since a
    simulation starts without any."""
    return [
        dataclasses.replace(
            request,
            options=dataclasses.replace(request.options, cache_salt=f"{salt}/{request.options.cache_salt or ''}"),
        )
        for request in work
    ]


def _simulated(
    engine: LLMEngine,
    calibration: Calibration,
    work: Work,
    seed: int | None,
    speed: SpeedProfile | None = None,
    *,
    answers: Sequence[Sequence[int]] | None = None,
    learned: Scheduler | None = None,
    has_guesses: bool = True,
) -> OnlineMetrics:
    scheduler = engine.config.scheduler
    if not has_guesses and not scheduler.spec_synthetic_acceptance:
        scheduler = dataclasses.replace(scheduler, speculation="off")
    result = simulate(
        work,
        calibration.machine(),
        scheduler,
        engine.config.cache,
        seed=seed,
        speed=None if speed is None else speed.at,
        answers=answers,
        learned=learned,
    )
    return OnlineMetrics.of(result.timelines, result.duration_s)
