"""Engines without processes, for the two seams of the front end.

`FakeReplica` takes the place of a `Replica`: it notes what it is sent, and the test says what it says.

`FakeEngines` is a cluster whose engines are objects of the test's own event loop, at the other end of a real socket.
They answer as the small engine does, a token for each request in `step_s`, and live and die as processes do. In
`virtual_time` an hour of theirs takes milliseconds. What a request is called decides its fate:

    stuck-…  the step with which it enters does not end
    fatal-…  its engine dies with the step in which it enters
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import socket
import string
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from headway.errors import InvalidRequestError
from headway.front.connection import EngineProcess
from headway.front.deployment import Deployment
from headway.front.engine_client import EngineClient
from headway.front.placement import EngineSpec
from headway.front.supervision import Backoff, Patience
from headway.wire.engine_stats import EngineStats
from headway.wire.frames import FrameReader, pack
from headway.wire.messages import (
    AbortRequests,
    AddRequest,
    Delta,
    EngineReady,
    Heartbeat,
    Shutdown,
    Start,
    StartUpFailed,
    StepBatch,
    UnreadableRequest,
    decode_to_engine,
)

READY = EngineReady("m", 4096, 300, 1000, 4, 8, 64, "cpu", "float32")
REFUSAL = "the server is shutting down"


class FakeReplica:
    """One that is ready, until the test says something else."""

    def __init__(self, place: int = 0, *, blocks_at: str = "") -> None:
        self.place = place
        self.info: EngineReady | None = msgspec.structs.replace(READY, blocks_at=blocks_at)
        self.stats = EngineStats()
        self.is_ready = True
        self.is_leaving = False
        self.added: list[AddRequest] = []
        self.aborted: list[str] = []

    def add(self, request: AddRequest) -> None:
        if "unsendable" in request.request_id:
            raise InvalidRequestError("It cannot be stored.")
        self.added.append(request)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


@dataclass
class FakeEngines:
    """A cluster of them."""

    step_s: float = 0.01
    start_s: float = 0.5
    max_num_seqs: int = 8
    refuses: str = ""
    """Why no engine can be started."""
    engines: dict[int, FakeEngine] = field(default_factory=dict)
    """By place, those that were started last."""

    def specs(self, spec: EngineSpec, num_replicas: int) -> list[EngineSpec]:
        return [replace(spec, home=_Home(self, place)) for place in range(num_replicas)]

    def kill(self, place: int, kind: signal.Signals = signal.SIGKILL) -> None:
        self.engines[place].signal(kind)


@dataclass
class _Home:
    cluster: FakeEngines
    place: int
    is_shared = False
    num_gpus = 0

    async def open(self, start: Start) -> tuple[socket.socket, EngineProcess]:
        ours, theirs = socket.socketpair()
        engine = self.cluster.engines[self.place] = FakeEngine(self.cluster)
        await asyncio.get_running_loop().create_unix_connection(lambda: engine, sock=theirs)
        return ours, engine


_pids = itertools.count(1_000_000)


@dataclass
class _Sequence:
    num_prompt_tokens: int
    max_tokens: int
    num_tokens: int = 0


class FakeEngine(asyncio.Protocol):
    """One life of an engine process."""

    def __init__(self, cluster: FakeEngines) -> None:
        self.pid = next(_pids)
        self.returncode: int | None = None
        self.received: list[Any] = []
        self.is_stuck = False
        self._cluster = cluster
        self._is_stopped = False
        self._unread = b""
        self._frames = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._exited = asyncio.Event()
        self._work = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._start: Start | None = None
        self._params: Any = None
        self._drain_until_s: float | None = None
        self._live: dict[str, list[_Sequence]] = {}
        self.stats = EngineStats()

    # ---- as a process ---------------------------------------------------------------------------------------------

    def signal(self, kind: signal.Signals) -> None:
        if kind == signal.SIGSTOP:
            self._is_stopped = True
        elif kind == signal.SIGTERM:
            self._drain(30.0)
        else:
            self._exit(-kind)

    def kill(self) -> None:
        self._exit(-signal.SIGKILL)

    async def wait(self) -> int:
        await self._exited.wait()
        assert self.returncode is not None
        return self.returncode

    def _exit(self, status: int) -> None:
        if self.returncode is None:
            self.returncode = status
            for task in self._tasks:
                task.cancel()
            if self._transport is not None:
                self._transport.close()
            self._exited.set()

    # ---- as the end of a socket -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if not self._is_stopped:
            self._exit(1)

    def data_received(self, data: bytes) -> None:
        self._unread += data
        if not self._is_stopped and not self.is_stuck:
            unread, self._unread = self._unread, b""
            for payload in self._frames.feed(unread):
                self._receive(decode_to_engine(payload))

    def say(self, message: Any) -> None:
        if self._transport is not None and not self._is_stopped:
            self._transport.write(pack(message))

    # ---- as an engine ---------------------------------------------------------------------------------------------

    def _receive(self, message: Any) -> None:
        self.received.append(message)
        if isinstance(message, Start):
            self._start = message
            asyncio.get_running_loop().call_later(self._cluster.start_s, self._begin)
        elif isinstance(message, AddRequest):
            self._add(message)
        elif isinstance(message, UnreadableRequest):
            self.say(
                StepBatch(
                    [Delta(message.request_id, error=message.message, error_status=400, is_last=True)], self.stats
                )
            )
        elif isinstance(message, AbortRequests):
            for request_id in message.request_ids:
                self._live.pop(request_id, None)
            self._report([])
        elif isinstance(message, Shutdown):
            self._drain(message.drain_s)

    def _begin(self) -> None:
        assert self._start is not None
        if self.returncode is not None:
            return
        if self._cluster.refuses:
            self.say(StartUpFailed(self._cluster.refuses))
            self._exit(1)
            return
        if self._start.counted is not None:
            self.stats.go_on_from(self._start.counted)
        role = None if self._start.blocks is None else self._start.blocks.role
        blocks_at = f"tcp://host:{self.pid}" if role == "prefill" else ""
        self.say(msgspec.structs.replace(READY, max_num_seqs=self._cluster.max_num_seqs, blocks_at=blocks_at))
        self._tasks = [asyncio.create_task(self._beat()), asyncio.create_task(self._run())]

    async def _beat(self) -> None:
        assert self._start is not None
        turn_s = 0.0
        while True:
            await asyncio.sleep(self._start.heartbeat_s)
            turn_s = turn_s + self._start.heartbeat_s if self.is_stuck else 0.0
            self.say(Heartbeat(turn_s))

    def _drain(self, drain_s: float) -> None:
        self._drain_until_s = asyncio.get_running_loop().time() + drain_s
        self._work.set()

    def _add(self, request: AddRequest) -> None:
        self._params = params = self._params if request.params is None else request.params
        if self._drain_until_s is not None:
            self.say(StepBatch([_refused(request.request_id)], self.stats))
            return
        delivered = request.delivered or [([], False)] * params.n
        length, most = len(request.prompt_token_ids), params.max_tokens or 16
        self._live[request.request_id] = [
            _Sequence(length, most if not is_finished else 0, len(token_ids)) for token_ids, is_finished in delivered
        ]
        if request.request_id.startswith("fatal-"):
            asyncio.get_running_loop().call_later(self._cluster.step_s, self._exit, 139)
        self.is_stuck |= request.request_id.startswith("stuck-")
        self._work.set()

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            if not self._live:
                self._work.clear()
            await asyncio.sleep(self._cluster.step_s if self._live else 0.0)
            if self._live and not self._is_stopped and not self.is_stuck:
                self._step()
            if self._is_drained():
                self._report([_refused(request_id) for request_id in self._live])
                self._exit(0)

    def _is_drained(self) -> bool:
        if self._drain_until_s is None or self._is_stopped or self.is_stuck:
            return False
        return not self._live or asyncio.get_running_loop().time() >= self._drain_until_s

    def _step(self) -> None:
        deltas: list[Delta] = []
        for request_id, sequences in list(self._live.items())[: self._cluster.max_num_seqs]:
            own = [
                self._delta(request_id, index, sequence)
                for index, sequence in enumerate(sequences)
                if sequence.num_tokens < sequence.max_tokens
            ]
            if all(sequence.num_tokens >= sequence.max_tokens for sequence in sequences):
                del self._live[request_id]
                own[-1].is_last = True
            deltas += own
        self.stats.batch.num_steps += 1
        self.stats.batch.generation_tokens += len(deltas)
        self._report(deltas)

    def _delta(self, request_id: str, index: int, sequence: _Sequence) -> Delta:
        number = sequence.num_prompt_tokens + sequence.num_tokens
        sequence.num_tokens += 1
        is_over = sequence.num_tokens >= sequence.max_tokens
        letter = string.ascii_lowercase[number % 26]
        return Delta(request_id, index, letter, [number % 26], finish_reason="length" if is_over else None)

    def _report(self, deltas: list[Delta]) -> None:
        self.stats.batch.num_running = min(len(self._live), self._cluster.max_num_seqs)
        self.stats.batch.num_waiting = len(self._live) - self.stats.batch.num_running
        self.say(StepBatch(deltas, self.stats))


def _refused(request_id: str) -> Delta:
    return Delta(request_id, finish_reason="error", error=REFUSAL, error_status=503, is_last=True)


@contextlib.asynccontextmanager
async def serving(
    engines: FakeEngines, patience: Patience | None = None, *, resumes: bool = True, **deployment: Any
) -> AsyncIterator[EngineClient]:
    """A client of such engines."""
    made = Deployment(cluster=engines, log_level="CRITICAL", **deployment)
    client = EngineClient(
        made, patience=patience, backoff=lambda: Backoff(first_s=0.05, longest_s=0.1), resumes=resumes
    )
    await client.start()
    try:
        yield client
    finally:
        await client.shutdown()
