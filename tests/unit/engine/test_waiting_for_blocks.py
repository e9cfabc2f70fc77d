"""An engine whose requests wait for blocks: it sleeps until one has come, and whatever becomes of them, it goes on."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import pytest

from headway.core import RequestStatus
from headway.core.kv.moves import BlockMoves
from headway.core.request_options import RequestOptions
from headway.core.scheduler_output import SchedulerOutput
from headway.engine import block_pump, driver
from headway.engine.engine_thread import EngineThread
from headway.engine.llm_engine import LLMEngine
from headway.engine_process.engine_loop import EngineLoop
from headway.executor.fake import FakeExecutor
from headway.sampling_params import SamplingParams
from headway.transfer.block_store import BlockStore, BlockTransfers, Done
from headway.wire.channel import ChannelClosedError, EngineChannel
from headway.wire.frames import FrameReader, pack
from headway.wire.messages import AddRequest, StepBatch, decode_from_engine
from tests.unit.no_model import all_outputs, engine_on

THERE = RequestOptions(blocks_at="there:1")
PARAMS = SamplingParams(max_tokens=2, detokenize=False)
PROMPT = list(range(5, 18))  # three full blocks, and a token that must be computed


class Store(BlockStore):
    """Answers when it is told to, unless it has been told before."""

    def __init__(self, *, answers: bool | None = None, kept: Sequence[bytes] = ()) -> None:
        self.answers = answers
        self.kept = kept
        self.fetches: list[tuple[bytes, Done]] = []
        self.fetched: list[tuple[bytes, bool]] = []
        self.sources: list[str] = []
        self.is_closed = False
        self.stored: list[bytes] = []

    def digests(self) -> Sequence[bytes]:
        return self.kept

    def fetch(
        self, digests: Sequence[bytes], slots: Sequence[memoryview], source: str, done: Done, *, is_use: bool = True
    ) -> None:
        self.sources.append(source)
        self.fetches += [(digest, done) for digest in digests]
        self.fetched += [(digest, is_use) for digest in digests]
        if self.answers is not None:
            self.answer(self.answers)

    def store(self, digest: bytes, slot: memoryview, done: Done) -> None:
        self.stored.append(digest)
        if self.answers is not None:
            done(digest, self.answers)

    @property
    def max_blocks(self) -> int:
        return 1000

    def answer(self, ok: bool) -> None:
        fetches, self.fetches = self.fetches, []
        for digest, done in fetches:
            done(digest, ok)

    def close(self) -> None:
        self.is_closed = True


class Slots:
    def bytes_of(self, slot: int) -> memoryview:
        return memoryview(bytearray(1))

    def settle(self, slots: Any) -> None: ...


class Executor(FakeExecutor):
    def __init__(self, transfers: BlockTransfers) -> None:
        super().__init__(lambda name, count: 7, transfers=transfers)
        self.moves: list[BlockMoves] = []

    def move(self, moves: BlockMoves) -> None:
        self.moves.append(moves)


def make_engine(*, peers: Store | None = None, disk: Store | None = None, **parts: Any) -> LLMEngine:
    executor = Executor(BlockTransfers(Slots(), disk=disk, peers=peers))
    return engine_on(executor, max_model_len=200, num_host_slots=8, max_num_seqs=4, max_num_batched_tokens=64, **parts)


def prefetched(engine: LLMEngine) -> Collection[bytes]:
    tiers = engine.core.scheduler.kv_cache.tiers
    assert tiers is not None
    return tiers.prefetched.keys()


def run_to_end(engine: LLMEngine) -> dict[str, int]:
    """How many tokens each request found."""
    return {output.request_id: output.num_cached_tokens for output in all_outputs(engine) if output.finished}


@pytest.mark.parametrize(("ok", "num_found"), [(True, 12), (False, 0)])
def test_a_request_waits_for_its_blocks_and_computes_what_does_not_come(ok: bool, num_found: int) -> None:
    engine = make_engine(peers=(peers := Store()))
    engine.add_request("a", PROMPT, PARAMS, THERE)
    assert not engine.core.only_waits_for_blocks, "it has not been looked at"
    assert not engine.step().outputs and len(peers.fetches) == 3
    engine.check_invariants()
    assert engine.core.only_waits_for_blocks
    report = engine.step().report
    assert (report.num_running, report.num_waiting) == (0, 1)
    peers.answer(ok)
    assert not engine.core.only_waits_for_blocks, "there is something to do"
    assert run_to_end(engine) == {"a": num_found}
    assert not peers.fetches, "asked once"


@pytest.mark.parametrize("fails", [False, True])
def test_what_has_come_is_copied_while_the_rest_is_on_its_way(
    fails: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(peers=(peers := Store()))
    executor, kv_cache = engine.core.executor, engine.core.scheduler.kv_cache
    assert isinstance(executor, Executor)
    launched: list[BlockMoves] = []
    submit = executor.submit

    def noted(output: SchedulerOutput) -> Any:
        launched.append(output.moves)
        return submit(output)

    monkeypatch.setattr(executor, "submit", noted)
    if fails:
        monkeypatch.setattr(executor, "move", lambda _: 1 / 0)
    engine.add_request("a", PROMPT, PARAMS, THERE)
    engine.step()
    (first, done), (second, _), (third, _) = peers.fetches
    for digest in (second, first):
        done(digest, True)
    engine.step()
    engine.check_invariants()
    assert ("are not copied" in caplog.text) == fails
    assert [len(moves.moved_in) for moves in executor.moves] == ([] if fails else [2])
    assert set(prefetched(engine)) == (set() if fails else {first, second})
    assert kv_cache.num_used_blocks == 0 and kv_cache.num_available_blocks == 64, "it is room for others"
    done(third, True)
    assert run_to_end(engine) == {"a": 12}
    assert [len(moves.moved_in) for moves in launched if moves.moved_in] == ([3] if fails else [1])
    assert not prefetched(engine)


@pytest.mark.parametrize("ends", ["left", "too long"])
def test_what_was_copied_for_a_request_that_leaves_is_free(ends: str) -> None:
    seconds = [0.0]
    engine = make_engine(peers=(peers := Store()), now=lambda: seconds[0])
    kv_cache = engine.core.scheduler.kv_cache
    engine.add_request("a", PROMPT, PARAMS, THERE)
    engine.step()
    digest, done = peers.fetches[0]
    done(digest, True)
    engine.step()
    assert len(prefetched(engine)) == 1 and kv_cache.device.pool.num_free_blocks == 63
    if ends == "left":
        engine.abort("a")
        engine.check_invariants()
        assert kv_cache.device.pool.num_free_blocks == 64
    else:
        seconds[0] = 31.0
        assert run_to_end(engine) == {"a": 4}, "the block that has come is used"
    assert not prefetched(engine)


@pytest.mark.parametrize("peers", [None, Store(answers=True)], ids=["nobody to ask", "transfers that cannot begin"])
def test_without_transfers_nothing_is_waited_for(peers: Store | None, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(peers=peers)
    monkeypatch.setattr(Slots, "settle", lambda *_: 1 / 0)
    engine.add_request("a", PROMPT, PARAMS, THERE)
    assert run_to_end(engine) == {"a": 0}


def counted_steps(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows with each step."""
    steps: list[None] = []
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: (steps.append(None), step())[1])
    return steps


