"""Measuring claims one after the other, on an engine that is loaded once, when the first claim needs it; and results in
a folder: a row for each claim and testbed, kept as JSON, shown as Markdown and as a page.

Measuring a claim again replaces its row only.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal

from headway import __version__
from headway.errors import ConfigError
from headway_lab.bench.environment import versions
from headway_lab.charts import Origin, Page
from headway_lab.claims.claim import Chart, Numbers, Outcome
from headway_lab.claims.context import Bar, Claim, Context, no_bar
from headway_lab.claims.run_prices import RunTable
from headway_lab.claims.scenarios import CLAIMS
from headway_lab.claims.testbed import EngineTestbed, Load, SimulatedTestbed, Testbed

JSON_NAME = "claims.json"
_KIND = "headway claims"
_FORMAT = 1


PRICES_TITLE = "What a million tokens cost, in the currency of --price-per-hour:"

HEADERS = ("claim", "source", "workload", "published", "ours", "where it differs and why")


@dataclass(frozen=True)
class Row:
    """A claim and its outcome."""

    claim: Claim
    outcome: Outcome
    place: str
    """The model and the machine."""
    is_quick: bool
    took_s: float
    date: str
    trust: str = ""
    """How large the errors of a simulation may be; empty for what was measured."""
    flags: str = ""
    """Flags of the command, besides the claim and where it runs."""
    versions: Mapping[str, str] = field(default_factory=dict)
    prices: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """What tokens cost in each run of the claim; empty without the price of a device."""

    @property
    def key(self) -> str:
        """The claim and the kind of place, of which there is one row each."""
        return f"{self.claim.id}/{self.outcome.where}"

    @property
    def command(self) -> str:
        """The command that gives this row again."""
        quick = " --quick" if self.is_quick else ""
        on = "" if self.outcome.where == "scheduler" else f" --on {self.outcome.where}"
        return f"headway claims {self.claim.id}{quick}{on} {self.flags}".rstrip()

    @property
    def where(self) -> str:
        """Where the row comes from, with the simulation's error."""
        return f"{self.outcome.where}; {self.trust}" if self.trust else self.outcome.where

    def as_json(self) -> dict[str, Any]:
        """The row with the claim's text, which is for people; when it is read again, the catalogue's text counts."""
        claim = {
            name: getattr(self.claim, name) for name in ("id", "title", "published", "source", "workload", "method")
        }
        outcome = {**asdict(self.outcome), "chart": self.outcome.chart.as_json()}
        return _plain(
            {
                "claim": claim,
                "outcome": outcome,
                "place": self.place,
                "trust": self.trust,
                "flags": self.flags,
                "command": self.command,
                "is_quick": self.is_quick,
                "took_s": round(self.took_s, 1),
                "date": self.date,
                "versions": dict(self.versions),
                **({"prices": dict(self.prices)} if self.prices else {}),
            }
        )

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Row | None:
        """Read what `as_json` made; `None` if this version has no such claim any more."""
        claim = CLAIMS.get(document["claim"]["id"])
        if claim is None:
            return None
        outcome = {**document["outcome"], "chart": Chart.from_json(document["outcome"]["chart"])}
        if outcome["value"] is None:
            outcome["value"] = math.nan
        return Row(
            claim,
            Outcome(**outcome),
            document["place"],
            document["is_quick"],
            document["took_s"],
            document["date"],
            document["trust"],
            document["flags"],
            document["versions"],
            document.get("prices", {}),
        )


class Results:
    """Rows in the order of the catalogue."""

    def __init__(self, rows: Mapping[str, Row] | None = None, note: str = "") -> None:
        self._rows = dict(rows or {})
        self.note = note

    @property
    def rows(self) -> list[Row]:
        order = list(CLAIMS)
        return sorted(self._rows.values(), key=lambda row: (order.index(row.claim.id), row.outcome.where))

    @property
    def by_claim(self) -> list[list[Row]]:
        """The rows of each claim together: the engine's, then the simulator's."""
        return [list(group) for _, group in itertools.groupby(self.rows, key=lambda row: row.claim.id)]

    def put(self, row: Row) -> None:
        """Add a row, in place of the one of the same claim and place if there is one."""
        self._rows[row.key] = row

    @staticmethod
    def load(folder: Path) -> Results:
        """Read the results of a folder; empty if it has none yet."""
        path = folder / JSON_NAME
        if not path.exists():
            return Results()
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if document.get("kind") != _KIND or document.get("format") != _FORMAT:
                raise ValueError("it is something else, or of another version")
            rows = [row for entry in document["rows"] if (row := Row.from_json(entry)) is not None]
            return Results({row.key: row for row in rows}, document.get("note", ""))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"The results in '{path}' cannot be read ({error}); move them away to begin anew."
            ) from error

    def as_json(self) -> dict[str, Any]:
        """The content of the file."""
        return {"kind": _KIND, "format": _FORMAT, "note": self.note, "rows": [row.as_json() for row in self.rows]}


