"""Random worlds: arrivals, lengths, aborts, failures, ids used again, results that come late."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

from headway.config import SchedulerConfig
from tests.property.side_by_side import STOP_TOKEN, Setting, SideBySide

MOST_REQUESTS = 25  # the brute-force model is quadratic


@dataclass(frozen=True)
class World:
    """An engine and what comes to it."""

    setting: Setting
    arrival_rate: float
    max_prompt: int
    max_output: int
    salts: tuple[str, ...] = ("",)
    failure_rate: float = 0.0


def paced_world(rng: random.Random) -> World:
    """Long prompts and a target for the time between tokens, which limits chunks."""
    config = SchedulerConfig(
        max_num_seqs=rng.choice([4, 9]),
        max_num_batched_tokens=rng.choice([200, 2000]),
        target_itl_ms=rng.choice([5.0, 10.0]),
    )
    setting = Setting(config, num_blocks=rng.choice([60, 200]), block_size=16)
    return World(setting, arrival_rate=rng.choice([0.1, 0.4]), max_prompt=800, max_output=30)


def small_config(rng: random.Random) -> SchedulerConfig:
    max_num_seqs = rng.choice([1, 2, 4, 9])
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.choice([0, 3, 20]),
        max_chunk_tokens=rng.choice([None, 1, 7]),
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        max_head_skips=rng.choice([0, 1, 5]),
        skip_window=rng.choice([1, 3, 8]),
    )


def small_world(rng: random.Random) -> World:
    block_size = rng.choice([1, 2, 4, 16])
    setting = Setting(small_config(rng), num_blocks=rng.randint(3, 60 // block_size + 8), block_size=block_size)
    return World(
        setting,
        arrival_rate=rng.choice([0.05, 0.2, 0.6]),
        max_prompt=rng.choice([3, 12, 40]),
        max_output=rng.choice([2, 10, 30]),
    )


def tree_world(rng: random.Random) -> World:
    """A prefix cache; prompts that branch off from earlier ones in blocks so small that they collide all the time."""
    block_size = rng.choice([1, 2, 2, 2, 3, 5])
    setting = Setting(
        small_config(rng), num_blocks=rng.randint(3, 36 // block_size + 6), block_size=block_size, prefix_caching=True
    )
    return World(
        setting,
        arrival_rate=rng.choice([0.1, 0.3, 0.6]),
        max_prompt=rng.choice([4, 9, 18]),
        max_output=rng.choice([2, 8, 16]),
        salts=rng.choice([("",), ("", "x"), ("x", "y", "z")]),
        failure_rate=rng.choice([0.0, 0.05]),
    )


def swapping_world(rng: random.Random) -> World:
    """The same with a host tier, where copying back is sometimes faster than computing, sometimes not."""
    world = tree_world(rng)
    config = dataclasses.replace(world.setting.config, preemption_mode=rng.choice(["auto", "recompute", "swap"]))
    setting = dataclasses.replace(
        world.setting,
        config=config,
        num_host_slots=rng.choice([1, 2, 5, 30]),
        restore_block_s=rng.choice([0.0, 0.0, 1e-4]),
    )
    return dataclasses.replace(world, setting=setting)


class RandomPlay:
    """Plays one world; everything follows from the random numbers."""

    def __init__(self, world: World, rng: random.Random, max_in_flight: int) -> None:
        self.world, self.rng, self.max_in_flight = world, rng, max_in_flight
        self.arrival_rate = world.arrival_rate
        self.pair = SideBySide(world.setting)
        self.now_s = 0.0
        self._gone: list[str] = []  # ids that may be used again
        self._spoken: list[tuple[int, ...]] = []  # prompts with their answers, for others to begin with
        self._num_names = 0
        self._num_preempted = 0

    def play(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.disturb()
            self.step()
        self.arrival_rate = 0.0
        while self.pair.live:
            self.step()
        while self.pair.in_flight:
            self.land()
        kv_cache = self.pair.scheduler.kv_cache
        assert kv_cache.num_used_blocks == 0
        assert kv_cache.num_available_blocks == self.world.setting.num_blocks

    def step(self) -> None:
        """Launch steps until the pipeline is full or nothing can be planned, then take in the oldest result."""
        pair = self.pair
        while len(pair.in_flight) < self.max_in_flight and not pair.is_broken:
            breaks = self.rng.random() < self.world.failure_rate / 2
            if not pair.launch(self._draw_token, self.now_s, breaks=breaks):
                break
            self.disturb()
        assert pair.in_flight or not pair.live, "live requests, but nothing to do"
        if pair.in_flight:
            self.land()

    def land(self) -> None:
        output, step, _ = self.pair.in_flight[0]
        names = [share.entry.name for share in step.shares]
        failed: list[str] = []
        forgotten: list[str] = []
        if self.rng.random() < self.world.failure_rate:
            failed = self.rng.choice([names, names[:1], []])
            forgotten = [] if failed else names[-1:]
        duration_s = self.rng.uniform(0.9, 1.3) * (0.003 + 2e-5 * output.num_scheduled_tokens)
        answers = {entry.name: entry for entry in step.sampling}
        ended = self.pair.land(duration_s=duration_s, failed=failed, forgotten=forgotten)
        self._spoken += [answers[name].known for name in ended if name in answers]
        self._gone += ended

    def disturb(self) -> None:
        """What may happen at any time: somebody leaves, others come, perhaps under the same name; time passes."""
        self.now_s += self.rng.random()
        num_preempted, self._num_preempted = self._num_preempted, self.pair.events["preempted"]
        # Where one has just been preempted, who leaves makes room for it to come back before its results have come.
        abort_rate = 0.04 if self._num_preempted == num_preempted else 0.4
        if self.rng.random() < abort_rate and self.pair.live:
            name = self.rng.choice(self.pair.live)
            self.pair.abort(name)
            self._gone.append(name)
        while self.rng.random() < self.arrival_rate and len(self.pair.live) < MOST_REQUESTS:
            self.add()

    def add(self) -> None:
        world, rng = self.world, self.rng
        name = f"r{self._num_names}"
        if self._gone and rng.random() < 0.5:
            name = self._gone.pop()
        self._num_names += 1
        prompt = self._prompt()
        accepted = self.pair.add(
            name,
            prompt,
            rng.randint(1, world.max_output),
            priority=rng.randint(0, 2),
            salt=rng.choice(world.salts),
            ttl=rng.choice([0.0, 0.0, 0.0, 2.0, 50.0]),
            reads=rng.random() < 0.9,
        )
        if accepted:
            self._spoken = [*self._spoken[-20:], prompt]

    def _prompt(self) -> tuple[int, ...]:
        """Something new, or the beginning of what was said before, and then something new."""
        length = self.rng.randint(1, self.world.max_prompt)
        old: tuple[int, ...] = ()
        if self._spoken and self.rng.random() < 0.8:
            said = self.rng.choice(self._spoken)
            old = said[: self.rng.choice([len(said), self.rng.randint(0, len(said))])][: self.world.max_prompt]
        new = tuple(self.rng.randrange(2) for _ in range(max(0, length - len(old))))
        return (*old, *new)

    def _draw_token(self) -> int:
        return STOP_TOKEN if self.rng.random() < 0.03 else self.rng.randrange(2)
