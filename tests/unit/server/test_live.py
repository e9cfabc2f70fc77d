"""The live view without a browser: frames, latencies, advice, who watches when, and the page's files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from importlib import resources
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from headway.console.flags import engine_flags
from headway.front.engine_client import Health
from headway.server.app import create_app
from headway.server.limits import LIMITS
from headway.server.live import live_page
from headway.server.live.batch_advice import GROWTH_WINDOW_S, Trend, Vitals, advise
from headway.server.live.batch_frames import (
    CACHED,
    FREE,
    MAX_CELLS,
    MAX_COLUMNS,
    SHARED,
    Frame,
    FrameBuilder,
    TokenTimes,
)
from headway.server.live.live_page import LiveHub, LiveHubs, live_routes
from headway.server.metrics.price_meter import PriceMeter
from headway.server.metrics.recent import RecentTimes, percentile
from headway.wire import messages
from headway.wire.engine_stats import EngineStats
from headway.wire.messages import BlockMap, BlockRun, SnapshotRow, StepSnapshot, WaitingRow
from tests.unit.engine_stats import engine_stats
from tests.unit.server.fake_engine import FakeServer, until
from tests.unit.server.scripted_engine import ScriptedEngine, ScriptedReplicas


def row(
    name: str, *, prompt: int = 4, computed: int = 0, output: int = 0, tokens: int = 1, cached: int = 0
) -> SnapshotRow:
    return SnapshotRow(name, prompt, computed, output, tokens, 1, tokens == 1 and computed >= prompt, cached)


def chunk(name: str, *, computed: int = 0, tokens: int = 4) -> SnapshotRow:
    return row(name, computed=computed, tokens=tokens)


def decode(name: str, *, output: int = 1) -> SnapshotRow:
    return row(name, computed=3 + output, output=output)


NOTHING = {"num_waiting": 0, "num_used_blocks": 0, "num_used_slots": 0, "waiting": [], "preempted": [], "finished": []}


def step(step_id: int, *rows: SnapshotRow, **given: Any) -> StepSnapshot:
    values = {"step_s": 0.1, "kind": "mixed", "num_running": len(rows), "num_blocks": 8, "blocks": None, **NOTHING}
    return StepSnapshot(step_id=step_id, rows=list(rows), **(values | given))


def frames_of(*steps: StepSnapshot | None) -> list[Frame]:
    """None ends a frame, as the last step does."""
    builder, frames = FrameBuilder(), []
    for each in (*steps, None):
        if each is not None:
            builder.add(each)
        else:
            frames.append(builder.take(len(frames) + 1.0))
    return frames


def frame_of(*steps: StepSnapshot) -> Frame:
    (frame,) = frames_of(*steps)
    return frame


def numbers(frame: Frame) -> dict[str, int]:
    return {each.request_id: each.number for each in frame.rows}


def cells(frame: Frame) -> dict[str, str]:
    return {each.request_id: each.cells for each in frame.rows}


def running(frame: Frame) -> set[str]:
    return {each.request_id for each in frame.rows if each.is_running}


# ---- frames ---------------------------------------------------------------------------------------------------------


def preempted(step_id: int, name: str, num_tokens: int) -> StepSnapshot:
    return step(step_id, preempted=[name], waiting=[WaitingRow(name, num_tokens)])


@pytest.mark.parametrize(
    ("steps", "letters", "columns"),
    [
        (
            [
                step(0, chunk("a")),
                step(1, decode("a"), chunk("b", tokens=2), num_running=2),
                step(2, chunk("b", computed=2, tokens=2), num_running=2),
            ],
            {"a": "cdi", "b": ".cc"},
            [(0, 4), (1, 2), (0, 2)],
        ),
        (  # guesses that were right and wrong have letters of their own
            [
                *(step(i, SnapshotRow("a", 4, 5, 2, 4, 1, True, 0, 3, right)) for i, right in enumerate((2, 0))),
                step(2, decode("a")),
            ],
            {"a": "ard"},
            [(4, 0), (4, 0), (1, 0)],
        ),
        (  # what it found in the cache at first is there no more
            [
                step(0, row("a", prompt=40, computed=32, tokens=8, cached=32)),
                preempted(1, "a", 41),
                step(2, row("a", prompt=40, tokens=41, output=1)),
            ],
            {"a": "hpc"},
            [(0, 8), (0, 0), (0, 41)],
        ),
    ],
    ids=["chunks and tokens", "guesses", "a request that comes back"],
)
def test_each_request_has_one_letter_per_step(
    steps: list[StepSnapshot], letters: dict[str, str], columns: list[tuple[int, int]]
) -> None:
    frame = frame_of(*steps)
    assert cells(frame) == letters
    assert [(each.num_decode_tokens, each.num_chunk_tokens) for each in frame.columns] == columns
    assert frame.rows[0].num_cached_tokens == 0


def test_who_leaves_is_told_once() -> None:
    first, second = frames_of(step(0, decode("a"), decode("b"), finished=["a"]), step(1, decode("b", output=2)), None)
    assert cells(first) == {"a": "d.", "b": "dd"} and running(first) == {"b"}
    assert cells(second) == {"b": ""}


def test_a_preempted_request_comes_back_with_its_number() -> None:
    first, second = frames_of(
        step(0, decode("a"), decode("b")),
        step(1, decode("a", output=2), preempted=["b"], waiting=[WaitingRow("b", 5)]),
        None,
        step(2, decode("a", output=3), chunk("b", tokens=5)),
    )
    assert cells(first)["b"] == "dp" and running(first) == {"a"}
    assert first.waiting == [(numbers(first)["b"], 5)]
    assert numbers(second)["b"] == numbers(first)["b"]


def test_who_is_gone_although_nobody_says_so_does_not_run() -> None:
    builder = FrameBuilder()
    builder.add(step(0, decode("gone"), decode("b"), waiting=[WaitingRow("too", 3)]))
    builder.add(step(1, decode("b", output=2), num_running=1, waiting=[WaitingRow("too", 3)]))
    assert running(builder.take(1.0)) == {"b"}
    builder.became_idle()
    frame = builder.take(2.0)
    assert running(frame) == set() and frame.waiting == []


def test_what_a_request_found_in_the_cache_is_told_as_long_as_it_runs() -> None:
    first, second = frames_of(
        step(0, row("a", prompt=40, computed=32, tokens=8, cached=32), chunk("b")),
        step(1, row("a", prompt=40, computed=40, output=1), decode("b")),
        None,
        step(2, row("a", prompt=40, computed=41, output=2), num_running=2),
    )
    assert cells(first) == {"a": "hd", "b": "cd"}
    assert [[each.num_cached_tokens for each in frame.rows] for frame in (first, second)] == [[32, 0]] * 2


def test_only_the_last_of_too_many_steps_are_drawn() -> None:
    frame = frame_of(*(step(i, decode("a", output=1 + i)) for i in range(MAX_COLUMNS + 5)))
    assert len(frame.columns) == len(cells(frame)["a"]) == MAX_COLUMNS
    assert frame.num_skipped_columns == 5
    assert frame.rows[0].num_output_tokens == MAX_COLUMNS + 5


def test_numbers_of_requests_that_are_gone_are_not_kept() -> None:
    builder = FrameBuilder()
    for i in range(100):
        builder.add(step(i, chunk(f"r{i}"), finished=[f"r{i}"]))
        builder.take(float(i))
    assert len(builder._numbers) == 0


def test_owners_are_the_numbers_of_the_rows() -> None:
    shared, cached = BlockRun(messages.SHARED, 2), BlockRun(messages.CACHED, 2)
    runs = [BlockRun(0, 2), BlockRun(None, 3), BlockRun(1, 1), cached, shared]
    frame, later = frames_of(step(0, decode("a"), decode("b"), blocks=BlockMap(["b", "a"], runs)), None)
    number = numbers(frame)
    assert frame.blocks is not None and later.blocks is None
    assert frame.blocks.runs == [number["b"], 2, FREE, 3, number["a"], 1, CACHED, 2, SHARED, 2]
    assert (frame.blocks.num_cells, frame.blocks.blocks_per_cell) == (10, 1)


def test_a_large_cache_shows_several_blocks_as_one_cell() -> None:
    runs = [BlockRun(0, 1), BlockRun(None, 3), BlockRun(1, 2), BlockRun(0, 4 * MAX_CELLS - 7), BlockRun(None, 1)]
    blocks = frame_of(step(0, decode("a"), decode("b"), blocks=BlockMap(["a", "b"], runs))).blocks
    assert blocks is not None
    assert (blocks.num_cells, blocks.blocks_per_cell) == (MAX_CELLS, 4)
    # A used block shows among free ones; of two owners with as many blocks the first does.
    assert blocks.runs == [0, 1, 1, 1, 0, MAX_CELLS - 2] and sum(blocks.runs[1::2]) == MAX_CELLS


def test_in_a_coarse_map_used_shows_before_cached_and_cached_before_free() -> None:
    builder = FrameBuilder()
    shared, cached = BlockRun(messages.SHARED, 1), BlockRun(messages.CACHED, 2)
    runs = [shared, cached, BlockRun(None, 1), BlockRun(messages.CACHED, 1), BlockRun(None, 4 * MAX_CELLS - 5)]
    builder.add_blocks(BlockMap([], runs))
    assert builder.has_news
    blocks = builder.take(1.0).blocks
    assert blocks is not None and blocks.runs == [SHARED, 1, CACHED, 1, FREE, MAX_CELLS - 2]


def test_a_request_keeps_its_number_from_the_first_map_on() -> None:
    builder = FrameBuilder()
    builder.add_blocks(BlockMap(["a", "b"], [BlockRun(1, 4)]))
    first = builder.take(1.0).blocks
    builder.add(step(0, decode("a"), decode("b")))
    assert first is not None and first.runs == [numbers(builder.take(2.0))["b"], 4]


# ---- latencies ------------------------------------------------------------------------------------------------------


def test_times_are_sums_of_steps() -> None:
    gaps, first_tokens = RecentTimes(now=lambda: 0.0), RecentTimes(now=lambda: 0.0)
    times = TokenTimes(gaps=gaps, first_tokens=first_tokens)
    times.add(step(0, chunk("a", tokens=2), step_s=0.1, waiting=[WaitingRow("b", 4)]))
    times.add(step(1, chunk("a", computed=2, tokens=2), step_s=0.2))  # a's first token
    times.add(step(2, decode("a"), chunk("b"), step_s=0.4))  # a's second, b's first
    times.add(step(3, decode("b"), step_s=0.8, finished=["b"]))
    assert first_tokens.of_last(10) == pytest.approx([0.3, 0.4])
    assert gaps.of_last(10) == pytest.approx([0.4, 0.8])


def test_a_request_that_was_decoding_before_anybody_looked_has_no_first_token() -> None:
    gaps, first_tokens = RecentTimes(), RecentTimes()
    times = TokenTimes(gaps=gaps, first_tokens=first_tokens)
    times.add(step(0, decode("a", output=7)))
    assert first_tokens.of_last(10) == gaps.of_last(10) == []
    times.add(step(1, decode("a", output=8)))
    assert len(gaps.of_last(10)) == 1


def test_a_preempted_request_has_one_long_gap() -> None:
    gaps = RecentTimes(now=lambda: 0.0)
    times = TokenTimes(gaps=gaps, first_tokens=None)
    times.add(step(0, decode("a")))
    times.add(preempted(1, "a", 6))
    times.forget_others(running=set())
    times.add(step(2, row("a", output=2, tokens=6)))
    assert gaps.of_last(10) == pytest.approx([0.2])


def test_old_samples_do_not_count() -> None:
    now = 0.0
    times = RecentTimes(now=lambda: now)
    times.add(1.0)
    now = 8.0
    times.add(2.0)
    now = 11.0
    assert times.of_last(10) == [2.0]
    assert times.of_last(60) == [1.0, 2.0]
    now = 70.5
    assert times.of_last(600) == []


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.5, 51), (0.99, 100), (1.0, 100)])
def test_percentile(share: float, expected: float) -> None:
    assert percentile([float(i) for i in range(1, 101)], share) == expected
    assert percentile([], share) is None


# ---- advice ---------------------------------------------------------------------------------------------------------

BUSY = {"num_running": 8, "max_num_seqs": 8}
EVEN = {"num_gaps": 1000, "gap_p50_s": 0.02, "gap_p99_s": 0.05}
UNEVEN = {"num_gaps": 1000, "gap_p50_s": 0.02, "gap_p99_s": 0.08}


@pytest.mark.parametrize(
    ("vitals", "level", "words"),
    [
        (Vitals(), "calm", "Idle"),
        (Vitals(**UNEVEN, num_preemptions=3), "calm", "Idle"),
        (Vitals(num_running=1, max_num_seqs=8), "calm", "alone"),
        (Vitals(**BUSY, **EVEN), "good", "All is well"),
        (Vitals(**BUSY, **UNEVEN, num_preemptions=3), "warn", "--max-num-seqs"),
        (Vitals(**BUSY, **UNEVEN), "warn", "--max-chunk-tokens"),
        (Vitals(**BUSY, **EVEN, num_preemptions=3), "good", "All is well"),
        (Vitals(**BUSY, num_gaps=5, gap_p50_s=0.01, gap_p99_s=1.0, num_preemptions=1), "good", "All is well"),
        (Vitals(num_running=3, max_num_seqs=8, num_waiting=2, kv_used=0.97), "warn", "KV memory is full"),
        (Vitals(num_running=3, max_num_seqs=8, kv_used=0.97), "good", "All is well"),
        (Vitals(**BUSY, num_waiting=9, queue_growth=5), "warn", "batch is full"),
        (Vitals(num_running=3, max_num_seqs=8, num_waiting=9, queue_growth=5), "warn", "--max-num-batched-tokens"),
        (Vitals(**BUSY, num_waiting=9, queue_growth=-2), "good", "All is well"),
        (Vitals(**BUSY, evicted=0.5, hit_rate=0.2, hit_rate_before=0.6), "warn", "from 60% to 20%"),
        (Vitals(**BUSY, evicted=0.1, hit_rate=0.2, hit_rate_before=0.6), "good", "All is well"),
        (Vitals(**BUSY, evicted=0.5, hit_rate=0.55, hit_rate_before=0.6), "good", "All is well"),
        (Vitals(**BUSY, evicted=0.5, hit_rate=None, hit_rate_before=0.6), "good", "All is well"),
        (Vitals(is_healthy=False, reason="it stopped"), "bad", "it stopped"),
    ],
)
def test_says_what_is_seen_and_names_flags_that_exist(vitals: Vitals, level: str, words: str) -> None:
    advice = advise(vitals)
    assert advice.level == level
    assert words in f"{advice.title} {advice.text}"
    assert {spec.flag for spec in engine_flags()} >= set(re.findall("--[a-z-]+", advice.text))


def trend_of(*looks: tuple[float, EngineStats]) -> Trend:
    trend = Trend()
    for second, stats in looks:
        trend.add(second, stats)
    return trend


def test_a_queue_grows_only_if_it_was_never_empty_nor_by_a_burst() -> None:
    seconds = [(float(second), engine_stats(num_waiting=second)) for second in range(int(2 * GROWTH_WINDOW_S))]
    assert trend_of(*seconds[: int(GROWTH_WINDOW_S)]).queue_growth == 0
    assert trend_of(*seconds).queue_growth == GROWTH_WINDOW_S
    assert trend_of((0.0, engine_stats(num_waiting=1)), (1.0, engine_stats(num_waiting=40))).queue_growth == 0


def test_preemptions_of_the_last_minute() -> None:
    trend = trend_of(*((float(second), engine_stats(num_preemptions=second)) for second in (0, 30, 59, 61)))
    assert trend.num_preemptions == 61 - 30


def test_hit_rates_of_the_last_minute_and_the_one_before() -> None:
    def looked_up(second: int) -> EngineStats:
        hits = 80 * min(second, 60) + 20 * max(second - 60, 0)
        return engine_stats(num_queried_tokens=100 * second, num_hit_tokens=hits, num_evicted_blocks=second)

    assert (Trend().hit_rate, Trend().hit_rate_before, Trend().num_evicted_blocks) == (None, None, 0)
    trend = trend_of(*((float(second), looked_up(second)) for second in range(121)))
    assert (trend.hit_rate_before, trend.hit_rate, trend.num_evicted_blocks) == (0.8, 0.2, 60)
    assert trend_of((0.0, looked_up(0)), (1.0, looked_up(5))).hit_rate is None, "they are too few"


# ---- who looks ------------------------------------------------------------------------------------------------------


def parse(event: bytes) -> tuple[str, dict[str, Any]]:
    head, data = event.decode().rstrip("\n").split("\n")
    return head.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def next_frame(events: AsyncIterator[bytes]) -> dict[str, Any]:
    while True:
        name, data = parse(await asyncio.wait_for(anext(events), 25))
        if name == "frame":
            return data


@contextlib.asynccontextmanager
async def views_of(hubs: Any, *places: str) -> AsyncIterator[list[AsyncIterator[bytes]]]:
    """Of a hub one view, or those of these replicas; they end with it."""
    views = [hubs.of(place).events() for place in places] or [hubs.events()]
    yield views
    for view in views:
        await view.aclose()


@contextlib.asynccontextmanager
async def running_engine(engine: ScriptedEngine) -> AsyncIterator[ScriptedEngine]:
    work = asyncio.create_task(engine.run())
    yield engine
    work.cancel()


async def test_the_engine_is_watched_only_while_somebody_looks() -> None:
    engine = ScriptedEngine()
    hub = LiveHub(engine, frame_s=0.01)
    assert engine.viewers == []
    async with views_of(hub) as (first,):
        name, hello = parse(await anext(first))
        assert name == "hello" and hello["num_blocks"] == 320
        async with views_of(hub) as (second,):
            await next_frame(first)
            await next_frame(second)
            assert len(engine.viewers) == 1 and hub.num_viewers == 2
        await next_frame(first)
        assert len(engine.viewers) == 1
    await until(lambda: engine.viewers == [])
    assert hub.num_viewers == 0


async def test_who_comes_later_is_told_the_last_map() -> None:
    hub = LiveHub(ScriptedEngine(num_blocks=32), frame_s=0.01)
    async with views_of(hub) as (first,), views_of(hub) as (second,):
        while (frame := await next_frame(first))["blocks"] is None:
            pass
        assert frame["blocks"]["runs"] == [FREE, 32]
        assert parse(await anext(second))[0] == "hello"
        assert (await next_frame(second))["blocks"] == frame["blocks"]


async def test_frames_tell_of_a_request_from_beginning_to_end() -> None:
    async with (
        running_engine(ScriptedEngine(step_s=0.002)) as engine,
        views_of(LiveHub(engine, frame_s=0.01)) as (view,),
    ):
        await next_frame(view)
        engine.submit(num_prompt_tokens=300, max_tokens=5)
        strip, frame = "", {}
        while len(strip.replace(".", "")) < 6 or any(each[6] for each in frame["rows"]):
            frame = await next_frame(view)
            strip += "".join(each[7] for each in frame["rows"])
    assert strip.replace(".", "") == "ccdddd"
    assert frame["numbers"]["generation_tokens"] == 5 and frame["numbers"]["num_running"] == 0
    assert frame["numbers"]["ttft_p50_ms"] > frame["numbers"]["itl_p50_ms"] > 0


async def test_prices_are_in_the_frames_only_if_a_device_has_one() -> None:
    """The price of the engine's own tokens, from counters that it keeps."""
    async with running_engine(ScriptedEngine(step_s=0.002)) as engine:
        meter = PriceMeter(3600.0, lambda: 2)
        priced, plain = LiveHub(engine, frame_s=0.01, prices=meter.numbers), LiveHub(engine, frame_s=0.01)
        async with views_of(priced) as (view,), views_of(plain) as (other,):
            assert (await next_frame(other))["numbers"]["prices"] is None
            engine.submit(num_prompt_tokens=300, max_tokens=5)
            await until(lambda: engine.stats.batch.generation_tokens == 5)
            meter.observe(engine.stats)
            while (prices := (await next_frame(view))["numbers"]["prices"])["output"] is None:
                pass
            assert prices["input"] > 0 and prices["recent_output"] > 0
    time = engine.stats.token_time
    assert time.prompt_s > 0 and time.output_s > 0, "two chunks of the prompt, then decodes"


