"""The engine's end of the socket to a front end: whole messages, in order. Unsent bytes are buffered."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time

from headway.wire.frames import FrameReader, pack
from headway.wire.messages import (
    FromEngine,
    ToEngine,
    UnreadableRequest,
    decode_to_engine,
)

RECEIVE_BYTES = 2**20
MAX_UNSENT_BYTES = 64 * 2**20
"""The size of unsent data above which the engine waits for the front end, or gives it up."""


class ChannelClosedError(Exception):
    """The front end has closed its end, or is gone."""


class EngineChannel:
    """The engine process's end: whole messages, in order, over a connected socket.

    One thread receives; any may send.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        wakeup: socket.socket | None = None,
        waker: socket.socket | None = None,
        waits_for_reader: bool = True,
    ) -> None:
        """Bytes that arrive on `wakeup` end a wait and have no other meaning. `waker` is its other end, which does not
        block. `waits_for_reader`: wait for a front end that reads too slowly, instead of giving it up."""
        connection.setblocking(False)
        self._socket = connection
        self._waits_for_reader = waits_for_reader
        self._wakeup = wakeup
        self._waker = waker
        self._frames = FrameReader()
        self._unsent = bytearray()
        self._sending = threading.Lock()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        if wakeup is not None:
            wakeup.setblocking(False)
            self._poll.register(wakeup, select.POLLIN)

    def receive(self, *, timeout_s: float) -> list[ToEngine | UnreadableRequest]:
        """Return all messages that have arrived. If there are none, wait for one, at most `timeout_s`.

        Raises `ChannelClosedError`, and `BrokenFrameError` or `msgspec.DecodeError` for data that is no message.
        """
        messages: list[ToEngine | UnreadableRequest] = []
        while self._wait_for_input(0.0 if messages else timeout_s):
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                raise ChannelClosedError from error
            if not data:
                raise ChannelClosedError
            messages += [decode_to_engine(payload) for payload in self._frames.feed(data)]
        return messages

    def send(self, message: FromEngine) -> None:
        """Queue a message and send as much as possible without waiting. Raises `ChannelClosedError`."""
        frame = pack(message)
        with self._sending:
            self._unsent += frame
        self._send_some()
        if len(self._unsent) > MAX_UNSENT_BYTES:
            if not self._waits_for_reader:
                raise ChannelClosedError("it does not read what it is sent")
            self.flush(timeout_s=float("inf"))

    def wake(self) -> None:
        """End a wait of `receive`. Safe to call from any thread."""
        if self._waker is not None:
            with contextlib.suppress(OSError):  # it is full, so the wait ends anyway; or closed
                self._waker.send(b".")

    def flush(self, *, timeout_s: float) -> bool:
        """Wait until everything is sent, at most `timeout_s`. Returns whether it was."""
        deadline_s = time.monotonic() + timeout_s
        writable = select.poll()
        writable.register(self._socket, select.POLLOUT)
        while self._unsent and (left_s := deadline_s - time.monotonic()) > 0:
            writable.poll(min(left_s, 1.0) * 1e3)
            self._send_some()
        return not self._unsent

    def close(self) -> None:
        """Close the socket, so that the front end knows that nothing more comes."""
        self._socket.close()

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors to poll to know when `receive` has something to do."""
        return tuple(each.fileno() for each in (self._socket, self._wakeup) if each is not None)

    @property
    def has_unsent(self) -> bool:
        """Whether `receive` would also send something."""
        return bool(self._unsent)

    def _wait_for_input(self, timeout_s: float) -> bool:
        """Whether the front end has sent something (or has gone), after waiting at most `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            if self._unsent:
                self._poll.modify(self._socket, select.POLLIN | select.POLLOUT)
            events = dict(self._poll.poll(max(0.0, deadline_s - time.monotonic()) * 1e3))
            if self._unsent:
                self._poll.modify(self._socket, select.POLLIN)
                self._send_some()
            happened = events.get(self._socket.fileno(), 0)
            if happened & ~select.POLLOUT:
                return True
            if self._wakeup is not None and self._wakeup.fileno() in events:
                with contextlib.suppress(BlockingIOError):
                    self._wakeup.recv(RECEIVE_BYTES)
                return False
            if not events or (timeout_s == 0.0):
                return False

    def _send_some(self) -> None:
        try:
            with self._sending:
                while self._unsent:
                    num_sent = self._socket.send(self._unsent)
                    del self._unsent[:num_sent]
        except BlockingIOError:
            pass
        except OSError as error:
            raise ChannelClosedError from error
