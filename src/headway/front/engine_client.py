"""The front end's interface to the engines: requests in, streams of deltas out, even if engine processes are lost.

    submit ──► resumption ──► dispatch ──► replica 0 ┐
                 open requests   router    replica 1 ├──► deltas ──► resumption ──► stream of the request
                                           …         ┘

`resumption` decides what happens to requests whose replica is gone, `prefills` decides where prompts are computed, and
`scaling` how many replicas there are. `watchers` serves viewers and followers. None of them imports this file, and each
is tested without a process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headway.core.kv.manager import CacheReset
from headway.errors import EngineUnavailableError
from headway.front.cache_resets import CacheResets
from headway.front.connection import News
from headway.front.deployment import Deployment
from headway.front.dispatch import Dispatch
from headway.front.kv_event_format import EventBatch
from headway.front.prefills import Prefills
from headway.front.replica import Replica
from headway.front.resumption import ENGINE_STOPPED, Resumption
from headway.front.scaling import Autoscaler, Load
from headway.front.streams import RequestStream
from headway.front.supervision import TICK_S, Backoff, Patience
from headway.front.watch_streams import CacheStream, SnapshotStream
from headway.front.watchers import CacheFollowers, SnapshotViewers
from headway.wire.engine_stats import EngineStats, summed
from headway.wire.messages import (
    AddRequest,
    BlockSnapshot,
    CacheNews,
    CacheResetDone,
    EngineReady,
    StepBatch,
    StepSnapshot,
)

logger = logging.getLogger(__name__)

SHUTTING_DOWN = "the server is shutting down"


@dataclass(frozen=True, slots=True)
class Health:
    """Whether requests are being served, and if not, why not. The reason may be shown to any client."""

    ok: bool
    reason: str


_HEALTHY = Health(True, "")


class EngineClient:
    """The engines of a front end. It may only be used in the event loop in which `start` was awaited."""

    def __init__(
        self,
        deployment: Deployment,
        *,
        patience: Patience | None = None,
        backoff: Callable[[], Backoff] = Backoff,
        resumes: bool = True,
    ) -> None:
        """Without `resumes`, requests fail when their process ends."""
        self._deployment = deployment
        self._patience = patience or Patience()
        self.replicas = [
            Replica(
                place, spec, self, patience=self._patience, backoff=backoff(), is_idle=place >= deployment.num_started
            )
            for place, spec in enumerate(deployment.specs)
        ]
        self._answering = [replica for replica in self.replicas if replica.answers]
        router = deployment.create_router()
        self._prefills = Prefills(
            [replica for replica in self.replicas if not replica.answers],
            router=deployment.create_router(),
            answering=router,
            now=_now_s,
        )
        self._routers = [router if replica.answers else self._prefills.router for replica in self.replicas]
        dispatch = Dispatch(self._answering, router=router, prefills=self._prefills)
        self._resumption = Resumption(dispatch, resumes=resumes, now=_now_s)
        self._viewers = SnapshotViewers(self.replicas)
        self._followers = CacheFollowers(self.replicas, [router.index for router in self._routers])
        self._cache_resets = CacheResets(self.replicas)
        self._step_listeners: list[Callable[[EngineStats], None]] = []
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []

    # ---- its life -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engines and wait until they take requests. Raises `EngineStartError` if one cannot start.
        Afterwards each engine is restarted whenever it ends."""
        starting = [asyncio.create_task(replica.start()) for replica in self.replicas if not replica.is_idle]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await asyncio.gather(*(replica.shutdown() for replica in self.replicas))
            raise
        self._tasks.append(asyncio.create_task(self._end_overdue()))
        if self._deployment.scaling is not None:
            autoscaler = Autoscaler(self._deployment.scaling, self.replicas, self._load)
            self._tasks.append(asyncio.create_task(autoscaler.run()))

    async def shutdown(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, let the others run for at most `drain_s` seconds, and end the processes. A second call
        does not wait for requests."""
        self._closing = True
        self._resumption.close()
        self._followers.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(replica.shutdown(drain_s) for replica in self.replicas))
        self._resumption.fail_all()
        self._viewers.close()
        self._deployment.close()

    async def restart(self, drain_s: float = 0.0) -> None:
        """Replace the processes one by one, each after the previous replacement is ready. Requests that do not end
        within `drain_s` seconds continue in other processes."""
        for replica in self.replicas:
            if not self._closing and not replica.is_idle:
                logger.info("replica %d is replaced", replica.place)
                await replica.restart(drain_s)

    async def _end_overdue(self) -> None:
        """Periodically end requests that have waited too long for an engine, and prefills that take too long."""
        while True:
            await asyncio.sleep(TICK_S)
            self._prefills.end_late()
            self._resumption.fail_overdue(self._patience.resume_s)

    def _load(self) -> Load | None:
        stats, info = self.stats, self.info
        if info is None:
            return None
        num_waiting = stats.batch.num_waiting + self._resumption.num_queued
        return Load(stats.batch.num_running, num_waiting, info.max_num_seqs)

    # ---- what it is -----------------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineReady | None:
        """The description that an engine sent when it was ready. All engines are alike."""
        return next((replica.info for replica in self.replicas if replica.info is not None), None)

    @property
    def stats(self) -> EngineStats:
        """Statistics of all replicas together, as of the last step. Counters continue over restarts. A prompt that
        one replica computes for another counts only in the one that answers."""
        if len(self.replicas) == 1:
            return self.replicas[0].stats
        return summed(
            replica.stats if replica.answers else replica.stats.without_requests() for replica in self.replicas
        )

    @property
    def prefill_outcomes(self) -> Mapping[str, int]:
        """How many prompts were computed where, by outcome. Empty if each replica computes its own prompts."""
        return self._prefills.outcomes

    @property
    def num_restarts(self) -> int:
        """How many times an engine was restarted."""
        return sum(replica.num_restarts for replica in self.replicas)

    @property
    def num_resumed(self) -> int:
        """How many times a request was continued in another process."""
        return self._resumption.num_resumed

    @property
    def num_open_streams(self) -> int:
        """Requests that were submitted and have neither ended nor been aborted."""
        return self._resumption.num_open

    @property
    def health(self) -> Health:
        """Good only while at least one replica takes requests and makes progress."""
        if self._closing:
            return Health(False, SHUTTING_DOWN)
        problems = [replica.problem for replica in self._answering]
        if None in problems:
            return _HEALTHY
        return Health(False, problems[0] or ENGINE_STOPPED)

    @property
    def engine_pid(self) -> int | None:
        """The process id of the first replica that takes requests, if there is one."""
        return next((replica.pid for replica in self.replicas if replica.pid is not None), None)

    # ---- what clients want ----------------------------------------------------------------------------------------

    def submit(self, request: AddRequest, stream: RequestStream | None = None) -> RequestStream:
        """Send a request to an engine. Its id must never have been used before. `stream`: a stream that is already
        being read.

        Raises `EngineUnavailableError` if no engine can take it now, `InvalidRequestError` if it does not fit into a
        message. If the engine itself refuses it, the stream ends with an error.
        """
        opened = self._resumption.open(request, stream)
        if opened is None:
            raise EngineUnavailableError(self.health.reason or ENGINE_STOPPED)
        return opened

    def watch(self, place: int = 0) -> SnapshotStream:
        """Return a stream of a replica's present blocks and then of all its steps, until the stream is closed."""
        return self._viewers.watch(place)

    def follow_caches(self) -> CacheStream:
        """Return a stream of each prefix cache's content and then of every change, until the stream is closed. It has
        nothing about replicas that do not report."""
        return self._followers.follow()

    def publish_caches(self, offer: Callable[[EventBatch], bool]) -> None:
        """Hand every change of the prefix caches to `offer`, which returns whether it has taken it. The deployment must
        report tokens, and nothing may have been started."""
        self._followers.publish(offer)

    async def reset_caches(self, *, with_disk: bool = False) -> CacheReset:
        """Forget all cached blocks of all replicas that no request uses. `with_disk`: those on disk are deleted too.
        Raises `EngineUnavailableError` if an engine does not answer."""
        return await self._cache_resets.reset(with_disk=with_disk)

    def add_step_listener(self, listener: Callable[[EngineStats], None]) -> None:
        """Call `listener` with the statistics of every step, in order, and also after an abort without a new step."""
        self._step_listeners.append(listener)

    # ---- what replicas say ----------------------------------------------------------------------------------------

    def receive(self, replica: Replica, news: News) -> None:
        """Handle a message from a replica."""
        if type(news) is StepBatch:
            if replica.answers:
                self._resumption.deliver(replica, news)
            else:
                self._prefills.deliver(news.deltas)
            if self._step_listeners:
                self._call_listeners(news.stats)
        elif type(news) is CacheNews:
            self._followers.receive(replica.place, news)
        elif type(news) is CacheResetDone:
            self._cache_resets.receive(replica.place, news)
        elif type(news) is StepSnapshot or type(news) is BlockSnapshot:
            self._viewers.push(replica.place, news)

    def _call_listeners(self, step: EngineStats) -> None:
        """Call the listeners with the state of all replicas and the statistics of this step."""
        stats = step
        if len(self.replicas) > 1:
            stats = self.stats
            stats.step = step.step
        for listener in self._step_listeners:
            listener(stats)

    def note_ready(self, replica: Replica) -> None:
        """Send queued requests to a replica that now takes requests."""
        assert replica.info is not None
        router = self._routers[replica.place]
        router.block_size = replica.info.block_size
        router.add(replica.place, max_num_seqs=replica.info.max_num_seqs)
        self._viewers.note_ready(replica.place)
        if num_sent := self._resumption.send_queued():
            logger.warning("%d requests go on", num_sent)

    def note_loss(self, replica: Replica) -> None:
        """Note that a replica is gone. Its requests continue elsewhere, or fail."""
        self._prefills.note_loss(replica)
        self._routers[replica.place].remove(replica.place)
        self._followers.start_anew(replica.place)
        self._cache_resets.note_loss(replica.place)
        self._resumption.note_loss(replica)

    def note_problem(self, replica: Replica) -> None:
        """Note a replica's health. A replica with a problem gets no new requests while others can take them."""
        self._routers[replica.place].suspend(replica.place, replica.is_leaving or replica.problem is not None)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
