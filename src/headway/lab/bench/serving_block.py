"""The printed result of a load, line for line as people know it from `vllm bench serve`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headway.lab.bench.online_metrics import THIN_MARK, Distribution, OnlineMetrics, is_thin, thin_note

WIDTH = 50
TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def serving_block(
    metrics: OnlineMetrics,
    *,
    rate: float = math.inf,
    max_concurrency: int | None = None,
    shown: Sequence[str] = tuple(TITLES),
    percents: Sequence[float] = (50, 90, 95, 99),
    title: str = "Serving Benchmark Result",
) -> str:
    """`shown`: which latencies; `percents`: which of their percentiles."""
    lines = [f"{f' {title} ':=^{WIDTH}}", *_totals(metrics, rate, max_concurrency)]
    for name in shown:
        lines.append(f"{TITLES[name]:-^{WIDTH}}")
        lines += _latency_lines(name.upper(), metrics.latencies[name], percents, metrics.num_completed)
    lines.append("=" * WIDTH)
    thin = [percent for percent in percents if is_thin(percent, metrics.num_completed)]
    if shown and thin:
        lines.append(thin_note(metrics.num_completed, max(thin)))
    return "\n".join(lines)


def _totals(metrics: OnlineMetrics, rate: float, max_concurrency: int | None) -> list[str]:
    lines = [
        _line("Successful requests", f"{metrics.num_completed}"),
        _line("Failed requests", f"{metrics.num_lost}"),
    ]
    if max_concurrency is not None:
        lines.append(_line("Maximum request concurrency", f"{max_concurrency}"))
    if not math.isinf(rate):
        lines.append(_line("Request rate configured (RPS)", f"{rate:.2f}"))
    lines += [
        _line("Benchmark duration (s)", f"{metrics.duration_s:.2f}"),
        _line("Total input tokens", f"{metrics.num_input_tokens}"),
        _line("Total generated tokens", f"{metrics.num_output_tokens}"),
        _line("Request throughput (req/s)", f"{metrics.requests_s:.2f}"),
    ]
    if metrics.cached_share is not None:
        lines.append(_line("Cached prompt tokens", f"{metrics.num_cached_tokens} ({metrics.cached_share:.1%})"))
    if metrics.good_requests_s is not None and metrics.good_share is not None:
        lines.append(_line("Request goodput (req/s)", f"{metrics.good_requests_s:.2f}"))
        lines.append(_line("Requests that met the SLO (%)", f"{100 * metrics.good_share:.1f}"))
    return [
        *lines,
        _line("Output token throughput (tok/s)", f"{metrics.output_tok_s:.2f}"),
        _line("Peak output token throughput (tok/s)", f"{metrics.peak_output_tok_s:.2f}"),
        _line("Peak concurrent requests", f"{metrics.peak_in_flight}"),
        _line("Total token throughput (tok/s)", f"{metrics.total_tok_s:.2f}"),
    ]


def _latency_lines(name: str, latency: Distribution, percents: Sequence[float], num_requests: int) -> list[str]:
    lines = [
        _line(f"Mean {name} (ms)", f"{latency.mean:.2f}"),
        _line(f"Median {name} (ms)", f"{latency.percentiles[50]:.2f}"),
    ]
    lines += [
        _line(
            f"P{percent:g} {name} (ms)",
            f"{latency.percentiles[percent]:.2f}" + (f" {THIN_MARK}" if is_thin(percent, num_requests) else ""),
        )
        for percent in percents
        if percent != 50
    ]
    return [*lines, _line(f"P99/P50 {name}", f"{latency.p99_over_p50:.2f}")]


def _line(name: str, value: str) -> str:
    return f"{name + ':':<40} {value}"