async def test_a_slow_viewer_misses_frames_and_memory_stays_small() -> None:
    async with running_engine(ScriptedEngine(step_s=0.0)) as engine:
        hub = LiveHub(engine, frame_s=0.001)
        async with views_of(hub) as (view,):
            await anext(view)
            engine.submit(num_prompt_tokens=10, max_tokens=60)
            (queue,) = hub._viewers
            await until(queue.full)
            await until(lambda: engine.stats.batch.generation_tokens == 60)
            assert queue.qsize() <= LIMITS.max_queued_events
            assert (await next_frame(view))["numbers"]["generation_tokens"] > 0


async def test_viewers_hear_of_another_engine() -> None:
    engine = ScriptedEngine()
    async with views_of(LiveHub(engine, frame_s=0.01)) as (view,):
        await next_frame(view)
        assert engine.info is not None
        engine.info = msgspec.structs.replace(engine.info, num_blocks=77)
        while (told := parse(await asyncio.wait_for(anext(view), 25)))[0] != "hello":
            pass
        assert told[1]["num_blocks"] == 77


async def test_a_failure_inside_ends_the_streams_and_the_next_viewer_starts_anew() -> None:
    engine = ScriptedEngine()
    hub = LiveHub(engine, frame_s=0.01)
    async with views_of(hub) as (view,):
        await next_frame(view)
        engine.viewers[0].push("no snapshot")  # type: ignore[arg-type]
        assert len([event async for event in view]) <= LIMITS.max_queued_events
    async with views_of(hub) as (again,):
        await next_frame(again)


