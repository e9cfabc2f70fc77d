"""The loop that steps an engine for its callers, whoever they are.

    receive ──► aborts at once, requests into a line ──► admit those in front, for a limited time ──► step ──► hand out

Callers speak through a channel: threads of this program through a queue (`engine_thread`), a front end through a socket
(`engine_process.engine_loop`). Messages are taken between two steps, and so are their aborts. What fails, ends:

    a request       alone
    a step          its requests; others are not touched, and the next step is made
    anything else   all requests: the channel says so, and the engine goes on empty, if it can be emptied

Where another process can take an engine's place, steps that fail one after the other raise the question whether the
fault is in the requests or in the engine: the line waits until a plain request of the driver's own has shown it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

from headway.engine.llm_engine import LLMEngine
from headway.engine.step_report import EngineStep, StepReport
from headway.errors import EngineDeadError, HeadwayError
from headway.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

IDLE_S = 1.0
"""A driver with nothing to do looks around this often, unless a message comes."""
INTAKE_S = 0.05
"""How long requests are admitted between two steps. The rest of a burst waits for the next turn; requests that run do
not wait for it."""
MAX_FAILED_STEPS = 3
"""Failures without a success between them that raise the question. A device does not recover from some errors, a new
process does."""
PROBE = "#probe"


class BrokenEngineError(HeadwayError):
    """Every step fails, whatever the request; only a new process can help."""


class Channel(Protocol):
    """Between the driver and those who want outputs."""

    @property
    def is_over(self) -> bool:
        """Whether the driver is to end."""

    @property
    def wants_steps(self) -> bool:
        """Whether a caller waits for what the next step brings."""

    def receive(self, *, is_idle: bool, timeout_s: float) -> None:
        """Take all messages that have come; if there are none, wait for one."""

    def admitted(self) -> None:
        """New requests are in the engine: say what can be said before the next step."""

    def hand_out(self, step: EngineStep) -> None:
        """Give each caller its own."""

    def lose_all(self, error: BaseException) -> None:
        """All requests end, through no fault of theirs. What this raises ends the driver."""


class Newcomer(NamedTuple):
    """A request that is not in the engine yet."""

    request_id: str
    enter: Callable[[], None]
    """Checks and queues it. It raises nothing that is wrong with the request."""


class EngineDriver:
    """Belongs to one thread."""

    def __init__(
        self,
        engine: LLMEngine,
        channel: Channel,
        *,
        is_replaceable: bool,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_replaceable`: a driver that ends with an error is followed by another with a new engine."""
        self.failure: BaseException | None = None
        """Why the engine cannot be used any more."""
        self._engine = engine
        self._channel = channel
        self._is_replaceable = is_replaceable
        self._now = now
        self._line: deque[Newcomer] = deque()
        self._num_failed_steps = 0

    def run(self) -> None:
        """Until the channel is over."""
        while not self._channel.is_over:
            is_idle = not self._line and not self._engine.has_unfinished_requests()
            self._channel.receive(is_idle=is_idle, timeout_s=self._sleep_s(is_idle))
            self._admit()
            self._channel.admitted()
            if self._channel.is_over:
                return
            if not self._engine.has_unfinished_requests():
                if self._is_in_doubt:
                    self._probe()
            elif self._channel.wants_steps:
                self._step()

    def queue(self, newcomer: Newcomer) -> None:
        """To be admitted in its turn."""
        self._line.append(newcomer)

    def leave_line(self, request_ids: Collection[str]) -> None:
        """Requests in line are not wanted any more."""
        if self._line:
            self._line = deque(newcomer for newcomer in self._line if newcomer.request_id not in request_ids)

    @property
    def waiting_ids(self) -> list[str]:
        """The requests in line."""
        return [newcomer.request_id for newcomer in self._line]

    def recover(self, error: BaseException) -> None:
        """Something has failed that belongs to no request."""
        self._channel.lose_all(error)
        try:
            self._engine.abort_all()
            self._engine.check_invariants()
        except BaseException as second:
            logger.error("the engine cannot be used any more: %s", second, exc_info=cause_of(second))
            self.failure = error

    def _sleep_s(self, is_idle: bool) -> float:
        """How long to wait for messages."""
        if self._line or self._is_in_doubt:
            return 0.0
        return IDLE_S if is_idle or self._engine.core.only_waits_for_blocks else 0.0

    def _admit(self) -> None:
        """In order of arrival: at least one, and no more than there is time for."""
        if not self._line or self._is_in_doubt:
            return
        until_s = self._now() + INTAKE_S
        while self._line:
            self._line.popleft().enter()
            if self._now() >= until_s:
                return

    def _step(self) -> None:
        try:
            step = self._engine.step()
        except BaseException as error:
            self.recover(error)
            return
        self._channel.hand_out(step)
        self._note_outcome(step.report)

    def _note_outcome(self, report: StepReport) -> None:
        """Only a step that failed as a whole counts, and one that computed nothing says nothing."""
        if report.error is not None:
            self._num_failed_steps += 1
        elif not report.snapshot.output.is_empty:
            self._num_failed_steps = 0

    @property
    def _is_in_doubt(self) -> bool:
        """Whether the next request to enter is the probe. The line waits for it: a request that makes its step fail
        must not take the probe along."""
        return self._is_replaceable and self._num_failed_steps >= MAX_FAILED_STEPS

    def _probe(self) -> None:
        """Ask for one token, in the plainest way: if that works, the fault was in the requests."""
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
        self._engine.add_request(PROBE, [0], params, stream=False)
        has_failed = False
        while self._engine.has_unfinished_requests():
            has_failed |= PROBE in self._engine.step().errors
        if has_failed:
            raise BrokenEngineError(f"{self._num_failed_steps} steps in a row have failed, and so has a plain request")
        logger.warning("%d steps in a row have failed, a plain request has not", self._num_failed_steps)
        self._num_failed_steps = 0


def cause_of(error: BaseException) -> BaseException | None:
    """An error whose traceback is of use; that of a dead engine is, if another error is its cause."""
    return None if isinstance(error, EngineDeadError) and error.__cause__ is None else error
