"""How long things are: tokens of a prompt or an answer, turns of a conversation, seconds between turns; and limits.

Each distribution draws one number from a generator. With a `cap`, a value above it is drawn again, so that the cap
itself is not too frequent.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headway.errors import ConfigError
from headway_lab.workload.input_files import (
    MOST_SECONDS,
    MOST_TOKENS,
    DataFile,
    FileVersion,
    OptionsTable,
    number_of,
)

KINDS = ("fixed", "uniform", "exponential", "lognormal", "zipf", "column")
_MOST_ZIPF_VALUES = 1_000_000
_MOST_SIGMA = 10.0
"""The largest sigma of a logarithm: one standard deviation is then a factor of 22,000."""
_MOST_EXPONENT = 100.0

_KEYS = ("min_input", "max_input", "min_output", "max_output", "max_total")


class Distribution(Protocol):
    """A distribution of numbers; the same generator draws the same numbers."""

    def draw(self, rng: random.Random) -> float: ...


@dataclass(frozen=True)
class Fixed:
    value: float

    def draw(self, rng: random.Random) -> float:
        return self.value


@dataclass(frozen=True)
class Uniform:
    """A uniform distribution; both ends are included."""

    low: float
    high: float
    is_whole: bool = True

    def draw(self, rng: random.Random) -> float:
        return rng.randint(int(self.low), int(self.high)) if self.is_whole else rng.uniform(self.low, self.high)


@dataclass(frozen=True)
class Exponential:
    mean: float
    """The mean before the cap."""
    cap: float = math.inf

    def draw(self, rng: random.Random) -> float:
        while (value := rng.expovariate(1.0) * self.mean) > self.cap:
            pass
        return value


@dataclass(frozen=True)
class Lognormal:
    median: float
    sigma: float
    """The standard deviation of the logarithm."""
    cap: float = math.inf

    @classmethod
    def of_mean(cls, mean: float, sigma: float, cap: float = math.inf) -> Lognormal:
        """The distribution with this mean, before the cap."""
        return cls(mean / math.exp(sigma * sigma / 2), sigma, cap)

    def draw(self, rng: random.Random) -> float:
        while (value := self.median * math.exp(self.sigma * rng.gauss(0.0, 1.0))) > self.cap:
            pass
        return value


@dataclass(frozen=True)
class Zipf:
    """A whole number k from low to high, with a probability in proportion to 1 / k**exponent. Heights are relative to
    the first, so that not all of them are too small to distinguish from 0."""

    exponent: float
    low: int
    high: int

    def draw(self, rng: random.Random) -> float:
        heights = _zipf_heights(self.exponent, self.low, self.high)
        return self.low + bisect.bisect_right(heights, rng.random() * heights[-1], hi=len(heights) - 1)


@functools.lru_cache(maxsize=8)
def _zipf_heights(exponent: float, low: int, high: int) -> Sequence[float]:
    return list(itertools.accumulate((value / low) ** -exponent for value in range(low, high + 1)))


@dataclass(frozen=True)
class Column:
    """Values of a column of a file, each as likely as it is frequent there, independent of the rest of its row."""

    file: DataFile
    name: str

    def draw(self, rng: random.Random) -> float:
        return rng.choice(_column_values(self.file, self.file.version(), self.name))


@functools.lru_cache(maxsize=8)
def _column_values(file: DataFile, version: FileVersion, name: str) -> Sequence[float]:
    values = [number_of(row, name, file=file, line=line, most=MOST_TOKENS) for line, row in file.rows()]
    if not values:
        raise file.fail(1, "there are no rows")
    return values


def draw_length(distribution: Distribution, rng: random.Random) -> int:
    """Draw a number of tokens or of turns: whole, and at least one."""
    return max(1, round(distribution.draw(rng)))


def check_tokens(count: int, what: str) -> int:
    """Check a number of tokens of one prompt or one answer before memory is taken for them; `ConfigError` if it is
    unreasonably large."""
    if count > MOST_TOKENS:
        raise ConfigError(
            f"{what} of {count:,} tokens was drawn, and {MOST_TOKENS:,} is the most: give its distribution a 'cap', or "
            "the workload [limits]."
        )
    return count


def read_distribution(value: object, where: str, *, folders: tuple[Path, ...], is_time: bool = False) -> Distribution:
    """Read a distribution from a number, which is then always drawn, or from a table with its `kind`. `is_time`: values
    are seconds, from 0 on, and not tokens or turns, which are whole and at least one."""
    bounds = _SECONDS if is_time else _COUNTS
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _read_fixed(OptionsTable({"kind": "fixed", "value": value}, where), folders, bounds)
    table = OptionsTable(value, where)
    kind = table.choice("kind", KINDS)
    return _READERS[kind](table, folders, bounds)


@dataclass(frozen=True)
class _Bounds:
    least: float
    most: float
    is_whole: bool


_COUNTS = _Bounds(1.0, MOST_TOKENS, is_whole=True)
_SECONDS = _Bounds(0.0, MOST_SECONDS, is_whole=False)


def _read_fixed(table: OptionsTable, folders: Any, bounds: _Bounds) -> Distribution:
    table.only("kind", "value")
    return Fixed(table.number("value", least=bounds.least, is_above=False, most=bounds.most))


def _read_uniform(table: OptionsTable, folders: Any, bounds: _Bounds) -> Distribution:
    table.only("kind", "low", "high")
    if bounds.is_whole:
        low: float = table.whole("low", least=int(bounds.least), most=int(bounds.most))
        high: float = table.whole("high", least=int(low), most=int(bounds.most))
    else:
        low = table.number("low", least=bounds.least, is_above=False, most=bounds.most)
        high = table.number("high", least=low, is_above=False, most=bounds.most)
    return Uniform(low, high, bounds.is_whole)


def _read_exponential(table: OptionsTable, folders: Any, bounds: _Bounds) -> Distribution:
    mean = table.only("kind", "mean", "cap").number("mean", most=bounds.most)
    return Exponential(mean, _cap(table, mean, bounds))


def _read_lognormal(table: OptionsTable, folders: Any, bounds: _Bounds) -> Distribution:
    table.only("kind", "median", "mean", "sigma", "cap")
    sigma = table.number("sigma", is_above=False, most=_MOST_SIGMA)
    if ("median" in table) == ("mean" in table):
        table.fail("a lognormal distribution has either a 'median' or a 'mean'")
    if "median" in table:
        found = Lognormal(table.number("median", most=bounds.most), sigma)
    else:
        found = Lognormal.of_mean(table.number("mean", most=bounds.most), sigma)
    return Lognormal(found.median, sigma, _cap(table, found.median, bounds))


def _read_zipf(table: OptionsTable, folders: Any, bounds: _Bounds) -> Distribution:
    table.only("kind", "exponent", "low", "high")
    low = table.whole("low", 1, most=int(bounds.most))
    high = table.whole("high", least=low, most=int(bounds.most))
    if high - low >= _MOST_ZIPF_VALUES:
        table.fail(f"high may be at most {_MOST_ZIPF_VALUES - 1:,} above low")
    return Zipf(table.number("exponent", most=_MOST_EXPONENT), low, high)


def _read_column(table: OptionsTable, folders: tuple[Path, ...], bounds: _Bounds) -> Distribution:
    table.only("kind", "file", "column")
    return Column(DataFile(table.text("file"), folders), table.text("column"))


def _cap(table: OptionsTable, middle: float, bounds: _Bounds) -> float:
    """Read a cap. One below the middle is refused, since it would throw away most of what is drawn."""
    return table.number("cap", least=middle, is_above=False, most=bounds.most) if "cap" in table else math.inf


_READERS = {
    "fixed": _read_fixed,
    "uniform": _read_uniform,
    "exponential": _read_exponential,
    "lognormal": _read_lognormal,
    "zipf": _read_zipf,
    "column": _read_column,
}


@dataclass(frozen=True)
class Limits:
    """Limits in tokens; None: no limit."""

    min_input: int = 1
    max_input: int | None = None
    min_output: int = 1
    max_output: int | None = None
    max_total: int | None = None
    """The limit of prompt and answer together. The prompt is shortened to keep it, but the answer leaves it at least
    one token."""

    def output(self, length: int) -> int:
        """The length of an answer, clamped."""
        length = _clamped(length, self.min_output, self.max_output)
        length = length if self.max_total is None else max(1, min(length, self.max_total - 1))
        return check_tokens(length, "An answer")

    def input(self, length: int, num_output_tokens: int) -> int:
        """The length of a prompt, clamped, before an answer that is clamped already."""
        length = _clamped(length, self.min_input, self.max_input)
        return length if self.max_total is None else max(1, min(length, self.max_total - num_output_tokens))

    def most_input(self, num_output_tokens: int) -> int | None:
        """The longest prompt before an answer of this length."""
        room = None if self.max_total is None else self.max_total - num_output_tokens
        return min((bound for bound in (self.max_input, room) if bound is not None), default=None)

    def cut(self, prompt: list[int], num_output_tokens: int) -> list[int]:
        """The prompt without the end that does not fit."""
        most = self.most_input(num_output_tokens)
        return prompt if most is None else prompt[: max(1, most)]


def _clamped(length: int, least: int, most: int | None) -> int:
    return max(least, length if most is None else min(length, most))


def read_limits(table: OptionsTable) -> Limits:
    """Read the table `[limits]`."""
    table.only(*_KEYS)
    values = {key: table.whole(key, least=2 if key == "max_total" else 1) for key in _KEYS if key in table}
    for side in ("input", "output"):
        if values.get(f"max_{side}", values.get(f"min_{side}", 1)) < values.get(f"min_{side}", 1):
            table.fail(f"max_{side} must not be below min_{side}")
    return Limits(**values)