async def test_first_tokens_that_others_measure_are_shown() -> None:
    first_tokens = RecentTimes()
    first_tokens.add(1.25)
    async with views_of(LiveHub(ScriptedEngine(), first_tokens=first_tokens, frame_s=0.01)) as (view,):
        assert (await next_frame(view))["numbers"]["ttft_p50_ms"] == 1250


# ---- several replicas -----------------------------------------------------------------------------------------------


def two_replicas() -> ScriptedReplicas:
    return ScriptedReplicas(ScriptedEngine(num_blocks=32), ScriptedEngine(num_blocks=64))


async def test_a_viewer_sees_the_steps_of_one_and_the_load_of_all() -> None:
    engine = ScriptedReplicas(ScriptedEngine(step_s=0.002), ScriptedEngine(step_s=0.002))
    hubs = LiveHubs(engine)
    async with views_of(hubs, "0", "1") as views, running_engine(engine.replicas[1]) as second:
        frames = [await next_frame(view) for view in views]
        assert [frame["replica"] for frame in frames] == [0, 1] and hubs.num_viewers == 2
        assert [len(each.viewers) for each in engine.replicas] == [1, 1]
        second.submit(num_prompt_tokens=10, max_tokens=4)
        strip = ""
        while frames[1]["numbers"]["generation_tokens"] < 4:
            frames[1] = await next_frame(views[1])
            strip += "".join(each[7] for each in frames[1]["rows"])
        assert strip.replace(".", "") == "cddd"
        while frames[0]["replicas"][1]["generation_tokens"] < 4:
            frames[0] = await next_frame(views[0])
            assert frames[0]["rows"] == [] and frames[0]["numbers"]["generation_tokens"] == 0


