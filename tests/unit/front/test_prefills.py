"""Prompts that prefill replicas compute, seen from the front end: who gets them, how they end, and what stays."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest

from headway.core.request_options import RequestOptions
from headway.errors import ConfigError
from headway.front import engine_client
from headway.front.engine_client import EngineClient
from headway.front.placement import CPU_ARRIVAL_MEMORY, GPU_PREFILL_TOKENS, options_apart
from headway.front.roles import PrefillChoice, Roles
from headway.front.scaling import ScalingRule
from headway.front.streams import RequestStream
from headway.front.supervision import Patience, Replica
from headway.sampling_params import SamplingParams
from headway.wire.messages import AddRequest
from tests.unit.front.served import all_ready, kill, read, serving, until
from tests.unit.front.test_requests_that_move import pretended

OPTIONS: dict[str, Any] = {"resumes": True, "step_s": 0.002, "num_kv_blocks": 4096}


@pytest.fixture(scope="module")
def served(runner: asyncio.Runner) -> Iterator[EngineClient]:
    with serving(runner, Patience(hang_timeout_s=2.0), roles=Roles.parse("prefill=1,decode=1"), **OPTIONS) as client:
        yield client


@pytest.fixture
def client(runner: asyncio.Runner, served: EngineClient) -> Iterator[EngineClient]:
    """With all replicas there, and nothing left at the end."""
    runner.run(all_ready(served))
    yield served
    runner.run(until(lambda: is_settled(served)))


@pytest.fixture(autouse=True)
def choices(monkeypatch: pytest.MonkeyPatch) -> list[PrefillChoice]:
    """All prompts go to a prefill replica; what the decisions would have been made by."""
    made: list[PrefillChoice] = []

    def note(choice: PrefillChoice) -> bool:
        made.append(choice)
        return True

    monkeypatch.setattr(engine_client, "computes_elsewhere", note)
    return made


def changes(client: EngineClient, before: Mapping[str, int]) -> dict[str, int]:
    """Outcomes since then, without those of which there was none."""
    now = client.prefill_outcomes
    return {name: number - before[name] for name, number in now.items() if number != before[name]}


_firsts = itertools.count(5, 3)


def add(request_id: str, num_tokens: int = 41, **params: Any) -> AddRequest:
    """A prompt that no other begins like."""
    first = next(_firsts)
    prompt = [first + number % 3 for number in range(num_tokens)]
    return AddRequest(request_id, prompt, SamplingParams(**{"max_tokens": 8, **params}))


async def text(stream: RequestStream) -> str:
    return "".join(delta.text for delta in await read(stream))


def is_idle(replica: Replica) -> bool:
    return (replica.stats.batch.num_running, replica.stats.batch.num_waiting) == (0, 0)


def is_settled(client: EngineClient) -> bool:
    assert client._prefills is not None
    return not client._prefills._live and not client._prefills.router._routed and not client._router._routed


async def test_a_prompt_is_computed_by_one_and_answered_by_another(
    client: EngineClient, choices: list[PrefillChoice]
) -> None:
    decode, prefill = client.replicas
    assert (decode.role, prefill.role) == ("decode", "prefill")
    assert decode.info is not None and not decode.info.blocks_at
    assert prefill.info is not None and prefill.info.blocks_at.startswith("shm:///")
    before = client.prefill_outcomes
    alone = await text(client.submit(add("without a whole block", num_tokens=4)))
    assert changes(client, before) == {"here": 1} and not choices
    request = add("long")
    deltas = await read(client.submit(request))
    assert len("".join(delta.text for delta in deltas)) == 8 == len(alone)
    assert deltas[-1].timings is not None and deltas[-1].timings.num_cached_tokens == 40
    assert changes(client, before) == {"here": 1, "elsewhere": 1}
    assert choices[0].num_uncached == 41 and choices[0].num_blocks == 10 and choices[0].num_generating == 0
    stats = client.stats
    assert (stats.batch.prompt_tokens, stats.batch.generation_tokens) == (45, 16), "each request counts once"
    assert prefill.stats.batch.prompt_tokens == 40 and stats.tiers.num_fetched_blocks == 10
    again = await read(client.submit(msgspec.structs.replace(request, request_id="again")))
    assert again[-1].timings is not None and again[-1].timings.num_cached_tokens == 40
    assert changes(client, before) == {"here": 2, "elsewhere": 1}, "it is cached where it is answered"
    choices.clear()
    assert (await read(client.submit(add("logprobs", prompt_logprobs=1))))[-1].is_last
    assert changes(client, before) == {"here": 3, "elsewhere": 1} and not choices, "it asks of every prompt token"


def test_nobody_else_says_where_blocks_come_from() -> None:
    request = add("r", num_tokens=4)
    request.options = RequestOptions(blocks_at="tcp://10.0.0.1:22")
    own = engine_client._Open(request, RequestStream("r", lambda _: None), 0.0)
    assert own.message().options.blocks_at == ""
    own.blocks_at = "shm:///here#1"
    assert own.message().options.blocks_at == "shm:///here#1"


async def test_a_prefill_replica_that_hangs_is_not_waited_for(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "MOST_PREFILL_S", 0.2)
    monkeypatch.setattr(engine_client, "LEAST_PREFILL_S", 0.2)
    prefill, before, num_restarts = client.replicas[1], client.prefill_outcomes, client.num_restarts
    kill(prefill, signal.SIGSTOP)
    assert len(await text(client.submit(add("r")))) == 8
    assert changes(client, before) == {"failed": 1} and client.health.ok
    await until(lambda: client.num_restarts == num_restarts + 1 and prefill.is_ready)


async def test_a_prefill_replica_that_dies(client: EngineClient) -> None:
    prefill, before = client.replicas[1], client.prefill_outcomes
    address = prefill.info.blocks_at if prefill.info is not None else ""
    streams = [client.submit(add(f"d{number}", num_tokens=401)) for number in range(4)]
    kill(prefill)
    assert {len(each) for each in await asyncio.gather(*map(text, streams))} == {8}
    assert client.health.ok and sum(changes(client, before).values()) == 4
    await until(lambda: prefill.is_ready)
    assert prefill.info is not None and prefill.info.blocks_at != address
    before = client.prefill_outcomes
    await read(client.submit(add("later")))
    assert changes(client, before) == {"elsewhere": 1}


async def test_without_a_decode_replica_nothing_is_served(client: EngineClient) -> None:
    decode = client.replicas[0]
    kill(decode)
    await until(lambda: not client.health.ok)
    assert client.replicas[1].is_ready
    assert len(await text(client.submit(add("waits until it is back")))) == 8


async def test_an_aborted_request_is_aborted_in_both_places(client: EngineClient) -> None:
    before = client.prefill_outcomes
    streams = [client.submit(add(f"a{number}", num_tokens=2001)) for number in range(8)]
    await asyncio.sleep(0.01)
    for stream in streams:
        stream.close()
    assert client.num_open_streams == 0
    await until(lambda: is_settled(client) and all(map(is_idle, client.replicas)))
    ended = changes(client, before)
    assert ended["aborted"] + ended.get("elsewhere", 0) == 8
    assert len(await text(client.submit(add("after them")))) == 8


async def test_while_no_prefill_replica_is_there_prompts_are_computed_where_answers_are(
    client: EngineClient, choices: list[PrefillChoice]
) -> None:
    before = client.prefill_outcomes
    await client.replicas[1].rest(0.0)
    assert len(await text(client.submit(add("alone")))) == 8
    assert changes(client, before) == {"here": 1} and not choices and client.health.ok
    await client.replicas[1].start()


async def test_each_prompt_goes_to_the_prefill_replica_with_the_least_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    client, _ = pretended(monkeypatch, roles=Roles(2, 1))
    for number in range(6):
        client.submit(add(f"r{number}", num_tokens=44))
    assert client._prefills is not None
    assert [len(client._prefills.at(replica)) for replica in client.replicas] == [0, 3, 3]


def test_options_have_room_for_blocks_to_arrive_in(monkeypatch: pytest.MonkeyPatch) -> None:
    roles = Roles(1, 1)
    client = EngineClient({"device": "cpu"}, roles=roles)
    assert {replica._spec.options["host_cache_memory"] for replica in client.replicas} == {CPU_ARRIVAL_MEMORY}
    client = EngineClient({"device": "cpu", "host_cache_memory": 12345}, roles=roles)
    assert {replica._spec.options["host_cache_memory"] for replica in client.replicas} == {12345}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    for given, limit in ({}, GPU_PREFILL_TOKENS), ({"max_num_batched_tokens": 77}, 77):
        decode, prefill = EngineClient(given, roles=roles).replicas
        assert prefill._spec.options["max_num_batched_tokens"] == limit
        assert decode._spec.options.get("max_num_batched_tokens") == given.get("max_num_batched_tokens")
    for given, carrier, expected in (
        ({}, "auto", "arrival_memory"),
        ({}, "tcp", "host_cache_memory"),
        ({"disk_cache": "blocks"}, "auto", "host_cache_memory"),
        ({"host_cache_memory": 12345}, "auto", "host_cache_memory"),
    ):
        options = options_apart(given, carrier)
        assert [name for name in ("arrival_memory", "host_cache_memory") if options.get(name)] == [expected]
    with pytest.raises(ConfigError, match="without scaling"):
        EngineClient({}, roles=roles, scaling=ScalingRule(1, 2))
