"""Decides when an engine process is unhealthy, when it is replaced, and how soon. Time is passed in as numbers.

sign of life     a heartbeat every second from a separate thread, a step, any other message
silent           none of them: the process as a whole hangs. It is stopped, swapped out, or in the kernel
stuck            heartbeats come, and say that the loop has been in one turn for long: a step does not end

An engine that is silent or stuck is first unhealthy; later it is killed and replaced.
"""

from __future__ import annotations

from dataclasses import dataclass

SILENT_S = 3.0
"""After this silence, three missed heartbeats, an engine is unhealthy."""
START_SILENT_S = 20.0
"""The allowed silence while libraries are imported and memory is allocated. It applies until the first sign of life
after the engine is ready."""
FIRST_STEP_GRACE_S = 300.0
"""The allowed time of an engine's first step, which may compile kernels."""
TICK_S = 0.5
"""The interval at which the rules are checked. If this process itself was held up, at most two intervals count, because
messages that the engine sent meanwhile have not been read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long an engine may make no progress, in seconds. 0 disables `step_timeout_s` or `hang_timeout_s`."""

    slow_step_s: float = 60.0
    """An engine with a longer step is unhealthy."""
    step_timeout_s: float = 600.0
    """An engine with a longer step is replaced."""
    hang_timeout_s: float = 10.0
    """An engine that is silent for longer is replaced."""
    resume_s: float = 120.0
    """How long a request may wait for an engine that takes it."""

    @property
    def silent_s(self) -> float:
        """An engine that is silent for longer is unhealthy."""
        return min(SILENT_S, self.hang_timeout_s or SILENT_S)

    @property
    def heartbeat_s(self) -> float:
        """The interval of the engine's heartbeats."""
        times = (self.slow_step_s, self.step_timeout_s, self.hang_timeout_s)
        return min([1.0, *(time_s / 4 for time_s in times if time_s)])


class Watchdog:
    """Follows one engine process at a time."""

    def __init__(self, patience: Patience) -> None:
        self.patience = patience
        self.note_start()

    def note_start(self) -> None:
        """Note that another process is being started."""
        self._silent_s = 0.0
        self._reported_turn_s = 0.0
        self._is_ready = False
        self._has_begun = False
        """Whether it has given a sign of life since it was ready."""
        self._has_stepped = False

    def note_ready(self) -> None:
        """Note that the process takes requests."""
        self.note_life()
        self._is_ready, self._has_begun = True, False

    def note_life(self, turn_s: float = 0.0) -> None:
        """Note a message from the process. For a heartbeat, `turn_s` is the time that its loop has been in the present
        turn."""
        self._silent_s, self._reported_turn_s = 0.0, turn_s
        self._has_begun = self._is_ready

    def note_step(self) -> None:
        """Note a step of the process."""
        self.note_life()
        self._has_stepped = True

    def pass_time(self, seconds: float) -> None:
        """Let `seconds` pass, with or without signs of life."""
        self._silent_s += seconds

    @property
    def problem(self) -> str | None:
        """Why the engine is unhealthy, or None. The text may be shown to any client."""
        if not self._is_ready:
            return None
        if self._silent_s > self._while_starting(self.patience.silent_s):
            return f"the engine process has given no sign of life for {self._silent_s:.0f} s"
        if self._turn_s > self._grace(self.patience.slow_step_s):
            return f"the engine has made no progress for {self._turn_s:.0f} s"
        return None

    def is_lost(self, *, ending: bool = False) -> bool:
        """Whether the process must be killed. With `ending`, when the client is about to end, a silent process is not
        waited for."""
        hang_s, step_s = self.patience.hang_timeout_s, self.patience.step_timeout_s
        if ending and self._silent_s > self.patience.silent_s:
            return True
        if hang_s and self._silent_s > self._while_starting(hang_s):
            return True
        return bool(step_s) and self._turn_s > self._grace(step_s)

    @property
    def _turn_s(self) -> float:
        return self._reported_turn_s + self._silent_s if self._reported_turn_s else 0.0

    def _while_starting(self, limit_s: float) -> float:
        return limit_s if self._has_begun else max(limit_s, START_SILENT_S)

    def _grace(self, limit_s: float) -> float:
        return limit_s if self._has_stepped else max(limit_s, FIRST_STEP_GRACE_S)


@dataclass
class Backoff:
    """The delays before restarts: 0.5 s, 1 s, 2 s, … up to 5 s. They are short because requests may be waiting."""

    first_s: float = 0.5
    longest_s: float = 5.0
    good_service_s: float = 1.0
    """A process that has served this long before it failed resets the delay, since it did not fail because of an early
    start."""
    _num_failures: int = 0

    def next_delay_s(self, *, served_s: float) -> float:
        """The delay after a failure; `served_s` is how long the process had been ready, 0 if it never was."""
        if served_s >= self.good_service_s:
            self._num_failures = 0
        delay_s = min(self.first_s * 2.0**self._num_failures, self.longest_s)
        self._num_failures = min(self._num_failures + 1, 64)
        return delay_s
