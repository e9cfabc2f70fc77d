"""A workload shown: its statistics as a table, and plots of them for a terminal and for a page."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from headway.lab.charts import Page, Series, cdf_chart, line_chart, terminal_histogram, terminal_plot
from headway.lab.workload.requests import Work
from headway.lab.workload.statistics import LengthStatistics, WorkloadStatistics
from headway.lab.workload.workload import Workload

_MOST_BARS = 60
_LENGTH_HEADERS = ("tokens", "mean", "P50", "P90", "P99", "max", "total")


def facts(statistics: WorkloadStatistics) -> dict[str, str]:
    """What is to be said beside lengths, by name."""
    told = {"requests": f"{statistics.num_requests:,}"}
    if statistics.num_conversations:
        turns = statistics.num_turns / statistics.num_conversations
        told["conversations"] = f"{statistics.num_conversations:,} of {turns:.1f} turns on average"
    if math.isfinite(statistics.rate):
        told["arrivals over"] = f"{statistics.duration_s:,.1f} s"
        told["rate"] = f"{statistics.rate:,.3g} requests/s"
        told["gap CV"] = f"{statistics.gap_cv:.2f}"
    else:
        told["arrivals"] = "all at once"
    told["reusable"] = f"{statistics.reusable_share:.1%} of prompt tokens"
    if statistics.num_conversations:
        told["with answers"] = f"{statistics.reusable_with_answers_share:.1%}"
    return told


def length_rows(statistics: WorkloadStatistics) -> list[list[str]]:
    """A row for prompts and one for answers, below `_LENGTH_HEADERS`."""
    return [_row("input", statistics.input), _row("output", statistics.output)]


def text_report(workload: Workload, work: Work, statistics: WorkloadStatistics, *, width: int) -> str:
    """For a terminal of this width."""
    told = facts(statistics)
    margin = max(map(len, told))
    parts = ["\n".join(f"{name:>{margin}}  {fact}" for name, fact in told.items())]
    parts.append(_text_table([list(_LENGTH_HEADERS), *length_rows(statistics)]))
    if math.isfinite(statistics.rate):
        xs, ys = arrivals_over_time(work)
        parts.append(terminal_plot(xs, ys, width=width, height=8, x="time (s)", y="arrivals (requests/s)"))
    for label, lengths in _lengths(work).items():
        is_wide = max(lengths) > 20 * min(lengths)
        parts.append(terminal_histogram(lengths, width=width, label=f"{label} tokens: requests", log=is_wide))
    head = f"{workload.name}: {workload.summary}" if workload.summary else workload.name
    return "\n\n".join([head, *parts])


def workload_page(workload: Workload, work: Work, statistics: WorkloadStatistics) -> Page:
    """As an HTML file."""
    page = Page(f"Workload {workload.name}", workload.summary)
    page.facts(facts(statistics))
    page.heading("Lengths")
    page.table(_LENGTH_HEADERS, length_rows(statistics))
    page.chart(cdf_chart("Lengths of prompts and answers", x="tokens", samples=_lengths(work)))
    page.heading("Arrivals")
    if math.isfinite(statistics.rate):
        xs, ys = arrivals_over_time(work)
        page.chart(
            line_chart(
                "Arrivals over time",
                x="time (s)",
                y="arrivals (requests/s)",
                series=[Series("arrivals", xs, ys, kind="step")],
                lines={"mean": sum(ys) / len(ys)},
            ),
            "Later turns of conversations are not in it: they come when the one before has ended."
            if statistics.num_conversations
            else "",
        )
        arrivals = sorted(request.arrival_s for request in work if request.after is None)
        gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
        page.chart(cdf_chart("Gaps between arrivals", x="seconds", samples={"gaps": gaps}, log_x=min(gaps) > 0))
    else:
        page.text("All requests are there at once.")
    return page


def arrivals_over_time(work: Work) -> tuple[list[float], list[float]]:
    """Beginning of each stretch of time and the rate of arrivals in it, all of them from the first to the last."""
    arrivals = sorted(request.arrival_s for request in work if request.after is None)
    start, end = arrivals[0], arrivals[-1]
    count = max(1, min(_MOST_BARS, len(arrivals) // 10))
    width = (end - start) / count or 1.0
    numbers = [0] * count
    for arrival in arrivals:
        numbers[min(count - 1, int((arrival - start) / width))] += 1
    xs = [start + width * place for place in range(count)]
    return [*xs, end], [*(number / width for number in numbers), numbers[-1] / width]


def _lengths(work: Work) -> dict[str, list[int]]:
    return {
        "input": [request.num_prompt_tokens for request in work],
        "output": [request.num_output_tokens for request in work],
    }


def _row(name: str, lengths: LengthStatistics) -> list[str]:
    means = (lengths.mean, lengths.p50, lengths.p90, lengths.p99)
    return [name, *(f"{value:,.0f}" for value in means), f"{lengths.max:,}", f"{lengths.total:,}"]


def _text_table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths)) for row in rows)
