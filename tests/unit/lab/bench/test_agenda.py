"""Who is due when, and batches seen over time: in the replay of the engine too."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from headway.errors import ConfigError
from headway.lab.bench.datasets import draw_arrivals
from headway.lab.bench.replay import Agenda, replay
from headway.lab.bench.timelines import BatchSample, RequestTimeline, SampleLog, bucket_for, in_flight, token_rate
from headway.lab.workload.requests import BenchRequest
from tests.unit.lab.bench.scripted_engine import ScriptedEngine


def request(num_out: int, arrival_s: float = 0.0, **fields: Any) -> BenchRequest:
    return BenchRequest([0, 1, 2], num_out, arrival_s=arrival_s, **fields)


def play(work: list[BenchRequest], **options: Any) -> Any:
    engine: Any = ScriptedEngine(**options)
    return replay(engine, work, temperature=0.0, now=engine.now, sleep=engine.sleep)


def test_those_with_a_time_in_its_order_and_followers_after_their_leader() -> None:
    agenda = Agenda([request(1, 2.0), request(1, 1.0), request(1, after=1, think_s=0.5), request(1, 9.0, after=1)])
    assert (len(agenda), agenda.next_due_s) == (4, 1.0)
    assert list(agenda.take_due(3.0)) == [(1, 1.0), (0, 2.0)]
    assert (len(agenda), agenda.next_due_s) == (2, float("inf"))
    agenda.ended(1, 4.0)
    assert list(agenda.take_due(100.0)) == [(2, 4.5), (3, 9.0)]
    assert not agenda


@pytest.mark.parametrize("after", [1, 0, 7, -1])
def test_nobody_waits_for_ever(after: int) -> None:
    with pytest.raises(ConfigError, match="does not stand before it"):
        Agenda([request(1, after=after), request(1)])


def test_a_replay_keeps_conversations() -> None:
    done = play([request(2), request(3, after=0, think_s=1.0), request(1, 0.5), request(1, 5.0, after=2)])
    assert [timeline.arrival_s for timeline in done.timelines] == pytest.approx([0.0, 1.02, 0.5, 5.0])
    assert done.timelines[1].token_times_s == pytest.approx([1.03, 1.04, 1.05])
    assert done.timelines[3].ttft_s == pytest.approx(0.01)
    assert done.num_lost == 0


def test_a_lost_turn_does_not_hold_up_the_next() -> None:
    done = play([request(2), request(1, after=0)], lose=["0"])
    assert [timeline.is_complete for timeline in done.timelines] == [False, True]


def test_a_replay_notes_the_batch_after_each_step() -> None:
    done = play([request(2), request(1), request(1)], max_running=2)
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


def test_arrivals_meet_their_rate_and_repeat_by_seed() -> None:
    times = draw_arrivals(1000, 5.0, seed=1)
    assert times[-1] == pytest.approx(200.0) and times == sorted(times)
    assert times == draw_arrivals(1000, 5.0, seed=1) != draw_arrivals(1000, 5.0, seed=2)
    assert draw_arrivals(3, float("inf")) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_burstiness_is_the_spread_of_gaps(burstiness: float, variation: float) -> None:
    times = [0.0, *draw_arrivals(20_000, 1.0, burstiness=burstiness)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert spread / mean == pytest.approx(variation, rel=0.06)


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


@pytest.mark.parametrize(("duration_s", "bucket_s"), [(50.0, 1.0), (51.0, 2.0), (110.0, 5.0), (5.0, 0.1), (0.0, 1e-6)])
def test_buckets_are_round(duration_s: float, bucket_s: float) -> None:
    assert bucket_for(duration_s) == pytest.approx(bucket_s)
