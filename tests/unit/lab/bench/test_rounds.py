"""Rounds and replays, timed by the engine's own clock."""

from __future__ import annotations

from typing import Any

import pytest

from headway.errors import ConfigError, HeadwayError
from headway.lab.bench.measures import LATENCY_MEASURES, best_of, ratios_json, values_json
from headway.lab.bench.online import OnlineMetrics, replay
from headway.lab.bench.rounds import check_room, run_round
from headway.lab.bench.times import RoundTimes, percentile
from headway.lab.workload.requests import BenchRequest
from tests.unit.lab.bench.scripted_engine import ScriptedEngine


def request(num_in: int, num_out: int, arrival_s: float = 0.0, num_choices: int = 1) -> BenchRequest:
    return BenchRequest([0] * num_in, num_out, num_choices, arrival_s)


def run(engine: Any, work: list[BenchRequest], **options: Any) -> Any:
    return run_round(engine, work, temperature=0.6, now=engine.now, **options)


def play(engine: Any, work: list[BenchRequest]) -> Any:
    return replay(engine, work, temperature=0.6, now=engine.now, sleep=engine.sleep)


def test_a_round_is_timed_from_the_first_submission_to_the_last_token() -> None:
    ended = []
    done = run(ScriptedEngine(), [request(3, 4), request(5, 6, num_choices=2)], progress=lambda: ended.append(1))
    assert done.times == RoundTimes(pytest.approx(0.06), pytest.approx(0.01), 2, 8, 16)
    assert (done.num_steps, done.num_preemptions, len(ended)) == (6, 2, 2)
    assert done.times.output_tok_s == pytest.approx(16 / 0.06)
    assert done.times.requests_s == pytest.approx(2 / 0.06)


def test_single_tokens_have_no_pace() -> None:
    assert run(ScriptedEngine(), [request(3, 1)]).times.pace_s is None


def test_a_lost_request_voids_the_round() -> None:
    with pytest.raises(HeadwayError, match="Request 1 of the work was lost: lost on purpose"):
        run(ScriptedEngine(lose=["1"]), [request(3, 4), request(3, 4)])


def test_a_missing_token_voids_the_round() -> None:
    engine = ScriptedEngine()

    def step() -> Any:
        stepped = engine.step()
        for output in stepped.outputs:
            output.outputs[0].token_ids.pop()
        return stepped

    with pytest.raises(HeadwayError, match="got 3 tokens instead of 4"):
        run(engine, [request(3, 4)], step=step)


def test_work_that_would_be_cut_short_is_refused() -> None:
    check_room([request(3, 4)], 7)
    with pytest.raises(ConfigError, match="a request of 7 tokens"):
        check_room([request(1, 1), request(3, 4)], 6)


def test_arrivals_are_kept_and_idle_time_is_slept() -> None:
    engine = ScriptedEngine(max_running=1)
    done = play(engine, [request(3, 2, 0.0), request(3, 3, 0.005), request(3, 1, 1.0)])
    times = [timeline.token_times_s for timeline in done.timelines]
    # The second one waits for its seat; the third finds the engine idle.
    assert times == [pytest.approx([0.01, 0.02]), pytest.approx([0.03, 0.04, 0.05]), pytest.approx([1.01])]
    assert engine.slept_s == [pytest.approx(0.95)]
    assert (done.num_steps, done.num_lost, done.duration_s) == (6, 0, pytest.approx(1.01))


def test_latencies_count_from_the_time_a_request_was_due() -> None:
    # Due in the middle of a step, taken at its end.
    done = play(ScriptedEngine(), [request(3, 3, 0.0), request(3, 3, 0.004)])
    assert done.timelines[1].ttft_s == pytest.approx(0.016)
    metrics = OnlineMetrics.of(done.timelines, done.duration_s)
    assert metrics.ttft.percentiles[50] == pytest.approx(13.0)
    assert (metrics.itl.max, metrics.tpot.max) == pytest.approx((10.0, 10.0))
    assert metrics.itl_p99_over_p50 == pytest.approx(1.0)
    assert metrics.e2el.max == pytest.approx(36.0)
    assert metrics.num_preemptions == 2


def test_keys_are_those_of_vllms_serving_benchmark() -> None:
    metrics = OnlineMetrics.of(play(ScriptedEngine(), [request(3, 3)]).timelines, 0.5)
    result = metrics.as_json()
    for key in ("duration", "completed", "total_input_tokens", "total_output_tokens", "request_throughput"):
        assert key in result
    for latency in ("ttft", "tpot", "itl", "e2el"):
        for statistic in ("mean", "median", "std", "p90", "p99", "max"):
            assert f"{statistic}_{latency}_ms" in result
    assert result["output_throughput"] == pytest.approx(6.0)


def test_lost_requests_are_counted_and_left_out() -> None:
    done = play(ScriptedEngine(lose=["0"]), [request(3, 3), request(3, 3)])
    metrics = OnlineMetrics.of(done.timelines, done.duration_s)
    assert (metrics.num_completed, metrics.num_lost, metrics.num_output_tokens) == (1, 1, 3)
    nothing = OnlineMetrics.of(done.timelines[:1], 1.0)
    assert nothing.as_json()["p99_itl_ms"] is None


def test_percentiles_lie_between_the_nearest_ranks() -> None:
    assert [percentile([4.0, 1.0, 3.0, 2.0], p) for p in (0, 50, 90, 100)] == pytest.approx([1.0, 2.5, 3.7, 4.0])


def test_ratios_are_of_times_for_times_and_for_rates() -> None:
    floor = RoundTimes(1.0, 0.002, 1, 10, 100)
    slow, fast = RoundTimes(4.0, 0.02, 1, 10, 100), RoundTimes(2.0, 0.006, 1, 10, 100)
    assert best_of([slow, fast]) is fast
    ratios = ratios_json(LATENCY_MEASURES, fast, floor)
    assert ratios == {"latency_s": 2.0, "ms_per_token": pytest.approx(3.0), "output_tok_s": 2.0}
    values = values_json(LATENCY_MEASURES, fast)
    assert values == {"latency_s": 2.0, "ms_per_token": pytest.approx(6.0), "output_tok_s": 50.0}
