"""Throughput of a ranking, and the price of a predictor: what is counted, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.errors import ConfigError
from headway.predict import PromptView, TrafficLog
from headway_lab.bench.timelines import RequestTimeline
from headway_lab.claims.context import Context
from headway_lab.claims.run import Run
from headway_lab.claims.scenarios import CLAIMS, predictor_price
from headway_lab.claims.scenarios.predictor_price import TRAFFIC_LOG
from headway_lab.claims.scenarios.quoted_gains import answered_s
from tests.lab.claims.small import SmallTestbed, small_context


def test_an_answer_counts_if_it_ends_before_the_last_request_comes() -> None:
    lines = [
        RequestTimeline(0.0, 1, 1, [1.0]),
        RequestTimeline(1.0, 1, 2, [2.0, 4.0]),
        RequestTimeline(2.0, 1, 2, [3.0, 4.1]),
        RequestTimeline(4.0, 1, 1, [9.0]),
    ]
    assert answered_s(Run(lines, 9.0)) == 2 / 4


def test_claims_of_one_paper_share_their_runs() -> None:
    said: list[str] = []
    context = small_context()
    context.say = said.append
    for name in ("learned-ranking", "ranking-throughput", "magnus", "magnus-latency"):
        CLAIMS[name].measure(context)
    assert len(said) == len(set(said)) == 1 + 3 * 3 + 8 + 2 * 3


def traffic_log(folder: Path, count: int) -> Path:
    with TrafficLog(folder / TRAFFIC_LOG) as log:
        for number in range(count):
            prompt = PromptView([number % 5, *range(100 + number, 140 + number)], max_tokens=64)
            log.write(prompt, num_output_tokens=1 + 10 * (number % 5), finish_reason="stop")
    return folder


def test_without_its_library_the_curve_is_that_of_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictor_price, "has_ranker", lambda: False)
    outcome = CLAIMS["predictor-price"].measure(small_context())
    assert "LightGBM is not installed" in outcome.differs
    assert [line.name.split(":")[0] for line in outcome.chart.lines] == ["statistics"] * 2


def test_a_traffic_log_in_the_data_directory_is_learned_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictor_price, "has_ranker", lambda: False)
    context = Context(SmallTestbed.open(), is_quick=True, data_dir=traffic_log(tmp_path, 200))
    outcome = CLAIMS["predictor-price"].measure(context)
    assert f"pairs of {TRAFFIC_LOG}" in outcome.workload
    assert list(outcome.numbers) == ["100 pairs", "fcfs", "oracle"]
    assert "100 pairs tell nothing about the order of lengths (Kendall tau 0.00)" in outcome.ours
    few = tmp_path / "few"
    few.mkdir()
    context.data_dir = traffic_log(few, 100)
    with pytest.raises(ConfigError, match="at least 100 are needed"):
        CLAIMS["predictor-price"].measure(context)