async def test_a_replica_that_is_not_watched_makes_no_snapshots() -> None:
    engine = two_replicas()
    async with views_of(LiveHubs(engine), "1") as (view,):
        name, hello = parse(await anext(view))
        assert name == "hello" and hello["num_blocks"] == 64
        await next_frame(view)
        assert [len(each.viewers) for each in engine.replicas] == [0, 1]


@pytest.mark.parametrize("make_engine", [ScriptedEngine, two_replicas])
async def test_viewers_are_told_of_a_drain(make_engine: Callable[[], Any]) -> None:
    for is_draining in (False, True):
        async with views_of(LiveHubs(make_engine(), is_draining=lambda told=is_draining: told), "0") as (view,):
            frame = await next_frame(view)
            assert frame["numbers"]["draining"] is is_draining
            assert (len(frame["replicas"]), frame["replica"]) == (0 if make_engine is ScriptedEngine else 2, 0)


async def test_one_that_is_away_is_said_to_all_and_only_its_own_view_is_unwell() -> None:
    engine = two_replicas()
    engine.replicas[1].health = Health(False, "it is being restarted")
    hubs = LiveHubs(engine)
    async with views_of(hubs, "0", "1") as views:
        well, unwell = [await next_frame(view) for view in views]
        assert well["numbers"]["ok"] and not unwell["numbers"]["ok"]
        assert unwell["numbers"]["reason"] == "it is being restarted"
        assert [each["ok"] for each in well["replicas"]] == [True, False]
        hubs.close()
        for view in views:
            assert len([event async for event in view]) <= LIMITS.max_queued_events
        assert [event async for event in hubs.of("0").events()] == []
    assert hubs.num_viewers == 0


