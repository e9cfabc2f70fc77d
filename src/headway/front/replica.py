"""An engine process that is kept running.

    start() ──► ready ──► messages ──► shutdown()
                  ▲           │ the process dies, or hangs and is killed
                  └─ back-off ┘

`supervision` decides when a process counts as hanging. Everything here belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, Protocol

import msgspec

from headway.errors import EngineStartError, InvalidRequestError
from headway.front.connection import EXIT_GRACE_S, EngineConnection, LocalHome, News
from headway.front.placement import EngineSpec
from headway.front.supervision import TICK_S, Backoff, Patience, Watchdog
from headway.sampling_params import SamplingParams
from headway.wire.engine_stats import EngineStats
from headway.wire.messages import AbortRequests, AddRequest, EngineReady, Heartbeat, Role, Shutdown, Start, StepBatch

logger = logging.getLogger(__name__)

IDLE = "the replica is not needed"


class ReplicaOwner(Protocol):
    """The receiver of a replica's messages and state changes."""

    def receive(self, replica: Replica, news: News) -> None:
        """The replica sent a message."""

    def note_ready(self, replica: Replica) -> None:
        """The replica now takes requests, and has none yet."""

    def note_loss(self, replica: Replica) -> None:
        """The replica took requests and is gone with them; no more messages arrive."""

    def note_problem(self, replica: Replica) -> None:
        """The replica's problem has begun or ended."""


