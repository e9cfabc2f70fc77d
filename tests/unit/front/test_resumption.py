"""Requests that go on in another engine: the same tokens and text, nothing twice, nothing missing."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from headway.errors import InvalidRequestError
from headway.front import engine_client
from headway.front.engine_client import EngineClient
from headway.front.supervision import Patience
from headway.outputs import RequestOutput, Streaming, Told
from headway.sampling_params import SamplingParams
from headway.wire.messages import Delta
from tests.unit.engine_process.small_engine import create_engine
from tests.unit.front.served import PROMPT, add, all_ready, expected, kill, read, serving, started, until

QUICK = Patience(slow_step_s=0.4, step_timeout_s=4.0, hang_timeout_s=1.5)
"""One that a busy machine holds up for longer is replaced as well, which nobody is to notice."""


# ---- one engine after another, in this process ----------------------------------------------------------------------


def steps_of(
    params: SamplingParams, told: Sequence[Told] | None = None, stream: Streaming = "delta", **options: Any
) -> list[RequestOutput]:
    """The outputs of a request, from its beginning or from what was told."""
    engine = create_engine(dict(options))
    prepared = engine.prepare("one", PROMPT, params)
    outputs = []
    if told is None:
        engine.submit(prepared, stream=stream)
    elif (ended := engine.resume(prepared, told)) is not None:
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
        told = [Told(tokens, reason is not None) for _, tokens, reason, _ in before]
        after = gathered(steps_of(params, told, batching=mode), params.n)
        for early, late, full in zip(before, after, complete, strict=True):
            if early[2] is not None:
                assert late == ("", [], None, None) and early == full, "its end was told"
            else:
                assert (early[0] + late[0], early[1] + late[1], late[2], late[3]) == full, (cut, early, late)


def test_what_goes_on_is_checked() -> None:
    engine = create_engine({})
    prepared = engine.prepare("one", PROMPT, SamplingParams(max_tokens=4, n=2))
    with pytest.raises(InvalidRequestError, match="1 completions go on, and the request has 2"):
        engine.resume(prepared, [Told([5])])
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        engine.resume(prepared, [Told([5]), Told([10**6])])
    assert not engine.has_unfinished_requests() and not engine.is_live("one")


# ---- engine processes -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one(runner: asyncio.Runner) -> Iterator[EngineClient]:
    with serving(runner, QUICK, resumes=True, step_s=0.002, num_kv_blocks=2048) as client:
        yield client


@pytest.fixture(scope="module")
def two(runner: asyncio.Runner) -> Iterator[EngineClient]:
    with serving(runner, QUICK, resumes=True, num_replicas=2, step_s=0.002, num_kv_blocks=2048) as client:
        yield client


@pytest.fixture
def client(request: pytest.FixtureRequest) -> EngineClient:
    return request.getfixturevalue(request.param)


one_and_two = pytest.mark.parametrize("client", ["one", "two"], indirect=True)


def check_whole(deltas: Sequence[Delta], num_tokens: int, *, n: int = 1) -> None:
    for index in range(n):
        own = [delta for delta in deltas if delta.index == index]
        assert "".join(delta.text for delta in own) == expected(num_tokens)
        assert sum(len(delta.token_ids) for delta in own) == num_tokens
        assert [delta.finish_reason for delta in own if delta.finish_reason] == ["length"]
    assert [delta.is_last for delta in deltas].count(True) == 1 and deltas[-1].is_last


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM], ids=["kill", "stop", "term"])
@one_and_two
async def test_streams_survive(client: EngineClient, kind: signal.Signals) -> None:
    """In the other replica at once, or in the only one when it is back."""
    await all_ready(client)
    name, restarts_before = f"{kind}-{client.num_restarts}", client.num_restarts
    streams = [client.submit(add(f"{name}-{index}", max_tokens=150 + index)) for index in range(8)]
    streams.append(client.submit(add(f"{name}-n", max_tokens=100, n=3)))
    assert {own.replica for own in client._open.values()} == {*client.replicas}, "they are spread"
    readers = [asyncio.create_task(read(stream)) for stream in streams]
    await until(lambda: all(stream.has_begun for stream in streams))
    *others, ended = client.replicas
    kill(ended, kind)
    if kind == signal.SIGKILL:
        await until(lambda: not ended.is_ready)
        assert client.health.ok == bool(others)
        assert {own.replica for own in client._open.values()} <= {*(others or [None])}
    late = client.submit(add(f"{name}-late", max_tokens=20))  # while there may be none to take it
    for index, reader in enumerate(readers[:8]):
        check_whole(await reader, 150 + index)
    check_whole(await readers[8], 100, n=3)
    check_whole(await read(late), 20)
    await until(lambda: client.num_restarts > restarts_before)
    await until(lambda: all(replica.problem is None for replica in client.replicas))
    assert client.num_open_streams == 0


@one_and_two
async def test_a_rolling_restart_is_not_noticed(client: EngineClient) -> None:
    await all_ready(client)
    before = [replica.pid for replica in client.replicas]
    lengths = [20 + 60 * index for index in range(6)]
    streams = [client.submit(add(f"roll-{length}", max_tokens=length)) for length in lengths]
    readers = [asyncio.create_task(read(stream)) for stream in streams]
    restarting = asyncio.create_task(client.restart(drain_s=0.1))
    await until(lambda: any(replica.is_leaving for replica in client.replicas))
    late = asyncio.create_task(read(client.submit(add("roll-late", max_tokens=30))))
    for length, reader in zip(lengths, readers, strict=True):
        check_whole(await reader, length)
    check_whole(await late, 30)
    await restarting
    after = [replica.pid for replica in client.replicas]
    assert None not in after and not {*before} & {*after} and client.num_open_streams == 0


async def test_an_abort_while_there_is_no_engine(one: EngineClient) -> None:
    stream = one.submit(add("gone", max_tokens=4000))
    await anext(stream)
    kill(one.replicas[0])
    await until(lambda: one.engine_pid is None)
    stream.close()
    waiting = one.submit(add("waits", max_tokens=4000))
    waiting.close()
    unsendable = one.submit(add("unsendable-\ud800"))
    assert (await read(unsendable))[-1].error_status == 400, "told when there is an engine; which serves the others"
    assert one.num_open_streams == 0
    check_whole(await read(one.submit(add("next", max_tokens=5))), 5)
    assert one.stats.batch.num_running == 0


async def test_requests_do_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "TICK_S", 0.01)  # before another engine can be there
    async with started(Patience(resume_s=0.01), resumes=True, step_s=0.002) as client:
        stream = client.submit(add("impatient", max_tokens=4000))
        await anext(stream)
        kill(client.replicas[0])
        last = (await read(stream))[-1]
        assert (last.finish_reason, last.error, last.error_status) == ("error", "the engine stopped; please retry", 503)
