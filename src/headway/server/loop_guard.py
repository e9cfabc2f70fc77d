"""Notices an event loop that stands still, says in the log where, and counts it.

All clients of a front end share one event loop. Work that keeps it for a second is a defect, whoever caused it: nothing
else is answered meanwhile. The loop ticks four times a second; a thread looks at the ticks, and the stack that it finds
when there was none for a second is where the loop stands.

    time in which this thread was on time, and the loop was not        it waits for something, and holds no lock
    processor time that the loop's thread has used since its tick      it computes, perhaps with the interpreter lock

Neither passes while the machine is suspended, the process is stopped, or others have the processors. A loop that never
gets free of the interpreter lock leaves no time for this thread; the parent process notices that (`parent_link`).
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

logger = logging.getLogger(__name__)

LIMIT_S = 1.0
TICK_S = 0.2


@dataclass
class LoopStalls:
    """How often the loop has stood still, and for how long in all: for the metrics."""

    number: int = 0
    seconds: float = 0.0


class StallWatch:
    """Decides whether a loop stands still, from its ticks and from looks at it. Time comes as numbers."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._tick_cpu_s = 0.0
        self._punctual_s = 0.0
        self._is_known = False

    def start(self, cpu_s: float) -> None:
        """The loop's thread has used so much processor time before its first tick."""
        self._tick_cpu_s, self._punctual_s, self._is_known = cpu_s, 0.0, False

    def tick(self, cpu_s: float) -> float | None:
        """The loop turns, and its thread has used so much processor time. Returns how long it had stood still, if it
        had."""
        still_s = self._still_s(cpu_s)
        self.start(cpu_s)
        return still_s if still_s >= self._limit_s else None

    def look(self, seconds: float, cpu_s: float) -> float | None:
        """`seconds` have passed since the look before. Returns for how long the loop has stood still, once, when it is
        found to. A look that is late says of the time before it only that nothing was on time."""
        self._punctual_s += min(seconds, 2 * TICK_S)
        still_s = self._still_s(cpu_s)
        if still_s < self._limit_s or self._is_known:
            return None
        self._is_known = True
        return still_s

    def _still_s(self, cpu_s: float) -> float:
        return max(self._punctual_s, cpu_s - self._tick_cpu_s)


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

    def start(self) -> None:
        """Begin to watch. To be called in the loop's thread."""
        self._watched = threading.get_ident()
        self._watch.start(time.thread_time())
        self._thread.start()
        self._tick()

    def stop(self) -> None:
        """Watch no longer."""
        self._is_over.set()
        if self._ticker is not None:
            self._ticker.cancel()

    def _tick(self) -> None:
        with self._looking:
            still_s = self._watch.tick(time.thread_time())
        if still_s is not None:
            self._stalls.number += 1
            self._stalls.seconds += still_s
            logger.error("the event loop had stood still for %.1f s, in which nothing was answered", still_s)
        self._ticker = self._loop.call_later(TICK_S, self._tick)

    def _run(self) -> None:
        before_s = time.monotonic()
        cpu_s = cpu_clock(self._watched)
        while not self._is_over.wait(TICK_S):
            now_s = time.monotonic()
            with self._looking:
                still_s = self._watch.look(now_s - before_s, cpu_s())
            before_s = now_s
            if still_s is not None:
                stack = "".join(traceback.format_stack(sys._current_frames().get(self._watched)))
                logger.error("the event loop stands still, for %.1f s so far; it is at\n%s", still_s, stack.rstrip())


def cpu_clock(thread: int) -> Callable[[], float]:
    """The processor time that a thread of this process has used; always 0 where the system does not tell others."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return lambda: 0.0
    clock = time.pthread_getcpuclockid(thread)
    return lambda: time.clock_gettime(clock)
