"""The work of the gain map's cells, how its throughput is counted, and its four cells on an engine."""

from __future__ import annotations

import math
import statistics

import pytest

from headway_lab.bench.timelines import RequestTimeline
from headway_lab.claims.claim import Where
from headway_lab.claims.context import Context
from headway_lab.claims.run import Run
from headway_lab.claims.scenarios import CLAIMS
from headway_lab.claims.spread_cells import CONTINUOUS, DYNAMIC, STATIC, Cell, Cells, Served, Sizes
from headway_lab.claims.testbed import SimulatedTestbed
from tests.lab.claims.small import SmallTestbed

CELL = Cell(spread=10, batch=8, prompt_share=0.2, mean=50, longest=2_048)


def with_spread(spread: float, batch: int = 8) -> Cell:
    return Cell(spread, batch, prompt_share=0.2, mean=50, longest=2_048)


@pytest.mark.parametrize("spread", [1, 3, 10, 100, 300])
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_answers_have_the_wanted_mean_and_stay_within_bounds(spread: float, batch: int) -> None:
    lengths = with_spread(spread, batch).lengths(6, seed=0)
    assert len(lengths) == 6 * batch
    assert statistics.fmean(lengths) == pytest.approx(50, abs=1)
    assert min(lengths) >= 1 and max(lengths) <= 2_048
    assert (len(set(lengths)) == 1) is (spread == 1)


@pytest.mark.parametrize("spread", [3, 10, 30])
def test_the_spread_is_that_of_p99_over_the_median(spread: float) -> None:
    lengths = sorted(with_spread(spread, 4).lengths(2_000, seed=0))
    found = lengths[int(0.99 * len(lengths))] / statistics.median(lengths)
    assert found == pytest.approx(spread, rel=0.1)


def test_a_seed_decides_the_order_only() -> None:
    first, same, other = CELL.lengths(6, 0), CELL.lengths(6, 0), CELL.lengths(6, 1)
    assert first == same != other
    assert sorted(first) == sorted(other)


def test_the_longest_of_batches_are_what_drawn_batches_would_have() -> None:
    """The mean of the longest of eight lognormal lengths, by the distribution's own quantiles."""
    lengths = CELL.lengths(50, seed=0)
    found = statistics.fmean(max(lengths[start : start + 8]) for start in range(0, len(lengths), 8))
    normal = statistics.NormalDist()
    sigma = math.log(10) / normal.inv_cdf(0.99)
    longest = (math.exp(sigma * normal.inv_cdf(((n + 0.5) / 5_000) ** (1 / 8))) for n in range(5_000))
    assert found == pytest.approx(50 / math.exp(sigma**2 / 2) * statistics.fmean(longest), rel=0.05)


def test_prompts_are_the_wanted_share_of_tokens() -> None:
    for share, num_tokens in ((0.02, 1), (0.5, 50), (0.8, 200)):
        assert Cell(1, 8, share, 50, 2_048).num_prompt_tokens == num_tokens


def test_throughput_is_counted_until_a_batch_is_left() -> None:
    lines = [RequestTimeline(0.0, 4, 2, [1.0, 2.0]), RequestTimeline(0.0, 4, 3, [1.0, 2.0, 10.0])]
    assert Served(Run(lines, 10.0), num_left=0).tok_s == (8 + 5) / 10
    assert Served(Run(lines, 10.0), num_left=1).tok_s == (8 + 4) / 2
    late = [*lines, RequestTimeline(0.0, 4, 1, [11.0])]
    assert Served(Run(late, 11.0), num_left=2).tok_s == (8 + 4) / 2, "a prompt that comes later does not count"


def test_without_spread_there_is_no_gain_and_with_it_there_is() -> None:
    cells = Cells(SimulatedTestbed.open(), Sizes(batches=3, least=24, arrivals=24))
    alike, spread = with_spread(1), with_spread(100)
    assert cells.throughput_gain(alike) == pytest.approx(1, abs=0.01)
    assert cells.throughput_gain(spread) > 3
    assert cells.throughput_gain(spread, DYNAMIC) > 1
    assert cells.served(STATIC, alike) is cells.served(STATIC, alike), "each is served once"
    loaded = Cell(100, 8, 0.2, 50, 2_048, load=0.5)
    assert cells.latency_gain(loaded) > 1
    assert cells.served(CONTINUOUS, loaded).run.duration_s > cells.served(CONTINUOUS, spread).run.duration_s


def test_on_an_engine_four_cells_stand_beside_simulated_ones() -> None:
    """A simulated machine in the place of the engine: both sides are the same, and so are their gains."""

    class Machine(SmallTestbed):
        where: Where = "engine"

    outcome = CLAIMS["gain-map"].measure(Context(Machine.open(), is_quick=True))
    assert outcome.where == "engine" and len(outcome.numbers) == 4
    assert [numbers["error, %"] for numbers in outcome.numbers.values()] == pytest.approx([0] * 4, abs=1e-9)
    gains = [numbers["gain"] for numbers in outcome.numbers.values()]
    assert gains[:2] == pytest.approx([1, 1], abs=0.05) and min(gains[2:]) > 1.2
    assert outcome.value == gains[-1] and "off by 0.0% at most" in outcome.ours
    assert outcome.chart.heat is not None and len(outcome.chart.heat.grids) == 2