def wait_until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.001)


def test_the_thread_of_an_llm_sleeps_until_a_block_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(peers=(peers := Store()))
    steps = counted_steps(engine, monkeypatch)
    thread = EngineThread(engine)
    ticket = thread.open_call()
    ticket.submit([engine.prepare("a", PROMPT, PARAMS, THERE)], stream=False)
    wait_until(lambda: engine.core.only_waits_for_blocks)
    assert ticket.take(timeout_s=0.3) is None
    assert len(steps) <= 3, "it polls"
    peers.answer(True)
    delivery = ticket.take(timeout_s=20)
    assert delivery is not None and delivery.outputs[0].num_cached_tokens == 12
    thread.stop()


@pytest.fixture
def front_end() -> Iterator[tuple[socket.socket, EngineChannel]]:
    ours, theirs = socket.socketpair()
    wakeup, waker = socket.socketpair()
    waker.setblocking(False)
    yield ours, EngineChannel(theirs, wakeup=wakeup, waker=waker)
    for each in (ours, theirs, wakeup, waker):
        each.close()


def test_the_loop_of_the_engine_process_sleeps_until_a_block_has_come(
    front_end: tuple[socket.socket, EngineChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "IDLE_S", 30.0)  # nothing but the block can wake it before the test gives up
    ours, channel = front_end
    engine = make_engine(peers=(peers := Store()))
    steps = counted_steps(engine, monkeypatch)
    loop = EngineLoop(engine, channel)

    def serve() -> None:
        with pytest.raises(ChannelClosedError):
            loop.run()

    thread = threading.Thread(target=serve)
    thread.start()
    ours.sendall(pack(AddRequest("a", PROMPT, PARAMS, THERE)))
    wait_until(lambda: engine.core.only_waits_for_blocks)
    time.sleep(0.3)
    assert len(steps) <= 3, "it polls"
    peers.answer(True)
    frames, waiting = FrameReader(), []
    ended: dict[str, Any] = {}
    ours.settimeout(20)
    while not ended:
        for payload in frames.feed(ours.recv(2**16)):
            batch = decode_from_engine(payload)
            if isinstance(batch, StepBatch):
                waiting.append((batch.stats.batch.num_waiting, batch.stats.batch.num_fetching))
                ended |= {one.request_id: one.timings for one in batch.deltas if one.is_last}
    assert ended["a"].num_cached_tokens == 12
    assert (1, 1) in waiting and (0, 0) in waiting
    ours.close()
    thread.join(20)


@pytest.mark.parametrize("answers", [True, False, None], ids=["well", "fails", "hangs"])
def test_at_the_end_kept_blocks_are_stored_unless_the_disk_holds_it_up(
    answers: bool | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(block_pump, "STORE_REST_S", 25.0 if answers else 0.2)
    engine = make_engine(disk=(disk := Store(answers=answers)))
    for first in (0, 20, 40):
        engine.add_request(f"r{first}", range(first, first + 17), PARAMS)
    run_to_end(engine)
    assert not disk.stored
    engine.shutdown()
    assert len(disk.stored) == len(set(disk.stored)) == (12 if answers else 8), "more than there are slots, if it can"
    assert ("not all kept blocks" in caplog.text) == (not answers)


KEPT = [bytes([number]) * 32 for number in range(20)]


@pytest.mark.parametrize("answers", [True, False, None], ids=["well", "fails", "hangs"])
def test_at_the_start_blocks_that_were_used_last_are_loaded_unless_the_disk_holds_it_up(
    answers: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_pump, "LOAD_LATEST_S", 25.0 if answers else 0.2)
    engine = make_engine(disk=(disk := Store(answers=answers, kept=KEPT)))
    tiers = engine.core.scheduler.kv_cache.tiers
    assert tiers is not None and (tier := tiers.host).disk is not None
    assert answers is False or disk.fetched == [(digest, False) for digest in KEPT[:-7:-1]], "a quarter stays free"
    assert all(digest in tier for digest in KEPT[-6:]) == bool(answers)
    assert (len(tier.disk), tier.num_fetching) == {True: (20, 0), False: (0, 0), None: (20, 6)}[answers]
    engine.add_request("a", PROMPT, PARAMS)
    assert run_to_end(engine) == {"a": 0}
    disk.answer(True)  # late
    engine.add_request("b", range(40, 50), PARAMS)
    assert run_to_end(engine) == {"b": 0} and not tier.num_fetching
    engine.check_invariants()


def test_a_request_that_waits_can_fail_from_outside() -> None:
    engine = make_engine(peers=(peers := Store()))
    engine.add_request("a", PROMPT, PARAMS, THERE)
    engine.step()
    engine.core.finish_request("a", RequestStatus.FINISHED_ERROR)
    engine.check_invariants()
    peers.answer(True)
    assert not engine.has_unfinished_requests()
