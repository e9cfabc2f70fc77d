"""The page of claims: for every published number what was measured here, a picture, a verdict, and the reason.

The numbers are in groups, each a question that a reader brings. A picture that answers several numbers stands at the
first of them. What somebody needs to measure the same again (workload, machine, command, all values) is folded away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headway import __version__
from headway_lab.charts import Badge, Link, Origin, Page
from headway_lab.charts.html_page import Tone
from headway_lab.charts.svg import NARROW
from headway_lab.claims.claim import Numbers
from headway_lab.claims.claim_results import PRICES_TITLE, Row
from headway_lab.claims.numbers_table import Answer, answers, decisive_rows, verdict_counts
from headway_lab.claims.published_number import Question, Verdict

_TONES: Mapping[Verdict, Tone] = {
    Verdict.CONFIRMED: "good",
    Verdict.MORE: "good",
    Verdict.PART: "part",
    Verdict.LESS: "bad",
    Verdict.AVOIDED: "good",
    Verdict.QUOTED: "calm",
    Verdict.OPEN: "calm",
}
_INTRODUCTION = """
Articles about continuous batching lean on some thirty numbers. Each stands here beside what Headway measures for the
same question, on the engine where that is feasible and else in its simulator, which runs the same scheduler.

Confirmed means that our value lies within the published range, or within a tenth of it. Both sides of a ratio are one
engine with the same kernels, so a ratio is what scheduling alone is worth.
"""


def claims_page(rows: Sequence[Row], note: str = "") -> Page:
    """A page of these rows. Published numbers that none of them answers are listed, without a card."""
    page = Page("Published claims, measured again", _subtitle(rows))
    page.text(_INTRODUCTION)
    if note:
        page.text(note)
    found = answers(rows)
    page.badges(
        [Badge(f"{count} {verdict.value}", _TONES[verdict]) for verdict, count in verdict_counts(found).items()]
    )
    groups = {question: [one for one in found if one.published.question is question] for question in Question}
    numbered = {name for answer in found for name in answer.published.claims}
    others = [row for row in rows if row.claim.id not in numbered]
    page.contents({**_contents(groups), **({"Other claims": _links(others)} if others else {})})
    shown: dict[str, str] = {}
    for question, group in groups.items():
        page.heading(question.value, anchor=question.name.lower())
        for answer in group:
            _add_answer(page, answer, shown)
    if others:
        page.heading("Other claims")
        for name in dict.fromkeys(row.claim.id for row in others):
            _add_other(page, [row for row in others if row.claim.id == name])
    page.made_by(_origin(rows))
    return page


def _subtitle(rows: Sequence[Row]) -> str:
    num_claims = len({row.claim.id for row in rows})
    quick = ", quick run" if rows and all(row.is_quick for row in rows) else ""
    dates = sorted({row.date for row in rows})
    when = f", {dates[0]}" + (f" to {dates[-1]}" if len(dates) > 1 else "") if dates else ""
    return f"{num_claims} claims{quick}{when}"


def _contents(groups: Mapping[Question, Sequence[Answer]]) -> dict[str, list[Link]]:
    return {
        question.value: [
            Link(f"{one.published.number}. {one.published.claim}", _anchor(one), _badge(one)) for one in group
        ]
        for question, group in groups.items()
    }


def _links(rows: Sequence[Row]) -> list[Link]:
    titles = {row.claim.id: row.claim.title for row in rows}
    return [Link(title, name) for name, title in titles.items()]


def _anchor(answer: Answer) -> str:
    return f"number-{answer.published.number}"


def _badge(answer: Answer) -> Badge:
    return Badge(answer.verdict.value, _TONES[answer.verdict])


def _add_answer(page: Page, answer: Answer, shown: dict[str, str]) -> None:
    """A card. `shown`: the claims whose pictures stand on the page already, with the number where they stand."""
    number = answer.published
    title = f"{number.number}. {number.claim}"
    with page.card(title, anchor=_anchor(answer), badge=_badge(answer)):
        is_arithmetic = any(row.outcome.where == "arithmetic" for row in answer.rows)
        ours = {
            "Ours, computed" if is_arithmetic else "Ours, measured": "; ".join(answer.texts(is_simulated=False)),
            "Ours, simulated": "; ".join(answer.texts(is_simulated=True)),
        }
        page.texts({"Published": number.published, **{name: text for name, text in ours.items() if text}})
        page.text(answer.why)
        page.text(f"Source: {number.source}.", is_dim=True)
        for name in number.claims:
            rows = [row for row in answer.rows if row.claim.id == name]
            if rows and name in shown:
                page.text(f"The picture is that of {shown[name]}.")
            elif rows:
                shown[name] = title
                _add_claim(page, rows, [row for row in answer.decisive if row.claim.id == name])


def _add_other(page: Page, rows: Sequence[Row]) -> None:
    claim = rows[0].claim
    with page.card(claim.title, anchor=claim.id):
        page.texts({"Published": claim.published, "Ours": "; ".join(row.outcome.ours for row in rows)})
        page.text(f"Source: {claim.source}.", is_dim=True)
        _add_claim(page, rows)


def _add_claim(page: Page, rows: Sequence[Row], decisive: Sequence[Row] = ()) -> None:
    """The picture of the row that counts most, and folded away the other ones and how all were made."""
    first = [*decisive, *decisive_rows(rows)][0]
    _add_chart(page, first)
    page.text(first.outcome.differs)
    for row in [first, *(row for row in rows if row is not first)]:
        outcome = row.outcome
        with page.folded(f"How it was made: {_where(row)}"):
            if row is not first:
                page.text(f"Ours: {outcome.ours}.")
                _add_chart(page, row)
                page.text(outcome.differs)
            page.text(f"Published workload: {row.claim.workload}. Here: {outcome.workload}. On {row.place}.")
            page.text(row.claim.method)
            _add_table(page, outcome.numbers)
            if row.prices:
                page.text(PRICES_TITLE)
                _add_table(page, row.prices)
            page.code(row.command)


def _add_table(page: Page, table: Numbers) -> None:
    columns = list(dict.fromkeys(name for numbers in table.values() for name in numbers))
    if columns:
        page.table(["", *columns], [[name, *(numbers.get(c) for c in columns)] for name, numbers in table.items()])


def _where(row: Row) -> str:
    places = {
        "engine": f"measured on {row.machine or 'an engine'}",
        "simulator": f"simulated, {row.machine}, {row.trust}",
        "scheduler": "the scheduler alone",
        "recorded": f"recorded: {row.place}",
        "arithmetic": "arithmetic",
    }
    return places[row.outcome.where] + (", quick run" if row.is_quick else "")


def _add_chart(page: Page, row: Row) -> None:
    chart = row.outcome.chart
    wide, narrow = chart.svg(), chart.svg(width=NARROW)
    where = _where(row)
    caption = f"{chart.caption} {where[0].upper()}{where[1:]}.".strip()
    page.chart(wide, caption, narrow="" if narrow == wide else narrow)


def _origin(rows: Sequence[Row]) -> Origin:
    """The origin of a page. Its rows may come from several commands, machines and versions, so each shows its own
    command."""
    versions = dict.fromkeys(row.versions.get("headway", __version__) for row in rows)
    places = dict.fromkeys(row.place for row in rows)
    command = rows[0].command if len(rows) == 1 else "headway claims (of each: see above)"
    return Origin(command, ", ".join(versions) or __version__, "fixed in each claim", " · ".join(places) or "none")
