"""Learning curves: made-up traffic can be learned from, and a log is divided into pairs and held-out requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.predict import PromptView, TrafficLog
from headway_lab.predictor.learning_curve import Traffic, learn, made_up_traffic, observe, recorded_traffic


@pytest.fixture(scope="module")
def traffic() -> Traffic:
    return made_up_traffic(400, 150)


def test_more_traffic_begins_with_the_same_pairs(traffic: Traffic) -> None:
    fewer = made_up_traffic(50, 150)
    assert fewer.pairs == traffic.pairs[:50] and fewer.held_out == traffic.held_out
    assert made_up_traffic(50, 150, seed=1).pairs != fewer.pairs


def test_statistics_learn_from_made_up_traffic(traffic: Traffic) -> None:
    few, many = (observe(traffic, count) for count in (10, 400))
    assert few.tau < many.tau and many.tau > 0.25
    assert many.num_pairs == 400 and many.cost is None and len(many.lengths) == 150


def test_the_ranker_learns_and_its_cost_is_measured(traffic: Traffic) -> None:
    pytest.importorskip("lightgbm")
    learned = learn(traffic, 150)
    assert learned.tau > 0.2
    assert learned.cost is not None and learned.cost.single_s > 0 < learned.training_s


def test_a_log_gives_its_last_pairs_and_others_that_are_held_out(tmp_path: Path) -> None:
    with TrafficLog(tmp_path / "traffic.jsonl") as log:
        for number in range(300):
            log.write(PromptView(range(number, number + 50)), num_output_tokens=1 + number, finish_reason="stop")
    found = recorded_traffic(tmp_path / "traffic.jsonl", num_held_out=40, most_pairs=200)
    pairs = [record.num_output_tokens for record in found.pairs]
    assert 20 <= len(found.held_out) <= 40 and 150 < len(pairs) <= 200
    assert not set(pairs) & set(found.lengths) and pairs == sorted(pairs) and max(pairs) > 280
