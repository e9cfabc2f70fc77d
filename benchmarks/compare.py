r"""Runs benchmark commands in turn, several times, and prints their numbers side by side.

Each command prints a JSON line (as cpu_mixed.py and the scripts in peers/ do). Taking turns makes a machine that drifts
drift for all; the best round of each counts, and ratios are to the first command.

    python benchmarks/compare.py "python benchmarks/cpu_mixed.py W.json" \
        "python benchmarks/peers/llamacpp.py W.json M.gguf"
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from typing import Any

COLUMNS = ("output_tok_s", "total_tok_s", "batch1_tok_s")


def run(command: str) -> dict[str, Any]:
    """The last JSON line that the command prints."""
    finished = subprocess.run(shlex.split(command), stdout=subprocess.PIPE, text=True)
    lines = [line for line in finished.stdout.splitlines() if line.startswith("{")]
    if finished.returncode != 0 or not lines:
        sys.exit(f"failed with code {finished.returncode}: {command}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="+")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    results: list[list[dict[str, Any]]] = [[] for _ in options.commands]
    for _ in range(options.rounds):
        for command, rows in zip(options.commands, results, strict=True):
            rows.append(run(command))
            print(json.dumps(rows[-1]), flush=True)
    best = [{column: max(row[column] for row in rows) for column in COLUMNS} for rows in results]
    print(f"\n{'engine':20} {'settings':48}" + "".join(f"{column:>14} {'ratio':>6}" for column in COLUMNS))
    for rows, values in zip(results, best, strict=True):
        cells = "".join(f"{values[c]:14.1f} {best[0][c] / values[c]:6.2f}" for c in COLUMNS)
        print(f"{rows[0]['engine']:20} {rows[0]['settings'][:48]:48}{cells}")


if __name__ == "__main__":
    main()
