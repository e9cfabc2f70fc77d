"""One engine of a simulation: the real loop, scheduler and cache on a simulated device, with a clock of its own.

Replicas do not talk to each other, so each may be ahead of the others by as much as one step; whoever drives them steps
the one whose clock is behind (see `headway.lab.sim.simulate`).
"""

from __future__ import annotations

from collections import deque

from headway.core import Request
from headway.engine.engine_core import EngineCore, EngineStep
from headway.engine.kv_wiring import create_scheduler
from headway.executor.simulated import SimulatedExecutor, VirtualClock
from headway.lab.sim.machine import Machine
from headway.lab.sim.variation import Variation
from headway.settings import CacheSettings, SchedulerSettings


class Replica:
    """An engine that serves its share of the requests."""

    def __init__(
        self, machine: Machine, scheduler: SchedulerSettings, cache: CacheSettings, variation: Variation
    ) -> None:
        self.clock = VirtualClock()
        self._after_s = machine.host.after
        self.executor = SimulatedExecutor(
            variation.step_time(machine.cost, self.clock),
            self.clock,
            max_in_flight=2 if machine.overlap else 1,
            host_s=machine.host.before,
        )
        self.core = EngineCore(
            create_scheduler(scheduler, cache, machine), self.executor, now=self.clock.now, sleep=self.clock.sleep
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

    def step(self) -> EngineStep:
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
