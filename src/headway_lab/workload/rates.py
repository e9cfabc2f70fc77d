"""Rates of requests: their bounds, and the flags that set them."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from headway.console.flags import number, parse_number


@dataclass(frozen=True)
class RateLimits:
    """The bounds of a rate."""

    most: float = 1e6
    """The most requests each second that a load may have: closer arrivals are all at once for any engine."""


RATES = RateLimits()

finite_rate = number(0.0, RATES.most, is_above=True)
"""A flag's type: requests each second."""


def arrival_rate(text: str) -> float:
    """A flag's type: requests each second. inf means that all requests arrive at once."""
    try:
        rate = parse_number(text, may_be_infinite=True)
    except ValueError:
        rate = math.nan
    if not 0.0 < rate <= RATES.most and rate != math.inf:
        raise argparse.ArgumentTypeError(
            f"'{text}' is no rate: above 0 and at most {RATES.most:,.0f} requests/s, or inf for all at once"
        )
    return rate
