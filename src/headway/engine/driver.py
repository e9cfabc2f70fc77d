"""The loop that steps an engine on behalf of its callers.

    receive ──► aborts at once, requests into a line ──► admit those in front, for a limited time ──► step ──► hand out

Callers send messages through a channel: threads of this program through a queue (`engine_thread`), a front end through
a socket (`engine_process.engine_loop`). Messages, aborts included, are handled between two steps. The scope of a
failure:

    a request       alone
    a step          its requests; others are not touched, and the next step is made
    anything else   all requests: the channel says so, and the engine goes on empty, if it can be emptied

Where a new process can replace the engine, several failed steps in a row raise a question: are the requests at fault,
or the engine? Queued requests then wait until the driver has run a plain request of its own (the probe) to find out.
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
"""The longest that an idle driver waits for a message before it checks its state again."""
INTAKE_S = 0.05
"""The time spent on entering new requests between two steps. The rest of a burst waits for the next turn, so that
running requests are not held up."""
MAX_FAILED_STEPS = 3
"""After this many failed steps without a success between them the driver probes the engine. A device does not recover
from some errors, but a new process does."""
PROBE = "#probe"


class BrokenEngineError(HeadwayError):
    """Every step fails, whatever the request. Only a new process can help."""


class Channel(Protocol):
    """The connection between the driver and the callers that want outputs."""

    @property
    def is_over(self) -> bool:
        """Whether the driver should end."""

    @property
    def wants_steps(self) -> bool:
        """Whether a caller waits for the result of the next step."""

    def receive(self, *, is_idle: bool, timeout_s: float) -> None:
        """Handle all messages that have arrived. If there are none, wait for one, up to `timeout_s`."""

    def admitted(self) -> None:
        """Called after new requests have entered the engine, to send what is known before the next step."""

    def hand_out(self, step: EngineStep) -> None:
        """Deliver to each caller its part of a step's outputs."""

    def lose_all(self, error: BaseException) -> None:
        """End all requests because of an error that is not theirs. An exception raised here ends the driver."""


class Newcomer(NamedTuple):
    """A request that is not in the engine yet."""

    request_id: str
    enter: Callable[[], None]
    """Checks the request and queues it in the engine. It does not raise for errors of the request."""


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
        """`is_replaceable`: when this driver ends with an error, another one with a new engine takes its place."""
        self.failure: BaseException | None = None
        """Why the engine cannot be used any more."""
        self._engine = engine
        self._channel = channel
        self._is_replaceable = is_replaceable
        self._now = now
        self._line: deque[Newcomer] = deque()
        self._num_failed_steps = 0

    def run(self) -> None:
        """Serve callers until the channel is over. Raises `BrokenEngineError` if the probe fails."""
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
        """Put a request in line, to be entered in its turn."""
        self._line.append(newcomer)

    def leave_line(self, request_ids: Collection[str]) -> None:
        """Remove requests from the line that are not wanted any more."""
        if self._line:
            self._line = deque(newcomer for newcomer in self._line if newcomer.request_id not in request_ids)

    @property
    def waiting_ids(self) -> list[str]:
        """The ids of the requests in line."""
        return [newcomer.request_id for newcomer in self._line]

    def recover(self, error: BaseException) -> None:
        """End all requests after a failure that belongs to none of them, and empty the engine. If that fails too,
        `failure` is set."""
        self._channel.lose_all(error)
        try:
            self._engine.abort_all()
            self._engine.check_invariants()
        except BaseException as second:
            logger.error("the engine cannot be used any more: %s", second, exc_info=cause_of(second))
            self.failure = error

    def _sleep_s(self, is_idle: bool) -> float:
        """The time to wait for messages."""
        if self._line or self._is_in_doubt:
            return 0.0
        return IDLE_S if is_idle or self._engine.core.only_waits_for_blocks else 0.0

    def _admit(self) -> None:
        """Enter requests in order of arrival: at least one, then as many as fit into `INTAKE_S`."""
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
        """Count failed steps in a row. Only a step that failed as a whole counts, and an empty step proves nothing."""
        if report.error is not None:
            self._num_failed_steps += 1
        elif not report.snapshot.output.is_empty:
            self._num_failed_steps = 0

    @property
    def _is_in_doubt(self) -> bool:
        """Whether the probe must run next. The line waits for it, because a request that makes its step fail would make
        the probe fail too."""
        return self._is_replaceable and self._num_failed_steps >= MAX_FAILED_STEPS

    def _probe(self) -> None:
        """Run a plain request for one token. If it succeeds, the requests were at fault; otherwise `BrokenEngineError`
        is raised."""
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
    """The error if its traceback is worth logging, else None. That of an `EngineDeadError` is only if it has a
    cause."""
    return None if isinstance(error, EngineDeadError) and error.__cause__ is None else error
