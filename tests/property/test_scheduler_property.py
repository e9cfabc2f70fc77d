"""Random arrivals, lengths, aborts, preemptions: the scheduler against a brute-force model, invariants each step."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from headway.config import SchedulerConfig
from headway.core import (
    KVCacheManager,
    ModelRunnerOutput,
    Request,
    RequestStatus,
    SampledTokens,
    Scheduler,
    check_invariants,
)
from headway.errors import RequestTooLargeError
from tests.property.brute_force import BruteForceScheduler, Entry, SlotMemory

STOP_TOKEN = 1


@dataclass(frozen=True)
class World:
    """One random setting."""

    config: SchedulerConfig
    num_blocks: int
    block_size: int
    arrival_rate: float
    max_prompt: int
    max_output: int


def random_world(rng: random.Random) -> World:
    max_num_seqs = rng.choice([1, 2, 4, 9])
    block_size = rng.choice([1, 2, 4, 16])
    return World(
        config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + rng.choice([0, 3, 20]),
            max_chunk_tokens=rng.choice([None, 1, 7]),
            scheduling_policy=rng.choice(["fcfs", "priority"]),
            max_head_skips=rng.choice([0, 1, 5]),
            skip_window=rng.choice([1, 3, 8]),
        ),
        num_blocks=rng.randint(3, 60 // block_size + 8),
        block_size=block_size,
        arrival_rate=rng.choice([0.05, 0.2, 0.6]),
        max_prompt=rng.choice([3, 12, 40]),
        max_output=rng.choice([2, 10, 30]),
    )


class Run:
    """Drives the real scheduler and the model side by side and records the schedule."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = random_world(self.rng)
        kv_cache = KVCacheManager(num_blocks=self.world.num_blocks, block_size=self.world.block_size)
        self.scheduler = Scheduler(self.world.config, kv_cache)
        self.model = BruteForceScheduler(self.world.config, self.world.num_blocks, self.world.block_size)
        self.memory = SlotMemory(self.world.num_blocks, self.world.block_size)
        self.num_added = 0
        self.num_refused = 0
        self.num_preemptions = 0
        self.trace: list[tuple[tuple[str, int], ...]] = []

    def add(self) -> None:
        world, rng = self.world, self.rng
        name = f"r{self.num_added + self.num_refused}"
        prompt, output, priority = rng.randint(1, world.max_prompt), rng.randint(1, world.max_output), rng.randint(0, 2)
        request = Request(
            name, [0] * prompt, max_tokens=output, stop_token_ids=frozenset([STOP_TOKEN]), priority=priority
        )
        fits = self.model.blocks(prompt + output - 1) <= world.num_blocks
        try:
            self.scheduler.add_request(request)
        except RequestTooLargeError:
            assert not fits
            self.num_refused += 1
            return
        assert fits
        key = priority if world.config.scheduling_policy == "priority" else 0
        self.model.entries.append(Entry(name, (key, self.num_added), prompt, prompt + output))
        self.num_added += 1

    def abort_one(self) -> None:
        if self.scheduler.requests:
            name = self.rng.choice(list(self.scheduler.requests))
            self.scheduler.finish_request(name, RequestStatus.FINISHED_ABORTED)
            self.model.remove(name)

    def step(self) -> None:
        output = self.scheduler.schedule()
        check_invariants(self.scheduler)
        expected = self.model.schedule()
        assert {s.request_id: s.num_tokens for s in output.scheduled} == expected.tokens
        assert [new.request_id for new in output.new_requests] == expected.admitted
        assert list(output.preempted_request_ids) == expected.preempted
        assert output.num_scheduled_tokens == sum(expected.tokens.values())
        assert output.scheduled or not self.scheduler.requests, "live requests, but an empty step"
        self.memory.run(output)
        self.num_preemptions += len(output.preempted_request_ids)
        self.trace.append(tuple((s.request_id, s.num_tokens) for s in output.scheduled))
        if self.rng.random() < 0.02:
            self.abort_one()  # while the step is in flight
        self.finish_step(output)

    def finish_step(self, output) -> None:
        tokens = {s.request_id: STOP_TOKEN if self.rng.random() < 0.03 else 0 for s in output.scheduled if s.samples}
        result = ModelRunnerOutput({name: SampledTokens((token,)) for name, token in tokens.items()}, {})
        ended = {u.request_id for u in self.scheduler.update(output, result) if u.finish_status is not None}
        live = {entry.name for entry in self.model.entries}
        expected = {n for n, t in tokens.items() if n in live and self.model.sampled(n, is_stop=t == STOP_TOKEN)}
        assert ended == expected
        check_invariants(self.scheduler)

    def play(self, num_steps: int) -> None:
        for _ in range(num_steps):
            while self.rng.random() < self.world.arrival_rate:
                self.add()
            if self.rng.random() < 0.02:
                self.abort_one()
            self.step()
        while self.scheduler.has_unfinished_requests:
            self.step()
        assert self.scheduler.kv_cache.pool.num_free_blocks == self.world.num_blocks


@pytest.mark.parametrize("group", range(6))
def test_the_scheduler_does_what_the_brute_force_model_does(group: int) -> None:
    """Over 30,000 steps in all; each group of worlds must really contain what the test is about."""
    runs = [Run(seed) for seed in range(20 * group, 20 * group + 20)]
    for run in runs:
        run.play(num_steps=250)
    assert sum(len(run.trace) for run in runs) >= 5_000
    assert sum(run.num_preemptions for run in runs) >= 50
    assert sum(run.num_refused for run in runs) >= 10


@pytest.mark.parametrize("seed", [0, 7, 33])
def test_the_same_seed_replays_the_same_schedule(seed: int) -> None:
    first, second = Run(seed), Run(seed)
    first.play(num_steps=200)
    second.play(num_steps=200)
    assert first.trace == second.trace
