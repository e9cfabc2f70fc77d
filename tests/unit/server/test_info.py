"""Models, tokens, version, metrics, and the API's description of itself."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headway import __version__
from headway.core.utilisation import UNKNOWN, UtilisationStats
from headway.server.api import openapi
from headway.server.api.record_fields import ApiRecord
from headway.server.api.responses_api import ResponsesRequest
from headway.server.limits import LIMITS
from headway.server.metrics.histograms import Histogram
from headway.server.metrics.recent import RecentQuantiles, RecentShare, RecentUtilisation
from headway.tokenizer import Tokenizer
from tests.unit.clock import Clock
from tests.unit.engine_stats import engine_stats
from tests.unit.server.fake_engine import CHAT, COMPLETIONS, FakeEngine, FakeServer, small_tokenizer

VLLM_NAMES = [
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries"),
    *("prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens", "request_success"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    *("request_inference_time_seconds", "request_prompt_tokens", "request_generation_tokens"),
    *("estimated_flops_per_gpu", "estimated_read_bytes_per_gpu"),
]
OWN_NAMES = [
    *("recomputed_tokens", "kv_blocks_live", "kv_blocks_cached", "kv_blocks_free", "kv_waste_perc"),
    *("kv_sharing_factor", "prefix_cache_saved_tokens", "prefix_cache_inserted_blocks"),
    *("prefix_cache_evicted_blocks", "prefix_cache_hit_rate"),
    *("event_loop_stalls", "event_loop_stalled_seconds", "front_end_restarts"),
    *("step_time_seconds", "scheduler_time_seconds", "recent_inter_token_latency_seconds", "queue_requests"),
]

LONG = "a " * 20_000


def test_models_and_version() -> None:
    server = FakeServer(served_model_name=("org/a", "b"))
    listed = server.call("GET", "/v1/models").json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["org/a", "b"]
    assert listed["data"][0]["max_model_len"] == 256
    assert server.call("GET", "/v1/models/org/a").json() == listed["data"][0]
    assert server.call("GET", "/version").json() == {"version": __version__}


def test_tokenize_and_back() -> None:
    server = FakeServer()
    text = "The quick brown fox, 日本 <|im_end|>"
    answer = server.post("/tokenize", {"prompt": text}).json()
    assert answer["tokens"] == server.tokenizer.encode(text)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 256)
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text}
    assert server.post("/tokenize", {"prompt": "word " * 600}).json()["count"] > 256, "longer than the context"
    assert server.post("/tokenize", {"prompt": ""}).json()["tokens"] == []
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": False}
    expected = server.tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n", add_special_tokens=False)
    assert server.post("/tokenize", body).json()["tokens"] == expected


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_tokens_have_to_wait_their_turn_too(path: str) -> None:
    server = FakeServer(max_queue_requests=1)
    with server.services.limits.reserve(body_bytes=0):
        assert server.send(path).status_code == 429
    assert server.send(path).status_code == 200
    assert server.services.limits.num_requests == 0


@pytest.mark.parametrize("waiting", [4, 4000], ids=["few wait", "the queue is full"])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/tokenize", {"prompt": LONG}),
        ("/detokenize", {"tokens": [1] * 20_000}),
        ("/tokenize", {"prompt": None, "messages": [{"role": "user", "content": LONG}]}),
        (COMPLETIONS, {"prompt": LONG}),
        (COMPLETIONS, {"prompt": ["a", LONG]}),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": LONG}]}),
    ],
)
def test_what_is_too_long_is_not_asked_to_come_again_when_fewer_wait(
    path: str, fields: dict[str, Any], waiting: int
) -> None:
    server = FakeServer(max_queue_tokens=1000)
    with server.services.limits.reserve(body_bytes=waiting):
        answer = server.send(path, **fields)
        assert waiting == 4 or server.send("/tokenize", prompt="a " * 20).status_code == 429
    if waiting == 4 or (path in ("/tokenize", "/detokenize") and "messages" not in fields):
        assert answer.status_code == 400 and "at most" in answer.text, answer.text
    assert server.services.limits.num_tokens == 0


def samples(server: FakeServer) -> dict[str, float]:
    response = server.call("GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            extra = {name: value for name, value in sample.labels.items() if name != "model_name"}
            found[sample.name + (str(sorted(extra.items())) if extra else "")] = sample.value
    return found


def test_metrics_have_the_names_that_dashboards_look_for() -> None:
    text = FakeServer().call("GET", "/metrics").text
    for name in (*VLLM_NAMES, *OWN_NAMES):
        assert re.search(rf"^# TYPE headway:{name}(_total)? ", text, re.MULTILINE), name


def test_every_help_text_of_a_metric_can_be_read_alone() -> None:
    """Explorers of metrics show one at a time."""
    texts = re.findall(r"^# HELP \S+ (.*)$", FakeServer().call("GET", "/metrics").text, re.MULTILINE)
    assert len(texts) > 50
    assert [
        text
        for text in texts
        if re.search(r"^(Of (these|them)|Its?|How long)\b|\b(there|that|been|these|none)\.$|\bthis process\b", text)
    ] == []


def test_metrics_tell_where_prompts_were_computed() -> None:
    server = FakeServer()
    assert "prefills_total" not in server.call("GET", "/metrics").text
    server.engine.prefill_outcomes = {"elsewhere": 3, "here": 2, "failed": 1, "aborted": 0}
    server.engine.replicas = [
        SimpleNamespace(place=place, stats=engine_stats(), num_restarts=0, role=role, problem=None)
        for place, role in enumerate(("decode", "prefill"))
    ]
    text = server.call("GET", "/metrics").text
    assert re.search(r'^headway:prefills_total{.*outcome="failed"} 1.0$', text, re.MULTILINE)
    assert re.search(r'^headway:replica_role{.*replica="1",role="prefill"} 1.0$', text, re.MULTILINE)


def test_metrics_count_requests_and_tokens() -> None:
    server = FakeServer()
    server.complete([1, 2, 3], n=2)
    server.complete("x" * 10, n=3, best_of=2)
    server.engine.stats = engine_stats(
        num_running=2, num_waiting=3, num_used_blocks=25, num_used_slots=300, num_free_blocks=75, generation_tokens=6
    )
    found = samples(server)
    expected = {
        "request_success_total[('finished_reason', 'stop')]": 2,
        "time_to_first_token_seconds_count": 2,
        "inter_token_latency_seconds_count": 4,
        "e2e_request_latency_seconds_count": 2,
        "request_queue_time_seconds_sum": pytest.approx(0.1),
        "kv_cache_usage_perc": 0.25,
        "kv_waste_perc": pytest.approx(0.25),
        "generation_tokens_total": 6,
        "queue_requests": 0,
        "http_responses_total[('method', 'POST'), ('route', '/v1/completions'), ('status', '400')]": 1,
    }
    assert {name: found[f"headway:{name}"] for name in expected} == expected


def test_metrics_of_the_prefix_cache_are_the_engines() -> None:
    server = FakeServer()
    assert math.isnan(samples(server)["headway:prefix_cache_hit_rate"])
    server.engine.stats = stats = engine_stats(
        num_used_blocks=20,
        num_cached_blocks=30,
        num_free_blocks=50,
        num_table_entries=50,
        num_queried_tokens=1000,
        num_hit_tokens=600,
        num_saved_tokens=500,
        num_inserted_blocks=70,
        num_evicted_blocks=5,
        num_host_blocks=8,
        num_moved_out_blocks=10,
        num_moved_in_blocks=3,
    )
    for listener in server.engine.listeners:
        listener(stats)
    found = samples(server)
    expected = {
        "kv_blocks_live": 20,
        "kv_blocks_cached": 30,
        "kv_blocks_free": 50,
        "kv_sharing_factor": 2.5,
        "prefix_cache_hit_rate": 0.6,
        "prefix_cache_queries_total": 1000,
        "prefix_cache_hits_total": 600,
        "prefix_cache_saved_tokens_total": 500,
        "prefix_cache_inserted_blocks_total": 70,
        "prefix_cache_evicted_blocks_total": 5,
        "kv_blocks_host": 8,
        "kv_blocks_moved_out_total": 10,
        "kv_blocks_moved_in_total": 3,
    }
    assert {name: found[f"headway:{name}"] for name in expected} == expected


def test_metrics_know_each_step_once() -> None:
    server = FakeServer()
    for stats in (engine_stats(num_steps=1, duration_s=0.01, kind="mixed"), engine_stats(num_steps=1, duration_s=0.01)):
        for listener in server.engine.listeners:
            listener(stats)
    found = samples(server)
    assert found["headway:step_time_seconds_count[('kind', 'mixed')]"] == 1
    assert found["headway:step_time_seconds_count[('kind', 'decode')]"] == 0
    assert found["headway:scheduler_time_seconds_count"] == 1


def test_shares_of_the_device_are_those_of_the_last_minute() -> None:
    clock = Clock()
    recent = RecentUtilisation(clock)
    assert recent.shares() == UNKNOWN
    recent.observe(UtilisationStats(device_busy_s=10.0, read_s=1.0, ceiling_s=1.0))
    clock.now_s += 59.0
    recent.observe(UtilisationStats(device_busy_s=20.0, read_s=9.0, ceiling_s=9.0))
    assert recent.shares().bandwidth == 9 / 20
    clock.now_s += 2.0
    assert recent.shares().bandwidth == 8 / 10, "the first second is over a minute ago"
    recent.observe(UtilisationStats(device_busy_s=1.0, read_s=0.25, ceiling_s=0.25))
    clock.now_s += 1.0
    recent.observe(UtilisationStats(device_busy_s=3.0, read_s=0.75, ceiling_s=0.75))
    assert recent.shares().bandwidth == 0.25, "an engine that has begun anew"


def test_metrics_show_shares_only_where_they_are_known() -> None:
    server = FakeServer()
    assert not [name for name in samples(server) if name.endswith(("bandwidth_perc", "nvml_utilization_perc"))]
    server.engine.stats = engine_stats(
        device_busy_s=4.0, read_bytes=3e9, flops=5e9, read_s=3.0, ceiling_s=3.0, num_step_tokens=3, num_padding_tokens=1
    )
    for listener in server.engine.listeners:
        listener(server.engine.stats)
    found = samples(server)
    expected = {
        "estimated_read_bytes_per_gpu_total": 3e9,
        "estimated_flops_per_gpu_total": 5e9,
        "device_busy_seconds_total": 4.0,
        "step_padding_tokens_total": 1,
        "device_bandwidth_perc": 0.75,
        "device_compute_perc": 0.0,
        "useful_tokens_perc": 0.75,
    }
    assert {name: found[f"headway:{name}"] for name in expected} == expected
    assert "headway:nvml_utilization_perc" not in found


def test_histogram_is_cumulative() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2), ("2.0", 3), ("+Inf", 4)]
    assert histogram.total == 12.0


def test_quantiles_forget_what_is_older_than_a_minute() -> None:
    clock = Clock()
    quantiles = RecentQuantiles(clock)
    quantiles.observe(1.0, 100)
    assert quantiles.quantiles((0.5,))[0] == pytest.approx(1.0, rel=0.1)
    clock.now_s += 55.0
    quantiles.observe(0.01, 98)
    assert quantiles.quantiles((0.25, 0.99)) == pytest.approx([0.01, 1.0], rel=0.1)
    clock.now_s += 10.0
    assert quantiles.quantiles((0.99,))[0] == pytest.approx(0.01, rel=0.1)
    clock.now_s += 435.0
    assert str(quantiles.quantiles((0.5,))[0]) == "nan"


def test_a_recent_share_is_that_of_the_last_minute() -> None:
    clock = Clock()
    recent = RecentShare(clock)
    assert recent.share() is None
    for after_s, looks, expected in (
        (0.0, [(0, 100)], 0.0),
        (30.0, [(100, 200), (100, 200)], 0.5),
        (31.0, [], 1.0),  # what was looked up at first is forgotten
        (139.0, [], None),
        (0.0, [(150, 400)], 0.25),
        (0.0, [(1, 10)], None),  # another engine, which counts from the beginning
    ):
        clock.now_s += after_s
        for look in looks:
            recent.observe(*look)
        assert recent.share() == expected, after_s


def test_openapi_describes_every_route_and_nothing_else() -> None:
    server = FakeServer(kv_events=True, enable_admin_routes=True)
    document = server.call("GET", "/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    for path, methods in document["paths"].items():
        for method in methods:
            response = server.call(method.upper(), path.replace("{name}", "small"))
            assert response.status_code not in (404, 405), path
            assert str(response.status_code) in methods[method]["responses"]
    references = set(re.findall(r'"#/components/schemas/(\w+)"', server.call("GET", "/openapi.json").text))
    assert references <= set(document["components"]["schemas"])


def records(kind: type[ApiRecord] = ApiRecord) -> Iterator[type[ApiRecord]]:
    for record in kind.__subclasses__():
        yield record
        yield from records(record)


def test_fields_without_effect_are_those_of_the_docs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "server.md").read_text(encoding="utf-8")
    section = page.partition("### Fields without effect\n")[2].partition("\n## ")[0]
    unused = {name for record in records() for name in record.UNUSED}
    assert unused == set(re.findall(r"`(\w+)`", section))
    for record in records():
        assert set(record.__struct_fields__) >= record.UNUSED, record
    schemas = openapi.document()["components"]["schemas"]
    for name in ResponsesRequest.UNUSED:
        assert "cannot change" in schemas["ResponsesRequest"]["properties"][name]["description"]
    fields = schemas["ChatCompletionRequest"]["properties"]
    assert "structured_outputs.json" in fields["guided_json"]["description"]
    assert "tools" in fields["functions"]["description"]


def test_docs_page_loads_nothing() -> None:
    page = FakeServer().call("GET", "/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert not re.search(r"https?://|<script|<link|src=", page.text)
    for operation in openapi.OPERATIONS:
        assert operation.path in page.text


async def test_load_counts_requests_that_are_being_answered() -> None:
    server = FakeServer(FakeEngine(manual=True))
    async with server.client() as client:
        asked = [server.begin(COMPLETIONS) for _ in range(2)]
        await server.engine.asked(2)
        assert (await client.get("/load")).json() == {"server_load": 2}
        for each in asked:
            await each.leave()
        assert (await client.post(COMPLETIONS, json={})).status_code == 400
        assert (await client.get("/load")).json() == {"server_load": 0}


def test_tokenizer_info() -> None:
    server = FakeServer()
    told = server.call("GET", "/tokenizer_info").json()
    assert (told["vocab_size"], told["chat_template"]) == (600, server.tokenizer.chat_template)
    assert told["eos_token_ids"] == list(server.tokenizer.eos_token_ids)
    assert told["special_tokens"]["eos_token"] in told["added_tokens"]
    server.tokenizer = small_tokenizer()
    server.tokenizer.backend.add_special_tokens([f"<|reserved_{number}|>" for number in range(5000)])
    many = FakeServer(tokenizer=Tokenizer(server.tokenizer.backend))
    assert len(many.call("GET", "/tokenizer_info").json()["added_tokens"]) == LIMITS.max_special_tokens
