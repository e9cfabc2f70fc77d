"""Lets several front ends share an engine: combines their connections into the one channel that its loop uses.

    parent        the process that started this one, with the first message; when it is gone, so is the engine
    front end 0   ┐ over TCP. Each is greeted first (`wire.greeting`) in a separate thread. Then it sends its options,
    front end 1   ┘ as if it had started the engine, and gets `EngineReady`, or the reason why it cannot use this engine

A front end's request ids get its number as a prefix here, which is removed on the way back, so that front ends cannot
interfere with each other. When a front end leaves or does not read its messages, its requests are aborted. The engine
ends when its last front end shuts it down, or after `LINGER_S` without any.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from headway.errors import HeadwayError
from headway.sampling_params import SamplingParams
from headway.wire.channel import ChannelClosedError, EngineChannel
from headway.wire.greeting import greet, prepare_tcp
from headway.wire.messages import (
    AbortRequests,
    AddRequest,
    BlockSnapshot,
    CacheNews,
    Delta,
    EngineReady,
    FromEngine,
    Heartbeat,
    ReportCache,
    ResetCache,
    Shutdown,
    Start,
    StartUpFailed,
    StepBatch,
    StepSnapshot,
    ToEngine,
    UnreadableRequest,
    Watch,
)
from headway.wire.newcomers import Newcomers

logger = logging.getLogger(__name__)

LINGER_S = 60.0
"""How long an engine waits without a front end, so that a restarted front end finds it still loaded."""
PLACE_OPTIONS = ("num_threads",)
"""Options that the placement of an engine may set; front ends need not agree on them."""


def identity(start: Start) -> dict[str, Any]:
    """The part of `Start` on which front ends that share an engine must agree: its options, its role if it has one,
    and whether its reports have tokens."""
    own = {name: value for name, value in start.options.items() if name not in PLACE_OPTIONS}
    if start.blocks is not None:
        own["role"] = start.blocks.role
    return {**own, "reports_tokens": True} if start.reports_tokens else own


class FrontEnd:
    """The engine's state for one front end."""

    def __init__(self, number: int, channel: EngineChannel, address: str) -> None:
        self.prefix = f"{number}/"
        self.channel = channel
        self.address = address
        self.has_joined = False
        """Whether it was sent `EngineReady`."""
        self.reports_cache = False
        self.watches = False
        self.leaves_at_s: float | None = None
        """The time at which it leaves even with open requests; None: it stays."""
        self.request_ids: set[str] = set()
        """The ids of its unfinished requests, with the prefix."""
        self.params: SamplingParams | None = None
        """The parameters of its last request."""


