"""The thread that steps an engine for all callers of an `LLM`. Callers submit requests and wait for their outputs.

    caller 1      submit ───────────── wait ──────────► outputs
    caller 2                submit ─── wait ── Ctrl-C   cancel
                     │        │                           │           messages
                     ▼        ▼                           ▼
    this thread   ── step ─── step ─── step ─── step ─── abort ─── step ─── ···

Nothing else touches the engine while a caller waits. When no caller waits, the thread sleeps, so a stream that is not
read computes nothing. An interruption is raised in the caller's own thread, so it can never leave a step half done.
Requests that a caller gives up are aborted between two steps.

Messages and outputs go through `SimpleQueue`s, whose `put` and `get` are single calls into C. An exception between two
bytecodes of a caller, such as Ctrl-C, therefore leaves no lock taken, and the garbage collector may call `put`. A
`Condition`, an `Event` or a `Queue` guarantees neither.
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
_STOP_S = 10.0  # how long the end of a program or of an LLM waits for the current step


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a step or an abort delivers to a caller."""

    outputs: list[RequestOutput]
    """Empty if a stream was aborted by another caller."""
    errors: dict[str, str] = field(default_factory=dict)
    """By request id: why the request failed."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error that ends all deliveries to a caller."""

    error: BaseException


@dataclass(slots=True, eq=False)
class _Account:
    """The thread's state for one ticket."""

    owner: weakref.ref[Ticket]
    mailbox: SimpleQueue[Delivery | _Failure]
    grown: GrowingOutput | None
    """Everything delivered to a stream, which an abort returns; `None` for a call. Steps for a stream are made when its
    owner asks for more, and for a call until all its requests have ended."""
    request_ids: set[str] = field(default_factory=set)
    """Ids of the ticket's requests that have not ended."""
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
    """Owns the thread. The thread ends with `stop`, with the interpreter, or when this object is garbage-collected."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._start()

    @property
    def num_tokens(self) -> int:
        """Tokens computed so far."""
        return self._callers.num_tokens

    @property
    def num_running(self) -> int:
        """Requests in the batch of the last step."""
        return self._callers.num_running

    def open_call(self) -> Ticket:
        """Return a ticket for requests without streaming. After its `submit`, steps are made until all of them have
        ended."""
        return Ticket(self, grown=None)

    def open_stream(self, *, num_completions: int) -> Ticket:
        """Return a ticket for one request that streams deltas. Steps are made while its next delta is awaited."""
        return Ticket(self, grown=GrowingOutput(num_completions))

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request of any caller and return its output so far. A stream then delivers nothing more, and a call
        that waits gets the output of the abort."""
        answer: SimpleQueue[RequestOutput | None] = SimpleQueue()
        self.post(lambda callers: callers.abort(request_id, answer))
        output: RequestOutput | None = self.wait_for(answer)
        return output

    def stop(self) -> None:
        """End the thread after the current step. Waiting callers get an error. Can be called again."""
        self._stop()

    def post(self, message: _Message) -> None:
        """Have the thread handle a message between two steps. Raises `EngineDeadError` after `stop`."""
        self._restart_after_fork()
        if self._callers.is_over:
            raise EngineDeadError(SHUT_DOWN)
        self.inbox.put(message)

    def wait_for(self, mailbox: SimpleQueue[Any], *, timeout_s: float | None = None) -> Any:
        """Wait for the next item in a mailbox that this thread fills, or return `None` after `timeout_s`. Raises
        `EngineDeadError` if the thread is over."""
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
        """After a fork, start a new thread: the child has a copy of the engine but not of the thread. The parent's
        requests are aborted in the child."""
        if os.getpid() != self._pid:
            self._stop.detach()
            was_over = self._callers.is_over
            self._engine.abort_all()
            self._start()
            if was_over:
                self._stop()


