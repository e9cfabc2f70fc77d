"""Too much to do: limits of classes, who is dropped for whom, and who is told at once that it would be late."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headway.core.request_options import RequestOptions
from headway.server.admission.queue_limits import QueueLimits, Reservation
from headway.server.admission.service_classes import ServiceClass, ServiceClasses
from headway.server.api.api_errors import ApiError
from tests.unit.clock import Clock
from tests.unit.engine_stats import engine_stats
from tests.unit.server.fake_engine import COMPLETIONS, FakeEngine, FakeServer, RawClient, until

HIGH = ServiceClass("high", RequestOptions(ttft_target_s=0.5))
MIDDLE = ServiceClass("middle", shed=1)
LOW = ServiceClass("low", shed=2, max_waiting=3)
CLASSES = ServiceClasses({each.name: each for each in (HIGH, MIDDLE, LOW)}, "middle")


def limits(**options: Any) -> QueueLimits:
    return QueueLimits(**{"max_requests": 4, "max_tokens": 1000, "classes": CLASSES} | options)


def wait(queue: QueueLimits, service_class: ServiceClass | None, *, num_tokens: int = 0) -> Reservation:
    return queue.reserve(body_bytes=4 * num_tokens, service_class=service_class)


def admitted(queue: QueueLimits, service_class: ServiceClass, *, num_tokens: int = 0) -> Reservation:
    reservation = wait(queue, service_class, num_tokens=num_tokens)
    reservation.settle(num_requests=1, num_tokens=num_tokens)
    return reservation


def refusal(work: Callable[[], object]) -> ApiError:
    with pytest.raises(ApiError) as raised:
        work()
    return raised.value


class Work:
    """What waits, as far as the queue sees it."""

    def __init__(self, *, has_begun: bool = False) -> None:
        self.has_begun = has_begun
        self.num_drops = 0

    def drop(self) -> None:
        self.num_drops += 1


# ---- the rules of the queue -----------------------------------------------------------------------------------------


def test_a_class_has_a_limit_of_its_own() -> None:
    queue = limits(max_requests=100)
    for _ in range(3):
        wait(queue, LOW)
    error = refusal(lambda: wait(queue, LOW))
    assert (error.status, error.code, error.headers["retry-after"]) == (429, "class_queue_full", "1")
    assert "class 'low' is full: 3 requests are waiting, of at most 3" in str(error)
    wait(queue, MIDDLE)
    refused = {"queue_full": 0, "class_queue_full": 1, "tenant_queue_full": 0, "late": 0}
    assert queue.lines["low"].num_refused == refused
    assert (queue.num_requests, queue.lines["low"].num_waiting) == (4, 3)


def test_the_limit_of_a_class_counts_completions() -> None:
    queue = limits(max_requests=100)
    first = wait(queue, LOW)
    first.settle(num_requests=3, num_tokens=5)
    assert refusal(lambda: wait(queue, LOW)).code == "class_queue_full"
    first.note_started(1, 5)
    second = wait(queue, LOW)
    assert refusal(lambda: second.settle(num_requests=2, num_tokens=5)).code == "class_queue_full"


def test_the_class_that_is_shed_first_gives_way_and_in_it_who_came_last() -> None:
    queue = limits()
    low_1, middle, low_2, high = (wait(queue, each) for each in (LOW, MIDDLE, LOW, HIGH))
    for each in (low_2, low_1):
        each.settle(num_requests=1, num_tokens=1)  # each keeps its turn
    later = wait(queue, MIDDLE)
    assert low_2.shed_error is not None and low_1.shed_error is None
    wait(queue, HIGH)
    assert low_1.shed_error is not None and later.shed_error is None
    wait(queue, HIGH)
    assert later.shed_error is not None and middle.shed_error is None and high.shed_error is None
    error = low_1.shed_error
    assert (error.status, error.code, error.headers["retry-after"]) == (503, "shed", "1")
    assert "class 'low' is dropped first" in str(error)
    assert {name: line.num_shed for name, line in queue.lines.items()} == {"high": 0, "middle": 1, "low": 2}
    assert queue.num_requests == 4


@pytest.mark.parametrize("newcomer", [LOW, MIDDLE, None], ids=lambda each: each.name if each else "tokenize")
def test_nobody_is_dropped_for_an_equal_or_for_what_has_no_class(newcomer: ServiceClass | None) -> None:
    queue = limits(max_requests=2)
    waiting = [wait(queue, MIDDLE if newcomer else LOW) for _ in range(2)]
    error = refusal(lambda: wait(queue, newcomer))
    assert (error.status, error.code) == (429, "queue_full")
    assert "2 requests are waiting" in str(error)
    assert not any(each.shed_error for each in waiting)
    if newcomer is not None:
        assert queue.lines[newcomer.name].num_refused["queue_full"] == 1


def test_who_has_begun_is_left_alone() -> None:
    queue = limits(max_requests=2)
    begun, half_started = wait(queue, LOW), wait(queue, LOW)
    begun.settle(num_requests=1, num_tokens=0)
    work = Work(has_begun=True)
    begun.follow(work)
    half_started.note_started(0, 0)  # the first prompt of several, say
    assert refusal(lambda: wait(queue, HIGH)).code == "queue_full"
    assert work.num_drops == 0
    work.has_begun = False
    wait(queue, HIGH)
    assert (work.num_drops, half_started.shed_error) == (1, None)
    assert begun.shed_error is not None


def test_as_many_are_dropped_as_it_takes_and_none_if_it_does_not_help() -> None:
    queue = limits(max_requests=100, max_tokens=100)
    waiting = [wait(queue, LOW, num_tokens=30) for _ in range(3)]
    kept = wait(queue, HIGH, num_tokens=10)
    assert "100 prompt tokens are waiting" in str(refusal(lambda: wait(queue, HIGH, num_tokens=95)))
    assert not any(each.shed_error for each in waiting)
    wait(queue, HIGH, num_tokens=50)
    assert [each.shed_error is not None for each in waiting] == [False, True, True]
    assert (queue.num_tokens, kept.shed_error) == (90, None)


def test_who_was_dropped_gives_nothing_back_twice() -> None:
    queue = limits(max_requests=1)
    with wait(queue, LOW) as dropped:
        wait(queue, HIGH)
        assert queue.num_requests == 1
        assert refusal(lambda: dropped.settle(num_requests=5, num_tokens=5)).code == "shed"
        assert refusal(lambda: dropped.follow(Work())).code == "shed"
    assert (queue.num_requests, queue.num_tokens, queue.lines["low"].num_waiting) == (1, 0, 0)


def test_a_target_that_cannot_be_met() -> None:
    """The engine expects the last one's first token in 0.9 s, and a prompt token takes a millisecond."""
    clock = Clock()
    queue = limits(max_requests=100, max_tokens=10**6, now=clock, token_s=lambda: 0.001)
    first = admitted(queue, HIGH, num_tokens=100)
    last = admitted(queue, HIGH, num_tokens=100)
    last.note_forecast(0.9)
    first.note_forecast(5.0)  # it comes late, and is about an earlier place in the line
    error = refusal(lambda: queue.reserve(body_bytes=400, service_class=HIGH, in_time_s=0.5))
    assert (error.status, error.code, error.headers["retry-after"]) == (429, "late", "1")
    for words in ("2 requests of class 'high'", "about 1000 ms", "target is 500 ms"):
        assert words in str(error), str(error)
    queue.reserve(body_bytes=400, service_class=HIGH, in_time_s=1.1)
    queue.reserve(body_bytes=400, service_class=HIGH)
    queue.reserve(body_bytes=4, service_class=MIDDLE, in_time_s=0.01)
    assert queue.lines["high"].num_refused["late"] == 1
    admitted(queue, HIGH, num_tokens=9000)
    error = refusal(lambda: queue.reserve(body_bytes=0, service_class=HIGH, in_time_s=0.5))
    assert error.headers["retry-after"] == "10", "the line takes 9.9 s, 9.4 s more than the target"
    clock.now_s += 0.8
    queue.reserve(body_bytes=0, service_class=HIGH, in_time_s=9.2)
    clock.now_s += 100.0
    queue.reserve(body_bytes=0, service_class=HIGH, in_time_s=9.01)


