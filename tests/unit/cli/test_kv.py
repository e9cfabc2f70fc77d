"""`headway kv` against the live stream of a server with a pretended engine, and against none at all."""

from __future__ import annotations

import io
import re
import socket
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headway.cli import kv, kv_state, main
from headway.cli.kv_picture import KVPicture, page
from headway.cli.kv_state import BlockCells, Holder, KVState, LiveEvent, Run, states
from tests.unit.server.http_thread import serving
from tests.unit.server.scripted_engine import ScriptedEngine, create_app

NUMBERS = {
    "num_running": 3,
    "num_waiting": 1,
    "num_used_blocks": 20,
    "num_cached_blocks": 30,
    "num_host_blocks": 0,
    "num_moved_out_blocks": 0,
    "num_moved_in_blocks": 0,
    "num_used_slots": 300,
    "num_table_entries": 50,
    "num_queried_tokens": 4000,
    "num_hit_tokens": 1000,
    "num_saved_tokens": 900,
    "num_inserted_blocks": 70,
    "num_evicted_blocks": 12,
    "num_preemptions": 2,
    "num_recomputed_tokens": 55,
    "hit_rate": 0.5,
}
INFO = {"model": "org/small<1>", "block_size": 16, "num_blocks": 100, "prefix_caching": True, "num_host_slots": 0}
HELLO = LiveEvent("hello", INFO)
RUNS = [0, 4, 27, 1, -3, 15, -2, 30, -1, 50]


def frame(blocks: dict[str, Any] | None = None, **numbers: Any) -> LiveEvent:
    return LiveEvent("frame", {"blocks": blocks, "numbers": NUMBERS | numbers})


def blocks(runs: list[int], blocks_per_cell: int = 1) -> dict[str, Any]:
    return {"runs": runs, "num_cells": sum(runs[1::2]), "blocks_per_cell": blocks_per_cell}


@pytest.fixture
def state() -> KVState:
    (found,) = states(iter([HELLO, frame(blocks(RUNS))]))
    return found


def drawn(state: KVState, *, width: int = 80, encoding: str = "utf-8", **options: Any) -> list[str]:
    raw = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(file=raw, width=width, **options).print(KVPicture(state))
    raw.seek(0)
    return raw.read().splitlines()


# ---- what the stream says -------------------------------------------------------------------------------------------


def test_a_state_is_what_hello_and_frame_say(state: KVState) -> None:
    assert state.model == "small<1>"
    assert (state.num_live_blocks, state.num_cached_blocks, state.num_free_blocks) == (20, 30, 50)
    assert state.waste == pytest.approx(1 - 300 / 320)
    assert (state.sharing_factor, state.hit_rate, state.recent_hit_rate) == (2.5, 0.25, 0.5)
    assert state.cells is not None
    assert state.cells.runs[1:4] == (Run(Holder.ONE, 27, 1), Run(Holder.SHARED, 0, 15), Run(Holder.CACHED, 0, 30))


def test_a_map_holds_until_there_is_another() -> None:
    events = [HELLO, frame(), frame(blocks([-1, 100])), frame(), HELLO, frame()]
    maps = [each.cells and each.cells.runs for each in states(iter(events))]
    free = (Run(Holder.FREE, 0, 100),)
    assert maps == [None, free, free, None], "another engine has another map"


def test_an_empty_cache_divides_by_nothing() -> None:
    nothing = dict.fromkeys(NUMBERS, 0) | {"hit_rate": None}
    (found,) = states(iter([HELLO, frame(**nothing)]))
    assert (found.waste, found.sharing_factor, found.hit_rate) == (0.0, 1.0, None)
    assert "– in the last minute" in "\n".join(drawn(found))


# ---- pictures -------------------------------------------------------------------------------------------------------


def test_the_map_has_a_sign_per_block(state: KVState) -> None:
    lines = drawn(state)
    start = next(i for i, line in enumerate(lines) if "map" in line)
    assert "".join(line.strip() for line in lines[start + 1 :]) == "aaaab" + "*" * 15 + "+" * 30 + "." * 50
    assert max(map(len, lines)) <= 80


def test_the_numbers_are_told(state: KVState) -> None:
    text = "\n".join(drawn(state))
    for part in (
        "20 live · 30 cached · 50 free · of 100, 16 tokens each",
        "×2.50 requests per live block",
        "6.2% of the room",
        "50.0% in the last minute · 25.0% since the start",
        "900 prompt tokens found in the cache",
        "55 tokens, after 2 preemptions",
        "12 of 70 blocks",
        "3 running · 1 waiting",
    ):
        assert part in text
    bar = text.splitlines()[1]
    assert (bar.count("█"), bar.count("▒"), bar.count("·")) == (16, 23, 39)


def test_host_memory_is_told_where_there_is_some() -> None:
    hello = LiveEvent("hello", INFO | {"num_host_slots": 2000})
    numbers = {"num_host_blocks": 1500, "num_moved_out_blocks": 1700, "num_moved_in_blocks": 40}
    (found,) = states(iter([hello, frame(**numbers)]))
    told = "1,500 of 2,000 blocks in host memory · 1,700 moved out, 40 back"
    assert told in "\n".join(drawn(found)) and told in page(found, datetime(2026, 1, 2))
    assert "host" not in "\n".join(drawn(*states(iter([HELLO, frame()]))))


