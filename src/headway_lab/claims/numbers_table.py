"""The table of the thirty published numbers: each beside what was measured and simulated, with a verdict.

It is made from results that are kept, and measures nothing. Several folders of results go into one table: of a claim's
rows on the same kind of machine, a full run counts before a quick one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway_lab.claims.claim import sentences
from headway_lab.claims.claim_results import Results, Row, markdown_line
from headway_lab.claims.published_number import PublishedNumber, Reading, Verdict
from headway_lab.claims.published_numbers import NUMBERS
from headway_lab.claims.scenarios import CLAIMS

ON_A_CPU = "On a CPU alone: not measured on a GPU yet."
HEADERS = ("#", "claim", "published", "ours: measured", "ours: simulated", "confirmed?", "command")


@dataclass(frozen=True)
class Answer:
    """A published number with the rows that answer it."""

    published: PublishedNumber
    verdict: Verdict
    why: str
    rows: Sequence[Row] = ()
    decisive: Sequence[Row] = ()
    """For each claim the row that the verdict rests on."""

    def texts(self, *, is_simulated: bool) -> list[str]:
        """Each measured, or each simulated, value with its machine."""
        return [
            f"{text} ({_remark(row)})" if _remark(row) else text
            for row in self.rows
            if (row.outcome.where == "simulator") == is_simulated and (text := self._text(row))
        ]

    @property
    def commands(self) -> list[str]:
        """The commands that give again what the verdict rests on, and those of claims that have not been measured."""
        measured = {row.claim.id for row in self.rows}
        missing = [
            f"headway claims {name}" for name in self.published.claims if name in CLAIMS and name not in measured
        ]
        given = [self.published.command] if self.published.command else []
        return [*given, *dict.fromkeys(row.command for row in self.decisive), *missing]

    def _text(self, row: Row) -> str:
        readings = [one for one in self.published.readings if one.claim == row.claim.id]
        if not any(one.label for one in readings):
            return row.outcome.ours
        return ", ".join(one.text(value) for one, value in _values(readings, row))


def _remark(row: Row) -> str:
    """The machine of a measured row, and whether the run was a quick one or an earlier one."""
    is_recorded = row.outcome.where == "recorded"
    machine = [row.machine] if is_recorded or row.outcome.where == "engine" else []
    kind = ["recorded"] if is_recorded else ["quick"] if row.is_quick else []
    return ", ".join([*machine, *kind])


def _values(readings: Sequence[Reading], row: Row) -> list[tuple[Reading, float]]:
    return [(one, value) for one in readings if (value := one.value(row.outcome)) is not None]


def best_rows(kept: Sequence[Results]) -> list[Row]:
    """The rows of all results: of several of one claim on one kind of machine only the best, in the order of claims."""
    best: dict[tuple[str, str, str], Row] = {}
    for row in sorted(
        (row for results in kept for row in results.rows), key=lambda one: (one.is_quick, not one.is_gpu)
    ):
        best.setdefault((row.claim.id, row.outcome.where, row.machine), row)
    order = {row.key: place for place, row in enumerate(Results({row.key: row for row in best.values()}).rows)}
    return sorted(best.values(), key=lambda row: (order[row.key], not row.is_gpu))


def answers(rows: Sequence[Row]) -> list[Answer]:
    """The thirty numbers, answered by these rows as far as they can be."""
    return [_answer(number, [row for row in rows if row.claim.id in number.claims]) for number in NUMBERS]


def _answer(number: PublishedNumber, rows: Sequence[Row]) -> Answer:
    decisive = decisive_rows([row for row in rows if _values(_of_claim(number, row), row)])
    values = [pair for row in decisive for pair in _values(_of_claim(number, row), row)]
    verdict = number.verdict(values)
    return Answer(number, verdict, _why(number, verdict, decisive), rows, decisive)


def _of_claim(number: PublishedNumber, row: Row) -> list[Reading]:
    return [reading for reading in number.readings if reading.claim == row.claim.id]


def decisive_rows(rows: Sequence[Row]) -> list[Row]:
    """For each claim the row that the verdict rests on: on a GPU, measured before simulated; else on a CPU."""
    chosen: dict[str, Row] = {}
    for row in sorted(rows, key=lambda one: (not one.is_gpu, one.outcome.where == "simulator")):
        chosen.setdefault(row.claim.id, row)
    return list(chosen.values())


def _why(number: PublishedNumber, verdict: Verdict, decisive: Sequence[Row]) -> str:
    """The reason that goes with this verdict, or else what the first claim itself says. A verdict that rests on a CPU
    says so."""
    why = number.why.get(verdict) or (_first_sentence(decisive[0].outcome.differs) if decisive else "")
    machines = [row for row in decisive if row.machine]
    return sentences([why, ON_A_CPU if machines and not any(row.is_gpu for row in machines) else ""])


def _first_sentence(text: str) -> str:
    end = text.find(". ")
    return text if end < 0 else text[: end + 1]


def numbers_markdown(rows: Sequence[Row]) -> str:
    """The table as Markdown."""
    lines = [markdown_line(HEADERS), markdown_line(["--:", *["---"] * (len(HEADERS) - 1)])]
    return "\n".join([*lines, *(markdown_line(_cells(answer)) for answer in answers(rows))]) + "\n"


def _cells(answer: Answer) -> list[str]:
    number = answer.published
    return [
        str(number.number),
        number.claim,
        f"{number.published}. {number.source}",
        "; ".join(answer.texts(is_simulated=False)) or "–",
        "; ".join(answer.texts(is_simulated=True)) or "–",
        f"**{answer.verdict.value}**{': ' if answer.why else ''}{answer.why}",
        ", ".join(f"`{command}`" for command in answer.commands) or "–",
    ]


def verdict_counts(found: Sequence[Answer]) -> dict[Verdict, int]:
    """How many of the numbers have each verdict, in the order of verdicts."""
    counts = {verdict: sum(answer.verdict is verdict for answer in found) for verdict in Verdict}
    return {verdict: count for verdict, count in counts.items() if count}
