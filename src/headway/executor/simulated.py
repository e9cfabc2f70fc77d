"""An executor without a model and without waiting: a function gives each step's duration, on a virtual clock.

Everything else is real: the same engine loop, scheduler, cache and policies run against it, step for step. Several
steps may be in flight, as on a device. Asking for a result moves the clock to the time of that result.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from headway.core.kv.moves import BlockMoves
from headway.core.scheduler_output import ModelRunnerOutput, SampledTokens, ScheduledRequest, SchedulerOutput
from headway.transfer.block_store import BlockTransfers, NoSlots, Transferred

StepTime = Callable[[SchedulerOutput], float]
"""A planned step → how many seconds it takes the device."""

HostSeconds = Callable[[int], float]
"""Requests in a step → how many seconds the host needs to plan it and hand it over."""

_TOKEN = SampledTokens((0,))


class VirtualClock:
    """A clock that moves only when it is set."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        """Seconds since the start."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Move the clock forward."""
        self.now_s += max(seconds, 0.0)

    def sleep_until(self, then_s: float) -> None:
        """Move the clock to this time, unless it is already later."""
        self.now_s = max(self.now_s, then_s)


def _no_time(num_rows: int) -> float:
    return 0.0


class SimulatedExecutor:
    """`host_s`: the host's time to plan and submit a step, which overlaps with the device's work. `acceptance`: the
    probability that a draft token is accepted if those before it were. `answers`: the tokens of each request's answer,
    by its id; drafts are then compared with them, and all must be known when a step is planned (`max_in_flight` 1)."""

    def __init__(
        self,
        step_s: StepTime,
        clock: VirtualClock,
        *,
        max_in_flight: int = 1,
        host_s: HostSeconds = _no_time,
        acceptance: float = 0.0,
        answers: Mapping[str, Sequence[int]] | None = None,
        verifies_ahead: bool = True,
        transfers: BlockTransfers | None = None,
    ) -> None:
        self.max_in_flight = max_in_flight
        self.verifies_ahead = verifies_ahead
        self.transfers = transfers
        self.num_steps = 0
        self.busy_s = 0.0
        self._step_s = step_s
        self._clock = clock
        self._host_s = host_s
        self._free_at_s = 0.0
        self._acceptance = acceptance
        self._answers = answers
        self._num_given: dict[str, int] = {}  # tokens of each answer that have been sampled
        self._random = random.Random(0)

    def submit(self, output: SchedulerOutput) -> SimulatedStep:
        """Queue a step after those in flight."""
        self._clock.sleep(self._host_s(len(output.scheduled)))
        duration_s = self._step_s(output)
        self._free_at_s = max(self._free_at_s, self._clock.now_s) + duration_s
        self.busy_s += duration_s
        self.num_steps += 1
        if self._answers is not None:
            sampled = {
                s.request_id: self._answer(s, self._answers[s.request_id]) for s in output.scheduled if s.samples
            }
        else:
            sampled = {
                s.request_id: self._tokens(len(s.drafts)) if s.drafts else _TOKEN for s in output.scheduled if s.samples
            }
        return SimulatedStep(sampled, self._free_at_s, self._clock)

    def _tokens(self, num_drafts: int) -> SampledTokens:
        """The accepted draft tokens, and a token after them."""
        num_tokens = 1
        while num_tokens <= num_drafts and self._random.random() < self._acceptance:
            num_tokens += 1
        return SampledTokens((0,) * num_tokens)

    def _answer(self, share: ScheduledRequest, answer: Sequence[int]) -> SampledTokens:
        """The next token of the answer, and as many before it as the drafts guess right."""
        begin = self._num_given.get(share.request_id, 0)
        end = begin + 1
        while (
            end - begin <= len(share.drafts) and end < len(answer) and share.drafts[end - begin - 1] == answer[end - 1]
        ):
            end += 1
        self._num_given[share.request_id] = end
        return SampledTokens(tuple(answer[begin:end]))

    def forward(self, output: SchedulerOutput) -> NoReturn:
        """Raise, because a simulated request has no grammar."""
        raise NotImplementedError("a simulation chooses no tokens")

    def move(self, moves: BlockMoves) -> None:
        """Do nothing, as there are no blocks."""

    def warm_up(self) -> int:
        """Return 0, as no kind of step needs preparation."""
        return 0

    def shutdown(self) -> None:
        """Do nothing, as there is nothing to free."""


class SimulatedStep:
    """A step that ends at a certain time."""

    __slots__ = ("_clock", "_done_at_s", "_sampled")

    def __init__(self, sampled: dict[str, SampledTokens], done_at_s: float, clock: VirtualClock) -> None:
        self._sampled, self._done_at_s, self._clock = sampled, done_at_s, clock

    def result(self) -> ModelRunnerOutput:
        """Move the clock to the step's end and return its result."""
        self._clock.sleep_until(self._done_at_s)
        return ModelRunnerOutput(self._sampled, {})


Arrivals = Callable[[str, Sequence[bytes]], Sequence[float]]
"""(source of blocks, their digests) → the arrival time of each block."""


class SimulatedTransfers(BlockTransfers):
    """Fetches from other replicas whose end times a function gives, on the clock of the fetching replica."""

    def __init__(self, arrivals: Arrivals, clock: VirtualClock) -> None:
        super().__init__(NoSlots())
        self._arrivals, self._clock = arrivals, clock
        self._coming: list[tuple[float, int, Transferred]] = []  # a heap, by their ends

    def begin(self, moves: BlockMoves, *, is_use: bool = True) -> None:
        """Begin fetches; nothing is stored."""
        assert not moves.stored, "a simulation has no disk"
        by_source: dict[str, list[bytes]] = {}
        for digest, _, source in moves.fetched:
            by_source.setdefault(source, []).append(digest)
        for source, digests in by_source.items():
            for digest, end_s in zip(digests, self._arrivals(source, digests), strict=True):
                took_s = (end_s - self._clock.now_s) / len(digests)
                heapq.heappush(self._coming, (end_s, self._num_begun, Transferred(digest, True, True, took_s)))
                self._num_begun += 1

    def take(self) -> list[Transferred]:
        """The transfers that have ended by now."""
        while self._coming and self._coming[0][0] <= self._clock.now_s:
            self._ended.append(heapq.heappop(self._coming)[2])
        return super().take()

    def wait(self, timeout_s: float) -> bool:
        """Move the clock to the next arrival, but by at most `timeout_s`. Returns whether there was one."""
        until_s = self._clock.now_s + timeout_s
        self._clock.sleep_until(min(self._coming[0][0], until_s) if self._coming else until_s)
        return bool(self._coming) and self._coming[0][0] <= self._clock.now_s
