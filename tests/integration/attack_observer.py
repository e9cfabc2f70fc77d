"""What others feel of an attack, seen from a process of its own that imports next to nothing.

It asks /health all the time, follows another user's stream and looks at the memory of the server's processes, from when
it has seen the server at rest until its stdin ends; then it writes what it has felt to stdout, as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

REPOSITORY = Path(__file__).parents[2]
PROBE_EVERY_S = 0.02
MIN_PROBES = 20
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
VICTIM = {"prompt": "Hi", "max_tokens": 4000, "stream": True, "ignore_eos": True}


@contextlib.contextmanager
def beside(module: str, task: Mapping[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """A process of a module of these tests, which finds its task in its arguments and talks by stdin and stdout."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, json.dumps(task)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Felt(msgspec.Struct):
    """What others noticed of an attack."""

    health_s: list[float] = []
    """How long /health took, one by one."""
    health_failures: list[str] = []
    longest_pause_s: float = 0.0
    """Between two events of the other user's stream."""
    stream_failures: list[str] = []
    growth_bytes: dict[str, int] = {}
    """Process → most memory it took beyond what it had at first."""

    @property
    def health_p99_s(self) -> float:
        return sorted(self.health_s)[int(0.99 * (len(self.health_s) - 1))]

    def __str__(self) -> str:
        growth = ", ".join(f"{name} +{size / 2**20:.0f} MiB" for name, size in self.growth_bytes.items())
        return (
            f"/health P99 {self.health_p99_s * 1e3:.0f} ms, worst {max(self.health_s) * 1e3:.0f} ms of "
            f"{len(self.health_s)}; longest pause {self.longest_pause_s * 1e3:.0f} ms; {growth}"
        )


class _Observer:
    """Runs in its own process."""

    def __init__(self, url: str, headers: Mapping[str, str], pids: Mapping[str, int]) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname, parts.port
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._pids = pids
        self._at_first = {name: memory_bytes(pid) for name, pid in pids.items()}
        self._is_over = False
        self.felt = Felt(growth_bytes=dict.fromkeys(pids, 0))

    async def run(self) -> Felt:
        loop = asyncio.get_running_loop()
        stream_begun = asyncio.Event()
        stream = asyncio.create_task(self._follow_stream(stream_begun))
        await asyncio.wait_for(stream_begun.wait(), 60)
        probes = asyncio.create_task(self._probe_health())
        memory = asyncio.create_task(self._watch_memory())
        while len(self.felt.health_s) < MIN_PROBES:
            await asyncio.sleep(PROBE_EVERY_S)
        self.felt.health_s.clear()
        self.felt.longest_pause_s = 0.0
        self._at_first = {name: memory_bytes(pid) for name, pid in self._pids.items()}
        self.felt.growth_bytes = dict.fromkeys(self._pids, 0)
        print("ready", flush=True)
        await loop.run_in_executor(None, sys.stdin.read)
        while len(self.felt.health_s) < MIN_PROBES:  # an attack that was over at once
            await asyncio.sleep(PROBE_EVERY_S)
        self._is_over = True
        await asyncio.gather(probes, memory)
        stream.cancel()
        return self.felt

    async def _probe_health(self) -> None:
        """On one connection that stays open: whether there is room for new ones is another question."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        while not self._is_over:
            started_s = self._now_s("front end")
            writer.write(f"GET /health HTTP/1.1\r\nhost: {self._host}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            body = await reader.readexactly(length)
            self.felt.health_s.append(max(self._now_s("front end") - started_s, 0.0))
            if b" 200 " not in head.split(b"\r\n")[0]:
                self.felt.health_failures.append(body.decode())
            await asyncio.sleep(PROBE_EVERY_S)
        writer.close()

    async def _follow_stream(self, begun: asyncio.Event) -> None:
        """Another user's answer; a new one when it ends. What passes between two answers is a pause too."""
        body = json.dumps(VICTIM).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
            f"connection: close\r\n{self._headers}content-length: {len(body)}\r\n\r\n"
        )
        last_s = self._now_s("front end", "engine")
        while True:
            reader, writer = await asyncio.open_connection(self._host, self._port)
            writer.write(head.encode() + body)
            async for line in reader:
                if (line.startswith(b"HTTP/1.1") and b" 200 " not in line) or b'"error"' in line:
                    self.felt.stream_failures.append(line.decode())
                if line.startswith(b"data:"):
                    now_s = self._now_s("front end", "engine")
                    if begun.is_set():
                        self.felt.longest_pause_s = max(self.felt.longest_pause_s, now_s - last_s)
                    last_s = now_s
                    begun.set()
            writer.close()

    def _now_s(self, *names: str) -> float:
        """A clock that stands still while one of these processes, or this one, waits for a processor."""
        return time.perf_counter() - sum(waited_s(pid) for pid in (os.getpid(), *(self._pids[name] for name in names)))

    async def _watch_memory(self) -> None:
        while not self._is_over:
            for name, pid in self._pids.items():
                growth = memory_bytes(pid) - self._at_first[name]
                self.felt.growth_bytes[name] = max(self.felt.growth_bytes[name], growth)
            await asyncio.sleep(PROBE_EVERY_S)


def memory_bytes(pid: int) -> int:
    """What a process holds in memory; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return 0


def waited_s(pid: int) -> float:
    """How long a process's main thread was ready to run and did not; 0 where that is not counted, or it is gone."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) * 1e-9
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return 0.0


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(asyncio.run(_Observer(**json.loads(sys.argv[1])).run())).decode())
