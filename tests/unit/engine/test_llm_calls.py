"""One `LLM` under several calls, streams and threads, interrupted, dropped and shut down: each gets its own outputs,
and nothing is left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest
import tqdm.std

from headway import llm as llm_module
from headway.core import SchedulerOutput
from headway.engine import engine_thread
from headway.errors import EngineDeadError, InvalidRequestError
from headway.llm import LLM
from headway.outputs import RequestOutput
from headway.sampling_params import SamplingParams
from tests.stress.llm_stress import check_idle, llm_of, run
from tests.unit.engine.scripted_logprobs import make_engine, run_to_end

PROMPTS = [[3, 4, 5], [6, 7], [8], [9, 10, 11, 3]]


def params(max_tokens: int = 8, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **more)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def alone(prompt: list[int], max_tokens: int = 8) -> list[int]:
    """What an engine of its own answers."""
    engine = make_engine()
    engine.add_request("alone", prompt, params(max_tokens), stream=False)
    return run_to_end(engine)["alone"].outputs[0].token_ids


@pytest.fixture(params=[False, True], ids=["in turn", "overlapped"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    llm = llm_of(make_engine(overlap=request.param, max_num_seqs=4))
    yield llm
    check_idle(llm)
    llm.shutdown()


# ---- streams --------------------------------------------------------------------------------------------------------


def test_a_stream_that_was_not_read_meanwhile_has_lost_nothing(llm: LLM) -> None:
    first, second = llm.stream(PROMPTS[0], params()), llm.stream(PROMPTS[1], params(12))
    assert tokens(list(second))[-1] == alone(PROMPTS[1], 12)
    outputs = list(first)
    assert tokens(outputs) == [alone(PROMPTS[0])[: count + 1] for count in range(8)]
    assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("num_read", [0, 1, 3])
@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_a_stream_that_is_left_aborts_its_request(llm: LLM, how: str, num_read: int) -> None:
    stream: Any = llm.stream(PROMPTS[0], params(40), request_id="mine")
    for _ in range(num_read):
        next(stream)
    if how == "closed":
        stream.close()
    del stream
    assert llm.abort("mine") is None
    assert not llm.engine.has_unfinished_requests()
    assert len(list(llm.stream(PROMPTS[0], params(), request_id="mine"))) == 8


def test_a_stream_that_is_not_read_does_not_compute(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], params(40))
    seen = [next(stream) for _ in range(3)]
    assert llm.abort("nobody") is None  # the thread has looked at its messages since
    assert llm.engine.core.scheduler.requests["0"].num_output_tokens == len(seen[-1].outputs[0].token_ids) == 3
    stream.close()
    assert list(stream) == []


def test_an_abort_returns_all_that_a_stream_had_and_ends_it(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], params(40), request_id="mine")
    with pytest.raises(InvalidRequestError, match="already in use"):
        llm.stream(PROMPTS[1], params(), request_id="mine")
    for _ in range(3):
        next(stream)
    llm.generate(PROMPTS[1], params(4))
    last = llm.abort("mine")
    assert last is not None and last.outputs[0].finish_reason == "abort"
    assert last.outputs[0].token_ids == alone(PROMPTS[0], 40)[: len(last.outputs[0].token_ids)]
    rest = list(stream)
    assert len(last.outputs[0].token_ids) == 3 + len(rest) >= 6
    assert list(stream) == []


# ---- threads --------------------------------------------------------------------------------------------------------


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """What each returns or raises."""
    with ThreadPoolExecutor(len(functions)) as threads:
        calls = [threads.submit(function) for function in functions]
    return [call.exception() or call.result() for call in calls]


def hold_third_step(llm: LLM, begin: Callable[[], None]) -> None:
    """`begin` is called when the third step is under way, which then takes until another message has come."""
    step, num_steps = llm.engine.step, 0

    def held() -> list[RequestOutput]:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            begin()
            while llm._thread.inbox.empty():
                time.sleep(0)
        return step()

    llm.engine.step = held  # type: ignore[method-assign]


def test_a_call_may_be_aborted_from_another_thread(llm: LLM) -> None:
    begun = threading.Event()
    hold_third_step(llm, begun.set)

    def abort() -> Any:
        begun.wait(60)
        return llm.abort("0")

    results = in_threads(lambda: llm.generate([PROMPTS[0]], params(60)), abort)
    assert results[0][0].outputs[0].finish_reason == "abort"
    assert results[0][0].outputs[0].token_ids == results[1].outputs[0].token_ids


# ---- interruptions --------------------------------------------------------------------------------------------------


class Stop(BaseException):
    """No error, as KeyboardInterrupt and SystemExit."""


class InterruptAt:
    """Raises at the n-th bytecode that this thread executes in the code between a caller and the engine's thread."""

    FILES = (llm_module.__file__, engine_thread.__file__)

    def __init__(self, place: int) -> None:
        self._left = place
        self.has_raised = False

    def __enter__(self) -> InterruptAt:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in self.FILES:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and not self.has_raised:
            self._left -= 1
            if self._left < 0:
                self.has_raised = True
                raise Stop
        return self._trace


