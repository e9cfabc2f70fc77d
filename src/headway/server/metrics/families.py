"""All metrics of server and engine at one moment, as families without a prefix: `name_forms` gives them names.

The numbers of an engine are declared with their owners (`headway.counters`); the others are those of `ServerMetrics`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric

from headway.counters import Counter, Gauge, Number
from headway.server.admission.queue_limits import QueueLimits
from headway.server.metrics.histograms import Histogram
from headway.server.metrics.server_metrics import ServerMetrics
from headway.wire.engine_stats import EngineStats
from headway.wire.messages import EngineReady


class ReplicaNumbers(Protocol):
    """The part of a replica that each scrape reads."""

    place: int
    stats: EngineStats
    num_restarts: int

    @property
    def role(self) -> str | None: ...
    @property
    def problem(self) -> str | None: ...


class EngineNumbers(Protocol):
    """The part of the engine client that each scrape reads."""

    @property
    def info(self) -> EngineReady | None: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def num_restarts(self) -> int: ...
    @property
    def num_resumed(self) -> int: ...
    @property
    def replicas(self) -> Sequence[ReplicaNumbers]: ...
    @property
    def prefill_outcomes(self) -> Mapping[str, int]: ...


class Snapshot:
    """All metrics at one moment, by names without a prefix."""

    def __init__(self, metrics: ServerMetrics, engine: EngineNumbers, queue: QueueLimits) -> None:
        self._metrics = metrics
        self._engine = engine
        self._queue = queue

    def families(self) -> Iterator[Metric]:
        """Yield each metric with all its samples."""
        yield from self._engine_metrics(self._engine.stats)
        yield from self._replica_metrics()
        yield from self._latencies()
        yield from self._server_metrics()

    def _engine_metrics(self, stats: EngineStats) -> Iterator[Metric]:
        for declared, value in stats.metrics():
            yield self._declared(declared, value)
        blocks, info = stats.blocks, self._engine.info
        num_used, block_size = blocks.num_used_blocks, info.block_size if info else 0
        num_blocks = num_used + blocks.num_cached_blocks + blocks.num_free_blocks  # of all replicas
        waste = 1.0 - _share(blocks.num_used_slots, num_used * block_size) if num_used and block_size else 0.0
        sharing = blocks.num_table_entries / num_used if num_used else 1.0
        hit_rate = self._metrics.recent_hits.share()
        for name, help_text, value in (
            ("kv_cache_usage_perc", "Share of KV blocks in use, 1 is all.", _share(num_used, num_blocks)),
            ("kv_waste_perc", "Share of slots in used KV blocks that hold no token.", waste),
            ("kv_sharing_factor", "How many requests hold a live KV block, on average.", sharing),
            (
                "prefix_cache_hit_rate",
                "Share of the tokens looked up in the last minute that were found.",
                math.nan if hit_rate is None else hit_rate,
            ),
        ):
            yield self._gauge(name, help_text, value)
        yield from self._cache_config()
        if self._metrics.num_devices is not None:
            yield self._gauge("devices", "Devices of all replicas and ranks.", self._metrics.num_devices())
        yield from self._utilisation()
        for name, help_text, count in (
            ("engine_restarts", "Times an engine process had to be started again.", self._engine.num_restarts),
            ("requests_resumed", "Times a request went on in another engine process.", self._engine.num_resumed),
        ):
            yield self._counter(name, help_text, count)

    def _cache_config(self) -> Iterator[Metric]:
        """Yield the size of the KV cache, of all replicas that serve, once an engine has told it."""
        info = self._engine.info
        if info is None:
            return
        num_serving = sum(replica.problem is None for replica in self._engine.replicas)
        yield self._info(
            "cache_config_info",
            "The KV cache: blocks of all replicas that serve, and tokens in a block. Always 1.",
            block_size=str(info.block_size),
            num_gpu_blocks=str(info.num_blocks * max(1, num_serving)),
            num_cpu_blocks=str(info.num_host_slots * max(1, num_serving)),
            enable_prefix_caching=str(info.prefix_caching),
        )

    def _utilisation(self) -> Iterator[Metric]:
        """Yield the shares of the last minute that are known."""
        used = self._metrics.recent_utilisation.shares()
        for name, help_text, share in (
            (
                "device_bandwidth_perc",
                "Bytes that steps read, of what the device can read.",
                used.bandwidth,
            ),
            ("device_compute_perc", "Operations of steps, of what the device can compute (MFU).", used.compute),
            ("device_ceiling_perc", "The least time of steps by both limits, of their time.", used.ceiling),
            ("useful_tokens_perc", "Tokens of requests among those that steps compute.", used.useful),
            ("device_host_wait_perc", "Time the device waits for the host, of the time with work.", used.host),
            ("nvml_utilization_perc", "Time in which any kernel ran, as NVML counts it.", used.nvml),
        ):
            if share is not None:
                yield self._gauge(name, f"{help_text} In the last minute, 1 is all.", share)

    def _replica_metrics(self) -> Iterator[Metric]:
        """Yield the metrics of each replica: whether it serves, and the numbers that are declared per replica."""
        replicas = self._engine.replicas
        columns: list[tuple[Counter | Gauge, list[float]]] = [
            (Gauge("up", "Whether it serves."), [replica.problem is None for replica in replicas]),
            (
                Counter("restarts", "Times its process was started again."),
                [replica.num_restarts for replica in replicas],
            ),
        ]
        for numbers in zip(*(replica.stats.metrics() for replica in replicas), strict=True):
            declared = numbers[0][0]
            if declared.by_replica:
                columns.append((declared, [value for _, value in numbers if not isinstance(value, list)]))
        for declared, values in columns:
            family = (CounterMetricFamily if isinstance(declared, Counter) else GaugeMetricFamily)(
                f"replica_{declared.metric.removeprefix('num_')}",
                f"{declared.help} Of one replica.",
                labels=("model_name", "replica"),
            )
            for replica, value in zip(replicas, values, strict=True):
                family.add_metric((self._metrics.model, str(replica.place)), value)
            yield family
        if outcomes := self._engine.prefill_outcomes:
            yield from self._roles(outcomes)

    def _roles(self, outcomes: Mapping[str, int]) -> Iterator[Metric]:
        """Yield the metrics of disaggregated serving, with separate replicas for prefill and decode."""
        prefills = CounterMetricFamily(
            "prefills",
            "Prompts, by where they were computed: by a prefill replica (elsewhere), where the answer is (here), begun "
            "by a prefill replica and not finished (failed), or left by their clients meanwhile (aborted).",
            labels=("model_name", "outcome"),
        )
        for outcome, count in outcomes.items():
            prefills.add_metric((self._metrics.model, outcome), count)
        yield prefills
        roles = GaugeMetricFamily("replica_role", "What a replica is for.", labels=("model_name", "replica", "role"))
        for replica in self._engine.replicas:
            roles.add_metric((self._metrics.model, str(replica.place), str(replica.role)), 1)
        yield roles

    def _latencies(self) -> Iterator[Metric]:
        metrics = self._metrics
        for name, help_text, histogram in (
            ("time_to_first_token_seconds", "From request to first token.", metrics.time_to_first_token),
            ("inter_token_latency_seconds", "Between two tokens of a sequence.", metrics.inter_token_latency),
            (
                "request_time_per_output_token_seconds",
                "Mean time of a sequence's tokens after the first.",
                metrics.time_per_output_token,
            ),
            ("e2e_request_latency_seconds", "From request to last token.", metrics.e2e_latency),
            ("request_queue_time_seconds", "Waiting in the engine.", metrics.queue_time),
            ("request_prefill_time_seconds", "From first step to first token.", metrics.prefill_time),
            ("request_decode_time_seconds", "From first to last token.", metrics.decode_time),
            ("request_inference_time_seconds", "In the batch.", metrics.inference_time),
            ("request_prompt_tokens", "Prompt tokens of a request.", metrics.prompt_length),
            ("request_generation_tokens", "Tokens generated for a sequence.", metrics.generation_length),
            (
                "request_max_num_generation_tokens",
                "Tokens of the longest completion of a request.",
                metrics.longest_generation,
            ),
            (
                "request_prefill_kv_computed_tokens",
                "Prompt tokens of a request that were computed, and not found in a cache.",
                metrics.computed_prompt_tokens,
            ),
            ("request_params_n", "Completions that a request asked for.", metrics.wanted_completions),
            (
                "request_params_max_tokens",
                "Most tokens that a request allowed for a completion.",
                metrics.wanted_tokens,
            ),
            ("request_num_preemptions", "Times that a request lost its blocks to another.", metrics.preemptions),
            ("iteration_tokens_total", "Tokens that a step computed.", metrics.step_tokens),
            ("scheduler_time_seconds", "Planning, per step.", metrics.schedule_time),
            ("length_prediction_time_seconds", "Waiting for a predicted length.", metrics.prediction_time),
            (
                "forecast_error_ratio",
                "Error of the forecast of a first token, as a share of its time (of 200 ms, if that was shorter).",
                metrics.forecast_error,
            ),
        ):
            yield self._histograms(name, help_text, {(): histogram}, labels=())
        by_kind: dict[tuple[str, ...], Histogram] = {
            (kind,): histogram for kind, histogram in metrics.step_time.items()
        }
        yield self._histograms("step_time_seconds", "A step of the engine.", by_kind, labels=("kind",))
        recent = GaugeMetricFamily(
            "recent_inter_token_latency_seconds",
            "Between two tokens of a sequence, over the last minute.",
            labels=("model_name", "quantile"),
        )
        for quantile, value in zip(("0.5", "0.99"), metrics.recent_itl.quantiles((0.5, 0.99)), strict=True):
            recent.add_metric((metrics.model, quantile), value)
        yield recent

    def _server_metrics(self) -> Iterator[Metric]:
        metrics = self._metrics
        finished = CounterMetricFamily(
            "request_success", "Sequences that ended.", labels=("model_name", "finished_reason")
        )
        for reason, count in metrics.finished.items():
            finished.add_metric((metrics.model, reason), count)
        yield finished
        yield from self._http_metrics()
        yield self._gauge(
            "queue_requests", "Requests that wait for a first token, or for the tokenizer.", self._queue.num_requests
        )
        yield self._gauge(
            "queue_tokens",
            "Prompt tokens of requests that wait for a first token, or for the tokenizer.",
            self._queue.num_tokens,
        )
        stalls = metrics.loop_stalls
        yield self._counter("event_loop_stalls", "Times the event loop stood still for a second.", stalls.number)
        yield self._counter(
            "event_loop_stalled_seconds",
            "Time in which the event loop stood still for a second or more.",
            stalls.seconds,
        )
        yield self._counter(
            "front_end_restarts",
            "Times the front end's process had to be started again.",
            metrics.num_front_end_restarts,
        )
        yield self._counter(
            "forecasts_missing", "Requests whose first token came without a forecast.", metrics.num_missing_forecasts
        )
        yield from self._prediction_metrics()
        yield from self._class_metrics()

    def _http_metrics(self) -> Iterator[Metric]:
        responses = CounterMetricFamily("http_responses", "HTTP answers.", labels=("route", "method", "status"))
        for (route, method, status), count in self._metrics.responses.items():
            responses.add_metric((route, method, str(status)), count)
        yield responses
        times = HistogramMetricFamily(
            "http_response_time_seconds", "From request to the end of its HTTP answer.", labels=("route", "method")
        )
        for values, histogram in self._metrics.response_time.items():
            times.add_metric(values, histogram.cumulative(), histogram.total)
        yield times

    def _prediction_metrics(self) -> Iterator[Metric]:
        metrics = self._metrics
        error = SummaryMetricFamily(
            "length_prediction_log_error",
            "Absolute difference of the logarithms of predicted and true output tokens.",
            labels=("model_name",),
        )
        error.add_metric(
            (metrics.model,), count_value=metrics.num_checked_predictions, sum_value=metrics.prediction_error
        )
        yield error
        yield self._counter(
            "length_predictions_missing", "Prompts without a predicted length.", metrics.num_missing_predictions
        )

    def _class_metrics(self) -> Iterator[Metric]:
        labels = ("model_name", "service_class")
        waiting = GaugeMetricFamily("class_queue_requests", "Completions that wait.", labels=labels)
        admitted = CounterMetricFamily("class_admitted", "Requests taken into the queue.", labels=labels)
        shed = CounterMetricFamily("class_shed", "Requests dropped from the queue for others.", labels=labels)
        refused = CounterMetricFamily("class_refused", "Requests not taken into the queue.", labels=(*labels, "reason"))
        for name, line in self._queue.lines.items():
            values = (self._metrics.model, name)
            waiting.add_metric(values, line.num_waiting)
            admitted.add_metric(values, line.num_admitted)
            shed.add_metric(values, line.num_shed)
            for reason, count in line.num_refused.items():
                refused.add_metric((*values, reason), count)
        yield from (waiting, admitted, refused, shed)

    def _declared(self, declared: Counter | Gauge, value: Number) -> Metric:
        """Return a declared number as a metric. The elements of a list are distinguished by the declared label."""
        if not isinstance(value, list):
            make = self._counter if isinstance(declared, Counter) else self._gauge
            return make(declared.metric, declared.help, value)
        assert isinstance(declared, Counter)
        family = CounterMetricFamily(declared.metric, declared.help, labels=("model_name", declared.label))
        for place, count in enumerate(value):
            family.add_metric((self._metrics.model, str(place)), count)
        return family

    def _gauge(self, name: str, help_text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, help_text, labels=("model_name",))
        family.add_metric((self._metrics.model,), value)
        return family

    def _info(self, name: str, help_text: str, **labels: str) -> Metric:
        """Return facts as labels of a gauge that is always 1."""
        family = GaugeMetricFamily(name, help_text, labels=("model_name", *labels))
        family.add_metric((self._metrics.model, *labels.values()), 1)
        return family

    def _counter(self, name: str, help_text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, help_text, labels=("model_name",))
        family.add_metric((self._metrics.model,), value)
        return family

    def _histograms(
        self, name: str, help_text: str, histograms: dict[tuple[str, ...], Histogram], *, labels: tuple[str, ...]
    ) -> Metric:
        family = HistogramMetricFamily(name, help_text, labels=("model_name", *labels))
        for values, histogram in histograms.items():
            family.add_metric((self._metrics.model, *values), histogram.cumulative(), histogram.total)
        return family


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
