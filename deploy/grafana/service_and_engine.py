"""What Headway's dashboards show: rows of panels, each with the expressions that it reads.

`headway-service` is for whoever answers for the service: what clients feel. `headway-engine` says why.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Steps = tuple[tuple[float | None, str], ...]
"""A colour from each value on; the first has no value."""

NEUTRAL: Steps = ((None, "blue"),)
GOOD_IF_HIGH: Steps = ((None, "red"), (0.95, "orange"), (0.99, "green"))
GOOD_IF_RARE: Steps = ((None, "green"), (0.001, "orange"), (0.05, "red"))
GOOD_IF_ZERO: Steps = ((None, "green"), (1, "red"))
FULL: Steps = ((None, "green"), (0.8, "orange"), (0.95, "red"))


@dataclass(frozen=True, kw_only=True)
class Stat:
    """One number."""

    title: str
    description: str
    expression: str
    unit: str
    thresholds: Steps = NEUTRAL
    legend: str = ""
    shows_name: bool = False
    width: int = 3


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Lines over time, by the names in their legend."""

    title: str
    description: str
    targets: dict[str, str]
    unit: str
    stacked: bool = False
    maximum: float | None = None
    limit: float | None = None
    """A dashed line, where trouble begins."""
    width: int = 8


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Stat | Chart, ...]


@dataclass(frozen=True, kw_only=True)
class Board:
    """A dashboard."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...] = field(default=())


SELECTED = 'instance=~"$instance", model_name=~"$model"'
SERVER = 'instance=~"$instance"'
REAL_ROUTES = f'{SERVER}, route!~"/health|/ready|/ping|/metrics|/live|/load"'


def total(name: str) -> str:
    """The sum of a gauge."""
    return f"sum(headway:{name}{{{SELECTED}}})"


def rate(name: str, more: str = "") -> str:
    """The sum of a counter's growth per second."""
    return f"sum(rate(headway:{name}_total{{{SELECTED}{more}}}[$__rate_interval]))"


def quantile(share: float, name: str, by: str = "le") -> str:
    """A quantile of a histogram."""
    buckets = f"rate(headway:{name}_bucket{{{SELECTED}}}[$__rate_interval])"
    return f"histogram_quantile({share}, sum by ({by}) ({buckets}))"


def mean(name: str) -> str:
    """The mean of a histogram."""
    parts = (f"sum(rate(headway:{name}_{part}{{{SELECTED}}}[$__rate_interval]))" for part in ("sum", "count"))
    return " / ".join(parts)


def within(name: str, bound: str) -> str:
    """The share of a histogram's values up to one of its bounds."""
    buckets = f'sum(rate(headway:{name}_bucket{{{SELECTED}, le="{bound}"}}[$__rate_interval]))'
    return f"{buckets} / sum(rate(headway:{name}_count{{{SELECTED}}}[$__rate_interval]))"


def quantiles(name: str, *shares: float) -> dict[str, str]:
    """Quantiles of a histogram, by their names."""
    return {f"P{100 * share:g}": quantile(share, name) for share in shares}


def by_replica(name: str, *, per_second: bool = False) -> str:
    """A number of each replica."""
    series = f"headway:replica_{name}{{{SELECTED}}}"
    inner = f"rate({series}[$__rate_interval])" if per_second else series
    return f"sum by (instance, replica) ({inner})"


ERRORS = (
    f'(sum(rate(headway:http_responses_total{{{REAL_ROUTES}, status=~"5.."}}[$__rate_interval])) or vector(0))'
    f" / sum(rate(headway:http_responses_total{{{REAL_ROUTES}}}[$__rate_interval]))"
)

