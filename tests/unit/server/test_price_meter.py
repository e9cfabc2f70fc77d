"""The server's prices: since the start, of the last minutes, and of devices that come and go."""

from __future__ import annotations

import math

import pytest

from headway.errors import ConfigError
from headway.server.metrics.price_meter import PriceMeter
from headway.server.server_config import ServerConfig
from headway.wire.engine_stats import EngineStats
from tests.unit.clock import Clock


def stats(num_in: int, num_out: int, prompt_s: float, output_s: float) -> EngineStats:
    found = EngineStats()
    found.batch.prompt_tokens, found.batch.generation_tokens = num_in, num_out
    found.token_time.prompt_s, found.token_time.output_s = prompt_s, output_s
    return found


def test_prices_since_the_start_and_of_the_last_minutes() -> None:
    """An hour with little to do, then five minutes with ten times as much: tokens become cheaper."""
    clock = Clock()
    meter = PriceMeter(3.6, lambda: 1, now=clock)
    assert set(meter.numbers().values()) == {None}, "no tokens yet"
    clock.now_s += 3600.0
    meter.observe(stats(1_000_000, 1_000_000, 1.0, 3.0))
    first = meter.since_start()
    assert (first.input, first.output) == (pytest.approx(0.9), pytest.approx(2.7))
    clock.now_s += 300.0
    meter.observe(stats(2_000_000, 3_000_000, 2.0, 6.0))
    recent = meter.recent()
    assert (recent.input, recent.output) == (pytest.approx(0.3 / 4), pytest.approx(0.3 * 3 / 4 / 2))
    assert meter.numbers()["input"] == pytest.approx(3.9 / 4 / 2)
    clock.now_s += PriceMeter.WINDOW_S + 1
    assert meter.recent().input is None, "nothing was computed in the last minutes"
    assert meter.since_start().input == pytest.approx((3.9 + 0.301) / 4 / 2)


def test_every_device_costs_while_it_is_there() -> None:
    clock, num_devices = Clock(), [1]
    meter = PriceMeter(1.0, lambda: num_devices[0], now=clock)
    clock.now_s += 1800.0
    meter.observe(stats(0, 500_000, 0.0, 1.0))
    num_devices[0] = 3
    clock.now_s += 0.0
    meter.observe(stats(0, 500_000, 0.0, 1.0))
    clock.now_s += 1800.0
    assert meter.since_start().output == pytest.approx(2.0 * (0.5 + 1.5))


def test_many_steps_in_a_second_are_one_mark() -> None:
    clock = Clock()
    meter = PriceMeter(1.0, lambda: 1, now=clock)
    for number in range(1, 100_001):
        clock.now_s += 0.005
        meter.observe(stats(number, number, number, number))
    assert meter.recent().output == pytest.approx(1e6 * 300 / 3600 / 2 / 60_000, rel=0.01)


@pytest.mark.parametrize("price", [0.0, -1.0, math.inf, math.nan])
def test_the_servers_price_is_finite_and_above_0(price: float) -> None:
    with pytest.raises(ConfigError, match="price_per_hour must be a finite number above 0"):
        ServerConfig(price_per_hour=price)
