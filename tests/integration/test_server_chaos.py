"""Many clients that behave as clients do: some leave, some send nonsense; meanwhile the engine is killed.

$HEADWAY_CHAOS_SECONDS makes it longer. The engine has no model, so that all the time goes into serving; with
$HEADWAY_CHAOS_MODEL=1 the embedded model answers instead, with fewer tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from urllib.parse import urlsplit

import httpx

from tests.integration.server_process import ServerProcess, running_server

DURATION_S = float(os.environ.get("HEADWAY_CHAOS_SECONDS", "3"))
WITH_MODEL = bool(os.environ.get("HEADWAY_CHAOS_MODEL"))
NUM_CLIENTS = 64
MIN_REQUESTS = 4  # of each client, however slow the machine is
MAX_WORDS, MAX_TOKENS = (30, 24) if WITH_MODEL else (400, 300)
FACTORY = () if WITH_MODEL else ("--engine-factory", "headway.engine_process.engine_without_model:create_engine")
KINDS = ("whole", "stream", "stream", "leave", "leave early", "bad", "half a body")
PATIENCE_S = 60.0
BAD_BODIES = (
    b"{",
    b'{"prompt": 5, "messages": 5}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "Hi", "n": 1000000}',
    b'{"prompt": "Hi", "temperature": NaN}',
    b'{"prompt": "Hi", "nonsense": 1}',
    b'{"prompt": [99999999]}',
    b"[" * 10_000,
)


class Client:
    """Sends requests one after the other until the time is up, and counts how they ended."""

    def __init__(self, url: str, seed: int, outcomes: Counter[str]) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname, parts.port
        self._random = random.Random(seed)
        self._outcomes = outcomes

    async def run(self, until_s: float) -> None:
        num_requests = 0
        while num_requests < MIN_REQUESTS or time.monotonic() < until_s:
            outcome = await asyncio.wait_for(self._one(), PATIENCE_S)
            num_requests += 1
            self._outcomes[outcome] += 1
            if outcome.startswith("error"):
                await asyncio.sleep(0.1)

    async def _one(self) -> str:
        kind = self._random.choice(KINDS)
        is_chat = self._random.random() < 0.5
        is_stream = kind in ("stream", "leave")
        body = self._random.choice(BAD_BODIES) if kind == "bad" else self._body(is_chat=is_chat, stream=is_stream)
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(
                b"POST /v1/%scompletions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                b"connection: close\r\ncontent-length: %d\r\n\r\n" % (b"chat/" if is_chat else b"", len(body))
            )
            writer.write(body[: len(body) // 2] if kind == "half a body" else body)
            if kind in ("leave early", "half a body"):
                await asyncio.sleep(self._random.random() * 0.02)
                return kind
            if kind == "leave":
                await reader.read(self._random.randrange(1, 4000))
                return kind
            return self._judge(kind, await reader.read())
        finally:
            writer.close()

    def _body(self, *, is_chat: bool, stream: bool) -> bytes:
        words = "word " * self._random.randrange(1, MAX_WORDS)
        fields = {
            "max_tokens": self._random.randrange(1, MAX_TOKENS),
            "n": self._random.choice((1, 1, 1, 3)),
            "stream": stream,
            "ignore_eos": True,
        }
        fields |= {"messages": [{"role": "user", "content": words}]} if is_chat else {"prompt": words}
        return json.dumps(fields).encode()

    def _judge(self, kind: str, answer: bytes) -> str:
        """How a request that nobody cut short has ended; anything but an end or an error is a failure."""
        head, _, body = answer.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if kind == "bad":
            assert status == 400, answer
            return "bad, refused"
        if status != 200:
            assert status in (429, 503) and json.loads(body)["error"]["message"], answer
            return f"error {status}"
        if kind == "stream":
            assert b"data: [DONE]" in body, answer[-300:]
            return "error in stream" if b'"error":' in body else "finished"
        assert json.loads(body)["usage"]["completion_tokens"] > 0, answer
        return "finished"


async def _storm(server: ServerProcess) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    until_s = time.monotonic() + DURATION_S
    clients = [asyncio.create_task(Client(server.url, seed, outcomes).run(until_s)) for seed in range(NUM_CLIENTS)]
    await asyncio.sleep(DURATION_S / 3)
    os.kill(server.engine_pid, signal.SIGKILL)
    await asyncio.gather(*clients)
    return outcomes


def test_nothing_leaks_and_nobody_hangs() -> None:
    with running_server("--num-kv-blocks", "600", "--max-num-seqs", "32", "--no-access-log", *FACTORY) as server:
        outcomes = asyncio.run(_storm(server))
        gauges = server.wait_until_idle(timeout_s=30)
        print(f"\n{NUM_CLIENTS} clients, {DURATION_S:g} s, {outcomes.total()} requests: {dict(outcomes.most_common())}")
        print({name: value for name, value in gauges.items() if name.startswith(("num_", "kv_", "queue_", "engine_"))})
        for kind in ("finished", "bad, refused", "leave", "leave early", "half a body"):
            assert outcomes[kind] > 10, outcomes
        assert outcomes["error 503"] + outcomes["error in stream"] == 0, "requests go on in the next engine"
        assert gauges["engine_restarts_total"] == 1
        answer = httpx.post(
            f"{server.url}/v1/completions", json={"prompt": "Hi", "max_tokens": 4, "ignore_eos": True}, timeout=60
        )
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert server.terminate() == 0
        assert not [line for line in server.log if "Traceback" in line or "disagree" in line], server.log
