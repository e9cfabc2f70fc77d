"""The page at `/`: a chat with the served model, next to a live view of the running batch.

    /             the page itself
    /web/{file}   its scripts and styles
    /live         what the engine does, as server-sent events

    engine_client.watch() ──► FrameBuilder ──► Frame ──► JSON once ──► a short queue per viewer

If there are several replicas, a viewer sees the one that it asks for (`/live?replica=1`) and the load of the others.

The page has no build step and loads nothing from other servers. Its files are read once; browsers cache and revalidate
them. The engine is watched only while the page is open somewhere. A viewer that reads too slowly misses frames, but
only the columns of their steps are lost: each frame repeats everything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from headway.front.engine_client import Health
from headway.server.api.api_errors import ApiError, overloaded
from headway.server.limits import LIMITS
from headway.server.live.batch_advice import Advice, Trend, Vitals, advise
from headway.server.live.batch_frames import Frame, FrameBuilder, ReplicaLoad, TokenTimes
from headway.server.live.web_files import PAGE, file_answer
from headway.server.metrics.recent import WINDOW_S, RecentShare, RecentTimes, percentile
from headway.wire.engine_stats import EngineStats
from headway.wire.messages import BlockSnapshot, EngineReady, Snapshot

logger = logging.getLogger(__name__)

FRAME_S = 0.1
QUIET_FRAME_S = 1.0
"""Time between frames while the engine makes no step, and between two pieces of advice."""
SHOWN_LATENCY_S = 10.0
"""Window of the latencies that the page shows. Advice is based on the last minute."""
Event = bytes
Prices = Callable[[], dict[str, float | None]]
"""Returns the prices of tokens, as `PriceMeter.numbers` has them."""


def live_routes(engine: WatchedReplicas, *, hubs: LiveHubs | None = None) -> list[Route]:
    """Return the page's routes. A server that drains makes `hubs` itself, so that it can close them."""
    live_hubs = hubs or LiveHubs(engine)

    async def page(request: Request) -> Response:
        return file_answer(request, PAGE)

    async def web_file(request: Request) -> Response:
        return file_answer(request, request.path_params["file"])

    async def live(request: Request) -> Response:
        hub = live_hubs.of(request.query_params.get("replica", "0"))
        if live_hubs.num_viewers >= LIMITS.max_viewers:
            raise overloaded(
                f"{live_hubs.num_viewers} are watching already. Please retry later.", code="too_many_viewers"
            )
        headers = {"cache-control": "no-store", "x-accel-buffering": "no", "x-content-type-options": "nosniff"}
        return StreamingResponse(hub.events(), media_type="text/event-stream", headers=headers)

    return [
        Route("/", page, name="page"),
        Route("/web/{file}", web_file, name="web_file"),
        Route("/live", live, methods=["GET"], name="live"),
    ]


class EngineHealth(Protocol):
    """See `engine_client.Health`."""

    @property
    def ok(self) -> bool: ...
    @property
    def reason(self) -> str: ...


class Snapshots(Protocol):
    """See `streams.SnapshotStream`."""

    def __aiter__(self) -> AsyncIterator[Snapshot]: ...
    async def aclose(self) -> None: ...


class WatchedEngine(Protocol):
    """What the view needs of the replica that it draws, or of a single engine."""

    @property
    def info(self) -> EngineReady | None: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def health(self) -> EngineHealth: ...
    def watch(self) -> Snapshots: ...


class WatchedReplica(Protocol):
    """The part of a `Replica` that the page needs."""

    @property
    def info(self) -> EngineReady | None: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def problem(self) -> str | None: ...
    @property
    def role(self) -> str | None: ...


class WatchedReplicas(Protocol):
    """The part of an `EngineClient` that the page needs. It may have several replicas."""

    @property
    def info(self) -> EngineReady | None: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def health(self) -> EngineHealth: ...
    @property
    def replicas(self) -> Sequence[WatchedReplica]: ...
    def watch(self, place: int = 0) -> Snapshots: ...


class LiveHubs:
    """One `LiveHub` for each replica. Everything here belongs to one event loop."""

    def __init__(
        self,
        engine: WatchedReplicas,
        *,
        first_tokens: RecentTimes | None = None,
        hits: RecentShare | None = None,
        is_draining: Callable[[], bool] = bool,
        prices: Prices | None = None,
    ) -> None:
        """`first_tokens` and `hits` cover the whole server, so they are only used if there is a single replica.
        `prices` are those of the whole server."""
        self._replicas = engine.replicas
        if len(self._replicas) <= 1:
            hubs = [LiveHub(engine, first_tokens=first_tokens, hits=hits, is_draining=is_draining, prices=prices)]
        else:
            hubs = [
                LiveHub(
                    _OneReplica(engine, place), place=place, loads=self._loads, is_draining=is_draining, prices=prices
                )
                for place in range(len(self._replicas))
            ]
        self._hubs = {str(place): hub for place, hub in enumerate(hubs)}

    @property
    def num_viewers(self) -> int:
        """Number of open streams."""
        return sum(hub.num_viewers for hub in self._hubs.values())

    def of(self, replica: str) -> LiveHub:
        """Return the hub of the replica with this number. Raises 404 if there is none."""
        hub = self._hubs.get(replica)
        if hub is None:
            raise ApiError(
                404,
                f"There is no replica '{replica[:20]}' here; the first is 0, the last is {len(self._hubs) - 1}.",
                param="replica",
                code="replica_not_found",
            )
        return hub

    def close(self) -> None:
        """End all streams, so that a draining server does not wait for viewers."""
        for hub in self._hubs.values():
            hub.close()

    def _loads(self) -> list[ReplicaLoad]:
        return [_load(replica) for replica in self._replicas]


