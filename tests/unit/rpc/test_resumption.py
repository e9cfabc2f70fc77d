"""Requests that go on in another engine: the same tokens and text, nothing twice, nothing missing."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import string
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from headway.errors import InvalidRequestError
from headway.outputs import RequestOutput, Told
from headway.rpc import engine_client
from headway.rpc.engine_client import TOO_MANY_DEATHS, EngineClient
from headway.rpc.messages import AddRequest, Delta
from headway.rpc.streams import RequestStream
from headway.rpc.supervision import Patience
from headway.sampling_params import SamplingParams
from tests.unit.rpc.served import Served, add, read, serving, until
from tests.unit.rpc.small_engine import create_engine

PROMPT = [5, 6, 7]
QUICK = Patience(slow_step_s=0.4, step_timeout_s=4.0, hang_timeout_s=4.0)  # a busy machine stands still for a second


# ---- one engine after another, in this process ----------------------------------------------------------------------


def steps_of(params: SamplingParams, told: Sequence[Told] | None = None, **options: Any) -> list[RequestOutput]:
    """The deltas of a request, from its beginning or from what was told."""
    engine = create_engine(dict(options))
    prepared = engine.prepare("one", PROMPT, params)
    outputs = []
    if told is None:
        engine.submit(prepared, stream="delta")
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
    expected = gathered(whole, params.n)
    for cut in range(len(whole)):
        before = gathered(whole[:cut], params.n)
        told = [Told(tokens, reason is not None) for _, tokens, reason, _ in before]
        after = gathered(steps_of(params, told, batching=mode), params.n)
        for early, late, full in zip(before, after, expected, strict=True):
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
def one() -> Iterator[Served]:
    with serving(QUICK, resumes=True, step_s=0.002, num_kv_blocks=2048) as running:
        yield running


@pytest.fixture(scope="module")
def two() -> Iterator[Served]:
    with serving(QUICK, resumes=True, replicas=2, step_s=0.002, num_kv_blocks=2048) as running:
        yield running


def alphabet(num_tokens: int) -> str:
    """What the small engine answers."""
    first = len(PROMPT)
    return "".join(string.ascii_lowercase[(first + place) % 26] for place in range(num_tokens))


def check_whole(deltas: Sequence[Delta], num_tokens: int, *, n: int = 1) -> None:
    for index in range(n):
        own = [delta for delta in deltas if delta.index == index]
        assert "".join(delta.text for delta in own) == alphabet(num_tokens)
        assert sum(len(delta.token_ids) for delta in own) == num_tokens
        assert [delta.finish_reason for delta in own if delta.finish_reason] == ["length"]
    assert [delta.is_last for delta in deltas].count(True) == 1 and deltas[-1].is_last


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM], ids=["kill", "stop", "term"])
@pytest.mark.parametrize("which", ["one", "two"])
def test_streams_survive(which: str, kind: signal.Signals, request: pytest.FixtureRequest) -> None:
    async def test(client: EngineClient) -> None:
        name, restarts_before = f"{which}-{kind}", client.num_restarts
        streams = [client.submit(add(f"{name}-{index}", max_tokens=400 + index)) for index in range(8)]
        streams.append(client.submit(add(f"{name}-n", max_tokens=300, n=3)))
        readers = [asyncio.create_task(read(stream)) for stream in streams]
        await asyncio.sleep(0.2)
        assert client.engine_pid is not None
        os.kill(client.engine_pid, kind)
        await asyncio.sleep(0.05)
        late = client.submit(add(f"{name}-late", max_tokens=20))  # while there may be none to take it
        for index, reader in enumerate(readers[:8]):
            check_whole(await reader, 400 + index)
        check_whole(await readers[8], 300, n=3)
        check_whole(await read(late), 20)
        await until(lambda: client.num_restarts > restarts_before)
        await until(lambda: all(replica.problem is None for replica in client.replicas))
        assert client.num_open_streams == 0

    served: Served = request.getfixturevalue(which)
    served.run(test)


def test_requests_move_to_the_other_replica_at_once(two: Served) -> None:
    async def test(client: EngineClient) -> None:
        await until(lambda: all(replica.is_ready for replica in client.replicas))
        streams = [client.submit(add(f"move-{index}", max_tokens=600)) for index in range(6)]
        places = {own.replica.place for own in client._open.values() if own.replica is not None}
        assert places == {0, 1}, "they are spread"
        readers = [asyncio.create_task(read(stream)) for stream in streams]
        await asyncio.sleep(0.2)
        killed = client.replicas[1]
        assert killed.pid is not None
        os.kill(killed.pid, signal.SIGKILL)
        await until(lambda: not killed.is_ready)
        assert client.health.ok, "the other one serves"
        assert all(own.replica is client.replicas[0] for own in client._open.values())
        for reader in readers:
            check_whole(await reader, 600)
        await until(lambda: killed.is_ready)

    two.run(test)


@pytest.mark.parametrize("which", ["one", "two"])
def test_a_rolling_restart_is_not_noticed(which: str, request: pytest.FixtureRequest) -> None:
    async def test(client: EngineClient) -> None:
        await until(lambda: all(replica.is_ready for replica in client.replicas))
        before = [replica.pid for replica in client.replicas]
        streams = [client.submit(add(f"roll-{which}-{index}", max_tokens=60 + 300 * index)) for index in range(6)]
        readers = [asyncio.create_task(read(stream)) for stream in streams]
        restarting = asyncio.create_task(client.restart(drain_s=0.3))
        await asyncio.sleep(0.1)
        late = asyncio.create_task(read(client.submit(add(f"roll-{which}-late", max_tokens=30))))
        for index, reader in enumerate(readers):
            check_whole(await reader, 60 + 300 * index)
        check_whole(await late, 30)
        await restarting
        after = [replica.pid for replica in client.replicas]
        assert None not in after and not {*before} & {*after} and client.num_open_streams == 0

    served: Served = request.getfixturevalue(which)
    served.run(test)


def test_a_request_that_kills_engines_is_given_up(one: Served) -> None:
    async def test(client: EngineClient) -> None:
        deadly = client.submit(add("deadly-1"))
        beside = [asyncio.create_task(read(client.submit(add(f"beside-{index}", max_tokens=40)))) for index in range(4)]
        last = (await read(deadly))[-1]
        assert (last.error, last.error_status) == (TOO_MANY_DEATHS, 503)
        for reader in beside:
            check_whole(await reader, 40)
        check_whole(await read(client.submit(add("after", max_tokens=5))), 5)

    one.run(test)


def test_an_abort_while_there_is_no_engine(one: Served) -> None:
    async def test(client: EngineClient) -> None:
        stream = client.submit(add("gone", max_tokens=4000))
        await anext(stream)
        assert client.engine_pid is not None
        os.kill(client.engine_pid, signal.SIGKILL)
        await until(lambda: client.engine_pid is None)
        stream.close()
        waiting = client.submit(add("waits", max_tokens=4000))
        waiting.close()
        unsendable = client.submit(add("unsendable-\ud800"))
        assert (await read(unsendable))[-1].error_status == 400, "told when there is an engine; which serves the others"
        assert client.num_open_streams == 0
        check_whole(await read(client.submit(add("next", max_tokens=5))), 5)
        assert client.stats is not None and client.stats.num_running == 0

    one.run(test)


def test_requests_do_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "TICK_S", 0.01)  # before another engine can be there

    async def test(client: EngineClient) -> None:
        stream = client.submit(add("impatient", max_tokens=4000))
        await anext(stream)
        assert client.engine_pid is not None
        os.kill(client.engine_pid, signal.SIGKILL)
        last = (await read(stream))[-1]
        assert (last.finish_reason, last.error, last.error_status) == ("error", "the engine stopped; please retry", 503)

    with serving(Patience(resume_s=0.01), resumes=True, step_s=0.002) as served:
        served.run(test)


def test_many_deaths(two: Served) -> None:
    """Every second one of two is killed or stopped, at random; clients come and go."""
    rng = random.Random(0)

    async def client_of(client: EngineClient, number: int, counts: list[int]) -> None:
        for turn in range(4):
            num_tokens = 50 + 97 * ((number + turn) % 5)
            stream: RequestStream = client.submit(add(f"many-{number}-{turn}", max_tokens=num_tokens))
            if (number + turn) % 7 == 3:
                await anext(stream)
                stream.close()
                continue
            check_whole(await read(stream), num_tokens)
            counts.append(num_tokens)

    async def chaos(client: EngineClient) -> None:
        while True:  # a request that sees none but dying engines is rightly given up: all have got tokens since
            await asyncio.sleep(0.7)
            await until(lambda: all(replica.is_ready for replica in client.replicas))
            await until(lambda: not any(own.num_deaths for own in client._open.values()))
            pids = [replica.pid for replica in client.replicas if replica.pid is not None]
            if pids:
                os.kill(rng.choice(pids), rng.choice([signal.SIGKILL, signal.SIGSTOP]))

    async def test(client: EngineClient) -> None:
        counts: list[int] = []
        killing = asyncio.create_task(chaos(client))
        await asyncio.gather(*(client_of(client, number, counts) for number in range(16)))
        killing.cancel()
        assert len(counts) > 45 and client.num_restarts > 1
        assert client.num_open_streams == 0
        await until(lambda: all(replica.problem is None for replica in client.replicas))
        check_whole(await read(client.submit(AddRequest("end", PROMPT, SamplingParams(max_tokens=3)))), 3)

    two.run(test)
