"""The results as one HTML page: a table of all claims, then each one with its plots."""

from __future__ import annotations

from collections.abc import Sequence

from headway import __version__
from headway.lab.charts import Origin, Page
from headway.lab.claims.results import Results, Row


def as_page(results: Results) -> Page:
    """For people."""
    rows = results.rows
    page = Page("Published claims, measured again", _subtitle(rows))
    if results.note:
        page.text(results.note)
    page.table(
        ["claim", "published", "measured", "simulated"], [_cells(group) for group in results.by_claim], numeric=False
    )
    if trusts := dict.fromkeys(row.trust for row in rows if row.trust):
        page.text(f"Simulated: {'; '.join(trusts)}.")
    for group in results.by_claim:
        _section(page, group)
    page.made_by(_origin(rows))
    return page


def _cells(group: Sequence[Row]) -> list[str | None]:
    """A claim with what was measured, on the engine or of the scheduler alone, beside what was simulated."""
    measured = [row.outcome.ours for row in group if row.outcome.where != "simulator"]
    simulated = [row.outcome.ours for row in group if row.outcome.where == "simulator"]
    claim = group[0].claim
    return [claim.title, claim.published, "; ".join(measured) or None, "; ".join(simulated) or None]


def _subtitle(rows: list[Row]) -> str:
    num_claims = len({row.claim.id for row in rows})
    quick = ", quick run" if rows and all(row.is_quick for row in rows) else ""
    dates = sorted({row.date for row in rows})
    when = f", {dates[0]}" + (f" to {dates[-1]}" if len(dates) > 1 else "") if dates else ""
    return f"{num_claims} claims{quick}{when}"


def _section(page: Page, group: Sequence[Row]) -> None:
    claim = group[0].claim
    page.heading(claim.title)
    page.text(f"Published: {claim.published} {claim.source}. Workload: {claim.workload}. Measured: {claim.method}")
    for row in group:
        outcome = row.outcome
        page.text(f"Ours, {outcome.where}: {outcome.ours}.")
        page.chart(outcome.chart.svg(), outcome.chart.caption)
        columns = list(dict.fromkeys(name for numbers in outcome.numbers.values() for name in numbers))
        if columns:
            table = [[name, *(numbers.get(c) for c in columns)] for name, numbers in outcome.numbers.items()]
            page.table(["", *columns], table)
        page.text(f"Where it differs and why: {outcome.differs}")
        page.text(f"Work: {outcome.workload}. On {row.place}.")
        page.code(row.command)


def _origin(rows: Sequence[Row]) -> Origin:
    """Rows may come from several commands, machines and versions; each says its own command."""
    versions = dict.fromkeys(row.versions.get("headway", __version__) for row in rows)
    places = dict.fromkeys(row.place for row in rows)
    command = rows[0].command if len(rows) == 1 else "headway claims (of each: see above)"
    return Origin(command, ", ".join(versions) or __version__, "fixed in each claim", " · ".join(places) or "none")
