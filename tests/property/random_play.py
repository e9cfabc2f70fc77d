"""Random worlds: arrivals, lengths, aborts, failures, ids used again, results that come late."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

from headway.config import PREFILL_MODES, SCHEDULING_POLICIES, SchedulerConfig
from headway.settings import SchedulerSettings
from tests.property.side_by_side import STOP_TOKEN, Setting, SideBySide

MOST_REQUESTS = 25  # the brute-force model is quadratic
KINDS = (*SCHEDULING_POLICIES, "dynamic")
"""Policies, and the batching that has an order of its own."""


@dataclass(frozen=True)
class World:
    """An engine and what comes to it."""

    setting: Setting
    arrival_rate: float
    max_prompt: int
    max_output: int
    salts: tuple[str, ...] = ("",)
    failure_rate: float = 0.0
    tick_s: float = 1.0
    """Twice the mean time between two things that happen."""
    step_s: float | None = None
    """What every step takes; `None`: something like what real ones take."""
    has_ttft_targets: bool = True
    dates_arrivals: bool = True
    """Whether the scheduler is told when requests come; else it takes the time of the last step."""


def paced_world(rng: random.Random, policy: str | None = None) -> World:
    """Long prompts and a target for the time between tokens, which limits chunks."""
    max_num_seqs = rng.choice([4, 9])
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.choice([200, 2000]),
        target_itl_ms=rng.choice([5.0, 10.0]),
        long_prompt_step_ms={4: 8.0, 9: 20.0}[max_num_seqs],
        scheduling_policy=policy or rng.choice(["fcfs", "slo", "sjf"]),
    ).resolve("cpu")
    setting = Setting(config, num_blocks=rng.choice([60, 200]), block_size=16)
    return World(
        setting, arrival_rate=rng.choice([0.1, 0.4]), max_prompt=800, max_output=30, tick_s=0.02, has_ttft_targets=False
    )


def small_config(rng: random.Random, *, kind: str | None = None, tick_s: float = 1.0) -> SchedulerSettings:
    """Any policy, batching and way to compute prompts; times are some or many of the world's ticks."""
    max_num_seqs = rng.choice([1, 2, 4, 9])
    kind = kind or rng.choice(KINDS)
    batching = rng.choice(["continuous", "continuous", "static"])
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.choice([0, 3, 20]),
        max_chunk_tokens=rng.choice([None, 1, 7]),
        short_prompt_share={1: 0.0, 2: 1.0, 4: 1.0, 9: 0.5}[max_num_seqs],
        scheduling_policy="fcfs" if kind == "dynamic" else kind,
        batching="dynamic" if kind == "dynamic" else batching,
        batch_window_ms=1e3 * tick_s * rng.choice([0, 3, 20]),
        prefill_mode=rng.choice(["chunked", *PREFILL_MODES]),
        starvation_ms=1e3 * tick_s * rng.choice([0, 1, 5, 20]),
        starvation_stretch=rng.choice([0.0, 1.0, 3.0]),
        max_preemptions=rng.choice([1, 1, 2, 100]),
        max_head_skips=rng.choice([0, 1, 5]),
        skip_window=rng.choice([1, 3, 8]),
    ).resolve("cpu")


def long_prompt_world(rng: random.Random, policy: str) -> World:
    """Most prompts take several steps, and there are seats and blocks for those that pass them."""
    config = SchedulerConfig(
        max_num_seqs=rng.choice([4, 9]),
        max_num_batched_tokens=rng.choice([18, 24]),
        scheduling_policy=policy,
        short_prompt_share=rng.choice([0.15, 0.5, 1.0]),
        skip_window=rng.choice([1, 3]),
        starvation_ms=rng.choice([0.0, 5_000.0]),
    ).resolve("cpu")
    setting = Setting(config, num_blocks=120, block_size=4, prefix_caching=rng.random() < 0.5)
    return World(setting, arrival_rate=0.4, max_prompt=70, max_output=5, step_s=_step_s(config))


