"""Limits the connections that have not proved yet that they know the secret. A new connection is always admitted; at
the limit the oldest unauthenticated one is shut down. Idle connections can therefore not keep others out."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time

logger = logging.getLogger(__name__)

MAX_GREETINGS = 16
LOG_FULL_EVERY_S = 60.0


class Newcomers:
    """Thread-safe. A connection that gives way is shut down, which ends its greeting with an error."""

    def __init__(self, most: int = MAX_GREETINGS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._waiting: dict[socket.socket, None] = {}  # the one that came first is the first
        self._logged_s: float | None = None

    def enter(self, connection: socket.socket) -> None:
        """Add a new connection, and shut down the oldest one if there are too many."""
        with self._lock:
            self._waiting[connection] = None
            if len(self._waiting) <= self._most:
                return
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
            now_s = time.monotonic()
            if self._logged_s is not None and now_s - self._logged_s < LOG_FULL_EVERY_S:
                return
            self._logged_s = now_s
        logger.warning("more than %d connections have not been greeted; the oldest ones give way", self._most)

    def leave(self, connection: socket.socket) -> bool:
        """Remove a connection whose greeting has ended, before it is closed. Returns False if it had to give way."""
        with self._lock:
            return self._waiting.pop(connection, connection) is None
