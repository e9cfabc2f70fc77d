"""Publishes events of the prefix caches over ZeroMQ, as vLLM does.

    event loop ── offer ──► queue ──► thread ──► PUB      topic · sequence number · batch      to all subscribers
                                        └──────► ROUTER   the same for one of them that has missed some

A subscriber that sees a gap between two sequence numbers (8 bytes, big-endian) sends the first one that it misses to
the ROUTER socket. It gets the batches from there on that are still kept, and then a message with the number -1 and no
batch.

Neither the event loop nor the thread waits for a subscriber. A slow one does not get what exceeds its queue (`hwm`). A
replay to a slow one continues when there is room, and ends if there is none for too long. Batches are kept for replays
up to a number and a size.

This module needs the package of the extra `gateway`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator

import msgspec
import zmq

from headway.errors import ConfigError
from headway.front.kv_event_format import EventBatch
from headway.front.kv_events_config import KVEventsConfig

logger = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)
"""The sequence number of the message that ends a replay."""


class ReplayBuffer:
    """The last batches, as they were published, with consecutive numbers."""

    def __init__(self, *, max_steps: int, max_bytes: int) -> None:
        self.end = 0
        """The number of the next batch."""
        self._max_steps = max_steps
        self._max_bytes = max_bytes
        self._payloads: deque[bytes] = deque()
        self._num_bytes = 0

    def append(self, payload: bytes) -> int:
        """Keep a batch and return its number. The oldest ones are dropped if there is no room."""
        self._payloads.append(payload)
        self._num_bytes += len(payload)
        while len(self._payloads) > self._max_steps or self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._payloads.popleft())
        self.end += 1
        return self.end - 1

    def from_number(self, number: int) -> tuple[int, bytes] | None:
        """Return the batch with this number, or the oldest one if it was dropped; None if it does not exist yet."""
        start = self.end - len(self._payloads)
        number = max(number, start)
        return None if number >= self.end else (number, self._payloads[number - start])


class _Replay:
    """A replay to one subscriber."""

    def __init__(self, client: bytes, number: int, now_s: float) -> None:
        self.client = client
        self.number = number
        self.sent_s = now_s


class Replays:
    """Answers requests for missed batches. One thread uses it."""

    MOST = 16
    """Replays at once. Further requests wait in the socket, which holds few of them."""
    BATCHES_IN_A_TURN = 256
    PATIENCE_S = 10.0
    """A replay ends if its subscriber reads nothing for this long."""
    QUEUED = 1000
    """Batches that wait for one subscriber."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, topic: bytes, buffer: ReplayBuffer
    ) -> None:
        self.socket = context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, self.QUEUED),
            (zmq.RCVHWM, self.MOST),
            (zmq.MAXMSGSIZE, 64),  # a request is 8 bytes
            (zmq.ROUTER_MANDATORY, 1),  # says whether a message was taken
        ):
            self.socket.setsockopt(option, value)
        _bind(self.socket, "replay_endpoint", address)
        self._topic = topic
        self._buffer = buffer
        self._running: deque[_Replay] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether replays are unfinished."""
        return bool(self._running)

    @property
    def has_room(self) -> bool:
        """Whether one more replay may begin."""
        return len(self._running) < self.MOST

    def serve(self) -> None:
        """Begin replays that were asked for, and send what is due and fits."""
        while self.has_room and (replay := self._take_request()) is not None:
            self._running.append(replay)
        for _ in range(len(self._running)):
            replay = self._running.popleft()
            if self._goes_on(replay):
                self._running.append(replay)

    def _take_request(self) -> _Replay | None:
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if len(frames) == 3 and not frames[1] and len(frames[2]) == 8:
                return _Replay(frames[0], int.from_bytes(frames[2], "big"), time.monotonic())
            logger.debug("a request for a replay is not an empty frame and 8 bytes")

    def _goes_on(self, replay: _Replay) -> bool:
        """Send batches of a replay. Returns whether there are more."""
        try:
            for _ in range(self.BATCHES_IN_A_TURN):
                found = self._buffer.from_number(replay.number)
                if found is None:
                    self._send(replay, b"", END, b"")
                    return False
                number, payload = found
                self._send(replay, self._topic, number.to_bytes(8, "big"), payload)
                replay.number = number + 1
        except zmq.Again:  # there is no room
            return time.monotonic() - replay.sent_s < self.PATIENCE_S
        except zmq.ZMQError:  # the subscriber has left
            return False
        return True

    def _send(self, replay: _Replay, *frames: bytes) -> None:
        self.socket.send_multipart([replay.client, b"", *frames], zmq.NOBLOCK)
        replay.sent_s = time.monotonic()


class KVEventPublisher:
    """Publishes batches from a thread of its own. `offer` belongs to the thread that created it."""

    RETRY_MS = 10
    """The pause before a replay without room goes on."""
    CLOSE_S = 2.0
    LINGER_S = 0.5
    """How long messages may take to leave after the end."""

    def __init__(self, config: KVEventsConfig, *, topic: str) -> None:
        """`topic`: the first frame of all messages. Raises `ConfigError` if an address cannot be used."""
        self._queue: deque[EventBatch] = deque()
        self._max_queued = config.max_queue_size
        self._topic = topic.encode()
        self._buffer = ReplayBuffer(max_steps=config.buffer_steps, max_bytes=config.buffer_bytes)
        self._encode = msgspec.msgpack.Encoder().encode
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._is_closing = False
        try:
            self._open(config)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv events", daemon=True)
        self._thread.start()

    def _open(self, config: KVEventsConfig) -> None:
        self._pub = self._context.socket(zmq.PUB)
        for option, value in (
            (zmq.LINGER, int(self.LINGER_S * 1e3)),
            (zmq.SNDHWM, config.hwm),
            (zmq.MAXMSGSIZE, 4096),  # of what subscribers send: their topics
        ):
            self._pub.setsockopt(option, value)
        (_bind if config.listens else _connect)(self._pub, "endpoint", config.address)
        self._replays: Replays | None = None
        if config.replay_endpoint is not None:
            self._replays = Replays(self._context, config.replay_endpoint, self._topic, self._buffer)
        self._woken, self._wake = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._woken.bind("inproc://wake")
        self._wake.connect("inproc://wake")

    @property
    def endpoints(self) -> Iterator[str]:
        """The addresses, with the ports that were chosen if the configuration left them open."""
        yield self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        if self._replays is not None:
            yield self._replays.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def offer(self, batch: EventBatch) -> bool:
        """Publish a batch soon, unless too many wait already. Returns whether it was taken."""
        if not self._thread.is_alive():
            return True  # nothing is published any more, which was logged
        if len(self._queue) >= self._max_queued:
            return False
        self._queue.append(batch)
        with contextlib.suppress(zmq.Again):  # it has been woken often enough
            self._wake.send(b"", zmq.NOBLOCK)
        return True

    def close(self) -> None:
        """Publish what waits, and end the thread."""
        self._is_closing = True
        with contextlib.suppress(zmq.Again):
            self._wake.send(b"", zmq.NOBLOCK)
        self._thread.join(self.CLOSE_S)
        if not self._thread.is_alive():
            self._wake.close()
            self._context.term()

    def _run(self) -> None:
        try:
            while not self._is_closing or self._queue:
                self._wait()
                self._publish()
                if self._replays is not None:
                    self._replays.serve()
        except Exception:
            logger.exception("events of the KV cache are not published any more")
        finally:
            for socket in (self._pub, self._woken, None if self._replays is None else self._replays.socket):
                if socket is not None:
                    socket.close()
            self._queue.clear()

    def _wait(self) -> None:
        poller, timeout_ms = zmq.Poller(), None
        poller.register(self._woken, zmq.POLLIN)
        if self._replays is not None:
            if self._replays.is_busy:
                timeout_ms = self.RETRY_MS
            if self._replays.has_room:
                poller.register(self._replays.socket, zmq.POLLIN)
        poller.poll(timeout_ms)
        with contextlib.suppress(zmq.Again):
            while True:
                self._woken.recv(zmq.NOBLOCK)

    def _publish(self) -> None:
        for _ in range(len(self._queue)):
            payload = self._encode(self._queue.popleft())
            number = self._buffer.append(payload)
            with contextlib.suppress(zmq.Again):
                self._pub.send_multipart([self._topic, number.to_bytes(8, "big"), payload], zmq.NOBLOCK)


def _bind(socket: zmq.Socket[bytes], name: str, address: str) -> None:
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise _wrong(name, address, error) from None


def _connect(socket: zmq.Socket[bytes], name: str, address: str) -> None:
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        raise _wrong(name, address, error) from None


def _wrong(name: str, address: str, error: zmq.ZMQError) -> ConfigError:
    return ConfigError(f"kv_events_config: '{name}' {address} cannot be used: {error.strerror}.")
