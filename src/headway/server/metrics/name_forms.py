"""The names under which `/metrics` shows its families: Headway's own, and those that vLLM's dashboards read.

`headway` is every family with the prefix `headway:`. `vllm` is what vLLM 0.30 has, with vLLM's names, labels and units:
most families have the same name, a few are derived from ours. A family that vLLM has and Headway has no number for is
left out rather than shown as zero; docs/monitoring.md lists them.

vLLM's label `engine` numbers the engine cores behind one port, and gateways read the first that they find. So the
numbers here are those of all replicas together, and `engine` is always 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

Form = Callable[[list[Metric]], Iterable[Metric]]

ENGINE = {"engine": "0"}
SAME_NAMES = frozenset(
    {
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions"),
        *("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "request_success"),
        *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
        *("spec_decode_num_accepted_tokens_per_pos", "estimated_flops_per_gpu", "estimated_read_bytes_per_gpu"),
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
        *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"),
        *("request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens"),
        *("request_generation_tokens", "request_max_num_generation_tokens", "request_prefill_kv_computed_tokens"),
        *("request_params_n", "request_params_max_tokens", "request_num_preemptions", "iteration_tokens_total"),
    }
)
"""Families that vLLM has under the same name with the same meaning."""
OTHER_NAMES = {"prefix_cache_saved_tokens": "prompt_tokens_cached"}
"""Families that vLLM has with the same meaning under another name."""
PROBES = frozenset({"/health", "/ready", "/ping", "/load", "/metrics", "/version", "/server_info"})
"""Routes that vLLM leaves out of its HTTP metrics."""


def headway_names(families: list[Metric]) -> Iterator[Metric]:
    """Return every family with Headway's prefix."""
    for family in families:
        yield _renamed(family, f"headway:{family.name}")


def vllm_names(families: list[Metric]) -> Iterator[Metric]:
    """Return what vLLM has, as vLLM shows it."""
    by_name = {family.name: family for family in families}
    for family in families:
        if family.name in SAME_NAMES or family.name in OTHER_NAMES:
            yield _renamed(family, f"vllm:{OTHER_NAMES.get(family.name, family.name)}", more=ENGINE)
    yield _prompt_tokens_by_source(by_name)
    yield _waiting_by_reason(by_name)
    if "cache_config_info" in by_name:
        yield _renamed(by_name["cache_config_info"], "vllm:cache_config_info", more=ENGINE, without=("model_name",))
    yield _sleep_state(by_name)
    yield _lora_requests()
    yield from _http(by_name)


FORMS: Mapping[str, Form] = {"headway": headway_names, "vllm": vllm_names}


def _renamed(family: Metric, name: str, *, more: Mapping[str, str] = {}, without: Iterable[str] = ()) -> Metric:
    """Return the family with another name, and with more or fewer labels."""
    renamed = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        labels = {key: value for key, value in sample.labels.items() if key not in without} | dict(more)
        renamed.add_sample(name + sample.name.removeprefix(family.name), labels, sample.value)
    return renamed


def _value(families: Mapping[str, Metric], name: str) -> float:
    return families[name].samples[0].value


def _model(families: Mapping[str, Metric]) -> str:
    return families["num_requests_running"].samples[0].labels["model_name"]


def _prompt_tokens_by_source(families: Mapping[str, Metric]) -> Metric:
    """Return where prompt tokens came from. Blocks that came from a disk or another engine count as found here: the
    requests that use them do not know it."""
    saved = _value(families, "prefix_cache_saved_tokens")
    computed = _value(families, "prompt_tokens") - saved
    family = CounterMetricFamily(
        "vllm:prompt_tokens_by_source",
        "Prompt tokens, by whether they were computed or found in a cache.",
        labels=("model_name", "source", *ENGINE),
    )
    for source, number in (("local_compute", computed), ("local_cache_hit", saved)):
        family.add_metric((_model(families), source, *ENGINE.values()), number)
    return family


def _waiting_by_reason(families: Mapping[str, Metric]) -> Metric:
    fetching = _value(families, "requests_fetching")
    family = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason",
        "Waiting requests, by what they wait for: room in the batch, or KV blocks that are fetched.",
        labels=("model_name", "reason", *ENGINE),
    )
    waiting = _value(families, "num_requests_waiting")
    for reason, number in (("capacity", max(0.0, waiting - fetching)), ("deferred", fetching)):
        family.add_metric((_model(families), reason, *ENGINE.values()), number)
    return family


def _sleep_state(families: Mapping[str, Metric]) -> Metric:
    """Return that the engine is awake: it cannot be sent to sleep, and vLLM's status board asks."""
    family = GaugeMetricFamily(
        "vllm:engine_sleep_state",
        "1 for the state that the engine is in. This engine is always awake.",
        labels=("model_name", "sleep_state", *ENGINE),
    )
    for state in ("awake", "weights_offloaded", "discard_all"):
        family.add_metric((_model(families), state, *ENGINE.values()), float(state == "awake"))
    return family


def _lora_requests() -> Metric:
    """Return that there is no room for adapters, which gateways want to know before they choose a server. The value is
    the present time, as in vLLM."""
    family = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Adapters in use, and how many fit. This engine has none; the value is the present time.",
        labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    )
    family.add_metric(("0", "", ""), time.time())
    return family


def _http(families: Mapping[str, Metric]) -> Iterator[Metric]:
    """Yield the metrics of HTTP answers, whose names have no prefix in vLLM either."""
    requests = CounterMetricFamily(
        "http_requests", "HTTP answers, without those to probes.", labels=("handler", "method", "status")
    )
    totals: dict[tuple[str, str, str], float] = {}
    for sample in families["http_responses"].samples:
        route, method, status = (sample.labels[label] for label in ("route", "method", "status"))
        if route not in PROBES and status != "0":
            key = route, method, f"{status[0]}xx"
            totals[key] = totals.get(key, 0.0) + sample.value
    for values, total in totals.items():
        requests.add_metric(values, total)
    yield requests
    times = families["http_response_time_seconds"]
    durations = Metric("http_request_duration_seconds", times.documentation, times.type)
    for sample in times.samples:
        if sample.labels["route"] not in PROBES:
            labels = dict(sample.labels)
            labels["handler"] = labels.pop("route")
            durations.add_sample(durations.name + sample.name.removeprefix(times.name), labels, sample.value)
    yield durations
