"""The engine as the front end knows it: requests in, streams of deltas out, whatever happens to the process behind.

    start() ──► ready ──► requests, streams ──► shutdown()
                  ▲            │ the process dies: every open stream ends with an error, health is bad at once
                  └─ back-off ─┘

A process that hangs, or whose loop is stuck in a step, makes health bad first and is killed and replaced later: see
`supervision`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from headway.errors import EngineStartError, EngineUnavailableError, InvalidRequestError
from headway.rpc.channel import EXIT_GRACE_S, EngineConnection, News
from headway.rpc.messages import (
    AbortRequests,
    AddRequest,
    BlockSnapshot,
    Delta,
    EngineReady,
    EngineStats,
    Heartbeat,
    Shutdown,
    Start,
    StepBatch,
    StepSnapshot,
    Watch,
)
from headway.rpc.streams import RequestStream, SnapshotStream
from headway.rpc.supervision import Backoff, Patience, Watchdog
from headway.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

ENGINE_STOPPED = "the engine stopped; please retry"
"""What the requests of an engine that has ended are told."""

TICK_S = 0.5
"""How often the watchdog looks. If this process itself was held up, no more than two of these count as time that passed
for the engine: what it sent meanwhile has not been read."""


@dataclass(frozen=True, slots=True)
class Health:
    """Whether requests are being served, and if not, why not. The reason may be shown to any client."""

    ok: bool
    reason: str


_HEALTHY = Health(True, "")


class EngineClient:
    """Everything here belongs to the event loop in which `start` was awaited."""

    def __init__(
        self,
        options: Mapping[str, Any] | None = None,
        *,
        factory: str | None = None,
        patience: Patience | None = None,
        backoff: Backoff | None = None,
        log_level: str = "INFO",
    ) -> None:
        """`options` are those of `EngineConfig`, flat. `factory` names another engine, see `engine_process`."""
        self.info: EngineReady | None = None
        """What the engine said of itself when it got ready; stays while it is being restarted."""
        self.stats: EngineStats | None = None
        """As of the last step. Counters go on over restarts."""
        self.num_restarts = 0
        self._options = dict(options or {})
        self._factory = factory
        self._log_level = log_level
        self._watchdog = Watchdog(patience or Patience())
        self._backoff = backoff or Backoff()
        self._connection: EngineConnection | None = None  # set while the engine takes requests
        self._process: EngineConnection | None = None  # the last one that was started, perhaps gone
        self._problem: str | None = "the engine is starting"
        self._was_well = True
        self._streams: dict[str, RequestStream] = {}
        self._sent_params: SamplingParams | None = None  # of the last request that this process got
        self._aborted: list[str] = []
        self._viewers: list[SnapshotStream] = []
        self._step_listeners: list[Callable[[EngineStats], None]] = []
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []
        self._ready_s = 0.0

    # ---- its life -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine and wait until it takes requests; `EngineStartError` if it cannot. From then on it is
        started again whenever it ends."""
        watching = asyncio.create_task(self._watch())
        self._tasks.append(watching)
        try:
            await self._open()
        except BaseException:
            watching.cancel()
            raise
        self._tasks.append(asyncio.create_task(self._keep_running()))

    async def shutdown(self, drain_s: float = 0.0) -> None:
        """Take no new requests, let the others go on for at most `drain_s` seconds, and end the process: it has
        `EXIT_GRACE_S` for that, and none if it gives no sign of life. Called again, it does not wait."""
        deadline_s = asyncio.get_running_loop().time() + drain_s + EXIT_GRACE_S
        is_first, self._closing = not self._closing, True
        self._problem = "the server is shutting down"
        process = self._connection
        if process is not None and is_first:
            process.send(Shutdown(drain_s))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline_s):
                    await process.lost.wait()
                    await process.wait_for_exit()
        if self._process is not None:
            self._process.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._process is not None:
            await self._process.end()
        self._end_streams()
        for viewer in self._viewers.copy():
            viewer.close()

    @property
    def health(self) -> Health:
        """Good only while requests are taken and make progress."""
        problem = self._problem or self._watchdog.problem
        return _HEALTHY if problem is None else Health(False, problem)

    @property
    def engine_pid(self) -> int | None:
        """The process behind, if there is one that takes requests."""
        return None if self._connection is None else self._connection.pid

    @property
    def num_open_streams(self) -> int:
        """Requests that were submitted and have neither ended nor been aborted."""
        return len(self._streams)

    # ---- requests -------------------------------------------------------------------------------------------------

    def submit(self, request: AddRequest) -> RequestStream:
        """Send a request to the engine. Its id must never have been used before.

        Raises `EngineUnavailableError` if it cannot be taken now, `InvalidRequestError` if it does not fit into a
        message. What the engine itself refuses ends the stream with an error.
        """
        if self._connection is None or self._closing:
            raise EngineUnavailableError(self._problem or ENGINE_STOPPED)
        if request.request_id in self._streams:
            raise InvalidRequestError(f"Request id '{request.request_id}' is already in use.", param="request_id")
        is_known = request.params is self._sent_params
        try:
            self._connection.send(msgspec.structs.replace(request, params=None) if is_known else request)
        except (UnicodeEncodeError, OverflowError, TypeError) as error:
            raise InvalidRequestError("The request has a text or a number that cannot be stored.") from error
        self._sent_params = request.params
        stream = RequestStream(request.request_id, self._abort)
        self._streams[request.request_id] = stream
        return stream

    def _abort(self, request_id: str) -> None:
        """All aborts of one turn of the event loop travel together."""
        if self._streams.pop(request_id, None) is not None:
            if not self._aborted:
                asyncio.get_running_loop().call_soon(self._send_aborts)
            self._aborted.append(request_id)

    def _send_aborts(self) -> None:
        request_ids, self._aborted = self._aborted, []
        if self._connection is not None:
            self._connection.send(AbortRequests(request_ids))

    # ---- watching -------------------------------------------------------------------------------------------------

    def watch(self) -> SnapshotStream:
        """The blocks as they are, and every step from now on, until the stream is closed. The engine makes snapshots
        only while a stream is open."""
        viewer = SnapshotStream(self._leave)
        self._viewers.append(viewer)
        self._tell_watching()
        return viewer

    def add_step_listener(self, listener: Callable[[EngineStats], None]) -> None:
        """Call `listener` with the numbers of every step, in order; also after an abort, without a new step."""
        self._step_listeners.append(listener)

    def _leave(self, viewer: SnapshotStream) -> None:
        self._viewers.remove(viewer)
        if not self._viewers:
            self._tell_watching()

    def _tell_watching(self) -> None:
        if self._connection is not None:
            self._connection.send(Watch(on=bool(self._viewers)))

    # ---- what comes from the engine -------------------------------------------------------------------------------

    def _take(self, news: News) -> None:
        if type(news) is StepBatch:
            self._watchdog.note_step()
            self._take_step(news)
        elif type(news) is Heartbeat:
            self._watchdog.note_life(news.turn_s)
        elif type(news) is StepSnapshot or type(news) is BlockSnapshot:
            for viewer in self._viewers:
                viewer.push(news)

    def _take_step(self, step: StepBatch) -> None:
        self.stats = step.stats
        streams = self._streams
        for request_id in step.begun:
            if request_id in streams:
                streams[request_id].note_begun()
        for delta in step.deltas:
            stream = streams.get(delta.request_id)
            if stream is not None:  # else it was aborted when this was on its way
                if delta.is_last:
                    del streams[delta.request_id]
                stream.push(delta)
        for listener in self._step_listeners:
            listener(step.stats)

    # ---- supervision ----------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        self._process = connection = EngineConnection(self._take, self._note_loss)
        self._watchdog.note_start()
        heartbeat_s = self._watchdog.patience.heartbeat_s
        start = Start(self._options, log_level=self._log_level, counted=self.stats, heartbeat_s=heartbeat_s)
        self.info = await connection.open(start, factory=self._factory)
        if connection.lost.is_set():  # it said that it was ready, and died
            return
        self._connection = connection
        self._sent_params = None
        self._watchdog.note_ready()
        self._ready_s = asyncio.get_running_loop().time()
        if not self._closing:
            self._problem = None
        if self._viewers:
            self._tell_watching()

    def _note_loss(self, connection: EngineConnection) -> None:
        """No more news from this process."""
        if connection is self._connection:
            self._connection = None
            self._watchdog.note_start()
            if not self._closing:
                self._problem = "the engine stopped and is being restarted"
            self._forget_state()
            self._end_streams()

    def _forget_state(self) -> None:
        """What ran and held blocks went with its process; what was counted stays."""
        if self.stats is not None and self.info is not None:
            self.stats = msgspec.structs.replace(
                self.stats,
                num_running=0,
                num_waiting=0,
                num_used_blocks=0,
                num_used_slots=0,
                num_cached_blocks=0,
                num_table_entries=0,
                num_host_blocks=0,
                num_free_blocks=self.info.num_blocks,
            )

    def _end_streams(self) -> None:
        streams, self._streams = self._streams, {}
        for request_id, stream in streams.items():
            stream.push(Delta(request_id, finish_reason="error", error=ENGINE_STOPPED, error_status=503, is_last=True))

    async def _keep_running(self) -> None:
        """Start the engine again whenever it ends, unless it was asked to."""
        while not self._closing:
            assert self._process is not None
            await self._process.lost.wait()
            status = await self._process.end(EXIT_GRACE_S)
            if self._closing:
                return
            served_s = asyncio.get_running_loop().time() - self._ready_s
            await self._restart(f"the engine process ended with status {status}", served_s)

    async def _restart(self, why: str, served_s: float) -> None:
        """Try until it is ready again."""
        while True:
            delay_s = self._backoff.next_delay_s(served_s=served_s)
            logger.error("%s; it is started again in %g s", why, delay_s)
            await asyncio.sleep(delay_s)
            try:
                await self._open()
            except (EngineStartError, OSError) as error:
                why, served_s = f"the engine could not be started: {error}", 0.0
            else:
                self.num_restarts += 1
                logger.warning("the engine is ready again")
                return

    async def _watch(self) -> None:
        """Let time pass for the watchdog, and do as it says."""
        tick_s = min(TICK_S, self._watchdog.patience.heartbeat_s)
        loop = asyncio.get_running_loop()
        before_s = loop.time()
        while True:
            await asyncio.sleep(tick_s)
            now_s = loop.time()
            self._watchdog.pass_time(min(now_s - before_s, 2 * tick_s))
            before_s = now_s
            self._log_problem(self._watchdog.problem)
            process = self._process
            if process is not None and not process.lost.is_set() and self._watchdog.is_lost(ending=self._closing):
                logger.error("the engine process %d is ended: it hangs", process.pid)
                process.kill()

    def _log_problem(self, problem: str | None) -> None:
        """Once when it begins, once when it is over."""
        if problem is not None and self._was_well:
            logger.error("%s; %d requests are open", problem, len(self._streams))
        elif problem is None and not self._was_well and self._connection is not None:
            logger.warning("the engine is well again")
        self._was_well = problem is None
