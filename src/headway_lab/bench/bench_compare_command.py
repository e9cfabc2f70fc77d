"""`headway bench compare`: shows results of any of the benchmarks side by side.

A result may have several runs. Only they show how much equal runs differ by chance, and only a larger difference counts
as one: by Student's t-test of the means at 99%, with the spread of the runs of both sides. A comparison has some forty
numbers, and at 95% two of them would differ between equal servers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.console.output_files import check_writable, print_table
from headway.errors import ConfigError
from headway_lab.bench.online_metrics import HIGHER_IS_BETTER, NEITHER_IS_BETTER, is_thin, result_keys
from headway_lab.charts import Page, bar_chart
from headway_lab.charts.html_page import write_page

ALIKE = 0.01
"""Numbers that differ by less than this part are called equal."""
_T_99 = {1: 63.66, 2: 9.925, 3: 5.841, 4: 4.604, 5: 4.032, 6: 3.707, 8: 3.355, 10: 3.169, 15: 2.947, 30: 2.75}
"""Degrees of freedom → the quantile of Student's t within which 99% of all differences by chance are."""
_OFFLINE_HIGHER = frozenset({"requests_per_second", "tokens_per_second", "output_tok_s", "input_tok_s"})
_OFFLINE_LOWER = frozenset({"elapsed_time", "avg_latency", "latency_s", "ms_per_token", "ms_per_token_with_prompt"})
_REPEATED = tuple(f"p50_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el"))
"""Percentiles that equal the medians."""

CHARTED = (
    "request_throughput",
    "output_throughput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_tpot_ms",
    "p99_itl_ms",
    "p99_e2el_ms",
)


@dataclass(frozen=True)
class Result:
    """The numbers of one side of a comparison: a result file, or several of the same."""

    name: str
    runs: Sequence[Mapping[str, float]]

    @property
    def numbers(self) -> dict[str, float]:
        """The mean of each key that all runs have."""
        return {key: statistics.fmean(self.of(key)) for key in self.runs[0] if all(key in run for run in self.runs)}

    def of(self, key: str) -> list[float]:
        """The key's number in each run that has it."""
        return [run[key] for run in self.runs if key in run]


@dataclass(frozen=True)
class Comparison:
    """A comparison of one key in all results, against the first of them."""

    key: str
    runs: Sequence[Sequence[float]]
    """The numbers of each result's runs; empty if it does not have the key."""
    higher_is_better: bool | None
    """`None` if neither direction is better."""

    @property
    def values(self) -> list[float | None]:
        """The mean of each result's runs."""
        return [statistics.fmean(values) if values else None for values in self.runs]

    @property
    def spreads(self) -> list[float | None]:
        """The standard deviation of each result's runs; `None` for a single run."""
        return [statistics.stdev(values) if len(values) > 1 else None for values in self.runs]

    @property
    def ratios(self) -> list[float | None]:
        """The ratio of each result after the first to the first."""
        first, *others = self.values
        return [value / first if value is not None and first else None for value in others]

    @property
    def best(self) -> int | None:
        """The number of the result that is better than all others, beyond chance; `None` if there is none, or if
        neither direction is better."""
        known = [(value, place) for place, value in enumerate(self.values) if value is not None]
        if self.higher_is_better is None or len(known) < 2:
            return None
        (_, place), *others = sorted(known, reverse=self.higher_is_better)
        is_clear = all(are_different(self.runs[place], self.runs[other]) for _, other in others)
        return place if is_clear else None