@pytest.mark.parametrize(("expected_s", "retry_after"), [(0.0, "1"), (7.2, "8"), (86_400.0, "600")])
def test_a_full_queue_says_when_to_come_back(expected_s: float, retry_after: str) -> None:
    """That is when the engine expects the first token of what waits already, and never in days."""
    queue = limits(max_requests=1, now=Clock())
    admitted(queue, HIGH).note_forecast(expected_s)
    error = refusal(lambda: wait(queue, HIGH))
    assert (error.code, error.headers["retry-after"]) == ("queue_full", retry_after)


# ---- over HTTP ------------------------------------------------------------------------------------------------------


def waiting_server(number: int) -> FakeServer:
    return FakeServer(FakeEngine(manual=True), classes=CLASSES, max_queue_requests=number)


async def ask(server: FakeServer, service_class: str, **fields: Any) -> RawClient:
    """A request that has come to the engine, or was answered at once."""
    number = len(server.engine.requests)
    client = server.begin(COMPLETIONS, service_class=service_class, **fields)
    await until(lambda: client.task.done() or len(server.engine.requests) > number)
    return client


async def leave(*clients: RawClient) -> None:
    for each in clients:
        if not each.task.done():
            await each.leave()


def error_of(done: RawClient) -> tuple[int, str]:
    return done.sent[0]["status"], json.loads(done.body)["error"]["code"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_waits_is_ended_for_a_better_one(stream: bool) -> None:
    server = waiting_server(2)
    stays = await ask(server, "low", stream=stream)
    goes = await ask(server, "low", stream=stream, prompt=["a"])
    better = await ask(server, "high")
    await goes.task
    assert error_of(goes) == (503, "shed") and b"overloaded_error" in goes.body
    assert dict(goes.sent[0]["headers"])[b"retry-after"] == b"1"
    assert server.engine.aborted == [server.engine.requests[1].request_id]
    assert server.services.metrics.finished == {"stop": 0, "length": 0, "abort": 1, "error": 0}
    await leave(stays, better)
    assert (server.services.limits.num_requests, server.services.limits.num_tokens) == (0, 0)


async def test_all_prompts_of_a_request_are_dropped_together_and_none_once_it_has_begun() -> None:
    server = waiting_server(4)
    begun, many = await ask(server, "low"), await ask(server, "low", prompt=["a", "b"])
    await server.engine.asked(3)
    server.engine.streams[server.engine.requests[0].request_id].note_begun()
    better = [await ask(server, "high") for _ in range(2)]
    await many.task
    assert error_of(many) == (503, "shed") and len(server.engine.aborted) == 2
    better.append(await ask(server, "high"))
    assert error_of(await ask(server, "high")) == (429, "queue_full")
    await leave(begun, *better)
    assert server.services.limits.num_requests == 0


async def test_who_is_dropped_while_its_prompt_is_tokenised_never_reaches_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = threading.Event()
    server = waiting_server(1)
    monkeypatch.setattr(server.tokenizer, "encode", lambda *args, **options: [1] if go_on.wait(20) else [])
    slow = server.begin(COMPLETIONS, service_class="low", prompt="x" * 2000)
    await until(lambda: server.services.limits.num_requests)
    better = await ask(server, "high", prompt=[1, 2])
    assert not slow.sent
    go_on.set()
    await slow.task
    assert error_of(slow) == (503, "shed")
    assert len(server.engine.requests) == 1
    await leave(better)


@pytest.mark.parametrize(("refuse_late", "num_waiting"), [(True, 3), (True, 0), (False, 3)])
async def test_only_with_the_option_and_a_queue_in_the_engine_is_anybody_late(
    refuse_late: bool, num_waiting: int
) -> None:
    server = FakeServer(FakeEngine(manual=True), classes=CLASSES, refuse_late=refuse_late)
    clock = Clock()
    server.services.limits = limits(max_requests=100, now=clock)
    admitted(server.services.limits, HIGH).note_forecast(5.0)
    server.engine.stats = engine_stats(num_waiting=num_waiting)
    newcomer = await ask(server, "high")
    is_late = refuse_late and num_waiting > 0
    assert newcomer.task.done() == is_late
    assert not is_late or error_of(newcomer) == (429, "late")
    await leave(newcomer)


async def test_metrics_by_class() -> None:
    server = waiting_server(2)
    clients = [await ask(server, service_class) for service_class in ("low", "low", "low", "high")]
    async with server.client() as http:
        text = (await http.get("/metrics")).text
    found = {
        (sample.name.removeprefix("headway:"), *sorted(set(sample.labels.values()) - {"small"})): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "service_class" in sample.labels
    }
    assert found["class_admitted_total", "low"] == 2
    assert found["class_admitted_total", "high"] == 1
    assert found["class_refused_total", "low", "queue_full"] == 1
    assert found["class_refused_total", "high", "late"] == 0
    assert found["class_shed_total", "low"] == 1
    assert (found["class_queue_requests", "low"], found["class_queue_requests", "high"]) == (1, 1)
    await leave(*clients)
