"""The connection between `headway serve` and the front end that it has started: what is said, and the front end's end.

    front end ──► parent    Bound, with the listening socket, which the parent keeps · Ready · a Tick of the event loop
                            every second · Stopping · Over, after the last tick
    parent ──► front end    one byte for each signal by which the parent was asked to stop: its number

A front end that was started by other means, as in tests, has a link without a parent, which says nothing.
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
"""Set by the parent for its front end: its process id, the descriptor of the link, that of the listening socket (-1 in
the first life) and how many front ends there were before."""
TICK_S = 1.0
BOUND, READY, TICK, STOPPING, OVER = b"B", b"R", b"T", b"S", b"O"
_MESSAGE = struct.Struct("<cdd")


def pack(kind: bytes, first: float = 0.0, second: float = 0.0) -> bytes:
    """A message to the parent. `Bound` has two numbers: the hang timeout, and how long a stop may take."""
    return _MESSAGE.pack(kind, first, second)


class MessageReader:
    """Cuts what a front end has sent into messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[tuple[bytes, float, float]]:
        """Take the next bytes; returns the messages that they complete."""
        data = self._rest + data
        whole = len(data) - len(data) % _MESSAGE.size
        self._rest = data[whole:]
        return list(_MESSAGE.iter_unpack(data[:whole]))


class ParentLink:
    """The front end's end."""

    def __init__(
        self, connection: socket.socket | None = None, listener: socket.socket | None = None, num_restarts: int = 0
    ) -> None:
        self.listener = listener
        """The listening socket of the front end before this one, if there was one."""
        self.num_restarts = num_restarts
        """How often the parent has started a front end again."""
        self._connection = connection
        self._num_stops = 0
        if connection is not None:
            connection.setblocking(False)

    @classmethod
    def from_environment(cls) -> ParentLink:
        """As the parent has left it, if there is a parent. From now on this process dies with it."""
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
        """Hand the listening socket to the parent, which keeps it for the next front end. An event loop that stands
        still for `hang_timeout_s` seconds (0: for ever) is ended, and so is a front end that takes more than `stop_s`
        seconds to stop."""
        if self._connection is not None:
            socket.send_fds(self._connection, [pack(BOUND, hang_timeout_s, stop_s)], [listener.fileno()])

    def follow(self, loop: asyncio.AbstractEventLoop, stop: Callable[[int, bool], None]) -> None:
        """From now on the parent is told that this event loop turns, and `stop` is called when the parent is asked to
        stop, with the number of the signal, and whether it is the first."""
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
            if not data:  # the parent is gone, and with it whoever could stop this process
                os.killpg(os.getpgrp(), signal.SIGKILL)

        loop.add_reader(connection, listen)
        tick()

    def ready(self) -> None:
        """Requests are served."""
        self._send(READY)

    def stopping(self) -> None:
        """This front end is about to end: the parent takes no connections for another one."""
        self._send(STOPPING)

    def over(self) -> None:
        """The event loop ends, and does not tick any more."""
        self._send(OVER)

    def _send(self, kind: bytes) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):  # the parent is stopped and reads nothing, or is gone
                self._connection.send(pack(kind))
