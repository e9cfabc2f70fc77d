"""The table as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from headway.lab.claims.results import Results, Row

HEADERS = ("claim", "source", "workload", "published", "ours", "where it differs and why")


def claim_cells(group: Sequence[Row]) -> list[str]:
    """One row of the table: a claim, with what was measured and what was simulated."""
    first = group[0]
    return [
        f"{first.claim.title} ({first.claim.id})",
        first.claim.source,
        "; ".join(dict.fromkeys(row.outcome.workload for row in group)),
        first.claim.published,
        "; ".join(f"{row.outcome.ours} [{row.where}]" for row in group),
        " ".join(_differs(row, len(group) > 1) for row in group),
    ]


def _differs(row: Row, is_named: bool) -> str:
    return f"{row.outcome.where.capitalize()}: {row.outcome.differs}" if is_named else row.outcome.differs


def as_markdown(results: Results) -> str:
    """The table, and under it where each row was measured and what gives it again."""
    lines = ["# Published claims, measured again", ""]
    if results.note:
        lines += [results.note, ""]
    lines += [_line(HEADERS), _line(["---"] * len(HEADERS))]
    lines += [_line(claim_cells(group)) for group in results.by_claim]
    lines += ["", "## Where and how", ""]
    lines += [_line(["claim", "measured on", "how", "date", "took", "command"]), _line(["---"] * 6)]
    lines += [_line(_origin(row)) for row in results.rows]
    for row in results.rows:
        lines += ["", f"## {row.claim.title} ({row.outcome.where})", "", *_numbers(row)]
    return "\n".join(lines) + "\n"


def _origin(row: Row) -> list[str]:
    return [row.claim.id, row.place, row.claim.method, row.date, f"{row.took_s:.0f} s", f"`{row.command}`"]


def _numbers(row: Row) -> list[str]:
    columns = list(dict.fromkeys(name for numbers in row.outcome.numbers.values() for name in numbers))
    lines = [_line(["", *columns]), _line(["---", *["--:"] * len(columns)])]
    for name, numbers in row.outcome.numbers.items():
        lines.append(_line([name, *(_number(numbers.get(column)) for column in columns)]))
    return lines


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _line(cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