def small_world(rng: random.Random, kind: str | None = None) -> World:
    block_size, tick_s = rng.choice([1, 2, 4, 16]), rng.choice([0.01, 1.0])
    config, num_blocks = small_config(rng, kind=kind, tick_s=tick_s), rng.randint(3, 60 // block_size + 8)
    reserve_tokens = rng.choice([0, 0, 0, rng.randint(1, block_size * num_blocks)])
    outputs = {"mlfq": [60, 120], "srpt": [30, 60], "slo": [10, 30]}.get(config.scheduling_policy, [2, 10, 30])
    return World(
        Setting(config, num_blocks=num_blocks, block_size=block_size, reserve_tokens=reserve_tokens),
        arrival_rate=rng.choice([0.05, 0.2, 0.6]),
        max_prompt=rng.choice([3, 12, 40]),
        max_output=rng.choice(outputs),  # where some displace others, these must be there for a while
        tick_s=tick_s,
        step_s=_step_s(config),
        dates_arrivals=rng.random() < 0.7,
    )


def crowded_world(rng: random.Random, kind: str | None = None) -> World:
    """Short prompts and long answers in a cache that holds two of them: somebody has to give way all the time."""
    world = small_world(rng, kind)
    config = dataclasses.replace(
        world.setting.config,
        max_num_seqs=rng.choice([2, 4]),
        max_num_batched_tokens=16,
        max_chunk_tokens=16,
        max_preemptions=rng.choice([1, 1, 2, 4]),
        batching="dynamic" if kind == "dynamic" else rng.choice(["continuous", "continuous", "continuous", "static"]),
    )
    setting = dataclasses.replace(world.setting, config=config, num_blocks=16, block_size=4, reserve_tokens=0)
    return dataclasses.replace(world, setting=setting, arrival_rate=0.3, max_prompt=6, max_output=56)


def _step_s(config: SchedulerSettings) -> float | None:
    """By `slo`, requests wait in the order of times that follow from how long steps take; but while requests wait, that
    order is corrected only where it is looked at. It is exact where all steps take as long as the first is expected to.
    """
    return 0.02 if config.scheduling_policy == "slo" else None


def tree_world(rng: random.Random) -> World:
    """A prefix cache; prompts that branch off from earlier ones in blocks so small that they collide all the time."""
    block_size = rng.choice([1, 2, 2, 2, 3, 5])
    config = small_config(rng)
    if rng.random() < 0.3 and config.batching != "dynamic":
        config = dataclasses.replace(config, scheduling_policy="prefix")
    num_blocks = rng.randint(3, 36 // block_size + 6)
    setting = Setting(config, num_blocks=num_blocks, block_size=block_size, prefix_caching=True)
    return World(
        setting,
        arrival_rate=rng.choice([0.1, 0.3, 0.6]),
        max_prompt=rng.choice([4, 9, 18]),
        max_output=rng.choice([2, 8, 16]),
        salts=rng.choice([("",), ("", "x"), ("x", "y", "z")]),
        failure_rate=rng.choice([0.0, 0.05]),
        step_s=_step_s(config),
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
            self.now_s += self.rng.random() * self.world.tick_s
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
        if pair.in_flight:
            self.land()
        elif pair.live:
            self.wait()

    def wait(self) -> None:
        """Nothing could be planned: a batch is done, or one is still being waited for."""
        ended = self.pair.release()
        self._gone += ended
        if not ended:
            opens_at_s = self.pair.opens_at_s()
            assert opens_at_s is not None and opens_at_s > self.now_s, "live requests, but nothing to do"
            self.pair.events["batch not full"] += 1
            self.now_s = self.rng.choice([self.now_s, opens_at_s])

    def land(self) -> None:
        output, step, _ = self.pair.in_flight[0]
        names = [share.entry.name for share in step.shares]
        failed: list[str] = []
        forgotten: list[str] = []
        if self.rng.random() < self.world.failure_rate:
            failed = self.rng.choice([names, names[:1], []])
            forgotten = [] if failed else names[-1:]
        duration_s = self.world.step_s
        if duration_s is None:
            duration_s = self.rng.uniform(0.9, 1.3) * (0.003 + 2e-5 * output.num_scheduled_tokens)
        answers = {entry.name: entry for entry in step.sampling}
        ended = self.pair.land(duration_s=duration_s, failed=failed, forgotten=forgotten)
        self._spoken += [answers[name].known for name in ended if name in answers]
        self._gone += ended

    def disturb(self) -> None:
        """What may happen at any time: somebody leaves, others come, perhaps under the same name; time passes."""
        self.now_s += self.rng.random() * self.world.tick_s
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
        prompt, max_tokens = self._prompt(), rng.randint(1, world.max_output)
        has_ttft = world.has_ttft_targets and rng.random() < 0.6
        accepted = self.pair.add(
            name,
            prompt,
            max_tokens,
            priority=rng.randint(0, 2),
            salt=rng.choice(world.salts),
            ttl=rng.choice([0.0, 0.0, 0.0, 2.0, 50.0]),
            reads=rng.random() < 0.9,
            tenant=rng.choice("abbccc"),
            predicted=rng.choice([None, max_tokens, rng.randint(1, 3), rng.uniform(0.1, 2.0 * world.max_output)]),
            ttft=world.tick_s * rng.choice([1, 10, 60]) * rng.random() if has_ttft else None,
            tpot=rng.choice([None, None, 0.002, 0.008]),
            now_s=self.now_s if world.dates_arrivals else None,
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
