"""A run under load, shown: the block that `vllm bench serve` prints, and a page with plots."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from headway_lab.bench.online_metrics import THIN_MARK, Distribution, OnlineMetrics, is_thin, thin_note
from headway_lab.bench.slo_targets import Targets
from headway_lab.bench.timelines import BatchSample, RequestTimeline, bucket_for, in_flight, token_rate
from headway_lab.charts import Page, Series, cdf_chart, line_chart

WIDTH = 50
TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}

NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between tokens",
    "e2el": "whole answer",
}

SERVED_CAPTION = (
    "Where served falls away from the dashed line, requests come faster than they are served. A little below it all "
    "are: at its end a run waits for its last answers."
)


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
    prices = {} if metrics.prices is None else metrics.prices.lines()
    return [
        *lines,
        *(_line(name, value) for name, value in prices.items()),
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


def online_page(
    title: str,
    *,
    metrics: OnlineMetrics,
    timelines: Sequence[RequestTimeline],
    samples: Sequence[BatchSample] = (),
    notes: Sequence[str] = (),
    targets: Mapping[str, Targets] | None = None,
) -> Page:
    """`notes` say what a reader must know, a paragraph each; `samples` are empty where the batch is not
    known; `targets` by class are drawn."""
    promised = targets or {}
    done = [timeline for timeline in timelines if timeline.is_complete]
    page = Page(title, _subtitle(metrics))
    page.facts(_facts(metrics))
    for note in notes:
        page.text(note)
    page.heading("Latencies")
    _latency_table(page, metrics)
    _latency_charts(page, done, promised)
    page.heading("Over time")
    _time_charts(page, timelines, samples, metrics.duration_s, promised)
    return page


def target_lines(targets: Mapping[str, Targets], *names: str) -> dict[str, float]:
    """The targets of these names (ttft, tpot, e2e) in milliseconds, to be drawn as lines."""
    found: dict[str, float] = {}
    for class_name, each in targets.items():
        for name in names:
            bound_s = getattr(each, f"{name}_s")
            if bound_s is not None:
                found[" ".join(filter(None, [name.upper(), "target", class_name]))] = 1e3 * bound_s
    return found


def _subtitle(metrics: OnlineMetrics) -> str:
    return (
        f"{metrics.num_completed:,} requests in {metrics.duration_s:,.1f} s, {metrics.num_input_tokens:,} tokens in, "
        f"{metrics.num_output_tokens:,} out"
    )


def _facts(metrics: OnlineMetrics) -> dict[str, str]:
    facts = {
        "requests/s": f"{metrics.requests_s:,.2f}"
        + ("" if metrics.offered_s is None else f" of {metrics.offered_s:,.2f} offered"),
        "output tokens/s": f"{metrics.output_tok_s:,.1f}",
        "P99 to first token, ms": metrics.percentile_text("ttft", 99),
        "P99 between tokens, ms": metrics.percentile_text("itl", 99),
        "failed": f"{metrics.num_lost:,}",
    }
    if metrics.good_requests_s is not None and metrics.good_share is not None:
        facts["goodput, requests/s"] = f"{metrics.good_requests_s:,.2f} ({metrics.good_share:.1%})"
    if metrics.prices is not None:
        facts["price per 1M tokens, in / out"] = " / ".join(metrics.prices.cells())
    return facts


def _latency_table(page: Page, metrics: OnlineMetrics) -> None:
    percents = list(metrics.ttft.percentiles)
    rows = [
        [
            f"{NAMES[name]} ({name.upper()})",
            f"{latency.mean:,.2f}",
            *(metrics.percentile_text(name, percent, 2) for percent in percents),
            f"{latency.max:,.2f}",
            f"{latency.p99_over_p50:.2f}",
        ]
        for name, latency in metrics.latencies.items()
    ]
    page.table(["milliseconds", "mean", *(f"P{percent:g}" for percent in percents), "max", "P99/P50"], rows)
    if metrics.thin_note:
        page.text(metrics.thin_note)
    if metrics.tokens_per_event > 1.01:
        page.text(
            f"An event carried {metrics.tokens_per_event:.2f} tokens on average. “Between tokens” is between events; "
            "the time per output token counts every token."
        )


def _latency_charts(page: Page, done: Sequence[RequestTimeline], targets: Mapping[str, Targets]) -> None:
    page.chart(
        cdf_chart(
            "Until tokens come",
            x="time (ms)",
            samples={
                "first token": [1000 * timeline.ttft_s for timeline in done],
                "whole answer": [1000 * timeline.e2e_s for timeline in done],
            },
            x_lines=target_lines(targets, "ttft", "e2e"),
        ),
        "The share of requests that had waited no longer than this.",
    )
    page.chart(
        cdf_chart(
            "Between tokens",
            x="time (ms)",
            samples={
                "each gap": [1000 * gap for timeline in done for gap in timeline.itls_s],
                "mean of a request": [1000 * t.tpot_s for t in done if t.tpot_s is not None],
            },
            x_lines=target_lines(targets, "tpot"),
        ),
        "Gaps that users feel as stutter are on the right; the mean of a request hides them.",
    )


def _time_charts(
    page: Page,
    timelines: Sequence[RequestTimeline],
    samples: Sequence[BatchSample],
    duration_s: float,
    targets: Mapping[str, Targets],
) -> None:
    flying = in_flight(timelines)
    at_s = [sample.at_s for sample in samples]
    batch = [Series("on their way", flying.xs, flying.ys, kind="step", is_broad=True)]
    if samples:
        batch.append(Series("in the batch", at_s, [float(sample.num_running) for sample in samples], kind="step"))
        batch.append(Series("in the queue", at_s, [float(sample.num_waiting) for sample in samples], kind="step"))
    page.chart(
        line_chart("Requests", x="time (s)", y="requests", series=batch),
        "On their way: arrived and not yet answered in full."
        + ("" if samples else " The server does not tell about its batch and its queue."),
    )
    bucket_s = bucket_for(duration_s)
    tokens = token_rate(timelines, bucket_s)
    page.chart(
        line_chart("Throughput", x="time (s)", y="output tokens/s", series=[Series("output", tokens.xs, tokens.ys)]),
        f"Over {bucket_s:g} s each.",
    )
    if any(math.isfinite(sample.kv_used) for sample in samples):
        used = Series("used", at_s, [100 * sample.kv_used for sample in samples], kind="step")
        page.chart(line_chart("KV cache", x="time (s)", y="blocks in use (%)", series=[used]))
    begun = [timeline for timeline in timelines if timeline.token_times_s]
    waits = Series(
        "first token", [t.arrival_s for t in begun], [1000 * timeline.ttft_s for timeline in begun], kind="points"
    )
    page.chart(
        line_chart(
            "Who waited when",
            x="arrival (s)",
            y="time to first token (ms)",
            series=[waits],
            log_y=True,
            lines=target_lines(targets, "ttft"),
        ),
        "A point for each request. Points that climb to the right are a queue that grows.",
    )
