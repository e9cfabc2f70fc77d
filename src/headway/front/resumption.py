"""Keeps requests open while their engines are lost and replaced.

    open ──► sent to an engine ──► deltas, delivered to the reader ──► the last one
     │            ▲        │ the engine dies, hangs or shuts down
     └─► queued ──┘ ◄──────┘

A request whose engine is gone continues in another one, or in the same one when that is back. It is sent with the
tokens already delivered, and the next tokens are the ones that it would have had in the first engine. Its reader only
sees a pause. A request that is queued for too long ends with an error, and so does one that kills engines
(`quarantine`).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from headway.errors import InvalidRequestError
from headway.front.dispatch import Dispatch
from headway.front.prefills import Outcome
from headway.front.quarantine import Quarantine
from headway.front.remote_engine import RemoteEngine
from headway.front.request_phases import RequestPhases
from headway.front.streams import RequestStream
from headway.outputs import Delivered
from headway.wire.messages import AddRequest, Delta, StepBatch

ENGINE_STOPPED = "the engine stopped; please retry"
"""The error of requests whose engine has ended."""
TOO_MANY_DEATHS = "the engine stopped again and again when it came to this request"


class OpenRequest:
    """A request that was submitted and has neither ended nor been aborted."""

    __slots__ = ("_delivered", "_request", "engine", "phases", "queued_s", "request_id", "stream")

    def __init__(self, request: AddRequest, stream: RequestStream, now_s: float) -> None:
        self.request_id = request.request_id
        self.stream = stream
        self.phases = RequestPhases(now_s)
        self.engine: RemoteEngine | None = None
        """The engine that has it. None: it is queued."""
        self.queued_s = now_s
        """The time at which it was queued, if it is."""
        self._request = request
        self._delivered: list[Delivered] | None = None
        params = request.params
        if params is not None and params.can_stream:
            self._delivered = [Delivered([]) for _ in range(params.n)]

    def note(self, delta: Delta, now_s: float) -> None:
        """Remember a delta that is delivered to the reader."""
        if delta.token_ids or delta.progress is not None:
            self.phases.note_token(now_s)
        if delta.timings is not None:
            delta.timings = self.phases.timings(delta.timings, now_s)
        if self._delivered is not None and delta.index < len(self._delivered):
            own = self._delivered[delta.index]
            own.token_ids.extend(delta.token_ids)
            if delta.finish_reason is not None:
                self._delivered[delta.index] = Delivered(own.token_ids, True)

    def message(self) -> AddRequest:
        """The request to send to an engine now, with the tokens delivered so far."""
        if self._delivered is None or not any(own.token_ids or own.is_finished for own in self._delivered):
            return self._request
        return msgspec.structs.replace(self._request, delivered=self._delivered)


class Resumption:
    """Sends requests, delivers their deltas to readers, and sends them again when an engine is gone."""

    def __init__(self, dispatch: Dispatch, *, resumes: bool, now: Callable[[], float]) -> None:
        """Without `resumes`, requests fail when their engine ends."""
        self._dispatch = dispatch
        self._resumes = resumes
        self._now = now
        self._closing = False
        self._open: dict[str, OpenRequest] = {}
        self._quarantine = Quarantine()
        self.num_resumed = 0
        """How many times a request was continued in another process."""

    @property
    def num_open(self) -> int:
        """Requests that have neither ended nor been aborted."""
        return len(self._open)

    @property
    def num_queued(self) -> int:
        """Open requests that no engine has."""
        return sum(own.engine is None for own in self._open.values())

    # ---- what clients want ----------------------------------------------------------------------------------------

    def open(self, request: AddRequest, stream: RequestStream | None = None) -> RequestStream | None:
        """Send a request, or queue it until an engine takes it. Returns its stream, or None if neither is possible.
        Raises `InvalidRequestError` if its id is in use or it does not fit into a message."""
        request_id = request.request_id
        if request_id in self._open:
            raise InvalidRequestError(f"Request id '{request_id}' is already in use.", param="request_id")
        stream = RequestStream(request_id, self.abort) if stream is None else stream
        own = OpenRequest(request, stream, self._now())
        if not self._send(own) and not self._resumes:
            return None
        self._open[request_id] = own
        stream.abort_by(self.abort)
        return stream

    def abort(self, request_id: str) -> None:
        """Abort a request whose reader has left."""
        own = self._end(request_id, "aborted")
        if own is not None and own.engine is not None:
            own.engine.abort(request_id)

    def fail_overdue(self, limit_s: float) -> None:
        """Fail the requests that have been queued for longer than `limit_s`."""
        oldest_s = self._now() - limit_s
        for own in list(self._open.values()):
            if own.engine is None and own.queued_s < oldest_s:
                self._fail(own, ENGINE_STOPPED)

    def close(self) -> None:
        """Send no more requests to engines."""
        self._closing, self._resumes = True, False

    def fail_all(self) -> None:
        """Fail all open requests, when no engine is left."""
        for own in list(self._open.values()):
            self._fail(own, ENGINE_STOPPED)

    # ---- what engines say -----------------------------------------------------------------------------------------

    def deliver(self, engine: RemoteEngine, step: StepBatch) -> None:
        """Deliver the deltas of an engine's step to the readers."""
        requests, now_s = self._open, self._now()
        note_tokens = self._dispatch.note_tokens if self._dispatch.counts else None
        suspicions = self._quarantine.suspicions
        for request_id in step.begun:
            own = requests.get(request_id)
            if own is not None and own.engine is engine:
                own.stream.note_begun()
                own.phases.note_begun(now_s - step.stats.step.duration_s)
        for forecast in step.forecasts:
            own = requests.get(forecast.request_id)
            if own is not None and own.engine is engine:
                own.stream.note_forecast(forecast)
        for delta in step.deltas:
            own = requests.get(delta.request_id)
            if own is None or own.engine is not engine:  # it was aborted, or moved, when this was on its way
                continue
            if delta.error is not None and delta.error_status == 503 and self._resumes:
                self._dispatch.note_leaving(engine)
                self._move(own)
                continue
            own.note(delta, now_s)
            if suspicions and (delta.token_ids or delta.progress is not None):
                self._release(own)
            if delta.is_last:
                self._end(own.request_id)
            elif note_tokens is not None:
                note_tokens(own.request_id, len(delta.token_ids))
            own.stream.push(delta)

    def note_loss(self, engine: RemoteEngine) -> None:
        """Note that an engine is gone. Its requests continue in other engines, or fail."""
        lost = [own for own in self._open.values() if own.engine is engine]
        for own in lost:
            own.engine = None
        self._quarantine.note_death([own.request_id for own in lost])
        for own in lost:
            if not self._resumes:
                self._fail(own, ENGINE_STOPPED)
            elif self._quarantine.is_guilty(own.request_id):
                self._fail(own, TOO_MANY_DEATHS)
            else:
                self._move(own)

    def send_queued(self) -> int:
        """Send the queued requests, now that an engine takes requests. Returns how many were sent or failed."""
        queued = [own for own in self._open.values() if own.engine is None]
        return sum(own.engine is None and own.request_id in self._open and self._send_again(own) for own in queued)

    # ---- one request ----------------------------------------------------------------------------------------------

    def _send(self, own: OpenRequest) -> bool:
        """Send a request, if an engine takes it. Returns whether one did."""
        if self._closing or not self._dispatch.is_possible or not self._quarantine.admits(own.request_id):
            return False
        own.engine = self._dispatch.send(own.message())
        return True

    def _send_again(self, own: OpenRequest) -> bool:
        """Like `_send`, for a request that was accepted before: if it is invalid, its stream ends with the error."""
        try:
            return self._send(own)
        except InvalidRequestError as error:
            self._fail(own, str(error), status=error.http_status)
            return True

    def _move(self, own: OpenRequest) -> None:
        """Continue a request in another engine, or queue it."""
        self.num_resumed += 1
        own.phases.note_move()
        self._dispatch.withdraw(own.request_id)
        if not self._send_again(own):
            own.engine, own.queued_s = None, self._now()

    def _fail(self, own: OpenRequest, why: str, *, status: int = 503) -> None:
        self._end(own.request_id)
        last = Delta(own.request_id, finish_reason="error", error=why, error_status=status, is_last=True)
        own.stream.push(last)

    def _end(self, request_id: str, outcome: Outcome = "failed") -> OpenRequest | None:
        self._dispatch.end(request_id, outcome)
        own = self._open.pop(request_id, None)
        if own is not None:
            self._release(own)
        return own

    def _release(self, own: OpenRequest) -> None:
        """Clear a request of suspicion. Another suspect may run in its place."""
        if self._quarantine.release(own.request_id):
            self.send_queued()
