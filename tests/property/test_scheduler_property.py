"""Random arrivals, lengths, aborts, preemptions, ids used again, results that come late: the scheduler against a
brute-force model, with invariants after each call."""

from __future__ import annotations

import dataclasses
import random
from collections import deque
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
    SchedulerOutput,
    check_invariants,
)
from headway.errors import RequestTooLargeError
from tests.property.brute_force import BruteForceScheduler, Entry, SlotMemory, Step

STOP_TOKEN = 1
MOST_REQUESTS = 25  # the brute-force model is quadratic


@dataclass(frozen=True)
class World:
    """One random setting."""

    config: SchedulerConfig
    num_blocks: int
    block_size: int
    arrival_rate: float
    max_prompt: int
    max_output: int


def paced_world(rng: random.Random) -> World:
    """Long prompts and a target for the time between tokens, which limits chunks."""
    return World(
        config=SchedulerConfig(
            max_num_seqs=rng.choice([4, 9]),
            max_num_batched_tokens=rng.choice([200, 2000]),
            target_itl_ms=rng.choice([5.0, 10.0]),
        ),
        num_blocks=rng.choice([60, 200]),
        block_size=16,
        arrival_rate=rng.choice([0.1, 0.4]),
        max_prompt=800,
        max_output=30,
    )


def small_world(rng: random.Random) -> World:
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

    def __init__(self, seed: int, max_in_flight: int) -> None:
        self.rng = random.Random(seed)
        self.world = paced_world(self.rng) if seed % 20 == 0 else small_world(self.rng)
        kv_cache = KVCacheManager(num_blocks=self.world.num_blocks, block_size=self.world.block_size)
        self.scheduler = Scheduler(self.world.config, kv_cache)
        self.model = BruteForceScheduler(self.world.config, self.world.num_blocks, self.world.block_size)
        self.memory = SlotMemory(self.world.num_blocks, self.world.block_size)
        self.max_in_flight = max_in_flight
        self.in_flight: deque[tuple[SchedulerOutput, Step]] = deque()
        self.gone: list[str] = []  # ids that may be used again
        self.untold_preempted: list[str] = []  # who left the batch since the last step that was not empty
        self.untold_finished: list[str] = []
        self.num_added = 0
        self.num_refused = 0
        self.num_preemptions = 0
        self.num_reused_in_flight = 0
        self.num_dropped = 0
        self.num_late_for_preempted = 0
        self.num_paced = 0
        self.trace: list[tuple[tuple[str, int], ...]] = []

    def add(self) -> None:
        world, rng = self.world, self.rng
        name = f"r{self.num_added + self.num_refused}"
        if self.gone and rng.random() < 0.5:
            name = self.gone.pop()
            self.num_reused_in_flight += any(name in step.tokens for _, step in self.in_flight)
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
            if name in self.model.running:
                self.untold_finished.append(name)
            self.model.remove(name)
            self.gone.append(name)

    def step(self) -> None:
        """Launch steps until the pipeline is full or nothing can be planned, then take in the oldest result."""
        while len(self.in_flight) < self.max_in_flight and self.launch():
            self.disturb()
        assert self.in_flight or not self.scheduler.requests, "live requests, but nothing to do"
        if self.in_flight:
            self.land()

    def launch(self) -> bool:
        output = self.scheduler.schedule()
        check_invariants(self.scheduler)
        expected = self.model.schedule()
        assert {s.request_id: s.num_tokens for s in output.scheduled} == expected.tokens
        assert [new.request_id for new in output.new_requests] == expected.admitted
        assert {s.request_id for s in output.scheduled if s.samples} == {e.name for e in expected.sampling}
        assert output.num_scheduled_tokens == sum(expected.tokens.values())
        self.num_preemptions += len(expected.preempted)
        self.untold_preempted += expected.preempted
        if output.is_empty:
            assert not output.preempted_request_ids and not output.finished_request_ids
            return False
        assert list(output.preempted_request_ids) == self.untold_preempted
        assert sorted(output.finished_request_ids) == sorted(self.untold_finished)
        self.untold_preempted, self.untold_finished = [], []
        self.num_paced += expected.limit < self.world.config.max_num_batched_tokens
        self.memory.run(output)
        self.in_flight.append((output, expected))
        self.trace.append(tuple((s.request_id, s.num_tokens) for s in output.scheduled))
        return True

    def land(self) -> None:
        output, step = self.in_flight.popleft()
        tokens = {entry.name: STOP_TOKEN if self.rng.random() < 0.03 else 0 for entry in step.sampling}
        result = ModelRunnerOutput({name: SampledTokens((token,)) for name, token in tokens.items()}, {})
        duration_s = self.rng.uniform(0.9, 1.3) * (0.003 + 2e-5 * output.num_scheduled_tokens)
        updates = self.scheduler.update(output, result, duration_s=duration_s)
        self.model.took(step, duration_s)
        check_invariants(self.scheduler)
        alive = [entry for entry in step.sampling if entry in self.model.entries]
        self.num_dropped += len(step.sampling) - len(alive)
        self.num_late_for_preempted += sum(entry.name not in self.model.running for entry in alive)
        assert sorted(update.request_id for update in updates) == sorted(entry.name for entry in alive)
        running = set(self.model.running)
        ended = [e.name for e in alive if self.model.sampled(e, is_stop=tokens[e.name] == STOP_TOKEN)]
        self.untold_finished += [name for name in ended if name in running]
        assert sorted(u.request_id for u in updates if u.finish_status is not None) == sorted(ended)
        self.gone += ended

    def disturb(self) -> None:
        """What may happen at any time: somebody leaves, others come, perhaps under the same name."""
        if self.rng.random() < 0.04:
            self.abort_one()
        while self.rng.random() < self.world.arrival_rate and len(self.model.entries) < MOST_REQUESTS:
            self.add()

    def play(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.disturb()
            self.step()
        self.world = dataclasses.replace(self.world, arrival_rate=0.0)
        while self.scheduler.has_unfinished_requests:
            self.step()
        while self.in_flight:
            self.land()
        assert self.scheduler.kv_cache.pool.num_free_blocks == self.world.num_blocks


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
@pytest.mark.parametrize("group", range(3))
def test_the_scheduler_does_what_the_brute_force_model_does(group: int, max_in_flight: int) -> None:
    """Over 100,000 steps in all; each group of worlds must really contain what the test is about."""
    runs = [Run(seed, max_in_flight) for seed in range(60 * group, 60 * group + 60)]
    for run in runs:
        run.play(num_steps=220)
    assert sum(len(run.trace) for run in runs) >= 12_000
    assert sum(run.num_preemptions for run in runs) >= 50
    assert sum(run.num_refused for run in runs) >= 10
    assert sum(run.num_reused_in_flight for run in runs) >= 5
    assert sum(run.num_dropped for run in runs) >= (5 if max_in_flight == 1 else 50)
    assert sum(run.num_paced for run in runs) >= 100
    assert max_in_flight == 1 or sum(run.num_late_for_preempted for run in runs) >= 5


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("seed", [0, 7, 33])
def test_the_same_seed_replays_the_same_schedule(seed: int, max_in_flight: int) -> None:
    first, second = Run(seed, max_in_flight), Run(seed, max_in_flight)
    first.play(num_steps=200)
    second.play(num_steps=200)
    assert first.trace == second.trace
