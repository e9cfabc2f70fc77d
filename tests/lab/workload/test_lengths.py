"""Each distribution has the moments that it says, and is the same for the same seed."""

from __future__ import annotations

import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from headway.errors import ConfigError
from headway_lab.workload.lengths import Distribution, draw_length, read_distribution

NUM_DRAWS = 20_000


def distribution(value: object, **options: Any) -> Distribution:
    return read_distribution(value, "input: ", folders=(), **options)


def lengths(value: object, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    found = distribution(value)
    return [draw_length(found, rng) for _ in range(NUM_DRAWS)]


def quantile(values: list[int], share: float) -> int:
    return sorted(values)[round(share * (len(values) - 1))]


@pytest.mark.parametrize(("exponent", "low", "high"), [(1.0, 1, 4), (2.0, 10, 13), (0.5, 1, 3), (0, 3, 7)])
def test_zipf_and_uniform(exponent: float, low: int, high: int) -> None:
    kind = {"kind": "zipf", "exponent": exponent} if exponent else {"kind": "uniform"}
    drawn = lengths({**kind, "low": low, "high": high})
    total = sum(value**-exponent for value in range(low, high + 1))
    for value in range(low, high + 1):
        assert drawn.count(value) / NUM_DRAWS == pytest.approx(value**-exponent / total, abs=0.015)
    assert min(drawn) == low and max(drawn) == high


def test_exponential_with_its_cap() -> None:
    drawn = lengths({"kind": "exponential", "mean": 128, "cap": 1536})
    assert statistics.mean(drawn) == pytest.approx(128, rel=0.03)
    assert quantile(drawn, 0.5) == pytest.approx(128 * math.log(2), rel=0.05)
    assert quantile(drawn, 0.9) == pytest.approx(128 * math.log(10), rel=0.05)
    tight = lengths({"kind": "exponential", "mean": 100, "cap": 150})
    assert max(tight) <= 150
    assert tight.count(150) < NUM_DRAWS * 0.01  # drawn again, not cut off
    # Mean of an exponential distribution given that it is at most c: m - c e^(-c/m) / (1 - e^(-c/m))
    assert statistics.mean(tight) == pytest.approx(100 - 150 * math.exp(-1.5) / (1 - math.exp(-1.5)), rel=0.02)


def test_lognormal_by_median_and_by_mean() -> None:
    drawn = lengths({"kind": "lognormal", "median": 400, "sigma": 1.0})
    assert quantile(drawn, 0.5) == pytest.approx(400, rel=0.04)
    assert quantile(drawn, 0.9) == pytest.approx(400 * math.exp(1.2816), rel=0.05)
    assert statistics.mean(drawn) == pytest.approx(400 * math.exp(0.5), rel=0.04)
    assert statistics.mean(lengths({"kind": "lognormal", "mean": 400, "sigma": 0.8})) == pytest.approx(400, rel=0.03)
    assert max(lengths({"kind": "lognormal", "median": 400, "sigma": 1.0, "cap": 1000})) <= 1000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lengths.csv", "n,m\n5,1\n5,1\n5,1\n9,1\n"),
        ("lengths.jsonl", '{"n": 5}\n{"n": 5}\n\n{"n": 5}\n{"n": 9}\n'),
    ],
)
def test_a_column_comes_as_often_as_it_stands_there(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    found = read_distribution({"kind": "column", "file": name, "column": "n"}, "", folders=(tmp_path,))
    rng = random.Random(0)
    drawn = [draw_length(found, rng) for _ in range(4000)]
    assert set(drawn) == {5, 9}
    assert drawn.count(9) == pytest.approx(1000, rel=0.1)
    for bad, message in (
        ("n\n", "no rows"),
        ("n\nx\n", "line 2"),
        ("m\n1\n", "no 'n'; it has m"),
        ("n\n-1\n", "at least 0"),
    ):
        (tmp_path / "bad.csv").write_text(bad)
        with pytest.raises(ConfigError, match=message):
            read_distribution({"kind": "column", "file": "bad.csv", "column": "n"}, "", folders=(tmp_path,)).draw(rng)


def test_seconds_are_not_rounded() -> None:
    found = distribution({"kind": "uniform", "low": 0.25, "high": 0.75}, is_time=True)
    drawn = [found.draw(random.Random(seed)) for seed in range(200)]
    assert 0.25 <= min(drawn) < 0.3 and 0.7 < max(drawn) <= 0.75
    assert distribution(0, is_time=True).draw(random.Random(0)) == 0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("many", "input: a table is expected, not 'many'"),
        (0, "value must be a number of at least 1"),
        (True, "a table is expected"),
        ({"kind": "unifrom", "low": 1, "high": 2}, "Did you mean 'uniform'?"),
        ({"low": 1, "high": 2}, "'kind' is needed"),
        ({"kind": "uniform", "low": 1, "hihg": 2}, "there is no 'hihg' here. Did you mean 'high'?"),
        ({"kind": "uniform", "low": 5, "high": 2}, "high must be a whole number of at least 5"),
        ({"kind": "uniform", "low": 1.5, "high": 2}, "low must be a whole number"),
        ({"kind": "exponential"}, "'mean' is needed"),
        ({"kind": "exponential", "mean": 100, "cap": 50}, "cap must be a number of at least 100"),
        ({"kind": "exponential", "mean": math.inf}, "mean must be a number of at most 16,777,216"),
        ({"kind": "lognormal", "sigma": 1}, "either a 'median' or a 'mean'"),
        ({"kind": "lognormal", "sigma": 1, "median": 3, "mean": 4}, "either a 'median' or a 'mean'"),
        ({"kind": "zipf", "exponent": 1, "high": 10**7}, "at most 999,999 above low"),
        ({"kind": "column", "file": "x.csv"}, "'column' is needed"),
        (10**8, "value must be a number of at most 16,777,216"),
        ({"kind": "lognormal", "median": 5, "sigma": 1e4}, "sigma must be a number of at most 10"),
        ({"kind": "zipf", "exponent": 1e9, "high": 5}, "exponent must be a number of at most 100"),
    ],
)
def test_errors_say_where_and_what(value: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        distribution(value)
    assert message in str(caught.value)
    assert str(caught.value).startswith("input: ")
