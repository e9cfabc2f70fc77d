"""/metrics under the names of Headway, of vLLM, or both."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from headway import __version__
from headway.errors import ConfigError
from headway.server.server_config import ServerConfig
from tests.monitoring.vllm_facts import BUCKETS, NOT_HERE, READ
from tests.unit.engine_stats import engine_stats
from tests.unit.server.fake_engine import COMPLETIONS, FakeServer

HAS_PROC = Path("/proc/self/stat").exists()
"""Without it, prometheus_client knows nothing of its process."""
BUSY = engine_stats(
    num_steps=1,
    num_tokens=7,
    num_running=2,
    num_waiting=5,
    num_fetching=2,
    num_used_blocks=25,
    num_free_blocks=75,
    prompt_tokens=100,
    num_saved_tokens=40,
    num_drafts=3,
    num_accepted_at=[2, 1],
)


def families(server: FakeServer) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(server.call("GET", "/metrics").text)}


def after_traffic(prefix: str) -> FakeServer:
    server = FakeServer(metrics_prefix=prefix)
    server.engine.stats = BUSY
    for listener in server.engine.listeners:
        listener(BUSY)
    server.complete("a longer prompt", n=2, max_tokens=8)
    return server


@pytest.fixture(scope="module")
def vllm() -> dict[str, Metric]:
    return families(after_traffic("vllm"))


def value(family: Metric, name: str = "", **labels: str) -> float:
    [found] = [
        sample.value
        for sample in family.samples
        if sample.name == (name or family.name) and labels.items() <= sample.labels.items()
    ]
    return found


@pytest.mark.parametrize("name", [name for name in READ if HAS_PROC or not name.startswith("process_")])
def test_what_vllms_dashboards_and_gateways_read_is_there(vllm: dict[str, Metric], name: str) -> None:
    expected, family = READ[name], vllm[name]
    assert family.type == expected.kind and family.samples
    for sample in family.samples:
        assert sample.labels.keys() >= expected.labels
        assert sample.labels.get("model_name") == ("small" if expected.has_model else None)
        assert sample.labels.get("engine", "0") == "0"
    for label, wanted in expected.values:
        assert wanted in {sample.labels[label] for sample in family.samples}


@pytest.mark.parametrize("name", BUCKETS)
def test_buckets_that_a_panel_selects_are_there(vllm: dict[str, Metric], name: str) -> None:
    assert {*BUCKETS[name]} <= {sample.labels.get("le") for sample in vllm[name].samples}


def test_nothing_is_shown_under_vllms_names_that_is_not_known(vllm: dict[str, Metric]) -> None:
    """A new name must be one of vLLM's, with vLLM's meaning; one of `NOT_HERE` has to leave that list first."""
    assert {name for name in vllm if name.startswith(("vllm:", "http_"))} == {
        name for name in READ if not name.startswith("process_")
    }
    assert not vllm.keys() & NOT_HERE.keys()
    assert not [name for name in vllm if name.startswith("headway:")]


def test_both_prefixes_are_the_two_pages_one_after_the_other() -> None:
    headway, vllm, both = (families(after_traffic(prefix)).keys() for prefix in ("headway", "vllm", "headway,vllm"))
    assert both == headway | vllm
    common = headway & vllm
    kinds = {"process", "python", "headway"} if HAS_PROC else {"python", "headway"}
    assert {name.partition("_")[0] for name in common} == kinds, "whatever the prefix"


def test_values_are_in_vllms_units(vllm: dict[str, Metric]) -> None:
    assert value(vllm["vllm:kv_cache_usage_perc"]) == 0.25
    waiting = vllm["vllm:num_requests_waiting_by_reason"]
    assert (value(waiting, reason="capacity"), value(waiting, reason="deferred")) == (3, 2)
    by_source = vllm["vllm:prompt_tokens_by_source"]
    total = "vllm:prompt_tokens_by_source_total"
    assert (value(by_source, total, source="local_compute"), value(by_source, total, source="local_cache_hit")) == (
        60,
        40,
    )
    assert value(vllm["vllm:prompt_tokens_cached"], "vllm:prompt_tokens_cached_total") == 40
    [config] = vllm["vllm:cache_config_info"].samples
    assert (config.labels["block_size"], config.labels["num_gpu_blocks"], config.value) == ("16", "100", 1)
    [lora] = vllm["vllm:lora_requests_info"].samples
    assert lora.labels == {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert lora.value == pytest.approx(time.time(), abs=60)
    assert value(vllm["vllm:engine_sleep_state"], sleep_state="awake") == 1


@pytest.mark.parametrize(
    ("name", "count", "total"),
    [
        ("request_prompt_tokens", 1, None),
        ("request_generation_tokens", 2, 6),
        ("request_max_num_generation_tokens", 1, 3),
        ("request_prefill_kv_computed_tokens", 1, None),
        ("request_params_n", 1, 2),
        ("request_params_max_tokens", 1, 8),
        ("request_num_preemptions", 1, 1),
        ("iteration_tokens_total", 1, 7),
    ],
)
def test_a_request_counts_once_whatever_its_completions(
    vllm: dict[str, Metric], name: str, count: int, total: float | None
) -> None:
    family = vllm[f"vllm:{name}"]
    assert value(family, f"{family.name}_count") == count
    assert total is None or value(family, f"{family.name}_sum") == total


def test_prompt_tokens_of_a_request_are_all_and_those_that_were_computed(vllm: dict[str, Metric]) -> None:
    """The fake engine finds four of them in its cache."""
    prompt, computed = (
        value(vllm[f"vllm:{name}"], f"vllm:{name}_sum")
        for name in ("request_prompt_tokens", "request_prefill_kv_computed_tokens")
    )
    assert computed == max(0, prompt - 4) and prompt > 0


def test_http_metrics_leave_probes_out_and_name_no_word_of_a_client() -> None:
    server = after_traffic("headway,vllm")
    server.call("GET", "/health")
    server.call("BREW", "/coffee")
    server.call("POST", COMPLETIONS, content=b"{")
    found = families(server)
    handlers = {sample.labels["handler"] for sample in found["http_requests"].samples}
    assert handlers == {COMPLETIONS, "other"}
    total = "http_requests_total"
    assert value(found["http_requests"], total, handler="other", method="other", status="4xx") == 1
    assert value(found["http_requests"], total, handler=COMPLETIONS, status="2xx") == 1
    assert value(found["http_requests"], total, handler=COMPLETIONS, status="4xx") == 1
    ours = found["headway:http_responses"]
    assert value(ours, "headway:http_responses_total", route="/health", method="GET", status="200") == 1
    durations = found["http_request_duration_seconds"]
    assert value(durations, f"{durations.name}_count", handler=COMPLETIONS, method="POST") == 2


def test_the_page_says_which_version_it_is() -> None:
    [info] = families(FakeServer(metrics_prefix="vllm"))["headway_build_info"].samples
    assert (info.labels, info.value) == ({"version": __version__}, 1)


def test_the_cache_is_that_of_all_replicas_that_serve() -> None:
    server = FakeServer(metrics_prefix="vllm")
    server.engine.replicas = [_replica(place, problem) for place, problem in enumerate((None, "it starts", None))]
    [config] = families(server)["vllm:cache_config_info"].samples
    assert config.labels["num_gpu_blocks"] == "200"
    server.engine.info = None
    assert "vllm:cache_config_info" not in families(server), "no engine has been ready yet"


def _replica(place: int, problem: str | None) -> Any:
    return SimpleNamespace(place=place, stats=engine_stats(), num_restarts=0, role=None, problem=problem)


@pytest.mark.parametrize("prefix", ["", "vllm,headway,vllm", "prometheus"])
def test_a_prefix_that_is_none_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match="metrics_prefix"):
        ServerConfig(metrics_prefix=prefix)
