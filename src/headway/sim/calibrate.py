"""Measuring what steps cost on this machine, so that the simulator can stand in for it.

Requests of random lengths are run in waves of different sizes, some arriving while others generate, so that steps of
every kind occur: many rows and few, short contexts and long, chunks of all sizes alone and beside decodes. Each step's
work and time are noted and a cost model is fitted to them. What has never run before (a kernel to compile, a graph to
capture) is slow once: the first pass is thrown away, and so are the steps that the first fit finds far too slow.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headway.engine.llm_engine import LLMEngine
from headway.sampling_params import SamplingParams
from headway.sim.cost_model import CostModel, StepWork

Progress = Callable[[float], object]
"""Which part is done, from 0 to 1."""

_NUM_WAVES = 30  # at least so many; one that takes longer is broken off
_OUTLIER = 1.6  # times slower than the first fit says: something else was going on


@dataclass(frozen=True)
class Calibration:
    """A cost model, and what else a simulation needs to know about the engine."""

    cost: CostModel
    host_s: float
    """What passes between two steps although the device could work: nothing, where steps overlap."""


def calibrate(
    engine: LLMEngine, *, seconds: float = 40.0, seed: int = 0, progress: Progress | None = None
) -> Calibration:
    """Run the engine for about so long. It must be idle."""
    rng = random.Random(seed)
    started_s = time.perf_counter()
    steps: list[tuple[StepWork, float]] = []
    between_s: list[float] = []
    waves = _waves(engine, rng)
    warm_up_s = 0.3 * seconds
    while (elapsed_s := time.perf_counter() - started_s) < seconds:
        is_warm = elapsed_s > warm_up_s
        wave = _Running(engine, next(waves), rng, ends_at_s=time.perf_counter() + seconds / _NUM_WAVES)
        wave.run(steps if is_warm else [], between_s if is_warm else [])
        if progress is not None:
            progress(min((time.perf_counter() - started_s) / seconds, 1.0))
    first = CostModel.fit(steps)
    kept = [(work, duration_s) for work, duration_s in steps if duration_s <= _OUTLIER * first.seconds(work)]
    overlaps = engine.core.executor.max_in_flight > 1
    host_s = 0.0 if overlaps or not between_s else sorted(between_s)[len(between_s) // 2]
    return Calibration(CostModel.fit(kept, machine=f"{engine.plan.device}, {engine.plan.dtype}"), host_s)


@dataclass(frozen=True)
class _Wave:
    """So many requests, of prompts and outputs up to these lengths; `gap`: steps between two arrivals."""

    num_requests: int
    max_prompt: int
    max_output: int
    gap: int


def _waves(engine: LLMEngine, rng: random.Random) -> Iterator[_Wave]:
    """From one request to a full batch, over and over, each time with other lengths."""
    limits, longest = engine.config.scheduler.limits, engine.plan.max_model_len
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size <= limits.max_num_seqs]
    room = engine.plan.num_tokens
    while True:
        for size in sizes:
            per_request = max(min(room // size, longest) - 1, 2)
            max_output = min(48, per_request // 2)
            max_prompt = min(per_request - max_output, rng.choice([32, 256, 1024, 4096]))
            yield _Wave(size, max(max_prompt, 1), max(max_output, 1), rng.choice([0, 0, 1, 3]))


class _Running:
    """A wave under way."""

    def __init__(self, engine: LLMEngine, wave: _Wave, rng: random.Random, *, ends_at_s: float) -> None:
        self._engine, self._wave, self._rng, self._ends_at_s = engine, wave, rng, ends_at_s
        self._names: list[str] = []

    def run(self, steps: list[tuple[StepWork, float]], between_s: list[float]) -> None:
        """Note what each step had to do, how long it took, and what passed between it and the one before."""
        engine, wave = self._engine, self._wave
        num_steps, last_s = 0, None
        while len(self._names) < wave.num_requests or engine.has_unfinished_requests():
            while len(self._names) < wave.num_requests and num_steps >= len(self._names) * wave.gap:
                self._add()
            if not engine.has_unfinished_requests():
                num_steps = len(self._names) * wave.gap  # nothing to wait for
                continue
            engine.step()
            now_s = time.perf_counter()
            num_steps += 1
            report = engine.last_step
            if report is not None and report.duration_s > 0.0:
                steps.append((StepWork.of(report.snapshot.output), report.duration_s))
                if last_s is not None:
                    between_s.append(max(now_s - last_s - report.duration_s, 0.0))
            last_s = now_s
            if now_s > self._ends_at_s:
                break
        for name in self._names:
            engine.abort(name)
        engine.core.drain()

    def _add(self) -> None:
        rng, wave = self._rng, self._wave
        highest = self._engine.model_config.vocab_size - 1
        prompt = [rng.randint(0, highest) for _ in range(rng.randint(1, wave.max_prompt))]
        max_tokens = rng.randint(1, wave.max_output)
        params = SamplingParams(temperature=0.7, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        name = f"calibration {len(self._names)}"
        self._engine.add_request(name, prompt, params, stream=False)
        self._names.append(name)
