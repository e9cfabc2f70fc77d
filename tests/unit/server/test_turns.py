"""Long answers are written in turns with what else is to be done, and say the same."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from headway.server.api import routes, turns
from headway.server.api.turns import TURN_S, Turns, written_in_turns
from headway.server.limits import LIMITS
from tests.unit.clock import Clock
from tests.unit.server.fake_engine import COMPLETIONS, FakeEngine, FakeServer, RawClient, run

WORDS = tuple(f" {number}" for number in range(60))
LONG = {"max_tokens": 60, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "Hi"}]


def test_others_go_on_when_a_turn_is_over() -> None:
    clock, done = Clock(), []

    async def count() -> None:
        while True:
            done.append("other")
            await asyncio.sleep(0)

    def values() -> Any:
        for number in range(4):
            clock.now_s += 0.6 * TURN_S
            done.append(number)
            yield {"n": number}

    async def write() -> bytes:
        others = asyncio.ensure_future(count())
        written = await written_in_turns(values(), Turns(clock))
        others.cancel()
        return bytes(written)

    assert bytes(run(written_in_turns([]))) == b"[]"
    assert json.loads(run(write())) == [{"n": number} for number in range(4)]
    assert done == [0, 1, "other", 2, 3, "other"]


@pytest.mark.parametrize(
    ("path", "body", "number"),
    [
        ("/v1/completions", {"prompt": [5] * 100, "prompt_logprobs": 3}, 100),
        ("/v1/completions", {"prompt": [5] * 100, "echo": True, "logprobs": 3, "max_tokens": 1}, 100),
        ("/v1/completions", {"prompt": "Hi", "logprobs": 3, **LONG}, 60),
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3, **LONG}, 60),
        ("/v1/chat/completions", {"messages": MESSAGES, "prompt_logprobs": 1, "max_tokens": 1}, 20),
        ("/v1/embeddings", {"input": ["Hi"] * 7}, 7),
    ],
)
def test_what_an_answer_has_much_of_is_written_piece_by_piece(
    path: str, body: dict[str, Any], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = FakeServer(FakeEngine(words=WORDS)).post(path, body).json()
    passed = []

    async def pass_on(self: Turns) -> None:
        passed.append(await asyncio.sleep(0))

    monkeypatch.setattr(turns.Turns, "pass_on", pass_on)
    in_pieces = FakeServer(FakeEngine(words=WORDS)).post(path, body)
    assert in_pieces.status_code == 200
    assert len(passed) >= number
    for answer in (whole, given := in_pieces.json()):
        for name in ("id", "created"):
            answer.pop(name, None)
    assert given == whole


def test_a_stream_that_was_not_read_is_written_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is ahead by a whole answer; the text does not change, and each part is sent by itself."""
    monkeypatch.setattr(routes, "LIMITS", replace(LIMITS, deltas_at_once=7))

    async def stream() -> RawClient:
        client = FakeServer(FakeEngine(words=WORDS)).begin(COMPLETIONS, stream=True, **LONG)
        await client.task
        return client

    client = run(stream())
    bodies = [message["body"] for message in client.sent if message.get("more_body")]
    assert max(body.count(b"data: ") for body in bodies) == 7
    lines = [line.removeprefix("data: ") for line in client.body.decode().split("\n") if line]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]) == "".join(WORDS)
