"""The price of tokens, from the price of a device for an hour. Every command and the server's page use this definition.

    price       = price of an hour × hours × devices, whether the devices computed or waited for requests
    input       = price × the share of the steps' time that prompt tokens took ÷ input tokens
    output      = price × the rest                                             ÷ output tokens
    blended     = price                                                        ÷ (input tokens + output tokens)
    all in      = price                                                        ÷ output tokens

`headway.core.token_time` divides the time of steps. If it is not known how the time was divided, as with a server that
does not report it, an input token and an output token both cost the blended price. Input tokens are all tokens of the
prompts, those from the prefix cache too, which makes them cheaper. All prices are for a million tokens.

A device is one GPU or, without one, the whole machine. A model on several ranks, or several replicas, take several.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headway.errors import ConfigError


@dataclass(frozen=True)
class Use:
    """What devices did in some time."""

    device_s: float
    """Seconds, times the number of devices."""
    num_input_tokens: int
    num_output_tokens: int
    prompt_share: float | None = None
    """The share of the steps' time that prompt tokens took, from 0 to 1; `None` if it is not known."""


@dataclass(frozen=True)
class TokenPrices:
    """What a million tokens cost, in the currency of the hour's price; `None` where there were no tokens."""

    input: float | None
    output: float | None
    blended: float | None
    all_in: float | None
    """The whole price, divided by output tokens alone: it compares ways to do the same work."""
    is_divided: bool
    """Whether the price was divided by the time of steps. If not, `input` and `output` are the blended price."""

    @staticmethod
    def of(per_hour: float, use: Use) -> TokenPrices:
        """The prices of tokens if a device costs this much for an hour."""
        price = per_hour * use.device_s / 3600.0
        num_input, num_output = use.num_input_tokens, use.num_output_tokens
        blended = _each(price, num_input + num_output)
        all_in = _each(price, num_output)
        if use.prompt_share is None:
            return TokenPrices(
                blended if num_input else None, blended if num_output else None, blended, all_in, is_divided=False
            )
        return TokenPrices(
            _each(price * use.prompt_share, num_input),
            _each(price * (1.0 - use.prompt_share), num_output),
            blended,
            all_in,
            is_divided=True,
        )

    def as_json(self) -> dict[str, float | None]:
        """The prices by the keys that results have."""
        return {
            "price_per_million_input_tokens": self.input,
            "price_per_million_output_tokens": self.output,
            "price_per_million_tokens": self.blended,
            "price_per_million_output_tokens_all_in": self.all_in,
        }


def check_price(per_hour: float, name: str = "price_per_hour") -> float:
    """The price; `ConfigError` unless it is finite and above 0."""
    is_number = isinstance(per_hour, int | float) and not isinstance(per_hour, bool)
    if not is_number or not math.isfinite(per_hour) or per_hour <= 0:
        raise ConfigError(f"{name} must be a finite number above 0, the price of a device for an hour; not {per_hour}.")
    return per_hour


def price_text(price: float | None) -> str:
    """A price with four significant digits, so that cheap tokens are not free."""
    if price is None:
        return "–"
    digits = 2 if price >= 100 else max(2, 3 - math.floor(math.log10(price))) if price > 0 else 2
    return f"{price:,.{min(digits, 8)}f}"


def _each(price: float, num_tokens: int) -> float | None:
    """The price of a million tokens."""
    return 1e6 * price / num_tokens if num_tokens else None
