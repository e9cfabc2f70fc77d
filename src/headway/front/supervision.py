"""An engine process that is kept running: when it counts as unhealthy, when it is replaced, and how soon.

    start() ──► ready ──► messages ──► shutdown()
                  ▲           │ the process dies, or hangs and is killed
                  └─ back-off ┘

sign of life     a heartbeat every second from a thread of its own, a step, any other message
silent           none of them: the process as a whole hangs. Stopped, swapped out, or in the kernel
stuck            heartbeats come, and say that the loop has been in one turn for long: a step does not end

One that is silent or stuck has a problem first and is killed and replaced later. The rules come first, with time as
numbers; then the process, of which everything belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import Any, Protocol

from headway.errors import EngineStartError
from headway.front.backoff import Backoff
from headway.front.connection import EXIT_GRACE_S, EngineConnection, LocalHome, News
from headway.front.placement import EngineSpec
from headway.sampling_params import SamplingParams
from headway.wire.engine_stats import EngineStats
from headway.wire.messages import EngineReady, Heartbeat, Role, Shutdown, Start, StepBatch

logger = logging.getLogger(__name__)

SILENT_S = 3.0
"""Three heartbeats missed: not healthy any more."""
START_SILENT_S = 20.0
"""While libraries are imported and memory is taken, heartbeats may be missing for longer; so long a start is waited for
without any. It lasts until the first sign of life of an engine that has said that it is ready."""
FIRST_STEP_GRACE_S = 300.0
"""The first step of an engine may compile kernels: this much is waited for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long an engine may do nothing, in seconds. 0 for the two that end it: for ever."""

    slow_step_s: float = 60.0
    """A step that takes longer: not healthy."""
    step_timeout_s: float = 600.0
    """A step that takes longer: the engine is replaced."""
    hang_timeout_s: float = 10.0
    """No sign of life for longer: the engine is replaced."""
    resume_s: float = 120.0
    """So long a request waits for an engine to go on in."""

    @property
    def silent_s(self) -> float:
        """No sign of life for longer: not healthy."""
        return min(SILENT_S, self.hang_timeout_s or SILENT_S)

    @property
    def heartbeat_s(self) -> float:
        """How often the engine has to say that it lives."""
        times = (self.slow_step_s, self.step_timeout_s, self.hang_timeout_s)
        return min([1.0, *(time_s / 4 for time_s in times if time_s)])


class Watchdog:
    """Follows one engine process at a time."""

    def __init__(self, patience: Patience) -> None:
        self.patience = patience
        self.note_start()

    def note_start(self) -> None:
        """Another process is being started."""
        self._silent_s = 0.0
        self._told_turn_s = 0.0
        self._is_ready = False
        self._has_begun = False
        """Whether it has given a sign of life since it was ready."""
        self._has_stepped = False

    def note_ready(self) -> None:
        """It takes requests."""
        self.note_life()
        self._is_ready, self._has_begun = True, False

    def note_life(self, turn_s: float = 0.0) -> None:
        """It has sent something. A heartbeat says for how long its loop has been in the present turn."""
        self._silent_s, self._told_turn_s = 0.0, turn_s
        self._has_begun = self._is_ready

    def note_step(self) -> None:
        """It has made a step."""
        self.note_life()
        self._has_stepped = True

    def pass_time(self, seconds: float) -> None:
        """`seconds` have passed, with or without signs of life."""
        self._silent_s += seconds

    @property
    def problem(self) -> str | None:
        """Why the engine is not healthy, if it is not; may be shown to any client."""
        if not self._is_ready:
            return None
        if self._silent_s > self._while_starting(self.patience.silent_s):
            return f"the engine process has given no sign of life for {self._silent_s:.0f} s"
        if self._turn_s > self._grace(self.patience.slow_step_s):
            return f"the engine has made no progress for {self._turn_s:.0f} s"
        return None

    def is_lost(self, *, ending: bool = False) -> bool:
        """Whether the process has to be ended from outside. If the client is about to end, one that is silent is not
        waited for."""
        hang_s, step_s = self.patience.hang_timeout_s, self.patience.step_timeout_s
        if ending and self._silent_s > self.patience.silent_s:
            return True
        if hang_s and self._silent_s > self._while_starting(hang_s):
            return True
        return bool(step_s) and self._turn_s > self._grace(step_s)

    @property
    def _turn_s(self) -> float:
        return self._told_turn_s + self._silent_s if self._told_turn_s else 0.0

    def _while_starting(self, limit_s: float) -> float:
        return limit_s if self._has_begun else max(limit_s, START_SILENT_S)

    def _grace(self, limit_s: float) -> float:
        return limit_s if self._has_stepped else max(limit_s, FIRST_STEP_GRACE_S)


# ---- the process ----------------------------------------------------------------------------------------------------

RESTING = "the replica is not needed"
TICK_S = 0.5
"""How often the watchdog looks. If this process itself was held up, no more than two of these count as time that passed
for the engine: what it sent meanwhile has not been read."""


class Owner(Protocol):
    """Who wants to know."""

    def take(self, replica: Replica, news: News) -> None:
        """Something came from it."""

    def note_ready(self, replica: Replica) -> None:
        """It takes requests, and has none."""

    def note_loss(self, replica: Replica) -> None:
        """It took requests, and is gone with them: nothing more comes."""

    def note_problem(self, replica: Replica) -> None:
        """It has a problem now, or has none any more."""


class Replica:
    """A process that is replaced when it ends, known by its place among others."""

    def __init__(
        self,
        place: int,
        spec: EngineSpec,
        owner: Owner,
        *,
        patience: Patience | None = None,
        backoff: Backoff | None,
        rests: bool = False,
    ) -> None:
        self.place = place
        self.role: Role | None = None if spec.blocks is None else spec.blocks.role
        """None: it does everything."""
        self.info: EngineReady | None = None
        """What the engine said of itself when it got ready; stays while it is being restarted."""
        self.stats = EngineStats()
        """As of the last step. Counters go on over restarts."""
        self.num_restarts = 0
        self.epoch = 0
        """Grows whenever a process is gone: what one has said of itself does not hold for the next."""
        self.sent_params: SamplingParams | None = None
        """Of the last request that this process got."""
        self.is_leaving = False
        """Whether this process has said that it takes no requests any more. Those that it has may end there."""
        self._spec = spec
        self._owner = owner
        self._watchdog = Watchdog(patience or Patience())
        self._backoff = backoff or Backoff()
        self._connection: EngineConnection | None = None  # set while the engine takes requests
        self._process: EngineConnection | None = None  # the last one that was started, perhaps gone
        self._state: str | None = RESTING if rests else "the engine is starting"
        self._was_well = True
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []
        self._ready_s = 0.0
        self.rests = rests
        """Whether it is to have no process, until it is started."""

    # ---- its life -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine and wait until it takes requests; `EngineStartError` if it cannot. From then on it is
        started again whenever it ends."""
        if self.rests:
            self.rests = self._closing = False
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
        """Let its requests go on for at most `drain_s` seconds, and end the process: it has `EXIT_GRACE_S` for that
        and what it has asked for, and none if it gives no sign of life. Called again, it does not wait."""
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

    async def rest(self, drain_s: float) -> None:
        """As `shutdown`, and it can be started again."""
        self.is_leaving = True
        self._owner.note_problem(self)
        await self.shutdown(drain_s)
        self.rests, self._state = True, RESTING

    async def restart(self, drain_s: float) -> None:
        """Replace the process: it takes no new requests, and what it still has after `drain_s` seconds it gives back.
        Returns when the next one is ready."""
        process = self._connection
        if process is not None and not self._closing:
            self.is_leaving = True
            self._owner.note_problem(self)
            process.send(Shutdown(drain_s))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.lost.wait(), drain_s + self._exit_s)
            if not process.lost.is_set():
                process.kill()
        while not self.is_ready and not self._closing:
            await asyncio.sleep(TICK_S / 5)

    @property
    def _exit_s(self) -> float:
        """How long the process may take to exit."""
        return EXIT_GRACE_S + (0.0 if self.info is None else self.info.exit_s)

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests."""
        return self._connection is not None and not self.is_leaving and not self._closing

    @property
    def problem(self) -> str | None:
        """Why it is not healthy, if it is not; may be shown to any client."""
        return self._state or self._watchdog.problem

    @property
    def pid(self) -> int | None:
        """The process behind, if there is one that takes requests."""
        return None if self._connection is None else self._connection.pid

    def send(self, message: Any) -> None:
        """Hand it a message, unless it is gone. What cannot be packed raises."""
        if self._connection is not None:
            self._connection.send(message)

    # ---- supervision ----------------------------------------------------------------------------------------------

    def _take(self, news: News) -> None:
        if type(news) is StepBatch:
            self._watchdog.note_step()
            self.stats = news.stats
        elif type(news) is Heartbeat:
            self._watchdog.note_life(news.turn_s)
            return
        self._owner.take(self, news)

    async def _open(self) -> None:
        self._process = connection = EngineConnection(self._take, self._note_loss)
        self._watchdog.note_start()
        spec = self._spec
        start = Start(
            dict(spec.options),
            log_level=spec.log_level,
            counted=self.stats,
            heartbeat_s=self._watchdog.patience.heartbeat_s,
            reports_cache=spec.reports_cache,
            cores=list(spec.cores),
            blocks=spec.blocks,
        )
        self.info = await connection.open(start, spec.home or LocalHome(spec.factory, spec.environment))
        if connection.lost.is_set():  # it said that it was ready, and died
            self._owner.note_loss(self)  # of what it may have told before
            return
        if (
            not self.stats.blocks.num_used_blocks + self.stats.blocks.num_cached_blocks
        ):  # as long as it has said nothing
            self.stats.blocks.num_free_blocks = self.info.num_blocks
        self._connection = connection
        self.sent_params, self.is_leaving = None, False
        self._watchdog.note_ready()
        self._ready_s = asyncio.get_running_loop().time()
        if not self._closing:
            self._state = None
        self._owner.note_ready(self)

    def _note_loss(self, connection: EngineConnection) -> None:
        """No more news from this process."""
        self.epoch += 1
        if connection is self._connection:
            self._connection = None
            self._watchdog.note_start()
            if not self._closing:
                self._state = "the engine stopped and is being restarted"
            self._forget_state()
            self._owner.note_loss(self)

    def _forget_state(self) -> None:
        """What ran and held blocks went with its process; what was counted stays."""
        self.stats.forget_state()
        if self.info is not None:
            self.stats.blocks.num_free_blocks = self.info.num_blocks

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
            self._note_problem(self._watchdog.problem)
            process = self._process
            if process is not None and not process.lost.is_set() and self._watchdog.is_lost(ending=self._closing):
                logger.error("the engine process %d is ended: it hangs", process.pid)
                process.kill()

    def _note_problem(self, problem: str | None) -> None:
        """Once when it begins, once when it is over."""
        if problem is not None and self._was_well:
            logger.error("%s", problem)
        elif problem is None and not self._was_well and self._connection is not None:
            logger.warning("the engine is well again")
        if (problem is None) != self._was_well:
            self._was_well = problem is None
            self._owner.note_problem(self)