class SharedChannel:
    """The channel of an `EngineLoop` to several front ends. One thread receives; any may send."""

    def __init__(
        self,
        parent: EngineChannel,
        listener: socket.socket,
        *,
        secret: bytes,
        options: Mapping[str, Any],
        ready: EngineReady,
        linger_s: float = LINGER_S,
        on_heartbeat_s: Callable[[float], None] = lambda interval_s: None,
    ) -> None:
        """`options`: the engine's `identity`, which front ends must match. `on_heartbeat_s` is called with the
        heartbeat interval that a front end wants."""
        self._parent = parent
        self._on_heartbeat_s = on_heartbeat_s
        self._listener = listener
        self._secret = secret
        self._options = dict(options)
        self._ready = ready
        self._linger_s = linger_s
        self._front_ends: tuple[FrontEnd, ...] = ()  # replaced, never changed: another thread may be sending to them
        self._unreachable: set[FrontEnd] = set()  # found when something was sent
        self._greeted: queue.SimpleQueue[tuple[socket.socket, str]] = queue.SimpleQueue()
        self._num_come = 0
        self._newcomers = Newcomers()
        self._alone_since_s: float | None = time.monotonic()
        self._is_ending = False
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        threading.Thread(target=self._accept, name="front ends", daemon=True).start()

    # ---- what the loop calls --------------------------------------------------------------------------------------

    def receive(self, *, timeout_s: float) -> list[ToEngine | UnreadableRequest]:
        """Like `EngineChannel.receive`. Raises `ChannelClosedError` when the parent is gone."""
        self._wait(min(timeout_s, self._linger_s) if not self._front_ends else timeout_s)
        messages = self._parent.receive(timeout_s=0.0)
        self._admit_new()
        for front_end in self._front_ends:
            messages += self._receive_from(front_end)
        if self._is_over():
            messages.append(Shutdown(0.0))
        return messages

    def send(self, message: FromEngine) -> None:
        """Send a message to the front ends that it concerns."""
        if isinstance(message, StepBatch):
            self._send_step(message)
            return
        for front_end in self._front_ends:
            if front_end.has_joined and _is_for(message, front_end):
                self._send_to(front_end, message)
        if isinstance(message, Heartbeat):
            self._parent.send(message)

    def wake(self) -> None:
        """End a wait of `receive`. Safe to call from any thread."""
        with contextlib.suppress(OSError):  # it is full, so the wait ends anyway
            self._wake.send(b".")

    def flush(self, *, timeout_s: float) -> bool:
        """Wait until everything is sent, at most `timeout_s` for each. Returns whether it was."""
        is_sent = True
        for front_end in self._front_ends:
            try:
                is_sent &= front_end.channel.flush(timeout_s=timeout_s)
            except ChannelClosedError:
                is_sent = False
        return is_sent

    def close(self) -> None:
        """Close all connections."""
        self._listener.close()
        for front_end in self._front_ends:
            front_end.channel.close()
        self._parent.close()

    # ---- front ends that come and go ------------------------------------------------------------------------------

    def _accept(self) -> None:
        """Accept connections, in a separate thread. A silent or invalid connection delays no other."""
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:  # it was closed
                return
            self._newcomers.enter(connection)
            threading.Thread(target=self._greet, args=(connection, f"{address[0]}:{address[1]}")).start()

    def _greet(self, connection: socket.socket, address: str) -> None:
        try:
            prepare_tcp(connection)
            greet(connection, self._secret, is_engine=True)
        except (HeadwayError, OSError) as error:
            if self._newcomers.leave(connection):
                logger.warning("a connection from %s is refused: %s", address, error)
            connection.close()
            return
        if self._newcomers.leave(connection):
            self._greeted.put((connection, address))
            self.wake()
        else:
            connection.close()

    def _admit_new(self) -> None:
        while not self._greeted.empty():
            connection, address = self._greeted.get()
            channel = EngineChannel(connection, waits_for_reader=False)
            self._front_ends += (FrontEnd(self._num_come, channel, address),)
            self._num_come += 1
            self._alone_since_s = None

    def _join(self, front_end: FrontEnd, start: Start) -> None:
        """Send a front end `EngineReady` if this is the engine that it wants, otherwise the reason why not."""
        wanted = identity(start)
        if wanted != self._options:
            names = sorted(
                name for name in wanted.keys() | self._options.keys() if wanted.get(name) != self._options.get(name)
            )
            logger.warning("a front end at %s wants another engine: %s differ", front_end.address, ", ".join(names))
            self._send_to(front_end, StartUpFailed(f"The engine there was started with other options: {names}."))
            front_end.leaves_at_s = time.monotonic()
            return
        logger.info("a front end at %s has joined", front_end.address)
        front_end.has_joined, front_end.reports_cache = True, start.reports_cache
        self._on_heartbeat_s(start.heartbeat_s)
        self._send_to(front_end, self._ready)

    def _drop(self, front_end: FrontEnd) -> list[ToEngine | UnreadableRequest]:
        """Remove a front end that is gone. Returns the messages for the engine, which abort its requests."""
        logger.info("the front end at %s is gone, with %d requests", front_end.address, len(front_end.request_ids))
        self._front_ends = tuple(other for other in self._front_ends if other is not front_end)
        self._unreachable.discard(front_end)
        front_end.channel.close()
        if not self._front_ends:
            self._alone_since_s = time.monotonic()
        messages: list[ToEngine | UnreadableRequest] = [AbortRequests(sorted(front_end.request_ids))]
        if front_end.watches:
            messages.append(self._watch())
        return messages

    def _is_over(self) -> bool:
        """Whether there has been no front end for too long."""
        if self._alone_since_s is None or self._is_ending or time.monotonic() < self._alone_since_s + self._linger_s:
            return False
        logger.info("no front end for %g s: the engine ends", self._linger_s)
        self._is_ending = True
        return True

    # ---- messages -------------------------------------------------------------------------------------------------

    def _wait(self, timeout_s: float) -> None:
        """Wait until data has arrived or can be sent."""
        poll = select.poll()
        for descriptor in (*self._parent.descriptors, self._woken.fileno()):
            poll.register(descriptor, select.POLLIN)
        for front_end in self._front_ends:
            events = select.POLLIN | (select.POLLOUT if front_end.channel.has_unsent else 0)
            (descriptor,) = front_end.channel.descriptors
            poll.register(descriptor, events)
        for descriptor, _ in poll.poll(timeout_s * 1e3):
            if descriptor == self._woken.fileno():
                self._woken.recv(4096)

    def _receive_from(self, front_end: FrontEnd) -> list[ToEngine | UnreadableRequest]:
        try:
            if front_end in self._unreachable:
                raise ChannelClosedError
            received = front_end.channel.receive(timeout_s=0.0)
        except ChannelClosedError:
            return self._drop(front_end)
        except (HeadwayError, msgspec.DecodeError) as error:
            logger.error("the front end at %s sent something that is no message: %s", front_end.address, error)
            return self._drop(front_end)
        messages: list[ToEngine | UnreadableRequest] = []
        for message in received:
            messages += self._translate(front_end, message)
        if front_end.leaves_at_s is not None:
            is_done = not front_end.request_ids and not front_end.channel.has_unsent
            if is_done or time.monotonic() >= front_end.leaves_at_s:
                messages += self._drop(front_end)
        return messages

    def _translate(
        self, front_end: FrontEnd, message: ToEngine | UnreadableRequest
    ) -> list[ToEngine | UnreadableRequest]:
        """Translate a front end's message into messages for the engine."""
        if isinstance(message, Start):
            self._join(front_end, message)
            return []
        if isinstance(message, AddRequest):
            front_end.params = params = front_end.params if message.params is None else message.params
            request_id = front_end.prefix + message.request_id
            front_end.request_ids.add(request_id)
            if params is None:
                return [UnreadableRequest(request_id, "the request has no parameters", "params")]
            return [msgspec.structs.replace(message, request_id=request_id, params=params)]
        if isinstance(message, UnreadableRequest):
            front_end.params = None
            front_end.request_ids.add(front_end.prefix + message.request_id)
            return [msgspec.structs.replace(message, request_id=front_end.prefix + message.request_id)]
        if isinstance(message, AbortRequests):
            request_ids = [front_end.prefix + request_id for request_id in message.request_ids]
            front_end.request_ids.difference_update(request_ids)
            return [AbortRequests(request_ids)]
        if isinstance(message, Watch):
            front_end.watches = message.on
            return [self._watch()]
        if isinstance(message, Shutdown):
            if len(self._front_ends) == 1:
                return [message]
            front_end.leaves_at_s = time.monotonic() + message.drain_s
            return []
        assert isinstance(message, ReportCache | ResetCache)
        return [message]

    def _watch(self) -> Watch:
        return Watch(on=any(front_end.watches for front_end in self._front_ends))

    def _send_step(self, step: StepBatch) -> None:
        for front_end in self._front_ends:
            if not front_end.has_joined:
                continue
            prefix = front_end.prefix
            deltas = [delta for delta in step.deltas if delta.request_id.startswith(prefix)]
            begun = [request_id.removeprefix(prefix) for request_id in step.begun if request_id.startswith(prefix)]
            front_end.request_ids.difference_update([delta.request_id for delta in deltas if delta.is_last])
            own = [_with_id(delta, delta.request_id.removeprefix(prefix)) for delta in deltas]
            self._send_to(front_end, StepBatch(own, step.stats, begun))

    def _send_to(self, front_end: FrontEnd, message: FromEngine) -> None:
        try:
            front_end.channel.send(message)
        except ChannelClosedError:
            self._unreachable.add(front_end)


def _is_for(message: FromEngine, front_end: FrontEnd) -> bool:
    if isinstance(message, StepSnapshot | BlockSnapshot):
        return front_end.watches
    return front_end.reports_cache if isinstance(message, CacheNews) else True


def _with_id(delta: Delta, request_id: str) -> Delta:
    return msgspec.structs.replace(delta, request_id=request_id)
