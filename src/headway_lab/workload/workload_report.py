"""A workload in numbers: how many requests, how fast, how long, how much is reusable; as tables and plots."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headway_lab.charts import Page, Series, cdf_chart, line_chart, terminal_histogram, terminal_plot
from headway_lab.workload.bench_requests import Work
from headway_lab.workload.workload import Workload

BLOCK_SIZE = 16
"""The block size of the prefix cache for which the reusable share is computed."""

_MOST_BARS = 60
_LENGTH_HEADERS = ("tokens", "mean", "P50", "P90", "P99", "max", "total")


@dataclass(frozen=True)
class LengthStatistics:
    """Statistics of lengths in tokens."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: int
    total: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> LengthStatistics:
        """The statistics of these lengths; all are 0 if there are none."""
        if not lengths:
            return cls(0.0, 0.0, 0.0, 0.0, 0, 0)
        import numpy as np  # here: drawing a workload takes no numpy

        p50, p90, p99 = (float(value) for value in np.percentile(lengths, (50, 90, 99)))
        return cls(statistics.fmean(lengths), p50, p90, p99, max(lengths), sum(lengths))


@dataclass(frozen=True)
class WorkloadStatistics:
    num_requests: int
    num_conversations: int
    """The number of requests that others follow and that follow none."""
    num_turns: int
    """The number of requests in conversations, the first of each included."""
    duration_s: float
    """Seconds from the first arrival to the last. Later turns of conversations do not count, since they are sent when
    they can be."""
    rate: float
    """Requests per second, including those that follow others; infinite if all are there at once."""
    gap_cv: float
    """Standard deviation of the gaps between arrivals divided by their mean: 1 is Poisson, more is bursts."""
    input: LengthStatistics
    output: LengthStatistics
    reusable_share: float
    """The share of prompt tokens in leading blocks of `BLOCK_SIZE` with which an earlier prompt began, too. A prefix
    cache without limits saves this share."""
    reusable_with_answers_share: float
    """The same share if earlier turns had been answered with exactly the answers that later prompts contain."""

    def as_json(self) -> dict[str, Any]:
        """The statistics, with None for numbers that are not finite."""
        values = dataclasses.asdict(self)
        return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}


def statistics_of(work: Work) -> WorkloadStatistics:
    """The statistics of drawn work, in the order in which it was drawn."""
    arrivals = sorted(request.arrival_s for request in work if request.after is None)
    duration_s = arrivals[-1] - arrivals[0] if arrivals else 0.0
    per_arrival = len(work) / max(1, len(arrivals))
    followed = {request.after for request in work if request.after is not None}
    num_following = sum(request.after is not None for request in work)
    num_conversations = sum(work[number].after is None for number in followed)
    return WorkloadStatistics(
        num_requests=len(work),
        num_conversations=num_conversations,
        num_turns=num_conversations + num_following,
        duration_s=duration_s,
        rate=(len(arrivals) - 1) * per_arrival / duration_s if duration_s else math.inf,
        gap_cv=_variation([later - earlier for earlier, later in itertools.pairwise(arrivals)]),
        input=LengthStatistics.of([request.num_prompt_tokens for request in work]),
        output=LengthStatistics.of([request.num_output_tokens * request.num_choices for request in work]),
        reusable_share=(reusable := reusable_share(work)),
        reusable_with_answers_share=reusable_share(work, with_answers=True) if followed else reusable,
    )


def reusable_share(work: Work, *, block_size: int = BLOCK_SIZE, with_answers: bool = False) -> float:
    """The share of prompt tokens that a cache without limits would already have, request after request."""
    seen: set[int] = set()
    num_reusable = num_tokens = 0
    for request in work:
        prompt = request.prompt_token_ids
        if with_answers and request.after is not None:
            before = work[request.after]
            seen.update(_chain(prompt[: before.num_prompt_tokens + before.num_output_tokens], block_size))
        chain = _chain(prompt, block_size)
        num_reusable += block_size * sum(1 for _ in itertools.takewhile(seen.__contains__, chain))
        num_tokens += len(prompt)
        seen.update(chain)
    return num_reusable / max(1, num_tokens)


def _chain(ids: Sequence[int], block_size: int) -> list[int]:
    """A hash for each full block, of its ids and of all before it."""
    starts = range(0, len(ids) - block_size + 1, block_size)
    blocks = (tuple(ids[start : start + block_size]) for start in starts)
    return list(itertools.accumulate(blocks, lambda above, block: hash((above, block)), initial=0))[1:]


def _variation(gaps: Sequence[float]) -> float:
    mean = sum(gaps) / len(gaps) if gaps else 0.0
    return statistics.pstdev(gaps) / mean if mean else math.nan


def facts(statistics: WorkloadStatistics) -> dict[str, str]:
    """The facts besides lengths, by name."""
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
    """The report for a terminal of this width."""
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
    """The beginning of each interval and the rate of arrivals in it, for all intervals from the first arrival to the
    last."""
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