def _stop_thread(inbox: SimpleQueue[Any], thread: threading.Thread) -> None:
    """End the thread. Also called at the interpreter's end, and by the garbage collector in any thread."""
    inbox.put(_Callers.end)
    if thread is not threading.current_thread():
        thread.join(_STOP_S)


class Ticket:
    """A caller's requests and their deliveries. When a ticket is garbage-collected, its requests are aborted."""

    def __init__(self, thread: EngineThread, *, grown: GrowingOutput | None) -> None:
        self._thread = thread
        self._grown = grown
        self._mailbox: SimpleQueue[Delivery | _Failure] = SimpleQueue()
        self._account: _Account | None = None
        self._num_taken = 0

    def submit(self, requests: Sequence[PreparedRequest], *, stream: Streaming) -> None:
        """Queue all requests before the next step, or raise and queue none. Called once. `close` must be called
        afterwards, even if this raises."""
        accepted: SimpleQueue[BaseException | None] = SimpleQueue()
        # The callback is the queue's own method, as in `_start`.
        owner = weakref.ref(self, self._thread.inbox.put)
        self._account = account = _Account(owner, self._mailbox, self._grown)
        self._thread.post(lambda callers: callers.submit(account, requests, stream, accepted))
        error = self._thread.wait_for(accepted)
        if error is not None:
            raise error

    def take(self, *, timeout_s: float | None = None) -> Delivery | None:
        """Wait for the next delivery and return it, or `None` after `timeout_s`. Raises if the engine has failed."""
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
        """Abort unfinished requests and wait until that is done. Can be called again."""
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
    """The driver's channel to all tickets. It holds no strong reference to the `EngineThread`, whose end ends the
    thread."""

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
        """Serve until `end` is called or the owner is gone."""
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
        """See `driver.Channel`. While no caller waits for a step, sleep until a message arrives."""
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
        """See `driver.Channel`. There is nothing to send here."""

    def hand_out(self, step: EngineStep) -> None:
        """See `driver.Channel`. Requests that were not submitted through this thread have no account and are
        skipped."""
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
        """See `driver.Channel`. Every caller gets the error."""
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
        """Do nothing: this message only wakes the thread when blocks have arrived."""

    def end(self) -> None:
        """Make no more steps."""
        self.is_over = True

    def submit(
        self,
        account: _Account,
        requests: Sequence[PreparedRequest],
        stream: Streaming,
        accepted: SimpleQueue[BaseException | None],
    ) -> None:
        """Queue a ticket's requests. `accepted` gets None, or the error if they were refused."""
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
        """Note that the ticket's owner has taken `num_taken` deliveries and waits for the next."""
        if account.num_delivered > num_taken:
            return
        if account in self._accounts:
            account.is_awaited = True
        else:
            account.deliver(_Failure(EngineDeadError(SHUT_DOWN if self.is_over else _GONE)))

    def cancel(self, account: _Account, done: SimpleQueue[None]) -> None:
        """Abort a ticket's requests, because its owner gives them up."""
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
        """Remove an ended request. After a fork the account may belong to the parent process and be unknown here."""
        self._by_request.pop(request_id, None)
        account.request_ids.discard(request_id)
        if not account.request_ids:
            self._accounts.pop(account, None)

    def _cancel(self, account: _Account) -> None:
        for request_id in list(account.request_ids):
            self._engine.abort(request_id)
            self._close_request(account, request_id)

    def _fail_all(self, why: BaseException | str) -> None:
        """Give each caller a separate exception, because they are raised in several threads."""
        for account in self._accounts:
            account.request_ids.clear()
            account.deliver(_Failure(EngineDeadError(why) if isinstance(why, str) else _engine_failed(why)))
        self._accounts.clear()
        self._by_request.clear()


def _engine_failed(cause: BaseException) -> EngineDeadError:
    error = EngineDeadError(f"The engine failed: {type(cause).__name__}: {cause}")
    error.__cause__ = cause_of(cause)
    return error
