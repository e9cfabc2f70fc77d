"""The search for a capacity, on probes whose answer is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headway.errors import ConfigError
from headway_lab.bench.bench_capacity_command import capacity_json, capacity_page, probe_line, verdict
from headway_lab.bench.capacity_search import Capacity, Limits, find_capacity
from headway_lab.bench.online_metrics import SARATHI, Objective, OnlineMetrics, missed, parse_objective
from headway_lab.bench.timelines import RequestTimeline

BOUND = [Objective("p99_itl_ms", 100.0)]


def metrics(itl_ms: float, *, num_lost: int = 0) -> OnlineMetrics:
    times = [0.1, 0.1 + itl_ms / 1000]
    timelines = [RequestTimeline(0.0, 5, 2, times), *(RequestTimeline(0.0, 5, 2) for _ in range(num_lost))]
    return OnlineMetrics.of(timelines, 1.0)


def gap_at(rate: float) -> OnlineMetrics:
    """The gap grows with the rate, and reaches the bound at 7.3 requests/s."""
    return metrics(100.0 * rate / 7.3)


def search(measure: Callable[[float], OnlineMetrics], **limits: float) -> Capacity:
    return find_capacity(measure, BOUND, limits=Limits(**limits))  # type: ignore[arg-type]


@pytest.mark.parametrize("start", [0.05, 1.0, 7.0, 8.0, 500.0])
def test_found_from_wherever_it_starts(start: float) -> None:
    found = search(gap_at, start=start, precision=0.02)
    assert found.rate is not None and found.first_miss is not None
    assert found.rate <= 7.3 < found.first_miss <= found.rate * 1.02
    assert found.best is not None and found.best.rate == found.rate


def test_brackets_by_doubling_then_halves_the_ratio() -> None:
    found = search(gap_at, start=1.0, precision=0.3)
    assert [probe.rate for probe in found.probes] == pytest.approx([1, 2, 4, 8, 32**0.5, (8 * 32**0.5) ** 0.5])
    assert [probe.is_met for probe in found.probes] == [True, True, True, False, True, True]
    found = search(lambda rate: metrics(1.0, num_lost=int(rate > 3)), start=1.0, precision=0.05)
    assert found.rate is not None and 2.8 < found.rate <= 3, "lost requests are a miss"


def test_never_and_always_met() -> None:
    never = search(lambda rate: metrics(1e6), start=1.0, lowest=0.1)
    assert (never.rate, never.first_miss, never.best) == (None, 0.1, None)
    assert verdict(never) == "No rate down to 0.1 requests/s meets the objectives."
    always = search(lambda rate: metrics(1.0), start=1.0, highest=50.0)
    assert (always.rate, always.first_miss) == (50.0, None)
    assert verdict(always) == "Capacity: at least 50 requests/s; no higher rate was tried."
    assert len(search(gap_at, precision=1e-9, max_probes=7).probes) == 7


def test_ends_before_a_probe_that_would_take_too_long() -> None:
    clock = 0.0

    def measure(rate: float) -> OnlineMetrics:
        nonlocal clock
        clock += 50 / rate
        return gap_at(rate)

    found = find_capacity(
        measure,
        BOUND,
        limits=Limits(start=16.0, max_seconds=30.0),
        seconds_at=lambda rate: 50 / rate,
        elapsed_s=lambda: clock,
    )
    assert found.is_cut and clock <= 30
    assert [probe.rate for probe in found.probes] == pytest.approx([16, 8, 4])
    assert "(8 is too much)." in verdict(found) and "--max-seconds" in verdict(found)
    assert not search(gap_at).is_cut


def test_probes_are_told_as_they_come_and_written_down() -> None:
    lines: list[str] = []
    found = find_capacity(
        gap_at, BOUND, limits=Limits(precision=0.5), on_probe=lambda probe: lines.append(probe_line(probe, BOUND))
    )
    assert lines[0] == "        1/s  met     p99_itl_ms 13.7  (1 requests)"
    assert lines[3] == "        8/s  missed  p99_itl_ms 109.6  (1 requests)"
    result = capacity_json("somebody", found, BOUND)
    assert result["capacity"] == found.rate and result["slo"] == {"p99_itl_ms": 100.0}
    assert isinstance(result["probes"], list) and len(result["probes"]) == len(lines)
    page = capacity_page("Capacity", found, BOUND).render()
    for words in ("p99_itl_ms ≤ 100", "request rate (requests/s)", "Probes"):
        assert words in page


def test_objectives_bound_latencies_above_and_rates_below() -> None:
    result = {"p99_itl_ms": 100.0, "request_goodput": 5.0, "p99_ttft_ms": None}
    assert parse_objective("p99_itl_ms=100").is_met(result)
    assert not parse_objective("p99_itl_ms=99.9").is_met(result)
    assert parse_objective("request_goodput=5").is_met(result)
    assert not parse_objective("request_goodput=5.1").is_met(result)
    unknown = parse_objective("p99_ttft_ms=1")
    assert missed([unknown], result) == [unknown]
    assert [str(parse_objective(text)) for text in SARATHI] == ["p99_itl_ms ≤ 100", "p50_ttft_ms ≤ 2000"]
    assert str(parse_objective("goodput_share=0.9")) == "goodput_share ≥ 0.9"
    for text, reason in (
        ("p99_itl=100", "Did you mean 'p99_itl_ms'"),
        ("duration=3", "no key 'duration' to bound"),
        *((f"p99_itl_ms{bad}", f"a finite number, not '{bad[1:]}'") for bad in ("=fast", "=nan", "")),
    ):
        with pytest.raises(ConfigError, match=reason):
            parse_objective(text)