KV_IN_USE = Stat(
    title="KV cache in use",
    description="Share of KV blocks that requests hold, of the fullest server.",
    expression=f"max(headway:kv_cache_usage_perc{{{SELECTED}}})",
    unit="percentunit",
    thresholds=FULL,
)
NOW = Row(
    "Now",
    (
        Stat(
            title="Requests",
            description="Completions that end per second, for whatever reason.",
            expression=rate("request_success"),
            unit="reqps",
        ),
        Stat(
            title="First tokens within 1 s",
            description="Share of first tokens within a second of their request. The alerts' objective is 99%.",
            expression=within("time_to_first_token_seconds", "1.0"),
            unit="percentunit",
            thresholds=GOOD_IF_HIGH,
        ),
        Stat(
            title="Tokens within 100 ms",
            description="Share of tokens that come within 100 ms of the one before. The alerts' objective is 99%.",
            expression=within("inter_token_latency_seconds", "0.1"),
            unit="percentunit",
            thresholds=GOOD_IF_HIGH,
        ),
        Stat(
            title="Output tokens",
            description="Tokens generated per second, by all replicas together.",
            expression=rate("generation_tokens"),
            unit="short",
        ),
        Stat(
            title="Errors",
            description="Share of HTTP answers with a status of 500 or more, probes left out.",
            expression=ERRORS,
            unit="percentunit",
            thresholds=GOOD_IF_RARE,
        ),
        Stat(
            title="Waiting",
            description="Requests in the engine's queue. More than run, for long: the service is too small.",
            expression=total("num_requests_waiting"),
            unit="short",
        ),
        KV_IN_USE,
        Stat(
            title="Replicas away",
            description="Replicas that do not serve now.",
            expression=f"count(headway:replica_up{{{SELECTED}}}) - sum(headway:replica_up{{{SELECTED}}})",
            unit="short",
            thresholds=GOOD_IF_ZERO,
        ),
    ),
)
WAITS = Row(
    "Waits",
    (
        Chart(
            title="Time to first token",
            description="From the request's arrival. The dashed line is the alerts' objective for 99%.",
            targets=quantiles("time_to_first_token_seconds", 0.5, 0.95, 0.99),
            unit="s",
            limit=1.0,
        ),
        Chart(
            title="Time between tokens",
            description="Between two tokens of a completion. The dashed line is the alerts' objective for 99%.",
            targets=quantiles("inter_token_latency_seconds", 0.5, 0.95, 0.99),
            unit="s",
            limit=0.1,
        ),
        Chart(
            title="Time of a whole request",
            description="From arrival to the last token.",
            targets=quantiles("e2e_request_latency_seconds", 0.5, 0.95, 0.99),
            unit="s",
        ),
        Chart(
            title="Where a request's time goes",
            description="Mean seconds of a request: waiting in the engine, computing the prompt, generating.",
            targets={
                "waiting": mean("request_queue_time_seconds"),
                "prefill": mean("request_prefill_time_seconds"),
                "decode": mean("request_decode_time_seconds"),
            },
            unit="s",
            stacked=True,
        ),
        Chart(
            title="Time per output token",
            description="Mean time of a completion's tokens after the first.",
            targets=quantiles("request_time_per_output_token_seconds", 0.5, 0.95, 0.99),
            unit="s",
        ),
        Chart(
            title="Error of expected waits",
            description="By how much the forecast of a first token was wrong, as a share of its time.",
            targets=quantiles("forecast_error_ratio", 0.5, 0.9),
            unit="percentunit",
        ),
    ),
)
TRAFFIC = Row(
    "Traffic",
    (
        Chart(
            title="Tokens",
            description="Prompt tokens taken in and tokens generated, per second.",
            targets={"prompt": rate("prompt_tokens"), "output": rate("generation_tokens")},
            unit="short",
        ),
        Chart(
            title="How completions end",
            description="Per second. stop: the model or a stop string ended it; length: max_tokens or the context; "
            "abort: the client left; error: the engine failed.",
            targets={
                "{{finished_reason}}": f"sum by (finished_reason) (rate(headway:request_success_total{{{SELECTED}}}"
                "[$__rate_interval]))"
            },
            unit="reqps",
            stacked=True,
        ),
        Chart(
            title="HTTP answers by status",
            description="Per second, probes left out. 429: refused because the queue is full; 499: the client left.",
            targets={
                "{{status}}": f"sum by (status) (rate(headway:http_responses_total{{{REAL_ROUTES}}}[$__rate_interval]))"
            },
            unit="reqps",
            stacked=True,
        ),
        Chart(
            title="Prompt length",
            description="Prompt tokens of a request, and how many of them were computed rather than found in a cache.",
            targets={
                "P50": quantile(0.5, "request_prompt_tokens"),
                "P95": quantile(0.95, "request_prompt_tokens"),
                "P50 computed": quantile(0.5, "request_prefill_kv_computed_tokens"),
            },
            unit="short",
        ),
        Chart(
            title="Completion length",
            description="Tokens generated for a completion, and the most that requests allowed.",
            targets={
                "P50": quantile(0.5, "request_generation_tokens"),
                "P95": quantile(0.95, "request_generation_tokens"),
                "P50 allowed": quantile(0.5, "request_params_max_tokens"),
            },
            unit="short",
        ),
        Chart(
            title="Slowest routes",
            description="Mean time of HTTP answers by route, streams to their end.",
            targets={
                "{{route}}": f"topk(5, sum by (route) (rate(headway:http_response_time_seconds_sum{{{REAL_ROUTES}}}"
                f"[$__rate_interval])) / sum by (route) (rate(headway:http_response_time_seconds_count{{{REAL_ROUTES}}}"
                "[$__rate_interval])))"
            },
            unit="s",
        ),
    ),
)
QUEUE = Row(
    "Queue",
    (
        Chart(
            title="Waiting and running",
            description="Sequences in the engine's queue and in the batch.",
            targets={"waiting": total("num_requests_waiting"), "running": total("num_requests_running")},
            unit="short",
        ),
        Chart(
            title="Before the first token",
            description="Requests that wait for their first token or the tokenizer, by service class: what "
            "--max-queue-requests limits.",
            targets={
                "{{service_class}}": f"sum by (service_class) (headway:class_queue_requests{{{SELECTED}}})",
            },
            unit="short",
            stacked=True,
        ),
        Chart(
            title="Admitted and refused",
            description="Requests per second that the queue takes in, drops for others, and refuses with 429.",
            targets={
                "admitted": rate("class_admitted"),
                "dropped for others": rate("class_shed"),
                "refused": f"sum(rate(headway:class_refused_total{{{SELECTED}}}[$__rate_interval])) or vector(0)",
            },
            unit="reqps",
        ),
    ),
)
PROCESS = Row(
    "Front end",
    (
        Chart(
            title="Memory",
            description="Resident memory of the front end's process. Engines have processes of their own.",
            targets={"{{instance}}": f"process_resident_memory_bytes{{{SERVER}}}"},
            unit="bytes",
        ),
        Chart(
            title="Processor",
            description="Cores that the front end's process uses. Near 1, its event loop bounds the service.",
            targets={"{{instance}}": f"rate(process_cpu_seconds_total{{{SERVER}}}[$__rate_interval])"},
            unit="short",
        ),
        Chart(
            title="Restarts and stalls",
            description="In the last hour: engines started again, front ends started again, moments of a second or "
            "more in which the event loop stood still.",
            targets={
                "engines": f"sum(increase(headway:engine_restarts_total{{{SELECTED}}}[1h]))",
                "front ends": f"sum(increase(headway:front_end_restarts_total{{{SELECTED}}}[1h]))",
                "stalls": f"sum(increase(headway:event_loop_stalls_total{{{SELECTED}}}[1h]))",
            },
            unit="short",
        ),
    ),
)
SERVICE = Board(
    uid="headway-service",
    title="Headway / Service",
    description="What clients of Headway feel: waits, pace, errors, and the queue.",
    rows=(NOW, WAITS, TRAFFIC, QUEUE, PROCESS),
)

