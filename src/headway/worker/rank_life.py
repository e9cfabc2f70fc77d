"""Signs of life between a rank's process and rank 0, over a socket pair.

    rank      sends a byte every `BEAT_S` from a separate thread, during long steps too, and ends when the socket does
    rank 0    counts the time since the last byte, and says which rank is silent: stopped, swapped out or in the kernel

Time counts from a rank's first sign of life. If rank 0's process itself was held up, at most two ticks count, because
bytes that ranks sent meanwhile have not been read.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

BEAT_S = 1.0
TICK_S = 0.5
SILENT_S = 10.0
"""A rank that is silent for longer is lost."""
LOADING_SILENT_S = 60.0
"""The limit before a rank is ready. While libraries are imported, Python's lock may be held for long."""


def show_life(life: socket.socket) -> None:
    """In a rank, in a thread that never returns: the process ends when rank 0's end of the socket is closed."""
    life.settimeout(BEAT_S)
    while True:
        with contextlib.suppress(TimeoutError):
            try:
                life.send(b".")
                if life.recv(1):
                    continue
            except ConnectionError:
                pass
            os._exit(1)  # whatever this rank waits for will not come


@dataclass
class _Followed:
    name: str
    on_silent: Callable[[str], None]
    silent_s: float | None = None
    """The time since the last sign of life; None: there was none yet."""


class LifeWatch:
    """Follows the processes of all ranks, in a thread that ends with the last of them."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = LOADING_SILENT_S
        self._now = now
        self._followed: dict[socket.socket, _Followed] = {}

    def follow(self, life: socket.socket, name: str, on_silent: Callable[[str], None]) -> None:
        """Follow a rank. `on_silent` is called once with a message if the rank is silent for too long. Must be called
        before `start`."""
        life.setblocking(False)
        self._followed[life] = _Followed(name, on_silent)

    def start(self) -> None:
        """Begin to follow."""
        threading.Thread(target=self._run, name="life of ranks", daemon=True).start()

    def close(self) -> None:
        """Close the sockets, which ends all ranks."""
        for life in list(self._followed):
            with contextlib.suppress(OSError):
                life.shutdown(socket.SHUT_RDWR)

    def pass_time(self, seconds: float) -> None:
        """Read the signs of life, and let `seconds` pass since the last call."""
        for life, rank in list(self._followed.items()):
            try:
                if life.recv(4096):
                    rank.silent_s = 0.0
                else:  # one end is closed
                    self._forget(life)
            except BlockingIOError:
                if rank.silent_s is not None:
                    rank.silent_s += min(seconds, 2 * TICK_S)
                    if rank.silent_s > self.limit_s:
                        self._forget(life)
                        rank.on_silent(f"{rank.name} has given no sign of life for {self.limit_s:g} s")
            except OSError:
                self._forget(life)

    def _forget(self, life: socket.socket) -> None:
        del self._followed[life]
        life.close()

    def _run(self) -> None:
        before_s = self._now()
        while self._followed:
            poll = select.poll()
            for life in self._followed:
                poll.register(life, select.POLLIN)
            poll.poll(TICK_S * 1e3)
            now_s = self._now()
            self.pass_time(now_s - before_s)
            before_s = now_s
