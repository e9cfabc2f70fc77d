"""Results beside each other as a page: one chart of ratios, and the table."""

from __future__ import annotations

from collections.abc import Sequence

from headway.lab.bench.compare import ALIKE, Comparison
from headway.lab.charts import Page, bar_chart

CHARTED = (
    "request_throughput",
    "output_throughput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_tpot_ms",
    "p99_itl_ms",
    "p99_e2el_ms",
)


def compare_page(
    names: Sequence[str],
    rows: Sequence[Comparison],
    table: tuple[Sequence[str], Sequence[Sequence[str]]],
    *,
    notes: Sequence[str] = (),
) -> Page:
    """`table` is what the terminal shows, `notes` what stands below it there."""
    page = Page(" against ".join(names))
    bars, said = _ratios(names, rows)
    if bars:
        page.chart(
            bar_chart(f"As multiples of {names[0]}", y="ratio", bars=bars, notes=said, log_y=True, base=1.0),
            f"Bars to the right are more than with {names[0]}, bars to the left less; which of the two is better is "
            "said behind them.",
        )
    titles, cells = table
    page.table([title or "key" for title in titles], cells)
    for note in notes:
        page.text(note)
    return page


def _ratios(names: Sequence[str], rows: Sequence[Comparison]) -> tuple[dict[str, float], dict[str, str]]:
    by_key = {row.key: row for row in rows}
    bars: dict[str, float] = {}
    said: dict[str, str] = {}
    for row in (by_key[key] for key in CHARTED if key in by_key):
        for name, ratio in zip(names[1:], row.ratios, strict=True):
            if ratio:
                bar = row.key if len(names) == 2 else f"{row.key}, {name}"
                bars[bar] = ratio
                is_better = (ratio > 1) == row.higher_is_better
                said[bar] = "same" if abs(ratio - 1) < ALIKE else "better" if is_better else "worse"
    return bars, said
