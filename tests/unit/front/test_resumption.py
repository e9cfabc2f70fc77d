"""Requests that go on in another engine: the same tokens and text, nothing twice, nothing missing."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from typing import Any

import pytest

from headway.errors import EngineUnavailableError, InvalidRequestError
from headway.front.dispatch import Dispatch
from headway.front.engine_client import EngineClient
from headway.front.prefills import Prefills
from headway.front.quarantine import MAX_TRIALS
from headway.front.resumption import ENGINE_STOPPED, TOO_MANY_DEATHS, Resumption
from headway.front.router import Router
from headway.front.streams import RequestStream
from headway.front.supervision import Patience
from headway.outputs import Delivered, RequestOutput, SilentProgress, Streaming
from headway.sampling_params import SamplingParams
from headway.wire.engine_stats import EngineStats
from headway.wire.messages import Delta, RequestForecast, RequestTimings, StepBatch
from tests.unit.clock import Clock
from tests.unit.engine_process.small_engine import create_engine
from tests.unit.front.fake_engines import FakeEngines, FakeReplica, serving
from tests.unit.front.served import PROMPT, add, all_ready, expected, read, until
from tests.unit.front.virtual_time import runner  # noqa: F401

# ---- one engine after another, in this process ----------------------------------------------------------------------


def steps_of(
    params: SamplingParams, delivered: Sequence[Delivered] | None = None, stream: Streaming = "delta", **options: Any
) -> list[RequestOutput]:
    """The outputs of a request, from its beginning or after what was delivered."""
    engine = create_engine(dict(options))
    prepared = engine.prepare("one", PROMPT, params)
    outputs = []
    if delivered is None:
        engine.submit(prepared, stream=stream)
    elif (ended := engine.resume(prepared, delivered)) is not None:
        outputs.append(ended)
    while engine.has_unfinished_requests():
        outputs += engine.step().outputs
        engine.check_invariants()
    assert not engine.is_live("one")
    return outputs


def gathered(outputs: Sequence[RequestOutput], n: int) -> list[tuple[str, list[int], Any, Any]]:
    """Text, tokens, why it ended and with what, of each completion."""
    found: list[tuple[str, list[int], Any, Any]] = [("", [], None, None)] * n
    for output in outputs:
        for new in output.outputs:
            text, tokens, reason, _ = found[new.index]
            assert reason is None, "nothing follows an end"
            found[new.index] = (text + new.text, tokens + list(new.token_ids), new.finish_reason, new.stop_reason)
    return found


PARAMS = {
    "length": SamplingParams(max_tokens=12),
    "stop string": SamplingParams(max_tokens=30, stop=["klm", "zz"]),
    "stop string in the answer": SamplingParams(max_tokens=30, stop=["klm"], include_stop_str_in_output=True),
    "text held back at the end": SamplingParams(max_tokens=6, stop=["h never comes"]),
    "stop token": SamplingParams(max_tokens=30, stop_token_ids=[74]),
    "min_tokens": SamplingParams(max_tokens=12, min_tokens=9, stop=["fg", "mn"]),
    "several": SamplingParams(max_tokens=9, n=3),
    "no text": SamplingParams(max_tokens=9, detokenize=False),
}


@pytest.mark.parametrize("mode", ["continuous", "static"])
@pytest.mark.parametrize("name", PARAMS)
def test_cut_anywhere_it_goes_on_as_if_nothing_had_happened(name: str, mode: str) -> None:
    params = PARAMS[name]
    whole = steps_of(params, batching=mode)
    complete = gathered(whole, params.n)
    assert [output.finished for output in whole] == [False] * (len(whole) - 1) + [True]
    assert complete == gathered(steps_of(params, stream=False, batching=mode), params.n), "and it is the same at once"
    for cut in range(len(whole)):
        before = gathered(whole[:cut], params.n)
        delivered = [Delivered(tokens, reason is not None) for _, tokens, reason, _ in before]
        after = gathered(steps_of(params, delivered, batching=mode), params.n)
        for early, late, full in zip(before, after, complete, strict=True):
            if early[2] is not None:
                assert late == ("", [], None, None) and early == full, "its end was delivered"
            else:
                assert (early[0] + late[0], early[1] + late[1], late[2], late[3]) == full, (cut, early, late)


def test_what_goes_on_is_checked() -> None:
    engine = create_engine({})
    prepared = engine.prepare("one", PROMPT, SamplingParams(max_tokens=4, n=2))
    with pytest.raises(InvalidRequestError, match="1 completions go on, and the request has 2"):
        engine.resume(prepared, [Delivered([5])])
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        engine.resume(prepared, [Delivered([5]), Delivered([10**6])])
    assert not engine.has_unfinished_requests() and not engine.is_live("one")


# ---- replicas that say what the test says ----------------------------------------------------------------------------


class Served:
    """Requests on replicas in turn."""

    def __init__(self, num_replicas: int = 1, *, resumes: bool = True) -> None:
        self.clock = Clock()
        self.replicas = [FakeReplica(place) for place in range(num_replicas)]
        self.router = Router("round-robin", block_size=4)
        prefills = Prefills([], router=self.router, answering=self.router, now=self.clock)
        dispatch = Dispatch(self.replicas, router=self.router, prefills=prefills)
        self.requests = Resumption(dispatch, resumes=resumes, now=self.clock)
        for replica in self.replicas:
            self.router.add(replica.place, max_num_seqs=8)

    def open(self, name: str = "r", **params: Any) -> RequestStream:
        stream = self.requests.open(add(name, **{"max_tokens": 40, **params}))
        assert stream is not None
        return stream

    def say(self, place: int, *deltas: Delta, **step: Any) -> None:
        self.requests.deliver(self.replicas[place], StepBatch(list(deltas), EngineStats(), **step))

    def token(self, place: int, token_id: int, name: str = "r", **delta: Any) -> None:
        self.say(place, Delta(name, token_ids=[token_id], **delta))

    def lose(self, place: int, *, comes_back: bool = True) -> None:
        """Its process dies, and it has another one at once."""
        replica = self.replicas[place]
        replica.is_ready = False
        self.router.remove(place)
        self.requests.note_loss(replica)
        if comes_back:
            self.come_back(place)

    def come_back(self, place: int) -> None:
        self.replicas[place].is_ready = True
        self.router.add(place, max_num_seqs=8)
        self.requests.send_queued()

    def names_at(self, place: int) -> list[str]:
        return [request.request_id for request in self.replicas[place].added]


def tokens_of(deltas: Sequence[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def test_what_comes_late_from_a_replica_that_is_gone_is_not_delivered() -> None:
    served = Served(2)
    stream = served.open()
    served.token(0, 7)
    served.lose(0, comes_back=False)
    (again,) = served.replicas[1].added
    assert again.delivered == [Delivered([7])]
    served.token(0, 8)
    served.token(1, 8)
    served.token(1, 9, is_last=True, finish_reason="length")
    assert tokens_of(await read(stream)) == [7, 8, 9]
    assert served.requests.num_open == 0 and served.requests.num_resumed == 1
    assert served.router.num_tokens(1) == 0


async def test_each_completion_goes_on_for_itself_and_ended_ones_do_not() -> None:
    served = Served()
    served.open(n=2)
    served.say(0, Delta("r", 0, token_ids=[1], finish_reason="stop"), Delta("r", 1, token_ids=[2, 3]))
    served.lose(0)
    assert served.replicas[0].added[-1].delivered == [Delivered([1], True), Delivered([2, 3])]


async def test_what_cannot_be_streamed_begins_again() -> None:
    served = Served()
    served.open(best_of=3)
    served.say(0, Delta("r", progress=SilentProgress(1, 1)))
    served.lose(0)
    first, again = served.replicas[0].added
    assert again.delivered is None and first == again


async def test_deaths_before_a_request_got_its_last_token_are_not_its_fault() -> None:
    served = Served()
    stream = served.open()
    for token_id in range(3 * MAX_TRIALS):
        served.token(0, token_id)
        served.lose(0)
    assert served.requests.num_open == 1 and served.requests.num_resumed == 3 * MAX_TRIALS
    for _ in range(2 * MAX_TRIALS):  # without a token in between it is
        served.lose(0)
    assert served.requests.num_open == 0
    last = (await read(stream))[-1]
    assert (last.error, last.error_status) == (TOO_MANY_DEATHS, 503)


async def test_suspects_wait_until_others_have_got_a_token_or_ended() -> None:
    served = Served()
    for number in range(3):
        served.open(f"r{number}")
    for _ in range(2):
        served.lose(0)  # all are suspects, and all are tried
    served.lose(0)  # only one of them is
    served.replicas[0].added.clear()
    assert served.requests.num_queued == 2
    served.token(0, 5, "r0")
    assert served.names_at(0) == ["r1", "r2"], "there is room for one more than the one that was tried"
    served.requests.abort("r1")
    assert served.requests.num_queued == 0 and served.requests.num_open == 2


@pytest.mark.parametrize("resumes", [True, False])
async def test_without_an_engine_requests_are_queued_or_refused(resumes: bool) -> None:
    served = Served(resumes=resumes)
    stream = served.open("first")
    served.lose(0, comes_back=False)
    if not resumes:
        (last,) = await read(stream)
        assert (last.error, last.error_status, last.is_last) == (ENGINE_STOPPED, 503, True)
        assert served.requests.open(add("early")) is None and served.requests.num_open == 0
        return
    served.open("early")
    assert served.requests.num_queued == 2
    served.come_back(0)
    assert served.names_at(0) == ["first", "first", "early"] and served.requests.num_queued == 0


async def test_no_request_is_queued_for_ever() -> None:
    served = Served()
    first = served.open("first")
    served.clock.now_s += 100.0
    served.lose(0, comes_back=False)
    second = served.open("second")
    served.clock.now_s += 5.0
    served.requests.fail_overdue(5.0)
    assert served.requests.num_open == 2, "the time with an engine does not count"
    served.clock.now_s += 0.1
    served.requests.fail_overdue(5.0)
    for stream in (first, second):
        assert (await read(stream))[-1].error == ENGINE_STOPPED
    assert served.requests.num_open == 0


async def test_what_a_process_refuses_because_it_leaves_goes_elsewhere() -> None:
    served = Served(2)
    stream = served.open()
    served.say(0, Delta("r", finish_reason="error", error="leaving", error_status=503, is_last=True))
    assert served.replicas[0].is_leaving and served.names_at(1) == ["r"]
    served.open("next")
    assert served.names_at(0) == ["r"] and served.names_at(1) == ["r", "next"]
    served.token(1, 3, is_last=True, finish_reason="stop")
    assert tokens_of(await read(stream)) == [3]


async def test_what_an_engine_says_of_a_request_itself_ends_it() -> None:
    served = Served()
    stream = served.open()
    served.say(0, Delta("r", finish_reason="error", error="no", error_status=400, error_param="prompt", is_last=True))
    (last,) = await read(stream)
    assert (last.error, last.error_param) == ("no", "prompt") and served.requests.num_open == 0


async def test_an_id_that_is_in_use_and_a_text_that_cannot_be_sent_are_refused() -> None:
    served = Served(2)
    served.open()
    with pytest.raises(InvalidRequestError, match="already in use"):
        served.open()
    with pytest.raises(InvalidRequestError):
        served.open("unsendable")
    assert served.requests.num_open == 1 and served.router.num_tokens(1) == 0
    served.lose(0, comes_back=False)
    served.lose(1, comes_back=False)
    late = served.open("unsendable")
    served.come_back(1)
    assert (await read(late))[-1].error_status == 400, "its client is told when there is an engine"
    assert served.requests.num_open == 1 and served.names_at(1)[-1] == "r"


async def test_an_abort_reaches_the_engine_that_has_the_request() -> None:
    served = Served(2)
    stream, queued = served.open(), served.open("other")
    served.lose(0, comes_back=False)
    stream.close()
    stream.close()
    assert served.replicas[1].aborted == ["r"] and not served.replicas[0].aborted
    served.lose(1, comes_back=False)
    queued.close()
    assert served.replicas[1].aborted == ["r"] and served.requests.num_open == 0
    served.token(1, 5, "other")  # that was on its way
    assert await read(queued) == []


async def test_at_the_end_nothing_goes_on() -> None:
    served = Served(2)
    streams = [served.open("a"), served.open("b")]
    served.requests.close()
    served.lose(0)
    assert (await read(streams[0]))[-1].error == ENGINE_STOPPED and served.requests.num_open == 1
    assert served.requests.open(add("late")) is None
    served.requests.fail_all()
    assert (await read(streams[1]))[-1].error == ENGINE_STOPPED and served.requests.num_open == 0


def test_a_request_that_goes_on_elsewhere_keeps_its_first_forecast() -> None:
    served = Served(2)
    stream = served.open()
    served.say(1, forecasts=[RequestForecast("r", 9.0)])  # another replica's, with the same name
    assert stream.forecast is None
    served.say(0, forecasts=[RequestForecast("r", 1.0), RequestForecast("nobody's", 1.0)])
    served.lose(0)
    served.say(1, forecasts=[RequestForecast("r", 3.0)])
    assert stream.forecast == RequestForecast("r", 1.0)


def test_readers_learn_which_requests_have_begun() -> None:
    served = Served()
    streams = [served.open(name) for name in ("a", "b", "c")]
    served.say(0, Delta("c", text="x", token_ids=[1]), begun=["a", "gone"])
    assert [stream.has_begun for stream in streams] == [True, False, True]


async def test_the_times_of_a_request_are_those_of_all_its_engines() -> None:
    served = Served()
    stream = served.open()
    served.clock.now_s += 2.0
    served.say(0, begun=["r"])
    served.clock.now_s += 3.0
    served.token(0, 1)
    served.lose(0)
    served.clock.now_s += 5.0
    last = RequestTimings(queue_s=0.1, prefill_s=0.2, decode_s=0.3, num_preemptions=4)
    served.token(0, 2, is_last=True, finish_reason="length", timings=last)
    timings = (await read(stream))[-1].timings
    assert timings == RequestTimings(queue_s=2.0, prefill_s=3.0, decode_s=5.0, num_preemptions=4)


# ---- the whole front end, and engines that live and die --------------------------------------------------------------


def check_whole(deltas: Sequence[Delta], num_tokens: int, *, n: int = 1) -> None:
    for index in range(n):
        own = [delta for delta in deltas if delta.index == index]
        assert "".join(delta.text for delta in own) == expected(num_tokens)
        assert sum(len(delta.token_ids) for delta in own) == num_tokens
        assert [delta.finish_reason for delta in own if delta.finish_reason] == ["length"]
    assert [delta.is_last for delta in deltas].count(True) == 1 and deltas[-1].is_last


one_and_two = pytest.mark.parametrize("num_replicas", [1, 2])


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM], ids=["kill", "stop", "term"])
@one_and_two
async def test_streams_survive(num_replicas: int, kind: signal.Signals) -> None:
    """In the other replica at once, or in the only one when it is back."""
    engines = FakeEngines(step_s=0.3)
    async with serving(engines, num_replicas=num_replicas) as client:
        streams = [client.submit(add(f"r{index}", max_tokens=150 + index)) for index in range(8)]
        streams.append(client.submit(add("n", max_tokens=100, n=3)))
        readers = [asyncio.create_task(read(stream)) for stream in streams]
        await until(lambda: all(stream.has_begun for stream in streams[:8]))
        *others, ended = client.replicas
        engines.kill(ended.place, kind)
        if kind == signal.SIGKILL:
            await until(lambda: not ended.is_ready)
            assert client.health.ok == bool(others) and client.num_open_streams == 9
        late = client.submit(add("late", max_tokens=20))  # while there may be none to take it
        for index, reader in enumerate(readers[:8]):
            check_whole(await reader, 150 + index)
        check_whole(await readers[8], 100, n=3)
        check_whole(await read(late), 20)
        await until(lambda: client.num_restarts == 1 and all(replica.problem is None for replica in client.replicas))
        assert client.num_open_streams == 0 and client.num_resumed > 0


@one_and_two
async def test_a_rolling_restart_is_not_noticed(num_replicas: int) -> None:
    engines = FakeEngines(step_s=0.1)
    async with serving(engines, num_replicas=num_replicas) as client:
        before = [replica.pid for replica in client.replicas]
        lengths = [20 + 60 * index for index in range(6)]
        streams = [client.submit(add(f"r{length}", max_tokens=length)) for length in lengths]
        readers = [asyncio.create_task(read(stream)) for stream in streams]
        restarting = asyncio.create_task(client.restart(drain_s=3.0))
        await until(lambda: any(replica.is_leaving for replica in client.replicas))
        late = asyncio.create_task(read(client.submit(add("late", max_tokens=30))))
        for length, reader in zip(lengths, readers, strict=True):
            check_whole(await reader, length)
        check_whole(await late, 30)
        await restarting
        after = [replica.pid for replica in client.replicas]
        assert None not in after and not {*before} & {*after} and client.num_open_streams == 0


async def test_a_request_that_kills_engines_ends_and_the_others_get_their_answers() -> None:
    engines = FakeEngines()
    async with serving(engines, num_replicas=2) as client:
        fatal = asyncio.create_task(read(client.submit(add("fatal-1"))))
        readers = [asyncio.create_task(read(client.submit(add(f"r{number}", max_tokens=50)))) for number in range(12)]
        assert (await fatal)[-1].error == TOO_MANY_DEATHS
        for reader in readers:
            check_whole(await reader, 50)
        await all_ready(client)
        check_whole(await read(client.submit(add("after"))), 8)


async def test_requests_wait_as_long_as_patience_lasts() -> None:
    engines = FakeEngines()
    async with serving(engines, Patience(resume_s=20.0)) as client:
        stream = client.submit(add("impatient", max_tokens=4000))
        await anext(stream)
        engines.refuses = "no memory"
        killed_s = asyncio.get_running_loop().time()
        engines.kill(0)
        last = (await read(stream))[-1]
        assert (last.finish_reason, last.error, last.error_status) == ("error", ENGINE_STOPPED, 503)
        assert asyncio.get_running_loop().time() - killed_s == pytest.approx(20.0, abs=0.6)
        engines.refuses = ""
        await until(lambda: client.health.ok)


async def test_without_resumption_requests_end_with_their_engine() -> None:
    engines = FakeEngines()
    async with serving(engines, resumes=False) as client:
        streams = [client.submit(add(f"r{number}", max_tokens=4000)) for number in range(5)]
        await anext(streams[0])
        engines.kill(0)
        for stream in streams:
            assert (await read(stream))[-1].error == ENGINE_STOPPED
        assert not client.health.ok and "restarted" in client.health.reason and client.engine_pid is None
        with pytest.raises(EngineUnavailableError, match="restarted"):
            client.submit(add("too early"))
        await answered(client, "again")


async def answered(client: EngineClient, name: str) -> None:
    await until(lambda: client.health.ok)
    check_whole(await read(client.submit(add(name))), 8)
