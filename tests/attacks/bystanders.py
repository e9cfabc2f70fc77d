"""What others feel of an attack: 20 ordinary clients that stream, and a prober of /health, in a process of their own.

The process answers each line on its stdin with what was felt since the line before, as JSON. Every ordinary request is
the same little work, so that its time in one phase can be compared with that in another.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Iterator, Mapping
from urllib.parse import urlsplit

import msgspec

from tests.integration.attack_observer import beside, waited_s

NUM_CLIENTS = 20
PROBE_EVERY_S = 0.02
MAX_THINK_S = 0.2
PATIENCE_S = 120.0
ORDINARY = {"prompt": "Tell me about trains, please.", "max_tokens": 24, "stream": True, "ignore_eos": True}


class Phase(msgspec.Struct):
    """Times in seconds."""

    health_s: list[float] = []
    ordinary_s: list[float] = []
    failures: list[str] = []
    """What was neither an answer nor healthy."""


def percentile(times_s: list[float], share: float) -> float:
    """The nearest-rank percentile; of nothing, infinity: an answer never came."""
    return sorted(times_s)[int(share * (len(times_s) - 1))] if times_s else float("inf")


class Bystanders:
    """The attacker's end of the process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def phase(self) -> Phase:
        """What was felt since the call before."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._process.stdout.readline(), type=Phase)


@contextlib.contextmanager
def bystanders(url: str, *, front_end_pid: int | None = None) -> Iterator[Bystanders]:
    """They begin at once. With the front end's process id, time in which it waits for a processor is taken off."""
    with beside(__name__, {"url": url, "pid": front_end_pid}) as process:
        yield Bystanders(process)


class _Watcher:
    def __init__(self, url: str, pid: int | None) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname, parts.port
        self._pids = () if pid is None else (pid, os.getpid())
        self._phase = Phase()

    async def run(self) -> None:
        """Until stdin ends."""
        working = [asyncio.create_task(self._client(number)) for number in range(NUM_CLIENTS)]
        working.append(asyncio.create_task(self._prober()))
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, sys.stdin.readline):
            done, self._phase = self._phase, Phase()
            print(msgspec.json.encode(done).decode(), flush=True)
        for task in working:
            task.cancel()

    async def _client(self, number: int) -> None:
        rng = random.Random(number)
        body = json.dumps({**ORDINARY, "seed": number}).encode()
        request = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
            f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode() + body
        while True:
            begun_s = self._now_s()
            await self._measured(self._answer(request, b"data: [DONE]"), begun_s, "an ordinary request", ordinary=True)
            await asyncio.sleep(rng.uniform(0, MAX_THINK_S))

    async def _prober(self) -> None:
        request = f"GET /health HTTP/1.1\r\nhost: {self._host}\r\nconnection: close\r\n\r\n".encode()
        while True:
            begun_s = self._now_s()
            await self._measured(self._answer(request, b'"status":"ok"'), begun_s, "/health", ordinary=False)
            await asyncio.sleep(PROBE_EVERY_S)

    async def _measured(self, answer: Awaitable[str], begun_s: float, what: str, *, ordinary: bool) -> None:
        try:
            problem = await asyncio.wait_for(answer, PATIENCE_S)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            problem = repr(error)
        took_s = max(self._now_s() - begun_s, 0.0)
        (self._phase.ordinary_s if ordinary else self._phase.health_s).append(took_s)
        if problem:
            self._phase.failures.append(f"{what}: {problem}")

    async def _answer(self, request: bytes, wanted: bytes) -> str:
        """What is wrong with the answer, if anything is."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(request)
            answer = await reader.read(-1)
        finally:
            writer.close()
        is_good = b" 200 " in answer[:20] and wanted in answer and b'"error"' not in answer
        return "" if is_good else answer[:300].decode(errors="replace")

    def _now_s(self) -> float:
        return time.perf_counter() - sum(map(waited_s, self._pids))


def main(task: Mapping[str, object]) -> None:
    """In the process itself."""
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_Watcher(**task).run())  # type: ignore[arg-type]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
