"""Write the table of the thirty published numbers in docs/benchmarks.md from the results that are kept in docs/results.

    .venv/bin/python docs/claims_table.py            # rewrite the page (`make docs` does it, too)
    .venv/bin/python docs/claims_table.py --check    # exit with 1 if the page is stale

`headway claims --table DIR` prints the same table. To measure a claim again: `headway claims NAME --output DIR`, with a
folder of docs/results that has a claims.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

from headway_lab.claims.claim_results import JSON_NAME, Results
from headway_lab.claims.numbers_table import answers, best_rows, numbers_markdown, verdict_counts

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "docs" / "results"
BEGIN = "<!-- claims: written by docs/claims_table.py from docs/results/*/claims.json -->"
END = "<!-- end of claims -->"


def table() -> str:
    """How many numbers have which verdict, and the table."""
    rows = best_rows([Results.load(file.parent) for file in sorted(RESULTS.glob(f"*/{JSON_NAME}"))])
    counts = verdict_counts(answers(rows))
    told = ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items())
    return f"{sum(counts.values())} numbers: {told}.\n\n{numbers_markdown(rows)}"


def rewritten(page: str) -> str:
    """The page with the table as it has to be."""
    before, found_begin, rest = page.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found_begin or not found_end:
        raise ValueError(f"{PAGE.name} lacks '{BEGIN}' or '{END}'")
    return f"{before}{BEGIN}\n\n{table()}\n{END}{after}"


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    current = rewritten(page)
    if "--check" in sys.argv[1:]:
        return int(current != page)
    PAGE.write_text(current, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