STATE = Row(
    "Now",
    (
        Stat(
            title="Running",
            description="Sequences in the batch.",
            expression=total("num_requests_running"),
            unit="short",
        ),
        Stat(
            title="Steps",
            description="Steps of all engines per second.",
            expression=rate("engine_steps"),
            unit="short",
        ),
        KV_IN_USE,
        Stat(
            title="Prefix cache",
            description="Share of the tokens looked up that were found.",
            expression=f"{rate('prefix_cache_hits')} / {rate('prefix_cache_queries')}",
            unit="percentunit",
        ),
        Stat(
            title="Preemptions",
            description="Requests per second that lose their blocks to others.",
            expression=rate("num_preemptions"),
            unit="short",
            thresholds=((None, "green"), (0.01, "orange"), (1, "red")),
        ),
        Stat(
            title="Device busy",
            description="Share of time in which steps run, mean of the replicas.",
            expression=f"avg(rate(headway:replica_device_busy_seconds_total{{{SELECTED}}}[$__rate_interval]))",
            unit="percentunit",
        ),
        Stat(
            title="Restarts",
            description="Engines started again in the last hour.",
            expression=f"sum(increase(headway:engine_restarts_total{{{SELECTED}}}[1h]))",
            unit="short",
            thresholds=GOOD_IF_ZERO,
        ),
        Stat(
            title="Version",
            description="Headway's version on the selected servers.",
            expression=f"count by (version) (headway_build_info{{{SERVER}}})",
            unit="short",
            legend="{{version}}",
            shows_name=True,
        ),
    ),
)
BATCH = Row(
    "Batch",
    (
        Chart(
            title="Tokens per step",
            description="Prompt and output tokens that a step computes. --max-num-batched-tokens is the most.",
            targets=quantiles("iteration_tokens_total", 0.5, 0.95, 0.99) | {"mean": mean("iteration_tokens_total")},
            unit="short",
        ),
        Chart(
            title="Step time",
            description="P95 of a step. decode: a token for each request; prefill: chunks of prompts; mixed: both.",
            targets={"{{kind}}": quantile(0.95, "step_time_seconds", by="le, kind")},
            unit="s",
        ),
        Chart(
            title="Planning and host",
            description="P99 of the planning of a step; and the share of time in which the device waits for the host.",
            targets={
                "planning, P99 (s)": quantile(0.99, "scheduler_time_seconds"),
                "device waits for the host (share)": rate("device_host_wait_seconds"),
            },
            unit="short",
        ),
        Chart(
            title="Running, by replica",
            description="Sequences in the batch of each replica.",
            targets={"{{instance}} {{replica}}": by_replica("requests_running")},
            unit="short",
        ),
        Chart(
            title="Waiting, by replica",
            description="Sequences in the queue of each replica.",
            targets={"{{instance}} {{replica}}": by_replica("requests_waiting")},
            unit="short",
        ),
        Chart(
            title="Preemptions and work done twice",
            description="Per second: requests that lose their blocks, and tokens computed again because of it.",
            targets={"preemptions": rate("num_preemptions"), "recomputed tokens": rate("recomputed_tokens")},
            unit="short",
        ),
    ),
)
KV = Row(
    "KV cache",
    (
        Chart(
            title="KV blocks",
            description="Held by requests; held by none and kept for their content; without content.",
            targets={
                "live": total("kv_blocks_live"),
                "cached": total("kv_blocks_cached"),
                "free": total("kv_blocks_free"),
            },
            unit="short",
            stacked=True,
        ),
        Chart(
            title="Prompt tokens by source",
            description="Per second: computed, or found in the prefix cache.",
            targets={
                "computed": f"{rate('prompt_tokens')} - {rate('prefix_cache_saved_tokens')}",
                "found": rate("prefix_cache_saved_tokens"),
            },
            unit="short",
            stacked=True,
        ),
        Chart(
            title="Prefix cache: in and out",
            description="Blocks per second that enter the prefix cache, and that it gives up for room. As many out as "
            "in, with a low share found: what would be used again does not stay.",
            targets={"inserted": rate("prefix_cache_inserted_blocks"), "evicted": rate("prefix_cache_evicted_blocks")},
            unit="short",
        ),
        Chart(
            title="Waste and sharing",
            description="Share of slots in live blocks without a token; requests that hold a live block, on average.",
            targets={
                "waste (share)": f"max(headway:kv_waste_perc{{{SELECTED}}})",
                "requests per block": f"avg(headway:kv_sharing_factor{{{SELECTED}}})",
            },
            unit="short",
        ),
        Chart(
            title="Blocks in host memory and on disk",
            description="With --host-cache-memory and --disk-cache.",
            targets={"host": total("kv_blocks_host"), "disk": total("kv_blocks_disk")},
            unit="short",
        ),
        Chart(
            title="Blocks moved",
            description="Per second: to and from host memory, fetched from a disk or another replica, written to disk, "
            "and failed writes.",
            targets={
                "to host": rate("kv_blocks_moved_out"),
                "from host": rate("kv_blocks_moved_in"),
                "fetched": rate("kv_blocks_fetched"),
                "stored": rate("kv_blocks_stored"),
                "not stored": rate("kv_blocks_not_stored"),
            },
            unit="short",
        ),
    ),
)
DEVICE = Row(
    "Device",
    (
        Chart(
            title="Busy, by replica",
            description="Share of time in which steps run.",
            targets={"{{instance}} {{replica}}": by_replica("device_busy_seconds_total", per_second=True)},
            unit="percentunit",
            maximum=1,
        ),
        Chart(
            title="How well steps use it",
            description="Of the time of steps: what reading their bytes takes at the measured bandwidth, what their "
            "operations take at the measured rate, and the longer of both.",
            targets={
                "bandwidth": f"{rate('estimated_read_seconds')} / {rate('device_busy_seconds')}",
                "compute": f"{rate('estimated_compute_seconds')} / {rate('device_busy_seconds')}",
                "ceiling": f"{rate('estimated_ceiling_seconds')} / {rate('device_busy_seconds')}",
            },
            unit="percentunit",
        ),
        Chart(
            title="What steps are spent on",
            description="Seconds of steps per second: prompts, recomputed ones too, and output tokens.",
            targets={"prompts": rate("prompt_compute_seconds"), "output": rate("generation_compute_seconds")},
            unit="short",
            stacked=True,
        ),
        Chart(
            title="Operations and bytes",
            description="Estimated floating-point operations and bytes read, per second.",
            targets={"operations": rate("estimated_flops_per_gpu"), "bytes": rate("estimated_read_bytes_per_gpu")},
            unit="short",
        ),
        Chart(
            title="Tokens and padding",
            description="Tokens of requests that steps compute, and tokens that only fill a batch up, per second.",
            targets={"tokens": rate("step_tokens"), "padding": rate("step_padding_tokens")},
            unit="short",
            stacked=True,
        ),
        Chart(
            title="Output tokens, by replica",
            description="Tokens generated per second by each replica.",
            targets={"{{instance}} {{replica}}": by_replica("generation_tokens_total", per_second=True)},
            unit="short",
        ),
    ),
)
GUESSES = Row(
    "Speculation and forecasts",
    (
        Chart(
            title="Guessed tokens",
            description="With --speculation, per second: verified, and right.",
            targets={
                "verified": rate("spec_decode_num_draft_tokens"),
                "right": rate("spec_decode_num_accepted_tokens"),
            },
            unit="short",
        ),
        Chart(
            title="Right guesses by place",
            description="With --speculation, per second: the first guess of a draft, the second, and so on.",
            targets={
                "{{position}}": "sum by (position) (rate(headway:spec_decode_num_accepted_tokens_per_pos_total"
                f"{{{SELECTED}}}[$__rate_interval]))"
            },
            unit="short",
        ),
        Chart(
            title="Predictions that are missing",
            description="Per second: first tokens without a forecast, prompts without a predicted length.",
            targets={
                "forecasts": rate("forecasts_missing"),
                "lengths": rate("length_predictions_missing"),
            },
            unit="short",
        ),
    ),
)
ENGINE = Board(
    uid="headway-engine",
    title="Headway / Engine",
    description="Why Headway is as fast as it is: batch, KV cache, device, speculation.",
    rows=(STATE, BATCH, KV, DEVICE, GUESSES),
)
BOARDS = (SERVICE, ENGINE)