def test_a_terminal_gets_colours_and_another_only_ascii(state: KVState) -> None:
    coloured = "\n".join(drawn(state, force_terminal=True, color_system="256"))
    assert "\x1b[" in coloured and "■" in coloured and "◆" in coloured and "□" in coloured
    assert "\n".join(drawn(state, encoding="ascii")).isascii()


def test_large_caches_and_caches_without_prefixes_say_so(state: KVState) -> None:
    import dataclasses

    large = dataclasses.replace(state, cells=BlockCells((Run(Holder.FREE, 0, 10),), blocks_per_cell=7))
    assert "a sign per 7 blocks" in "\n".join(drawn(large))
    off = "\n".join(drawn(dataclasses.replace(state, is_caching=False)))
    assert "--no-enable-prefix-caching" in off and "hit rate" not in off


def test_the_page_stands_for_itself(state: KVState) -> None:
    text = page(state, datetime(2026, 1, 2, 3, 4, 5))
    assert "small&lt;1&gt;" in text and "small<1>" not in text
    assert not re.search(r"https?://|<script|<link|src=", text)
    inside = text[text.index('class="map"') :]
    assert inside.count("<i ") == 100
    assert [inside.count(f'class="{name}"') for name in ("shared", "cached", "free")] == [15, 30, 50]
    assert 'title="request 28"' in inside and "2026-01-02 03:04:05" in text


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(create_app(ScriptedEngine(num_blocks=40), api_key="sesame")) as found:
        yield found


def run(*arguments: str) -> int:
    return main.main(["kv", *arguments])


def test_a_look_at_a_server(url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("--url", f"{url}/", "--api-key", "sesame") == 0
    out = capsys.readouterr().out
    assert "0 live · 0 cached · 40 free · of 40" in out and "." * 40 in out
    monkeypatch.setenv("HEADWAY_API_KEY", "sesame")
    assert run("--url", url) == 0
    assert "40 free" in capsys.readouterr().out


def test_a_page_is_written(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kv.html"
    assert run("--url", url, "--api-key", "sesame", "--html", str(file)) == 0
    assert file.read_text().startswith("<!doctype html>")
    assert f"Wrote {file}" in capsys.readouterr().out


def test_watching_goes_on_until_interrupted(
    state: KVState, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def events(*_: object) -> Iterator[LiveEvent]:
        yield HELLO
        yield frame()
        yield frame(blocks(RUNS))
        yield frame(num_running=99)  # too soon after the one before
        raise KeyboardInterrupt

    monkeypatch.setattr(kv_state, "live_events", events)
    assert run("--watch", "5") == 0
    out = capsys.readouterr().out
    assert out.count("requests per live block") == 1 and "99 running" not in out


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (("--url", "127.0.0.1:8000"), "--url must be an address such as http://127.0.0.1:8000", 2),
        (("--url", "file:///etc/hosts"), "--url must be an address", 2),
        (("--url", "http://127.0.0.1:port"), "--url must be an address", 2),
        (("--url", "http://127.0.0.1:9"), "Start one with 'headway serve', or name another with --url.", 1),
        (("--url", "http://127.0.0.1:9", "--watch", "0"), "--watch must be at least 0.1 seconds", 2),
        (("--watch", "--html", "x"), "does not go with --watch", 2),
        (("--url", "URL"), "--api-key or $HEADWAY_API_KEY", 1),
        (("--url", "URL", "--api-key", "wrong"), "--api-key or $HEADWAY_API_KEY", 1),
        (("--url", "URL", "--api-key", "two\nlines"), "The API key cannot be sent", 2),
        (("--url", "URL", "--api-key", "sesame", "--html", "/no/such/kv.html"), "Cannot write '/no/such/kv.html'", 2),
    ],
)
def test_what_cannot_work_is_one_clear_line(
    url: str,
    arguments: tuple[str, ...],
    message: str,
    code: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HEADWAY_API_KEY", raising=False)
    assert run(*(url if word == "URL" else word for word in arguments)) == code
    error = capsys.readouterr().err
    assert error.startswith("headway: error: ") and message in error and error.count("\n") == 1


def test_something_else_that_answers_is_no_headway_server(capsys: pytest.CaptureFixture[str]) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b"none"})

    with serving(app) as found:
        assert run("--url", found) == 1
    assert "is not a Headway server (status 404)" in capsys.readouterr().err


def test_a_server_that_says_nothing_is_not_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_state, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert run("--url", f"http://127.0.0.1:{listener.getsockname()[1]}") == 1
    assert "has said nothing for 0.2 s" in capsys.readouterr().err


def test_a_stream_that_ends_before_it_began() -> None:
    with pytest.raises(kv_state.ServerUnreachableError, match="may be stopping"):
        kv._first_whole(iter(()))
