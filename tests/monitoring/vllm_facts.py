"""What vLLM's published dashboards and the gateways read: names, kinds and labels, as of vLLM 0.30.

Written down from the expressions of `prometheus_grafana/grafana.json` and of `query_statistics`,
`performance_statistics`, `vllm_overview` and `vllm_service_status` in `dashboards/grafana`, all in vLLM's
`examples/observability`, from the first panels of `vllm_kv_cache` there, and from the metrics that the endpoint pickers
of llm-d and the Gateway API extract.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True)
class Family:
    """A family of metrics, and the labels by which it is selected or grouped beside `model_name`."""

    kind: Kind
    labels: frozenset[str] = frozenset()
    values: tuple[tuple[str, str], ...] = ()
    """Pairs of a label and a value that a panel selects."""
    has_model: bool = True


def _family(kind: Kind, *labels: str, values: tuple[tuple[str, str], ...] = (), has_model: bool = True) -> Family:
    return Family(kind, frozenset(labels) | {label for label, _ in values}, values, has_model)


ENGINE = "engine"
READ: dict[str, Family] = {
    # gateways
    "vllm:num_requests_waiting": _family("gauge", ENGINE),
    "vllm:num_requests_running": _family("gauge", ENGINE),
    "vllm:kv_cache_usage_perc": _family("gauge", ENGINE),
    "vllm:cache_config_info": _family("gauge", "block_size", "num_gpu_blocks", ENGINE, has_model=False),
    "vllm:lora_requests_info": _family(
        "gauge", "max_lora", "running_lora_adapters", "waiting_lora_adapters", has_model=False
    ),
    # dashboards: state
    "vllm:num_requests_waiting_by_reason": _family(
        "gauge", ENGINE, values=(("reason", "capacity"), ("reason", "deferred"))
    ),
    "vllm:engine_sleep_state": _family("gauge", ENGINE, values=(("sleep_state", "awake"),)),
    # dashboards: traffic
    "vllm:request_success": _family("counter", ENGINE, values=(("finished_reason", "error"),)),
    "vllm:prompt_tokens": _family("counter", ENGINE),
    "vllm:prompt_tokens_cached": _family("counter", ENGINE),
    "vllm:prompt_tokens_by_source": _family(
        "counter", ENGINE, values=(("source", "local_compute"), ("source", "local_cache_hit"))
    ),
    "vllm:generation_tokens": _family("counter", ENGINE),
    "vllm:iteration_tokens_total": _family("histogram", ENGINE),
    "vllm:num_preemptions": _family("counter", ENGINE),
    "vllm:prefix_cache_queries": _family("counter", ENGINE),
    "vllm:prefix_cache_hits": _family("counter", ENGINE),
    # dashboards: times
    "vllm:time_to_first_token_seconds": _family("histogram", ENGINE),
    "vllm:inter_token_latency_seconds": _family("histogram", ENGINE),
    "vllm:request_time_per_output_token_seconds": _family("histogram", ENGINE),
    "vllm:e2e_request_latency_seconds": _family("histogram", ENGINE),
    "vllm:request_queue_time_seconds": _family("histogram", ENGINE),
    "vllm:request_prefill_time_seconds": _family("histogram", ENGINE),
    "vllm:request_decode_time_seconds": _family("histogram", ENGINE),
    "vllm:request_inference_time_seconds": _family("histogram", ENGINE),
    # dashboards: requests
    "vllm:request_prompt_tokens": _family("histogram", ENGINE),
    "vllm:request_generation_tokens": _family("histogram", ENGINE),
    "vllm:request_max_num_generation_tokens": _family("histogram", ENGINE),
    "vllm:request_prefill_kv_computed_tokens": _family("histogram", ENGINE),
    "vllm:request_params_n": _family("histogram", ENGINE),
    "vllm:request_params_max_tokens": _family("histogram", ENGINE),
    "vllm:request_num_preemptions": _family("histogram", ENGINE),
    # dashboards: speculation and the device
    "vllm:spec_decode_num_drafts": _family("counter", ENGINE),
    "vllm:spec_decode_num_draft_tokens": _family("counter", ENGINE),
    "vllm:spec_decode_num_accepted_tokens": _family("counter", ENGINE),
    "vllm:spec_decode_num_accepted_tokens_per_pos": _family("counter", "position", ENGINE),
    "vllm:estimated_flops_per_gpu": _family("counter", ENGINE),
    "vllm:estimated_read_bytes_per_gpu": _family("counter", ENGINE),
    # the API server and its process
    "http_requests": _family("counter", "handler", "method", "status", has_model=False),
    "http_request_duration_seconds": _family("histogram", "handler", "method", has_model=False),
    "process_resident_memory_bytes": _family("gauge", has_model=False),
    "process_cpu_seconds": _family("counter", has_model=False),
    "process_start_time_seconds": _family("gauge", has_model=False),
}

BUCKETS: dict[str, tuple[str, ...]] = {
    "vllm:time_to_first_token_seconds": ("0.1", "0.25", "0.5", "0.75", "1.0", "2.5", "5.0", "10.0"),
    "vllm:request_time_per_output_token_seconds": ("0.025", "0.05", "0.075", "0.1", "0.15", "0.2", "0.3", "0.5"),
}
"""Buckets that a panel selects by `le`: the objectives that a reader of the overview may choose."""

NOT_HERE: dict[str, str] = {
    "vllm:mm_cache_queries": "text only",
    "vllm:mm_cache_hits": "text only",
    "vllm:external_prefix_cache_queries": "blocks from a disk or another engine are found as blocks of this cache",
    "vllm:external_prefix_cache_hits": "blocks from a disk or another engine are found as blocks of this cache",
    "vllm:estimated_write_bytes_per_gpu": "bytes written are not estimated",
    "vllm:kv_block_lifetime_seconds": "vLLM has it with --kv-cache-metrics alone",
    "vllm:kv_block_idle_before_evict_seconds": "vLLM has it with --kv-cache-metrics alone",
    "vllm:kv_block_reuse_gap_seconds": "vLLM has it with --kv-cache-metrics alone",
    "vllm:corrupted_requests": "vLLM has it with VLLM_COMPUTE_NANS_IN_LOGITS=1 alone",
    "vllm:gpu_cache_usage_perc": "vLLM has renamed it to kv_cache_usage_perc",
    "vllm:time_per_output_token_seconds": "vLLM has renamed it to inter_token_latency_seconds",
}
"""What vLLM shows, or showed, and this server does not, with the reason."""
