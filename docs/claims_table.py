"""Write the table of the thirty published numbers in docs/benchmarks.md from the results that are kept in docs/results.

    .venv/bin/python docs/claims_table.py            # rewrite the page (`make docs` does it, too)
    .venv/bin/python docs/claims_table.py --check    # exit with 1 if the page is stale

`headway claims --table DIR` prints the same table. To measure a claim again: `headway claims NAME --output DIR`, with a
folder of docs/results that has a claims.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

from written_part import WrittenPart

from headway_lab.claims.claim_results import JSON_NAME, Results
from headway_lab.claims.numbers_table import answers, best_rows, numbers_markdown, verdict_counts

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
PART = WrittenPart(
    page=ROOT / "docs" / "benchmarks.md",
    begin="<!-- claims: written by docs/claims_table.py from docs/results/*/claims.json -->",
    end="<!-- end of claims -->",
)


def table() -> str:
    """How many numbers have which verdict, and the table."""
    rows = best_rows([Results.load(file.parent) for file in sorted(RESULTS.glob(f"*/{JSON_NAME}"))])
    counts = verdict_counts(answers(rows))
    told = ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items())
    return f"{sum(counts.values())} numbers: {told}.\n\n{numbers_markdown(rows).rstrip()}"


if __name__ == "__main__":
    sys.exit(PART.main(table()))
