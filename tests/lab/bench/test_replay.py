"""Rounds and replays, timed by the engine's own clock.

Who is due when, and batches seen over time: in the replay of the engine too.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from headway.errors import ConfigError, HeadwayError
from headway_lab.bench.datasets import draw_arrivals
from headway_lab.bench.offline_bench import LATENCY_MEASURES, ratios_json, values_json
from headway_lab.bench.online_metrics import OnlineMetrics
from headway_lab.bench.replay import Agenda, replay, run_round
from headway_lab.bench.timelines import (
    BatchSample,
    RequestTimeline,
    RoundTimes,
    SampleLog,
    best_of,
    bucket_for,
    in_flight,
    token_rate,
)
from headway_lab.workload.bench_requests import BenchRequest
from tests.lab.bench.scripted_engine import ScriptedEngine
from tests.lab.noted_meter import NotedMeter


def request(num_out: int, arrival_s: float = 0.0, **fields: Any) -> BenchRequest:
    return BenchRequest([0, 1, 2], num_out, arrival_s=arrival_s, **fields)


def run(engine: Any, work: list[BenchRequest], **options: Any) -> Any:
    return run_round(engine, work, temperature=0.6, now=engine.now, **options)


def play(engine: Any, work: list[BenchRequest]) -> Any:
    return replay(engine, work, temperature=0.6, now=engine.now, sleep=engine.sleep)


def test_a_round_is_timed_from_the_first_submission_to_the_last_token() -> None:
    ended: list[float] = []
    done = run(ScriptedEngine(), [request(4), request(6, num_choices=2)], progress=NotedMeter(ended))
    assert done.times == RoundTimes(pytest.approx(0.06), pytest.approx(0.01), 2, 6, 16)
    assert (done.num_steps, done.num_preemptions, len(ended)) == (6, 2, 2)
    assert done.times.output_tok_s == pytest.approx(16 / 0.06)
    assert done.times.requests_s == pytest.approx(2 / 0.06)
    assert run(ScriptedEngine(), [request(1)]).times.pace_s is None, "a single token has none"


def test_a_lost_request_voids_the_round() -> None:
    with pytest.raises(HeadwayError, match="Request 1 of the work was lost: lost on purpose"):
        run(ScriptedEngine(lose=["1"]), [request(4), request(4)])
    engine = ScriptedEngine()

    def step() -> Any:
        """One token is missing."""
        stepped = engine.step()
        for output in stepped.outputs:
            output.outputs[0].token_ids.pop()
        return stepped

    with pytest.raises(HeadwayError, match="got 3 tokens instead of 4"):
        run(engine, [request(4)], step=step)


def test_arrivals_are_kept_and_idle_time_is_slept() -> None:
    engine = ScriptedEngine(max_running=1)
    done = play(engine, [request(2, 0.0), request(3, 0.005), request(1, 1.0)])
    times = [timeline.token_times_s for timeline in done.timelines]
    # The second one waits for its seat; the third finds the engine idle.
    assert times == [pytest.approx([0.01, 0.02]), pytest.approx([0.03, 0.04, 0.05]), pytest.approx([1.01])]
    assert engine.slept_s == [pytest.approx(0.95)]
    assert (done.num_steps, done.num_lost, done.duration_s) == (6, 0, pytest.approx(1.01))
    expected = [timeline.expected_first_s for timeline in done.timelines]
    assert expected == [None, pytest.approx(0.03), pytest.approx(1.01)], "forecasts count from the start, too"


def test_latencies_count_from_the_time_a_request_was_due() -> None:
    # Due in the middle of a step, taken at its end.
    done = play(ScriptedEngine(), [request(3, 0.0), request(3, 0.004)])
    assert done.timelines[1].ttft_s == pytest.approx(0.016)
    metrics = OnlineMetrics.of(done.timelines, done.duration_s)
    assert metrics.ttft.percentiles[50] == pytest.approx(13.0)
    assert (metrics.itl.max, metrics.tpot.max) == pytest.approx((10.0, 10.0))
    assert metrics.itl_p99_over_p50 == pytest.approx(1.0)
    assert metrics.e2el.max == pytest.approx(36.0)
    assert metrics.num_preemptions == 2


def test_lost_requests_are_counted_and_left_out() -> None:
    done = play(ScriptedEngine(lose=["0"]), [request(3), request(3)])
    metrics = OnlineMetrics.of(done.timelines, done.duration_s)
    assert (metrics.num_completed, metrics.num_lost, metrics.num_output_tokens) == (1, 1, 3)
    nothing = OnlineMetrics.of(done.timelines[:1], 1.0)
    assert nothing.as_json()["p99_itl_ms"] is None


def test_ratios_are_of_times_for_times_and_for_rates() -> None:
    floor = RoundTimes(1.0, 0.002, 1, 10, 100)
    slow, fast = RoundTimes(4.0, 0.02, 1, 10, 100), RoundTimes(2.0, 0.006, 1, 10, 100)
    assert best_of([slow, fast]) is fast
    ratios = ratios_json(LATENCY_MEASURES, fast, floor)
    assert ratios == {"latency_s": 2.0, "ms_per_token": pytest.approx(3.0), "output_tok_s": 2.0}
    values = values_json(LATENCY_MEASURES, fast)
    assert values == {"latency_s": 2.0, "ms_per_token": pytest.approx(6.0), "output_tok_s": 50.0}


def test_those_with_a_time_in_its_order_and_followers_after_their_leader() -> None:
    work = [request(1, 2.0), request(1, 1.0), request(1, after=1, think_s=0.5), request(1, 9.0, after=1)]
    agenda = Agenda(work)
    assert (len(agenda), agenda.next_due_s) == (4, 1.0)
    assert list(agenda.take_due(3.0)) == [(1, 1.0), (0, 2.0)]
    assert (len(agenda), agenda.next_due_s) == (2, float("inf"))
    agenda.ended(1, 4.0)
    assert list(agenda.take_due(100.0)) == [(2, 4.5), (3, 9.0)]
    assert not agenda
    for after in (1, 0, 7, -1):
        with pytest.raises(ConfigError, match="does not stand before it"):
            Agenda([request(1, after=after), request(1)])


def test_a_replay_keeps_conversations() -> None:
    work = [request(2), request(3, after=0, think_s=1.0), request(1, 0.5), request(1, 5.0, after=2)]
    done = play(ScriptedEngine(), work)
    assert [timeline.arrival_s for timeline in done.timelines] == pytest.approx([0.0, 1.02, 0.5, 5.0])
    assert done.timelines[1].token_times_s == pytest.approx([1.03, 1.04, 1.05])
    assert done.timelines[3].ttft_s == pytest.approx(0.01)
    lost = play(ScriptedEngine(lose=["0"]), [request(2), request(1, after=0)])
    assert [timeline.is_complete for timeline in lost.timelines] == [False, True], "it does not hold up the next"


def test_a_replay_notes_the_batch_after_each_step() -> None:
    done = play(ScriptedEngine(max_running=2), [request(2), request(1), request(1)])
    assert done.samples == [
        BatchSample(pytest.approx(0.01), 2, 0, 0.2),
        BatchSample(pytest.approx(0.02), 0, 0, 0.0),
    ]


def test_samples_are_thinned_evenly() -> None:
    log = SampleLog(most=8)
    for step in range(100):
        if log.is_due():
            log.add(BatchSample(float(step), 1, 0, 0.0))
    times = [sample.at_s for sample in log.samples]
    assert len(times) <= 8 and times[0] == 0.0 and times[-1] >= 80
    assert len({b - a for a, b in itertools.pairwise(times)}) == 1


def test_an_engine_that_falls_idle_is_seen_idle_however_much_is_thinned() -> None:
    """A sample counts until the next one: without the last of a batch it would seem to run until the next request."""
    log = SampleLog(most=64)
    for step in range(2_000):
        is_idle = step % 100 == 99
        if log.is_due(is_idle=is_idle):
            log.add(BatchSample(float(step), 0 if is_idle else 3, 0, 0.0))
    idle = [sample.at_s for sample in log.samples if sample.is_idle]
    assert idle == [float(step) for step in range(99, 2_000, 100)]
    assert len(log.samples) <= 64 and log.samples == sorted(log.samples, key=lambda sample: sample.at_s)


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_burstiness_is_the_spread_of_gaps(burstiness: float, variation: float) -> None:
    times = [0.0, *draw_arrivals(20_000, 1.0, burstiness=burstiness)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert spread / mean == pytest.approx(variation, rel=0.06)
    times = draw_arrivals(1000, 5.0, seed=1, burstiness=burstiness)
    assert times[-1] == pytest.approx(200.0) and times == sorted(times)
    assert times != draw_arrivals(1000, 5.0, seed=2, burstiness=burstiness)
    assert draw_arrivals(3, float("inf")) == [0.0, 0.0, 0.0]


def test_curves() -> None:
    timelines = [
        RequestTimeline(0.0, 1, 2, [1.0, 2.0]),
        RequestTimeline(0.5, 1, 3, [1.2, 1.4, 3.9]),
        RequestTimeline(9.0, 1, 1),
    ]
    flying = in_flight(timelines)
    assert (list(flying.xs), list(flying.ys), flying.peak) == ([0.0, 0.5, 2.0, 3.9], [1, 2, 1, 0], 2)
    rate = token_rate(timelines, 2.0)
    assert (list(rate.xs), list(rate.ys)) == ([1.0, 3.0], [1.5, 1.0])


def test_a_curve_is_as_long_as_what_happened_not_as_the_time_that_passed() -> None:
    """Idle buckets are left out, but for those where the curve has to be at 0."""
    year_s = 365 * 86_400.0
    rate = token_rate([RequestTimeline(0.0, 1, 3, [0.5, year_s + 0.5, year_s + 0.6])], 1.0)
    assert list(zip(rate.xs, rate.ys)) == [(0.5, 1.0), (1.5, 0.0), (year_s - 0.5, 0.0), (year_s + 0.5, 2.0)]


@pytest.mark.parametrize(("duration_s", "bucket_s"), [(50.0, 1.0), (51.0, 2.0), (110.0, 5.0), (5.0, 0.1), (0.0, 1e-6)])
def test_buckets_are_round(duration_s: float, bucket_s: float) -> None:
    assert bucket_for(duration_s) == pytest.approx(bucket_s)
