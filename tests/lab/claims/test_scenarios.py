"""Every claim on a small machine: finite numbers, whole texts, and the direction that physics demands."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

from headway.core.step_work import StepWork
from headway.errors import ConfigError
from headway_lab.claims.claim import Outcome
from headway_lab.claims.context import Context
from headway_lab.claims.published_workloads import equal, noisy_lengths
from headway_lab.claims.scenarios import CLAIMS, batching_load, predictor_price
from headway_lab.claims.scenarios.long_prompt import EXTRAPOLATED, NOTHING
from headway_lab.claims.scenarios.weight_formats import RECORDED
from headway_lab.claims.testbed import SHIPPED
from headway_lab.predictor.learning_curve import Learned, Traffic, observe
from headway_lab.predictor.train_command import Cost
from headway_lab.predictor.training import count_pairs
from headway_lab.sim import Calibration
from tests.lab.claims.figures import FIGURES, STALE, TIMED
from tests.lab.claims.small import small_context


@pytest.fixture(scope="module")
def shared() -> Context:
    """What several claims measure is measured once."""
    return small_context()


@pytest.fixture(autouse=True)
def short_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching_load, "_DEPTHS", (100, 1_000))


@pytest.fixture(autouse=True)
def quick_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics in the place of trees, which take seconds to grow (tests/lab/predictor grows some)."""

    def learn(traffic: Traffic, num_pairs: int) -> Learned:
        return dataclasses.replace(observe(traffic, num_pairs), cost=Cost(4e-4, 2e-4))

    monkeypatch.setattr(predictor_price, "has_ranker", lambda: True)
    monkeypatch.setattr(predictor_price, "learn", learn)


def measured(name: str, context: Context) -> Outcome:
    return CLAIMS[name].measure(context)


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_gives_numbers_texts_and_a_chart(name: str, shared: Context) -> None:
    outcome = measured(name, shared)
    assert math.isfinite(outcome.value)
    for text in (outcome.unit, outcome.ours, outcome.workload, outcome.differs):
        assert text.strip() and "nan" not in text and "inf" not in text.split()
    assert all(math.isfinite(number) for numbers in outcome.numbers.values() for number in numbers.values())
    svg = outcome.chart.svg()
    assert svg.startswith("<svg") and "no data" not in svg
    elsewhere = {"queue-depth": "scheduler", "reserved-kv": "arithmetic", "weight-formats": "recorded"}
    assert outcome.where == elsewhere.get(name, "simulator")
    for row, numbers in FIGURES.get(name, {}).items():
        assert outcome.numbers[row] == pytest.approx(numbers, rel=2e-3), STALE
    assert name in FIGURES or name in TIMED


def test_what_a_step_costs_does_not_follow_the_queue(shared: Context) -> None:
    assert measured("queue-depth", shared).value < 5


def test_memory_that_is_cut_is_given_back(shared: Context) -> None:
    before = shared.testbed.bytes_per_token
    numbers = measured("kv-quantisation", shared).numbers
    assert 1.8 < numbers["fp8"]["tokens that fit"] / numbers["16 bits"]["tokens that fit"] < 2
    assert shared.testbed.bytes_per_token == before


def test_a_longer_request_than_the_calibrated_ones_is_only_for_its_claim(shared: Context) -> None:
    stalls = measured("long-prompt", shared).numbers
    whole, *_, bounded = [row["longest gap of the others, ms"] for name, row in stalls.items() if name != NOTHING]
    assert whole > 2 * bounded > 2 * stalls[NOTHING]["longest gap of the others, ms"]
    with pytest.raises(ConfigError, match="at most 8,192"):
        shared.run("too long", equal(shared, 1, num_in=9_000, num_out=1).at_once(), max_model_len=16_384)


def test_the_error_beyond_the_calibration_is_that_of_the_shipped_one() -> None:
    cost = Calibration.find(SHIPPED).cost
    chunks = [StepWork(1_000, 1, 0, 0, 1, 1_000 * (1_000 * place + 500.0)) for place in range(128)]
    found = {"8 contexts of 32,000, a decode step": cost.seconds(StepWork(8, 8, 8, 8 * 32_000))}
    found["a prompt of 128,000"] = sum(map(cost.seconds, chunks))
    assert found == pytest.approx({name: simulated for name, (simulated, _) in EXTRAPOLATED.items()}, rel=0.01)


def test_a_guard_bounds_what_an_order_adds_to_the_wait(shared: Context) -> None:
    numbers = measured("starvation", shared).numbers
    extra = {name: row["longest beyond order of arrival, s"] for name, row in numbers.items()}
    assert extra["order of arrival"] == 0
    assert 0 < extra["shortest first, 300 ms"] < extra["shortest first"]
    assert extra["slo, 300 ms"] < extra["slo, no guard"] and extra["slo, 300 ms"] < extra["priority"]
    assert numbers["shortest first"]["E2E mean, ms"] < numbers["order of arrival"]["E2E mean, ms"]


def test_recorded_speeds_are_those_of_the_documents() -> None:
    folder = Path(__file__).parents[3] / "docs" / "results"
    pages = [(folder / name).read_text(encoding="utf-8") for name in ("quantization.md", "h200/second_round.md")]
    rows = json.loads(RECORDED.read_text(encoding="utf-8"))["rows"]
    assert rows
    for row in rows:
        value = f"{row['value']:,}"
        assert any(row["commit"] in page and re.search(rf"(?<![\d.,]){value}(?![\d.,]*\d)", page) for page in pages), (
            row
        )


def test_claims_about_the_same_runs_share_them() -> None:
    said: list[str] = []
    context = small_context()
    context.say = said.append
    for name in ("eras", "kv-waste", "paging"):
        measured(name, context)
    assert len(said) == len(set(said)) <= 5


@pytest.mark.parametrize("tau", [0.2, 0.46, 0.8])
def test_made_up_predictions_have_the_wanted_rank_correlation(tau: float) -> None:
    lengths = [10 + 7 * place % 400 for place in range(500)]
    assert count_pairs(noisy_lengths(lengths, tau=tau), lengths).kendall_tau == pytest.approx(tau, abs=0.02)