def call_once(llm: LLM) -> None:
    assert len(llm.generate(PROMPTS, params(3), use_tqdm=False)) == 4


def stream_once(llm: LLM) -> None:
    assert len(list(llm.stream(PROMPTS[0], params(3)))) == 3


def close_once(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], params(40))
    next(stream)
    stream.close()


@pytest.mark.parametrize("action", [call_once, stream_once, close_once])
def test_an_interrupt_at_any_bytecode_leaves_nothing_behind(action: Callable[[LLM], None]) -> None:
    llm = llm_of(make_engine(overlap=True, max_num_seqs=4))
    place = num_interrupted = 0
    while True:
        interrupt = InterruptAt(place)
        try:
            with interrupt:
                action(llm)
        except Stop:
            num_interrupted += 1
        if not interrupt.has_raised:
            break
        place += 1 if place < 40 else 7
        assert llm.abort("nobody") is None  # what was dropped has been noticed
        assert not llm.engine.has_unfinished_requests(), f"bytecode {place}"
    assert num_interrupted > 40
    check_idle(llm)
    llm.shutdown()


@pytest.mark.parametrize("use_tqdm", [False, True])
def test_no_lock_of_progress_bars_is_taken(
    use_tqdm: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All bars of a process share them. Where an interrupt has left them taken, no other thread must wait for them."""
    llm, lock, callers = llm_of(make_engine()), tqdm.std.tqdm.get_lock(), set[threading.Thread]()
    for name in ("acquire", "release"):
        monkeypatch.setattr(type(lock), name, lambda *_, **__: callers.add(threading.current_thread()))
    assert tokens(llm.generate(PROMPTS, params(), use_tqdm=use_tqdm)) == [alone(prompt) for prompt in PROMPTS]
    assert all(isinstance(caller, tqdm.TMonitor) for caller in callers), "it looks after the bars of other tests"
    assert ("Requests: 100% 4/4, " in capsys.readouterr().err) == use_tqdm
    llm.shutdown()


@pytest.fixture
def _heeds_interrupts() -> Iterator[None]:
    """Shells let programs in the background ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_heeds_interrupts")
def test_an_interrupted_call_is_ended_at_once_and_others_go_on(llm: LLM) -> None:
    """Ctrl-C into the main thread, by a real signal, while it waits."""
    other = llm.stream(PROMPTS[1], params(30))
    next(other)
    main: Any = threading.main_thread().ident
    hold_third_step(llm, lambda: signal.pthread_kill(main, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, params(60))
    assert set(llm.engine.core.scheduler.requests) == {"0"}
    assert tokens(list(other))[-1] == alone(PROMPTS[1], 30)


def test_a_short_stress() -> None:
    counts = run(seconds=0.0, seed=5, phase_s=1.0)
    assert counts.events["interrupted"] > 10 and counts.events["call"] > 5, counts


# ---- failures and the end -------------------------------------------------------------------------------------------


class Bug(Exception):
    """Raised where no request is to blame."""


@pytest.mark.parametrize("error", [Bug("in the loop"), SystemExit(3)], ids=["error", "exit"])
def test_what_fails_beside_requests_reaches_all_callers_and_the_engine_starts_over(llm: LLM, error: Any) -> None:
    stream = llm.stream(PROMPTS[0], params(40))
    next(stream)
    schedule = llm.engine.core.scheduler.schedule

    def broken(*, now_s: float = 0.0) -> SchedulerOutput:
        llm.engine.core.scheduler.schedule = schedule  # type: ignore[method-assign]
        schedule(now_s=now_s)
        raise error

    llm.engine.core.scheduler.schedule = broken  # type: ignore[method-assign]
    with pytest.raises(EngineDeadError, match=type(error).__name__):
        llm.generate(PROMPTS, params(40))
    with pytest.raises(EngineDeadError, match=type(error).__name__):
        next(stream)
    assert list(stream) == []
    assert tokens(llm.generate(PROMPTS, params())) == [alone(prompt) for prompt in PROMPTS]


def test_an_engine_that_cannot_be_mended_says_so_to_everyone() -> None:
    llm = llm_of(make_engine())

    def broken() -> Any:
        raise Bug("for good")

    llm.engine.step = llm.engine.abort_all = broken  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="for good"):
            llm.generate(PROMPTS, params())
    llm.shutdown()


def test_a_request_that_somebody_else_has_taken_out_of_the_engine_is_not_waited_for_for_ever(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], params(40), request_id="mine")
    next(stream)
    llm.engine.abort("mine")
    with pytest.raises(EngineDeadError, match="not in the engine any more"):
        next(stream)


