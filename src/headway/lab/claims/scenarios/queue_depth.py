"""What scheduling costs with a long queue. The scheduler alone, with a model that answers at once."""

from __future__ import annotations

import gc
import itertools
import random
import statistics
from time import process_time

from headway.config import SchedulerConfig
from headway.core import KVCacheManager, ModelRunnerOutput, Request, SampledTokens, Scheduler
from headway.lab.claims.chart import Chart, Line
from headway.lab.claims.claim import Claim, Outcome
from headway.lab.claims.context import Context
from headway.lab.claims.words import sentences, times

_DEPTHS = (1_000, 10_000, 100_000)
_NUM_RUNNING = 64
_BLOCK_SIZE = 16
_WARM_UP = 40
_TOKEN = SampledTokens((7,))


def measure(context: Context) -> Outcome:
    num_rounds, num_steps = (6, 25) if context.is_quick else (20, 50)
    context.say(f"making {sum(_DEPTHS):,} requests")
    queues = {depth: _Queue(depth) for depth in _DEPTHS}
    gc.collect()
    gc.freeze()
    for queue in queues.values():
        for _ in range(_WARM_UP):
            queue.step()
    times_s: dict[int, list[float]] = {depth: [] for depth in _DEPTHS}
    for _ in range(num_rounds):  # in turns, so that a busy machine is busy for all
        for depth, queue in queues.items():
            times_s[depth] += [queue.step() for _ in range(num_steps)]
    gc.unfreeze()
    step_us = {depth: 1e6 * statistics.fmean(values) for depth, values in times_s.items()}
    ratio = step_us[_DEPTHS[-1]] / step_us[_DEPTHS[0]]
    return Outcome(
        value=ratio,
        unit="× for 100 times the queue",
        ours=f"{times(ratio)} when the queue is 100 times as long "
        f"({' / '.join(f'{us:,.0f}' for us in step_us.values())} µs a step)",
        workload=f"{_NUM_RUNNING} requests run, {' / '.join(f'{depth:,}' for depth in _DEPTHS)} wait; fcfs; processor "
        f"time of schedule() and update(), mean of {num_rounds * num_steps} steps",
        differs=sentences(
            [
                "The queue is a line whose first places are looked at, however many stand behind them, so a step costs "
                "what changes in it. The published cost comes from going through the whole queue, or sorting it, in "
                f"every step: that would make {times(_DEPTHS[-1] / _DEPTHS[0])} of it.",
            ]
        ),
        where="scheduler",
        chart=Chart(
            "Cost of scheduling a step over the length of the queue",
            "microseconds per step",
            lines=(
                Line("measured", list(_DEPTHS), list(step_us.values())),
                Line(
                    "doubles with the queue (published)",
                    list(_DEPTHS),
                    [step_us[_DEPTHS[0]] * depth / _DEPTHS[0] for depth in _DEPTHS],
                ),
            ),
            x="waiting requests",
            log_x=True,
            log_y=True,
        ),
        numbers={f"{depth:,} waiting": {"µs per step": us} for depth, us in step_us.items()},
    )


class _Queue:
    """A scheduler with a full batch and so many waiting. Whoever ends is replaced, so that the load stays the same."""

    def __init__(self, depth: int) -> None:
        config = SchedulerConfig(max_num_seqs=_NUM_RUNNING, max_num_batched_tokens=8192).resolve("cpu")
        self._scheduler = Scheduler(config, KVCacheManager(num_blocks=64 * _NUM_RUNNING, block_size=_BLOCK_SIZE))
        self._rng = random.Random(0)
        self._ids = itertools.count()
        self._now_s = 0.0
        for _ in range(_NUM_RUNNING + depth):
            self._add()

    def step(self) -> float:
        """One step; returns the processor time of planning it and of taking in its result."""
        started = process_time()
        output = self._scheduler.schedule(now_s=self._now_s)
        planned = process_time()
        result = ModelRunnerOutput({s.request_id: _TOKEN for s in output.scheduled if s.samples}, {})
        answered = process_time()
        updates = self._scheduler.update(output, result, duration_s=0.01)
        spent = process_time() - answered + planned - started
        self._now_s += 0.01
        for update in updates:
            if update.finish_status is not None:
                self._add()
        return spent

    def _add(self) -> None:
        length = self._rng.randint(16, 256)
        request = Request(f"r{next(self._ids)}", range(length), max_tokens=self._rng.randint(16, 256))
        self._scheduler.add_request(request, now_s=self._now_s)


CLAIM = Claim(
    id="queue-depth",
    title="Scheduling cost and queue depth",
    published="The time to schedule a step doubles when the queue doubles.",
    source="Reports from users of serving engines, without a single origin",
    workload="a growing queue behind a full batch",
    method="Processor time of the scheduler alone, 1,000 to 100,000 waiting, in turns.",
    measure=measure,
    engine="never",
)
