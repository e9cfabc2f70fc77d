"""One engine of a simulation: the real loop, scheduler and cache on a simulated device, with a clock of its own.

Replicas do not talk to each other, so each may be ahead of the others by as much as one step; whoever drives them steps
the one whose clock is behind (see `headway.lab.sim.simulate`).
"""

from __future__ import annotations

from collections import deque

from headway.config import CacheConfig, SchedulerConfig
from headway.core import HostTier, KVCacheManager, PrefixCache, Request, Scheduler
from headway.core.eviction import create_eviction_policy
from headway.engine.engine_core import CoreStep, EngineCore
from headway.executor.simulated import SimulatedExecutor, VirtualClock
from headway.lab.sim.machine import Machine
from headway.lab.sim.variation import Variation


class Replica:
    """An engine that serves its share of the requests."""

    def __init__(self, machine: Machine, scheduler: SchedulerConfig, cache: CacheConfig, variation: Variation) -> None:
        self.clock = VirtualClock()
        self._after_s = machine.host.after
        self.executor = SimulatedExecutor(
            variation.step_time(machine.cost, self.clock),
            self.clock,
            max_in_flight=2 if machine.overlap else 1,
            host_s=machine.host.before,
        )
        self.core = EngineCore(
            Scheduler(scheduler, _kv_cache(machine, cache)), self.executor, now=self.clock.now, sleep=self.clock.sleep
        )
        self._num_outstanding = 0
        self._done: deque[tuple[float, int]] = deque()  # (when, how many tokens)

    @property
    def now_s(self) -> float:
        """How far it has come."""
        return self.clock.now_s

    @property
    def is_busy(self) -> bool:
        """Whether there is anything to step for."""
        return self.core.has_unfinished_requests

    def add(self, request: Request, *, at_s: float) -> None:
        """Take a request that arrives then. A replica that is ahead takes it when its step is over, as engines do."""
        if not self.core.has_unfinished_requests:
            self.clock.sleep_until(at_s)
        self._num_outstanding += request.max_total_tokens
        self.core.add_request(request)

    def step(self) -> CoreStep:
        """One step, up to the time when its tokens are out."""
        step = self.core.step()
        num_rows = len(step.report.snapshot.output.scheduled)
        if num_rows:
            self.clock.sleep(self._after_s(num_rows))
        return step

    def note_done(self, num_tokens: int) -> None:
        """So many tokens of prompts and answers are done by now."""
        self._done.append((self.clock.now_s, num_tokens))

    def num_outstanding_tokens(self, now_s: float) -> int:
        """Of requests that were sent here, what had not come back by then: prompts until the first token, and the
        tokens of answers."""
        done = self._done
        while done and done[0][0] <= now_s:
            self._num_outstanding -= done.popleft()[1]
        return self._num_outstanding


def _kv_cache(machine: Machine, config: CacheConfig) -> KVCacheManager:
    return KVCacheManager(
        num_blocks=machine.num_blocks,
        block_size=machine.block_size,
        prefix_cache=PrefixCache(create_eviction_policy(config.eviction_policy)) if config.shares_prefixes else None,
        host_tier=HostTier(machine.num_host_slots) if machine.num_host_slots else None,
        restore_block_s=machine.restore_block_s,
        reserve_tokens=0 if config.kv_allocation == "paged" else machine.max_model_len,
    )
