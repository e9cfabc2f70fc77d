"""The link between `headway serve` and the front end that it starts: the messages, and the front end's side of it.

    front end ──► parent    Bound, with the listening socket, which the parent keeps · Ready · a Tick of the event loop
                            every second · Stopping · Over, after the last tick
    parent ──► front end    one byte for each signal by which the parent was asked to stop: its number

A front end that was started in another way, as in tests, has a link without a parent, which sends nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

from headway.child_process import end_with_parent, show_stacks_on_signal

if TYPE_CHECKING:
    import asyncio

FRONT_END_VARIABLE = "HEADWAY_FRONT_END"
"""Environment variable that the parent sets for its front end. It has the parent's process id, the file descriptors of
the link and of the listening socket (-1 for the first front end), and the number of earlier front ends."""
TICK_S = 1.0
BOUND, READY, TICK, STOPPING, OVER = b"B", b"R", b"T", b"S", b"O"
_MESSAGE = struct.Struct("<cdd")


def pack(kind: bytes, first: float = 0.0, second: float = 0.0) -> bytes:
    """Return a message to the parent. `Bound` has two numbers: the hang timeout and the longest time for a stop."""
    return _MESSAGE.pack(kind, first, second)


class MessageReader:
    """Splits the bytes from a front end into messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[tuple[bytes, float, float]]:
        """Add bytes, and return the messages that they complete."""
        data = self._rest + data
        whole = len(data) - len(data) % _MESSAGE.size
        self._rest = data[whole:]
        return list(_MESSAGE.iter_unpack(data[:whole]))


class ParentLink:
    """The front end's side of the link."""

    def __init__(
        self, connection: socket.socket | None = None, listener: socket.socket | None = None, num_restarts: int = 0
    ) -> None:
        self.listener = listener
        """The listening socket inherited from the previous front end, if there was one."""
        self.num_restarts = num_restarts
        """How often the parent has restarted the front end."""
        self._connection = connection
        self._num_stops = 0
        if connection is not None:
            connection.setblocking(False)

    @classmethod
    def from_environment(cls) -> ParentLink:
        """Return the link that the parent has prepared, or one without a parent. From now on this process ends with
        its parent."""
        inherited = os.environ.pop(FRONT_END_VARIABLE, None)
        if inherited is None:
            return cls()
        parent_pid, link_fd, listener_fd, num_restarts = map(int, inherited.split(","))
        show_stacks_on_signal()
        end_with_parent(parent_pid)
        link = cls(
            socket.socket(fileno=link_fd), socket.socket(fileno=listener_fd) if listener_fd >= 0 else None, num_restarts
        )
        for descriptor in (link_fd, listener_fd):
            if descriptor >= 0:
                os.set_inheritable(descriptor, False)
        return link

    def bound(self, listener: socket.socket, *, hang_timeout_s: float, stop_s: float) -> None:
        """Send the listening socket to the parent, which keeps it for the next front end. The parent kills a front end
        whose event loop is blocked for `hang_timeout_s` seconds (0: no limit) or that takes longer than `stop_s`
        seconds to stop."""
        if self._connection is not None:
            socket.send_fds(self._connection, [pack(BOUND, hang_timeout_s, stop_s)], [listener.fileno()])

    def follow(self, loop: asyncio.AbstractEventLoop, stop: Callable[[int, bool], None]) -> None:
        """Begin to send ticks of this event loop to the parent. When the parent receives a signal to stop, call `stop`
        with the signal's number and whether it is the first one."""
        if self._connection is None:
            return
        connection = self._connection

        def tick() -> None:
            self._send(TICK)
            loop.call_later(TICK_S, tick)

        def listen() -> None:
            data = b""
            with contextlib.suppress(ConnectionError):
                data = connection.recv(64)
            for number in data:
                self._num_stops += 1
                stop(number, self._num_stops == 1)
            if not data:  # the parent is gone, and no other process could stop this one
                os.killpg(os.getpgrp(), signal.SIGKILL)

        loop.add_reader(connection, listen)
        tick()

    def ready(self) -> None:
        """Tell the parent that requests are served."""
        self._send(READY)

    def stopping(self) -> None:
        """Tell the parent that this front end is about to end, so that it accepts no connections for another one."""
        self._send(STOPPING)

    def over(self) -> None:
        """Tell the parent that the event loop ends and will not tick any more."""
        self._send(OVER)

    def _send(self, kind: bytes) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):  # the parent is gone, or stopped and does not read
                self._connection.send(pack(kind))
