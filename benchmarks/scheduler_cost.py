"""What the scheduler costs per step under each policy, and that it does not grow with the queue.

A full batch runs with a queue behind it; whoever finishes is replaced outside the measured time, so that the load stays
the same. Measured is the processor time of schedule() and update(), the mean over all steps. A clock goes on by about
10 ms each step, so that orders that depend on time really change, and the guard against starvation lifts requests as it
does by default. With `prefix` there is a prefix cache; with the others memory is not what decides, unless --tight gives
the cache so little that requests are preempted all the time. Queues of different lengths take turns.

Two tables: over the length of the queue, with a verdict (at most 1.2 times the time when the queue is 100 times as
long, and under 1 ms), and over the size of the batch. `add` is what it costs to queue a request behind the longest one.

    python benchmarks/scheduler_cost.py
    python benchmarks/scheduler_cost.py --policies slo mlfq --running 256 --waiting 1000 100000 --tight
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
from collections.abc import Sequence
from time import process_time

from scheduler_load import RandomRequests, take_turns

from headway.config import SCHEDULING_POLICIES, SchedulerConfig
from headway.core import KVCacheManager, ModelRunnerOutput, PrefixCache, SampledTokens, Scheduler, SchedulerOutput
from headway.engine_process.main import spare_the_collector

BLOCK_SIZE = 64  # as on a GPU, where so many run at once
BLOCKS_PER_REQUEST = {"ample": 16, "tight": 3}
"""A request has 4 or 5 blocks when it is half through its answer, and 8 at most."""
TOKEN = SampledTokens((7,))
MAX_RATIO = 1.2
MAX_US = 1_000.0
NUM_WARMUP = 150


class Load:
    """A scheduler with a full batch, a queue, and a model that answers at once."""

    def __init__(self, policy: str, num_running: int, num_waiting: int, memory: str) -> None:
        has_cache = policy == "prefix"
        config = SchedulerConfig(
            max_num_seqs=num_running, max_num_batched_tokens=8192, scheduling_policy=policy
        ).resolve("cpu")
        kv_cache = KVCacheManager(
            num_blocks=BLOCKS_PER_REQUEST[memory] * num_running,
            block_size=BLOCK_SIZE,
            prefix_cache=PrefixCache() if has_cache else None,
        )
        self.scheduler = Scheduler(config, kv_cache)
        self._requests = RandomRequests(shares_prefixes=has_cache)
        self._rng = random.Random(1)
        self._now_s = 0.0
        self._adds_s = [self._add() for _ in range(num_running + num_waiting)]

    @property
    def add_us(self) -> float:
        """Median time to queue a request, over the last ones of the queue."""
        return 1e6 * statistics.median(self._adds_s[-1000:])

    def step(self) -> float:
        scheduler, duration_s = self.scheduler, self._rng.uniform(0.008, 0.012)
        started = process_time()
        output = scheduler.schedule(now_s=self._now_s)
        planned = process_time()
        result = answer(output)
        answered = process_time()
        updates = scheduler.update(output, result, duration_s=duration_s)
        spent = process_time() - answered + planned - started
        self._now_s += duration_s
        for update in updates:
            if update.finish_status is not None:
                self._add()
        return spent

    def _add(self) -> float:
        request = self._requests.request()
        started = process_time()
        self.scheduler.add_request(request, now_s=self._now_s)
        return process_time() - started


def answer(output: SchedulerOutput) -> ModelRunnerOutput:
    return ModelRunnerOutput({s.request_id: TOKEN for s in output.scheduled if s.samples}, {})


def measure(
    policy: str, sizes: Sequence[tuple[int, int]], options: argparse.Namespace
) -> tuple[dict[tuple[int, int], float], float]:
    """Microseconds per step for each (running, waiting), and per request that is queued behind the last of them."""
    memory = "tight" if options.tight else "ample"
    say(f"{policy}: making {', '.join(f'{waiting:,}' for _, waiting in sizes)} requests")
    loads = {(running, waiting): Load(policy, running, waiting, memory) for running, waiting in sizes}
    spare_the_collector()  # as the engine does when it starts
    say(f"{policy}: {options.rounds} rounds of {options.steps} steps")
    sides = {size: load.step for size, load in loads.items()}
    means = take_turns(sides, num_rounds=options.rounds, num_steps=options.steps, num_warmup=NUM_WARMUP)
    gc.unfreeze()
    return means, loads[sizes[-1]].add_us


def say(text: str) -> None:
    """A line of progress, which the next one replaces; only where somebody watches."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def print_row(cells: Sequence[str]) -> None:
    say("")
    print(f"{cells[0]:9}", *(f"{cell:>8}" for cell in cells[1:]), flush=True)


def over_waiting(options: argparse.Namespace, running: int) -> bool:
    """A row for each policy; returns whether all keep both limits."""
    print(f"\nmicroseconds per step, {running} running, by the number of waiting requests")
    print_row(["", *(f"{waiting:,}" for waiting in options.waiting), "ratio", "add", "verdict"])
    are_kept = []
    for policy in options.policies:
        means, add_us = measure(policy, [(running, waiting) for waiting in options.waiting], options)
        times = list(means.values())
        ratio = times[-1] / times[0]
        are_kept.append(ratio <= MAX_RATIO and max(times) < MAX_US)
        verdict = "kept" if are_kept[-1] else "missed"
        print_row([policy, *(f"{us:.0f}" for us in times), f"{ratio:.2f}", f"{add_us:.1f}", verdict])
    return all(are_kept)


def over_running(options: argparse.Namespace, waiting: int) -> None:
    print(f"\nmicroseconds per step, {waiting:,} waiting, by the number of running requests")
    print_row(["", *(f"{running:,}" for running in options.running)])
    for policy in options.policies:
        means, _ = measure(policy, [(running, waiting) for running in options.running], options)
        print_row([policy, *(f"{us:.0f}" for us in means.values())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", choices=SCHEDULING_POLICIES, default=SCHEDULING_POLICIES)
    parser.add_argument("--waiting", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--tight", action="store_true", help="so little KV memory that requests are preempted")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=50, help="steps per round")
    options = parser.parse_args()
    is_kept = over_waiting(options, 256 if 256 in options.running else options.running[0])
    print(
        f"at most {MAX_RATIO} times from first to last, and under 1 ms: {'all kept' if is_kept else 'missed by some'}"
    )
    if len(options.running) > 1:
        over_running(options, options.waiting[0])


if __name__ == "__main__":
    main()
