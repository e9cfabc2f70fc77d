"""Prices of a run's tokens: the flag, and the prices as keys of a result, as lines and as cells of a table.

`headway.price` defines what a token costs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from headway.console.flags import positive
from headway.price import TokenPrices, Use, price_text
from headway_lab.bench.timelines import Measure, RoundTimes

PRICE_TITLES = ("price/M in", "price/M out")


def add_price_flag(parser: argparse.ArgumentParser, *, more: str = "") -> None:
    """Add the flag of a device's price; without it, nothing is priced."""
    parser.add_argument(
        "--price-per-hour",
        type=positive,
        metavar="X",
        help="What one device (a GPU; without one, the machine) costs for an hour, in any currency: shows what a "
        f"million input and output tokens cost.{more}",
    )


@dataclass(frozen=True)
class Pricing:
    """What the devices of a run cost, and how its time was divided."""

    per_hour: float
    """The price of one device for an hour."""
    num_devices: int = 1
    prompt_share: float | None = None
    """The share of the steps' time that prompt tokens took; `None` if it is not known."""

    def of(self, duration_s: float, *, num_input_tokens: int, num_output_tokens: int) -> RunPrices:
        """The prices of a run with these tokens."""
        use = Use(duration_s * self.num_devices, num_input_tokens, num_output_tokens, self.prompt_share)
        return RunPrices(self, TokenPrices.of(self.per_hour, use))


@dataclass(frozen=True)
class RunPrices:
    """The prices of a run's tokens."""

    pricing: Pricing
    tokens: TokenPrices

    def as_json(self) -> dict[str, float | None]:
        """The prices, and what they were computed from."""
        return {
            "price_per_hour": self.pricing.per_hour,
            "price_devices": self.pricing.num_devices,
            "prompt_time_share": self.pricing.prompt_share,
            **self.tokens.as_json(),
        }

    def lines(self) -> dict[str, str]:
        """The prices by the names that people read."""
        tokens = self.tokens
        return {
            "Price per 1M input tokens": price_text(tokens.input),
            "Price per 1M output tokens": price_text(tokens.output),
            "Price per 1M output tokens, all in": price_text(tokens.all_in),
        }

    def cells(self) -> list[str]:
        """The cells below `PRICE_TITLES`."""
        return [price_text(self.tokens.input), price_text(self.tokens.output)]

    @property
    def basis(self) -> str:
        """What the prices were computed from."""
        pricing = self.pricing
        each = "one device at {} an hour" if pricing.num_devices == 1 else "{1:,} devices at {0} an hour each"
        return f"Prices: {each.format(f'{pricing.per_hour:g}', pricing.num_devices)}"

    @property
    def note(self) -> str:
        """A sentence on what the prices were computed from."""
        if self.pricing.prompt_share is None:
            return f"{self.basis}; {_UNKNOWN}."
        return f"{self.basis}; prompts took {self.pricing.prompt_share:.0%} of the time of steps and pay that share."


_UNKNOWN = "how the time of steps was divided is not known, so input and output tokens cost the same"


def round_prices(times: RoundTimes, per_hour: float, num_devices: int) -> RunPrices:
    """The prices of a round in which all requests are there at once."""
    return Pricing(per_hour, num_devices, times.prompt_share).of(
        times.elapsed_s, num_input_tokens=times.num_input_tokens, num_output_tokens=times.num_output_tokens
    )


def price_measures(per_hour: float, num_devices: int) -> list[Measure]:
    """The prices of a round as columns of its table. The floor has none: how its time would be divided is not known."""

    def of(times: RoundTimes) -> TokenPrices | None:
        return None if times.prompt_share is None else round_prices(times, per_hour, num_devices).tokens

    def input_price(times: RoundTimes) -> float | None:
        return None if (prices := of(times)) is None else prices.input

    def output_price(times: RoundTimes) -> float | None:
        return None if (prices := of(times)) is None else prices.output

    titles = zip(("price_per_million_input_tokens", "price_per_million_output_tokens"), PRICE_TITLES, strict=True)
    return [
        Measure(key, title, price, is_rate=False, num_decimals=4)
        for (key, title), price in zip(titles, (input_price, output_price), strict=True)
    ]


def price_cells(prices: Sequence[RunPrices | None], place: int) -> list[str]:
    """The cells of one row of a table, whose rows have these prices; empty if no row has any."""
    if all(each is None for each in prices):
        return []
    own = prices[place]
    return ["–"] * len(PRICE_TITLES) if own is None else own.cells()


def price_titles(prices: Sequence[RunPrices | None]) -> list[str]:
    """The titles of these cells; empty if no row has any."""
    return [] if all(each is None for each in prices) else list(PRICE_TITLES)


def price_notes(prices: Sequence[RunPrices | None]) -> list[str]:
    """The sentences on the prices of a table, each once."""
    divided = {True: "prompts pay the share of the time of steps that they took", False: _UNKNOWN}
    told = [f"{each.basis}; {divided[each.tokens.is_divided]}." for each in prices if each is not None]
    return list(dict.fromkeys(told))
