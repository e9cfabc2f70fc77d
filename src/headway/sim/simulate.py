"""Replaying work on a virtual clock: what `headway.bench.online.replay` does, in seconds instead of hours."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from headway.bench.times import RequestTimeline
from headway.config import CacheConfig, SchedulerConfig
from headway.core import HostTier, KVCacheManager, PrefixCache, Request, RequestStatus, Scheduler
from headway.core.eviction import create_eviction_policy
from headway.engine.engine_core import EngineCore, EngineStep
from headway.errors import ConfigError
from headway.executor.simulated import SimulatedExecutor, VirtualClock
from headway.sim.cost_model import CostModel
from headway.workload.requests import BenchRequest


@dataclass(frozen=True)
class Machine:
    """What the requests run on."""

    cost: CostModel
    num_blocks: int
    block_size: int
    max_model_len: int
    overlap: bool = False
    """Whether a step is planned while another runs."""
    host_s: float = 0.0
    num_host_slots: int = 0
    restore_block_s: float = 0.0


@dataclass
class Simulation:
    """What came of it."""

    timelines: list[RequestTimeline]
    duration_s: float = 0.0
    num_steps: int = 0
    busy_s: float = 0.0
    waste: list[float] = field(default_factory=list)
    """Before each step with somebody in the batch: which part of the KV memory that is kept from others holds
    nothing."""
    num_running: list[int] = field(default_factory=list)
    """At the same times, how many requests were in the batch."""


def simulate(
    work: Sequence[BenchRequest],
    machine: Machine,
    scheduler_config: SchedulerConfig,
    cache_config: CacheConfig | None = None,
) -> Simulation:
    """Replay the work from its first arrival to the end of its last request."""
    clock = VirtualClock()
    scheduler = Scheduler(scheduler_config, _kv_cache(machine, cache_config or CacheConfig()))
    in_flight = 2 if machine.overlap else 1
    executor = SimulatedExecutor(machine.cost.step_s, clock, max_in_flight=in_flight, host_s=machine.host_s)
    core = EngineCore(scheduler, executor, now=clock.now, sleep=clock.sleep)
    result = Simulation([RequestTimeline(r.arrival_s, r.num_prompt_tokens, r.num_output_tokens) for r in work])
    expected = deque(sorted(range(len(work)), key=lambda index: work[index].arrival_s))
    while expected or core.has_unfinished_requests:
        while expected and work[expected[0]].arrival_s <= clock.now_s:
            index = expected.popleft()
            core.add_request(_request(str(index), work[index]))
        if not core.has_unfinished_requests:
            clock.sleep_until(work[expected[0]].arrival_s)
            continue
        _note_batch(result, core.scheduler)
        _note_step(result, core.step(), clock.now_s)
    result.duration_s, result.num_steps, result.busy_s = clock.now_s, executor.num_steps, executor.busy_s
    return result


def _note_step(result: Simulation, step: EngineStep, now_s: float) -> None:
    for update in step.updates:
        timeline = result.timelines[int(update.request_id)]
        timeline.token_times_s.extend([now_s] * len(update.new_token_ids))
        if update.finish_status is RequestStatus.FINISHED_ERROR:
            raise RuntimeError(f"request {update.request_id} failed: {update.error}")
    for output in step.launched:
        for request_id in output.preempted_request_ids:
            result.timelines[int(request_id)].num_preemptions += 1


def _note_batch(result: Simulation, scheduler: Scheduler) -> None:
    kv_cache = scheduler.kv_cache
    reserved = kv_cache.num_reserved_blocks * kv_cache.block_size
    if reserved:
        result.waste.append(1.0 - scheduler.num_used_slots / reserved)
        result.num_running.append(len(scheduler.running) + len(scheduler.held))


def _kv_cache(machine: Machine, config: CacheConfig) -> KVCacheManager:
    return KVCacheManager(
        num_blocks=machine.num_blocks,
        block_size=machine.block_size,
        prefix_cache=PrefixCache(create_eviction_policy(config.eviction_policy)) if config.shares_prefixes else None,
        host_tier=HostTier(machine.num_host_slots) if machine.num_host_slots else None,
        restore_block_s=machine.restore_block_s,
        reserve_tokens=0 if config.kv_allocation == "paged" else machine.max_model_len,
    )


def _request(name: str, work: BenchRequest) -> Request:
    if work.num_choices != 1:
        raise ConfigError("The simulator has one answer for each request.")
    return Request(name, work.prompt_token_ids, max_tokens=work.num_output_tokens, **work.options)
