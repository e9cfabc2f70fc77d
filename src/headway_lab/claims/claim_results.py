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

from headway.errors import ConfigError
from headway_lab.bench.environment import versions
from headway_lab.claims.claim import Chart, Numbers, Outcome
from headway_lab.claims.context import Bar, Claim, Context, Infeasible, no_bar
from headway_lab.claims.run_prices import RunTable
from headway_lab.claims.scenarios import CLAIMS
from headway_lab.claims.testbed import EngineTestbed, Load, SimulatedTestbed, Testbed

JSON_NAME = "claims.json"
_KIND = "headway claims"
_FORMAT = 2


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
    machine: str = ""
    """The machine, real or simulated; empty if the claim is about none."""
    is_gpu: bool = False

    @property
    def key(self) -> str:
        """The claim and the kind of place, of which there is one row each."""
        return f"{self.claim.id}/{self.outcome.where}"

    @property
    def command(self) -> str:
        """The command that gives this row again."""
        quick = " --quick" if self.is_quick else ""
        on = {"scheduler": "", "arithmetic": "", "recorded": " --on simulator"}.get(
            self.outcome.where, f" --on {self.outcome.where}"
        )
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
                "machine": self.machine,
                "is_gpu": self.is_gpu,
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
            document["machine"],
            document["is_gpu"],
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
    """The value, with six digits of its numbers, or `None` for a number that is not finite, which JSON cannot write."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
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
    lines += [markdown_line(HEADERS), markdown_line(["---"] * len(HEADERS))]
    lines += [markdown_line(claim_cells(group)) for group in results.by_claim]
    lines += ["", "## Where and how", ""]
    lines += [markdown_line(["claim", "measured on", "how", "date", "took", "command"]), markdown_line(["---"] * 6)]
    lines += [markdown_line(_origin(row)) for row in results.rows]
    for row in results.rows:
        lines += ["", f"## {row.claim.title} ({row.outcome.where})", "", *_numbers(row.outcome.numbers)]
        if row.prices:
            lines += ["", PRICES_TITLE, "", *_numbers(row.prices)]
    return "\n".join(lines) + "\n"


def _origin(row: Row) -> list[str]:
    return [row.claim.id, row.place, row.claim.method, row.date, f"{row.took_s:.0f} s", f"`{row.command}`"]


def _numbers(table: Numbers) -> list[str]:
    columns = list(dict.fromkeys(name for numbers in table.values() for name in numbers))
    lines = [markdown_line(["", *columns]), markdown_line(["---", *["--:"] * len(columns)])]
    for name, numbers in table.items():
        lines.append(markdown_line([name, *(_number(numbers.get(column)) for column in columns)]))
    return lines


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def markdown_line(cells: Sequence[str]) -> str:
    """A row of a table in Markdown."""
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


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
        """Measure one claim, where it was asked for or else where it is measured best. A claim that the engine cannot
        measure is simulated, unless only the engine was asked for; then there is no row."""
        testbeds, rows = self._testbeds(claim), []
        for testbed in testbeds:
            try:
                rows.append(self._measure(claim, testbed))
            except Infeasible as reason:
                self.say(f"{claim.id}: not measured on the {testbed.where}: {reason}")
                if self.on == "auto" and testbed.where == "engine":
                    rows.append(self._measure(claim, self._simulated_testbed()))
        return rows

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
        is_elsewhere = outcome.where in ("scheduler", "arithmetic")
        return Row(
            claim,
            outcome,
            outcome.place or testbed.description,
            self.is_quick,
            time.perf_counter() - started,
            date.today().isoformat(),
            trust=testbed.trust if outcome.where == "simulator" else "",
            flags=self.flags,
            versions=versions(),
            prices=context.prices.rows,
            machine="" if is_elsewhere else testbed.machine,
            is_gpu=not is_elsewhere and testbed.is_gpu,
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