def _plain(value: Any) -> Any:
    """The value, or `None` for a number that is not finite, which JSON cannot write."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value


def claim_cells(group: Sequence[Row]) -> list[str]:
    """One row of the table: a claim, with its measured and simulated values."""
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
    """The table, and below it where each row was measured and the command that gives it again."""
    lines = ["# Published claims, measured again", ""]
    if results.note:
        lines += [results.note, ""]
    lines += [_line(HEADERS), _line(["---"] * len(HEADERS))]
    lines += [_line(claim_cells(group)) for group in results.by_claim]
    lines += ["", "## Where and how", ""]
    lines += [_line(["claim", "measured on", "how", "date", "took", "command"]), _line(["---"] * 6)]
    lines += [_line(_origin(row)) for row in results.rows]
    for row in results.rows:
        lines += ["", f"## {row.claim.title} ({row.outcome.where})", "", *_numbers(row.outcome.numbers)]
        if row.prices:
            lines += ["", PRICES_TITLE, "", *_numbers(row.prices)]
    return "\n".join(lines) + "\n"


def _origin(row: Row) -> list[str]:
    return [row.claim.id, row.place, row.claim.method, row.date, f"{row.took_s:.0f} s", f"`{row.command}`"]


def _numbers(table: Numbers) -> list[str]:
    columns = list(dict.fromkeys(name for numbers in table.values() for name in numbers))
    lines = [_line(["", *columns]), _line(["---", *["--:"] * len(columns)])]
    for name, numbers in table.items():
        lines.append(_line([name, *(_number(numbers.get(column)) for column in columns)]))
    return lines


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _line(cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def as_page(results: Results) -> Page:
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
    page.made_by(_page_origin(rows))
    return page


def _cells(group: Sequence[Row]) -> list[str | None]:
    """A claim with the value measured on the engine or of the scheduler alone, beside the simulated one."""
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
        _table(page, outcome.numbers)
        if row.prices:
            page.text(PRICES_TITLE)
            _table(page, row.prices)
        page.text(f"Where it differs and why: {outcome.differs}")
        page.text(f"Work: {outcome.workload}. On {row.place}.")
        page.code(row.command)


def _table(page: Page, numbers: Numbers) -> None:
    columns = list(dict.fromkeys(name for row in numbers.values() for name in row))
    if columns:
        page.table(["", *columns], [[name, *(row.get(c) for c in columns)] for name, row in numbers.items()])


def _page_origin(rows: Sequence[Row]) -> Origin:
    """The origin of a page. Its rows may come from several commands, machines and versions, so each shows its own
    command."""
    versions = dict.fromkeys(row.versions.get("headway", __version__) for row in rows)
    places = dict.fromkeys(row.place for row in rows)
    command = rows[0].command if len(rows) == 1 else "headway claims (of each: see above)"
    return Origin(command, ", ".join(versions) or __version__, "fixed in each claim", " · ".join(places) or "none")


On = Literal["auto", "engine", "simulator", "both"]
"""both: where auto runs it, and in the simulator as well."""


@dataclass
class Session:
    load: Load
    model_name: str
    has_gpu: bool
    calibration: str | None = None
    is_quick: bool = False
    on: On = "auto"
    data_dir: Path | None = None
    flags: str = ""
    """Flags of the command, as people would type them again."""
    price_per_hour: float | None = None
    """The price of a device."""
    bar: Bar = no_bar
    say: Callable[[str], object] = lambda text: None

    def __post_init__(self) -> None:
        if self.data_dir is not None and not self.data_dir.is_dir():
            raise ConfigError(f"There is no data directory '{self.data_dir}'.")
        self._engine: EngineTestbed | None = None
        self._simulated: SimulatedTestbed | None = None
        self._shared: dict[Any, Any] = {}

    def measure(self, claim: Claim) -> list[Row]:
        """Measure one claim, where it was asked for or else where it is measured best."""
        return [self._measure(claim, testbed) for testbed in self._testbeds(claim)]

    def _measure(self, claim: Claim, testbed: Testbed) -> Row:
        context = Context(
            testbed,
            is_quick=self.is_quick,
            data_dir=self.data_dir,
            bar=self.bar,
            say=lambda text: self.say(f"{claim.id}: {text}"),
            shared=self._shared,
            prices=RunTable(self.price_per_hour),
        )
        started = time.perf_counter()
        outcome = claim.measure(context)
        on = testbed.description if outcome.where != "scheduler" else "the scheduler alone, on this host"
        return Row(
            claim,
            outcome,
            on,
            self.is_quick,
            time.perf_counter() - started,
            date.today().isoformat(),
            trust=testbed.trust if outcome.where == "simulator" else "",
            flags=self.flags,
            versions=versions(),
            prices=context.prices.rows,
        )

    def close(self) -> None:
        """Free the engine's memory."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _testbeds(self, claim: Claim) -> list[Testbed]:
        if not self._is_on_engine(claim):
            return [self._simulated_testbed()]
        return [self._engine_testbed(), self._simulated_testbed()] if self.on == "both" else [self._engine_testbed()]

    def _is_on_engine(self, claim: Claim) -> bool:
        if claim.engine == "never" or self.on == "simulator":
            return False
        if self.on == "engine" or claim.engine == "always":
            return True
        return claim.engine == "gpu" and self.has_gpu and not self.is_quick

    def _engine_testbed(self) -> EngineTestbed:
        if self._engine is None:
            self.say(f"loading {self.model_name}")
            self._engine = EngineTestbed(self.load, name=self.model_name)
        return self._engine

    def _simulated_testbed(self) -> SimulatedTestbed:
        if self._simulated is None:
            self._simulated = SimulatedTestbed.open(self.calibration)
        return self._simulated


def measure_all(session: Session, claims: Sequence[Claim], each: Callable[[Row], object]) -> None:
    """Measure the claims in this order; `each` is called with every row as soon as it is there."""
    try:
        for claim in claims:
            for row in session.measure(claim):
                each(row)
    finally:
        session.close()