def test_shutdown_ends_calls_that_wait_and_may_be_repeated() -> None:
    llm = llm_of(make_engine())
    begun = threading.Event()
    hold_third_step(llm, begun.set)
    stream = llm.stream(PROMPTS[0], params(40))

    def shut_down() -> None:
        begun.wait(60)
        llm.shutdown()

    waiting, _ = in_threads(lambda: llm.generate(PROMPTS, params(60)), shut_down)
    assert isinstance(waiting, EngineDeadError) and "shut down" in str(waiting)
    for call in (lambda: llm.generate(PROMPTS, params()), lambda: list(stream), lambda: llm.stream([5], params())):
        with pytest.raises(EngineDeadError, match="shut down"):
            call()
    stream.close()
    llm.shutdown()


def test_a_dropped_llm_is_freed_at_once_with_its_thread() -> None:
    llm = llm_of(make_engine())
    llm.generate(PROMPTS, params())
    stream = llm.stream(PROMPTS[0], params())
    engine, executor, thread = weakref.ref(llm.engine), weakref.ref(llm.engine.core.executor), llm._thread._thread
    del llm
    assert tokens(list(stream))[-1] == alone(PROMPTS[0]), "a stream keeps what it needs"
    del stream
    assert engine() is None and executor() is None
    assert not thread.is_alive()


@pytest.mark.parametrize("options", [{}, {"length_predictor": "statistics"}, {"traffic_log": "log.jsonl"}])
def test_an_llm_leaves_the_garbage_collector_alone_and_is_freed(
    options: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.unit.runner.tiny_llm import TinyLLM

    monkeypatch.chdir(tmp_path)
    tiny = TinyLLM(tmp_path)
    changes: list[str] = []
    for name in ("freeze", "unfreeze", "set_threshold", "enable", "disable"):
        monkeypatch.setattr(gc, name, lambda *args, name=name: changes.append(name))
    executors = []
    for _ in range(2):  # the second must not keep the first
        llm = tiny.on_cpu(**options)
        llm.generate([[5, 6]], params(2), use_tqdm=False)
        executors.append(weakref.ref(llm.engine.core.executor))
        del llm
        assert executors[-1]() is None
    assert changes == []


PROGRAM = """
import sys
from tests.stress.llm_stress import llm_of
from tests.unit.engine.scripted_logprobs import make_engine
from headway import SamplingParams
llm = llm_of(make_engine())
stream = llm.stream([5, 6], SamplingParams(max_tokens=50, ignore_eos=True))
next(stream)
print("ready", flush=True)
"""


@pytest.mark.parametrize(
    ("end", "status"), [("", 0), ("raise RuntimeError('oops')", 1), ("sys.exit(3)", 3), ("llm.shutdown()", 0)]
)
def test_a_program_ends_although_nothing_was_shut_down(end: str, status: int) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM + end], capture_output=True, timeout=120, text=True)
    assert (done.returncode, done.stdout) == (status, "ready\n"), done.stderr
    assert ("oops" in done.stderr) == ("oops" in end)


def test_a_forked_process_has_an_engine_of_its_own(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], params(40))
    next(stream)
    expected = alone(PROMPTS[1])
    child = os.fork()
    if child == 0:
        stream.close()  # it is the parent's
        os._exit(0 if tokens(llm.generate([PROMPTS[1]], params(), use_tqdm=False)) == [expected] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(list(stream)) == 39