class Replica:
    """A process that is replaced when it ends, known by its place among others."""

    def __init__(
        self,
        place: int,
        spec: EngineSpec,
        owner: ReplicaOwner,
        *,
        patience: Patience,
        backoff: Backoff,
        is_idle: bool = False,
    ) -> None:
        self.place = place
        self.role: Role | None = None if spec.blocks is None else spec.blocks.role
        """Its role, or None if it does both prefill and decode."""
        self.info: EngineReady | None = None
        """The description that the engine sent when it was ready. It is kept during a restart."""
        self.stats = EngineStats()
        """Statistics as of the last step. Counters continue over restarts."""
        self.num_restarts = 0
        self.epoch = 0
        """A number that grows whenever a process is gone, since the state of one process is not valid for the next."""
        self.is_leaving = False
        """Whether this process takes no more requests. Those that it has may still end there."""
        self.is_idle = is_idle
        """Whether it intentionally has no process until `start` is called."""
        self._spec = spec
        self._owner = owner
        self._watchdog = Watchdog(patience)
        self._backoff = backoff
        self._connection: EngineConnection | None = None  # set while the engine takes requests
        self._process: EngineConnection | None = None  # the last one that was started, perhaps gone
        self._sent_params: SamplingParams | None = None  # of the last request that this process got
        self._aborted: list[str] = []
        self._state: str | None = IDLE if is_idle else "the engine is starting"
        self._was_well = True
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []
        self._ready_s = 0.0

    # ---- its life -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine and wait until it takes requests. Raises `EngineStartError` if it cannot. Afterwards it is
        restarted whenever it ends."""
        if self.is_idle:
            self.is_idle = self._closing = False
            self._state = "the engine is starting"
        watching = asyncio.create_task(self._watch())
        self._tasks = [watching]
        try:
            await self._open()
        except BaseException:
            watching.cancel()
            raise
        self._tasks.append(asyncio.create_task(self._keep_running()))

    async def shutdown(self, drain_s: float = 0.0) -> None:
        """Let its requests run for at most `drain_s` seconds, and end the process. To exit, the process has
        `EXIT_GRACE_S` and the extra time that it has asked for, but none if it gives no sign of life. A second call
        does not wait for requests."""
        deadline_s = asyncio.get_running_loop().time() + drain_s + self._exit_s
        is_first, self._closing = not self._closing, True
        self._state = "the server is shutting down"
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

    async def stop(self, drain_s: float) -> None:
        """Shut down such that it can be started again."""
        self._leave()
        await self.shutdown(drain_s)
        self.is_idle, self._state = True, IDLE

    async def restart(self, drain_s: float) -> None:
        """Replace the process. It takes no new requests, and requests left after `drain_s` seconds continue elsewhere.
        Returns when the next process is ready."""
        process = self._connection
        if process is not None and not self._closing:
            self._leave()
            process.send(Shutdown(drain_s))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.lost.wait(), drain_s + self._exit_s)
            if not process.lost.is_set():
                process.kill()
        while not self.is_ready and not self._closing:
            await asyncio.sleep(TICK_S / 5)

    def _leave(self) -> None:
        self.is_leaving = True
        self._owner.note_problem(self)

    @property
    def _exit_s(self) -> float:
        """How long the process may take to exit."""
        return EXIT_GRACE_S + (0.0 if self.info is None else self.info.exit_s)

    @property
    def answers(self) -> bool:
        """Whether it answers requests. If not, it computes prompts for replicas that do."""
        return self.role != "prefill"

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests."""
        return self._connection is not None and not self.is_leaving and not self._closing

    @property
    def problem(self) -> str | None:
        """Why it is unhealthy, or None. The text may be shown to any client."""
        return self._state or self._watchdog.problem

    @property
    def pid(self) -> int | None:
        """The id of the process, if it takes requests."""
        return None if self._connection is None else self._connection.pid

    # ---- messages to it -------------------------------------------------------------------------------------------

    def send(self, message: Any) -> None:
        """Send it a message, unless it is gone. Raises if the message cannot be packed."""
        if self._connection is not None:
            self._connection.send(message)

    def add(self, request: AddRequest) -> None:
        """Send it a request. Parameters equal to those of the previous request are not sent again. Raises
        `InvalidRequestError` if the request does not fit into a message."""
        is_known = request.params is self._sent_params
        try:
            self.send(msgspec.structs.replace(request, params=None) if is_known else request)
        except (UnicodeEncodeError, OverflowError, TypeError) as error:
            raise InvalidRequestError("The request has a text or a number that cannot be stored.") from error
        self._sent_params = request.params

    def abort(self, request_id: str) -> None:
        """Abort a request. All aborts of one turn of the event loop are sent together."""
        if not self._aborted:
            asyncio.get_running_loop().call_soon(self._send_aborts)
        self._aborted.append(request_id)

    def _send_aborts(self) -> None:
        aborted, self._aborted = self._aborted, []
        self.send(AbortRequests(aborted))

    # ---- supervision ----------------------------------------------------------------------------------------------

    def _receive(self, news: News) -> None:
        if type(news) is StepBatch:
            self._watchdog.note_step()
            self.stats = news.stats
        elif type(news) is Heartbeat:
            self._watchdog.note_life(news.turn_s)
            return
        self._owner.receive(self, news)

    async def _open(self) -> None:
        self._process = connection = EngineConnection(self._receive, self._note_loss)
        self._watchdog.note_start()
        spec = self._spec
        start = Start(
            dict(spec.options),
            log_level=spec.log_level,
            counted=self.stats,
            heartbeat_s=self._watchdog.patience.heartbeat_s,
            reports_cache=spec.reports_cache,
            reports_tokens=spec.reports_tokens,
            cores=list(spec.cores),
            blocks=spec.blocks,
        )
        self.info = await connection.open(start, spec.home or LocalHome(spec.factory, spec.environment))
        if connection.lost.is_set():  # it said that it was ready, and died
            self._owner.note_loss(self)  # of what it may have reported before
            return
        if not self.stats.blocks.num_used_blocks + self.stats.blocks.num_cached_blocks:  # it has made no step yet
            self.stats.blocks.num_free_blocks = self.info.num_blocks
        self._connection = connection
        self._sent_params, self.is_leaving = None, False
        self._watchdog.note_ready()
        self._ready_s = asyncio.get_running_loop().time()
        if not self._closing:
            self._state = None
        self._owner.note_ready(self)

    def _note_loss(self, connection: EngineConnection) -> None:
        """Note that no more messages come from this process."""
        self.epoch += 1
        if connection is self._connection:
            self._connection = None
            self._watchdog.note_start()
            if not self._closing:
                self._state = "the engine stopped and is being restarted"
            self._forget_state()
            self._owner.note_loss(self)

    def _forget_state(self) -> None:
        """Reset the state that was lost with the process. Counters stay."""
        self.stats.forget_state()
        if self.info is not None:
            self.stats.blocks.num_free_blocks = self.info.num_blocks

    async def _keep_running(self) -> None:
        """Restart the engine whenever it ends without having been asked to."""
        while not self._closing:
            assert self._process is not None
            await self._process.lost.wait()
            status = await self._process.end(EXIT_GRACE_S)
            if self._closing:
                return
            served_s = asyncio.get_running_loop().time() - self._ready_s
            await self._restart(f"the engine process ended with status {status}", served_s)

    async def _restart(self, why: str, served_s: float) -> None:
        """Try to start the engine until it is ready again."""
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
        """Advance the watchdog's time, and act on its verdict."""
        tick_s = min(TICK_S, self._watchdog.patience.heartbeat_s)
        loop = asyncio.get_running_loop()
        before_s = loop.time()
        while True:
            await asyncio.sleep(tick_s)
            now_s = loop.time()
            self._watchdog.pass_time(min(now_s - before_s, 2 * tick_s))
            before_s = now_s
            self._note_problem(self._watchdog.problem)
            process = self._process
            if process is not None and not process.lost.is_set() and self._watchdog.is_lost(ending=self._closing):
                logger.error("the engine process %d is ended: it hangs", process.pid)
                process.kill()

    def _note_problem(self, problem: str | None) -> None:
        """Log a problem once when it begins and once when it is over, and tell the owner."""
        if problem is not None and self._was_well:
            logger.error("%s", problem)
        elif problem is None and not self._was_well and self._connection is not None:
            logger.warning("the engine is well again")
        if (problem is None) != self._was_well:
            self._was_well = problem is None
            self._owner.note_problem(self)
