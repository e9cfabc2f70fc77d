"""The engine as the front end knows it: requests in, streams of deltas out, whatever happens to the processes behind.

    submit ──► router ──► replica 0 ┐
                          replica 1 ├──► deltas ──► stream of the request
                          …         ┘

A request whose replica dies, hangs or shuts down goes on in another one, or in the same when that is back: with the
tokens that were told, behind which come the tokens that it would have had there. Its reader sees a pause. After
`Patience.resume_s` without a replica it ends with an error.

A request may be what kills engines. Of those that have seen `SUSPECT_DEATHS` of them and got no token in between, few
are tried at a time beside the others: half as many after each death, more with each that gets a token. One that was
tried alone when `MAX_TRIALS` engines died ends with an error.

Where prefill and decode are apart, a prompt may be computed by a replica of its own:

    submit ──► router ──► decode replica ◄── blocks ── prefill replica ◄── the prompt, as a request for one token
                               └──► deltas

Both get it at once, and blocks travel as they are computed. The request itself is complete without them: whatever
happens to the prefill replica, the decode replica computes what does not come.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import logging
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from headway.core.fetching import FETCH_LIMIT_S
from headway.core.kv.blocks import block_digests, root_digest
from headway.core.kv.cache_report import CacheReport
from headway.core.request_options import RequestOptions
from headway.errors import ConfigError, EngineStartError, EngineUnavailableError, InvalidRequestError
from headway.front.backoff import Backoff
from headway.front.connection import News
from headway.front.placement import EngineSpec, apart, divided, options_apart
from headway.front.request_phases import RequestPhases
from headway.front.roles import PrefillChoice, Roles, computes_elsewhere
from headway.front.router import Router, expected_tokens
from headway.front.scaling import ScalingRule
from headway.front.streams import CacheEvent, CacheStream, RequestStream, SnapshotStream, present_state
from headway.front.supervision import TICK_S, Patience, Replica
from headway.outputs import Told
from headway.sampling_params import SamplingParams
from headway.wire.engine_stats import EngineStats, summed
from headway.wire.messages import (
    AbortRequests,
    AddRequest,
    BlockExchange,
    BlockSnapshot,
    CacheNews,
    Delta,
    EngineReady,
    StepBatch,
    StepSnapshot,
    TellCache,
    Watch,
)

logger = logging.getLogger(__name__)

ENGINE_STOPPED = "the engine stopped; please retry"
"""What the requests of an engine that has ended are told."""
SUSPECT_DEATHS = 2
MAX_TRIALS = 3
MOST_TRIED = 16
SCALING_TICK_S = 1.0
SCALING_DRAIN_S = 30.0
"""Requests that take longer to end go on in another replica."""
FAILED_START_S = 30.0
"""Until it is tried again."""
TOO_MANY_DEATHS = "the engine stopped again and again when it came to this request"
SHUTTING_DOWN = "the server is shutting down"
SLOW_PREFILL = 4.0
"""A prompt that takes so many times as long as was expected is not waited for any more."""
LEAST_PREFILL_S = 10.0
"""But as long as this."""
MOST_PREFILL_S = FETCH_LIMIT_S
"""Nor longer than this, as the decode replica does; so long also where nothing is known to expect."""
_PREFILL_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)


@dataclass(frozen=True, slots=True)
class Health:
    """Whether requests are being served, and if not, why not. The reason may be shown to any client."""

    ok: bool
    reason: str


_HEALTHY = Health(True, "")


class Cluster(Protocol):
    """Machines that run engines."""

    def specs(self, spec: EngineSpec, num_replicas: int) -> list[EngineSpec]:
        """One for each replica."""


class _Open:
    """A request that was submitted and has neither ended nor been aborted."""

    __slots__ = ("blocks_at", "num_deaths", "num_trials", "parked_s", "phases", "replica", "request", "stream", "told")

    def __init__(self, request: AddRequest, stream: RequestStream, arrival_s: float) -> None:
        self.request = request
        self.stream = stream
        self.phases = RequestPhases(arrival_s)
        self.replica: Replica | None = None  # None: it waits for one
        self.parked_s = 0.0  # since when
        self.num_deaths = 0  # of engines that had it, since its last token
        self.num_trials = 0  # of these, while it was tried alone
        self.blocks_at: str | None = None  # where its prompt is computed, "": where it answers; None: not decided
        self.told: list[Told] | None = None
        params = request.params
        if params is not None and params.can_stream:
            self.told = [Told([]) for _ in range(params.n)]

    def note(self, delta: Delta, now_s: float) -> None:
        """Remember what its reader gets."""
        if delta.token_ids or delta.progress is not None:
            self.num_deaths = self.num_trials = 0
            self.phases.note_token(now_s)
        if delta.timings is not None:
            delta.timings = self.phases.timings(delta.timings, now_s)
        if self.told is not None and delta.index < len(self.told):
            own = self.told[delta.index]
            own.token_ids.extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.told[delta.index] = Told(own.token_ids, True)

    def message(self) -> AddRequest:
        """What a replica is to do now."""
        request, blocks_at = self.request, self.blocks_at or ""
        if request.options.blocks_at != blocks_at:  # nobody else may say where to fetch something from
            options = dataclasses.replace(request.options, blocks_at=blocks_at)
            request = msgspec.structs.replace(request, options=options)
        if self.told is None or not any(own.token_ids or own.is_finished for own in self.told):
            return request
        return msgspec.structs.replace(request, told=self.told)


Outcome = Literal["elsewhere", "here", "failed", "aborted"]
"""elsewhere: a prefill replica has computed the prompt · here: that was not worth it · failed: it was begun there, and
not finished · aborted: its client left meanwhile."""


@dataclass(eq=False, slots=True)
class _Prefill:
    """A prompt that a prefill replica computes."""

    request_id: str
    """Its own there."""
    of: str
    """The request that it is for."""
    replica: Replica
    until_s: float


class _Prefills:
    """Prompts that prefill replicas compute, and how they ended."""

    def __init__(self, router: str) -> None:
        self.router = Router(router, block_size=1, counts_uncached=True)
        self.num_by_outcome: dict[Outcome, int] = {"elsewhere": 0, "here": 0, "failed": 0, "aborted": 0}
        self._live: dict[str, _Prefill] = {}
        self._by_request: dict[str, _Prefill] = {}
        self._ids = itertools.count()
        self._own = secrets.token_hex(4)

    def next_id(self) -> str:
        """For a request of its own; other front ends of the replica have others."""
        return f"#prefill-{self._own}-{next(self._ids)}"

    def add(self, prefill: _Prefill) -> None:
        """It has been sent."""
        self._live[prefill.request_id] = self._by_request[prefill.of] = prefill

    def of_request(self, request_id: str) -> _Prefill | None:
        """What is being computed for a request."""
        return self._by_request.get(request_id)

    def at(self, replica: Replica) -> list[_Prefill]:
        """What a replica has to compute."""
        return [prefill for prefill in self._live.values() if prefill.replica is replica]

    def late(self, now_s: float) -> list[_Prefill]:
        """What has taken too long."""
        return [prefill for prefill in self._live.values() if prefill.until_s < now_s]

    def take(self, deltas: Sequence[Delta]) -> None:
        """Its tokens mean nothing, its end does."""
        for delta in deltas:
            prefill = self._live.get(delta.request_id)
            if prefill is not None and delta.is_last:
                self.end(prefill, "elsewhere" if delta.error is None else "failed")

    def end(self, prefill: _Prefill, outcome: Outcome) -> None:
        """It has ended, or is not waited for."""
        del self._live[prefill.request_id], self._by_request[prefill.of]
        self.router.end(prefill.request_id)
        self.num_by_outcome[outcome] += 1


class EngineClient:
    """Everything here belongs to the event loop in which `start` was awaited."""

    def __init__(
        self,
        options: Mapping[str, Any] | None = None,
        *,
        factory: str | None = None,
        patience: Patience | None = None,
        backoff: Callable[[], Backoff] = Backoff,
        log_level: str = "INFO",
        resumes: bool = True,
        num_replicas: int = 1,
        router: str = "prefix-aware",
        cluster: Cluster | None = None,
        scaling: ScalingRule | None = None,
        reports_caches: bool = False,
        roles: Roles | None = None,
        carrier: Literal["auto", "tcp"] = "auto",
    ) -> None:
        """`options` are those of `EngineConfig`, flat. `factory` names another engine, see `engine_process`. Without
        `resumes`, requests end with the process that has them. Engines run on this machine, or on a `cluster`;
        `num_replicas` of them, with `scaling` in the beginning. `reports_caches`: replicas tell what their prefix
        caches hold even where the router does not ask, so that it can be followed. `roles`: prefill and decode apart,
        in place of `num_replicas`; `carrier`: what their blocks travel over, as in `BlockExchange`; between machines
        that is TCP."""
        if roles is not None:
            if scaling is not None:
                raise ConfigError("roles are for a fixed number of replicas, without scaling.")
            carrier = carrier if cluster is None else "tcp"
            num_replicas, options = roles.num_replicas, options_apart(options or {}, carrier)
        most = num_replicas if scaling is None else scaling.most
        if not (1 if scaling is None else scaling.least) <= num_replicas <= most:
            raise ConfigError(f"There must be at least one replica, within the limits of scaling, not {num_replicas}.")
        self._scaling = scaling
        self._patience = patience or Patience()
        self._resumes = resumes
        self._router = Router(router, block_size=1, counts_uncached=roles is not None)  # the size is learnt later
        is_reported = reports_caches or roles is not None or (most > 1 and self._router.needs_digests)
        spec = EngineSpec(dict(options or {}), factory, log_level, reports_cache=is_reported)
        specs = (divided if cluster is None else cluster.specs)(spec, most)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._prefills: _Prefills | None = None
        if roles is not None:
            self._prefills, self._folder = _Prefills(router), tempfile.TemporaryDirectory(prefix="headway-")
            specs = apart(specs, roles, BlockExchange("decode", self._folder.name, carrier))
        self.replicas = [
            Replica(place, own, self, patience=self._patience, backoff=backoff(), rests=place >= num_replicas)
            for place, own in enumerate(specs)
        ]
        self._answering = [replica for replica in self.replicas if replica.role != "prefill"]
        self.num_resumed = 0
        """How often a request went on in another process."""
        self._open: dict[str, _Open] = {}
        self._tried: set[_Open] = set()  # requests that may kill engines, and that an engine has
        self._most_tried = MOST_TRIED
        self._aborted: dict[Replica, list[str]] = {}
        self._viewers: dict[int, list[SnapshotStream]] = {replica.place: [] for replica in self.replicas}
        self._followers: list[CacheStream] = []
        self._step_listeners: list[Callable[[EngineStats], None]] = []
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []

    # ---- its life -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine and wait until it takes requests; `EngineStartError` if it cannot. From then on it is
        started again whenever it ends."""
        starting = [asyncio.create_task(replica.start()) for replica in self.replicas if not replica.rests]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await asyncio.gather(*(replica.shutdown() for replica in self.replicas))
            raise
        self._tasks.append(asyncio.create_task(self._watch_parked()))
        if self._scaling is not None:
            self._tasks.append(asyncio.create_task(self._scale(self._scaling)))

    async def shutdown(self, drain_s: float = 0.0) -> None:
        """Take no new requests, let the others go on for at most `drain_s` seconds, and end the processes. Called
        again, it does not wait."""
        self._closing = True
        for follower in self._followers.copy():
            follower.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(replica.shutdown(drain_s) for replica in self.replicas))
        for own in list(self._open.values()):
            self._fail(own, ENGINE_STOPPED)
        for viewers in self._viewers.values():
            for viewer in viewers.copy():
                viewer.close()
        if self._folder is not None:
            self._folder.cleanup()

    async def restart(self, drain_s: float = 0.0) -> None:
        """Replace the processes one after the other, each when the one before is ready again. Requests end where they
        are within `drain_s` seconds, or go on elsewhere."""
        for replica in self.replicas:
            if not self._closing and not replica.rests:
                logger.info("replica %d is replaced", replica.place)
                await replica.restart(drain_s)

    @property
    def info(self) -> EngineReady | None:
        """What an engine said of itself when it got ready. All are alike."""
        return next((replica.info for replica in self.replicas if replica.info is not None), None)

    @property
    def stats(self) -> EngineStats:
        """Of all replicas together, as of the last step. Counters go on over restarts. A prompt that is computed for
        another replica counts there."""
        if len(self.replicas) == 1:
            return self.replicas[0].stats
        return summed(
            replica.stats.without_requests() if replica.role == "prefill" else replica.stats
            for replica in self.replicas
        )

    @property
    def prefill_outcomes(self) -> Mapping[str, int]:
        """Where prompts were computed, and how that ended; empty unless prefill and decode are apart."""
        return {} if self._prefills is None else dict(self._prefills.num_by_outcome.items())

    @property
    def num_restarts(self) -> int:
        """How often an engine was started again."""
        return sum(replica.num_restarts for replica in self.replicas)

    @property
    def health(self) -> Health:
        """Good only while requests are taken and make progress, by one replica at least."""
        if self._closing:
            return Health(False, SHUTTING_DOWN)
        problems = [replica.problem for replica in self._answering]
        if None in problems:
            return _HEALTHY
        return Health(False, problems[0] or ENGINE_STOPPED)

    @property
    def engine_pid(self) -> int | None:
        """The first process behind, if there is one that takes requests."""
        return next((replica.pid for replica in self.replicas if replica.pid is not None), None)

    @property
    def num_open_streams(self) -> int:
        """Requests that were submitted and have neither ended nor been aborted."""
        return len(self._open)

    # ---- requests -------------------------------------------------------------------------------------------------

    def submit(self, request: AddRequest, stream: RequestStream | None = None) -> RequestStream:
        """Send a request to an engine. Its id must never have been used before. `stream`: one that somebody reads
        already.

        Raises `EngineUnavailableError` if it cannot be taken now, `InvalidRequestError` if it does not fit into a
        message. What the engine itself refuses ends the stream with an error.
        """
        if request.request_id in self._open:
            raise InvalidRequestError(f"Request id '{request.request_id}' is already in use.", param="request_id")
        stream = RequestStream(request.request_id, self._abort) if stream is None else stream
        own = _Open(request, stream, time.monotonic())
        if not self._place(own):
            if self._closing or not self._resumes:
                raise EngineUnavailableError(self.health.reason or ENGINE_STOPPED)
            self._park(own)
        self._open[request.request_id] = own
        stream.abort_by(self._abort)
        return stream

    def _place(self, own: _Open) -> bool:
        """Send it to a replica, if there is one."""
        if self._closing or not any(replica.is_ready for replica in self._answering):
            return False
        if own.num_deaths >= SUSPECT_DEATHS:
            if own not in self._tried and len(self._tried) >= self._most_tried:
                return False
            self._tried.add(own)
        replica = self.replicas[0] if len(self.replicas) == 1 else self.replicas[self._route(own)]
        if self._prefills is not None and own.blocks_at is None:
            own.blocks_at = self._begin_prefill(own, replica, self._prefills)
        request = own.message()
        is_known = request.params is replica.sent_params
        try:
            replica.send(msgspec.structs.replace(request, params=None) if is_known else request)
        except (UnicodeEncodeError, OverflowError, TypeError) as error:
            self._end_prefill(request.request_id, "failed")
            self._router.end(request.request_id)
            raise InvalidRequestError("The request has a text or a number that cannot be stored.") from error
        replica.sent_params = request.params
        own.replica = replica
        return True

    def _route(self, own: _Open) -> int:
        request, info = own.request, self.info
        assert info is not None and request.params is not None
        prompt, told = request.prompt_token_ids, own.told or ()
        max_tokens = request.params.max_tokens or info.max_model_len - len(prompt)
        num_told = sum(len(each.token_ids) for each in told)
        num_answer = request.params.n * expected_tokens(max_tokens, request.options.predicted_tokens) - num_told

        return self._router.route(
            request.request_id,
            num_prompt_tokens=len(prompt) + num_told,
            num_answer_tokens=max(num_answer, 1),
            digests=functools.partial(_digests, request, len(prompt) // info.block_size, info.block_size),
        )

    def _begin_prefill(self, own: _Open, decode: Replica, prefills: _Prefills) -> str:
        """Have a prompt computed by a prefill replica, if that is better. Returns where its blocks come from."""
        request, info, params = own.request, decode.info, own.request.params
        assert info is not None and params is not None
        prompt, block_size = request.prompt_token_ids, info.block_size
        num_uncached = self._router.num_uncached(request.request_id)
        num_whole = (len(prompt) - 1) // block_size  # the last token is computed where the answer is
        num_blocks = max(num_whole - (len(prompt) - num_uncached) // block_size, 0)
        needs_all = params.prompt_logprobs is not None or params.pooling is not None
        if needs_all or not num_blocks or not prefills.router.has_healthy:
            prefills.num_by_outcome["here"] += 1
            return ""
        request_id = prefills.next_id()
        place = prefills.router.route(
            request_id,
            num_prompt_tokens=num_whole * block_size,
            num_answer_tokens=1,
            digests=functools.partial(_digests, request, num_whole, block_size),
        )
        replica = self.replicas[place]
        here, there = decode.stats, replica.stats
        choice = PrefillChoice(
            num_uncached=num_uncached,
            # A beginning that is cached there counts as if its queue were shorter.
            num_queued_prefill=max(prefills.router.num_prompt_tokens(place) - num_uncached, 0),
            num_queued_decode=self._router.num_prompt_tokens(decode.place) - num_uncached,
            num_generating=self._router.num_generating(decode.place),
            prefill_token_s=there.step.prompt_token_s or here.step.prompt_token_s,
            decode_token_s=here.step.prompt_token_s or there.step.prompt_token_s,
            transfer_s=here.transfers.block_s * num_blocks,
            num_blocks=num_blocks,
        )
        if replica.info is None or not computes_elsewhere(choice):
            prefills.router.end(request_id)
            prefills.num_by_outcome["here"] += 1
            return ""
        expected_s = SLOW_PREFILL * choice.prefill_token_s * prefills.router.num_prompt_tokens(place)
        limit_s = min(max(LEAST_PREFILL_S, expected_s), MOST_PREFILL_S) if expected_s else MOST_PREFILL_S
        until_s = asyncio.get_running_loop().time() + limit_s
        prefills.add(_Prefill(request_id, request.request_id, replica, until_s))
        try:
            replica.send(_prefill_message(request_id, request, num_whole * block_size))
        except (UnicodeEncodeError, OverflowError, TypeError):  # as it is going to be said of the request itself
            self._end_prefill(request.request_id, "failed")
            return ""
        replica.sent_params = _PREFILL_PARAMS
        self._router.note_elsewhere(request.request_id, len(prompt) - num_whole * block_size)
        return f"{replica.info.blocks_at}#{request_id}"

    def _end_prefill(self, request_id: str, outcome: Outcome) -> None:
        """What is computed for a request is not needed any more, or not waited for."""
        prefill = None if self._prefills is None else self._prefills.of_request(request_id)
        if self._prefills is not None and prefill is not None:
            self._prefills.end(prefill, outcome)
            self._abort_at(prefill.replica, prefill.request_id)

    def _park(self, own: _Open) -> None:
        """It waits until there is a replica."""
        own.replica, own.parked_s = None, asyncio.get_running_loop().time()

    def _fail(self, own: _Open, why: str, *, status: int = 503) -> None:
        request_id = own.request.request_id
        self._forget(request_id)
        own.stream.push(Delta(request_id, finish_reason="error", error=why, error_status=status, is_last=True))

    def _forget(self, request_id: str) -> _Open | None:
        self._end_prefill(request_id, "failed")
        self._router.end(request_id)
        own = self._open.pop(request_id, None)
        if own is not None and own in self._tried:
            self._end_trial(own)
        return own

    def _end_trial(self, own: _Open) -> None:
        """It was not this one, or it is not there any more."""
        self._tried.discard(own)
        self._most_tried = min(self._most_tried + 1, MOST_TRIED)
        self._place_parked()

    def _place_parked(self) -> int:
        parked = [own for own in self._open.values() if own.replica is None]
        return sum(map(self._place_again, parked))

    def _place_again(self, own: _Open) -> bool:
        """As `_place`, when nobody is there any more who could be told that it cannot be sent."""
        try:
            return self._place(own)
        except InvalidRequestError as error:
            self._fail(own, str(error), status=error.http_status)
            return True

    def _abort(self, request_id: str) -> None:
        self._end_prefill(request_id, "aborted")
        own = self._forget(request_id)
        if own is not None and own.replica is not None:
            self._abort_at(own.replica, request_id)

    def _abort_at(self, replica: Replica, request_id: str) -> None:
        """All aborts of one turn of the event loop travel together."""
        if not self._aborted:
            asyncio.get_running_loop().call_soon(self._send_aborts)
        self._aborted.setdefault(replica, []).append(request_id)

    def _send_aborts(self) -> None:
        aborted, self._aborted = self._aborted, {}
        for replica, request_ids in aborted.items():
            replica.send(AbortRequests(request_ids))

    # ---- watching -------------------------------------------------------------------------------------------------

    def watch(self, place: int = 0) -> SnapshotStream:
        """A replica's blocks as they are, and its every step from now on, until the stream is closed. It makes
        snapshots only while a stream of it is open."""
        viewer = SnapshotStream(functools.partial(self._leave, place))
        self._viewers[place].append(viewer)
        self._tell_watching(place)
        return viewer

    def follow_caches(self) -> CacheStream:
        """What the prefix cache of each replica holds, and every change from now on, until the stream is closed. Only
        replicas that report tell anything."""
        follower = CacheStream(len(self.replicas), self._present_cache, self._followers.remove)
        self._followers.append(follower)
        if self._closing:
            follower.close()
        return follower

    def _present_cache(self, place: int) -> list[CacheEvent]:
        index, info = self._router_of(self.replicas[place]).index, self.info
        return present_state(
            index.blocks_of(place),
            place=place,
            epoch=self.replicas[place].epoch,
            number=index.last_number(place),
            block_size=0 if info is None else info.block_size,
        )

    def add_step_listener(self, listener: Callable[[EngineStats], None]) -> None:
        """Call `listener` with the numbers of every step, in order; also after an abort, without a new step."""
        self._step_listeners.append(listener)

    def _leave(self, place: int, viewer: SnapshotStream) -> None:
        self._viewers[place].remove(viewer)
        if not self._viewers[place]:
            self._tell_watching(place)

    def _tell_watching(self, place: int) -> None:
        self.replicas[place].send(Watch(on=bool(self._viewers[place])))

    # ---- what replicas say ----------------------------------------------------------------------------------------

    def take(self, replica: Replica, news: News) -> None:
        """Something came from a replica."""
        if type(news) is StepBatch:
            self._take_step(replica, news)
        elif type(news) is CacheNews:
            self._take_report(replica, CacheReport(news.number, news.stored, news.evicted, news.is_whole))
        elif type(news) is StepSnapshot or type(news) is BlockSnapshot:
            for viewer in self._viewers[replica.place]:
                viewer.push(news)

    def _take_report(self, replica: Replica, report: CacheReport) -> None:
        is_known = self._router_of(replica).index.take(replica.place, report)
        if not is_known:
            replica.send(TellCache())
        block_size = 0 if replica.info is None else replica.info.block_size
        for follower in self._followers:
            if not is_known or report.is_whole:
                follower.start_anew(replica.place)
            else:
                number, stored, evicted, _ = report
                follower.push(CacheEvent(replica.place, replica.epoch, number, block_size, False, stored, evicted))

    def _take_step(self, replica: Replica, step: StepBatch) -> None:
        requests, routes, now_s = self._open, len(self.replicas) > 1, time.monotonic()
        if self._prefills is not None and replica.role == "prefill":
            self._prefills.take(step.deltas)
        for request_id in step.begun:
            own = requests.get(request_id)
            if own is not None and own.replica is replica:
                own.stream.note_begun()
                own.phases.note_begun(now_s - step.stats.step.duration_s)
        for delta in step.deltas:
            own = requests.get(delta.request_id)
            if own is None or own.replica is not replica:  # it was aborted, or moved, when this was on its way
                continue
            if delta.error is not None and delta.error_status == 503 and self._resumes and not self._closing:
                self._note_leaving(replica)
                self._move(own)
                continue
            own.note(delta, now_s)
            if not own.num_deaths and own in self._tried:
                self._end_trial(own)
            if delta.is_last:
                self._forget(delta.request_id)
            elif routes:
                self._router.note_tokens(delta.request_id, len(delta.token_ids))
            own.stream.push(delta)
        if self._step_listeners:
            stats = self._stats_after(step.stats)
            for listener in self._step_listeners:
                listener(stats)

    def _stats_after(self, step: EngineStats) -> EngineStats:
        """The state of all replicas, with what is told of the step itself."""
        if len(self.replicas) == 1:
            return step
        stats = self.stats
        stats.step = step.step
        return stats

    def note_ready(self, replica: Replica) -> None:
        """A replica takes requests: those that wait go on there."""
        assert replica.info is not None
        router = self._router_of(replica)
        router.block_size = replica.info.block_size
        router.add(replica.place, max_num_seqs=replica.info.max_num_seqs)
        if self._viewers[replica.place]:
            self._tell_watching(replica.place)
        if num_placed := self._place_parked():
            logger.warning("%d requests go on", num_placed)

    def note_loss(self, replica: Replica) -> None:
        """A replica is gone: what it had goes on elsewhere, or ends."""
        if self._prefills is not None and replica.role == "prefill":
            self._lose_prefills(replica, self._prefills)
        self._router_of(replica).remove(replica.place)
        for follower in self._followers:
            follower.start_anew(replica.place)
        lost = [own for own in self._open.values() if own.replica is replica]
        for own in lost:
            own.replica = None
            own.num_deaths += 1
        if tried := self._tried.intersection(lost):
            self._tried -= tried
            self._most_tried = max(1, len(tried) // 2)
            if len(tried) == 1:
                tried.pop().num_trials += 1
        for own in lost:
            if self._closing or not self._resumes:
                self._fail(own, ENGINE_STOPPED)
            elif own.num_trials >= MAX_TRIALS:
                self._fail(own, TOO_MANY_DEATHS)
            else:
                self._move(own)

    def note_problem(self, replica: Replica) -> None:
        """A replica that gives no sign of life gets no new requests while others can take them."""
        self._router_of(replica).suspend(replica.place, replica.is_leaving or replica.problem is not None)

    def _router_of(self, replica: Replica) -> Router:
        return self._prefills.router if self._prefills is not None and replica.role == "prefill" else self._router

    def _lose_prefills(self, replica: Replica, prefills: _Prefills) -> None:
        """Decode replicas notice by themselves that no blocks come; nobody asks this process again."""
        for prefill in prefills.at(replica):
            prefills.end(prefill, "failed")
        address = "" if replica.info is None else f"{replica.info.blocks_at}#"
        for own in self._open.values():
            if address and own.blocks_at and own.blocks_at.startswith(address):
                own.blocks_at = ""

    def _note_leaving(self, replica: Replica) -> None:
        """A process shuts down by itself, and refuses requests."""
        replica.is_leaving = True
        self._router_of(replica).suspend(replica.place, True)

    def _move(self, own: _Open) -> None:
        self.num_resumed += 1
        own.phases.note_move()
        self._router.end(own.request.request_id)
        if not self._place_again(own):
            self._park(own)

    async def _scale(self, rule: ScalingRule) -> None:
        """As many replicas as the rule wants, one more or less at a time."""
        while True:
            await asyncio.sleep(SCALING_TICK_S)
            stats, info = self.stats, self.info
            if info is None:
                continue
            awake = [replica for replica in self.replicas if not replica.rests]
            wanted = rule.wanted(
                num_replicas=len(awake),
                num_running=stats.batch.num_running,
                num_waiting=stats.batch.num_waiting + sum(own.replica is None for own in self._open.values()),
                max_num_seqs=info.max_num_seqs,
                seconds=SCALING_TICK_S,
            )
            if wanted > len(awake):
                await self._wake(next(replica for replica in self.replicas if replica.rests))
            elif wanted < len(awake):
                logger.info("replica %d is not needed any more", awake[-1].place)
                await awake[-1].rest(SCALING_DRAIN_S)

    async def _wake(self, replica: Replica) -> None:
        logger.info("requests wait: replica %d is started", replica.place)
        try:
            await replica.start()
        except (EngineStartError, OSError) as error:
            logger.error("replica %d could not be started: %s", replica.place, error)
            await replica.rest(0.0)
            await asyncio.sleep(FAILED_START_S)

    async def _watch_parked(self) -> None:
        """Requests do not wait for ever, neither for an engine nor for a prompt."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            for prefill in () if self._prefills is None else self._prefills.late(loop.time()):
                self._end_prefill(prefill.of, "failed")
            oldest_s = loop.time() - self._patience.resume_s
            for own in list(self._open.values()):
                if own.replica is None and own.parked_s < oldest_s:
                    self._fail(own, ENGINE_STOPPED)


def _digests(request: AddRequest, num_blocks: int, block_size: int) -> Sequence[bytes]:
    """Of the first blocks of a prompt."""
    tokens = tuple(request.prompt_token_ids[: num_blocks * block_size])
    return block_digests(root_digest(request.options.cache_salt), tokens, block_size)


def _prefill_message(request_id: str, request: AddRequest, num_tokens: int) -> AddRequest:
    """A request for one token behind the beginning of another one's prompt: what it leaves are the blocks."""
    options = RequestOptions(
        priority=request.options.priority,
        tenant=request.options.tenant,
        ttft_target_s=request.options.ttft_target_s,
        cache_salt=request.options.cache_salt,
    )
    return AddRequest(request_id, request.prompt_token_ids[:num_tokens], _PREFILL_PARAMS, options)
