"""Rolling restarts of two real servers behind a proxy while clients ask on: no request fails, no token is different.

    python -m tests.stress.rolling_restarts --minutes 10 --restarts 5

A rolling restart ends each server with SIGTERM and starts it again when it is gone; the other one serves meanwhile.
Exit status 1 if anything failed. What servers write goes to files in --logs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx

from tests.integration.prompts import PROMPTS
from tests.stress.small_proxy import SmallProxy
from tests.stress.steady_clients import Expected, ask, load

NUM_TOKENS = 48
START_UP_S = 180.0
STOP_S = 60.0


class RestartedServer:
    """A `headway serve` that keeps its port over restarts."""

    def __init__(self, name: str, arguments: Sequence[str], logs: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._name = name
        self._command = [sys.executable, "-m", "headway", "serve", "--port", str(self.port), *arguments]
        self._logs = logs
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Returns when it is ready."""
        with (
            (self._logs / f"{self._name}.log").open("ab") as log,
            (self._logs / f"{self._name}.jsonl").open("ab") as out,
        ):
            self._process = await asyncio.create_subprocess_exec(*self._command, stdout=out, stderr=log)
        async with asyncio.timeout(START_UP_S), httpx.AsyncClient(base_url=self.url) as http:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await http.get("/ready")).status_code == 200:
                        return
                if self._process.returncode is not None:
                    raise RuntimeError(f"{self._name} ended with status {self._process.returncode}; see {self._logs}")
                await asyncio.sleep(0.1)

    async def stop(self) -> float:
        """SIGTERM; how long it took to end. Raises if it ended in another way than it should."""
        assert self._process is not None
        signalled_s = time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(STOP_S):
            status = await self._process.wait()
        if status != 0:
            raise RuntimeError(f"{self._name} ended with status {status}; see {self._logs}")
        return time.monotonic() - signalled_s

    def kill(self) -> None:
        """If it is still there."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()


@contextlib.asynccontextmanager
async def two_servers(arguments: Sequence[str], logs: Path) -> AsyncIterator[list[RestartedServer]]:
    servers = [RestartedServer(name, arguments, logs) for name in ("first", "second")]
    try:
        await asyncio.gather(*(server.start() for server in servers))
        yield servers
    finally:
        for server in servers:
            server.kill()


async def undisturbed(url: str) -> Expected:
    """What each prompt gets when nothing else runs."""
    async with httpx.AsyncClient(base_url=url, timeout=120.0) as http:
        return {prompt: await ask(http, prompt, NUM_TOKENS, stream=False) for prompt in PROMPTS}


async def roll(servers: Sequence[RestartedServer], proxy: SmallProxy, say: str) -> None:
    """Restart one server after the other, each when the proxy sends requests to the one before again."""
    for server, upstream in zip(servers, proxy.upstreams, strict=True):
        stopped_s = await server.stop()
        await server.start()
        while not upstream.is_ready:
            await asyncio.sleep(0.05)
        print(f"{say}: port {server.port} ended after {stopped_s:.1f} s and is back", flush=True)


async def run(arguments: argparse.Namespace, logs: Path) -> bool:
    async with two_servers(arguments.server_options, logs) as servers:
        expected = await undisturbed(servers[0].url)
        async with SmallProxy([server.port for server in servers]) as proxy:
            begun_s, is_over = time.monotonic(), False
            loading = asyncio.create_task(
                load(
                    f"http://127.0.0.1:{proxy.port}",
                    expected,
                    num_clients=arguments.clients,
                    is_over=lambda: is_over,
                    seed=arguments.seed,
                )
            )
            try:
                for number in range(arguments.restarts):
                    at_s = 60.0 * arguments.minutes * (number + 0.5) / max(arguments.restarts, 1)
                    await asyncio.sleep(max(at_s - (time.monotonic() - begun_s), 0.0))
                    await roll(servers, proxy, f"restart {number + 1} of {arguments.restarts}")
                await asyncio.sleep(max(60.0 * arguments.minutes - (time.monotonic() - begun_s), 0.0))
            finally:
                is_over = True
                report = await loading
            shares = [f"{one.num_requests} on {one.port} ({one.num_reused} kept)" for one in proxy.upstreams]
            print(f"{report} in {time.monotonic() - begun_s:.0f} s; {', '.join(shares)}")
            for line in (*report.failures[:20], *report.differences[:20], *proxy.failures[:20]):
                print(f"  {line}")
    return report.is_good and not proxy.failures


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stress.rolling_restarts", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long clients ask; restarts may take longer")
    parser.add_argument("--restarts", type=int, default=5, help="rolling restarts, each of both servers")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, help="a folder for what servers write; default: a temporary one")
    parser.add_argument("server_options", nargs="*", help="options of headway serve, behind --")
    arguments = parser.parse_args(argv)
    logs = arguments.logs or Path(tempfile.mkdtemp(prefix="rolling-restarts-"))
    logs.mkdir(parents=True, exist_ok=True)
    return 0 if asyncio.run(run(arguments, logs)) else 1


if __name__ == "__main__":
    sys.exit(main())
