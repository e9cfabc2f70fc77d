"""What scheduling costs per step, against how many requests wait.

The scheduler's work should depend on what changes in a step, not on how long the queue is. For each depth this fills
the batch, puts that many requests behind it, and times `schedule()` + `update()` while requests finish and others take
their place. Depths take turns, so that a noisy machine is noisy for all; the median over rounds is printed.

    python benchmarks/scheduler_cost.py --running 64 --waiting 1000 100000
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time

from headway.config import SchedulerConfig
from headway.core import KVCacheManager, ModelRunnerOutput, Request, SampledTokens, Scheduler


def build(num_running: int, num_waiting: int, policy: str) -> Scheduler:
    """A full batch and a queue. The cache holds the batch twice over, so that memory is not what decides."""
    rng = random.Random(0)
    config = SchedulerConfig(
        max_num_seqs=num_running, max_num_batched_tokens=max(512, num_running), scheduling_policy=policy
    )
    scheduler = Scheduler(config, KVCacheManager(num_blocks=num_running * 64, block_size=16))
    for index in range(num_running + num_waiting):
        scheduler.add_request(
            Request(
                f"r{index}", range(rng.randint(16, 256)), max_tokens=rng.randint(16, 256), priority=rng.randint(0, 9)
            )
        )
    return scheduler


def step(scheduler: Scheduler) -> float:
    """One step with an instant model; returns its time in microseconds."""
    started = time.perf_counter()
    output = scheduler.schedule()
    planned = time.perf_counter() - started
    result = ModelRunnerOutput({s.request_id: SampledTokens((0,)) for s in output.scheduled if s.samples}, {})
    started = time.perf_counter()
    scheduler.update(output, result)
    return (planned + time.perf_counter() - started) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--waiting", type=int, nargs="+", default=[1_000, 100_000])
    parser.add_argument("--policies", nargs="+", default=["fcfs", "priority"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=50, help="steps per round")
    options = parser.parse_args()
    for policy in options.policies:
        schedulers = {waiting: build(options.running, waiting, policy) for waiting in options.waiting}
        rounds: dict[int, list[float]] = {waiting: [] for waiting in options.waiting}
        gc.collect()
        gc.freeze()  # the queues are live data; walking them again is not the scheduler's cost
        for scheduler in schedulers.values():
            for _ in range(100):
                step(scheduler)
        for _ in range(options.rounds):
            for waiting, scheduler in schedulers.items():
                rounds[waiting].append(statistics.fmean(step(scheduler) for _ in range(options.steps)))
        gc.unfreeze()
        medians = {waiting: statistics.median(values) for waiting, values in rounds.items()}
        base = medians[options.waiting[0]]
        for waiting, median in medians.items():
            left = len(schedulers[waiting].waiting)
            print(
                f"{policy:10} {options.running:5} running {waiting:8,} waiting ({left:,} at the end)  "
                f"{median:8.1f} us/step  ratio {median / base:5.2f}"
            )


if __name__ == "__main__":
    main()
