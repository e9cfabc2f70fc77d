"""What the prefix cache costs the host per step: lookup, digests, bookkeeping and eviction, without a model.

Two schedulers run the same kind of load, one with the prefix cache and one without; the difference of their schedule()
and update() times is the cost. The load is that of the nano benchmark, whose step takes 5.6 ms on an H200: a full
batch, 100 to 1,024 tokens in and as many out, so that one request comes and goes in about two steps. Here half of the
prompts go on from one that came before. The cache is full, so that every block taken is one given up.

Sides take turns and what counts is processor time, so that others on the machine disturb little; the median over rounds
is printed, and whether it stays under 2% of a step. That says something only where both times are of one machine: give
the step's as `--step-ms`, unless this is the host of an H200.

    python benchmarks/prefix_cost.py --running 256 --block-size 16 64 --step-ms 5.6
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable

from headway.config import SchedulerConfig
from headway.core import (
    KVCacheManager,
    ModelRunnerOutput,
    PrefixCache,
    Request,
    SampledTokens,
    Scheduler,
    create_eviction_policy,
)
from headway.engine_process.main import spare_the_collector

NUM_REMEMBERED = 64
NANO_STEP_MS = 5.6
MAX_SHARE = 0.02
Step = Callable[[], float]


class Chats:
    """Random requests, the same for every side."""

    def __init__(self) -> None:
        self._rng = random.Random(0)
        self._ids = itertools.count()
        self._recent: list[tuple[int, ...]] = []

    def request(self) -> Request:
        rng = self._rng
        num_tokens = rng.randint(100, 1024)
        begin = rng.choice(self._recent)[: num_tokens - 50] if self._recent and rng.random() < 0.5 else ()
        prompt = begin + tuple(rng.choices(range(50_000), k=num_tokens - len(begin)))
        self._recent = [*self._recent[1 - NUM_REMEMBERED :], prompt]
        return Request(f"r{next(self._ids)}", prompt, max_tokens=rng.randint(100, 1024))


def make_side(num_running: int, block_size: int, policy: str | None) -> Step:
    """A batch in the middle of its work, and the function that runs one more step and says how long it took."""
    cache = None if policy is None else PrefixCache(create_eviction_policy(policy))
    num_blocks = num_running * 2048 // block_size
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=num_running, max_num_batched_tokens=8192).resolve("cpu"),
        KVCacheManager(num_blocks=num_blocks, block_size=block_size, prefix_cache=cache),
    )
    chats, rng = Chats(), random.Random(1)
    for _ in range(num_running + 8):
        scheduler.add_request(chats.request())

    def step() -> float:
        started = time.thread_time()
        output = scheduler.schedule()
        planned = time.thread_time()
        tokens = rng.choices(range(50_000), k=len(output.scheduled))
        sampled = {s.request_id: SampledTokens((t,)) for s, t in zip(output.scheduled, tokens) if s.samples}
        answered = time.thread_time()
        updates = scheduler.update(output, ModelRunnerOutput(sampled, {}))
        spent = time.thread_time() - answered + planned - started
        for update in updates:
            if update.finish_status is not None:
                scheduler.add_request(chats.request())
        return spent

    return step


def measure(sides: dict[str, Step], *, num_rounds: int, num_steps: int) -> dict[str, float]:
    """Median microseconds per step of each side."""
    rounds: dict[str, list[float]] = {name: [] for name in sides}
    for step in sides.values():
        for _ in range(1500):  # until the cache is full and who began together has parted
            step()
    spare_the_collector()  # as the engine does
    for _ in range(num_rounds):
        for name, step in sides.items():
            rounds[name].append(1e6 * statistics.fmean(step() for _ in range(num_steps)))
    return {name: statistics.median(values) for name, values in rounds.items()}


def verdict(name: str, with_us: float, without_us: float, step_ms: float) -> str:
    """One line: what a step costs with this eviction policy, and whether the difference is small enough."""
    extra_us = with_us - without_us
    share = extra_us / (1e3 * step_ms)
    answer = "under" if share < MAX_SHARE else "NOT under"
    return (
        f"    {name:4} {with_us:5.0f} us with the cache, {extra_us:+5.0f} us: "
        f"{share:6.2%} of a step of {step_ms:g} ms, {answer} {MAX_SHARE:.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--block-size", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100, help="steps per round")
    parser.add_argument("--step-ms", type=float, default=NANO_STEP_MS, help="what a step of the model takes here")
    options = parser.parse_args()
    for block_size in options.block_size:
        sides = {
            name: make_side(options.running, block_size, policy)
            for name, policy in (("off", None), ("lru", "lru"), ("cost", "cost"))
        }
        medians = measure(sides, num_rounds=options.rounds, num_steps=options.steps)
        print(f"{options.running} running, block size {block_size}: {medians['off']:.0f} us a step without the cache")
        for name in ("lru", "cost"):
            print(verdict(name, medians[name], medians["off"], options.step_ms), flush=True)


if __name__ == "__main__":
    main()
