"""Rules, without processes, for when the parent ends a front end and whether it starts another.

Time is counted in the parent's own ticks, and only if they are on time. If the machine was suspended, the parent was
stopped, or both waited for a processor, the parent's tick is late and does not count against the front end.

    ready ──► no tick of its event loop for `hang_timeout_s` ──► dump its stacks ──► kill
    asked to stop ──► no tick for `STUCK_STOP_S`, or not gone after `stop_s` ──► dump its stacks ──► kill
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from headway.front.supervision import Backoff

STUCK_STOP_S = 5.0
"""A stopping front end whose event loop is blocked for longer has not noticed that it should stop."""
DEFAULT_STOP_S = 30.0
"""How long a front end may take to stop if it has not reported its own limit."""
DUMP_S = 1.0
"""How long a front end may take to write its stacks."""
KILLED_S = 3.0
"""How long the kernel may take to end a killed front end."""
SIGNALLED = 128
"""Added to the signal's number for the exit code of a front end that ended by a signal, as shells do."""


class Order(enum.Enum):
    """What the parent must do."""

    WAIT = enum.auto()
    DUMP = enum.auto()
    KILL = enum.auto()
    LEAVE = enum.auto()
    """The kernel cannot end the front end; the parent ends anyway."""


class FrontEndWatch:
    """Follows one front end from its start to its end."""

    def __init__(self) -> None:
        self.is_ready = False
        """Whether it has begun to serve. Until then it has no time limit, because it may be downloading a model."""
        self.served_s = 0.0
        self.is_stopping = False
        self._hang_timeout_s = 0.0
        self._stop_s = DEFAULT_STOP_S
        self._still_s = 0.0
        self._ticks = True
        self._stopping_s = 0.0
        self._dumped_s: float | None = None

    def note_bound(self, *, hang_timeout_s: float, stop_s: float) -> None:
        """Record that it has its listening socket and has reported its limits."""
        self._hang_timeout_s, self._stop_s = hang_timeout_s, stop_s

    def note_ready(self) -> None:
        """Record that it serves requests."""
        self.is_ready = True
        self.note_tick()

    def note_tick(self) -> None:
        """Record a tick of its event loop. This cancels any measure begun because the loop was blocked."""
        self._still_s = 0.0
        if not self._is_late:
            self._dumped_s = None

    def note_stopping(self) -> None:
        """Record that it was asked to stop, or has reported that it is stopping."""
        if not self.is_stopping:
            self.is_stopping, self._still_s = True, 0.0

    def note_over(self) -> None:
        """Record that its event loop has ended. From now on ticks are no longer expected."""
        self.note_stopping()
        self._ticks = False

    def pass_time(self, seconds: float) -> None:
        """Count seconds that have passed for both the parent and the front end."""
        self._still_s += seconds
        if self.is_ready:
            self.served_s += seconds
        if self.is_stopping:
            self._stopping_s += seconds
        if self._dumped_s is not None:
            self._dumped_s += seconds

    def order(self) -> Order:
        """What the parent must do now. `DUMP` is returned once, then `KILL` until the front end is gone."""
        if self._dumped_s is not None:
            if self.is_stopping and self._dumped_s >= DUMP_S + KILLED_S:
                return Order.LEAVE
            return Order.KILL if self._dumped_s >= DUMP_S else Order.WAIT
        if self._is_late or self._stands_still:
            self._dumped_s = 0.0
            return Order.DUMP
        return Order.WAIT

    @property
    def why(self) -> str:
        """Why the front end is being ended."""
        if self._is_late:
            return f"has not ended within {self._stopping_s:.0f} s"
        return f"has stood still for {self._still_s:.0f} s"

    @property
    def _is_late(self) -> bool:
        return self.is_stopping and self._stopping_s >= self._stop_s

    @property
    def _stands_still(self) -> bool:
        if not self.is_ready or not self._ticks:
            return False
        if self.is_stopping:
            return self._still_s >= STUCK_STOP_S
        return bool(self._hang_timeout_s) and self._still_s >= self._hang_timeout_s


@dataclass(frozen=True)
class Exit:
    """The parent ends with this exit code."""

    code: int


@dataclass(frozen=True)
class Restart:
    """The parent starts another front end."""

    after_s: float


@dataclass
class RestartRule:
    """Decides what follows the end of a front end. If the first one ends before it serves, the operator must know why
    (for example a wrong option), so the parent ends with its exit code. One that has served is started again, unless it
    was asked to stop."""

    _backoff: Backoff = field(default_factory=Backoff)
    _has_served: bool = False

    def next(self, status: int, watch: FrontEndWatch) -> Exit | Restart:
        """Decide what to do next. `status` is as in `subprocess`: below zero for a signal."""
        self._has_served |= watch.is_ready
        if watch.is_stopping or status == 0 or not self._has_served:
            return Exit(status if status >= 0 else SIGNALLED - status)
        return Restart(self._backoff.next_delay_s(served_s=watch.served_s))
