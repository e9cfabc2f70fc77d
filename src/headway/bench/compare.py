"""Results beside each other: for every number that has a better and a worse, who is better and by how much."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.bench.objectives import HIGHER_IS_BETTER, NEITHER_IS_BETTER, result_keys
from headway.bench.online_metrics import is_thin
from headway.errors import ConfigError

ALIKE = 0.01
"""Numbers that differ by less than this part are called equal."""
_OFFLINE_HIGHER = frozenset({"requests_per_second", "tokens_per_second", "output_tok_s", "input_tok_s"})
_OFFLINE_LOWER = frozenset({"elapsed_time", "avg_latency", "latency_s", "ms_per_token", "ms_per_token_with_prompt"})
_REPEATED = tuple(f"p50_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el"))
"""The same as the medians."""


@dataclass(frozen=True)
class Result:
    """A result file, as far as it is numbers."""

    name: str
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class Comparison:
    """One key of all results; the first of them is what the others are held against."""

    key: str
    values: Sequence[float | None]
    higher_is_better: bool | None
    """`None`: neither is."""

    @property
    def ratios(self) -> list[float | None]:
        """Of each after the first to the first."""
        first, *others = self.values
        return [value / first if value is not None and first else None for value in others]

    @property
    def best(self) -> int | None:
        """Which one is better than all others; `None` if two are about equal, or if neither is better."""
        known = [(value, place) for place, value in enumerate(self.values) if value is not None]
        if self.higher_is_better is None or len(known) < 2:
            return None
        ordered = sorted(known, reverse=self.higher_is_better)
        (first, place), (second, _) = ordered[:2]
        is_alike = math.isclose(first, second, rel_tol=ALIKE)
        return None if is_alike else place


def read_result(path: Path) -> Result:
    """`ConfigError` if it is not a JSON object with numbers."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"Cannot read the result '{path}': {error.strerror}.") from error
    except ValueError:
        raise ConfigError(f"'{path}' is not JSON.") from None
    numbers = _numbers(content) if isinstance(content, dict) else {}
    if not numbers:
        raise ConfigError(f"'{path}' is not a result of a benchmark: it has no numbers.")
    return Result(path.stem, numbers)


def compare(results: Sequence[Result]) -> list[Comparison]:
    """Every key that at least two of the results have: those of our results in their order, then others that have a
    better and a worse."""
    order = [key for key in result_keys() if key not in _REPEATED]
    others = sorted({key for result in results for key in result.numbers} - set(order) - set(_REPEATED))
    rows = []
    for key in (*order, *(key for key in others if _direction(key) is not None)):
        values = [result.numbers.get(key) for result in results]
        if sum(value is not None for value in values) > 1:
            rows.append(Comparison(key, values, _direction(key)))
    return rows


def unique_names(results: Sequence[Result], paths: Sequence[Path]) -> list[str]:
    """By what the files are called, with their folders where that is not enough."""
    names = [result.name for result in results]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def few_requests_note(names: Sequence[str], results: Sequence[Result]) -> str:
    """Of P99s that rest on too few requests; "" if none does."""
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
