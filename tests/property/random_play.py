"""Random worlds: arrivals, lengths, aborts, failures, ids used again, results that come late."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headway.config import PREFILL_MODES, SCHEDULING_POLICIES, SchedulerConfig
from headway.core import Request
from headway.settings import SchedulerSettings
from tests.property.driven_scheduler import STOP_TOKEN, DrivenScheduler, Setting
from tests.property.side_by_side import SideBySide
from tests.unit.core.driver import make_request

MOST_REQUESTS = 25  # the brute-force model is quadratic
MOST_CALLS = 20_000


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
    beam_rate: float = 0.0
    """How many requests are the first beams of a search."""


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


def small_config(
    rng: random.Random, *, policy: str | None = None, batching: str = "continuous", tick_s: float = 1.0
) -> SchedulerSettings:
    """Any policy and way to compute prompts; times are some or many of the world's ticks."""
    max_num_seqs = rng.choice([1, 2, 4, 9])
    policy = policy or rng.choice(SCHEDULING_POLICIES)
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.choice([0, 3, 20]),
        max_chunk_tokens=rng.choice([None, 1, 7]),
        short_prompt_share={1: 0.0, 2: 1.0, 4: 1.0, 9: 0.5}[max_num_seqs],
        scheduling_policy="fcfs" if batching == "dynamic" else policy,
        batching=batching,
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


