"""The results as one HTML page: a table of all claims, then each one with its plot."""

from __future__ import annotations

from headway.charts import Page
from headway.claims.results import Results, Row


def as_page(results: Results) -> Page:
    """For people."""
    rows = results.rows
    page = Page("Published claims, measured again", _subtitle(rows))
    if results.note:
        page.text(results.note)
    page.table(
        ["claim", "published", "ours", "measured"],
        [[row.claim.title, row.claim.published, row.outcome.ours, row.where] for row in rows],
        numeric=False,
    )
    for row in rows:
        _section(page, row)
    return page


def _subtitle(rows: list[Row]) -> str:
    num_claims = len({row.claim.id for row in rows})
    quick = ", quick run" if rows and all(row.is_quick for row in rows) else ""
    dates = sorted({row.date for row in rows})
    when = f", {dates[0]}" + (f" to {dates[-1]}" if len(dates) > 1 else "") if dates else ""
    return f"{num_claims} claims{quick}{when}"


def _section(page: Page, row: Row) -> None:
    claim, outcome = row.claim, row.outcome
    page.heading(f"{claim.title} ({outcome.where})")
    page.text(f"Published: {claim.published} {claim.source}. Workload: {claim.workload}.")
    page.text(f"Ours: {outcome.ours}.")
    page.chart(outcome.chart.svg(), outcome.chart.caption)
    columns = list(dict.fromkeys(name for numbers in outcome.numbers.values() for name in numbers))
    if columns:
        page.table(
            ["", *columns], [[name, *(numbers.get(c) for c in columns)] for name, numbers in outcome.numbers.items()]
        )
    page.text(f"Where it differs and why: {outcome.differs}")
    page.text(f"Measured: {claim.method} Work: {outcome.workload}. On {row.place}.")
    page.code(row.command)
