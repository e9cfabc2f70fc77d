"""A published number, the values of claims that answer it, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from headway_lab.claims.claim import Outcome, percent, times


class Verdict(Enum):
    """How a published number compares with the measured ones."""

    CONFIRMED = "confirmed"
    MORE = "confirmed, and more"
    PART = "in part"
    LESS = "less here"
    AVOIDED = "not so here"
    QUOTED = "quoted only"
    OPEN = "not measured yet"


class Question(Enum):
    """What a reader wants to know; the numbers in their groups."""

    GAIN = "What does continuous batching bring?"
    WASTE = "What is wasted without it?"
    MEMORY = "What do paging and shared memory bring, and cost?"
    WAIT = "How long do users wait?"
    ORDER = "Whose turn is it?"
    COST = "What else makes a token faster or cheaper?"


@dataclass(frozen=True)
class Reading:
    """A value of a claim's outcome, and the published bounds that it is held against."""

    claim: str
    row: str = ""
    """The row and column of `Outcome.numbers`; the outcome's own value if none is given."""
    column: str = ""
    base: str = ""
    """A row: the value is the ratio to the one there."""
    label: str = ""
    """What the value is. Without a label, the text of the whole outcome is shown."""
    unit: str = "×"
    """"×"; "%", which with a base is a change; or any other unit."""
    low: float = math.nan
    high: float = math.nan
    """The published range; not compared if both are missing."""
    tolerance: float = 0.1
    """By what share of a bound a value may miss it."""
    is_fall: bool = False
    """Whether more of the effect is a smaller value, as of −34%."""

    def value(self, outcome: Outcome) -> float | None:
        """The value; `None` if this outcome does not have it."""
        if not self.row:
            return outcome.value if math.isfinite(outcome.value) else None
        value = outcome.numbers.get(self.row, {}).get(self.column)
        if not self.base or value is None:
            return value
        base = outcome.numbers.get(self.base, {}).get(self.column)
        if not base:
            return None
        return 100 * (value / base - 1) if self.unit == "%" else value / base

    def text(self, value: float) -> str:
        """The value with its label and unit."""
        if self.unit == "×":
            number = times(value)
        elif self.unit == "%":
            number = percent(value / 100, signed=bool(self.base))
        else:
            number = f"{value:,.0f} {self.unit}" if value >= 1000 else f"{value:.3g} {self.unit}"
        return f"{self.label}: {number}" if self.label else number

    def verdict(self, value: float) -> Verdict | None:
        """Whether the value is within the published range, or nearly so; `None` without a range."""
        low = -math.inf if math.isnan(self.low) else self.low
        high = math.inf if math.isnan(self.high) else self.high
        if math.isinf(low) and math.isinf(high):
            return None
        if low - self.tolerance * _size(low) <= value <= high + self.tolerance * _size(high):
            return Verdict.CONFIRMED
        return Verdict.MORE if (value < low) == self.is_fall else Verdict.LESS


def _size(bound: float) -> float:
    return abs(bound) if math.isfinite(bound) else 0.0


@dataclass(frozen=True)
class PublishedNumber:
    """One of the thirty."""

    number: int
    question: Question
    claim: str
    published: str
    source: str
    readings: Sequence[Reading] = ()
    """What answers it, the most important first. Empty for what is only quoted."""
    is_fault: bool = False
    """Whether the number is a fault of others, which is better not found here."""
    why: Mapping[Verdict, str] = field(default_factory=dict)
    """The reason of the verdict. Without one, the claim's own text says why it differs."""
    command: str = ""
    """The command that answers it, if that is no claim."""

    @property
    def claims(self) -> list[str]:
        """The names of the claims that answer it."""
        return list(dict.fromkeys(reading.claim for reading in self.readings))

    def verdict(self, values: Sequence[tuple[Reading, float]]) -> Verdict:
        """The verdict of all readings together."""
        if not self.readings:
            return Verdict.QUOTED
        found = {verdict for reading, value in values if (verdict := reading.verdict(value)) is not None}
        if not found:
            return Verdict.OPEN
        if found == {Verdict.LESS}:
            return Verdict.AVOIDED if self.is_fault else Verdict.LESS
        if Verdict.LESS in found:
            return Verdict.PART
        return Verdict.MORE if Verdict.MORE in found else Verdict.CONFIRMED
