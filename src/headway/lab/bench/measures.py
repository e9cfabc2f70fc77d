"""What is told of a round: the numbers, each with the floor it is held against and how far above it the best round is.

A ratio is always of times, measured over floor, whether the number is a time or a rate: 1 is the floor, 2 takes twice
as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headway.lab.bench.times import RoundTimes


@dataclass(frozen=True)
class Measure:
    """One number of a round."""

    key: str
    title: str
    of: Callable[[RoundTimes], float | None]
    """Applied to the floor's times it gives the floor of the number."""
    is_rate: bool
    """More is better."""
    num_decimals: int

    def ratio(self, times: RoundTimes, floor: RoundTimes) -> float | None:
        """How many times as long as the floor."""
        value, least = self.of(times), self.of(floor)
        if not value or not least:
            return None
        return least / value if self.is_rate else value / least

    def text(self, times: RoundTimes) -> str:
        """The number as people read it."""
        value = self.of(times)
        return "–" if value is None else f"{value:,.{self.num_decimals}f}"


def _pace_ms(times: RoundTimes) -> float | None:
    return None if times.pace_s is None else 1000 * times.pace_s


OUTPUT_RATE = Measure("output_tok_s", "output tok/s", lambda times: times.output_tok_s, True, 1)

LATENCY_MEASURES: Sequence[Measure] = (
    Measure("latency_s", "latency s", lambda times: times.elapsed_s, False, 4),
    Measure("ms_per_token", "ms/token", _pace_ms, False, 3),
    OUTPUT_RATE,
)
"""`ms/token` is the pace of decoding: from the first to the last token, over the tokens after the first."""

THROUGHPUT_MEASURES: Sequence[Measure] = (
    Measure("elapsed_s", "elapsed s", lambda times: times.elapsed_s, False, 3),
    OUTPUT_RATE,
    Measure("input_tok_s", "input tok/s", lambda times: times.input_tok_s, True, 1),
    Measure("requests_s", "requests/s", lambda times: times.requests_s, True, 2),
)


def best_of(rounds: Sequence[RoundTimes]) -> RoundTimes:
    """The fastest round."""
    return min(rounds, key=lambda times: times.elapsed_s)


def values_json(measures: Sequence[Measure], times: RoundTimes) -> dict[str, float | None]:
    """The numbers of one round, or of the floor, by key."""
    return {measure.key: measure.of(times) for measure in measures}


def ratios_json(measures: Sequence[Measure], times: RoundTimes, floor: RoundTimes) -> dict[str, float | None]:
    """The ratios of one round, by key."""
    return {measure.key: measure.ratio(times, floor) for measure in measures}
