"""Detects a blocked event loop, logs the stack where it is blocked, and counts the stalls.

All clients of a front end share one event loop. Work that blocks it for a second is a defect, whatever its cause,
because nothing else is answered in that time. The loop ticks five times a second and a thread checks the ticks. If
there was none for a second, the thread logs the stack of the loop. A stall is the larger of two measured times:

    time in which this thread was on time but the loop was not       the loop waits for something
    processor time of the process, without the time in which the     the loop computes, or another thread that holds the
    loop's thread was waiting for a processor                        interpreter lock does

Neither grows while the machine is suspended, the process is stopped, or other processes use the processors. If a thread
never releases the interpreter lock, this thread cannot run; the parent process detects that (`parent_link`).
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import NamedTuple

logger = logging.getLogger(__name__)

LIMIT_S = 1.0
TICK_S = 0.2
MAX_LATE_S = 2 * TICK_S
"""Most time that one check adds. A later check may itself have waited for the interpreter lock."""


Positions = list[tuple[str, int, str, None]]
"""File, line and function of each call, in the form that `traceback` accepts."""
Stacks = dict[int, Positions]
"""Stack of each thread, by thread id."""


@dataclass
class LoopStalls:
    """Number and total duration of the loop's stalls, for the metrics."""

    number: int = 0
    seconds: float = 0.0


class Clocks(NamedTuple):
    """Two clocks, in seconds."""

    process_s: float
    """Processor time of the process."""
    loop_s: float
    """Elapsed time, except when the loop's thread was ready to run but had no processor."""


class StallWatch:
    """Decides from ticks and checks whether a loop is blocked. It reads no clock; callers pass all times."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._ticked = Clocks(0.0, 0.0)
        self._punctual_s = 0.0
        self._is_known = False
        self._missed_s: float | None = None

    def start(self, clocks: Clocks) -> None:
        """Start a new measurement. It begins before the first tick and again with each tick."""
        self._ticked, self._punctual_s, self._is_known = clocks, 0.0, False

    def tick(self, clocks: Clocks) -> float | None:
        """Record that the loop runs. Returns how long it was blocked, or None if it was not."""
        still_s, is_known = self._still_s(clocks), self._is_known
        self.start(clocks)
        if still_s < self._limit_s:
            return None
        if not is_known:
            self._missed_s = still_s
        return still_s

    def look(self, seconds: float, clocks: Clocks) -> float | None:
        """Check the loop, `seconds` after the previous check. Returns once for each stall how long it has lasted, also
        if it has ended since the previous check; else None. A late check only counts for `MAX_LATE_S`."""
        missed_s, self._missed_s = self._missed_s, None
        if missed_s is not None:
            return missed_s
        self._punctual_s += min(seconds, MAX_LATE_S)
        still_s = self._still_s(clocks)
        if still_s < self._limit_s or self._is_known:
            return None
        self._is_known = True
        return still_s

    def _still_s(self, clocks: Clocks) -> float:
        computed_s = min(clocks.process_s - self._ticked.process_s, clocks.loop_s - self._ticked.loop_s)
        return max(self._punctual_s, computed_s)


class LoopGuard:
    """Watches the event loop of the thread that starts it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, stalls: LoopStalls, *, limit_s: float = LIMIT_S) -> None:
        self._loop = loop
        self._stalls = stalls
        self._watch = StallWatch(limit_s)
        self._looking = threading.Lock()
        self._ticker: asyncio.TimerHandle | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop guard", daemon=True)
        self._watched = 0
        self._waited_s: Callable[[], float] = lambda: 0.0

    def start(self) -> None:
        """Begin to watch. Call this in the loop's thread."""
        self._watched, self._waited_s = threading.get_ident(), waiting_clock(threading.get_native_id())
        self._watch.start(self._clocks())
        self._thread.start()
        self._tick()

    def stop(self) -> None:
        """Stop watching."""
        self._is_over.set()
        if self._ticker is not None:
            self._ticker.cancel()

    def _clocks(self) -> Clocks:
        return Clocks(time.process_time(), time.monotonic() - self._waited_s())

    def _tick(self) -> None:
        with self._looking:
            still_s = self._watch.tick(self._clocks())
        if still_s is not None:
            self._stalls.number += 1
            self._stalls.seconds += still_s
            logger.error("the event loop had stood still for %.1f s, in which nothing was answered", still_s)
        self._ticker = self._loop.call_later(TICK_S, self._tick)

    def _run(self) -> None:
        before_s = time.monotonic()
        while not self._is_over.wait(TICK_S):
            now_s = time.monotonic()
            is_late = now_s - before_s > MAX_LATE_S
            stacks = self._stacks() if is_late else None  # now, while the thread that held the lock is still there
            with self._looking:
                still_s = self._watch.look(now_s - before_s, self._clocks())
            before_s = now_s
            if still_s is not None:
                self._tell(still_s, stacks or self._stacks())

    def _stacks(self) -> Stacks:
        """Return the stacks of all threads, the loop's first; another one may hold the interpreter lock. No source file
        is read here, because the threads would continue in that time."""
        frames = sys._current_frames()
        order = sorted(frames.keys() - {self._thread.ident}, key=lambda ident: ident != self._watched)
        return {ident: positions(frames[ident]) for ident in order}

    def _tell(self, still_s: float, stacks: Stacks) -> None:
        names = {each.ident: each.name for each in threading.enumerate()}
        texts = [
            f"thread {names.get(each)}:\n{''.join(traceback.format_list(stack))}" for each, stack in stacks.items()
        ]
        logger.error("the event loop stands still, for %.1f s so far; %s", still_s, "".join(texts).rstrip())


def positions(frame: FrameType | None) -> Positions:
    """Return a thread's stack, outermost call first."""
    found: Positions = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, None))
        frame = frame.f_back
    return found[::-1]


def waiting_clock(thread: int) -> Callable[[], float]:
    """Return a clock of the seconds in which a thread of this process was ready to run but had no processor. `thread`
    is its native id. The clock is always 0 if the system does not count this time."""
    try:
        counted = open(f"/proc/self/task/{thread}/schedstat", "rb", buffering=0)  # noqa: SIM115 - read for ever
    except OSError:
        return lambda: 0.0

    def waited_s() -> float:
        counted.seek(0)
        return int(counted.read(80).split()[1]) * 1e-9

    return waited_s