def small_world(rng: random.Random, policy: str | None = None, batching: str = "continuous") -> World:
    block_size, tick_s = rng.choice([1, 2, 4, 16]), rng.choice([0.01, 1.0])
    config = small_config(rng, policy=policy, batching=batching, tick_s=tick_s)
    num_blocks = rng.randint(3, 60 // block_size + 8)
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


def crowded_world(rng: random.Random, policy: str | None = None, batching: str = "continuous") -> World:
    """Short prompts and long answers in a cache that holds two of them: somebody has to give way all the time."""
    world = small_world(rng, policy, batching)
    config = dataclasses.replace(
        world.setting.config,
        max_num_seqs=rng.choice([2, 4]),
        max_num_batched_tokens=16,
        max_chunk_tokens=16,
        max_preemptions=rng.choice([1, 1, 2, 4]),
    )
    setting = dataclasses.replace(world.setting, config=config, num_blocks=16, block_size=4, reserve_tokens=0)
    return dataclasses.replace(world, setting=setting, arrival_rate=0.3, max_prompt=6, max_output=56)


def era_world(rng: random.Random, batching: str, policy: str | None = None) -> World:
    """Small or crowded, with or without a prefix cache, a host tier and beams; steps take what they take."""
    world = rng.choice([small_world, crowded_world])(rng, policy, batching)
    setting = world.setting
    if rng.random() < 0.4 and not setting.reserve_tokens:
        setting = dataclasses.replace(setting, prefix_caching=True, num_host_slots=rng.choice([0, 3]))
    if rng.random() < 0.5:
        setting = dataclasses.replace(setting, config=dataclasses.replace(setting.config, short_prompt_share=0.0))
    return dataclasses.replace(
        world,
        setting=setting,
        beam_rate=rng.choice([0.0, 0.0, 0.3]),
        failure_rate=rng.choice([0.0, 0.0, 0.03]),
    )


def displacing_world(rng: random.Random, policy: str) -> World:
    """Seats and blocks are held for long by requests that others may displace: one for its seat, or several for a
    prompt that needs their blocks."""
    tick_s = 0.1
    config = dataclasses.replace(
        small_config(rng, policy=policy, tick_s=tick_s),
        max_num_seqs=rng.choice([2, 5, 9]),
        max_num_batched_tokens=16,
        max_chunk_tokens=16,
        max_preemptions=rng.choice([1, 3, 100]),
        max_head_skips=rng.choice([0, 2]),
        short_prompt_share=rng.choice([0.0, 1.0]),
    )
    setting = Setting(config, num_blocks=rng.choice([24, 40, 100]), block_size=4, prefix_caching=rng.random() < 0.2)
    return World(
        setting,
        arrival_rate=rng.choice([0.15, 0.4]),
        max_prompt=rng.choice([6, 30, 60]),
        max_output=80,
        tick_s=tick_s,
        step_s=_step_s(config),
    )


def _step_s(config: SchedulerSettings) -> float | None:
    """By `slo`, requests wait in the order of times that follow from how long steps take; but while requests wait, that
    order is corrected only where it is looked at. It is exact where all steps take as long as the first is expected to.
    """
    return 0.02 if config.scheduling_policy == "slo" else None


def tree_world(rng: random.Random) -> World:
    """A prefix cache; prompts that branch off from earlier ones in blocks so small that they collide all the time."""
    block_size = rng.choice([1, 2, 2, 2, 3, 5])
    config = small_config(rng)
    if rng.random() < 0.3:
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

    def __init__(
        self,
        world: World,
        rng: random.Random,
        max_in_flight: int,
        create: Callable[[Setting], DrivenScheduler] = SideBySide,
    ) -> None:
        self.world, self.rng, self.max_in_flight = world, rng, max_in_flight
        self.arrival_rate = world.arrival_rate
        self.driven = create(world.setting)
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
        num_calls = 0
        while self.driven.live:
            self.now_s += self.rng.random() * self.world.tick_s
            self.step()
            num_calls += 1
            assert num_calls < MOST_CALLS, "requests that do not end"
        while self.driven.in_flight:
            self.land()
        kv_cache = self.driven.scheduler.kv_cache
        assert kv_cache.num_used_blocks == 0
        assert kv_cache.num_available_blocks == self.world.setting.num_blocks

    def step(self) -> None:
        """Launch steps until the pipeline is full or nothing can be planned, then take in the oldest result."""
        driven = self.driven
        while len(driven.in_flight) < self.max_in_flight and not driven.is_broken:
            breaks = self.rng.random() < self.world.failure_rate / 2
            if not driven.launch(self._draw_token, self.now_s, breaks=breaks):
                break
            self.disturb()
        if driven.in_flight:
            self.land()
        elif driven.live:
            self.wait()

    def wait(self) -> None:
        """Nothing could be planned: a batch is done, or one is still being waited for."""
        ended = self.driven.release()
        self._note_ended(ended)
        if not ended:
            ready_at_s = self.driven.scheduler.ready_at_s()
            assert ready_at_s is not None and ready_at_s > self.now_s, "live requests, but nothing to do"
            self.driven.events["batch not full"] += 1
            self.now_s = self.rng.choice([self.now_s, ready_at_s])

    def land(self) -> None:
        flight = self.driven.in_flight[0]
        names = flight.names
        failed: list[str] = []
        forgotten: list[str] = []
        if self.rng.random() < self.world.failure_rate:
            failed = self.rng.choice([names, names[:1], []])
            forgotten = [] if failed else names[-1:]
        duration_s = self.world.step_s
        if duration_s is None:
            duration_s = self.rng.uniform(0.9, 1.3) * (0.003 + 2e-5 * flight.output.num_scheduled_tokens)
        self._note_ended(self.driven.land(duration_s=duration_s, failed=failed, forgotten=forgotten))

    def _note_ended(self, requests: list[Request]) -> None:
        """What was said may be said again, ids may be used again, and beams go on at once."""
        self._gone += [request.request_id for request in requests]
        for request in requests:
            if not request.output_token_ids:
                continue
            self._spoken = [*self._spoken[-20:], request.known_tokens(0, request.num_known_tokens)]
            if request.is_beam:
                self.fork(request)

    def fork(self, beam: Request) -> None:
        """Some beams that have its tokens and another one each, or none."""
        tokens = beam.known_tokens(0, beam.num_known_tokens)
        for token in range(self.rng.choice([0, 0, 1, 1, 2])):
            fork = make_request(
                self._name(), (*tokens, token), max_tokens=1, is_beam=True, fork_of=beam, priority=beam.options.priority
            )
            self.driven.add(fork, now_s=self.now_s)
            self.driven.events["forked"] += 1

    def disturb(self) -> None:
        """What may happen at any time: somebody leaves, others come, perhaps under the same name; time passes."""
        self.now_s += self.rng.random() * self.world.tick_s
        num_preempted, self._num_preempted = self._num_preempted, self.driven.events["preempted"]
        # Where one has just been preempted, who leaves makes room for it to come back before its results have come.
        abort_rate = 0.04 if self._num_preempted == num_preempted else 0.4
        if self.rng.random() < abort_rate and self.driven.live:
            name = self.rng.choice(self.driven.live)
            self.driven.abort(name)
            self._gone.append(name)
        if self.world.setting.config.batching != "continuous" and self.rng.random() < 0.1:
            self._note_ended(self.driven.release())  # asked at any time, it ends requests only if all are done
        while self.rng.random() < self.arrival_rate and len(self.driven.live) < MOST_REQUESTS:
            self.add()

    def _more_options(self) -> dict[str, Any]:
        """Of a request that comes."""
        return {}

    def add(self) -> None:
        world, rng = self.world, self.rng
        is_beam = rng.random() < world.beam_rate
        prompt, max_tokens = self._prompt(), 1 if is_beam else rng.randint(1, world.max_output)
        has_ttft = world.has_ttft_targets and rng.random() < 0.6
        request = make_request(
            self._name(),
            prompt,
            max_tokens=max_tokens,
            stop_token_ids=frozenset([STOP_TOKEN]),
            reads_cache=rng.random() < 0.9,
            is_beam=is_beam,
            priority=rng.randint(0, 2),
            cache_salt=rng.choice(world.salts) or None,
            cache_ttl_s=rng.choice([0.0, 0.0, 0.0, 2.0, 50.0]),
            tenant=rng.choice("abbccc"),
            predicted_tokens=rng.choice(
                [None, max_tokens, rng.randint(1, 3), rng.uniform(0.1, 2.0 * world.max_output)]
            ),
            ttft_target_s=world.tick_s * rng.choice([1, 10, 60]) * rng.random() if has_ttft else None,
            tpot_target_s=rng.choice([None, None, 0.002, 0.008]),
            **self._more_options(),
        )
        if self.driven.add(request, now_s=self.now_s if world.dates_arrivals else None):
            self._spoken = [*self._spoken[-20:], prompt]

    def _name(self) -> str:
        """A new one, or one that was used before."""
        self._num_names += 1
        if self._gone and self.rng.random() < 0.5:
            return self._gone.pop()
        return f"r{self._num_names}"

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
