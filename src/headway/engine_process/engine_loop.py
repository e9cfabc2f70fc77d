"""Connects the driver to a front end in the engine process: messages in, deltas and statistics out.

    message ──► grammar compiled, if there is one ──► line of the driver ──► engine ──► deltas, numbers, snapshots

An error of a request fails that request alone. Any other error ends the process; the front end then starts another one,
in which the requests continue.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec

from headway.core.kv.cache_report import CacheChanges
from headway.engine.driver import EngineDriver, Newcomer
from headway.engine.llm_engine import LLMEngine
from headway.engine.step_report import EngineStep
from headway.engine_process.awaited_grammars import AwaitedGrammars
from headway.engine_process.engine_deltas import REQUEST_FAILED, add_deltas, failure
from headway.engine_process.engine_report import EngineCounters, SnapshotMaker
from headway.errors import EngineUnavailableError, InvalidRequestError
from headway.outputs import RequestOutput, Streaming
from headway.sampling_params import SamplingParams
from headway.transfer.block_client import PeerBlocks
from headway.transfer.block_server import BlockServer
from headway.wire.engine_stats import EngineStats
from headway.wire.messages import (
    AbortRequests,
    AddRequest,
    CacheNews,
    CacheResetDone,
    Delta,
    FromEngine,
    ReportCache,
    RequestForecast,
    ResetCache,
    Shutdown,
    StepBatch,
    ToEngine,
    UnreadableRequest,
    Watch,
)

logger = logging.getLogger(__name__)

SHUTTING_DOWN = "the server is shutting down"
NO_PARAMS = "the request has the parameters of one before it that could not be read"


class Channel(Protocol):
    """The part of `EngineChannel` that the loop uses."""

    def receive(self, *, timeout_s: float) -> list[ToEngine | UnreadableRequest]: ...

    def send(self, message: FromEngine) -> None: ...

    def wake(self) -> None: ...


class EngineLoop:
    """The driver's channel to the front end."""

    wants_steps = True

    def __init__(
        self,
        engine: LLMEngine,
        channel: Channel,
        *,
        counted: EngineStats | None = None,
        reports_cache: bool = False,
        reports_tokens: bool = False,
        blocks: BlockServer | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`reports_tokens`: reports of the cache have the tokens of the blocks. `blocks`: the server that hands out
        this engine's KV blocks between two steps."""
        self.is_over = False
        self._engine = engine
        self._driver = EngineDriver(engine, self, is_replaceable=True, now=now)
        self._channel = channel
        self._blocks = blocks
        self._now = now
        self._counters = EngineCounters(
            engine.core.scheduler,
            engine.beams,
            counted=counted,
            transfers=None if blocks is None else blocks.stats,
            utilisation=engine.utilisation.stats,
        )
        prefix_cache = engine.core.scheduler.kv_cache.prefix_cache
        self._cache: CacheChanges | None = None
        if reports_cache and prefix_cache is not None:
            self._cache = prefix_cache.follow_changes(with_contents=reports_tokens)
        self._snapshots = SnapshotMaker(engine.core.scheduler, engine.beams, now=now)
        self._last_params: SamplingParams | None = None  # of the request that came last, if they could be read
        self._grammars = AwaitedGrammars(engine.guides, on_done=channel.wake)
        self._refused: list[Delta] = []  # and what else is said without a step
        self._forecasts: list[RequestForecast] = []  # of requests that were queued since the last message
        self._live: set[str] = set()
        self._silent: set[str] = set()  # those of them that tell nothing but progress before their end
        self._is_watched = False
        tiers = engine.core.scheduler.kv_cache.tiers
        self._stats_are_stale = tiers is not None and len(tiers.host) > 0  # blocks have been loaded
        self._has_checked = True  # whether blocks and requests were found to agree since the last step
        self._has_blocks_to_serve = False
        self._drain_until_s: float | None = None
        self._turn_started_s: float | None = None
        if engine.core.executor.transfers is not None:
            engine.core.executor.transfers.wake(channel.wake)

    @property
    def turn_s(self) -> float:
        """The time since its present turn began; 0 while it waits for messages. Safe to call from any thread."""
        started_s = self._turn_started_s
        return 0.0 if started_s is None else self._now() - started_s

    def run(self) -> None:
        """Serve until a requested shutdown is complete. Raises `ChannelClosedError` if the front end goes away, and any
        error that the engine cannot recover from."""
        self._driver.run()

    def drain(self, drain_s: float) -> None:
        """Refuse new requests and end within `drain_s`. May be called again, also from a signal handler."""
        self._drain_until_s = self._now() + drain_s

    # ---- what the driver asks for ---------------------------------------------------------------------------------

    def receive(self, *, is_idle: bool, timeout_s: float) -> None:
        """See `driver.Channel`. An idle engine sleeps here, after it has sent everything."""
        has_news = is_idle and self._say_the_rest()
        if has_news or self._has_blocks_to_serve or self._drain_until_s is not None:
            timeout_s = 0.0
        self._turn_started_s = None
        messages = self._channel.receive(timeout_s=timeout_s)
        self._turn_started_s = self._now()
        if timeout_s and is_idle and not messages and not self._grammars:
            self._check_itself()
        for message in messages:
            self._take(message)
        if self._grammars:
            for request, error in self._grammars.take_done():
                if error is None:
                    self._queue(request)
                else:
                    self._refuse(request.request_id, error)

    def admitted(self) -> None:
        """See `driver.Channel`."""
        if self._blocks is not None:
            self._serve_blocks(self._blocks)
        if self._refused or self._forecasts:
            self._send_step(self._refused)
            self._refused = []
        if self._is_drained():
            self._refuse_rest()
            self.is_over = True

    def hand_out(self, step: EngineStep) -> None:
        """See `driver.Channel`."""
        deltas = [Delta(request_id, progress=progress) for request_id, progress in step.progress.items()]
        num_new_tokens = sum([progress.num_tokens for progress in step.progress.values()])
        errors = step.errors if step.report.error is None else {}
        for output in step.outputs:
            is_silent = output.request_id in self._silent
            if not is_silent:
                num_new_tokens += sum([len(new.token_ids) for new in output.outputs])
            add_deltas(deltas, output, errors, is_silent=is_silent)
            if deltas[-1].is_last:
                self._forget(output.request_id)
        self._counters.take(step.report, num_new_tokens=num_new_tokens)
        self._has_checked = False
        self._tell_cache()
        self._send_step(deltas, begun=step.begun)
        if self._is_watched:
            self._channel.send(self._snapshots.snapshot(step.report))

    def lose_all(self, error: BaseException) -> None:
        """See `driver.Channel`. The error is raised and ends the process."""
        raise error

    # ---- requests -------------------------------------------------------------------------------------------------

    def _take(self, message: ToEngine | UnreadableRequest) -> None:
        if isinstance(message, AddRequest):
            self._take_request(message)
        elif isinstance(message, UnreadableRequest):
            self._last_params = None  # those that follow must not be served with the parameters of others
            self._refused.append(failure(message.request_id, message.message, status=400, param=message.param))
        elif isinstance(message, AbortRequests):
            self._abort(message.request_ids)
        elif isinstance(message, Watch):
            self._is_watched = message.on
            if message.on:
                self._channel.send(self._snapshots.blocks())
        elif isinstance(message, ReportCache):
            if self._cache is not None:
                self._cache.tell_all()
        elif isinstance(message, ResetCache):
            self._reset_cache(message)
        elif isinstance(message, Shutdown):
            self.drain(message.drain_s)

    def _take_request(self, request: AddRequest) -> None:
        """Put a request into the driver's line, with its parameters filled in. If it has a grammar, that is compiled
        first."""
        if self._blocks is not None:
            self._blocks.note_request(request.request_id)
        if request.params is None:
            request = msgspec.structs.replace(request, params=self._last_params)
        self._last_params = request.params
        if self._drain_until_s is not None:
            self._refuse(request.request_id, EngineUnavailableError(SHUTTING_DOWN))
        elif request.params is None:
            self._refuse(request.request_id, InvalidRequestError(NO_PARAMS, param="params"))
        elif request.params.grammar is None:
            self._queue(request)
        else:
            try:
                self._grammars.add(request, request.params)
            except InvalidRequestError as error:
                self._refuse(request.request_id, error)

    def _queue(self, request: AddRequest) -> None:
        self._driver.queue(Newcomer(request.request_id, partial(self._enter, request)))

    def _enter(self, request: AddRequest) -> None:
        """Queue a request in the engine, or refuse it with the reason. An error of one request must not affect
        another."""
        params = request.params
        assert params is not None
        stream: Streaming = "delta" if params.can_stream else False
        ended: RequestOutput | None = None
        try:
            prepared = self._engine.prepare(request.request_id, request.prompt_token_ids, params, request.options)
            if request.delivered is None:
                forecast = self._engine.forecast(prepared)
                self._engine.submit(prepared, stream=stream)
                if forecast is not None:
                    self._forecasts.append(RequestForecast(request.request_id, *forecast))
            else:
                ended = self._engine.resume(prepared, request.delivered)
        except Exception as error:
            self._refuse(request.request_id, error)
            return
        self._live.add(request.request_id)
        if not params.can_stream:
            self._silent.add(request.request_id)
        if ended is not None:
            add_deltas(self._refused, ended, is_silent=not params.can_stream)
            if self._refused[-1].is_last:
                self._forget(request.request_id)

    def _refuse(self, request_id: str, error: BaseException) -> None:
        self._forget(request_id)
        if isinstance(error, InvalidRequestError | EngineUnavailableError):
            param = error.param if isinstance(error, InvalidRequestError) else None
            self._refused.append(failure(request_id, str(error), status=error.http_status, param=param))
        else:
            logger.error("request %s could not be queued", request_id, exc_info=error)
            self._refused.append(failure(request_id, REQUEST_FAILED, status=500))

    def _abort(self, request_ids: list[str]) -> None:
        """Abort requests. Those in line are removed without having been prepared."""
        aborted = frozenset(request_ids)
        self._driver.leave_line(aborted)
        self._grammars.drop(aborted)
        for request_id in request_ids:
            self._engine.abort(request_id)
            self._forget(request_id)
        self._stats_are_stale = True
        self._snapshots.note_blocks_changed()

    def _forget(self, request_id: str) -> None:
        self._live.discard(request_id)
        self._silent.discard(request_id)
        if self._blocks is not None:
            self._blocks.note_end(request_id)

    # ---- beside requests ------------------------------------------------------------------------------------------

    def _say_the_rest(self) -> bool:
        """Send what is left when the engine becomes idle. Returns whether there may be more to send."""
        if self._blocks is not None:
            self._serve_blocks(self._blocks)  # of the last step, before it sleeps
        if self._stats_are_stale:
            self._send_step([])
        if self._is_watched and self._snapshots.is_map_stale:
            self._channel.send(self._snapshots.blocks())
        return self._tell_cache()

    def _check_itself(self) -> None:
        """Prepare for grammars and check the engine's invariants, while there is nothing else to do."""
        self._grammars.prepare()
        if not self._has_checked:
            self._has_checked = True
            try:
                self._engine.check_invariants()
            except AssertionError as error:
                logger.error("requests and blocks disagree: %s", error)

    def _serve_blocks(self, blocks: BlockServer) -> None:
        num_before = blocks.stats.num_sent_blocks
        self._has_blocks_to_serve = blocks.serve()
        self._stats_are_stale |= blocks.stats.num_sent_blocks > num_before

    def _reset_cache(self, message: ResetCache) -> None:
        outcome = self._engine.reset_prefix_cache(with_disk=message.with_disk)
        self._stats_are_stale = True
        self._snapshots.note_blocks_changed()
        self._channel.send(CacheResetDone(message.name, outcome.num_forgotten, outcome.num_kept))

    def _tell_cache(self) -> bool:
        """Send one report of changes in the prefix cache, of limited size. Returns whether there were any."""
        report = None if self._cache is None else self._cache.report()
        if report is not None:
            self._channel.send(
                CacheNews(
                    report.number,
                    list(report.stored),
                    list(report.evicted),
                    is_whole=report.is_whole,
                    contents=list(report.contents),
                )
            )
        return report is not None

    def _send_step(self, deltas: list[Delta], *, begun: Sequence[str] = ()) -> None:
        self._stats_are_stale = False
        stats, transfers = self._counters.stats(), self._engine.core.executor.transfers
        if transfers is not None and isinstance(transfers.peers, PeerBlocks):
            stats.transfers.block_s = transfers.peers.block_s
        forecasts, self._forecasts = self._forecasts, []
        self._channel.send(StepBatch(deltas, stats, list(begun), forecasts))

    # ---- the end --------------------------------------------------------------------------------------------------

    def _is_drained(self) -> bool:
        if self._drain_until_s is None:
            return False
        is_idle = not self._waiting_ids and not self._engine.has_unfinished_requests()
        return is_idle or self._now() >= self._drain_until_s

    @property
    def _waiting_ids(self) -> list[str]:
        return [*self._driver.waiting_ids, *self._grammars.request_ids]

    def _refuse_rest(self) -> None:
        """End the requests that did not finish in time."""
        unfinished = sorted({*self._live, *self._waiting_ids})
        self._abort(unfinished)
        self._send_step([failure(request_id, SHUTTING_DOWN, status=503) for request_id in unfinished])