class _OneReplica:
    """Presents one of several replicas as a single engine."""

    def __init__(self, engine: WatchedReplicas, place: int) -> None:
        self._engine = engine
        self._place = place

    @property
    def info(self) -> EngineReady | None:
        return self._engine.replicas[self._place].info

    @property
    def stats(self) -> EngineStats:
        return self._engine.replicas[self._place].stats

    @property
    def health(self) -> EngineHealth:
        problem = self._engine.replicas[self._place].problem
        return Health(problem is None, problem or "")

    def watch(self) -> Snapshots:
        return self._engine.watch(self._place)


def _load(replica: WatchedReplica) -> ReplicaLoad:
    stats, problem = replica.stats, replica.problem
    return ReplicaLoad(
        ok=problem is None,
        reason=problem or "",
        num_running=stats.batch.num_running,
        num_waiting=stats.batch.num_waiting,
        generation_tokens=stats.batch.generation_tokens,
        num_blocks=0 if replica.info is None else replica.info.num_blocks,
        num_used_blocks=stats.blocks.num_used_blocks,
        num_cached_blocks=stats.blocks.num_cached_blocks,
        role=replica.role,
    )


class LiveHub:
    """Sends the activity of one engine to its viewers. Everything here belongs to one event loop."""

    def __init__(
        self,
        engine: WatchedEngine,
        *,
        first_tokens: RecentTimes | None = None,
        hits: RecentShare | None = None,
        now: Callable[[], float] = time.monotonic,
        frame_s: float = FRAME_S,
        place: int = 0,
        loads: Callable[[], list[ReplicaLoad]] = list,
        is_draining: Callable[[], bool] = bool,
        prices: Prices | None = None,
    ) -> None:
        """`first_tokens` and `hits` (of the prefix cache) are filled by the server's metrics. Without them, the times
        are measured from snapshots and the hits are counted for each frame. `place` is the number of this replica,
        `loads` returns the load of all replicas, `is_draining` whether the server is stopping, and `prices` what a
        million tokens cost, if that is known."""
        self._engine = engine
        self._place = place
        self._loads = loads
        self._is_draining = is_draining
        self._prices = prices
        self._now = now
        self._frame_s = frame_s
        self._began_s = now()
        self._gaps = RecentTimes(now=now)
        self._first_tokens = RecentTimes(now=now) if first_tokens is None else first_tokens
        self._token_times = TokenTimes(
            gaps=self._gaps, first_tokens=self._first_tokens if first_tokens is None else None
        )
        self._hits = RecentShare(now) if hits is None else hits
        self._is_counting_hits = hits is None
        self._builder = FrameBuilder()
        self._trend = Trend()
        self._advice_s = float("-inf")
        self._told: EngineReady | None = None
        self._viewers: set[asyncio.Queue[Event | None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def num_viewers(self) -> int:
        """Number of open streams."""
        return len(self._viewers)

    @property
    def is_full(self) -> bool:
        """Whether no more streams may be opened."""
        return len(self._viewers) >= LIMITS.max_viewers

    async def events(self) -> AsyncIterator[Event]:
        """Yield server-sent events for one viewer: the engine's properties, then frames, until the stream is closed."""
        if self._closed or self.is_full:
            return
        queue: asyncio.Queue[Event | None] = asyncio.Queue(LIMITS.max_queued_events)
        self._enter(queue)
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._leave(queue)

    def close(self) -> None:
        """End all streams, so that a draining server does not wait for viewers."""
        self._closed = True
        for queue in self._viewers:
            _push(queue, None)

    # ---- viewers ------------------------------------------------------------------------------------------------

    def _enter(self, queue: asyncio.Queue[Event | None]) -> None:
        if self._engine.info is not None:
            queue.put_nowait(_hello(self._engine.info))
        self._viewers.add(queue)
        if self._task is not None:
            self._tell_present(queue)
        else:
            self._builder = FrameBuilder()
            self._trend = Trend()
            self._told = self._engine.info
            self._task = asyncio.create_task(self._look())

    def _tell_present(self, queue: asyncio.Queue[Event | None]) -> None:
        """Send the current state to a new viewer, with the last block map: later frames have it only if it changes."""
        frame = Frame(at_s=self._at_s(self._now()), blocks=self._builder.last_blocks)
        frame.numbers = self._numbers(self._engine.stats)
        frame.replica, frame.replicas = self._place, self._loads()
        queue.put_nowait(_event("frame", frame))

    def _leave(self, queue: asyncio.Queue[Event | None]) -> None:
        self._viewers.discard(queue)
        if not self._viewers and self._task is not None:
            self._task.cancel()
            self._task = None

    def _tell(self, event: Event) -> None:
        for queue in self._viewers:
            _push(queue, event)

    # ---- looking ------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._gather())
                tasks.create_task(self._publish())
        except Exception:
            logger.exception("the live view failed; its viewers have to ask again")
            self._task = None
            for queue in self._viewers:
                _push(queue, None)

    async def _gather(self) -> None:
        async with contextlib.aclosing(self._engine.watch()) as snapshots:
            async for snapshot in snapshots:
                if isinstance(snapshot, BlockSnapshot):
                    self._builder.add_blocks(snapshot.blocks)
                else:
                    self._builder.add(snapshot)
                    self._token_times.add(snapshot)

    async def _publish(self) -> None:
        told_s = float("-inf")
        while True:
            now_s = self._now()
            if self._builder.has_news or now_s - told_s >= QUIET_FRAME_S:
                told_s = now_s
                self._tell_news()
                self._tell(_event("frame", self._frame(now_s)))
            await asyncio.sleep(self._frame_s)

    def _tell_news(self) -> None:
        """Send the engine's properties again if they have changed, as they may after a restart."""
        info = self._engine.info
        if info is not None and info is not self._told:
            self._told = info
            self._tell(_hello(info))

    def _frame(self, now_s: float) -> Frame:
        stats = self._engine.stats
        is_idle = stats.batch.num_running == 0 and stats.batch.num_waiting == 0
        if is_idle or not self._engine.health.ok:
            self._builder.became_idle()
            self._token_times.became_idle()
        self._token_times.forget_others(self._builder.running)
        frame = self._builder.take(self._at_s(now_s))
        frame.numbers = self._numbers(stats)
        frame.replica, frame.replicas = self._place, self._loads()
        if now_s - self._advice_s >= QUIET_FRAME_S:
            self._advice_s = now_s
            frame.advice = msgspec.to_builtins(self._advise(stats, now_s))
        return frame

    def _at_s(self, now_s: float) -> float:
        return round(now_s - self._began_s, 3)

    def _numbers(self, stats: EngineStats) -> dict[str, Any]:
        if self._is_counting_hits:
            self._hits.observe(stats.prefix_cache.num_hit_tokens, stats.prefix_cache.num_queried_tokens)
        gaps = self._gaps.of_last(SHOWN_LATENCY_S)
        first_tokens = self._first_tokens.of_last(SHOWN_LATENCY_S)
        health = self._engine.health
        return {
            "ok": health.ok,
            "reason": health.reason,
            "draining": self._is_draining(),
            "hit_rate": self._hits.share(),
            **stats.as_dict(),
            "ttft_p50_ms": _ms(percentile(first_tokens, 0.5)),
            "itl_p50_ms": _ms(percentile(gaps, 0.5)),
            "itl_p99_ms": _ms(percentile(gaps, 0.99)),
            "prices": None if self._prices is None else self._prices(),
        }

    def _advise(self, stats: EngineStats, now_s: float) -> Advice:
        self._trend.add(now_s, stats)
        info, health = self._engine.info, self._engine.health
        gaps = self._gaps.of_last(WINDOW_S)
        vitals = Vitals(
            is_healthy=health.ok,
            reason=health.reason,
            num_running=stats.batch.num_running,
            num_waiting=stats.batch.num_waiting,
            max_num_seqs=info.max_num_seqs if info else 1,
            queue_growth=self._trend.queue_growth,
            kv_used=stats.blocks.num_used_blocks / info.num_blocks if info else 0.0,
            num_preemptions=self._trend.num_preemptions,
            evicted=self._trend.num_evicted_blocks / info.num_blocks if info else 0.0,
            hit_rate=self._trend.hit_rate,
            hit_rate_before=self._trend.hit_rate_before,
            num_gaps=len(gaps),
            gap_p50_s=percentile(gaps, 0.5),
            gap_p99_s=percentile(gaps, 0.99),
        )
        return advise(vitals)


def _push(queue: asyncio.Queue[Event | None], event: Event | None) -> None:
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(event)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 2)


def _hello(info: EngineReady) -> Event:
    return _event("hello", {name: getattr(info, name) for name in info.__struct_fields__})


def _event(name: str, data: object) -> Event:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(data))