def are_different(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether the means differ by more than 1%, and by more than equal runs would. Single runs never do."""
    freedom = len(one) + len(other) - 2
    means = statistics.fmean(one), statistics.fmean(other)
    if freedom < 1 or math.isclose(*means, rel_tol=ALIKE):
        return False
    squares = sum((value - mean) ** 2 for values, mean in zip((one, other), means, strict=True) for value in values)
    expected = math.sqrt(squares / freedom * (1 / len(one) + 1 / len(other)))
    quantile = next(t for known, t in sorted(_T_99.items(), reverse=True) if known <= freedom)
    return abs(means[0] - means[1]) > quantile * expected


def read_result(path: Path) -> Result:
    """`ConfigError` if it is not a JSON object with numbers."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"Cannot read the result '{path}': {error.strerror}.") from error
    except ValueError:
        raise ConfigError(f"'{path}' is not JSON.") from None
    runs = content.get("runs", [content]) if isinstance(content, dict) else []
    numbers = [_numbers(run) for run in runs if isinstance(run, dict)] if isinstance(runs, list) else []
    if not numbers or not all(numbers):
        raise ConfigError(f"'{path}' is not a result of a benchmark: it has no numbers.")
    return Result(path.stem, numbers)


def joined(results: Sequence[Result]) -> Result:
    """Several results of the same as one, under the first one's name without its number."""
    name = results[0].name.rstrip("0123456789-_.") or results[0].name
    return Result(name, list(itertools.chain.from_iterable(result.runs for result in results)))


def compare(results: Sequence[Result]) -> list[Comparison]:
    """Compare every key that at least two of the results have: our results' keys in their order, then others of which
    one direction is better."""
    order = [key for key in result_keys() if key not in _REPEATED]
    others = sorted({key for result in results for key in result.numbers} - set(order) - set(_REPEATED))
    rows = []
    for key in (*order, *(key for key in others if _direction(key) is not None)):
        runs = [result.of(key) for result in results]
        if sum(map(bool, runs)) > 1:
            rows.append(Comparison(key, runs, _direction(key)))
    return rows


def unique_names(results: Sequence[Result], paths: Sequence[Path]) -> list[str]:
    """Names made of the files' names, and of their folders where that is not enough."""
    names = [result.name for result in results]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def few_requests_note(names: Sequence[str], results: Sequence[Result]) -> str:
    """A note on P99s of too few requests; "" if there are none."""
    counts = {name: int(result.numbers.get("completed", math.inf)) for name, result in _counted(names, results)}
    told = ", ".join(f"{name} ({number:,})" for name, number in counts.items() if is_thin(99, number))
    return f"P99 of fewer than 100 requests, where one or two decide it: {told}." if told else ""


def _counted(names: Sequence[str], results: Sequence[Result]) -> list[tuple[str, Result]]:
    return [(name, result) for name, result in zip(names, results, strict=True) if "completed" in result.numbers]


def _numbers(content: Mapping[str, Any]) -> dict[str, float]:
    return {
        key: float(value)
        for key, value in content.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _direction(key: str) -> bool | None:
    if key in HIGHER_IS_BETTER or key in _OFFLINE_HIGHER:
        return True
    is_lower = key.endswith(("_ms", "_over_p50")) or key in ("failed", "num_preemptions") or key in _OFFLINE_LOWER
    return False if is_lower and key not in (*NEITHER_IS_BETTER, "p99_late_ms") else None


def compare_page(
    names: Sequence[str],
    rows: Sequence[Comparison],
    table: tuple[Sequence[str], Sequence[Sequence[str]]],
    *,
    notes: Sequence[str] = (),
) -> Page:
    """A page of the comparison. `table` is the one that the terminal shows, `notes` are written below it."""
    page = Page(" against ".join(names))
    bars, said = _ratios(names, rows)
    if bars:
        page.chart(
            bar_chart(f"As multiples of {names[0]}", y="ratio", bars=bars, notes=said, log_y=True, base=1.0),
            f"Bars to the right are more than with {names[0]}, bars to the left less; which of the two is better is "
            "said behind them.",
        )
    titles, cells = table
    page.table([title or "key" for title in titles], cells)
    for note in notes:
        page.text(note)
    return page


def _ratios(names: Sequence[str], rows: Sequence[Comparison]) -> tuple[dict[str, float], dict[str, str]]:
    by_key = {row.key: row for row in rows}
    bars: dict[str, float] = {}
    said: dict[str, str] = {}
    for row in (by_key[key] for key in CHARTED if key in by_key):
        for name, ratio in zip(names[1:], row.ratios, strict=True):
            if ratio:
                bar = row.key if len(names) == 2 else f"{row.key}, {name}"
                bars[bar] = ratio
                is_better = (ratio > 1) == row.higher_is_better
                said[bar] = "same" if abs(ratio - 1) < ALIKE else "better" if is_better else "worse"
    return bars, said


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
        page = compare_page(names, rows, (titles, cells), notes=notes)
        write_page(arguments, page, seed="of each result", machine="of each result")
    return 0


def comparison_table(names: Sequence[str], rows: Sequence[Comparison]) -> tuple[list[str], list[list[str]]]:
    """Titles and rows: the values, then the ratio of each to the first."""
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
