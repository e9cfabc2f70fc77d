"""Prices of runs: as keys, lines and cells; the engine's own time; what a server says in its metrics."""

from __future__ import annotations

import pytest

from headway_lab.bench.online_metrics import OnlineMetrics, result_keys
from headway_lab.bench.pricing import Pricing, price_cells, price_measures, price_notes, price_titles, round_prices
from headway_lab.bench.server_time import ServerTime
from headway_lab.bench.serving_report import serving_block
from headway_lab.bench.timelines import RequestTimeline, RoundTimes


def metrics(pricing: Pricing | None) -> OnlineMetrics:
    """Two requests of 100 tokens in and 4 out, in an hour."""
    lines = [RequestTimeline(0.0, 100, 4, [1.0, 2.0, 3.0, 4.0]) for _ in range(2)]
    found = OnlineMetrics.of(lines, 3600.0)
    return found if pricing is None else found.priced(pricing)


def test_prices_are_in_the_result_only_if_a_device_has_a_price() -> None:
    plain, priced = metrics(None), metrics(Pricing(2.0, 3, prompt_share=0.5))
    keys = set(priced.as_json()) - set(plain.as_json())
    assert keys == {
        *("price_per_hour", "price_devices", "prompt_time_share", "price_per_million_input_tokens"),
        *("price_per_million_output_tokens", "price_per_million_tokens", "price_per_million_output_tokens_all_in"),
    }
    result = priced.as_json()
    assert result["price_per_million_input_tokens"] == pytest.approx(1e6 * 3.0 / 200)
    assert result["price_per_million_output_tokens"] == pytest.approx(1e6 * 3.0 / 8)
    assert "price_per_hour" not in result_keys()
    assert "Price per 1M" not in serving_block(plain)
    lines = serving_block(priced).splitlines()
    assert f"{'Price per 1M output tokens:':<40} 375,000.00" in lines


def test_notes_say_what_is_paid_and_how_it_is_divided() -> None:
    one, three = Pricing(2.0, 1, 0.25), Pricing(2.0, 3)
    assert metrics(one).prices.note == (  # type: ignore[union-attr]
        "Prices: one device at 2 an hour; prompts took 25% of the time of steps and pay that share."
    )
    found = [metrics(pricing).prices for pricing in (one, three)]
    notes = price_notes([*found, None])
    assert len(notes) == 2 and "3 devices at 2 an hour each; how the time of steps was divided is not known" in notes[1]
    assert price_titles([None]) == [] and price_cells([None], 0) == []
    assert len(price_titles(found)) == len(price_cells(found, 1)) == len(price_cells([*found, None], 2))


def test_rounds_have_prices_and_floors_have_none() -> None:
    times = RoundTimes(3600.0, None, 2, 1_000_000, 500_000, prompt_share=0.25)
    prices = round_prices(times, 4.0, 1).tokens
    assert (prices.input, prices.output) == (1.0, 6.0)
    measures = price_measures(4.0, 1)
    assert [measure.of(times) for measure in measures] == [1.0, 6.0]
    floor = RoundTimes(1800.0, None, 2, 1_000_000, 500_000)
    assert [measure.text(floor) for measure in measures] == ["–", "–"]
    assert measures[0].ratio(times, floor) is None


METRICS = """# HELP headway:prompt_compute_seconds_total Seconds.
headway:prompt_compute_seconds_total{{model_name="m"}} {}
headway:generation_compute_seconds_total{{model_name="m"}} {}
headway:devices{{model_name="m"}} 4.0
headway:generation_tokens_total{{model_name="m"}} 7.0
"""


def test_a_server_says_how_its_time_was_divided() -> None:
    before, after = (ServerTime.of_metrics(METRICS.format(*both)) for both in ((10.0, 20.0), (11.0, 23.0)))
    assert after.num_devices == 4
    assert after.prompt_share(before) == pytest.approx(0.25)
    assert before.prompt_share(after) is None, "it was started again"
    other = ServerTime.of_metrics("vllm:num_requests_running 3.0\n")
    assert (other.num_devices, other.prompt_share(other)) == (None, None)
