"""Measuring what steps cost on this machine, so that the simulator can stand in for it.

The engine runs waves of requests as a server does: they stream, and some arrive while others generate.

    crowd     many short prompts at once, then steps that only decode, with ever fewer rows
    stream    prompts of all lengths arrive while others generate, few or many: chunks beside decodes
    long      one or two long prompts, alone or beside a few that generate
    deep      few or many long prompts, then steps that only decode and read much of the cache

Prompts are as long as the machine can compute in a second or two, so that slow machines see many waves too. Fast ones
generate for longer, since a device has to be busy for some steps before the host launches steps early, as under load.

Each step's work and time are recorded, and a cost model is fitted to them. The first run of a kernel that has to be
compiled is slow, so the waves first run unmeasured, then again from the beginning, and steps that took several times
what the fit expects are dropped. A machine's speed changes: it heats up, or has other work. So between two waves the
same small step is timed, and the times of a wave are divided by it before they are compared with other waves.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.sampling_params import SamplingParams
from headway_lab.sim.calibration import Calibration, HostTime
from headway_lab.sim.cost_model import CostModel
from headway_lab.sim.drafting import DraftedStep, Drafting, acceptance_of, guess_counts
from headway_lab.sim.step_timing import Now, StepMeter, StepSample, metered

if TYPE_CHECKING:
    from headway.engine.llm_engine import LLMEngine
    from headway.progress import Meter


KINDS = ("crowd", "stream", "deep", "stream", "crowd", "long", "deep")
_PATIENT_TOKENS, _MOST_PATIENCE = 2_000, 6
_DEEP_TOKENS = 512  # of each prompt of a deep wave, at least, where there are many

DEFAULT_SECONDS = 40.0
TEMPERATURE = 1.0

_NUM_WAVES = 16  # at least this many; a wave that takes longer is cut short,
_LEAST_WAVE_S = 0.5  # unless it has just begun
_WARM_UP_SHARE = 0.2
_PROBE_TOKENS, _PROBE_TOKENS_GPU = 256, 1024  # of the prompts that measure how fast the machine is
_REFERENCE_STEPS = 3


@dataclass(frozen=True)
class PlannedRequest:
    """One request of a wave; `at_step`: the step of the wave before which it arrives."""

    num_prompt_tokens: int
    num_output_tokens: int
    at_step: int


Wave = list[PlannedRequest]


@dataclass(frozen=True)
class WaveLimits:
    """What a wave may ask for."""

    max_num_seqs: int
    max_model_len: int
    num_cache_tokens: int
    num_prompt_tokens: int
    """About as many prompt tokens as the machine computes in a second."""

    @property
    def patience(self) -> int:
        """By what factor more tokens are generated than on a machine whose steps take long."""
        return min(max(self.num_prompt_tokens // _PATIENT_TOKENS, 1), _MOST_PATIENCE)


def waves(limits: WaveLimits, rng: random.Random) -> Iterator[Wave]:
    """Yield one wave of each kind after the other, forever."""
    make = {"crowd": _crowd, "stream": _stream, "long": _long, "deep": _deep}
    while True:
        for kind in KINDS:
            yield _fitting(make[kind](limits, rng), limits)


def _crowd(limits: WaveLimits, rng: random.Random) -> Wave:
    num_rows = _log_uniform(rng, 1, limits.max_num_seqs)
    longest = max(limits.num_prompt_tokens // num_rows, 2)
    return [
        PlannedRequest(rng.randint(1, min(longest, 64)), limits.patience * rng.randint(3, 10), 0)
        for _ in range(num_rows)
    ]


def _stream(limits: WaveLimits, rng: random.Random) -> Wave:
    gap = rng.choice((0.3, 1, 2))
    room = limits.num_prompt_tokens
    wave: Wave = []
    if rng.random() < 0.5:
        num_rows = _log_uniform(rng, 1, max(limits.max_num_seqs // 2, 1))
        wave = [PlannedRequest(rng.randint(1, 16), limits.patience * rng.randint(8, 16), 0) for _ in range(num_rows)]
    for place in range(limits.max_num_seqs - len(wave)):
        num_in = _log_uniform(rng, 2, max(limits.num_prompt_tokens // 2, 16))
        wave.append(PlannedRequest(num_in, limits.patience * rng.randint(4, 16), int(place * gap)))
        room -= num_in
        if room <= 0:
            break
    return wave


def _long(limits: WaveLimits, rng: random.Random) -> Wave:
    longest = 2 * limits.num_prompt_tokens
    few = [PlannedRequest(rng.randint(2, 32), 12, 0) for _ in range(rng.choice((0, 2, 6)))]
    return [*few, PlannedRequest(rng.randint(max(longest // 3, 1), longest), 3, 2 if few else 0)]


def _deep(limits: WaveLimits, rng: random.Random) -> Wave:
    num_tokens = 2 * limits.num_prompt_tokens
    most_rows = max(min(num_tokens // _DEEP_TOKENS, limits.max_num_seqs), 4)
    num_rows = rng.choice((1, 2, 4, _log_uniform(rng, 4, most_rows), most_rows))
    longest = max(num_tokens // num_rows, 2)
    return [
        PlannedRequest(rng.randint(max(longest // 3, 1), longest), limits.patience * 24, place // 4)
        for place in range(num_rows)
    ]


def _fitting(wave: Wave, limits: WaveLimits) -> Wave:
    """Shorten requests to what the model takes, and drop those that neither the batch nor the cache has room for."""
    kept: Wave = []
    room = limits.num_cache_tokens
    for request in wave[: limits.max_num_seqs]:
        num_out = min(request.num_output_tokens, max(limits.max_model_len // 4, 1))
        num_in = max(min(request.num_prompt_tokens, limits.max_model_len - num_out), 1)
        room -= num_in + num_out
        if room < 0 and kept:
            break
        kept.append(PlannedRequest(num_in, num_out, request.at_step))
    return kept


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return max(low, min(high, round(math.exp(rng.uniform(math.log(low), math.log(max(high, low)))))))


def calibrate(
    engine: LLMEngine,
    *,
    model: str = "",
    seconds: float = DEFAULT_SECONDS,
    seed: int = 0,
    temperature: float = TEMPERATURE,
    progress: Meter | None = None,
    now: Now = time.perf_counter,
) -> Calibration:
    """Measure the engine for about `seconds` by its clock. It must be idle and warm. `model` is its name, for
    people."""
    measured = measure_waves(engine, seconds=seconds, seed=seed, temperature=temperature, progress=progress, now=now)
    cost, drafting = _fit_cost(measured, has_draft_model=engine.config.scheduler.speculation == "draft")
    drafting = dataclasses.replace(drafting, acceptance=acceptance_of(*guess_counts(engine)))
    return Calibration.of_engine(engine, cost, _fit_host(measured), drafting=drafting, model=model)


@dataclass(frozen=True)
class MeasuredWave:
    """The steps of a wave, and the seconds of the same small step at that time, which show how fast the machine was."""

    samples: Sequence[StepSample]
    reference_s: float


def _fit_cost(measured: Sequence[MeasuredWave], *, has_draft_model: bool) -> tuple[CostModel, Drafting]:
    """Fit a cost model to all steps, scaled as if the machine had always had its mean speed; and what guesses add to
    steps, if there were some, which is taken from them before."""
    usual_s = _usual(measured)
    steps = [
        DraftedStep(sample.work, sample.duration_s * usual_s / wave.reference_s, sample.drafts)
        for wave in measured
        for sample in wave.samples
    ]
    drafting = Drafting.fit(steps, has_model=has_draft_model)
    rows = [(step.work, max(step.seconds - drafting.seconds(step.drafts), 0.1 * step.seconds)) for step in steps]
    plain = [
        (sample.work, sample.duration_s) for wave in measured for sample in wave.samples if not sample.drafts.num_tokens
    ]
    return CostModel.fit(rows, spread_of=plain or None), drafting


def _fit_host(measured: Sequence[MeasuredWave]) -> HostTime:
    return HostTime.fit(
        [
            (sample.work.num_rows, sample.before_s, sample.after_s)
            for wave in measured
            for sample in wave.samples
            if sample.before_s is not None and sample.after_s is not None
        ]
    )


def _usual(measured: Sequence[MeasuredWave]) -> float:
    """The mean reference time, weighted by duration and not by wave: slow times last longer."""
    weights = [sum(sample.duration_s for sample in wave.samples) for wave in measured]
    work_done = sum(weight / wave.reference_s for weight, wave in zip(weights, measured, strict=True))
    return sum(weights) / work_done if work_done else 1.0


def measure_waves(
    engine: LLMEngine,
    *,
    seconds: float,
    seed: int,
    temperature: float,
    progress: Meter | None = None,
    now: Now = time.perf_counter,
) -> list[MeasuredWave]:
    """Run waves of all kinds, after a warm-up with the same ones, and return their steps."""
    started_s = now()
    measured: list[MeasuredWave] = []

    def tell(elapsed_s: float) -> None:
        if progress is not None:
            progress.at(min(elapsed_s / seconds, 1.0))

    with metered(engine, now=now) as meter:
        runner = _Waves(engine, meter, random.Random(seed), temperature, now)
        limits = WaveLimits(
            max_num_seqs=engine.config.scheduler.max_num_seqs,
            max_model_len=engine.plan.max_model_len,
            num_cache_tokens=engine.plan.num_tokens,
            num_prompt_tokens=max(int(runner.prompt_rate()), 32),
        )
        lasts_s = max(seconds / _NUM_WAVES, _LEAST_WAVE_S)
        warm_until_s = started_s + seconds * _WARM_UP_SHARE
        for wave in waves(limits, random.Random(seed)):
            if now() >= warm_until_s:
                break
            runner.run(wave, lasts_s=lasts_s)
            tell(now() - started_s)
        reference_s = runner.reference_s()
        for wave in waves(limits, random.Random(seed)):
            if now() - started_s >= seconds:
                break
            samples = runner.run(wave, lasts_s=lasts_s)
            before_s, reference_s = reference_s, runner.reference_s()
            measured.append(MeasuredWave(samples, (before_s + reference_s) / 2))
            tell(now() - started_s)
    return measured


class _Waves:
    def __init__(self, engine: LLMEngine, meter: StepMeter, rng: random.Random, temperature: float, now: Now) -> None:
        self._engine, self._meter, self._rng, self._temperature, self._now = engine, meter, rng, temperature, now

    def prompt_rate(self) -> float:
        """Prompt tokens per second, roughly. Measured on the second of two prompts, when nothing has to be compiled any
        more."""
        plan = self._engine.plan
        wanted = _PROBE_TOKENS_GPU if plan.device.startswith("cuda") else _PROBE_TOKENS
        num_tokens = min(wanted, plan.max_model_len // 2)
        for _ in range(2):
            samples = self.run([PlannedRequest(num_tokens, 1, at_step=0)])
        return num_tokens / sum(sample.duration_s for sample in samples)

    def reference_s(self) -> float:
        """Seconds of a step that always has the same work."""
        samples = self.run([PlannedRequest(4, 1 + _REFERENCE_STEPS, at_step=0)])
        return statistics.median(sample.duration_s for sample in samples[1:])

    def run(self, wave: Wave, *, lasts_s: float = float("inf")) -> list[StepSample]:
        """Run a wave to its end, or until its time is over, and return its steps."""
        engine, meter = self._engine, self._meter
        expected = sorted(wave, key=lambda request: request.at_step)
        ends_at_s = self._now() + lasts_s
        names: list[str] = []
        num_steps = 0
        meter.samples = []
        meter.pause()
        while len(names) < len(expected) or engine.has_unfinished_requests():
            if not engine.has_unfinished_requests():
                num_steps = max(num_steps, expected[len(names)].at_step)  # nothing to wait for
            while len(names) < len(expected) and expected[len(names)].at_step <= num_steps:
                names.append(f"calibration {len(names)}")
                self._add(names[-1], expected[len(names) - 1])
            meter.step()
            num_steps += 1
            if self._now() > ends_at_s:
                break
        for name in names:
            engine.abort(name)
        engine.core.drain()
        return meter.samples

    def _add(self, name: str, request: PlannedRequest) -> None:
        highest = self._engine.model_config.vocab_size - 1
        prompt = [self._rng.randint(0, highest) for _ in range(request.num_prompt_tokens)]
        params = SamplingParams(
            temperature=self._temperature, max_tokens=request.num_output_tokens, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(name, prompt, params, stream=True)
