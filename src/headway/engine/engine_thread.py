"""One thread steps an engine for all callers of an `LLM`; they put requests in and wait for their own outputs.

    caller 1      submit ───────────── wait ──────────► outputs
    caller 2                submit ─── wait ── Ctrl-C   cancel
                     │        │                           │           messages
                     ▼        ▼                           ▼
    this thread   ── step ─── step ─── step ─── step ─── abort ─── step ─── ···

Nothing else touches the engine while a caller waits, and without one the thread sleeps: a stream that is not read does
not compute. What interrupts a caller is raised in the caller's thread, so it can never tear a step; whatever a caller
has put in and does not want any more is aborted between two steps.

Messages and outputs go through `SimpleQueue`s. Their `put` and `get` are single calls into C: an exception that comes
between any two bytecodes of a caller, as Ctrl-C does, leaves no lock taken, and `put` may be called by the garbage
collector. A `Condition`, an `Event` or a `Queue` promises neither.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from headway.engine.driver import EngineDriver, cause_of
from headway.engine.llm_engine import LLMEngine
from headway.engine.request_preparer import PreparedRequest
from headway.engine.step_report import EngineStep
from headway.errors import EngineDeadError, HeadwayError
from headway.outputs import GrowingOutput, RequestOutput, Streaming

logger = logging.getLogger(__name__)

SHUT_DOWN = "The LLM has been shut down."
_GONE = "The request is not in the engine any more: something else has stepped the engine, or has ended the request."
_LOOK_S = 1.0  # how often a caller that waits makes sure that there is a thread to wait for
_STOP_S = 10.0  # so long the end of a program or of an LLM waits for a step that is under way


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a step, or an abort, has brought a caller."""

    outputs: list[RequestOutput]
    """None for a stream: it was aborted from elsewhere."""
    errors: dict[str, str] = field(default_factory=dict)
    """Why requests have failed, by request id."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """The caller gets nothing more than this."""

    error: BaseException


@dataclass(slots=True, eq=False)
class _Account:
    """What the thread keeps for a ticket."""

    owner: weakref.ref[Ticket]
    mailbox: SimpleQueue[Delivery | _Failure]
    grown: GrowingOutput | None
    """All that a stream has been given, for an abort; `None` for a call. For a stream steps are made when its owner
    asks for more, for a call until all its requests have ended."""
    request_ids: set[str] = field(default_factory=set)
    """Those that have not ended."""
    num_delivered: int = 0
    is_awaited: bool = False

    @property
    def is_driving(self) -> bool:
        return self.grown is None or self.is_awaited

    def deliver(self, what: Delivery | _Failure) -> None:
        self.num_delivered += 1
        self.is_awaited = False
        self.mailbox.put(what)


_Message = Callable[["_Callers"], None]


class EngineThread:
    """Owns the thread. It ends with `stop`, with the interpreter, or when nothing refers to this object any more."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._start()

    @property
    def num_tokens(self) -> int:
        """Tokens computed until now."""
        return self._callers.num_tokens

    @property
    def num_running(self) -> int:
        """Requests in the batch of the last step."""
        return self._callers.num_running

    def open_call(self) -> Ticket:
        """A ticket for requests without streaming: steps are made until all have ended. Nothing has happened yet."""
        return Ticket(self, grown=None)

    def open_stream(self, *, num_completions: int) -> Ticket:
        """Submit one request that streams deltas; steps run while its next delta is awaited."""
        return Ticket(self, grown=GrowingOutput(num_completions))

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request of any caller; returns what it had. A stream that is ended by this brings nothing more, and a
        call that waits for an output gets that of the abort."""
        answer: SimpleQueue[RequestOutput | None] = SimpleQueue()
        self.post(lambda callers: callers.abort(request_id, answer))
        output: RequestOutput | None = self.wait_for(answer)
        return output

    def stop(self) -> None:
        """End the thread after the step that is under way; callers that wait get an error. Can be called again."""
        self._stop()

    def post(self, message: _Message) -> None:
        """Have something done between two steps."""
        self._restart_after_fork()
        if self._callers.is_over:
            raise EngineDeadError(SHUT_DOWN)
        self.inbox.put(message)

    def wait_for(self, mailbox: SimpleQueue[Any], *, timeout_s: float | None = None) -> Any:
        """What comes into a mailbox of this thread, or `None` if that takes longer than `timeout_s`."""
        if threading.get_ident() == self._thread.ident:
            raise RuntimeError("The thread that steps the engine cannot wait for its own outputs.")
        while True:
            try:
                return mailbox.get(timeout=_LOOK_S if timeout_s is None else timeout_s)
            except Empty:
                if self._callers.is_over and mailbox.empty():
                    raise EngineDeadError(SHUT_DOWN) from None
                if timeout_s is not None:
                    return None

    def _start(self) -> None:
        self._pid = os.getpid()
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        # The callback is the queue's own method: no bytecode of ours runs that an exception could interrupt.
        self._callers = _Callers(self._engine, self.inbox, weakref.ref(self, self.inbox.put))
        self._thread = threading.Thread(target=self._callers.run, name="headway-engine", daemon=True)
        self._stop = weakref.finalize(self, _stop_thread, self.inbox, self._thread)
        if self._engine.core.executor.transfers is not None:
            self._engine.core.executor.transfers.wake(functools.partial(self.inbox.put, _Callers.look))
        self._thread.start()

    def _restart_after_fork(self) -> None:
        """A forked process has a copy of the engine, but not of the thread; what others waited for is not its own."""
        if os.getpid() != self._pid:
            self._stop.detach()
            was_over = self._callers.is_over
            self._engine.abort_all()
            self._start()
            if was_over:
                self._stop()


def _stop_thread(inbox: SimpleQueue[Any], thread: threading.Thread) -> None:
    """Also called when the interpreter ends, and by the garbage collector in any thread."""
    inbox.put(_Callers.end)
    if thread is not threading.current_thread():
        thread.join(_STOP_S)


class Ticket:
    """A caller's requests, and what comes of them. Once nothing refers to it, they are aborted."""

    def __init__(self, thread: EngineThread, *, grown: GrowingOutput | None) -> None:
        self._thread = thread
        self._grown = grown
        self._mailbox: SimpleQueue[Delivery | _Failure] = SimpleQueue()
        self._account: _Account | None = None
        self._num_taken = 0

    def submit(self, requests: Sequence[PreparedRequest], *, stream: Streaming) -> None:
        """Queue all of them before the next step, or none: then what is wrong is raised. Called once. Whatever is
        raised, `close` has to be called."""
        accepted: SimpleQueue[BaseException | None] = SimpleQueue()
        # The callback is the queue's own method, as in `_start`.
        owner = weakref.ref(self, self._thread.inbox.put)
        self._account = account = _Account(owner, self._mailbox, self._grown)
        self._thread.post(lambda callers: callers.submit(account, requests, stream, accepted))
        error = self._thread.wait_for(accepted)
        if error is not None:
            raise error

    def take(self, *, timeout_s: float | None = None) -> Delivery | None:
        """The next delivery; waits for it, or until `timeout_s` have passed. Raises if the engine has failed."""
        assert self._account is not None
        if self._grown is not None and self._mailbox.empty():
            account, num_taken = self._account, self._num_taken
            self._thread.post(lambda callers: callers.drive(account, num_taken))
        found = self._thread.wait_for(self._mailbox, timeout_s=timeout_s)
        if found is None:
            return None
        self._num_taken += 1
        if isinstance(found, _Failure):
            raise found.error
        assert isinstance(found, Delivery)
        return found

    def close(self) -> None:
        """Abort what has not ended, and wait until that is done. Can be called again."""
        account = self._account
        if account is None:
            return
        done: SimpleQueue[None] = SimpleQueue()
        try:
            self._thread.post(lambda callers: callers.cancel(account, done))
            self._account = None  # not before: if this is interrupted, it can be tried again
            self._thread.wait_for(done)
        except EngineDeadError:
            return


