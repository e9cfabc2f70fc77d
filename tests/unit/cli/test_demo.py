"""The demo shows what it promises, and its pictures fit the terminal."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from headway.cli import demo
from headway.cli.batch_watch import BatchWatch, Cell, State, WatchedRequest
from headway.cli.demo import REQUESTS
from headway.cli.live_view import BatchPicture, LiveView, PlainView, summary_table
from headway.cli.main import main
from headway.config import EngineConfig
from tests.unit.cli.fake_engine import FakeEngine

LONG = "story"


def drawn(watch: BatchWatch, width: int, encoding: str = "utf-8") -> list[str]:
    """The picture as lines of text."""
    raw = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=raw, width=width, height=24)
    console.print(BatchPicture(watch, "some-model"))
    raw.seek(0)
    return raw.read().splitlines()


class Camera:
    """A view that keeps what each request did in each step and, unless told otherwise, every frame."""

    def __init__(self, width: int = 80, encoding: str = "utf-8", *, keeps_frames: bool = True) -> None:
        self.frames: list[list[str]] = []
        self.columns: list[dict[str, Cell]] = []
        self._width = width
        self._encoding = encoding
        self._keeps_frames = keeps_frames

    def arrived(self, request: WatchedRequest) -> None:
        assert request.state is State.WAITING

    def stepped(self, watch: BatchWatch) -> None:
        if self._keeps_frames:
            self.frames.append(drawn(watch, self._width, self._encoding))
        self.columns.append({name: request.cells[-1] for name, request in watch.requests.items()})


def make_engine(**options: Any) -> FakeEngine:
    # A token is a character here, so the prompts are about four times as long as with a real tokenizer.
    config = demo.demo_config({"num_kv_blocks": 150, "block_size": 64, "max_chunk_tokens": 256, **options})
    return FakeEngine(config, lambda prompt: "x" * (30 + len(prompt) % 70), max_model_len=8192)


@pytest.fixture(scope="module")
def film() -> tuple[Camera, BatchWatch]:
    camera = Camera(width=80)
    return camera, demo.run_demo(make_engine(max_num_batched_tokens=512), camera)


def test_all_requests_finish(film: tuple[Camera, BatchWatch]) -> None:
    _, watch = film
    assert len(watch.requests) == 12
    assert {request.state for request in watch.requests.values()} == {State.DONE}
    assert {request.finish_reason for request in watch.requests.values()} <= {"stop", "length"}


def test_chunks_of_the_long_prompt_share_steps_with_decodes(film: tuple[Camera, BatchWatch]) -> None:
    camera, watch = film
    shared = [c for c in camera.columns if c[LONG] is Cell.CHUNK and Cell.DECODE in c.values()]
    assert len(shared) >= 8
    assert watch.num_mixed_steps >= len(shared)


def test_requests_enter_and_leave_while_others_run(film: tuple[Camera, BatchWatch]) -> None:
    camera, _ = film
    inside = [{n for n, cell in c.items() if cell in (Cell.CHUNK, Cell.DECODE)} for c in camera.columns]
    entered = sum(bool(after - before) and bool(after & before) for before, after in itertools.pairwise(inside))
    left = sum(bool(before - after) and bool(after & before) for before, after in itertools.pairwise(inside))
    assert entered >= 5
    assert left >= 5


def test_every_frame_fits_a_small_terminal(film: tuple[Camera, BatchWatch]) -> None:
    camera, _ = film
    for frame in camera.frames:
        assert len(frame) <= 23
        assert max(map(len, frame)) <= 80


def test_frame_shows_the_batch(film: tuple[Camera, BatchWatch]) -> None:
    camera, _ = film
    step = next(i for i, c in enumerate(camera.columns) if c[LONG] is Cell.CHUNK and Cell.DECODE in c.values())
    frame = "\n".join(camera.frames[step])
    assert "some-model" in frame
    assert re.search(rf"{LONG} +prefill .*█ +\d+/\d+ in", frame)
    assert re.search(r"sky +decode .*▪", frame)
    assert re.search(r"this step · [1-9]\d* decode \+ [1-9]\d* chunk of 512 tokens", frame)
    assert re.search(r"KV cache · \d+ of 150 blocks held", frame)


def test_block_map_has_a_cell_per_block(film: tuple[Camera, BatchWatch]) -> None:
    camera, _ = film
    for frame in camera.frames:
        start = next(i for i, line in enumerate(frame) if "KV cache" in line)
        held = int(re.search(r"(\d+) of 150 blocks", frame[start])[1])  # type: ignore[index]
        cells = "".join(frame[start + 1 : -1])
        assert cells.count("■") == held
        assert cells.count("■") + cells.count("□") + cells.count("·") == 150


def test_what_is_found_in_the_cache_is_shown() -> None:
    watch = demo.run_demo(make_engine(block_size=4, num_kv_blocks=2000), Camera(keeps_frames=False))
    found = {name: request.num_cached_tokens for name, request in watch.requests.items()}
    assert found["capital"] == 0, "the first to come finds nothing"
    assert all(num_tokens >= 4 for name, num_tokens in found.items() if name != "capital"), "they begin alike"
    last = "\n".join(drawn(watch, width=90))
    sky = watch.requests["sky"]
    assert f"{found['sky']}+{sky.num_prompt_tokens - found['sky']} in" in last
    assert re.search(r"KV cache .* · \d+ cached", last) and "□" in last
    assert watch.summary().num_cached_tokens == sum(found.values())


def test_nothing_is_cached_without_a_cache() -> None:
    watch = demo.run_demo(make_engine(enable_prefix_caching=False), Camera(keeps_frames=False))
    assert watch.summary().num_cached_tokens == 0 and "cached" not in "\n".join(drawn(watch, width=90))


def test_terminal_without_unicode_gets_ascii() -> None:
    camera = Camera(width=100, encoding="ascii")
    demo.run_demo(make_engine(), camera)
    text = "\n".join(camera.frames[40])
    assert re.search(rf"{LONG} +prefill .*#", text)
    assert re.search(r"sky +decode .*[+]", text)


def test_preemption_is_shown_and_survived() -> None:
    camera = Camera(width=80)
    engine = make_engine(num_kv_blocks=600, block_size=8, short_prompt_share=0.0, long_prompt_step_ms=0.0)
    watch = demo.run_demo(engine, camera)
    assert watch.num_preemptions > 0
    assert any(Cell.PREEMPTED in column.values() for column in camera.columns)
    assert watch.count(State.DONE) == len(REQUESTS)


def test_plain_view_tells_who_enters_computes_and_leaves() -> None:
    console = Console(file=io.StringIO(), width=80)
    engine = make_engine(max_num_batched_tokens=512)
    with PlainView(console, "some-model") as view:
        watch = demo.run_demo(engine, view)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.startswith("some-model\n")
    for request in REQUESTS:
        assert f"{request.name} enters with" in text
        assert f"{request.name} leaves after" in text
    assert len(re.findall(rf"{LONG} computes", text)) >= 8
    assert len(text.splitlines()) < watch.num_steps


def test_the_command_without_a_terminal_prints_plain_lines(
    fake_engine: Callable[..., list[FakeEngine]], capsys: pytest.CaptureFixture[str]
) -> None:
    fake_engine(lambda prompt: "answered. " * 4, max_model_len=8192)
    assert main(["demo", "--num-kv-blocks", "2000"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "answered. answered." in out
    for name in ("story leaves after", "output tokens/s", "mean batch size", "mean KV waste", "TTFT p50"):
        assert name in out


def test_live_view_draws_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=80, height=24, force_terminal=True)
    with LiveView(console, "some-model") as view:
        demo.run_demo(make_engine(), view)
    assert "done 12" in console.file.getvalue()  # type: ignore[attr-defined]


def test_summary_is_computed_over_the_time_spent_in_steps(film: tuple[Camera, BatchWatch]) -> None:
    _, watch = film
    summary = watch.summary()
    num_out = sum(len(request.text) for request in watch.requests.values())
    # The fake engine's clock advances 1 ms between two looks; a step looks twice.
    assert summary.elapsed_s == pytest.approx(watch.num_steps / 1000)
    assert summary.output_tokens_per_s == pytest.approx(num_out / summary.elapsed_s)
    assert 0 < summary.mean_kv_waste < 0.5
    assert 1 < summary.mean_batch_size <= 8
    assert summary.ttft_p50_s > 0
    console = Console(file=io.StringIO(), width=80)
    console.print(summary_table(summary))
    assert "mean KV waste" in console.file.getvalue()  # type: ignore[attr-defined]


def test_memory_size_takes_the_place_of_the_block_count() -> None:
    config: EngineConfig = demo.demo_config({"kv_cache_memory": 2**20})
    assert config.cache.num_kv_blocks is None
    assert config.cache.kv_cache_memory == 2**20
