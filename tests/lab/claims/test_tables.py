"""The claim tables of the documentation say what the claims give: all claims, and the simulated figures, run again.

Simulations are deterministic. A few that take a second or less run each time; HEADWAY_ALL_CLAIMS=1 runs all, those of
the H200's table with the data that HEADWAY_TEST_DATA names.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from headway_lab.claims.claim_results import Results, as_markdown
from headway_lab.claims.context import Context
from headway_lab.claims.scenarios import CLAIMS
from headway_lab.claims.testbed import SimulatedTestbed
from tests.lab.claims.figures import STALE, TIMED

RESULTS = Path(__file__).parents[3] / "docs" / "results"
QUICK, FULL = RESULTS / "cpu-quick" / "claims.md", RESULTS / "h200" / "claims.md"
SHARED: dict[Path, Context] = {}
CHEAP = [
    (QUICK, "kv-quantisation"),
    *((table, name) for table in (QUICK, FULL) for name in ("prefix-sharing", "batch-size", "weight-formats")),
]
ALL = [(table, name) for table in (QUICK, FULL) for name in CLAIMS if name not in {*TIMED, "reserved-kv"}]


def context_of(table: Path) -> Context:
    """What several claims of a table measure is measured once."""
    if table not in SHARED:
        data = os.environ.get("HEADWAY_TEST_DATA")
        has_data = table == FULL and data is not None
        SHARED[table] = Context(
            SimulatedTestbed.open(), is_quick=table == QUICK, data_dir=Path(str(data)) if has_data else None
        )
    return SHARED[table]


@pytest.mark.parametrize("table", [QUICK, FULL], ids=["quick", "H200"])
def test_every_claim_has_a_row(table: Path) -> None:
    names = re.findall(r"^\| [^|]+ \(([a-z-]+)\) \|", table.read_text(encoding="utf-8"), re.MULTILINE)
    assert names == list(CLAIMS)
    assert table.read_text(encoding="utf-8") == as_markdown(Results.load(table.parent))


@pytest.mark.parametrize(
    ("table", "name"),
    ALL if os.environ.get("HEADWAY_ALL_CLAIMS") else CHEAP,
    ids=lambda part: part if isinstance(part, str) else part.parent.name,
)
def test_simulated_figures_are_those_of_the_table(table: Path, name: str) -> None:
    [row] = [line for line in table.read_text(encoding="utf-8").splitlines() if f" ({name}) | " in line]
    simulated = re.search(r"(?:\[engine\]; |\| )([^|]*?) \[(?:simulator; |recorded\])", row)
    assert simulated is not None, name
    assert CLAIMS[name].measure(context_of(table)).ours == simulated[1].split("[engine]; ")[-1], STALE