@pytest.mark.parametrize("wanted", ["2", "-1", "", "one", "00", "1.0", "9" * 5000, "%D9%A1", "0&replica=2"])
def test_a_replica_that_is_not_there(wanted: str) -> None:
    server = FakeServer()
    server.app = create_app(server.services, [*live_routes(two_replicas())])
    answer = server.call("GET", f"/live?replica={wanted}")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["param"] == "replica" and "the first is 0, the last is 1" in error["message"]
    assert len(error["message"]) < 120


async def test_all_viewers_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "LIMITS", replace(LIMITS, max_viewers=2))
    server, hubs = FakeServer(), LiveHubs(two_replicas())
    server.app = create_app(server.services, [*live_routes(two_replicas(), hubs=hubs)])
    async with views_of(hubs, "0", "1") as views, server.client() as client:
        for view in views:
            await next_frame(view)
        assert (await client.get("/live?replica=1")).status_code == 429


# ---- the page's files -----------------------------------------------------------------------------------------------


@pytest.fixture
def client() -> TestClient:
    return TestClient(Starlette(routes=[*live_routes(ScriptedEngine())]))


@pytest.mark.parametrize(
    ("path", "media_type"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/web/app.js", "text/javascript"),
        ("/web/app.css", "text/css"),
        ("/web/favicon.svg", "image/svg+xml"),
    ],
)
def test_types_and_caching(client: TestClient, path: str, media_type: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith(media_type)
    if path == "/":
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        return
    again = client.get(path, headers={"if-none-match": f'"other", W/{answer.headers["etag"]}'})
    assert again.status_code == 304 and again.content == b""


@pytest.mark.parametrize(
    "path",
    ["/web/none.js", "/web/", "/web/..%2flive.py", "/web/%2e%2e/live.py", "/web/..%5clive.py", "/web/a%00.js"],
)
def test_nothing_else_can_be_asked_for(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_the_page_asks_nobody_else_for_anything(client: TestClient) -> None:
    names = set()
    for entry in resources.files("headway.server").joinpath("web").iterdir():
        names.add(entry.name)
        text = entry.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text and "https://" not in text, entry.name
    mentioned = set(re.findall(r"/web/([\w.]+)", client.get("/").text))
    for script in [name for name in names if name.endswith(".js")]:
        mentioned |= set(re.findall(r'from "\./([\w.]+)"', client.get(f"/web/{script}").text))
    assert mentioned == names - {"index.html"}
