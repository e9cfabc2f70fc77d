"""The loop of the engine process: messages, a step, messages, a step; and sleep when there is nothing to do.

    receive ──► aborts at once, requests into a line ──► prepare those in front, for a limited time ──► step

What belongs to a request fails with that request alone. If step after step fails as a whole, the line waits until a
plain request of the loop's own has shown whether the fault was in the requests or is in the engine.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

import msgspec

from headway.engine.llm_engine import LLMEngine
from headway.engine.step_report import StepReport
from headway.engine_process.engine_report import EngineCounters, SnapshotMaker
from headway.errors import HeadwayError, InvalidRequestError
from headway.outputs import LogprobsOfOnePosition, RequestMetrics, RequestOutput, Streaming
from headway.sampling_params import SamplingParams
from headway.structured.compile_grammar import REFUSAL
from headway.structured.compiling import Compiled
from headway.transfer.block_client import PeerBlocks
from headway.transfer.block_server import BlockServer
from headway.wire.engine_stats import EngineStats
from headway.wire.messages import (
    AbortRequests,
    AddRequest,
    CacheNews,
    Delta,
    FromEngine,
    PositionLogprobs,
    RequestTimings,
    Shutdown,
    StepBatch,
    TellCache,
    ToEngine,
    TokenLogprob,
    UnreadableRequest,
    Watch,
)

logger = logging.getLogger(__name__)

IDLE_S = 1.0
"""An idle loop looks around this often, unless a message comes."""
INTAKE_S = 0.05
"""How long requests are prepared between two steps. The rest of a burst waits for the next turn; requests that run do
not wait for it."""
COMPILE_POLL_S = 0.0005
MAX_FAILED_STEPS = 3
"""So many failures without a success between them raise the question whether the fault is in the requests. A device
does not recover from some errors, a new process does."""
PROBE = "#probe"

REQUEST_FAILED = "the engine failed to process this request"
SHUTTING_DOWN = "the server is shutting down"
NO_PARAMS = "the request has the parameters of one before it that could not be read"
NO_ERRORS: Mapping[str, str] = {}
NOTHING_FOUND = "stop_token_ids and min_tokens leave no token that a search could go on with"


class BrokenEngineError(HeadwayError):
    """Every step fails, whatever the request; only a new process can help."""


class Channel(Protocol):
    """What the loop needs of `EngineChannel`."""

    def receive(self, *, timeout_s: float) -> list[ToEngine | UnreadableRequest]: ...

    def send(self, message: FromEngine) -> None: ...

    def wake(self) -> None: ...


class EngineLoop:
    """Drives one engine for one front end."""

    def __init__(
        self,
        engine: LLMEngine,
        channel: Channel,
        *,
        counted: EngineStats | None = None,
        reports_cache: bool = False,
        blocks: BlockServer | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`blocks`: hands out this engine's KV blocks between two steps."""
        self._engine = engine
        self._channel = channel
        self._blocks = blocks
        self._now = now
        self._counters = EngineCounters(
            engine.core.scheduler, engine.beams, counted=counted, transfers=None if blocks is None else blocks.stats
        )
        prefix_cache = engine.core.scheduler.kv_cache.prefix_cache
        self._cache = prefix_cache.follow_changes() if reports_cache and prefix_cache is not None else None
        self._snapshots = SnapshotMaker(engine.core.scheduler, engine.beams, now=now)
        self._line: deque[AddRequest] = deque()  # requests that have come and are not prepared
        self._last_params: SamplingParams | None = None  # of the request that came last, if they could be read
        self._compiling: list[tuple[AddRequest, Future[Compiled]]] = []  # requests that wait for their grammar
        self._refused: list[Delta] = []  # and what else is said without a step
        self._live: set[str] = set()
        self._silent: set[str] = set()  # those of them that tell nothing but progress before their end
        self._is_watched = False
        tiers = engine.core.scheduler.kv_cache.tiers
        self._stats_are_stale = tiers is not None and len(tiers.host) > 0  # blocks have been loaded
        self._is_prepared = False  # whether the first grammar need not wait for the tokenizer's trie
        self._has_checked = True  # whether blocks and requests were found to agree since the last step
        self._has_blocks_to_serve = False
        self._num_failed_steps = 0
        self._drain_until_s: float | None = None
        self._turn_started_s: float | None = None
        if engine.core.executor.transfers is not None:
            engine.core.executor.transfers.wake(channel.wake)

    @property
    def turn_s(self) -> float:
        """For how long it has been in its present turn; 0 while it waits for messages. May be asked by any thread."""
        started_s = self._turn_started_s
        return 0.0 if started_s is None else self._now() - started_s

    def run(self) -> None:
        """Until a shutdown has been asked for and done. Raises `ChannelClosedError` if the front end goes away, and
        whatever the engine cannot recover from."""
        while True:
            self._take_messages()
            if self._is_drained():
                self._refuse_rest()
                return
            if self._engine.has_unfinished_requests():
                self._step()
            elif self._is_in_doubt:
                self._probe()

    def drain(self, drain_s: float) -> None:
        """Refuse new requests and end within that time. May be called again, also from a signal handler."""
        self._drain_until_s = self._now() + drain_s

    # ---- messages -------------------------------------------------------------------------------------------------

    def _take_messages(self) -> None:
        """All that have come, before each step; an idle engine sleeps here."""
        is_idle = not self._line and not self._engine.has_unfinished_requests()
        if is_idle and self._blocks is not None:
            self._serve_blocks(self._blocks)  # of the last step, before it sleeps
        if is_idle and self._stats_are_stale:
            self._send_step([])
        if is_idle and self._is_watched and self._snapshots.is_map_stale:
            self._channel.send(self._snapshots.blocks())
        has_told = is_idle and self._tell_cache()
        has_nothing_to_do = (is_idle and not has_told) or (not self._line and self._engine.core.only_waits_for_blocks)
        has_nothing_to_do = has_nothing_to_do and not self._has_blocks_to_serve
        may_sleep = has_nothing_to_do and not self._is_in_doubt and self._drain_until_s is None
        self._turn_started_s = None
        idle_s = COMPILE_POLL_S if self._compiling else IDLE_S
        messages = self._channel.receive(timeout_s=idle_s if may_sleep else 0.0)
        self._turn_started_s = self._now()
        if may_sleep and is_idle and not messages and not self._compiling:
            self._check_itself()
        for message in messages:
            self._take(message)
        if self._compiling:
            self._take_compiled()
        if not self._is_in_doubt:
            self._admit_line()
        if self._blocks is not None:
            self._serve_blocks(self._blocks)
        if self._refused:
            self._send_step(self._refused)
            self._refused = []

    def _serve_blocks(self, blocks: BlockServer) -> None:
        num_before = blocks.stats.num_sent_blocks
        self._has_blocks_to_serve = blocks.serve()
        self._stats_are_stale |= blocks.stats.num_sent_blocks > num_before

    def _take(self, message: ToEngine | UnreadableRequest) -> None:
        if isinstance(message, AddRequest):
            self._take_request(message)
        elif isinstance(message, UnreadableRequest):
            self._last_params = None  # those that follow must not be served with the parameters of others
            self._refused.append(_failure(message.request_id, message.message, status=400, param=message.param))
        elif isinstance(message, AbortRequests):
            self._abort(message.request_ids)
        elif isinstance(message, Watch):
            self._is_watched = message.on
            if message.on:
                self._channel.send(self._snapshots.blocks())
        elif isinstance(message, TellCache):
            if self._cache is not None:
                self._cache.tell_all()
        elif isinstance(message, Shutdown):
            self.drain(message.drain_s)

    def _take_request(self, request: AddRequest) -> None:
        """Into the line, with parameters of its own."""
        if self._blocks is not None:
            self._blocks.note_request(request.request_id)
        if request.params is None:
            request = msgspec.structs.replace(request, params=self._last_params)
        self._last_params = request.params
        if self._drain_until_s is not None:
            self._refused.append(_failure(request.request_id, SHUTTING_DOWN, status=503))
            self._forget(request.request_id)
        elif request.params is None:
            self._refused.append(_failure(request.request_id, NO_PARAMS, status=400, param="params"))
            self._forget(request.request_id)
        else:
            self._queue(request, request.params)

    def _queue(self, request: AddRequest, params: SamplingParams) -> None:
        """Into the line; where a grammar has to be compiled first, when that is done."""
        if params.grammar is None:
            self._line.append(request)
            return
        self._prepare_guides()
        try:
            self._compiling.append((request, self._engine.guides.compile(params)))
        except InvalidRequestError as error:
            self._refuse(request.request_id, error)

    def _prepare_guides(self) -> None:
        """Takes half a second and Python's lock, so it is done while nothing runs, or at the first grammar."""
        if not self._is_prepared:
            self._is_prepared = True
            self._engine.guides.prepare()

    def _take_compiled(self) -> None:
        """Requests whose grammar is ready go into the line."""
        waiting, self._compiling = self._compiling, []
        for request, job in waiting:
            if not job.done():
                self._compiling.append((request, job))
            elif (error := job.exception()) is not None:
                self._refuse(request.request_id, error)
            else:
                self._line.append(request)

    def _refuse(self, request_id: str, error: BaseException) -> None:
        self._forget(request_id)
        if isinstance(error, InvalidRequestError):
            self._refused.append(_failure(request_id, str(error), status=error.http_status, param=error.param))
        else:
            logger.error("request %s could not be queued", request_id, exc_info=error)
            self._refused.append(_failure(request_id, REQUEST_FAILED, status=500))

    def _admit_line(self) -> None:
        """Prepare requests in order of arrival, at least one and no more than there is time for."""
        until_s = self._now() + INTAKE_S
        while self._line:
            self._add(self._line.popleft())
            if self._now() >= until_s:
                return

    def _add(self, request: AddRequest) -> None:
        """Queue a request, or say why not. Nothing that is wrong with one request may hurt another."""
        params = request.params
        assert params is not None
        stream: Streaming = "delta" if params.can_stream else False
        ended: RequestOutput | None = None
        try:
            prepared = self._engine.prepare(request.request_id, request.prompt_token_ids, params, request.options)
            if request.told is None:
                self._engine.submit(prepared, stream=stream)
            else:
                ended = self._engine.resume(prepared, request.told)
        except Exception as error:
            self._refuse(request.request_id, error)
            return
        self._live.add(request.request_id)
        if not params.can_stream:
            self._silent.add(request.request_id)
        if ended is not None:
            self._add_deltas(self._refused, ended)

    def _abort(self, request_ids: list[str]) -> None:
        """Who is still in line leaves it without having been prepared."""
        if self._line or self._compiling:
            aborted = frozenset(request_ids)
            self._line = deque(request for request in self._line if request.request_id not in aborted)
            self._stop_compiling(aborted)
        for request_id in request_ids:
            self._engine.abort(request_id)
            self._forget(request_id)
        self._stats_are_stale = True
        self._snapshots.note_blocks_changed()

    def _stop_compiling(self, aborted: frozenset[str]) -> None:
        """A grammar that no request waits for any more is not compiled, unless that has begun."""
        given_up = [job for request, job in self._compiling if request.request_id in aborted]
        self._compiling = [it for it in self._compiling if it[0].request_id not in aborted]
        wanted = {id(job) for _, job in self._compiling}
        for job in given_up:
            if id(job) not in wanted:
                job.cancel()

    def _forget(self, request_id: str) -> None:
        self._live.discard(request_id)
        self._silent.discard(request_id)
        if self._blocks is not None:
            self._blocks.note_end(request_id)

    def _check_itself(self) -> None:
        """There has been nothing to do for a while."""
        self._prepare_guides()
        if not self._has_checked:
            self._has_checked = True
            try:
                self._engine.check_invariants()
            except AssertionError as error:
                logger.error("requests and blocks disagree: %s", error)

    # ---- a step ---------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        step = self._engine.step()
        deltas = [Delta(request_id, progress=progress) for request_id, progress in step.progress.items()]
        num_new_tokens = sum([progress.num_tokens for progress in step.progress.values()])
        for output in step.outputs:
            if output.request_id not in self._silent:
                num_new_tokens += sum([len(new.token_ids) for new in output.outputs])
            self._add_deltas(deltas, output, step.errors if step.report.error is None else {})
        self._counters.take(step.report, num_new_tokens=num_new_tokens)
        self._has_checked = False
        self._tell_cache()
        self._send_step(deltas, begun=step.begun)
        if self._is_watched:
            self._channel.send(self._snapshots.snapshot(step.report))
        self._note_outcome(step.report)

    def _tell_cache(self) -> bool:
        """Report what has changed in the prefix cache, some of it at a time. Returns whether there was anything."""
        report = None if self._cache is None else self._cache.report()
        if report is not None:
            self._channel.send(
                CacheNews(report.number, list(report.stored), list(report.evicted), is_whole=report.is_whole)
            )
        return report is not None

    def _send_step(self, deltas: list[Delta], *, begun: Sequence[str] = ()) -> None:
        self._stats_are_stale = False
        stats, transfers = self._counters.stats(), self._engine.core.executor.transfers
        if transfers is not None and isinstance(transfers.peers, PeerBlocks):
            stats.transfers.block_s = transfers.peers.block_s
        self._channel.send(StepBatch(deltas, stats, list(begun)))

    def _add_deltas(self, deltas: list[Delta], output: RequestOutput, errors: Mapping[str, str] = NO_ERRORS) -> None:
        """A delta for each completion that has news; the last of a request that has ended says so. Why a request failed
        may be told if that is its own affair, among `errors`; what is wrong with a whole step is for the log."""
        request_id = output.request_id
        if not output.outputs:
            deltas.append(_failure(request_id, NOTHING_FOUND, status=400, param="stop_token_ids"))
            self._forget(request_id)
            return
        for new in output.outputs:
            delta = Delta(request_id, new.index, new.text, new.token_ids)
            if new.logprobs is not None:
                delta.logprobs = list(map(_position, new.logprobs))
            if request_id in self._silent:
                delta.cumulative_logprob = new.cumulative_logprob
            if new.finish_reason is not None:
                delta.finish_reason, delta.stop_reason = new.finish_reason, new.stop_reason
                if new.finish_reason == "error":
                    why = errors.get(request_id)
                    if why is not None and why.startswith(REFUSAL):  # its grammar was too much for the matcher
                        delta.error, delta.error_status = why, 400
                    else:
                        delta.error = REQUEST_FAILED if why is None else f"{REQUEST_FAILED}: {why}"
            deltas.append(delta)
        if output.prompt_logprobs is not None:
            positions = [None if found is None else _position(found) for found in output.prompt_logprobs]
            deltas[-len(output.outputs)].prompt_logprobs = positions
        if output.finished:
            deltas[-1].is_last = True
            if output.embedding is not None:
                deltas[-1].embedding = output.embedding.tobytes()
            deltas[-1].timings = _timings(output.metrics, output.num_cached_tokens)
            self._forget(request_id)

    def _note_outcome(self, report: StepReport) -> None:
        """Only a step that failed as a whole counts, and one that computed nothing says nothing."""
        if report.error is not None:
            self._num_failed_steps += 1
        elif not report.snapshot.output.is_empty:
            self._num_failed_steps = 0

    @property
    def _is_in_doubt(self) -> bool:
        """Whether the next request to enter is the probe. The line waits for it: a request that makes its step fail
        must not take the probe along."""
        return self._num_failed_steps >= MAX_FAILED_STEPS

    def _probe(self) -> None:
        """Ask for one token, in the plainest way: if that works, the fault was in the requests."""
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
        self._engine.add_request(PROBE, [0], params, stream=False)
        has_failed = False
        while self._engine.has_unfinished_requests():
            has_failed |= PROBE in self._engine.step().errors
        if has_failed:
            raise BrokenEngineError(f"{self._num_failed_steps} steps in a row have failed, and so has a plain request")
        logger.warning("%d steps in a row have failed, a plain request has not", self._num_failed_steps)
        self._num_failed_steps = 0

    # ---- the end --------------------------------------------------------------------------------------------------

    def _is_drained(self) -> bool:
        if self._drain_until_s is None:
            return False
        is_idle = not self._line and not self._compiling and not self._engine.has_unfinished_requests()
        return is_idle or self._now() >= self._drain_until_s

    def _refuse_rest(self) -> None:
        """End what was not done in time."""
        waiting = [*self._line, *(request for request, _ in self._compiling)]
        unfinished = sorted({*self._live, *(request.request_id for request in waiting)})
        self._abort(unfinished)
        self._send_step([_failure(request_id, SHUTTING_DOWN, status=503) for request_id in unfinished])


