"""Notices an event loop that stands still, says in the log where, and counts it.

All clients of a front end share one event loop. Work that keeps it for a second is a defect, whoever caused it: nothing
else is answered meanwhile. The loop ticks four times a second; a thread looks at the ticks, and the stack that it finds
when there was none for a second is where the loop stands.

    time in which this thread was on time, and the loop was not      the loop waits for something
    processor time of the process, as far as the loop was not just   the loop computes, or another thread that holds the
    waiting for a processor itself                                   interpreter lock

Neither passes while the machine is suspended, the process is stopped, or others have the processors. A thread that
never gives the interpreter lock back leaves no time for this one; the parent process notices that (`parent_link`).
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
"""The most that a look counts for by itself. One that is later may have waited for the interpreter lock."""


Positions = list[tuple[str, int, str, None]]
"""File, line and function of each call, as `traceback` takes them."""
Stacks = dict[int, Positions]
"""By thread."""


@dataclass
class LoopStalls:
    """How often the loop has stood still, and for how long in all: for the metrics."""

    number: int = 0
    seconds: float = 0.0


class Clocks(NamedTuple):
    """What has passed so far, in seconds."""

    process_s: float
    """Processor time of the process."""
    loop_s: float
    """Time, but for that in which the loop's thread was ready to run and had no processor."""


class StallWatch:
    """Decides whether a loop stands still, from its ticks and from looks at it. Time comes as numbers."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._ticked = Clocks(0.0, 0.0)
        self._punctual_s = 0.0
        self._is_known = False
        self._missed_s: float | None = None

    def start(self, clocks: Clocks) -> None:
        """Before the first tick."""
        self._ticked, self._punctual_s, self._is_known = clocks, 0.0, False

    def tick(self, clocks: Clocks) -> float | None:
        """The loop turns. Returns how long it had stood still, if it had."""
        still_s, is_known = self._still_s(clocks), self._is_known
        self.start(clocks)
        if still_s < self._limit_s:
            return None
        if not is_known:
            self._missed_s = still_s
        return still_s

    def look(self, seconds: float, clocks: Clocks) -> float | None:
        """`seconds` have passed since the look before. Returns for how long the loop stands still, or has done so since
        then, once. A look that is late says of the time before it only that nothing was on time."""
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
        """Begin to watch. To be called in the loop's thread."""
        self._watched, self._waited_s = threading.get_ident(), waiting_clock(threading.get_native_id())
        self._watch.start(self._clocks())
        self._thread.start()
        self._tick()

    def stop(self) -> None:
        """Watch no longer."""
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
            stacks = self._stacks() if is_late else None  # whoever had the lock will not be there for long
            with self._looking:
                still_s = self._watch.look(now_s - before_s, self._clocks())
            before_s = now_s
            if still_s is not None:
                self._tell(still_s, stacks or self._stacks())

    def _stacks(self) -> Stacks:
        """Where the loop's thread is, and then the others, one of which may hold the interpreter lock. No file is read,
        during which they would go on."""
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
    """Where a thread is, the outermost call first."""
    found: Positions = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, None))
        frame = frame.f_back
    return found[::-1]


def waiting_clock(thread: int) -> Callable[[], float]:
    """How long a thread of this process was ready to run and had no processor, by its id in the system; always 0 where
    the system does not count that."""
    try:
        counted = open(f"/proc/self/task/{thread}/schedstat", "rb", buffering=0)  # noqa: SIM115 - read for ever
    except OSError:
        return lambda: 0.0

    def waited_s() -> float:
        counted.seek(0)
        return int(counted.read(80).split()[1]) * 1e-9

    return waited_s
