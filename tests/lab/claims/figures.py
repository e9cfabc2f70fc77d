"""What claims give on the small testbed: written down, so that a change of the scheduler shows.

    python -m tests.lab.claims.figures       # write the file anew

Simulations are deterministic. Figures that are others than those of the file say that the tables of docs/results have
others now, too, and have to be made anew: see `STALE`.
"""

from __future__ import annotations

import json
from pathlib import Path

from headway_lab.claims.claim import Outcome
from headway_lab.claims.scenarios import CLAIMS
from tests.lab.claims.small import small_context

Figures = dict[str, dict[str, float]]
"""Row → column → number, to four digits."""

FILE = Path(__file__).with_name("figures.json")
FIGURES: dict[str, Figures] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
TIMED = ("queue-depth", "predictor-price")
"""Claims with times of this machine's own clock, or of trees that another version of their library grows otherwise."""
STALE = (
    "Simulated figures have changed. Make the tables of docs/results/*/claims.md anew with the commands that stand in "
    "them, and the file of this test with 'python -m tests.lab.claims.figures'; see docs/benchmarks.md."
)


def figures_of(outcome: Outcome) -> Figures:
    return {
        row: {column: float(f"{number:.4g}") for column, number in numbers.items()}
        for row, numbers in outcome.numbers.items()
    }


def main() -> None:
    context = small_context()
    figures = {name: figures_of(claim.measure(context)) for name, claim in CLAIMS.items() if name not in TIMED}
    FILE.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
