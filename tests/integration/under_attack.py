"""A server under attack, and what others feel of it: the harness of the attack tests.

    with attacked_server() as server:
        with unharmed(server):
            ...                      # the attack: a few seconds, cheap for this side

A process of its own, which the attacker cannot slow down, asks /health all the time, follows another user's stream and
looks at the memory of the server's processes. Afterwards `unharmed` asserts that /health answered in time, that the
stream never paused for long, that the event loop never stood still, that memory stayed bounded, and that the server
serves.

Time in which the system ran something else (the attacker's own processes, too) is taken off: the server's and the
observer's wait for a processor, as Linux counts it. A slow machine, or one that is shared with others, is allowed more
time by as much as it takes longer for a known piece of work; $HEADWAY_ATTACK_SLACK says how much more instead. Modules
that use this may try again: harm is there each time, a slow moment is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import msgspec

from tests.integration.server_process import ServerProcess, running_server

if TYPE_CHECKING:
    from headway.engine.llm_engine import LLMEngine

REPOSITORY = Path(__file__).parents[2]
FACTORY = f"{__name__}:create_engine"
STEP_S = 0.01
USUAL_WORK_S = 0.02
HEALTH_P99_S = 0.1
LONGEST_PAUSE_S = 1.0
MAX_GROWTH_BYTES = 128 * 2**20
"""Of each process's memory, over what it took when the attack began."""
PROBE_EVERY_S = 0.02
MIN_PROBES = 20
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
VICTIM = {"prompt": "Hi", "max_tokens": 4000, "stream": True, "ignore_eos": True}


def create_engine(options: dict[str, Any]) -> LLMEngine:
    """An engine without a model whose steps take a while, so that streams go on without taking a core."""
    from headway.rpc import engine_without_model  # torch; the observer needs none of it

    return engine_without_model.create_engine({"step_s": STEP_S, **options})


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


@contextlib.contextmanager
def attacked_server(
    *arguments: str, with_model: bool = False, max_open_files: int | None = None
) -> Iterator[ServerProcess]:
    """A server with options; without the model where it does not matter, which is cheaper."""
    engine = () if with_model else ("--engine-factory", FACTORY)
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    with running_server(
        *("--no-access-log", *engine, *arguments),
        environment={"PYTHONPATH": path},
        max_open_files=max_open_files,
    ) as server:
        yield server


@contextlib.contextmanager
def unharmed(
    server: ServerProcess,
    *,
    key: str | None = None,
    max_growth_bytes: int = MAX_GROWTH_BYTES,
    health_p99_s: float = HEALTH_P99_S,
    longest_pause_s: float = LONGEST_PAUSE_S,
) -> Iterator[Felt]:
    """Assert that what happens inside harms nobody else. What was felt is filled in at the end; `key` is an API key."""
    felt = Felt()
    stalls_before = server.gauges(_authorization(key))["event_loop_stalls_total"]
    with _observer(server, key) as observer:
        yield felt
        found = msgspec.json.decode(observer.communicate(timeout=30)[0], type=Felt)
    for name in felt.__struct_fields__:
        setattr(felt, name, getattr(found, name))
    print(f"\n{felt}")
    assert len(felt.health_s) >= MIN_PROBES and not felt.health_failures, felt.health_failures
    assert not felt.stream_failures, felt.stream_failures
    slack = float(os.environ.get("HEADWAY_ATTACK_SLACK") or max(1.0, work_s() / USUAL_WORK_S))
    assert felt.health_p99_s <= health_p99_s * slack, str(felt)
    assert felt.longest_pause_s <= longest_pause_s * slack, str(felt)
    assert max(felt.growth_bytes.values()) <= max_growth_bytes, str(felt)
    assert_serves(server, key=key)
    gauges = server.gauges(_authorization(key))
    assert gauges["front_end_restarts_total"] == 0
    assert gauges["event_loop_stalls_total"] == stalls_before, "\n".join(server.log[-40:])


def assert_serves(server: ServerProcess, *, key: str | None = None) -> None:
    """The server completes a request, and then has nothing left to do."""
    headers = _authorization(key)
    body = {"prompt": "Hi", "max_tokens": 4, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=30)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4, answer.text
    server.wait_until_idle(headers, timeout_s=15)


def connected(server: ServerProcess, *, timeout_s: float = 5.0) -> socket.socket:
    """A bare connection to the server."""
    parts = urlsplit(server.url)
    assert parts.hostname is not None and parts.port is not None
    return socket.create_connection((parts.hostname, parts.port), timeout=timeout_s)


def flood(connection: socket.socket, piece: bytes, *, seconds: float, max_bytes: int = 2**30) -> tuple[int, bool]:
    """Send a piece over and over, until the server closes the connection, the time is up or enough was sent.

    Returns how many bytes the server's side took, and whether it closed the connection.
    """
    until_s = time.monotonic() + seconds
    num_sent = 0
    connection.settimeout(0.1)
    while time.monotonic() < until_s and num_sent < max_bytes:
        try:
            num_sent += connection.send(piece)
        except TimeoutError:
            continue
        except OSError:
            return num_sent, True
    return num_sent, False


def is_closed(connection: socket.socket, *, within_s: float) -> bool:
    """Read what comes until the other side closes; whether it did in time."""
    until_s = time.monotonic() + within_s
    while (left_s := until_s - time.monotonic()) > 0:
        connection.settimeout(left_s)
        try:
            if not connection.recv(65536):
                return True
        except TimeoutError:
            return False
        except OSError:
            return True
    return False


def _authorization(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


@contextlib.contextmanager
def _observer(server: ServerProcess, key: str | None) -> Iterator[subprocess.Popen[str]]:
    """The observing process, from the moment on when it has seen the server at rest. It ends when its stdin does."""
    task = {
        "url": server.url,
        "headers": _authorization(key),
        "pids": {"front end": server.front_end_pid, "engine": server.engine_pid},
    }
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, json.dumps(task)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", "the observer did not start"
        yield process
    finally:
        process.kill()
        process.wait()


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


def work_s() -> float:
    """How long a known piece of work takes at the moment."""
    times_s = []
    for _ in range(3):
        started_s = time.perf_counter()
        sum(number * number for number in range(130_000))
        times_s.append(time.perf_counter() - started_s)
    return min(times_s)


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
