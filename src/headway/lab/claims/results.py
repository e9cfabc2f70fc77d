"""Results in a folder: a row for each claim and place, kept as JSON. Measuring a claim again replaces its row only."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headway.errors import ConfigError
from headway.lab.claims.catalogue import CLAIMS
from headway.lab.claims.chart import Chart
from headway.lab.claims.claim import Claim, Outcome

JSON_NAME = "claims.json"
_KIND = "headway claims"
_FORMAT = 1


@dataclass(frozen=True)
class Row:
    """A claim, and what came of it."""

    claim: Claim
    outcome: Outcome
    place: str
    """Which model and machine."""
    is_quick: bool
    took_s: float
    date: str
    trust: str = ""
    """How far a simulation is to be trusted; empty for what was measured."""
    flags: str = ""
    """Of the command, beside the claim and where it runs."""
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """One row for each claim in each kind of place."""
        return f"{self.claim.id}/{self.outcome.where}"

    @property
    def command(self) -> str:
        """That gives this row again."""
        quick = " --quick" if self.is_quick else ""
        on = "" if self.outcome.where == "scheduler" else f" --on {self.outcome.where}"
        return f"headway claims {self.claim.id}{quick}{on} {self.flags}".rstrip()

    @property
    def where(self) -> str:
        """With the simulation's error."""
        return f"{self.outcome.where}; {self.trust}" if self.trust else self.outcome.where

    def as_json(self) -> dict[str, Any]:
        """The claim's text is kept beside, for people; when it is read again, the text of the catalogue counts."""
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
            }
        )

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Row | None:
        """What `as_json` made; `None` if this version has no such claim any more."""
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
        """In place of the one of the same claim and place, if there is one."""
        self._rows[row.key] = row

    @staticmethod
    def load(folder: Path) -> Results:
        """Those of a folder; none if nothing was written there yet."""
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
        """As it stands in the file."""
        return {"kind": _KIND, "format": _FORMAT, "note": self.note, "rows": [row.as_json() for row in self.rows]}


def _plain(value: Any) -> Any:
    """JSON has no word for a number that is none."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value
