"""What a million tokens cost, and how a price is written."""

from __future__ import annotations

import math

import pytest

from headway.errors import ConfigError
from headway.price import TokenPrices, Use, check_price, price_text


def test_the_price_of_an_hour_is_divided_by_time_and_then_by_tokens() -> None:
    """Two devices for half an hour at 4 an hour cost 4. Prompts took a quarter of the time."""
    prices = TokenPrices.of(4.0, Use(2 * 1800.0, 2_000_000, 500_000, prompt_share=0.25))
    assert (prices.input, prices.output) == (pytest.approx(0.5), pytest.approx(6.0))
    assert (prices.blended, prices.all_in) == (pytest.approx(1.6), pytest.approx(8.0))
    assert prices.is_divided
    whole = 2.0 * (prices.input or 0.0) + 0.5 * (prices.output or 0.0)
    assert whole == pytest.approx(4.0), "nothing of the price is lost or counted twice"


def test_without_the_time_both_cost_the_blended_price() -> None:
    prices = TokenPrices.of(4.0, Use(3600.0, 3_000_000, 1_000_000))
    assert (prices.input, prices.output, prices.blended, prices.all_in) == (1.0, 1.0, 1.0, 4.0)
    assert not prices.is_divided


@pytest.mark.parametrize("share", [None, 1.0])
def test_tokens_that_there_are_not_have_no_price(share: float | None) -> None:
    prices = TokenPrices.of(1.0, Use(3600.0, 1_000_000, 0, share))
    assert (prices.input, prices.output, prices.all_in) == (1.0, None, None)
    assert set(TokenPrices.of(1.0, Use(3600.0, 0, 0, share)).as_json().values()) == {None}


@pytest.mark.parametrize("price", [0, 0.0, -1.0, math.inf, math.nan, True, "3"])
def test_a_price_is_finite_and_above_0(price: float) -> None:
    with pytest.raises(ConfigError, match="price_per_hour must be a finite number above 0"):
        check_price(price)
    assert check_price(0.01) == 0.01


@pytest.mark.parametrize(
    ("price", "text"),
    [
        (None, "–"),
        (1234.5, "1,234.50"),
        (12.3456, "12.35"),
        (0.98765, "0.9877"),
        (0.00012346, "0.0001235"),
        (0.0, "0.00"),
    ],
)
def test_cheap_tokens_are_not_written_as_free(price: float | None, text: str) -> None:
    assert price_text(price) == text
