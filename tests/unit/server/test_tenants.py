"""Several API keys: each is a tenant, whatever its requests call themselves, and none keeps another waiting."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headway.core.request_options import RequestOptions
from headway.errors import EngineUnavailableError
from headway.front.streams import RequestStream
from headway.sampling_params import SamplingParams
from headway.server.admission.queue_limits import QueueLimits, Reservation
from headway.server.admission.queue_shares import TenantLimits
from headway.server.admission.service_classes import ServiceClass, ServiceClasses
from headway.server.admission.tenant_gate import TenantGate, default_most
from headway.server.api.api_errors import ApiError
from headway.server.server_config import ServerConfig
from headway.wire.messages import AddRequest, Delta
from tests.unit.server.fake_engine import COMPLETIONS, FakeEngine, FakeServer, until

ALICE, BOB = {"authorization": "Bearer alice"}, {"authorization": "Bearer bob"}
KEYS = ("alice", "bob")


@pytest.mark.parametrize("api_key", [(), ("alice",), ("alice", "alice"), KEYS])
def test_the_tenant_is_the_key_where_there_are_several_and_else_the_user(api_key: tuple[str, ...]) -> None:
    server, users = FakeServer(api_key=api_key), []
    server.services.on_request_end.append(lambda record: users.append(record.user))
    for user in ("one", "another", None):
        assert server.post(COMPLETIONS, {"prompt": "Hi", "user": user}, headers=ALICE).status_code == 200
    tenants = [request.options.tenant for request in server.engine.requests]
    assert users == ["one", "another", None], "the log has the user, not the key"
    if api_key != KEYS:
        assert tenants == ["one", "another", ""]
        return
    assert len(set(tenants)) == 1 and "alice" not in tenants[0]
    server.post(COMPLETIONS, {"prompt": "Hi", "user": "one"}, headers=BOB)
    assert server.engine.requests[-1].options.tenant not in tenants


# ---- the queue ------------------------------------------------------------------------------------------------------

HIGH, LOW = ServiceClass("high"), ServiceClass("low", shed=1)
CLASSES = ServiceClasses({each.name: each for each in (HIGH, LOW)}, "high")


def queue_of(limits: TenantLimits | None, *, max_requests: int = 8) -> QueueLimits:
    return QueueLimits(max_requests=max_requests, max_tokens=1000, classes=CLASSES, tenants=limits)


def wait(queue: QueueLimits, tenant: str, service_class: ServiceClass = HIGH, *, num_tokens: int = 0) -> Reservation:
    return queue.reserve(body_bytes=4 * num_tokens, service_class=service_class, tenant=tenant)


def test_a_tenant_with_too_much_is_refused_alone() -> None:
    queue = queue_of(TenantLimits(3, 300, is_guaranteed=False))
    first = wait(queue, "bob")
    first.settle(num_requests=3, num_tokens=30)
    with pytest.raises(ApiError) as raised:
        wait(queue, "bob")
    error = raised.value
    assert (error.status, error.code, error.headers["retry-after"]) == (429, "tenant_queue_full", "1")
    assert "3 requests of yours are waiting, of at most 3 requests and 300 prompt tokens" in str(error)
    assert queue.lines["high"].num_refused["tenant_queue_full"] == 1
    wait(queue, "alice", num_tokens=290)
    with pytest.raises(ApiError, match="290 prompt tokens of yours"):
        wait(queue, "alice", num_tokens=11)
    first.note_started(1, 10)
    wait(queue, "bob")


def test_what_others_have_waiting_is_no_reason_to_refuse_a_part_that_is_guaranteed() -> None:
    for is_guaranteed in (True, False):
        queue = queue_of(TenantLimits(4, 500, is_guaranteed=is_guaranteed))
        wait(queue, "bob", num_tokens=1000)  # alone in his part, so it fits
        if is_guaranteed:
            wait(queue, "alice", num_tokens=500)
        else:
            with pytest.raises(ApiError, match="The queue is full"):
                wait(queue, "alice", num_tokens=500)


def test_room_in_a_tenants_part_is_made_in_that_part() -> None:
    queue = queue_of(TenantLimits(2, 500, is_guaranteed=True))
    of_alice, of_bob = [wait(queue, "alice", LOW) for _ in range(2)], [wait(queue, "bob", LOW) for _ in range(2)]
    wait(queue, "bob", HIGH)
    assert [one.shed_error is not None for one in (*of_alice, *of_bob)] == [False, False, False, True]
    with pytest.raises(ApiError):
        wait(queue, "bob", LOW)


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        ({"api_key": KEYS}, (512, 1_000_000, True)),
        ({"api_key": KEYS, "max_queue_requests": 1}, (1, 2_000_000, False)),
        ({"api_key": KEYS, "max_waiting_per_tenant": 600}, (600, 1_171_875, False)),
        ({"api_key": KEYS, "max_waiting_per_tenant": 0}, None),
        ({"api_key": ("alice",)}, None),
        ({"max_waiting_per_tenant": 256}, (256, 500_000, False)),
    ],
)
def test_what_a_tenant_may_have_by_default(options: dict[str, Any], limits: tuple[int, int, bool] | None) -> None:
    assert ServerConfig(**options).tenant_limits == limits


async def test_over_http() -> None:
    server = FakeServer(FakeEngine(manual=True), api_key=KEYS, max_queue_requests=4)
    waiting = server.begin(COMPLETIONS, BOB, prompt=["a", "b"], user="x")
    await server.engine.asked(2)
    async with server.client() as client:
        for path, own in ((COMPLETIONS, {"prompt": "c", "user": "y"}), ("/tokenize", {"prompt": "c"})):
            refused = await client.post(path, json=own, headers=BOB)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "tenant_queue_full")
            assert refused.headers["retry-after"] == "1"
        assert (await client.post("/tokenize", json={"prompt": "c"}, headers=ALICE)).status_code == 200
    await waiting.leave()


# ---- the engine -----------------------------------------------------------------------------------------------------


def request(name: str, tenant: str, **options: Any) -> AddRequest:
    n = options.pop("n", 1)
    return AddRequest(name, [1], SamplingParams(n=n), RequestOptions(tenant=tenant, **options))


class Gated:
    """A gate before an engine that answers by hand."""

    def __init__(self, most: int | None) -> None:
        self.engine = FakeEngine(manual=True)
        self.gate = TenantGate(self.engine, lambda: most)

    @property
    def inside(self) -> list[str]:
        return [each.request_id for each in self.engine.requests]

    async def end(self, name: str) -> None:
        self.engine.push(Delta(name, finish_reason="stop", is_last=True))
        await asyncio.sleep(0)


async def test_a_tenants_requests_beyond_the_limit_wait_and_go_in_order() -> None:
    gated = Gated(2)
    for name in ("a", "b", "c", "d"):
        gated.gate.submit(request(name, "bob"))
    gated.gate.submit(request("first", "bob", priority=-1))
    gated.gate.submit(request("other", "alice"))
    assert gated.inside == ["a", "b", "other"]
    await gated.end("b")
    await gated.end("a")
    assert gated.inside == ["a", "b", "other", "first", "c"]
    await gated.end("c")
    assert gated.inside[-1] == "d"


async def test_one_that_leaves_while_it_waits_never_comes_to_the_engine() -> None:
    gated = Gated(1)
    streams = [gated.gate.submit(request(str(number), "bob")) for number in range(50)]
    for stream in streams[1:49]:
        stream.close()
    assert not gated.engine.aborted
    streams[0].close()  # in the engine
    await asyncio.sleep(0)
    assert gated.engine.aborted == ["0"] and gated.inside == ["0", "49"]
    gated.engine.push(Delta("49", text="x"))
    assert [delta.text for delta in await anext(streams[49])] == ["x"]
    streams[49].close()
    assert gated.engine.aborted == ["0", "49"]


async def test_sequences_count_and_any_one_request_fits() -> None:
    gated = Gated(3)
    for name, n in (("large", 9), ("two", 2), ("one", 1), ("next", 1)):
        gated.gate.submit(request(name, "bob", n=n))
    assert gated.inside == ["large"]
    await gated.end("large")
    assert gated.inside == ["large", "two", "one"]
    await gated.end("two")
    assert gated.inside[-1] == "next"


async def test_what_the_engine_refuses_later_ends_the_stream_and_lets_the_next_one_in() -> None:
    gated = Gated(1)
    gated.gate.submit(request("a", "bob"))
    refused, following = gated.gate.submit(request("b", "bob")), gated.gate.submit(request("c", "bob"))
    accept = gated.engine.submit

    def submit(each: AddRequest, stream: RequestStream | None = None) -> RequestStream:
        if each.request_id == "b":
            raise EngineUnavailableError("the engine is gone")
        return accept(each, stream)

    gated.engine.submit = submit  # type: ignore[method-assign]
    await gated.end("a")
    ((delta,),) = [deltas async for deltas in refused]
    assert (delta.error, delta.error_status, delta.is_last) == ("the engine is gone", 503, True)
    assert gated.inside == ["a", "c"]
    gated.engine.health = gated.engine.health.__class__(False, "down")
    with pytest.raises(EngineUnavailableError):
        gated.gate.submit(request("d", "alice"))
    following.close()


@pytest.mark.parametrize(("limit", "most"), [(None, default_most(8)), (6, 6), (0, 300)])
async def test_a_flood_does_not_fill_the_engine_whatever_users_it_invents(limit: int | None, most: int) -> None:
    server = FakeServer(FakeEngine(manual=True), api_key=KEYS, max_running_per_tenant=limit)
    flood = [server.begin(COMPLETIONS, BOB, prompt=["a"] * 150, user=user) for user in ("one", "another")]
    await until(lambda: server.services.limits.num_requests == 300 and len(server.engine.requests) >= most)
    assert len(server.engine.requests) == most and default_most(8) == 9
    hers = server.begin(COMPLETIONS, ALICE)
    await server.engine.asked(most + 1)
    end = {"finish_reason": "stop", "is_last": True}
    server.engine.push(Delta(server.engine.requests[most].request_id, text="x", token_ids=[300], **end))
    await hers.task
    assert hers.sent[0]["status"] == 200
    for each in flood:
        await each.leave()
    assert len(server.engine.aborted) == len(server.engine.requests) - 1