class _Callers:
    """The channel of a driver to all tickets. Nothing here refers to the `EngineThread`, whose end is the thread's."""

    def __init__(self, engine: LLMEngine, inbox: SimpleQueue[Any], owner: weakref.ref[EngineThread]) -> None:
        self.num_tokens = 0
        self.num_running = 0
        self.is_over = False
        self._engine = engine
        self._driver = EngineDriver(engine, self, is_replaceable=False)
        self._inbox = inbox
        self._owner = owner
        self._accounts: dict[_Account, None] = {}
        self._by_request: dict[str, _Account] = {}

    def run(self) -> None:
        """Serve until told to end, or until its owner is gone."""
        self._driver.run()
        self._fail_all(SHUT_DOWN)
        while not self._inbox.empty():  # tickets that came after the last look
            self._handle(self._inbox.get_nowait())
        del self._driver, self._engine

    # ---- what the driver asks for ---------------------------------------------------------------------------------

    @property
    def wants_steps(self) -> bool:
        """See `driver.Channel`."""
        return any(account.is_driving for account in self._accounts)

    def receive(self, *, is_idle: bool, timeout_s: float) -> None:
        """See `driver.Channel`. As long as no caller waits for a step, sleep until a message comes."""
        if is_idle:
            self._fail_all(_GONE)
        if not self.wants_steps:
            self._handle(self._inbox.get())
        elif timeout_s:
            with contextlib.suppress(Empty):
                self._handle(self._inbox.get(timeout=timeout_s))
        while not self._inbox.empty():
            self._handle(self._inbox.get_nowait())

    def admitted(self) -> None:
        """See `driver.Channel`: all has been said."""

    def hand_out(self, step: EngineStep) -> None:
        """See `driver.Channel`. Requests that came past this thread have no account."""
        self.num_tokens += step.report.num_tokens
        self.num_running = step.report.num_running
        deliveries: dict[_Account, Delivery] = {}
        for output in step.outputs:
            account = self._by_request.get(output.request_id)
            if account is None:
                continue
            delivery = deliveries.setdefault(account, Delivery([]))
            delivery.outputs.append(output)
            if account.grown is not None:
                account.grown.add(output)
            if output.finished:
                self._close_request(account, output.request_id)
                if output.request_id in step.errors:
                    delivery.errors[output.request_id] = step.errors[output.request_id]
        for account, delivery in deliveries.items():
            account.deliver(delivery)

    def lose_all(self, error: BaseException) -> None:
        """See `driver.Channel`: all callers are told."""
        logger.error("the engine failed; all requests are ended: %s", error, exc_info=cause_of(error))
        self._fail_all(error)

    # ---- messages -------------------------------------------------------------------------------------------------

    def _handle(self, message: Any) -> None:
        if isinstance(message, weakref.ref):
            self._notice_who_has_gone()
            return
        try:
            message(self)
        except BaseException as error:
            self._driver.recover(error)

    def _notice_who_has_gone(self) -> None:
        if self._owner() is None:
            self.end()
        for account in [account for account in self._accounts if account.owner() is None]:
            self._cancel(account)

    def look(self) -> None:
        """Blocks have come: there may be something to do."""

    def end(self) -> None:
        """No step after this."""
        self.is_over = True

    def submit(
        self,
        account: _Account,
        requests: Sequence[PreparedRequest],
        stream: Streaming,
        accepted: SimpleQueue[BaseException | None],
    ) -> None:
        """Queue a ticket's requests, or say why not."""
        failure = self._driver.failure
        if failure is not None or self.is_over:
            accepted.put(EngineDeadError(SHUT_DOWN) if failure is None else _engine_failed(failure))
            return
        try:
            self._engine.submit_all(requests, stream=stream)
        except HeadwayError as error:
            accepted.put(error)
            return
        except BaseException as error:
            accepted.put(_engine_failed(error))
            raise
        account.request_ids.update(request.request_id for request in requests)
        self._accounts[account] = None
        self._by_request.update(dict.fromkeys(account.request_ids, account))
        accepted.put(None)

    def drive(self, account: _Account, num_taken: int) -> None:
        """The ticket's owner has so many deliveries and waits for the next."""
        if account.num_delivered > num_taken:
            return
        if account in self._accounts:
            account.is_awaited = True
        else:
            account.deliver(_Failure(EngineDeadError(SHUT_DOWN if self.is_over else _GONE)))

    def cancel(self, account: _Account, done: SimpleQueue[None]) -> None:
        """A ticket's owner wants nothing more."""
        try:
            self._cancel(account)
        finally:
            done.put(None)

    def abort(self, request_id: str, answer: SimpleQueue[RequestOutput | None]) -> None:
        """See `EngineThread.abort`."""
        output = None
        try:
            output = self._engine.abort(request_id)
            account = self._by_request.get(request_id)
            if output is not None and account is not None:
                self._close_request(account, request_id)
                account.deliver(Delivery([output] if account.grown is None else []))
                if account.grown is not None:
                    account.grown.add(output)
                    output = account.grown.output()
        finally:
            answer.put(output)

    # ---- accounts -------------------------------------------------------------------------------------------------

    def _close_request(self, account: _Account, request_id: str) -> None:
        """An account may be that of another process, from before a fork."""
        self._by_request.pop(request_id, None)
        account.request_ids.discard(request_id)
        if not account.request_ids:
            self._accounts.pop(account, None)

    def _cancel(self, account: _Account) -> None:
        for request_id in list(account.request_ids):
            self._engine.abort(request_id)
            self._close_request(account, request_id)

    def _fail_all(self, why: BaseException | str) -> None:
        """Each caller gets an exception of its own: they are raised in several threads."""
        for account in self._accounts:
            account.request_ids.clear()
            account.deliver(_Failure(EngineDeadError(why) if isinstance(why, str) else _engine_failed(why)))
        self._accounts.clear()
        self._by_request.clear()


def _engine_failed(cause: BaseException) -> EngineDeadError:
    error = EngineDeadError(f"The engine failed: {type(cause).__name__}: {cause}")
    error.__cause__ = cause_of(cause)
    return error
