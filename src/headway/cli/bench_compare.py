"""`headway bench compare`: results of any of the benchmarks beside each other."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from headway.cli.output_files import check_writable, print_table
from headway.errors import ConfigError
from headway.lab.bench.compare import Comparison, Result, compare, few_requests_note, joined, read_result, unique_names
from headway.lab.charts.html_page import write_page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "results",
        nargs="+",
        type=Path,
        metavar="RESULT.json",
        help="Results, each held against the first. With --against, repeated runs of the same.",
    )
    parser.add_argument(
        "--against", nargs="+", type=Path, metavar="RESULT.json", help="Repeated runs of what they are held against."
    )
    parser.add_argument("--html", metavar="FILE", help="Write a report with plots.")
    parser.epilog = (
        "'*' marks the better one, if it is better by more than 1% and by more than the spread of repeated runs "
        "explains. Of single runs nothing is marked."
    )


def run(arguments: argparse.Namespace) -> int:
    paths: Sequence[Path] = arguments.results
    check_writable(arguments.html)
    results = [read_result(path) for path in paths]
    if arguments.against is not None:
        results = [joined([read_result(path) for path in arguments.against]), joined(results)]
        paths = [arguments.against[0], paths[0]]
    if len(results) < 2:
        raise ConfigError("There is nothing to compare with: give two results or more, or --against.")
    names = unique_names(results, paths)
    rows = compare(results)
    if not rows:
        raise ConfigError("The results have no number in common.")
    titles, cells = comparison_table(names, rows)
    print_table(titles, cells)
    notes = [marking_note(results), *filter(None, [few_requests_note(names, results)])]
    print("\n".join(notes))
    if arguments.html is not None:
        from headway.lab.bench.compare_page import compare_page

        page = compare_page(names, rows, (titles, cells), notes=notes)
        write_page(arguments, page, seed="of each result", machine="of each result")
    return 0


def comparison_table(names: Sequence[str], rows: Sequence[Comparison]) -> tuple[list[str], list[list[str]]]:
    """Values, then each one's ratio to the first."""
    titles = ["", *names, *(f"{name} / {names[0]}" for name in names[1:])]
    cells = []
    for row in rows:
        values = [
            _value(value, spread, is_best=place == row.best)
            for place, (value, spread) in enumerate(zip(row.values, row.spreads, strict=True))
        ]
        ratios = ["–" if ratio is None else f"{ratio:.3f}" for ratio in row.ratios]
        cells.append([row.key, *values, *ratios])
    return titles, cells


def marking_note(results: Sequence[Result]) -> str:
    """What the stars mean."""
    numbers = [len(result.runs) for result in results]
    if max(numbers) == 1:
        return (
            "Single runs: how far two runs of the same are apart is not known, so nothing is marked. 'bench serve "
            "--repeats 3', or several files and --against, tell."
        )
    return (
        "* the better one, by more than 1% and by more than the spread of the runs (±: one standard deviation of "
        f"{', '.join(map(str, numbers))} runs) explains"
    )


def _value(value: float | None, spread: float | None, *, is_best: bool) -> str:
    if value is None:
        return "–"
    text = f"{value:,.0f}" if value == int(value) else f"{value:,.2f}" if abs(value) >= 1 else f"{value:.4g}"
    around = "" if spread is None else f" ± {spread:,.0f}" if spread >= 10 else f" ± {spread:.2g}"
    return f"{text}{around} *" if is_best else f"{text}{around}  "