def _failure(request_id: str, message: str, *, status: int, param: str | None = None) -> Delta:
    return Delta(
        request_id,
        finish_reason="error",
        error=message,
        is_last=True,
        timings=RequestTimings(),
        error_status=status,
        error_param=param,
    )


def _position(found: LogprobsOfOnePosition) -> PositionLogprobs:
    return [TokenLogprob(token_id, each.logprob, each.rank, each.decoded_token) for token_id, each in found.items()]


def _timings(metrics: RequestMetrics | None, num_cached_tokens: int) -> RequestTimings:
    """A request that failed early has not been through all of it; what it did not reach took no time. Nor did the
    prefill of one that goes on: it had its first token before its first step here."""
    assert metrics is not None and metrics.finished_s is not None
    scheduled_s = metrics.finished_s if metrics.first_scheduled_s is None else metrics.first_scheduled_s
    first_token_s = metrics.finished_s if metrics.first_token_s is None else metrics.first_token_s
    first_token_s = max(first_token_s, scheduled_s)
    return RequestTimings(
        queue_s=scheduled_s - metrics.arrival_time_s,
        prefill_s=first_token_s - scheduled_s,
        decode_s=metrics.finished_s - first_token_s,
        num_preemptions=metrics.num_preemptions,
        num_cached_tokens=num_cached_tokens,
    )
