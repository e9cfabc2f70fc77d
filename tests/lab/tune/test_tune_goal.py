"""Which requests are good, and which of two runs is better."""

from __future__ import annotations

import pytest

from headway_lab.bench.online_metrics import OnlineMetrics
from headway_lab.bench.timelines import RequestTimeline
from headway_lab.tune.tune_goal import Goal, Score


def timeline(ttft_s: float, *gaps_s: float) -> RequestTimeline:
    times = [ttft_s]
    for gap_s in gaps_s:
        times.append(times[-1] + gap_s)
    return RequestTimeline(0.0, 10, len(times), times)


@pytest.mark.parametrize(
    ("slo", "good", "bad"),
    [
        ("p99_ttft_ms=1000", timeline(1.0, 9.0), timeline(1.1, 0.1)),
        ("mean_tpot_ms=100", timeline(9.0, 0.14, 0.05), timeline(0.1, 0.15, 0.06)),
        ("mean_itl_ms=100", timeline(9.0, 0.14, 0.05), timeline(0.1, 0.15, 0.06)),
        ("max_itl_ms=100", timeline(9.0, 0.09, 0.09), timeline(0.1, 0.01, 0.11)),
        ("p50_itl_ms=100", timeline(9.0, 0.09, 0.09, 5.0), timeline(0.1, 0.2, 0.2, 0.0)),
        ("p99_e2el_ms=2000", timeline(1.0, 1.0), timeline(1.0, 1.1)),
    ],
)
def test_what_a_promise_means_for_one_request(slo: str, good: RequestTimeline, bad: RequestTimeline) -> None:
    goal = Goal.parse([slo])
    assert goal.is_good(good)
    assert not goal.is_good(bad)


def test_all_promises_have_to_be_kept_and_all_tokens_to_be_there() -> None:
    goal = Goal.parse(["p99_ttft_ms=1000", "max_itl_ms=100"])
    assert goal.is_good(timeline(1.0, 0.09))
    assert not goal.is_good(timeline(1.0, 0.2))
    assert not goal.is_good(timeline(2.0, 0.1))
    assert not goal.is_good(RequestTimeline(0.0, 10, 3, [0.1, 0.2]))
    assert goal.is_good(timeline(1.0)), "a single token has no gaps"


def test_the_score_of_a_run() -> None:
    lines = [timeline(0.5, 0.1), timeline(2.0, 0.1), timeline(0.5, 0.1), timeline(0.5, 0.1)]
    goal = Goal.parse(["p50_ttft_ms=1000", "p99_ttft_ms=1000"])
    score = goal.score(lines, OnlineMetrics.of(lines, 2.0))
    assert (score.goodput, score.good_share) == (1.5, 0.75)
    assert score.tail == pytest.approx(1.955)
    assert score.num_missed == 1
    free = Goal().score(lines, OnlineMetrics.of(lines, 2.0))
    assert (free.goodput, free.tail) == (2.0, pytest.approx(100.0))


def test_better_means_clearly_better() -> None:
    base = Score(10.0, 1.0, tail=1.0)
    assert Score(10.1, 1.0, tail=9.0).is_better_than(base)
    assert not Score(10.04, 1.0, tail=1.0).is_better_than(base), "about the same"
    assert Score(9.96, 1.0, tail=0.9).is_better_than(base), "about the same goodput, a shorter tail"
    assert not Score(9.96, 1.0, tail=0.99).is_better_than(base)
    assert not Score(9.9, 1.0, tail=0.1).is_better_than(base)
    assert not base.is_better_than(base)
