"""When the parent of a front end ends it, and whether it starts another: rules without processes.

Time is counted in the parent's own punctual ticks. If the machine was suspended, the parent stopped, or both had to
wait for a processor, the parent's tick is late, and does not count against the front end.

    ready ──► no tick of its event loop for `hang_timeout_s` ──► dump its stacks ──► kill
    asked to stop ──► no tick for `STUCK_STOP_S`, or not gone after `stop_s` ──► dump its stacks ──► kill
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from headway.front.supervision import Backoff

STUCK_STOP_S = 5.0
"""A front end that is to stop, and whose event loop stands still for longer, does not know that it is to stop."""
DEFAULT_STOP_S = 30.0
"""How long a front end may take to stop that has not said how long it takes."""
DUMP_S = 1.0
"""How long it may take to write its stacks."""
KILLED_S = 3.0
"""How long the kernel may take to end it."""
SIGNALLED = 128
"""Shells add a signal's number to this; so does the parent, for a front end that ended by a signal."""


class Order(enum.Enum):
    """What the parent is to do."""

    WAIT = enum.auto()
    DUMP = enum.auto()
    KILL = enum.auto()
    LEAVE = enum.auto()
    """The kernel cannot end it; the parent ends all the same."""


class FrontEndWatch:
    """Follows one front end from its start to its end."""

    def __init__(self) -> None:
        self.is_ready = False
        """Whether it has served. Before that it may take any time: it may have a model to download."""
        self.served_s = 0.0
        self.is_stopping = False
        self._hang_timeout_s = 0.0
        self._stop_s = DEFAULT_STOP_S
        self._still_s = 0.0
        self._ticks = True
        self._stopping_s = 0.0
        self._dumped_s: float | None = None

    def note_bound(self, *, hang_timeout_s: float, stop_s: float) -> None:
        """It has its listening socket, and has told its limits."""
        self._hang_timeout_s, self._stop_s = hang_timeout_s, stop_s

    def note_ready(self) -> None:
        """It serves requests."""
        self.is_ready = True
        self.note_tick()

    def note_tick(self) -> None:
        """Its event loop has turned. What was about to happen because it stood still does not."""
        self._still_s = 0.0
        if not self._is_late:
            self._dumped_s = None

    def note_stopping(self) -> None:
        """It was asked to end, or has told that it does."""
        if not self.is_stopping:
            self.is_stopping, self._still_s = True, 0.0

    def note_over(self) -> None:
        """Its event loop has ended; what is left is not watched by ticks."""
        self.note_stopping()
        self._ticks = False

    def pass_time(self, seconds: float) -> None:
        """So many seconds have passed for parent and front end alike."""
        self._still_s += seconds
        if self.is_ready:
            self.served_s += seconds
        if self.is_stopping:
            self._stopping_s += seconds
        if self._dumped_s is not None:
            self._dumped_s += seconds

    def order(self) -> Order:
        """What is to be done now. `DUMP` comes once, and `KILL` after it until the front end is gone."""
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
        """Why it is ended."""
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
    """The parent ends, too."""

    code: int


@dataclass(frozen=True)
class Restart:
    """Another front end is started."""

    after_s: float


@dataclass
class RestartRule:
    """What follows the end of a front end. The first one that never served has a reason that the operator must know,
    as a wrong option: its exit code is the parent's. One that has served is started again, unless it was to end."""

    _backoff: Backoff = field(default_factory=Backoff)
    _has_served: bool = False

    def next(self, status: int, watch: FrontEndWatch) -> Exit | Restart:
        """`status` is as `subprocess` has it: below zero for a signal."""
        self._has_served |= watch.is_ready
        if watch.is_stopping or status == 0 or not self._has_served:
            return Exit(status if status >= 0 else SIGNALLED - status)
        return Restart(self._backoff.next_delay_s(served_s=watch.served_s))
