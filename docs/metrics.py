"""Write the table of docs/metrics.md from the declarations of the numbers that an engine counts.

.venv/bin/python docs/metrics.py            # rewrite the page (`make docs` does it, too)
.venv/bin/python docs/metrics.py --check    # exit with 1 if the page is stale
"""

from __future__ import annotations

import sys
from pathlib import Path

from written_part import WrittenPart

from headway.counters import Counter
from headway.wire.engine_stats import EngineStats

PART = WrittenPart(
    Path(__file__).resolve().parent / "metrics.md",
    "<!-- numbers: written by docs/metrics.py from their declarations -->",
    "<!-- end of numbers -->",
)


def listing() -> str:
    """A row for each number, in the order of the records."""
    rows = []
    for declared, _ in EngineStats().metrics():
        is_counter = isinstance(declared, Counter)
        name = f"`{declared.metric}_total`" if is_counter else f"`{declared.metric}`"
        labels = [declared.label] if isinstance(declared, Counter) and declared.label else []
        labels += ["also of each `replica`"] if declared.by_replica else []
        kind = ", ".join(["counter" if is_counter else "gauge", *labels])
        rows.append(f"| {name} | {kind} | {declared.help} |")
    return "\n".join(["| name | kind | what |", "|---|---|---|", *rows])


if __name__ == "__main__":
    sys.exit(PART.main(listing()))
