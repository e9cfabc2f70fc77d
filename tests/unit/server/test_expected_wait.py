"""What clients are told about their wait: headers before it, times after it, and how good the forecasts were."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headway.front.streams import RequestStream, merged
from headway.wire.messages import Delta, RequestForecast
from tests.unit.server.fake_engine import (
    BEAMS,
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    MESSAGES,
    RESPONSES,
    FakeEngine,
    FakeServer,
    RawClient,
    until,
)

APIS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
EXPECTED_FIRST, EXPECTED_TOTAL = "x-headway-expected-ttft-ms", "x-headway-expected-total-ms"


def server_that_expects(first_s: float, total_s: float | None, *, manual: bool = False, **options: Any) -> FakeServer:
    engine = FakeEngine(manual=manual)
    engine.forecast = (first_s, total_s)
    return FakeServer(engine, **options)


def headers_of(client: RawClient) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in client.sent[0]["headers"]}


def metric(server: FakeServer, name: str) -> float:
    text = server.call("GET", "/metrics").text
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return next(sample.value for sample in samples if sample.name == f"headway:{name}")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", APIS)
def test_each_api_tells_what_was_expected_and_what_came(path: str, stream: bool) -> None:
    server = server_that_expects(2.0, 7.0)
    response = server.send(path, stream=stream)
    assert response.status_code == 200
    assert 2000 <= int(response.headers[EXPECTED_FIRST]) < 3000
    assert 7000 <= int(response.headers[EXPECTED_TOTAL]) < 8000
    actual = {"x-headway-ttft-ms", "x-headway-total-ms"}
    assert actual.isdisjoint(response.headers) if stream else actual <= set(response.headers)


def test_nothing_is_made_up() -> None:
    """Without a forecast there is no header, and without a known length no time of the end."""
    response = FakeServer().chat(stream=True)
    assert EXPECTED_FIRST not in response.headers and EXPECTED_TOTAL not in response.headers
    response = server_that_expects(1.0, None).chat(stream=True)
    assert EXPECTED_FIRST in response.headers and EXPECTED_TOTAL not in response.headers


@pytest.mark.parametrize(
    ("path", "fields"), [(EMBEDDINGS, {}), (COMPLETIONS, {"max_tokens": 0, "echo": True}), (COMPLETIONS, BEAMS)]
)
def test_prompts_alone_and_searches(path: str, fields: dict[str, Any]) -> None:
    """Where only the prompt is computed, its end is the end of all."""
    headers = server_that_expects(2.0, 7.0).send(path, **fields).headers
    assert 2000 <= int(headers[EXPECTED_FIRST]) < 3000
    assert int(headers[EXPECTED_TOTAL]) // 1000 == (7 if fields is BEAMS else 2)


def test_several_prompts_have_the_first_of_their_first_tokens() -> None:
    headers = server_that_expects(2.0, 7.0).complete(["a", "b", "c"], stream=True).headers
    assert 2000 <= int(headers[EXPECTED_FIRST]) < 3000 and 7000 <= int(headers[EXPECTED_TOTAL]) < 8000


@pytest.mark.parametrize(
    ("options", "first_s", "is_early"), [({}, 5.0, True), ({}, 0.001, False), ({"early_headers": False}, 5.0, False)]
)
@pytest.mark.parametrize("path", APIS)
async def test_a_stream_has_its_headers_before_it_waits(
    path: str, options: dict[str, Any], first_s: float, is_early: bool
) -> None:
    server = server_that_expects(first_s, None, manual=True, **options)
    client = server.begin(path, stream=True)
    request_id = await server.engine.asked()
    if is_early:
        await until(lambda: client.sent)
    for _ in range(5):
        await asyncio.sleep(0)
    assert bool(client.sent) == is_early and not client.body
    server.engine.push(Delta(request_id, text="a", token_ids=[1], finish_reason="stop", is_last=True))
    await client.task
    assert int(headers_of(client)[EXPECTED_FIRST]) >= 1000 * first_s
    assert [message["type"] for message in client.sent].count("http.response.start") == 1
    assert b"a" in client.body


@pytest.mark.parametrize("path", APIS)
async def test_an_error_after_early_headers_is_the_last_event(path: str) -> None:
    server = server_that_expects(5.0, None, manual=True, queue_ttl_s=0.05)
    client = server.begin(path, stream=True)
    await client.task
    assert client.sent[0]["status"] == 200
    assert b"without a token" in client.body
    late = server_that_expects(5.0, None, manual=True, queue_ttl_s=0.05, early_headers=False).begin(path, stream=True)
    await late.task
    assert late.sent[0]["status"] == 503


async def test_a_client_that_leaves_while_it_waits_is_no_error() -> None:
    server = server_that_expects(5.0, None, manual=True)
    client = server.begin(CHAT, stream=True)
    await until(lambda: client.sent)
    await client.leave()
    assert server.engine.aborted == [server.engine.requests[0].request_id]
    assert server.services.metrics.num_missing_forecasts == sum(server.services.metrics.forecast_error.counts) == 0


def test_the_error_of_forecasts_is_a_metric() -> None:
    server = server_that_expects(1.0, None)
    for _ in range(3):
        server.chat()
    assert metric(server, "forecast_error_ratio_count") == 3
    assert metric(server, "forecast_error_ratio_sum") == pytest.approx(3 * 1.0 / 0.2, rel=0.1)  # it answers at once
    assert metric(server, "forecasts_missing_total") == 0
    server.engine.forecast = None
    server.chat()
    assert metric(server, "forecasts_missing_total") == 1 and metric(server, "forecast_error_ratio_count") == 3


# ---- the object in the answer -------------------------------------------------------------------------------------


def metrics_in(path: str, body: str, *, stream: bool) -> list[dict[str, Any]]:
    if not stream:
        return [json.loads(body)["metrics"]]
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: {")]
    return [event["metrics"] for event in map(json.loads, lines) if "metrics" in event]


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
@pytest.mark.parametrize("path", APIS)
def test_times_in_the_answer(path: str, fields: dict[str, Any]) -> None:
    server = server_that_expects(2.0, 7.0, enable_per_request_metrics=True)
    (times,) = metrics_in(path, server.send(path, **fields).text, stream=bool(fields))
    assert times["queue_time_ms"] == 100.0 and times["prefill_time_ms"] == 200.0  # as the engine has told
    assert times["cached_tokens"] == 4
    assert 2000 <= times["expected_time_to_first_token_ms"] < 3000
    assert 7000 <= times["expected_total_time_ms"] < 8000
    assert 0 < times["time_to_first_token_ms"] < 2000 and times["generation_time_ms"] >= 0


@pytest.mark.parametrize("fields", [{"n": 3}, {"stream_options": {"include_usage": True}}, {"n": 2, "max_tokens": 1}])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_has_them_once_in_its_last_chunk(path: str, fields: dict[str, Any]) -> None:
    server = server_that_expects(2.0, None, enable_per_request_metrics=True)
    chunks = server.send(path, stream=True, **fields).text.split("\n\n")
    assert [index for index, chunk in enumerate(chunks) if '"metrics"' in chunk] == [len(chunks) - 3]  # [DONE], ""


@pytest.mark.parametrize("path", APIS)
def test_without_the_option_there_are_none(path: str) -> None:
    for stream in (True, False):
        assert '"metrics"' not in FakeServer().send(path, stream=stream).text


def test_one_token_has_no_pace() -> None:
    server = FakeServer(enable_per_request_metrics=True)
    times = server.complete(max_tokens=1).json()["metrics"]
    assert times["mean_itl_ms"] is None and times["tokens_per_second"] is None
    times = server.send(EMBEDDINGS).json()["metrics"]
    assert times["mean_itl_ms"] is None and times["expected_time_to_first_token_ms"] is None


# ---- streams ------------------------------------------------------------------------------------------------------


async def test_only_the_first_forecast_counts_and_it_wakes_the_reader_once() -> None:
    streams = [RequestStream(name, lambda _: None) for name in "ab"]
    read = merged(streams)
    streams[1].note_forecast(RequestForecast("b", 1.0))
    streams[1].note_forecast(RequestForecast("b", 9.0))
    assert await anext(read) == (1, [])
    streams[0].push(Delta("a", token_ids=[1], is_last=True))
    assert [len(deltas) for _, deltas in [await anext(read)]] == [1]
    streams[1].push(Delta("b", is_last=True))
    assert [number async for number, _ in read] == [1]
    assert streams[1].forecast == RequestForecast("b", 1.0)
    streams[0].note_forecast(RequestForecast("a", 1.0))
    assert streams[0].forecast is None  # it has ended
